"The rating sheet in a real browser, what comes back of it, and the two commands."

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from llm_from_scratch.blind_rating import Item, Ratings, agreement, mix_samples, parse_ratings, score_sheet, sheet_id, sheet_page
from llm_from_scratch.checkpointing import save_checkpoint
from llm_from_scratch.code_eval import read_tasks
from llm_from_scratch.config import Config, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.eval import main
from llm_from_scratch.evaluation_cards import card_hash, card_line
from llm_from_scratch.model import Transformer
from llm_from_scratch.tokenizer import Tokenizer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ITEMS = [Item(1, "def f():\n", "    return '</pre><script>document.title = 1</script>'\n"), Item(2, "", "a\ud800b"), Item(3, "x", "   ")]
USE = """
<script>
const failed = [];
window.onerror = message => failed.push(message);
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
document.querySelector('section[data-number="3"] input[value="4"]').click();
rater.value = 'Ann "A", B'; rater.dispatchEvent(new Event("input", { bubbles: true }));
window.scrollTo(0, 0); press("5"); press("x"); press("7");
const links = []; HTMLAnchorElement.prototype.click = function () { links.push([this.download, this.href.slice(0, 5)]); };
document.querySelector("#json").click(); document.querySelector("#csv").click();
const result = { json: exported("json"), csv: exported("csv"), links, failed, shown: document.querySelector("output").textContent,
  done: document.querySelectorAll("section.done").length, kept: localStorage.getItem(place) !== null, fetched: performance.getEntriesByType("resource").length,
  wide: document.documentElement.scrollWidth > innerWidth };
document.body.innerHTML = ""; document.body.append(Object.assign(document.createElement("template"), { id: "result" }));
document.querySelector("#result").setAttribute("data-result", JSON.stringify(result));
</script>
"""


def browse(path, *options) -> str:
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'profile'}"]
    result = subprocess.run([*command, *options, path.as_uri()], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
@pytest.mark.parametrize("size", ["1280,900", "390,800"])
def test_the_page_rates_keeps_and_exports_in_a_browser(tmp_path, size):
    page = tmp_path / "page.html"
    page.write_text(sheet_page(ITEMS).replace("</body>", USE + "</body>"), encoding="utf-8", errors="replace")
    found = json.loads(html.unescape(re.search(r'data-result="([^"]*)"', browse(page, f"--window-size={size}", "--dump-dom")).group(1)))
    assert found["failed"] == [] and found["fetched"] == 0 and not found["wide"]
    ratings = [parse_ratings(found["json"], "a.json"), parse_ratings(found["csv"], "a.csv")]
    assert ratings == [Ratings('Ann "A", B', sheet_id(ITEMS), {1: 5, 3: 4})] * 2
    assert (found["shown"], found["done"], found["kept"]) == ("2 of 3 rated", 2, True)
    assert [name.rpartition(".")[2] for name, kind in found["links"] if kind == "blob:"] == ["json", "csv"]


def test_a_page_asks_nobody_and_escapes_all_texts():
    page = sheet_page(ITEMS[:1], question="Is <b> good?")
    assert page.count("<script>") == 1 and "&lt;/pre&gt;" in page and "Is &lt;b&gt; good?" in page
    assert not re.search(r"""(src|href)=["']|url\(|https?:|@import""", page)
    assert "ITEMS" not in page and "SHEET_ID" not in page and "QUESTION" not in page


def test_a_mixed_sheet_names_nobody_and_the_key_does():
    prompts, sides = [f"p{n}" for n in range(10)], [[[f"{side}{n}"] for n in range(10)] for side in "abc"]
    items, sources = mix_samples(prompts, sides, 3)
    assert sorted(item.text for item in items) == sorted(text for side in sides for (text,) in side)
    assert all(item.text == f"{'abc'[source]}{item.prompt[1:]}" for item, source in zip(items, sources))
    assert any(sources[at] != sources[at + 1] for at in range(5)) and mix_samples(prompts, sides, 3)[1] == sources != mix_samples(prompts, sides, 4)[1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not an export"),
        ("[" * 100_000, "not an export"),
        ('{"sheet": "a", "rater": "b", "ratings": {"1": 1e400}}', "score inf"),
        ("x" * 200_000, "not an export"),
        ("[1]", "not an export"),
        ('{"sheet": 1}', "not an export"),
        ('{"sheet": "a", "rater": "b", "ratings": {"1": -1}}', "score -1"),
        ("sheet,rater,number,score\na,b,1,x\n", "not an export"),
        ("sheet,rater,number,score\na,b,1,1\na,c,1,1\n", "not an export"),
    ],
)
def test_a_file_that_is_no_export_is_named(text, complaint):
    with pytest.raises(UserError, match=complaint):
        parse_ratings(text, "x.json")


