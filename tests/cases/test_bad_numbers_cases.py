"Local SGD, parameter server and replica groups are handed counts and rates that make no sense: one line each, before anything waits."

import json
import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llm_from_scratch.async_training import LocalSGD, ParameterServer, StalenessGate, Worker
from llm_from_scratch.config import OptimConfig, build_config
from llm_from_scratch.deepspeed_engine import DECIDED, agree_settings, check_offload, check_pieces, read_settings, zero_settings
from llm_from_scratch.distributed import prepare
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.launch import idle_options
from llm_from_scratch.optim import build_optimizer


def make_engine():
    model = torch.nn.Linear(2, 2)
    return prepare(model, build_optimizer(model, OptimConfig(kind="adamw")), ranks=Ranks(), device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("every_steps", [0, -1, 2.5, math.nan, math.inf])
def test_ranks_that_never_meet_are_refused(every_steps):
    with pytest.raises(UserError, match="at least 1 step, a whole number"):
        LocalSGD(make_engine(), None, every_steps=every_steps)


@pytest.mark.parametrize(("rate", "momentum"), [(0, 0), (-1, 0), (math.nan, 0), (math.inf, 0), (0.7, 1), (0.7, -0.1), (0.7, math.nan)])
def test_an_outer_step_that_leads_nowhere_is_refused(rate, momentum):
    with pytest.raises(UserError, match="outer_momentum"):
        LocalSGD(make_engine(), None, outer_lr=rate, outer_momentum=momentum)


@pytest.mark.parametrize("bound", [-1, math.nan])
def test_a_bound_that_nobody_can_keep_is_refused(bound):
    with pytest.raises(UserError, match="use 0 or more"):
        StalenessGate([1, 2], bound)


def test_an_engine_that_talks_by_itself_is_refused():
    engine = make_engine()
    engine.wrapped = torch.nn.Sequential(engine.model)  # as DDP stands around it
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    for make in (LocalSGD, ParameterServer, Worker):
        with pytest.raises(UserError, match=r"prepare one with ranks=Ranks\(\)"):
            make(engine, group)


def test_server_and_workers_have_their_ranks():
    first, second = SimpleNamespace(rank=lambda: 0, size=lambda: 2), SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    with pytest.raises(UserError, match="ranks 1 and up"):
        Worker(make_engine(), first)
    with pytest.raises(UserError, match="rank 0 of its group"):
        ParameterServer(make_engine(), second)


OURS = zero_settings(build_config({"train": dict(global_batch=8, micro_batch=2), "optim": dict(kind="adamw"), "engine": dict(kind="deepspeed")}), 2, 1000)


@pytest.mark.parametrize(("text", "words"), [
    ("[]", "holds a list"), ("null", "holds a NoneType"), ('"stage 2"', "holds a str"), ("5", "holds a int"), ('{"gradient_allreduce_op": "sum"}', "mean over tokens"),
    ('{"zero_optimization": 3}', "says zero_optimization 3; it is a section"), ('{"bf16": true}', "says bf16 True; it is a section"), ('{"fp16": "on"}', "says fp16 on; it is a section"),
    ('{"zero_optimization": {"stage": 5}}', "stage 5, the run's engine.zero_stage makes it 2"), ('{"zero_optimization": {"stage": "2"}}', "stage '2', the run's engine.zero_stage makes it 2"),
    ('{"zero_optimization": {"cpu_offload": true}}', "the run's engine.offload"), ('{"torch_autocast": {"enabled": true}}', "the run's train.dtype"),
    ('{"gradient_clipping": NaN}', "the run's optim.max_grad_norm makes it 1.0"), ('{"gradient_clipping": 0}', "makes it 1.0"), ('{"sequence_parallel_size": 2, "data_parallel_size": 1}', "sequence_parallel_size 2; leave it out"), ('{"wall_clock_breakdown": true}', "which is not called here"), ('{"flops_profiler": {"enabled": true}}', "which is not called here"),
    ('{"tensor_parallel": {"autotp_size": 2}}', "autotp_size 2; leave it out"), ('{"train_batch_size": -8}', "makes it 8"),
])
def test_a_file_for_deepspeed_that_contradicts_the_run_is_refused(text, words):
    with pytest.raises(UserError) as refusal:
        agree_settings(OURS, json.loads(text), where="ds.json", decided=DECIDED)
    assert words in str(refusal.value) and str(refusal.value).startswith("ds.json ")


@pytest.mark.parametrize("text", ["{}", '{"zero_optimization": null}', '{"zero_optimization": "auto"}', '{"zero_optimization": {"stage": null}}', '{"gradient_clipping": 1}', '{"fp16": {"enabled": false}}'])
def test_a_file_for_deepspeed_that_leaves_all_to_the_run_changes_nothing(text):
    assert agree_settings(OURS, json.loads(text), where="ds.json") == OURS


@pytest.mark.parametrize(("text", "words"), [
    ('{"zero_optimisation": {"stage": 2}}', "'zero_optimisation', which DeepSpeed does not read; did you mean 'zero_optimization'?"),
    ('{"gradient_cliping": 1.0}', "did you mean 'gradient_clipping'?"), ('{"stage": 3}', "has 'stage', which"), ('{"train_batchsize": "auto"}', "did you mean 'train_batch_size'?"),
    ('{"aio": {}, "Aio": {}}', "has 'Aio', which"), ('{"bfloat16": {"enabled": true}}', "has 'bfloat16', which"),  # the run's own bf16 section hides it
])
def test_a_key_that_deepspeed_does_not_read_is_refused(tmp_path, text, words):
    pytest.importorskip("deepspeed")
    (tmp_path / "ds.json").write_text(text)
    config = build_config({"optim": dict(kind="adamw"), "engine": dict(kind="deepspeed", deepspeed_config=str(tmp_path / "ds.json"))})
    with pytest.raises(UserError) as refusal: read_settings(config, 1)
    assert words in str(refusal.value) and str(refusal.value).startswith(f"{tmp_path / 'ds.json'} has ")


READ = dict.fromkeys(["activation_checkpointing", "aio", "autotuning", "checkpoint", "comms_logger", "compile", "csv_monitor", "data_efficiency", "data_types", "flops_profiler",
                      "hybrid_engine", "pipeline", "tensorboard", "timers", "wandb"], {}) | dict.fromkeys(
    ["communication_data_type", "data_parallel_size", "dataloader_drop_last", "disable_allgather", "dump_state", "gradient_predivide_factor", "memory_breakdown", "prescale_gradients",
     "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print", "vocabulary_size", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"], None)


def test_what_deepspeed_reads_is_not_refused(tmp_path):
    pytest.importorskip("deepspeed")
    (tmp_path / "ds.json").write_text(json.dumps(READ))
    read_settings(build_config({"optim": dict(kind="adamw"), "engine": dict(kind="deepspeed", deepspeed_config=str(tmp_path / "ds.json"))}), 1)


@pytest.mark.parametrize(("saved", "engine", "words"), [
    ({"optimizer": {}}, dict(kind="deepspeed"), "is of engine.kind ddp, this run's is deepspeed; take the former, or start a new run from its weights with --train.init-from"),
    ({"cut": {"stage": 3, "ranks": 2}}, dict(kind="ddp"), "is of ZeRO-3, this run's engine spreads nothing; set engine.kind deepspeed and engine.zero_stage 3, or start a new run"),
    ({"cut": {"stage": 2, "ranks": 2}}, dict(kind="deepspeed", zero_stage=0), "engine spreads nothing"), ({"cut": {"stage": 2, "ranks": 2}}, dict(kind="deepspeed", zero_stage=1), "this run of ZeRO-1"),
    ({"cut": {"stage": 3, "ranks": 1, "nvme": True}}, dict(kind="deepspeed", zero_stage=3, offload="cpu"), "moments lie on NVMe, this run's in memory; set engine.offload nvme, or start a new run"),
    ({"cut": {"stage": 3, "ranks": 1}}, dict(kind="deepspeed", zero_stage=3, offload="nvme", nvme_path="/nvme"), "moments lie in memory, this run's on NVMe; set engine.offload none or cpu, or start a new run"),
    ({"optimizer": {}}, dict(kind="ddp"), None), ({"cut": {"stage": 3, "ranks": 1, "nvme": True}}, dict(kind="deepspeed", zero_stage=3, offload="nvme", nvme_path="/nvme"), None), ({"optimizer": {}}, dict(kind="deepspeed", zero_stage=0), None), (None, dict(kind="deepspeed"), None),
])
def test_a_checkpoint_of_another_engine_is_refused_before_anything_is_built(tmp_path, saved, engine, words):
    (tmp_path / "train_state.json").write_text(json.dumps({"entries": {"engine": {"value": saved}} if saved else {}}))
    config = build_config({"optim": dict(kind="adamw"), "engine": engine})
    if words is None:
        assert check_pieces(tmp_path, config, Ranks()) == []
        return
    with pytest.raises(UserError) as refusal: check_pieces(tmp_path, config, Ranks())
    assert words in str(refusal.value)


@pytest.mark.parametrize(("folder", "words"), [("null", "says zero_optimization.offload_param.device 'nvme'; give it an nvme_path"), ('"/dev/null"', "NVMe folder /dev/null can't be used")])
def test_weights_on_a_disk_that_is_none_are_refused(tmp_path, folder, words):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": %s}}}' % folder)
    config = build_config({"optim": dict(kind="adamw"), "engine": dict(kind="deepspeed", zero_stage=3, deepspeed_config=str(tmp_path / "ds.json"))})
    with pytest.raises(UserError) as refusal: check_offload(config)
    assert words in str(refusal.value)


def test_options_of_another_engine_are_told():
    told = idle_options(build_config({"engine": dict(zero_stage=3, nvme_path="/nvme")}))
    assert told == ["engine.nvme_path does nothing while engine.offload is none", "engine.zero_stage does nothing while engine.kind is ddp"]
