import random
from collections import Counter
from pydoc_data.topics import topics

import numpy as np
import pytest

from llm_from_scratch import ngram_model as m
from llm_from_scratch.env import UserError
from llm_from_scratch.quality import QualityConfig

MANUAL = [topics[name] for name in sorted(topics)]


@pytest.fixture(scope="module")
def model():
    return m.fit_model(MANUAL)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_chances_after_any_words_add_up_to_one(order):
    words = random.Random(0).choices(["a", "b", "c", "d", "e", "f"], weights=[9, 5, 3, 2, 1, 1], k=300)
    tables = [m.kneser_ney(*part) for part in m.count_ngrams(m.padded(words, order), order)]
    model = m.NgramModel(tables, np.ones(1), str.split)
    for before in [[], ["a"], ["f", "f"], ["new", "a"], ["a", "new"], ["a", "b", "c", "d"]]:
        assert sum(model.chances([*before, word])[-1] for word in [*set(words), "never-seen"]) == pytest.approx(1, abs=1e-5)


def test_the_lower_order_counts_different_neighbours():
    words = ["san francisco"] * 20 + [f"{word} house" for word in ("a", "my", "the", "our")]
    stream = np.concatenate([m.padded(text.split(), 2) for text in words])
    singles = m.count_ngrams(stream, 2)[0]
    count = dict(zip(singles[0].tolist(), singles[2].tolist()))
    assert count[int(m.hash_words(["francisco"])[0])] == 1 and count[int(m.hash_words(["house"])[0])] == 4


def test_prose_is_easier_than_scrambled_prose_and_noise(model):
    text = topics["lambda"] + topics["if"]
    scrambled = " ".join(random.Random(0).sample(text.split(), len(text.split())))
    assert model.perplexity(text) < model.perplexity(scrambled) < model.perplexity("xqz vbk wpl " * 50)


def test_a_fit_is_the_same_in_any_order_of_the_texts(model):
    again = m.fit_model(MANUAL[::-1])
    assert again.held_out.tolist() == pytest.approx(model.held_out.tolist())


@pytest.mark.parametrize("text", ["", " ", "...", "\ud800 lone", "人人生而自由", "\x00", "a" * 100_000])
def test_odd_text_has_a_finite_perplexity(model, text):
    assert 1 <= model.perplexity(text) < float("inf")
    assert 0 <= model.percentile(model.perplexity(text)) <= 100


def test_a_saved_model_gives_the_same_numbers(model, tmp_path):
    loaded = m.load_model(m.save_model(model, tmp_path / "en"))
    assert loaded.perplexity(topics["class"]) == model.perplexity(topics["class"])
    with pytest.raises(FileExistsError):
        m.save_model(model, tmp_path / "en")


def test_damage_and_strange_folders_are_named(model, tmp_path):
    folder = m.save_model(model, tmp_path / "en")
    with open(folder / "3_keys.npy", "ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match="3_keys.npy"):
        m.load_model(folder)
    with pytest.raises(UserError, match="manifest"):
        m.load_model(tmp_path)


def test_a_small_reference_is_refused_with_its_name(tmp_path):
    (tmp_path / "small.txt").write_text("A few words.")
    cfg = QualityConfig(reference={"en": str(tmp_path / "small.txt")})
    with pytest.raises(UserError, match=r"reference en=.*small.txt.* too few") as error:
        m.fit_references(cfg, tmp_path / "models")
    assert "\n" not in str(error.value)


def test_references_are_fitted_once_and_other_text_is_refused(tmp_path):
    (tmp_path / "manual.txt").write_text("\n".join(MANUAL), encoding="utf-8")
    cfg = QualityConfig(reference=f"en={tmp_path / 'manual.txt'}")
    first = m.fit_references(cfg, tmp_path / "models")["en"]
    stamp = (first / "manifest.json").stat().st_mtime_ns
    m.fit_references(cfg, tmp_path / "models")
    assert (first / "manifest.json").stat().st_mtime_ns == stamp
    assert list(m.load_references(tmp_path / "models")) == ["en"]
    (tmp_path / "manual.txt").write_text("\n".join(MANUAL[:-1]), encoding="utf-8")
    with pytest.raises(UserError, match="other text"):
        m.fit_references(cfg, tmp_path / "models")


def test_head_middle_tail_cut_the_held_out_text_at_30_and_60(model):
    parts = Counter(m.perplexity_part(model.percentile(value)) for value in model.held_out)
    total = len(model.held_out)
    assert parts["head"] / total == pytest.approx(0.3, abs=0.03) and parts["tail"] / total == pytest.approx(0.4, abs=0.03)