def test_agreement_is_krippendorffs_alpha():
    pytest.importorskip("krippendorff")
    table = [[1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None], [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3], [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None], [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None]]
    raters = [Ratings(str(at), "s", {n: score for n, score in enumerate(row) if score is not None}) for at, row in enumerate(table)]
    assert agreement(raters) == pytest.approx(0.815, abs=1e-3)  # his own example of four observers, ordinal
    assert agreement(raters[:1]) is None


def test_scores_are_means_over_texts_of_means_over_raters():
    pytest.importorskip("krippendorff")
    key = dict(sheet="s", sources=[{"run": "a"}, {"run": "b"}, {"run": "c"}], items={"1": 0, "2": 0, "3": 1, "4": 2})
    found = score_sheet([Ratings("x", "s", {1: 0, 2: 4, 3: 5}), Ratings("y", "s", {1: 2})], key)
    assert [(row["run"], row["score"], row["num_texts"]) for row in found["checkpoints"]] == [("a", 2.5, 2), ("b", 5.0, 1)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    tokenizer = Tokenizer.train([task.prompt + task.reference for task in read_tasks()], vocab_size=400, out=folder / "tokenizer")
    config = Config(model=dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, max_seq_len=256), tokenizer=dict(vocab_size=400))
    (folder / "config.yaml").write_text(to_yaml(config))
    torch.manual_seed(0)
    model = Transformer(config.model.model_copy(update={"vocab_size": tokenizer.vocab_size}))
    for step in (1, 2):
        save_checkpoint(folder / "checkpoints", {"model": model}, step=step, inputs={"tokenizer": tokenizer.fingerprint})
    return folder


def test_from_sheet_to_scores(run_dir, tmp_path, capsys):
    pytest.importorskip("krippendorff")
    page, checkpoints = tmp_path / "page.html", [str(run_dir / "checkpoints" / f"step_0000000{step}") for step in (1, 2)]
    assert main(["blind-sheet", *checkpoints, "--out", str(page), "--limit", "3", "--max-new-tokens", "4"]) == 0
    key = json.loads((tmp_path / "page.key.json").read_text())
    assert key["sheet"] in page.read_text() and str(run_dir) not in page.read_text() and "step_" not in page.read_text()
    assert len(key["items"]) == 6 and [source["step"] for source in key["sources"]] == [1, 2]
    for name in "ab":
        ratings = {number: 5 if source else int(number) % 2 for number, source in key["items"].items()}
        (tmp_path / f"{name}.json").write_text(json.dumps(dict(sheet=key["sheet"], rater=name, ratings=ratings)))
    capsys.readouterr()
    assert main(["blind-score", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--key", str(tmp_path / "page.key.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agreement"] == 1 and found["checkpoints"][1]["score"] == 5
    card = found["checkpoints"][1]
    assert card["card_hash"] == card_hash(card) and {"tasks_sha256", "tokenizer_fingerprint", "dtype", "checkpoint_hash", "date", "sheet", "temperature", "seed"} <= set(card)
    assert main(["blind-score", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--key", str(tmp_path / "page.key.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == card_line(card)[:-10] + card["date"][:10]
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="a card of blind-score can't be computed anew"):
        main(["verify", str(tmp_path / "card.json")])
    with pytest.raises(UserError, match="stands in two files"):
        main(["blind-score", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--key", str(tmp_path / "page.key.json")])
    with pytest.raises(UserError, match="no key"):
        main(["blind-score", str(tmp_path / "a.json"), "--key", str(Path(tmp_path / "a.json"))])


@pytest.mark.parametrize("change", [dict(sources=5), dict(items={"x": 0}), dict(items={"1": 9}), dict(sources=[{}])])
def test_a_key_of_another_kind_is_refused(tmp_path, change):
    (tmp_path / "a.json").write_text(json.dumps(dict(sheet="s", rater="ann", ratings={"1": 4})))
    (tmp_path / "key.json").write_text(json.dumps(dict(sheet="s", sources=[dict(run="r", step=1)], items={"1": 0}) | change))
    with pytest.raises(UserError, match="is no key"):
        main(["blind-score", str(tmp_path / "a.json"), "--key", str(tmp_path / "key.json")])


def test_a_page_never_lies_over_its_key(run_dir, tmp_path):
    for names in (["--out", str(tmp_path / "a.json"), "--key", str(tmp_path / "a.json")], ["--out", "."]):
        with pytest.raises(UserError, match="two different files"):
            main(["blind-sheet", str(run_dir), *names])
    assert not list(tmp_path.iterdir())
