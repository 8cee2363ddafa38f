import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from llm_from_scratch import dedup
from llm_from_scratch.dedup import DedupConfig, find_duplicates, jaccard, near_duplicates, shingle_sets, sign_documents
from llm_from_scratch.env import UserError

DATA = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"), "neardup")

GOLDEN_SHINGLES = [13001003567644490383, 7605935917024898086, 1177995909959490532, 8640688741661106046]
GOLDEN_TEXT = [[728577417007772825, 10457265594366419360]]
GOLDEN_SIGNATURE = [[1676589580, 2499757220, 2896029048]]


def words_of(rng, num_words):
    return [f"{rng.choice('aeiou')}{rng.getrandbits(40):x}" for _ in range(num_words)]


def collection(num_documents=200, seed=0):
    "Originals and edited copies, some of them equal, some shorter than a shingle."
    rng = random.Random(seed)
    texts = []
    for _ in range(num_documents):
        if texts and rng.random() < 0.5:
            words = rng.choice(texts).split(" ")
            for place in rng.sample(range(len(words)), min(len(words), rng.randrange(0, 4))):
                words[place] = f"edit{rng.getrandbits(20)}"
        else:
            words = words_of(rng, rng.choice([1, 3, 30, 80, 200]))
        texts.append(" ".join(words))
    return texts


def naive_sets(texts, shingle):
    for text in texts:
        tokens = dedup.TOKEN.findall(text.lower())
        yield {tuple(tokens[i : i + shingle]) for i in range(max(1, len(tokens) - shingle + 1))}


def naive_keeper(texts, threshold, shingle=5):
    sets, kept, keeper = list(naive_sets(texts, shingle)), [], []
    for index, one in enumerate(sets):
        alike = [k for k in kept if len(one & sets[k]) / len(one | sets[k]) >= threshold]
        keeper.append(alike[0] if alike else index)
        if not alike:
            kept.append(index)
    return keeper


def in_folders(texts, folder, num_folders, cfg):
    names = [folder / f"{number:02}" for number in range(num_folders)]
    for name, part in zip(names, np.array_split(np.arange(len(texts)), num_folders)):
        sign_documents([texts[i] for i in part], name, cfg)
    return find_duplicates(names, folder / "work", cfg)


def report_bytes(result):
    parts = [result.kept, sorted(result.duplicate_of.items()), result.largest_cluster, result.counts(), result.clusters(), result.num_compared]
    return json.dumps(parts).encode()


def test_ded_2_pairs_below_the_threshold_stay():
    rng = random.Random(2)
    texts = []
    for _ in range(500):
        shared = words_of(rng, 24)
        texts += [" ".join(shared + words_of(rng, 8)) for _ in "ab"]
    assert jaccard(texts[0], texts[1], shingle=1) == 0.6
    result = near_duplicates(texts, threshold=0.8, shingle=1)
    assert result.kept == list(range(1000)) and result.duplicate_of == {} and result.num_compared > 0


def test_ded_3_unrelated_paragraphs_stay():
    common = "the of and to in a is that for it was on are as with his they be at one have this from".split()
    rng = random.Random(3)
    stock = common * 20 + words_of(rng, 2000)
    texts = [" ".join(rng.choices(stock, k=400)) for _ in range(50)]
    for method in ("minhash", "simhash"):
        assert near_duplicates(texts, threshold=0.8, method=method).kept == list(range(50))


def test_ded_3_a_chain_keeps_its_ends():
    rng = random.Random(4)
    core, left, middle, right = words_of(rng, 60), words_of(rng, 12), words_of(rng, 4), words_of(rng, 12)
    a, b, c = (" ".join(core + part) for part in (left, left + middle + right, right))
    assert jaccard(a, c, shingle=1) < 0.8 <= min(jaccard(a, b, shingle=1), jaccard(b, c, shingle=1))
    result = near_duplicates([a, b, c], threshold=0.8, shingle=1)
    assert (result.kept, result.duplicate_of, result.largest_cluster) == ([0, 2], {1: 0}, 2)


def test_ded_4_survivors_do_not_depend_on_workers_or_memory(tmp_path):
    texts = collection()
    wanted = report_bytes(in_folders(texts, tmp_path / "1", 1, DedupConfig()))
    assert len(json.loads(wanted)[1]) > 30
    for num_folders, memory_bytes in [(4, 2**28), (4, 2**16), (30, 2**28)]:
        found = in_folders(texts, tmp_path / f"{num_folders}-{memory_bytes}", num_folders, DedupConfig(memory_bytes=memory_bytes))
        assert report_bytes(found) == wanted


