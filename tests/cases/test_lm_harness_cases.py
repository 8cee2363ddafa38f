"What the evaluation harness asks, answered by a run; the harness's own command where it is installed."

import importlib.util
import json
import os
import subprocess
import sys
from collections import namedtuple
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llm_from_scratch.checkpointing import save_checkpoint
from llm_from_scratch.config import Config, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.lm_harness import HarnessAnswers, clip_ids, harness_model, read_generation_options, score_pairs, split_pair
from llm_from_scratch.model import Transformer
from llm_from_scratch.tokenizer import Tokenizer

Request = namedtuple("Request", "args")
ROOT = Path(__file__).parents[2]
TEXTS = [f"The answer to {n} plus {n} is {2 * n}.\n" for n in range(100)]


@pytest.fixture(scope="module", params=["rope", "alibi"])
def run_dir(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / request.param
    tokenizer = Tokenizer.train(TEXTS, vocab_size=300, out=folder / "tokenizer")
    shape = dict(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=32, init_std=0.2, positions=request.param)
    config = Config(model=shape, train=dict(seq_len=32), tokenizer=dict(vocab_size=300))
    (folder / "config.yaml").write_text(to_yaml(config))
    torch.manual_seed(0)
    model = Transformer(config.model.model_copy(update={"vocab_size": tokenizer.vocab_size}))
    save_checkpoint(folder / "checkpoints", {"model": model}, step=1, inputs={"tokenizer": tokenizer.fingerprint})
    return folder


@pytest.fixture(scope="module")
def answers(run_dir):
    return HarnessAnswers(str(run_dir), device="cpu")


@torch.inference_mode()
def by_hand(answers, ids, num_scored):
    rows = answers.run.model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[-num_scored:]
    return float(rows.gather(1, torch.tensor(ids[-num_scored:])[:, None]).sum()), rows.argmax(-1).tolist() == ids[-num_scored:]


def test_likelihoods_equal_single_unpadded_rows_in_the_order_of_the_questions(answers):
    pairs = [("The answer to", " 7 plus 7 is"), ("", "The"), ("The answer", " to 3"), ("a" * 8, "b")]
    found = answers.loglikelihood([Request(pair) for pair in pairs])
    for pair, (score, greedy) in zip(pairs, found):
        before, after = split_pair(answers.run.tokenizer, *pair)
        assert (score, greedy) == (pytest.approx(by_hand(answers, before + after, len(after))[0], abs=1e-4), by_hand(answers, before + after, len(after))[1])


def test_a_greedy_continuation_is_told_from_another(answers):
    text = answers.generate_until([Request(("The answer", {"max_gen_toks": 4}))])[0]
    before = answers.run.tokenizer.encode("The answer", bos=True)
    best = int(answers.run.model(torch.tensor([before]))[0, -1].argmax())
    assert [greedy for _, greedy in score_pairs(answers.run.model, [(before, [best]), (before, [best - 1])], 32)] == [True, False]
    assert text


@pytest.mark.parametrize("border", range(1, 20))
def test_all_of_a_continuation_is_scored_wherever_the_border_lies(answers, border):
    text, tokenizer = TEXTS[42], answers.run.tokenizer
    before, after = split_pair(tokenizer, text[:border], text[border:])
    assert before + after == tokenizer.encode(text, bos=True)
    assert tokenizer.decode(after, inside=True).endswith(text[border:])


def test_beyond_the_window_the_begin_is_lost_and_the_bos_stays(answers):
    tokenizer = answers.run.tokenizer
    long = "".join(TEXTS[:20])
    before, after = split_pair(tokenizer, long, "The answer")
    ids = clip_ids((before + after)[:-1], 32) + after[-1:]
    assert ids[0] == tokenizer.bos_id and len(ids) == 33
    assert answers.loglikelihood([Request((long, "The answer"))])[0][0] == pytest.approx(by_hand(answers, ids, len(after))[0], abs=1e-4)
    with pytest.raises(UserError, match="continuation 0 has .* the model's window 32"):
        answers.loglikelihood([Request(("a", long))])


def test_a_whole_text_counts_each_token_once(answers):
    text, tokenizer = "".join(TEXTS[:9]), answers.run.tokenizer
    ids = tokenizer.encode(text)
    windows = [[tokenizer.bos_id, *ids[at : at + 32]] for at in range(0, len(ids), 32)]
    expected = sum(by_hand(answers, window, len(window) - 1)[0] for window in windows)
    assert answers.loglikelihood_rolling([Request((text,)), Request(("",))]) == [pytest.approx(expected, abs=1e-3), 0.0]


def test_writing_ends_before_the_first_stop(answers):
    free = answers.generate_until([Request(("The answer", {"max_gen_toks": 12}))])[0]
    stops = [free[6:8], free[3:5]]
    cut = min(free.find(stop) for stop in stops)
    assert answers.generate_until([Request(("The answer", {"max_gen_toks": 12, "until": stops}))]) == [free[:cut]]
    assert len(answers.generate_until([Request(("The answer " * 50, {"max_gen_toks": 1000}))])) == 1


def test_sampling_is_asked_for_and_unknown_options_are_refused():
    assert read_generation_options({"do_sample": True})[2].temperature == 1.0
    assert read_generation_options({"do_sample": False, "temperature": 0.5, "until": ["a"]})[2].temperature == 0.0
    with pytest.raises(UserError, match="num_beams"):
        read_generation_options({"num_beams": 2})


def test_model_arguments_are_checked(run_dir, tmp_path):
    assert HarnessAnswers(str(run_dir), device="cpu", batch_size=1, max_batch_size=None, max_length=16).max_length == 16
    with pytest.raises(UserError, match="--model_args has pretrained"):
        HarnessAnswers(str(run_dir), pretrained="x")
    with pytest.raises(UserError, match="is not a run"):
        HarnessAnswers(str(tmp_path))


def test_the_results_say_what_was_measured(answers, run_dir):
    facts, again = answers.get_model_info(), HarnessAnswers(str(run_dir / "checkpoints" / "step_00000001"), device="cpu", max_length=8).get_model_info()
    assert json.loads(json.dumps(facts)) == facts and facts["window"] == 32
    assert {"checkpoint", "checkpoint_hash", "tokenizer_fingerprint", "dtype", "device"} <= facts.keys()
    assert {name for name in facts if facts[name] != again[name]} == {"run", "window"}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="the evaluation harness is not installed")
