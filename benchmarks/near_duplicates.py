"""How many near-duplicates are found, how surely and how fast?

    python benchmarks/near_duplicates.py [--documents N] [--skip-speed]

Recall and precision: 713 licence texts (LLM_SHARED_DATA/neardup), all pairs compared with plain Python sets. Speed: pages
of about 3 kB made of lines of the standard library, three tenths of them edited copies, against the same job with Python
sets (and datasketch where it is installed), on one core in one run. Prints tables, appends a line a table to
results/near_duplicates.jsonl.
"""

import argparse
import gzip
import json
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from llm_from_scratch.dedup import TOKEN, DedupConfig, _band_keys, find_duplicates, found_share, near_duplicates, sign_documents
from llm_from_scratch.documents import stdlib_files
from llm_from_scratch.env import environment_report

RESULTS = Path(__file__).parent / "results" / "near_duplicates.jsonl"
METHODS = ("exact", "minhash", "simhash")
EDGES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)


def naive_shingles(text: str, shingle: int = 5) -> frozenset:
    words = TOKEN.findall(text.lower())
    return frozenset(tuple(words[i : i + shingle]) for i in range(max(1, len(words) - shingle + 1)))


def exact_likeness(sets: list[frozenset]) -> np.ndarray:
    "(N, N) Jaccard of all pairs, by counting the pairs that every shingle brings together."
    where: dict[tuple, list[int]] = {}
    for index, one in enumerate(sets):
        for shingle in one:
            where.setdefault(shingle, []).append(index)
    shared = np.zeros((len(sets), len(sets)))
    for documents in where.values():
        shared[np.ix_(documents, documents)] += 1
    sizes = np.diag(shared)
    return shared / (sizes[:, None] + sizes - shared)


def naive_greedy(likeness: np.ndarray, threshold: float) -> dict[int, int]:
    "Every document against all that are kept: the dropped ones, with the first kept one that each resembles."
    kept: list[int] = []
    dropped = {}
    for index in range(len(likeness)):
        alike = np.array(kept, int)[likeness[index, kept] >= threshold]
        if len(alike):
            dropped[index] = int(alike[0])
        else:
            kept.append(index)
    return dropped


def licences() -> list[str]:
    folder = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"), "neardup")
    with gzip.open(folder / "spdx_licenses.jsonl.gz", "rt") as file:
        return [json.loads(line)["text"] for line in file]


def found_pairs(texts: list[str], method: str) -> np.ndarray:
    "(N, N) whether a pair shares a key."
    cfg = DedupConfig(method=method)
    with tempfile.TemporaryDirectory() as folder:
        sign_documents(texts, Path(folder, "signed"), cfg)
        keys = np.load(Path(folder, "signed", "exact.npy" if method == "exact" else "signatures.npy"))
    if method == "exact":
        return (keys[:, None] == keys[None]).all(axis=2)
    keys = _band_keys(keys, cfg)
    return np.array([(row == keys).any(axis=1) for row in keys])


def pair_recall(texts: list[str], likeness: np.ndarray) -> dict:
    "By Jaccard bin, the share of all pairs that each method brings to the comparison."
    one, other = np.triu_indices(len(texts), 1)
    values = likeness[one, other]
    bins = np.clip(np.digitize(values, EDGES) - 1, -1, len(EDGES) - 2)
    inside = [bins == index for index in range(len(EDGES) - 1)]
    table: dict = {}
    for method in METHODS:
        found = found_pairs(texts, method)[one, other]
        table[method] = [float(found[here].mean()) for here in inside]
    theory = [float(found_share(values[here], 16, 8).mean()) for here in inside]
    return {**table, "theory": theory, "num_pairs": [int(here.sum()) for here in inside]}


def quality() -> list[dict]:
    texts = licences()
    likeness = exact_likeness([naive_shingles(text) for text in texts])
    table = pair_recall(texts, likeness)
    print("licence pairs: share found, by exact Jaccard of the pair")
    print(f"{'from':>8} {'pairs':>6} {'theory':>7}" + "".join(f"{method:>9}" for method in METHODS))
    for i, low in enumerate(EDGES[:-1]):
        found = "".join(f"{table[method][i]:9.3f}" for method in METHODS)
        print(f"{low:8.2f} {table['num_pairs'][i]:6} {table['theory'][i]:7.3f}{found}")
    rows = [{"table": "pair_recall", "edges": EDGES, **table}]
    print("\nthe whole set: documents dropped, those rightly dropped, and those that comparing all would drop")
    for threshold in (0.7, 0.8, 0.85, 0.9):
        wanted = naive_greedy(likeness, threshold).keys()
        for method in METHODS:
            found = near_duplicates(texts, threshold=threshold, method=method).duplicate_of
            right = [likeness[pair] >= threshold for pair in found.items()]
            row = dict(threshold=threshold, method=method, dropped=len(found), precision=float(np.mean(right)) if right else None,
                       wanted=len(wanted), recall=len(wanted & found.keys()) / len(wanted))
            rows.append({"table": "licences", **row})
            print(f"  {threshold:.2f} {method:8} {row['dropped']:4} precision {row['precision']}  recall {row['recall']:.3f}")
    return rows