def test_ded_4_survivors_do_not_depend_on_the_hash_seed(tmp_path):
    texts = collection()
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    program = (
        "import json, sys; from llm_from_scratch.dedup import near_duplicates, shingle_sets;"
        "texts = json.load(open(sys.argv[1])); found = near_duplicates(texts);"
        "print(json.dumps([found.kept, sorted(found.duplicate_of.items()), [int(v) for v in shingle_sets(texts)[0]]]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tmp_path / "texts.json")]
    run = subprocess.Popen(command, env={**environment, "PYTHONHASHSEED": "1"}, stdout=subprocess.PIPE)
    found = near_duplicates(texts)
    wanted = [found.kept, [list(pair) for pair in sorted(found.duplicate_of.items())], shingle_sets(texts)[0].tolist()]
    assert json.loads(run.communicate(timeout=300)[0]) == wanted


def test_ded_4_hashes_are_those_of_every_machine():
    values, _ = shingle_sets(["one two three four five", "naïve", "火车九点从", "..."])
    assert values.tolist() == GOLDEN_SHINGLES
    assert dedup.text_hashes(["one"]).tolist() == GOLDEN_TEXT
    assert dedup.minhash_signatures(*shingle_sets(["one two three four five six"]), 3).tolist() == GOLDEN_SIGNATURE


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.1, float("nan"), float("inf")])
def test_ded_5_impossible_thresholds_are_refused_with_the_range(threshold):
    with pytest.raises(ValidationError, match="above 0 and at most 1|finite"):
        DedupConfig(threshold=threshold)
    with pytest.raises(UserError, match="above 0 and at most 1|finite") as error:
        near_duplicates(["a"], threshold=threshold)
    assert "\n" not in str(error.value)


def test_ded_5_threshold_1_means_equal_texts():
    texts = ["a b c d e f", "A b c d e f", "a b c d e f", "a b c d e f "]
    assert near_duplicates(texts, threshold=1.0).duplicate_of == {2: 0}
    assert near_duplicates(texts, threshold=0.99).duplicate_of == {1: 0, 2: 0, 3: 0}


def test_ded_5_and_cln_8_memory_is_bounded_and_the_bands_are_on_disk(tmp_path):
    rng = random.Random(8)
    texts = [f"{rng.getrandbits(40)} {rng.getrandbits(40)}" for _ in range(40_000)]
    peaks = {}
    sign_documents(texts, tmp_path / "signed", DedupConfig())
    keys_bytes = (tmp_path / "signed" / "signatures.npy").stat().st_size
    for memory_bytes in (2**18, 2**28):
        tracemalloc.start()
        result = find_duplicates([tmp_path / "signed"], tmp_path, DedupConfig(memory_bytes=memory_bytes))
        peaks[memory_bytes] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(result.kept) == 40_000 and result.peak_memory_bytes > 2**20
    assert peaks[2**18] < peaks[2**28] < keys_bytes
    assert os.listdir(tmp_path) == ["signed"]


def test_cln_8_one_sort_takes_the_memory_that_it_may(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 2**64, 400_000, dtype=np.uint64)

    def blocks():
        for start in range(0, len(numbers), 10_000):
            yield numbers[start : start + 10_000], np.arange(start, start + 10_000)

    tracemalloc.start()
    seen = [documents for _, documents in dedup._parts(blocks, len(numbers), 2**20)]
    peak = tracemalloc.get_traced_memory()[1] - sum(one.nbytes for one in seen)
    tracemalloc.stop()
    assert len(seen) == 25 and peak < 2**21
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(400_000))


def test_copies_are_compared_once_each():
    text = " ".join(words_of(random.Random(5), 200))
    result = near_duplicates([f"{text} {number}" for number in range(3000)])
    assert result.kept == [0] and result.num_compared == 2999
    assert result.clusters(top=1, members=2) == [(0, 3000, [1, 2])]


def test_a_shared_template_is_bounded_and_counted(tmp_path):
    rng = random.Random(6)
    template = words_of(rng, 80)
    texts = [" ".join(template + words_of(rng, 14)) for _ in range(150)]
    free = in_folders(texts, tmp_path / "free", 1, DedupConfig(max_candidates=10_000, shingle=1))
    bounded = in_folders(texts, tmp_path / "bounded", 1, DedupConfig(max_candidates=5, shingle=1))
    assert len(free.kept) == len(bounded.kept) == 150
    assert free.num_left_out == 0 and free.num_compared > 5_000
    assert bounded.num_left_out > 0 and bounded.num_compared <= 5 * 150


@pytest.mark.parametrize("threshold", [0.5, 0.85])
def test_the_greedy_choice_is_that_of_comparing_all(threshold):
    texts = collection(300, seed=int(threshold * 100))
    found, wanted = near_duplicates(texts, threshold=threshold), naive_keeper(texts, threshold)
    different = [i for i, keeper in enumerate(found.keeper.tolist()) if keeper != wanted[i]]
    assert len(different) <= 3
    sets = list(naive_sets(texts, 5))
    for a, b in found.duplicate_of.items():
        assert b < a and len(sets[a] & sets[b]) / len(sets[a] | sets[b]) >= threshold


