"WikiText's protocol and the cards: EVAL-2 over real splits, repeats, and a check on another machine."

import json
import lzma
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from llm_from_scratch.checkpointing import load_run, save_checkpoint
from llm_from_scratch.config import Config, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.eval import Perplexity, evaluate_text
from llm_from_scratch.eval import main as eval_main
from llm_from_scratch.evaluation_cards import DIFFERS, card_hash, card_line, deterministic, make_card, read_card, repeat_figure, verify_card
from llm_from_scratch.model import Transformer
from llm_from_scratch.tokenizer import Tokenizer
from llm_from_scratch.wikitext import detokenise, make_split, read_split, split_articles, write_articles

SHARED = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).parents[3] / "shared/data"), "wikitext2")
WORDS = ["the", "<unk>", "river", "@-@", "bank", "of", "stones", ",", "1 @,@ 000"]


def make_text(num_lines=30):
    return " \n = <unk> = \n \n" + "".join(" " + " ".join(WORDS[(place * step) % 9] for step in range(1, 16)) + " . \n" for place in range(num_lines))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A run with fresh weights beside a word-level file."
    folder = tmp_path_factory.mktemp("cards")
    data, run_dir = folder / "wiki.demo.tokens", folder / "run"
    data.write_text(make_text())
    tokenizer = Tokenizer.train([make_split(make_text(), "tokens").text], vocab_size=300, out=run_dir / "tokenizer")
    config = Config(model=dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, max_seq_len=64, init_std=0.2), tokenizer=dict(vocab_size=300), train=dict(seq_len=32))
    (run_dir / "config.yaml").write_text(to_yaml(config))
    for step in (7, 8):
        torch.manual_seed(step)
        model = Transformer(config.model.model_copy(update={"vocab_size": 300}))
        save_checkpoint(run_dir / "checkpoints", {"model": model}, step=step, inputs={"tokenizer": tokenizer.fingerprint})
    return folder


