"The comparison page: what it reads of runs and checkpoints, and that it is one file."

import json
import math
import re
import shutil

import pytest
import torch

from llm_from_scratch.checkpointing import save_checkpoint
from llm_from_scratch.compare import ABSENT, Side, compare_page, differences, draw_panel, points, read_side, summary_rows
from llm_from_scratch.config import Config, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.eval import main
from llm_from_scratch.model import Transformer
from llm_from_scratch.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = []
    for at, rate in enumerate((0.01, 0.02)):
        folder = tmp_path_factory.mktemp(f"place{at}") / "same-name"
        tokenizer = Tokenizer.train([f"def f{n}(x):\n    return x + {n}\n" for n in range(200)], vocab_size=300, out=folder / "tokenizer")
        config = Config(model=dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, max_seq_len=32), train=dict(seq_len=32), tokenizer=dict(vocab_size=300), optim=dict(lr=rate))
        (folder / "config.yaml").write_text(to_yaml(config))
        lines = [dict(step=step, tokens=step * 64, loss=5 / step, lr=rate, grad_norm=math.nan if step == 3 else 1.0) for step in range(1, 11)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        model = Transformer(config.model.model_copy(update={"vocab_size": tokenizer.vocab_size}))
        torch.manual_seed(at)
        for step in (5, 10):
            save_checkpoint(folder / "checkpoints", {"model": model}, step=step, inputs={"tokenizer": tokenizer.fingerprint})
        (folder / "report").mkdir()
        (folder / "report" / "report.json").write_text(json.dumps(dict(title="t", summary={}, samples=["<one>", "two"])))
        (folder / "cards").mkdir()
        for step in (5, 10):
            (folder / "cards" / f"c{step}.json").write_text(json.dumps(dict(checkpoint=f"step_{step:08d}", bits_per_byte=step / 2)))
        folders.append(folder)
    return folders


def test_a_checkpoint_is_its_run_up_to_its_step(runs):
    run, checkpoint = read_side(runs[0]), read_side(runs[0] / "checkpoints" / "step_00000005")
    assert (len(run.rows), len(checkpoint.rows)) == (10, 5)
    assert ([card["card"] for card in run.cards], [card["card"] for card in checkpoint.cards]) == (["c10", "c5"], ["c5"])
    assert (list(run.samples.values()), checkpoint.samples) == (["<one>", "two"], {})
    with pytest.raises(UserError, match="there is no checkpoint"):
        read_side(runs[0] / "checkpoints" / "step_00000006")


def test_only_differing_options_are_shown():
    assert differences([{"a": {"b": 1}, "c": 2}, {"a": {"b": 1}, "c": 3}, {"a": {"b": 1}}]) == {"c": [2, 3, ABSENT]}
    assert differences([{"a": None}, {"a": False}]) == {"a": [None, False]}


def test_curves_leave_out_what_is_not_finite(runs):
    side = read_side(runs[0])
    assert len(points(side.rows, "grad_norm", "step")[0]) == 9
    assert points(side.rows, "loss", "tokens")[0] == [64 * step for step in range(1, 11)]
    figure = draw_panel([side, Side("empty", {}, [])], "Loss by tokens", "loss", "tokens", "nats")
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [10, 0, 0, 0]


def test_a_summary_has_a_value_for_each_side(runs):
    rows = summary_rows([read_side(runs[0]), Side("empty", {}, [])])
    assert rows["last loss"] == [0.5, ""] and rows["steps"] == [10, ""] and rows["best validation loss"] == ["", ""]


def test_the_command_writes_one_file_that_asks_nobody(runs, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--out", str(out)]) == 0
    page = out.read_text()
    assert "<script" not in page and not re.search(r"""(src|href)=["'](?!data:)|url\(|@import""", page)
    assert "&lt;one&gt;" in page and "optim.lr" in page and "c10: bits_per_byte" in page and "model.num_layers" not in page
    assert all(str(run) in page for run in runs)
    assert f"wrote {out}" in capsys.readouterr().out


def test_prompts_are_written_on_by_each_checkpoint(runs, tmp_path):
    out, checkpoints = tmp_path / "page.html", [str(runs[0] / "checkpoints" / f"step_{step:08d}") for step in (5, 10)]
    assert main(["compare", *checkpoints, "--out", str(out), "--prompt", "def <f>", "--max-new-tokens", "3"]) == 0
    page = out.read_text()
    assert page.count("<pre>") == 2 and page.count("def &lt;f&gt;") == 3 and "&lt;one&gt;" not in page
    assert "same-name, step 5" in page and "The configurations are the same" in page


def test_many_sides_and_none_with_metrics():
    page = compare_page([Side(f"s{n}", {"n": n}, []) for n in range(12)], "twelve")
    assert "<h2>Curves</h2>" not in page and page.count('class="dot"') == 24


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        main(["compare", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name", ["a$b{$", "_hidden"])
def test_a_name_is_no_formula(name):
    page = compare_page([Side(name, {}, [{"step": 1, "loss": 2.0}])], "one")
    assert name in page


def test_other_peoples_files_in_a_run_are_named(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    (folder / "cards").mkdir(exist_ok=True)
    (folder / "cards" / "list.json").write_text("[]")
    with pytest.raises(UserError, match="list.json is not a card"):
        read_side(folder)