def test_shingles_are_those_of_the_regular_expression():
    letters = "abcXYZ019_' \n\t.,-—éßİΣς你好の한กัน🙂\u200d\ud800\x00\u0301"
    rng = random.Random(7)
    texts = ["".join(rng.choices(letters, k=rng.randrange(80))) for _ in range(1500)]
    values, offsets = shingle_sets(texts, shingle=3)
    wanted = [one if one != {()} else {text.strip()} for one, text in zip(naive_sets(texts, 3), texts)]
    assert np.diff(offsets).tolist() == [len(one) for one in wanted]
    assert len(set(values.tolist())) == len(set().union(*wanted))
    alone = [shingle_sets([text], shingle=3)[0] for text in texts[:200]]
    assert all(np.array_equal(one, values[offsets[i] : offsets[i + 1]]) for i, one in enumerate(alone))


def test_long_texts_are_cut_without_a_trace(monkeypatch):
    rng = random.Random(9)
    text = "\n".join(" ".join(rng.choices(["日本", "naïve", "x", "word", "1984"], k=9)) for _ in range(400))
    whole = shingle_sets([text, "a b", text])
    monkeypatch.setattr(dedup, "PIECE_CHARACTERS", 100)
    pieces = shingle_sets([text, "a b", text])
    assert all(np.array_equal(one, other) for one, other in zip(whole, pieces))
    assert len(shingle_sets(["z" * 1000])[0]) > 0


def test_empty_and_wordless_texts():
    texts = ["", " ", "...", "!!!", "", "\ud800", "a", "A", "a b"]
    result = near_duplicates(texts)
    assert result.duplicate_of == {1: 0, 4: 0, 7: 6}
    assert [result.reason(i) for i in (0, 1, 4)] == ["", "near_duplicate", "exact_duplicate"]
    counts = result.counts()
    assert counts.pop("read") == sum(counts.values()) == 9
    assert near_duplicates([]).kept == [] and near_duplicates(["x"]).largest_cluster == 1


def test_one_sign_of_a_chinese_sentence_is_no_new_document():
    text = "今天的火车九点从第二站台出发开往海边的小城每个村庄都会停车" * 3
    assert 0.8 < jaccard(text, text.replace("九", "十", 1)) < 1
    assert jaccard("火车九点", "汽车九点") == 0


def test_methods_and_switches(tmp_path):
    texts = ["a b c d e f", "a b c d e f", "A b c d e f"]
    assert near_duplicates(texts, method="exact").duplicate_of == {1: 0}
    assert near_duplicates(texts, method="simhash").duplicate_of == {1: 0, 2: 0}
    assert in_folders(texts, tmp_path / "none", 1, DedupConfig(method="none")).kept == [0, 1, 2]
    result = in_folders(texts, tmp_path / "near", 2, DedupConfig(exact=False))
    assert result.counts() == dict(read=3, kept=1, exact_duplicate=0, near_duplicate=2)
    with pytest.raises(ValidationError, match="nothing to look for"):
        DedupConfig(exact=False, threshold=1.0)
    with pytest.raises(UserError, match="cannot find 98% at threshold 0.02; take at least 194"):
        near_duplicates(texts, threshold=0.02)


def test_other_options_and_unfinished_folders_are_refused(tmp_path):
    sign_documents(["a"], tmp_path / "a", DedupConfig())
    sign_documents([], tmp_path / "empty", DedupConfig())
    with pytest.raises(UserError, match="a: signed with .*'shingle': 5.* asked for .*'shingle': 4"):
        find_duplicates([tmp_path / "a"], tmp_path, DedupConfig(shingle=4))
    assert find_duplicates([tmp_path / "empty", tmp_path / "a", tmp_path / "empty"], tmp_path, DedupConfig(threshold=0.851)).kept == [0]
    (tmp_path / "empty" / "signing.json").unlink()
    with pytest.raises(UserError, match="empty.signing.json: no such file"):
        find_duplicates([tmp_path / "a", tmp_path / "empty"], tmp_path, DedupConfig())


@pytest.mark.skipif(not DATA.exists(), reason="no shared data")
def test_licences_are_found_at_the_known_likeness():
    with gzip.open(DATA / "spdx_licenses.jsonl.gz", "rt") as file:
        licences = {row["id"]: row["text"] for row in map(json.loads, file)}
    pairs = [line.split(",") for line in (DATA / "spdx_pairs_jaccard5w_ge0.3.csv").read_text().splitlines()[1:]]
    for a, b, value in pairs[::20]:
        assert jaccard(licences[a], licences[b]) == pytest.approx(float(value), abs=1e-4)
    texts = list(licences.values())
    result = near_duplicates(texts)
    assert len(result.duplicate_of) >= 114
    assert all(jaccard(texts[a], texts[b]) >= 0.85 for a, b in list(result.duplicate_of.items())[::5])