def score(place, *options, stride="16"):
    assert eval_main(["wikitext", str(place / "run"), "--data", str(place / "wiki.demo.tokens"), "--split-format", "tokens", "--stride", stride, *options]) == 0
    return max((place / "run" / "cards").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_eval_2_a_split_divides_by_the_words_of_its_file():
    split = make_split("M @-@ 82 ends , at a junction <unk> .\n", "tokens")
    assert split.text == "M-82 ends, at a junction <unk>.\n"
    assert (split.num_words, len(split.text.split()), split.num_lines) == (10, 6, 1)
    assert Perplexity(12 * math.log(2), 12).per_word(split.num_words) < Perplexity(12 * math.log(2), 12).per_word(6)


def test_eval_2_a_card_has_all_denominators_of_the_original(place):
    card = read_card(score(place))
    text = make_text()
    assert (card["num_words"], card["num_bytes"], card["num_lines"]) == (len(text.split()), len(text.encode()), text.count("\n"))
    assert card["word_perplexity"] == pytest.approx(math.exp(card["nll_sum"] / card["num_words"]))
    assert card["word_perplexity_with_eos"] == pytest.approx(math.exp(card["nll_sum"] / (card["num_words"] + card["num_lines"])))
    assert card["bits_per_byte"] == pytest.approx(card["nll_sum"] / math.log(2) / card["num_bytes"])
    assert card["num_scored_bytes"] == len(detokenise(text).encode()) < card["num_bytes"]


@pytest.mark.parametrize("stride", [1, 5, 31, 32])
def test_eval_4_every_stride_scores_each_token_once_and_says_its_context(place, stride):
    run, split = load_run(place / "run"), make_split(make_text(4), "tokens")
    card = make_card(run, split, places={}, window=32, stride=stride)
    assert card["num_tokens"] == len(run.tokenizer.encode(split.text))
    assert (card["context"], card["bos"]) == (32 - stride, True)
    assert make_card(run, split, places={}, window=32, stride=stride, bos=False)["context"] == 33 - stride


def test_a_detokenised_line_keeps_every_letter():
    lines = ["", " = = A = = ", ' " x " and " y ', " a ( b ) [ c ] ; d : e ! f ? ", " 5 % of $ 3 @.@ 5 – no ", " rock ' n ' roll ", " O 'Neill 's players ' cars ", "naïve 漢 @-@ 字"]
    for line in lines:
        bare = line.replace(" @-@ ", "-").replace(" @.@ ", ".")
        assert detokenise(line).replace(" ", "") == bare.replace(" ", "")
        assert "  " not in detokenise(line) or "  " in line


def test_a_split_under_the_wrong_name_is_refused(tmp_path):
    path = tmp_path / "wiki.tokens"
    path.write_text(make_text())
    with pytest.raises(UserError, match="say --split-format tokens"):
        read_split(path, "raw")
    path.write_bytes(lzma.compress(b"a"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_split(path, "plain")
    packed = tmp_path / "wiki.tokens.xz"
    packed.write_bytes(lzma.compress(make_text().encode()))
    assert read_split(packed, "tokens") == make_split(make_text(), "tokens")
    packed.write_bytes(b"no xz")
    with pytest.raises(UserError, match="damaged or not packed"):
        read_split(packed, "tokens")


def test_articles_are_the_file_cut_in_pieces(tmp_path):
    text = make_text(3) + " \n = = Part = = \n \n" + make_text(2)
    assert "".join(split_articles(text)) == text and len(split_articles(text)) == 2
    (tmp_path / "train").write_text(text)
    assert write_articles(tmp_path / "train", tmp_path / "train.jsonl", "tokens") == 2
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["00000 <unk>", "00001 <unk>"]
    assert "".join(row["text"] for row in rows).split() == detokenise(text).split()


@pytest.mark.skipif(not SHARED.is_dir(), reason="shared data is absent")
def test_real_splits_have_their_published_counts():
    test = read_split(SHARED / "wiki.test.tokens.txt", "tokens")
    assert (test.num_words, test.num_words + test.num_lines) == (241_211, 245_569)
    raw = read_split(SHARED / "wiki.test.raw", "raw")
    assert (raw.num_bytes, raw.text_sha256[:8], raw.text_sha256[-4:]) == (1_290_590, "173c87a5", "dd08")
    assert " @-@ " not in raw.text and " , " not in raw.text


def test_ten_repeats_in_deterministic_mode_are_one_number(place, capsys):
    card = read_card(score(place, "--repeats", "10", "--window", "32"))
    assert card["repeats"] == dict(num=10, mean=card["token_perplexity"], deviation=0.0, deterministic=True)
    assert "10 repeats, deviation 0" in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()


def test_repeats_that_differ_end_with_another_code(place, monkeypatch, capsys):
    noise = iter(range(100))

    def noisy(*args, **options):
        found = evaluate_text(*args, **options)
        return {**found, "token_perplexity": found["token_perplexity"] + next(noise)}

    monkeypatch.setattr("llm_from_scratch.evaluation_cards.evaluate_text", noisy)
    command = ["wikitext", str(place / "run"), "--data", str(place / "wiki.demo.tokens"), "--split-format", "tokens", "--out", str(place / "noisy"), "--repeats", "3"]
    assert eval_main(command) == DIFFERS
    assert "repeats differ" in capsys.readouterr().err
    assert eval_main([*command, "--no-deterministic"]) == 0
    with deterministic(), pytest.raises(UserError, match="at least 2"):
        repeat_figure(float, 1)


def test_a_card_is_checked_where_run_and_text_lie_elsewhere(place, tmp_path, capsys):
    shutil.copytree(place / "run", tmp_path / "moved")
    shutil.copy(place / "wiki.demo.tokens", tmp_path / "text")
    card = {**read_card(score(place)), "run": "/nowhere/run", "text": "/nowhere/text"}
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**card, "card_hash": card_hash(card)}))
    assert eval_main(["verify", str(path), "--run-dir", str(tmp_path / "moved"), "--data", str(tmp_path / "text")]) == 0
    assert "the same, figures within 0.0e+00" in capsys.readouterr().out
    with pytest.raises(UserError, match="nowhere"):
        eval_main(["verify", str(path)])


