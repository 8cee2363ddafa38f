"Scores of code and their signatures (EVAL-8), the estimator of pass@k, task files, references that pass, and the commands."

import gzip
import json
import math
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from llm_from_scratch.checkpointing import load_run, save_checkpoint
from llm_from_scratch.code_eval import (
    CodeTask,
    adds_code,
    bleu,
    check_completions,
    pass_at_k,
    program_of,
    read_tasks,
    repetition_rate,
    sample_completions,
    score_completions,
)
from llm_from_scratch.config import Config, ModelConfig, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.eval import is_python, main
from llm_from_scratch.evaluation_cards import DIFFERS, card_hash, card_line, read_card
from llm_from_scratch.model import Transformer
from llm_from_scratch.sandbox import Limits, Outcome, run_limited
from llm_from_scratch.spelling import Probe, probe_spelling, read_probes, spells
from llm_from_scratch.tokenizer import Tokenizer

DATA = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).resolve().parents[2] / ".." / "shared" / "data")) / "codegen"


def isolation_works() -> bool:
    try:
        return run_limited("", "").passed
    except UserError:
        return False


ISOLATE = isolation_works()


def test_eval_8_a_corpus_of_two_words_gets_0_with_a_warning():
    pytest.importorskip("sacrebleu")
    found = bleu(["left right"], ["left right"])
    assert found["score"] == 0 and "3 words in a row" in found["warning"]
    assert bleu(["left right"], ["left right"], sentence=True)["score"] == pytest.approx(100)
    assert bleu(["a b c d e"], ["a b c d e"])["warning"] == ""


def test_eval_8_no_overlap_gets_0_and_brevity_alone_its_share():
    pytest.importorskip("sacrebleu")
    assert bleu(["yes"], ["no"], sentence=True)["score"] == 0
    assert bleu(["a b c d"], ["a b c d e f g h"])["score"] == pytest.approx(100 * math.exp(1 - 8 / 4), abs=1e-3)


def test_eval_8_the_tokenizer_changes_the_score_and_the_signature_says_which():
    pytest.importorskip("sacrebleu")
    texts = ["天气真好我们走"], ["今天天气真好我们走"]
    plain, chinese = bleu(*texts), bleu(*texts, tokenize="zh")
    assert (plain["score"], round(chinese["score"], 2)) == (0, 75.15)
    assert "tok:13a|smooth:exp|version:" in plain["signature"] and "tok:zh|smooth:exp|version:" in chinese["signature"]


def test_eval_8_a_corpus_is_pooled_and_not_averaged():
    pytest.importorskip("sacrebleu")
    texts = ["a b c d e", "x y z w v u t s"], ["a b c d f", "x y z w v u t s"]
    each = [bleu([hypothesis], [reference])["score"] for hypothesis, reference in zip(*texts)]
    assert bleu(*texts)["score"] != pytest.approx(sum(each) / 2, abs=0.5)
    with pytest.raises(UserError, match="2 texts with 1 references"):
        bleu(texts[0], ["a"])


@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_pass_at_k_is_right_on_average(k):
    rate, n = 0.3, 10
    chance = [math.comb(n, c) * rate**c * (1 - rate) ** (n - c) for c in range(n + 1)]
    assert sum(p * pass_at_k(n, c, k) for c, p in enumerate(chance)) == pytest.approx(1 - (1 - rate) ** k)


def test_pass_at_k_counts_draws():
    chance = random.Random(0)
    draws = [any(chance.sample([True] * 3 + [False] * 7, 4)) for _ in range(4000)]
    assert pass_at_k(10, 3, 4) == pytest.approx(sum(draws) / len(draws), abs=0.03)
    for k in (0, 11):
        with pytest.raises(UserError, match=f"pass@{k}"):
            pass_at_k(10, 3, k)


