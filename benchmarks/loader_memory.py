"""Does a loader's memory stay flat over 20,000 batches?

    python benchmarks/loader_memory.py [--batches 20000] [--workers 2] [--only LOADER]

Token shards through the loader's own processes, beside two classic leaks in a DataLoader of as many workers: lines of text
files through Python's linecache, which keeps every file that it has seen; and a list of Python objects, whose reference
counts are written at each reading, so that every worker comes to own a copy. Memory is what main process and workers hold
for themselves alone (USS). Prints a table, appends a line a loader to results/loader_memory.jsonl.
"""

import argparse
import json
import linecache
import tempfile
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from llm_from_scratch.dataloader import TokenLoader, endless
from llm_from_scratch.token_shards import open_shards, write_shards

RESULTS = Path(__file__).parent / "results" / "loader_memory.jsonl"
BATCH, SEQ_LEN, ROWS, FILES = 8, 64, 160_000, 4_000


class Lines(Dataset):
    "A row a line, of files that are read through linecache."

    def __init__(self, folder: Path):
        self.folder = folder

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        line = linecache.getline(str(self.folder / f"{index % FILES}.txt"), index // FILES % 40 + 1)
        return torch.tensor([int(word) for word in line.split()][:SEQ_LEN])


class Objects(Dataset):
    "A row an object of a Python list."

    def __init__(self):
        random = np.random.default_rng(0)
        self.rows = [" ".join(map(str, row)) for row in random.integers(0, 1_000, (ROWS, SEQ_LEN)).tolist()]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([int(word) for word in self.rows[index].split()])


def write_lines(folder: Path) -> Path:
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.txt").write_text("\n".join(" ".join(map(str, row)) for row in random.integers(0, 1_000, (40, SEQ_LEN)).tolist()))
    return folder


def own_megabytes() -> float:
    "What this process and its children hold alone."
    main = psutil.Process()
    return sum(process.memory_full_info().uss for process in (main, *main.children(recursive=True))) / 1e6


def curve(batches, count: int) -> dict:
    "Memory at forty places of the way."
    every, places, megabytes = max(1, count // 40), [], []
    for number, _ in zip(range(1, count + 1), batches):
        if number % every == 0 or number == every // 4:
            places.append(number)
            megabytes.append(round(own_megabytes(), 1))
    return {"batches": places, "megabytes": megabytes}


def repeated(data: Dataset, workers: int):
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", help="one of the loaders")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work, random = Path(name), np.random.default_rng(0)
        write_shards(random.integers(0, 1_000, (ROWS // 10, SEQ_LEN * 10)), work / "shards", vocab_size=1_000, tokenizer_fingerprint="random", shard_tokens=2**21)

        def ours():
            loader = TokenLoader(open_shards(work / "shards"), batch_size=BATCH, seq_len=SEQ_LEN, num_workers=options.workers)
            yield from endless(loader)

        makers = {"token shards": ours, "line cache": lambda: repeated(Lines(write_lines(work / "lines")), options.workers), "list of objects": lambda: repeated(Objects(), options.workers)}
        for loader, make in makers.items():
            if options.only not in (None, loader):
                continue
            batches = make()
            found = curve(batches, options.batches)
            batches.close()
            print(f"{loader:16} {found['megabytes'][0]:8.1f} -> {found['megabytes'][len(found['megabytes']) // 2]:8.1f} -> {found['megabytes'][-1]:8.1f} MB")
            with open(RESULTS, "a") as file:
                file.write(json.dumps({"loader": loader, "workers": options.workers, "batch": [BATCH, SEQ_LEN], **found}) + "\n")


if __name__ == "__main__":
    main()