def pages(num_documents: int, share_copies: float = 0.3, seed: int = 0) -> list[str]:
    lines = [line for path in stdlib_files() for line in path.read_text(errors="ignore").splitlines() if line.strip()]
    rng, made = random.Random(seed), []
    for _ in range(num_documents):
        if made and rng.random() < share_copies:
            words = rng.choice(made).split(" ")
            for place in rng.sample(range(len(words)), min(len(words), rng.randrange(0, 6))):
                words[place] = f"edit{rng.randrange(10**6)}"
            made.append(" ".join(words))
        else:
            made.append("\n".join(rng.sample(lines, 75)))
    return made


def naive_sign(texts: list[str], num_perm: int = 128) -> list:
    multipliers = np.random.default_rng(0).integers(1, 2**31, num_perm, dtype=np.uint64)
    hashed = [np.array([hash(one) & 0xFFFFFFFF for one in naive_shingles(text)], np.uint64) for text in texts]
    return [((one[:, None] * multipliers) % np.uint64(2**61 - 1)).min(axis=0) for one in hashed]


def naive_find(texts: list[str], threshold: float = 0.85) -> list[frozenset]:
    kept: list[frozenset] = []
    for one in map(naive_shingles, texts):
        if not any(len(one & other) >= threshold * len(one | other) for other in kept):
            kept.append(one)
    return kept


def datasketch_sign(texts: list[str], num_perm: int = 128) -> list:
    from datasketch import MinHash

    made = []
    for text in texts:
        one = MinHash(num_perm=num_perm)
        one.update_batch([" ".join(shingle).encode() for shingle in naive_shingles(text)])
        made.append(one)
    return made


def rate(function, texts: list[str]) -> float:
    start = time.process_time()
    function(texts)
    return len(texts) / (time.process_time() - start)


def peers(texts: list[str]) -> dict[str, float]:
    found = {"naive signing": rate(naive_sign, texts[:300]), "naive finding": rate(naive_find, texts[:1000])}
    try:
        found["datasketch signing"] = rate(datasketch_sign, texts[:500])
    except ImportError:
        print("datasketch is not installed: its row is left out")
    return found


def our_rates(texts: list[str], method: str, memory_bytes: int) -> dict:
    cfg = DedupConfig(method=method, memory_bytes=memory_bytes)
    with tempfile.TemporaryDirectory() as folder:
        signing = rate(lambda all_texts: sign_documents(all_texts, Path(folder, "signed"), cfg), texts)
        stored = sum(path.stat().st_size for path in Path(folder, "signed").iterdir())
        start = time.process_time()
        result = find_duplicates([Path(folder, "signed")], folder, cfg)
        finding = len(texts) / (time.process_time() - start)
    return dict(method=method, documents=len(texts), signing=signing, finding=finding, both=1 / (1 / signing + 1 / finding),
                stored_bytes=stored / len(texts), peak_memory_bytes=result.peak_memory_bytes, **result.counts())


def speed(num_documents: int) -> list[dict]:
    texts = pages(num_documents)
    size = sum(map(len, texts)) / len(texts)
    print(f"\nspeed: {len(texts)} pages of {size:.0f} characters, documents a second of processor time")
    rows = [{"table": "speed", "mean_characters": size, **our_rates(texts, method, 2**28)} for method in METHODS]
    for row in rows:
        print(f"  {row['method']:8} signing {row['signing']:9.0f}  finding {row['finding']:9.0f}  both {row['both']:8.0f}"
              f"  {row['stored_bytes']:6.0f} bytes a document on disk, kept {row['kept']}, peak {row['peak_memory_bytes'] / 2**20:.0f} MiB")
    others = peers(texts)
    print("\n".join(f"  {name:20} {value:9.0f}" for name, value in others.items()))
    return [*rows, {"table": "peers", **others}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000, help="pages for the speed table")
    parser.add_argument("--skip-speed", action="store_true")
    args = parser.parse_args()
    rows = quality() + ([] if args.skip_speed else speed(args.documents))
    report = environment_report()
    with open(RESULTS, "a") as file:
        for row in rows:
            file.write(json.dumps({**row, "numpy": np.__version__, "cpu": report.get("cpu")}) + "\n")


if __name__ == "__main__":
    main()
