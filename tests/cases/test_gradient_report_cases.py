"A reported step is the step that it would have been, and the report says where what is not finite began."

import json

import pytest
import torch

from llm_from_scratch import train
from llm_from_scratch.config import ModelConfig, OptimConfig
from llm_from_scratch.dataloader import Batch
from llm_from_scratch.distributed import prepare
from llm_from_scratch.env import Ranks, set_deterministic
from llm_from_scratch.gradient_report import observed_step, report_gradients, tensor_facts
from llm_from_scratch.model import Transformer
from llm_from_scratch.optim import build_optimizer


@pytest.fixture(autouse=True)
def restored():
    yield
    set_deterministic(False)


def build(kind="adamw", **shape):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, max_seq_len=16, **shape))
    engine = prepare(model, build_optimizer(model, OptimConfig(kind=kind)), ranks=Ranks(), device=torch.device("cpu"), dtype=torch.float32)
    ids = torch.randint(0, 64, (4, 17))
    return engine, Batch(ids[:, :-1], ids[:, 1:], torch.arange(16).expand(4, 16), torch.zeros(4, 16, dtype=torch.long), torch.arange(4))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_reported_step_is_the_same_to_the_bit(kind):
    (one, batch), (other, _) = build(kind), build(kind)
    for _ in range(2):
        plain = one.train_step([batch])
        result, report = observed_step(other, other.train_step, [batch])
        assert (result.loss, result.grad_norm) == (plain.loss, plain.grad_norm)
    assert all(torch.equal(p, q) for p, q in zip(one.model.parameters(), other.model.parameters()))
    squares = sum(facts["gradient"]["norm"] ** 2 for facts in report["parameters"].values())
    assert squares**0.5 == pytest.approx(result.grad_norm, rel=1e-4)


def test_recomputed_blocks_are_counted_once():
    engine, batch = build()
    engine.model.recomputed = frozenset({0, 1})
    _, report = observed_step(engine, engine.train_step, [batch, batch])
    assert {facts["count"] for name, facts in report["activations"].items() if name.startswith("blocks")} == {4 * 16 * 32}


def test_hooks_are_gone_even_after_a_failure():
    engine, batch = build()
    with pytest.raises(IndexError):
        observed_step(engine, engine.train_step, [Batch(batch.inputs + 1000, *list(vars(batch).values())[1:])])
    assert "measure" not in vars(engine.clipper)
    assert not any(module._forward_hooks for module in engine.model.modules())


def test_facts_of_strange_tensors():
    assert tensor_facts(torch.full((3,), float("nan")))["not_finite"] == 3
    facts = tensor_facts(torch.tensor([1e-30, 1e30], dtype=torch.float32))
    assert facts["histogram"][0] == facts["histogram"][-1] == 1
    assert tensor_facts(torch.ones(5, dtype=torch.bfloat16))["norm"] == pytest.approx(5**0.5)


def test_nothing_changes_without_steps(tmp_path):
    engine, _ = build()
    report_gradients(engine, [], tmp_path, Ranks(), lambda: 1)
    assert "train_step" not in vars(engine)


@pytest.mark.slow
def test_a_run_with_reports_has_the_losses_of_one_without(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(30):
        (corpus / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    options = ["--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--tokenizer.vocab-size", "300", "--train.seq-len", "32", "--train.global-batch", "4",
               "--train.micro-batch", "4", "--train.num-threads", "1", "--train.steps", "4", "--train.deterministic", "True", "--log.tensorboard", "False", "--eval.num-completions", "0",
               "--eval.num-samples", "1", "--eval.sample-tokens", "8", "--data.path", str(corpus), "--data.cache-dir", str(tmp_path / "cache"), "--data.val-fraction", "0.2"]
    runs = {}
    for name, more in {"plain": ["--log.device-hz", "0"], "reported": ["--log.gradient-report-steps", "2", "--log.device-hz", "100", "--log.price-per-hour", "2"]}.items():
        assert train.main([*options, "--run-dir", str(tmp_path / name), *more]) == 0
        runs[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row["grad_norm"]) for row in runs["plain"]] == [(row["loss"], row["grad_norm"]) for row in runs["reported"]]
    folder = tmp_path / "reported" / "report" / "gradients"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000002.json", "step_00000002.png"]
    assert "Gradients, step_00000002" in (tmp_path / "reported" / "report" / "index.html").read_text()
    expected = {"samples_per_second", "data_wait_share", "mfu", "data_use", "cost_per_thousand_steps", "cpu_percent", "host_rss_bytes", "host_available_bytes", "disk_free_bytes"}
    assert expected <= set(runs["reported"][-1])
