import gzip
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from llm_from_scratch import config
from llm_from_scratch import quality as q
from llm_from_scratch.env import UserError

SHARED = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).resolve().parents[2] / "../shared/data"))
CFG = q.QualityConfig()
needs_data = pytest.mark.skipif(not (SHARED / "langid").is_dir(), reason="no shared data here")


def failures(text, lang="en", cfg=CFG):
    return q.all_failures(q.score_text(text, lang), lang, cfg)


def prose(num_sentences, seed=0):
    rng = random.Random(seed)
    words = [f"{a}{b}{c}" for a in "bdfglmnprst" for b in "aeiou" for c in "lnrst"]
    sentences = [" ".join(["The"] + rng.choices(words, k=9) + ["of", "and"]) + f" {rng.choice(words)}." for _ in range(num_sentences)]
    return "\n\n".join(" ".join(sentences[i : i + 4]) for i in range(0, num_sentences, 4))


@pytest.fixture(scope="module")
def declaration():
    texts = defaultdict(list)
    with gzip.open(SHARED / "langid/udhr2_paragraphs.tsv.gz", "rt", encoding="utf-8") as file:
        for line in file.readlines()[1:]:
            lang, name, text = line.rstrip("\n").split("\t")
            texts[lang, name].append(text)
    return texts


def test_ordinary_prose_is_kept():
    assert failures(prose(40)) == []


@pytest.mark.parametrize("reason, text", [
    ("characters_low_entropy", "-=" * 400),
    ("characters_ascii", "выходной день в городе " * 30),
    ("gopher_too_short", "Only a few words of text."),
    ("gopher_short_words", "a b c d e f " * 20),
    ("gopher_long_words", "incomprehensibilities " * 60),
    ("gopher_hashes", "# tag # tag # tag of the and word " * 20),
    ("gopher_ellipses", "and then ... of the day ... " * 20),
    ("gopher_bullet_lines", "• one line of the list and more\n" * 10),
    ("gopher_ellipsis_lines", "Read more of the news and...\n" * 10),
    ("gopher_few_letters", "12 345 6789 the of " * 30),
    ("gopher_stop_words", "Zimmer Garten Fenster Tisch " * 20),
    ("gopher_duplicate_lines", "Home\nAbout\n" * 10),
    ("gopher_duplicate_paragraphs", "One paragraph here.\n\n" * 10),
    ("gopher_top_2_gram", "buy now " * 40),
    ("gopher_duplicate_10_grams", "one two three four five six seven eight nine ten eleven twelve " * 8),
    ("c4_lorem_ipsum", "Lorem ipsum dolor sit amet."),
    ("c4_curly_bracket", "a { color: red } " * 30),
    ("c4_few_sentences", "word " * 80),
    ("fineweb_line_punctuation", "\n".join(f"Chapter {number} of the book" for number in range(40))),
    ("fineweb_short_lines", "\n".join(f"Item {number}." for number in range(60))),
    ("fineweb_duplicate_line_chars", prose(8) + "\nSubscribe to the news letter." * 12)])
def test_each_rule_finds_what_it_is_made_for(reason, text):
    assert reason in failures(text)
    assert reason not in failures(text, cfg=q.QualityConfig(off=[reason]))
    assert reason not in failures(text, cfg=q.QualityConfig(off=[reason.partition("_")[0]]))


def test_every_reason_has_a_sentence_and_an_option():
    fields = q.QualityConfig.model_fields
    for rule in q.RULES:
        assert rule.option.partition(".")[0] in fields and rule.meaning and rule.reason == rule.reason.lower()
    assert all(field.description for field in fields.values())


def test_the_published_thresholds_are_the_defaults():
    assert (CFG.gopher_min_words, CFG.gopher_max_words, CFG.gopher_max_duplicate_lines) == (50, 100_000, 0.3)
    assert CFG.gopher_max_top_grams == [0.20, 0.18, 0.16]
    assert CFG.gopher_max_duplicate_grams == [0.15, 0.14, 0.13, 0.12, 0.11, 0.10]
    assert (CFG.fineweb_min_line_punctuation, CFG.fineweb_max_duplicate_line_chars, CFG.fineweb_max_short_lines) == (0.12, 0.1, 0.67)


@pytest.mark.parametrize("text", ["", " ", "\n\n", "a", "\x00", "\ud800", "ั", "。", "😀" * 50, "\U00020000" * 60, "#" * 100, "... " * 100])
@pytest.mark.parametrize("lang", [None, "en", "zh", "xx"])
def test_odd_text_is_scored_and_judged(text, lang):
    scores = q.score_text(text, lang)
    assert all(type(value) is float and value == value and abs(value) != float("inf") for value in scores.values())
    assert q.judge(scores, lang, CFG).keep is False
    assert q.chunk_text(text) == ([(0, len(text))] if text else [])


def test_scores_do_not_depend_on_the_hash_seed():
    program = "from pydoc_data.topics import topics; from llm_from_scratch.quality import score_text; print(score_text(topics['if'], 'en'))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    other = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(q.score_text(topics["if"], "en"))


@needs_data
def test_no_language_of_the_declaration_is_lost(declaration):
    lost = {(lang, name): found for (lang, name), parts in declaration.items() if (found := failures("\n".join(parts), lang))}
    assert lost == {}