def test_the_harness_runs_a_local_task_without_a_network(run_dir, tmp_path, answers):
    rows = [dict(a=n, choices=[f"{2 * n}.", f"{n + 1}."], label=0) for n in range(10, 22)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}}, "test_split": "test", "doc_to_text": "The answer to {{a}} plus {{a}} is"}
    kinds = {
        "sums": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "label", "metric_list": [{"metric": "acc"}]},
        "rolling": {"output_type": "loglikelihood_rolling", "doc_to_target": "The answer to {{a}} plus {{a}} is", "doc_to_text": "", "metric_list": [{"metric": "bits_per_byte"}]},
        "writing": {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}, "metric_list": [{"metric": "exact_match"}]},
    }
    for name, kind in kinds.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **kind}))
    arguments = ["--model", "llm_from_scratch", "--model_args", f"run={run_dir}", "--tasks", ",".join(kinds), "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    environment = os.environ | dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    result = subprocess.run([sys.executable, "-m", "llm_from_scratch.lm_harness", *arguments], env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    written = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    found = written["results"]
    assert written["config"]["checkpoint_hash"] == answers.get_model_info()["checkpoint_hash"]
    choose = [answers.loglikelihood([Request((f"The answer to {row['a']} plus {row['a']} is", f" {choice}")) for choice in row["choices"]]) for row in rows]
    assert found["sums"]["acc,none"] == pytest.approx(sum(one[0] >= other[0] for one, other in choose) / len(rows))
    assert found["rolling"]["bits_per_byte,none"] > 0 and 0 <= found["writing"]["exact_match,none"] <= 1


def entry_point():
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    name, _, value = settings["DEFAULT"]["lm_eval_model"].partition(" = ")
    return EntryPoint(name, value, "lm_eval.models")


def test_the_entry_point_loads_a_model_of_the_harness(monkeypatch):
    base = type("LM", (), {})
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LM=base))
    harness_model.cache_clear()
    try:
        entry = entry_point()
        found = entry.load()
        assert entry.name == "llm_from_scratch" and issubclass(found, HarnessAnswers) and issubclass(found, base)
        assert f"{found.__module__}:{found.__name__}" == entry.value and entry.load() is found
    finally:
        harness_model.cache_clear()
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        EntryPoint("x", "llm_from_scratch.lm_harness:Other", "lm_eval.models").load()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="the evaluation harness is not installed")
def test_the_harness_own_command_runs_the_model_of_the_entry_point(run_dir, tmp_path):
    (tmp_path / "sums.jsonl").write_text(json.dumps(dict(a=7, choices=["14.", "8."], label=0)) + "\n")
    task = {"task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}}, "test_split": "test", "output_type": "multiple_choice",
            "doc_to_text": "The answer to {{a}} plus {{a}} is", "doc_to_choice": "{{choices}}", "doc_to_target": "label", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    entry = entry_point()
    # what a harness does that looks for plugins; 0.4.13 does not look, but takes what is put there
    program = f"""import lm_eval.models; from importlib.metadata import EntryPoint; from lm_eval.api.registry import model_registry
if "llm_from_scratch" not in model_registry: model_registry.register("llm_from_scratch", target={entry!r})
from lm_eval.__main__ import cli_evaluate; cli_evaluate()"""
    arguments = ["--model", "llm_from_scratch", "--model_args", f"run={run_dir}", "--tasks", "sums", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    environment = os.environ | dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    result = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]["sums"]["acc,none"] in (0.0, 1.0)


def test_without_the_harness_the_extra_is_named(monkeypatch):
    from llm_from_scratch.lm_harness import main

    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match=r"llm_from_scratch\[lm-eval\]"):
        main(["--help"])
