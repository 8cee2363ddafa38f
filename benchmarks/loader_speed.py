"""How fast are batches of tokens read in random order, beside others' loaders and a plain copy?

    python benchmarks/loader_speed.py [--million-tokens 40] [--seconds 5] [--batch 16] [--seq-len 2048]

The same random tokens as token shards, as an Arrow data set of Hugging Face datasets (torch format), as litdata's chunks
and as one memory-mapped file; rows of 2,048 in batches of 16 (or what the options say), int64 inputs and targets out. The floor is a
memcpy of the same bytes, one after the other, between two arrays that no cache holds; "memcpy to one batch" writes them all
to one buffer of a batch's size, which stays in the cache as a staging buffer does. One process, one core, seconds of
processor time, so that other work on the machine counts less; the clock is read once in 1,024 rows; one run in ten rounds,
of which the median counts, with the C library's allocator set as training sets it (for all of them); whatever is not
installed is left out. Prints a table, appends a line to results/loader_speed.jsonl.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from llm_from_scratch.dataloader import TokenLoader, endless
from llm_from_scratch.env import environment_report
from llm_from_scratch.launch import keep_freed_memory
from llm_from_scratch.token_shards import open_shards, write_shards

RESULTS = Path(__file__).parent / "results" / "loader_speed.jsonl"
ROUNDS = 10


def tokens_a_second(batches, seconds: float) -> float:
    "Batches are pairs of inputs and targets."
    count, began = 0, time.process_time()
    while (spent := time.process_time() - began) < seconds:
        rows = 0
        while rows < 1_024:
            inputs, targets = next(batches)
            rows, count = rows + len(targets), count + targets.numel()
    return count / spent


def ours(shards, batch_size: int, **options):
    for batch in endless(TokenLoader(shards, batch_size=batch_size, **options)):
        yield batch.inputs, batch.targets


def plain_memmap(path: Path, num_tokens: int, batch_size: int, row: int):
    data, random = np.memmap(path, "<u2", mode="r"), np.random.default_rng(0)
    while True:
        starts = random.integers(0, num_tokens - row, batch_size)
        rows = torch.stack([torch.from_numpy(data[start : start + row].astype(np.int64)) for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def hugging_face(tokens: np.ndarray, folder: Path, batch_size: int, row: int):
    import datasets
    import pyarrow as pa

    rows = tokens[: len(tokens) // row * row]
    column = pa.ListArray.from_arrays(pa.array(np.arange(0, len(rows) + 1, row, dtype=np.int32)), pa.array(rows))
    datasets.disable_progress_bars()
    datasets.Dataset(pa.table({"ids": column})).save_to_disk(folder)
    loaded = datasets.load_from_disk(folder).with_format("torch")
    while True:
        for batch in torch.utils.data.DataLoader(loaded, batch_size=batch_size, shuffle=True, drop_last=True):
            ids = batch["ids"].long()
            yield ids[:, :-1], ids[:, 1:]


def read_part(path):
    yield torch.from_numpy(np.load(path).astype(np.int32))


def lit(tokens: np.ndarray, folder: Path, batch_size: int, row: int):
    import litdata

    parts = []
    for number, part in enumerate(np.array_split(tokens, 8)):
        parts.append(str(folder / f"{number}.npy"))
        np.save(parts[-1], part)
    litdata.optimize(fn=read_part, inputs=parts, output_dir=str(folder / "chunks"), chunk_size=row * 1_024, item_loader=litdata.TokensLoader(block_size=row), num_workers=1)
    data = litdata.StreamingDataset(str(folder / "chunks"), item_loader=litdata.TokensLoader(block_size=row), shuffle=True)
    while True:
        for batch in litdata.StreamingDataLoader(data, batch_size=batch_size, drop_last=True):
            ids = batch.long()
            yield ids[:, :-1], ids[:, 1:]


def memcpy(source: np.ndarray, target: np.ndarray, batch_size: int, row: int):
    size, done, at = batch_size * row, torch.empty(batch_size, row - 1), 0
    while True:
        to = at if len(target) > size else 0
        np.copyto(target[to : to + size], source[at : at + size])
        at = (at + size) % (len(source) - size)
        yield done, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million-tokens", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2_048)
    options = parser.parse_args()
    batch, row = options.batch, options.seq_len + 1
    torch.set_num_threads(1)
    keep_freed_memory()
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50_000, options.million_tokens * 10**6).astype("<u2")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        ends = np.cumsum(random.geometric(1 / 600, len(tokens) // 500))
        write_shards(np.split(tokens, ends[ends < len(tokens)]), work / "shards", vocab_size=50_000, tokenizer_fingerprint="random")
        shards = open_shards(work / "shards")
        tokens.tofile(work / "tokens.bin")
        many, one, words = np.zeros(len(tokens), np.int64), np.zeros(batch * row, np.int64), tokens.astype(np.int64)
        makers = {
            "memcpy": lambda: memcpy(words, many, batch, row),
            "memcpy to one batch": lambda: memcpy(words, one, batch, row),
            "token shards": lambda: ours(shards, batch, seq_len=row - 1, document_mask=False, prefetch_batches=0),
            "token shards, read ahead": lambda: ours(shards, batch, seq_len=row - 1, document_mask=False),
            "token shards with document masks": lambda: ours(shards, batch, seq_len=row - 1, prefetch_batches=0),
            "plain memmap": lambda: plain_memmap(work / "tokens.bin", len(tokens), batch, row),
            "datasets": lambda: hugging_face(tokens, work / "arrow", batch, row),
            "litdata": lambda: lit(tokens, work, batch, row),
        }
        running = {}
        for loader, make in makers.items():
            try:
                running[loader] = make()
                tokens_a_second(running[loader], 1.0)
            except ImportError as error:
                print(f"{loader}: left out, {error}")
                del running[loader]
        rounds = [{loader: tokens_a_second(batches, options.seconds / ROUNDS) for loader, batches in running.items()} for _ in range(ROUNDS)]
        found = {loader: float(np.median([one[loader] for one in rounds])) for loader in running}
        for batches in running.values():
            batches.close()
    for loader, speed in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{loader:34} {speed / 1e6:9.1f} million tokens/s   {speed / found['memcpy']:6.3f} of memcpy   {speed / found.get('datasets', np.nan):8.1f} x datasets")
    report = environment_report()
    line = {"batch": [batch, options.seq_len], "million_tokens": options.million_tokens, "tokens_per_second": {key: round(value) for key, value in found.items()}, "cpu": report.get("cpu"), "torch": torch.__version__}
    with open(RESULTS, "a") as file:
        file.write(json.dumps(line, default=str) + "\n")


if __name__ == "__main__":
    main()