def test_repetition_is_the_share_of_what_came_before():
    assert repetition_rate(["a b c d a b c d"]) == pytest.approx(1 - 4 / 5)
    assert repetition_rate(["x = 1\n", ""]) == 0
    assert repetition_rate(["f(x)" * 50]) > 0.95


def test_shipped_tasks_are_functions_with_docstrings_and_tests():
    tasks = read_tasks()
    assert len({task.task_id for task in tasks}) == len({task.entry_point for task in tasks}) == len(tasks) == 100
    for task in tasks:
        assert is_python(task.prompt + task.reference) and not task.prompt.rstrip().endswith(":") and "assert" in task.tests
        assert program_of(task, task.reference + "\n\nprint(1)\n") == task.prompt + task.reference


def reference_failures(tasks):
    outcomes = check_completions(tasks, [[task.reference] for task in tasks], isolate=ISOLATE, limits=Limits(cpu_seconds=20, wall_seconds=200))
    return {task.task_id: outcome.reason for task, (outcome,) in zip(tasks, outcomes) if not outcome.passed}


def test_a_handful_of_references_passes_and_empty_bodies_do_not():
    tasks = read_tasks()[5:95:30]
    assert reference_failures(tasks) == {}
    assert not any(outcome.passed for row in check_completions(tasks, [["    pass\n"]] * 3, isolate=ISOLATE) for outcome in row)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["plain", DATA / "HumanEval.jsonl.gz", DATA / "sanitized-mbpp.json"], ids=["plain", "humaneval", "mbpp"])
def test_every_reference_passes(source):
    if source != "plain" and not source.exists():
        pytest.skip("the shared data is not here")
    tasks = read_tasks(source)
    assert len(tasks) == {"plain": 100, "HumanEval.jsonl.gz": 164, "sanitized-mbpp.json": 427}[Path(source).name]
    assert reference_failures(tasks) == {}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["plain", DATA / "HumanEval.jsonl.gz", DATA / "sanitized-mbpp.json"], ids=["plain", "humaneval", "mbpp"])
def test_a_function_that_does_nothing_passes_nowhere(source):
    if source != "plain" and not source.exists():
        pytest.skip("the shared data is not here")
    tasks = read_tasks(source)
    bodies = [["    return None\n" if task.entry_point else "def f(*a): return None\n"] for task in tasks]
    outcomes = check_completions(tasks, bodies, isolate=ISOLATE)
    assert [task.task_id for task, (outcome,) in zip(tasks, outcomes) if outcome.passed] == []


def test_a_head_behind_helpers_is_cut_at_its_own_end():
    prompt = "import math\n\n\ndef helper(x):\n    return x\n\n\ndef wanted(x):\n    'Doc.'\n"
    task = CodeTask("a", prompt, "    return helper(x)\n", "assert wanted(2) == 2", "wanted")
    assert program_of(task, "    return helper(x)\n\nwanted(3)\nimport sys") == prompt + "    return helper(x)\n"
    assert program_of(task, "    text = '''\nprint\n'''\n    return x\n\n\ndef more(): pass\n").endswith("    return x\n")