@pytest.mark.parametrize(
    "change, options, complaint",
    [
        ({"text_sha256": "0" * 64}, [], "the text .* has changed: the card says 000000000000"),
        ({"scored_sha256": "0" * 64}, [], "detokeniser wikitext-1 makes"),
        ({"checkpoint_hash": "0" * 64}, [], "the checkpoint .* has changed"),
        ({"tokenizer_fingerprint": "0" * 64}, [], "the tokenizer .* has changed"),
        ({"checkpoint": "step_00000009"}, [], "there is no folder"),
        ({"detokeniser": "moses"}, [], "detokeniser moses: choose"),
        ({"card_version": 2}, [], "card version 2"),
        ({}, ["--data", "nowhere"], "can't read nowhere"),
        ({}, ["--run-dir", "nowhere"], "nowhere"),
    ],
)
def test_missing_and_changed_inputs_are_one_line_each(place, tmp_path, change, options, complaint):
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**read_card(score(place)), **change}))
    with pytest.raises(UserError, match=complaint) as caught:
        eval_main(["verify", str(path), *options])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, factor", [("token_perplexity", 1.001), ("bits_per_byte", 0.99), ("num_tokens", 2), ("nll_sum", 1.0001)])
def test_a_value_that_is_not_so_is_named(place, tmp_path, capsys, name, factor):
    card = read_card(score(place))
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**card, name: card[name] * factor}))
    capsys.readouterr()
    assert eval_main(["verify", str(path)]) == DIFFERS
    assert capsys.readouterr().out.splitlines()[-1] == f"differs: card_hash, {name}"


def test_a_card_of_another_window_does_not_verify(place):
    card = read_card(score(place))
    run, split = load_run(place / "run"), read_split(place / "wiki.demo.tokens", "tokens")
    wrong = {item.name for item in verify_card({**card, "window": 24}, run, split) if not item.is_equal}
    assert {"token_perplexity", "nll_sum", "context", "card_hash"} <= wrong


def test_an_older_checkpoint_of_a_run_is_still_found(place):
    old, new = map(load_run, (place / "run" / "checkpoints" / "step_00000007", place / "run"))
    assert (old.step, new.step) == (7, 8)
    assert make_card(old, make_split("a river <unk> bank", "tokens"), places={})["nll_sum"] != make_card(new, make_split("a river <unk> bank", "tokens"), places={})["nll_sum"]


def test_a_plain_text_has_a_card_that_can_be_checked(place, tmp_path, capsys):
    assert eval_main(["--run-dir", str(place / "run"), "--text", str(place / "wiki.demo.tokens"), "--json", "--no-bos"]) == 0
    (tmp_path / "card.json").write_text(capsys.readouterr().out)
    card = read_card(tmp_path / "card.json")
    assert (card["split_format"], card["detokeniser"], card["bos"]) == ("plain", "none", False)
    assert eval_main(["verify", str(tmp_path / "card.json")]) == 0
    for part in ("plain", "no BOS", "window 32", card["text_sha256"][:8], card["checkpoint_hash"][:8], card["tokenizer_fingerprint"][:8], card["date"][:10]):
        assert part in card_line(card)


def test_a_text_without_spaces_has_a_card_without_a_figure_a_word(place, tmp_path, capsys):
    text = tmp_path / "a[" / "b].txt"
    text.parent.mkdir()
    text.write_text("的一是不了人我在有他" * 80)
    options = ["--run-dir", str(place / "run"), "--text", str(text)]
    assert eval_main(options) == 0 and " a word," not in capsys.readouterr().out
    assert eval_main([*options, "--json"]) == 0 and json.loads(capsys.readouterr().out)["word_perplexity"] is None


def test_cards_of_two_detokenisers_lie_side_by_side(place):
    assert score(place) != score(place, "--detokeniser", "none")


@pytest.mark.parametrize("change", [dict(window="x"), dict(text_sha256=None), dict(nll_sum="abc"), dict(num_tokens=[1]), dict(deterministic=2), dict(nll_sum=math.nan)])
def test_a_card_with_values_of_another_kind_is_refused(place, tmp_path, change):
    path = tmp_path / "card.json"
    path.write_text(json.dumps(json.loads(score(place).read_text()) | change))
    with pytest.raises(UserError, match="of the right kind|NaN"):
        eval_main(["verify", str(path)])


def test_eval_2_a_card_from_another_machine_holds_here(tmp_path, monkeypatch, capsys):
    "golden_card holds a small model, its tokenizer, a text and the card that another machine made of them in November 2026."
    shutil.copytree(Path(__file__).with_name("golden_card"), tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert eval_main(["verify", "card.json"]) == 0
    assert "the same, figures within" in capsys.readouterr().out
    card = json.loads(Path("card.json").read_text())
    Path("text.txt").write_text(Path("text.txt").read_text().replace("miller", "Miller"))
    with pytest.raises(UserError, match=f"the card says {card['text_sha256'][:12]}"):
        eval_main(["verify", "card.json"])