@needs_data
def test_an_ascii_share_for_all_would_drop_all_chinese(declaration):
    for key in [("zh", "cmn_hans"), ("zh", "cmn_hant"), ("ja", "jpn")]:
        scores = q.score_text("\n".join(declaration[key]), key[0])
        assert scores["ascii_share"] < CFG.min_ascii_share
        assert q.judge(scores, key[0], CFG).keep
        assert not q.judge(scores, "en", CFG).keep


@needs_data
def test_words_of_scripts_without_spaces_are_about_as_many_as_in_english(declaration):
    english = q.score_text(" ".join(declaration["en", "eng"]))["num_words"] / len(declaration["en", "eng"])
    for key in [("zh", "cmn_hans"), ("ja", "jpn"), ("th", "tha"), ("km", "khm"), ("my", "mya")]:
        ratio = q.score_text(" ".join(declaration[key]))["num_words"] / len(declaration[key]) / english
        assert 0.5 < ratio < 1.5, (key, ratio)


@needs_data
def test_wrapped_and_unwrapped_prose_are_both_kept():
    text = (SHARED / "text/botchan.txt").read_text()
    parts = [text[start : start + 4000] for start in range(0, 80_000, 4000)]
    assert sum(failures(part) == [] for part in parts) >= 19
    unwrapped = [part.replace(".\n", ".\t").replace("\n", " ").replace("\t", "\n") for part in parts]
    assert sum(failures(part) == [] for part in unwrapped) >= 19


def test_repetition_equals_the_definition():
    rng = random.Random(1)
    for _ in range(30):
        words = rng.choices(["a", "bb", "ccc", "dd d"], k=rng.randrange(60))
        total = sum(map(len, words)) or 1
        scores = q.ngram_scores(words)
        for n in range(5, 11):
            grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
            covered = {at for start, gram in enumerate(grams) if gram in grams[:start] for at in range(start, start + n)}
            assert scores[f"duplicate_{n}_grams"] == pytest.approx(sum(len(words[at]) for at in covered) / total)


@pytest.mark.parametrize("unit", [2, 4])
def test_repetition_of_units_equals_repetition_of_words(unit):
    words = random.Random(2).choices(["ABCD", "EFGH", "IJKL", "MNOP", "QRST"], k=80)
    by_unit = q.ngram_scores([word[at] for word in words for at in range(unit)], unit)
    by_word = q.ngram_scores([word[:unit] for word in words])
    assert by_unit == pytest.approx(by_word, abs=0.02)


def test_lines_are_removed_and_counted():
    tally = Counter()
    text = "A title\nPlease enable JavaScript to continue.\nWe use cookies.\n" + "x" * 2000 + "\n  code {\n\nThe end."
    assert q.clean_lines(text, CFG, tally) == "A title\n  code {\n\nThe end."
    assert tally == Counter(javascript_line=1, policy_line=1, long_word_line=1)
    assert set(tally) <= set(q.LINE_REASONS)
    untouched = "JavaScript has closures.\r\n\tIndented.\n\n"
    assert q.clean_lines(untouched, CFG, tally) is untouched
    assert q.clean_lines(untouched, q.QualityConfig(c4_javascript_lines="all"), tally) == "\tIndented.\n\n"


def test_chunks_cover_the_text_and_keep_their_limits():
    rng = random.Random(3)
    for trial in range(150):
        text = "".join(rng.choices(["word ", "end. ", "\n", "句。", "ก่", "x" * 30, "  "], k=rng.randrange(1, 200)))
        window = rng.randrange(2, 300)
        overlap = rng.randrange(window)
        pieces = q.chunk_text(text, window=window, overlap=overlap)
        assert pieces[0][0] == 0 and pieces[-1][1] == len(text)
        for start, end in pieces:
            assert 0 < end - start <= window
        for (first, end), (start, last) in zip(pieces, pieces[1:]):
            assert first < start <= end < last and end - start <= overlap


def test_chunks_refuse_an_overlap_of_the_window():
    with pytest.raises(UserError, match="overlap 9"):
        q.chunk_text("text", window=9, overlap=9)


@pytest.mark.parametrize("text", ["a" * 400_000, "a " * 200_000, ". " * 200_000, "\n" * 400_000, " \n" * 200_000, "。" * 200_000,
                                  "ก " * 100_000, "ab\n" * 100_000, "javascript " * 30_000])
def test_no_text_takes_long(text):
    began = time.process_time()
    q.judge(q.score_text(q.clean_lines(text, CFG, Counter()), "en"), "en", CFG)
    q.chunk_text(text)
    assert time.process_time() - began < 8


def test_every_option_can_be_given_on_a_command_line():
    parser = config.CommandParser()
    config.add_config_options(parser, q.QualityConfig)
    given = "--off c4 gopher_hashes --reference en=a.txt de=b.txt --gopher-max-top-grams 0.3 0.2 0.1 --c4-policy-lines False --gopher-min-words 20"
    cfg = config.build_config(config.chosen_values(parser.parse_args(given.split()), q.QualityConfig), kind=q.QualityConfig)
    assert (cfg.off, cfg.reference) == (["c4", "gopher_hashes"], {"en": "a.txt", "de": "b.txt"})
    assert (cfg.gopher_max_top_grams, cfg.c4_policy_lines, cfg.gopher_min_words) == ([0.3, 0.2, 0.1], False, 20)
    with pytest.raises(UserError, match="did you mean 'gopher_hashes'"):
        config.build_config({"off": ["gopher_hash"]}, kind=q.QualityConfig)