def test_task_files_of_each_form_are_read(tmp_path):
    row = dict(task_id="T/1", prompt="def f():\n", canonical_solution="    return 1\n", test="def check(f):\n    assert f() == 1\n", entry_point="f")
    (tmp_path / "h.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (tmp_path / "m.json").write_text(json.dumps([dict(task_id=3, text="One.", code="def f(): return 1", test_list=["assert f() == 1"])]))
    (tmp_path / "own.jsonl").write_text(json.dumps(dict(task_id="o", prompt="def f():\n", reference="    return 1\n", tests="assert f() == 1", entry_point="f")) + "\n\n")
    tasks = [read_tasks(tmp_path / name)[0] for name in ("h.jsonl.gz", "m.json", "own.jsonl")]
    assert [task.task_id for task in tasks] == ["T/1", "MBPP/3", "o"]
    assert reference_failures(tasks) == {}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [(b"", "is empty"), (b"{}\n", "no tasks of a known form"), (b"[]", "holds no task"), (b"{", "no tasks of a known form"), (b"\xff", "is not UTF-8")],
)
def test_a_task_file_that_is_none_is_named(tmp_path, data, complaint):
    (tmp_path / "tasks.json").write_bytes(data)
    with pytest.raises(UserError, match=complaint):
        read_tasks(tmp_path / "tasks.json")
    (tmp_path / "tasks.json.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="can't read"):
        read_tasks(tmp_path / "tasks.json.gz")


def test_rates_are_means_over_tasks_and_reasons_add_up():
    pytest.importorskip("sacrebleu")
    tasks = read_tasks()[:2]
    found = score_completions(tasks, [[tasks[0].reference, "    return 0\n"], ["    return\n", "    return (\n"]], ks=(1, 2), isolate=ISOLATE)
    assert (found["pass@1"], found["pass@2"], found["syntax_rate"]) == (0.25, 0.5, 0.75)
    assert sum(found["reasons"].values()) == 4 and found["reasons"]["passed"] == 1


HELPER_FIRST = CodeTask("two", "def one():\n    return 1\n\n\ndef two():\n    \"\"\"Give two.\"\"\"\n", "    return one() + 1\n", "assert two() == 2\n", "two")


@pytest.mark.parametrize("completion, is_code", [("", False), ("\n\n", False), ("    # later\n", False), ("    return (", False), ("    return (\n", False), ("    return 2", True), ("    pass\n\nx = (", True)])
def test_a_completion_that_adds_nothing_is_no_syntax_whatever_the_prompt_holds(completion, is_code):
    assert adds_code(HELPER_FIRST, program_of(HELPER_FIRST, completion)) is is_code


def test_who_writes_nothing_has_a_syntax_rate_of_zero_and_is_counted_as_empty(monkeypatch):
    pytest.importorskip("sacrebleu")
    monkeypatch.setattr("llm_from_scratch.code_eval.run_many", lambda jobs, **options: [Outcome(False, "AssertionError") for _ in jobs])
    tasks = read_tasks()
    silent = score_completions(tasks, [[""] for _ in tasks])
    assert (silent["syntax_rate"], silent["empty_rate"]) == (0.0, 1.0)
    right = score_completions(tasks, [[task.reference] for task in tasks])
    assert (right["syntax_rate"], right["empty_rate"]) == (1.0, 0.0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    texts = [task.prompt + task.reference for task in read_tasks()]
    tokenizer = Tokenizer.train(texts, vocab_size=400, out=folder / "tokenizer")
    config = Config(model=dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, max_seq_len=96), train=dict(seq_len=96), tokenizer=dict(vocab_size=400))
    (folder / "config.yaml").write_text(to_yaml(config))
    torch.manual_seed(0)
    model = Transformer(config.model.model_copy(update={"vocab_size": tokenizer.vocab_size}))
    for step in (10, 20):
        save_checkpoint(folder / "checkpoints", {"model": model}, step=step, inputs={"tokenizer": tokenizer.fingerprint})
    return folder


def test_a_run_may_be_named_by_one_of_its_checkpoints(run_dir, monkeypatch):
    assert [load_run(path).step for path in (run_dir, run_dir / "checkpoints" / "step_00000010")] == [20, 10]
    monkeypatch.chdir(run_dir / "checkpoints")
    assert load_run("step_00000010").step == 10
    with pytest.raises(UserError, match="step_00000011"):
        load_run(run_dir / "checkpoints" / "step_00000011")


def test_samples_depend_on_the_seed_and_long_prompts_are_counted(run_dir):
    run, tasks = load_run(run_dir), [CodeTask(f"t{n}", "def f():\n", "", "") for n in range(2)]
    one, two, other = (sample_completions(run, tasks, num_samples=2, max_new_tokens=8, seed=seed) for seed in (1, 1, 2))
    assert one == two != other and one[0] != one[1]
    assert sample_completions(run, tasks, max_new_tokens=96) == [[""], [""]]


def test_the_command_prints_a_card_a_checkpoint(run_dir, tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    arguments = [str(run_dir), str(run_dir / "checkpoints" / "step_00000010"), "--limit", "1", "--max-new-tokens", "8", *["--no-isolation"] * (not ISOLATE)]
    assert main(["code", *arguments, "--json"]) == 0
    cards = json.loads(capsys.readouterr().out)
    assert [card["step"] for card in cards] == [20, 10]
    assert {"pass@1", "bleu_signature", "tasks_sha256", "checkpoint_hash", "tokenizer_fingerprint", "dtype", "date", "limits", "isolated"} <= set(cards[0])
    assert cards[0]["sampling"] == {"temperature": 0.0, "top_p": 1.0, "seed": 0} and all(card["card_hash"] == card_hash(card) for card in cards)
    (tmp_path / "probes.jsonl").write_text('{"kind": "word", "prompt": "def", "answer": " f"}\n{"kind": "fact", "prompt": "a", "answer": "b"}\n')
    assert main(["spelling", str(run_dir), "--probes", str(tmp_path / "probes.jsonl"), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)[0]
    assert card["rates"].keys() == card["num_probes"].keys() == {"word", "fact", "all"}
    assert card["card_hash"] == card_hash(card) and {"probes_sha256", "tokenizer_fingerprint", "dtype", "date"} <= set(card)


def checked(card, path, *options):
    "Exit code of a check, of a card that was written anew with its own hash."
    path.write_text(json.dumps(card | dict(card_hash=card_hash(card))))
    return main(["verify", str(path), *options])


def test_a_card_of_spelling_is_checked_elsewhere_and_a_false_rate_is_named(run_dir, tmp_path, capsys):
    (tmp_path / "probes.jsonl").write_text('{"kind": "word", "prompt": "def", "answer": " f"}\n')
    assert main(["spelling", str(run_dir / "checkpoints" / "step_00000010"), "--probes", str(tmp_path / "probes.jsonl"), "--out", str(tmp_path)]) == 0
    card = read_card(tmp_path / "spelling-probes-step_00000010.json")
    assert capsys.readouterr().out.splitlines()[-1] == card_line(card)
    moved = card | dict(run="/nowhere", source="/nowhere")
    assert checked(moved, tmp_path / "card.json", "--run-dir", str(run_dir), "--data", str(tmp_path / "probes.jsonl")) == 0
    assert checked(card | dict(rates=card["rates"] | {"all": 0.75}), tmp_path / "card.json") == DIFFERS
    assert capsys.readouterr().out.splitlines()[-1] == "differs: rates.all"
    for change, told in [(dict(run="/nowhere"), "nowhere"), (dict(probes_sha256="0" * 64), "the probes .* has changed"), (dict(checkpoint_hash="0" * 64), "the checkpoint .* has changed"),
                         (dict(figures=["speed"]), "no figures of the right kind"), (dict(evaluation=[1]), "no evaluation"), (dict(rates={"all": "x"}), "no rates.all")]:
        with pytest.raises(UserError, match=told) as error:
            checked(card | change, tmp_path / "card.json")
        assert "\n" not in str(error.value)


def test_a_card_of_code_is_checked_by_the_same_draws(run_dir, tmp_path, capsys, monkeypatch):
    pytest.importorskip("sacrebleu")
    seen = []
    monkeypatch.setattr("llm_from_scratch.code_eval.run_many", lambda jobs, **options: seen.append(options.get("isolate", True)) or [Outcome(True, "passed") for _ in jobs])
    assert main(["code", str(run_dir), "--limit", "2", "--samples", "2", "--k", "1", "2", "--max-new-tokens", "4", "--seed", "5", "--no-isolation", "--out", str(tmp_path)]) == 0
    card = read_card(tmp_path / "code-plain-2x2-step_00000020.json")
    assert card["figures"] == ["pass@1", "pass@2", "syntax_rate", "empty_rate", "bleu", "repetition_rate"] and card["sampling"]["seed"] == 5
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == card_line(card) and card["tasks_sha256"][:8] in line and "sampling.seed 5" in line and "tok:13a" in line
    assert seen and not any(seen)
    seen.clear()
    assert checked(card, tmp_path / "card.json") == 0 and seen == [True]
    assert checked(card | dict(bleu=card["bleu"] + 1), tmp_path / "card.json") == DIFFERS
    assert capsys.readouterr().out.splitlines()[-1] == "differs: bleu"
    for change, told in [(dict(source="nowhere"), "can't read nowhere"), (dict(num_tasks=1), "the tasks plain has changed"), (dict(limits=None), "make it anew"), (dict(num_samples=1), "draw at least 2"), (dict(evaluation="speed"), "can't be computed anew")]:
        with pytest.raises(UserError, match=told) as error:
            checked(card | change, tmp_path / "card.json")
        assert "\n" not in str(error.value)


def test_cards_of_two_seeds_lie_side_by_side_and_one_repeated_does_not(run_dir, tmp_path, monkeypatch):
    pytest.importorskip("sacrebleu")
    monkeypatch.setattr("llm_from_scratch.code_eval.run_many", lambda jobs, **options: [Outcome(True, "passed") for _ in jobs])
    for seed in ("1", "2", "2"):
        assert main(["code", str(run_dir), "--limit", "1", "--max-new-tokens", "2", "--seed", seed, "--out", str(tmp_path)]) == 0
    assert sorted(read_card(path)["sampling"]["seed"] for path in tmp_path.iterdir()) == [1, 2]


def test_the_command_refuses_where_programs_cannot_be_isolated(run_dir, monkeypatch):
    monkeypatch.setattr("llm_from_scratch.sandbox._ask_child", lambda job: {"refused": "unshare: Operation not permitted"})
    with pytest.raises(UserError, match="switch isolation off"):
        main(["code", str(run_dir), "--limit", "1"])
    monkeypatch.setattr("llm_from_scratch.code_eval.run_many", lambda jobs, **options: [Outcome(False, "ended before")])
    with pytest.raises(UserError, match="programs don't run here"):
        main(["code", str(run_dir), "--limit", "1"])


def test_command_errors_are_one_line_with_exit_code_2(command, tmp_path):
    code, _, err = command("eval", "code", tmp_path)
    assert (code, err.count("\n")) == (2, 1) and "is not a run" in err


@pytest.mark.slow
def test_an_installed_wheel_holds_the_lists_and_their_licence(tmp_path):
    root = Path(__file__).resolve().parents[2]
    subprocess.run(["git", "clone", "--quiet", str(root), str(tmp_path / "clone")], check=True, timeout=300)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(tmp_path / "clone")], check=True, timeout=600)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {f"llm_from_scratch/{name}" for name in ("code_prompts.jsonl", "code_prompts.LICENSE", "spelling_probes.jsonl", "rating_sheet.html")} <= names


def test_spelling_is_exact_and_ends_with_the_word():
    assert [spells(text, " Paris") for text in (" Paris", " Paris.", " Parisian", " paris", "Paris")] == [True, True, False, False, False]
    assert spells("f(self)", "f(") and spells("_x", "_")


def test_probes_name_what_was_written(run_dir):
    run = load_run(run_dir)
    found = probe_spelling(run, [Probe("own", "def f", "(x)"), Probe("own", "x", "y")])
    assert found["num_probes"] == {"own": 2, "all": 2} and all("written" in miss for miss in found["misses"])
    assert len(found["misses"]) == round(2 * (1 - found["rates"]["all"]))
    assert len(read_probes()) > 50
