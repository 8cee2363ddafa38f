"Mixed and length-sorted feeding inside training: from options to the exact resume."
import json

import pytest

from llm_from_scratch import launch, training_loop
from llm_from_scratch.config import Config, build_config, load_preset, replace
from llm_from_scratch.env import Ranks, UserError, set_deterministic
from llm_from_scratch.launch import STOPPED, StopRequest
from llm_from_scratch.mixing import source_tokens
from llm_from_scratch.model import Transformer
from llm_from_scratch.training_loop import build_training, fit, prepare_data, resume

SMALL = {"model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 64}, "tokenizer": {"vocab_size": 300},
         "optim": {"kind": "adamw"}, "eval": {"every_steps": 100}, "checkpoint": {"every_steps": 100},
         "train": {"steps": 9, "seq_len": 32, "global_batch": 4, "micro_batch": 2, "dtype": "fp32"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"id": str(number), "source": ("web", "code")[number % 2], "text": f"{number} is a number. " * (3 + number % 9)}) for number in range(80)]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def restored():
    yield
    set_deterministic(False)


def configure(corpus, **data):
    return build_config(load_preset("tiny"), SMALL, {"data": {"path": [str(corpus)], "cache_dir": str(corpus.parent / "cache"), "val_fraction": 0.2, **data}})


def losses_of(config, run_dir, resume_from=None, stop_after=None):
    training, stop, losses = build_training(config, prepare_data(config), Ranks()), StopRequest(), []
    if resume_from: resume(training, resume_from)
    def observe(step, **values):
        losses.append(values["loss"])
        if step == stop_after: stop.reason = "test"
    return fit(training, run_dir, observe, stop), losses, training


@pytest.mark.parametrize("data", [dict(mix={"web": 0.7, "code": 0.3}, mix_changes={3: {"code": 1.0}, 5: {"web": 0.5, "code": 0.5}}), dict(mix_changes={4: {"web": 1.0}}), dict(lengths=[16, 32, 64])])
@pytest.mark.parametrize("stop_after", [4])
def test_a_resumed_run_is_the_same_run(corpus, tmp_path, data, stop_after):
    config = configure(corpus, **data)
    _, undisturbed, _ = losses_of(config, tmp_path / "one")
    code, begun, _ = losses_of(config, tmp_path / "two", stop_after=stop_after - 1)
    checkpoint = max((tmp_path / "two" / "checkpoints").iterdir())
    _, rest, training = losses_of(config, tmp_path / "two", resume_from=checkpoint)
    assert code == STOPPED and len(begun) == stop_after and begun + rest == undisturbed
    if "mix_changes" in data: assert training.loader.feed.segment.begin == 4 * max(data["mix_changes"])


def test_the_gates_weights_are_followed(corpus, tmp_path):
    (tmp_path / "weights.json").write_text('{"web": 0.5}')
    data = prepare_data(configure(corpus))
    tokens = source_tokens(data.train)
    training = build_training(configure(corpus, source_weights=str(tmp_path / "weights.json")), data, Ranks())
    assert training.loader.feed.mixture.shares == {"x0.50": tokens["web"] / 2, "x1.00": tokens["code"]}
    assert build_training(configure(corpus), data, Ranks()).loader.state_dict()["rows"] == "packed"


def test_impossible_feeding_is_refused_before_the_first_step(corpus):
    data = prepare_data(configure(corpus))
    with pytest.raises(UserError, match="data.lengths 128 is above model.max_seq_len 64"): build_training(configure(corpus, lengths=[128]), data, Ranks())
    with pytest.raises(UserError, match="no source 'wbe'"): build_training(configure(corpus, mix={"wbe": 1.0}), data, Ranks())
    with pytest.raises(UserError, match="no file w.json"): build_training(configure(corpus, source_weights="w.json"), data, Ranks())


def test_weights_to_start_from_are_not_read_again_on_a_resume(corpus, monkeypatch):
    config = configure(corpus)
    data = prepare_data(config)
    monkeypatch.setattr(training_loop, "load_initial_weights", lambda name, model: pytest.fail("read again"))
    gone = replace(config, train={"init_from": "runs/gone"})
    build_training(gone, data, Ranks(), is_new=False)
    with pytest.raises(pytest.fail.Exception, match="read again"): build_training(gone, data, Ranks())


@pytest.mark.parametrize("theirs", [{"positions": "alibi"}, {"rope_layout": "interleaved"}, {"num_heads": 2}, {"num_kv_heads": 1}])
def test_weights_of_a_run_that_mean_something_else_are_refused(tmp_path, monkeypatch, theirs):
    place = tmp_path / "run/checkpoints/step_00000001"
    place.mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("")
    monkeypatch.setattr(launch, "weights_to_start_from", lambda name: place)
    monkeypatch.setattr(launch, "read_run_config", lambda folder: Config(model=theirs))
    [(key, value)] = theirs.items()
    with pytest.raises(UserError, match=f"model.{key} is .*, but the weights of .* have {value}; leave the key out"):
        launch.load_initial_weights(str(tmp_path / "run"), Transformer(Config().model.model_copy(update={"vocab_size": 32})))
