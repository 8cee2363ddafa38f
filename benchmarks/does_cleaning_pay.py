"""Does cleaning pay? The tiny model on raw and on cleaned text of one crawl: the same tokens, the same clean held-out pages.

    python -m llm_from_scratch.corpus --inputs CRAWL.warc.gz --out CORPUS
    python benchmarks/does_cleaning_pay.py CRAWL.warc.gz CORPUS [--seeds 0 1 2] [--steps 300] [--threads N]

Raw is all visible text of every answer with status 200: menus, footers, copies and all. Clean is the corpus. A twentieth of the
corpus's documents, by the hash of their names, is held out of both. One tokenizer, trained on the raw text, serves both.
Prints bits per byte on the held-out documents; appends a line a run to results/does_cleaning_pay.jsonl.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path

from resiliparse.extract.html2text import extract_plain_text

from llm_from_scratch.config import build_config
from llm_from_scratch.data_cleaning import Document, normalize_text
from llm_from_scratch.dataloader import endless
from llm_from_scratch.documents import is_validation, list_inputs, read_documents
from llm_from_scratch.env import Ranks
from llm_from_scratch.html import decode_html
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.optim import set_lr
from llm_from_scratch.token_shards import encode_documents, open_shards, write_shards
from llm_from_scratch.tokenizer import Tokenizer
from llm_from_scratch.training_loop import Data, build_training, split_batch, validate
from llm_from_scratch.warc import WarcReader

RESULTS = Path(__file__).parent / "results" / "does_cleaning_pay.jsonl"
HELD_OUT = 0.05


def raw_documents(crawl: str):
    for record in WarcReader(crawl, kinds=("response",)):
        if record.status != 200: continue
        text = normalize_text(extract_plain_text(decode_html(record.body, record.http_headers.get("content-type")), main_content=False))
        if text: yield Document(f"{crawl}:{record.offset}", text)


def shards(documents, tokenizer: Tokenizer, folder: Path):
    write_shards(encode_documents(documents, tokenizer, Counter()), folder, vocab_size=tokenizer.vocab_size, tokenizer_fingerprint=tokenizer.fingerprint,
                 bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
    return open_shards(folder)


def train_and_score(config, data: Data) -> dict:
    training = build_training(config, data, Ranks())
    for batch in endless(training.loader):
        set_lr(training.engine.optimizer, training.step, training.schedule)
        result = training.engine.train_step(split_batch(batch, config.train.micro_batch))
        training.step, training.tokens = training.step + 1, training.tokens + result.num_tokens
        if training.step == config.train.steps: return {"tokens": training.tokens, **validate(training)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crawl")
    parser.add_argument("corpus")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    set_threads(options.threads, Ranks())
    keep_freed_memory()
    cleaned = list(read_documents(list_inputs([options.corpus]), Counter()))
    held_out = {document.id for document in cleaned if is_validation(document.id, HELD_OUT)}
    raw = [document for document in raw_documents(options.crawl) if document.id not in held_out]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.train((document.text for document in raw), vocab_size=4096, out=Path(folder, "tokenizer"))
        val = shards([document for document in cleaned if document.id in held_out], tokenizer, Path(folder, "val"))
        sides = {"raw": shards(raw, tokenizer, Path(folder, "raw")), "clean": shards([one for one in cleaned if one.id not in held_out], tokenizer, Path(folder, "clean"))}
        print({name: f"{side.num_documents:,} documents, {side.num_tokens:,} tokens" for name, side in sides.items()} | {"held out": f"{val.num_documents:,} documents, {val.num_tokens:,} tokens"})
        scores = {name: [] for name in sides}
        for seed in options.seeds:
            for name, side in sides.items():
                config = build_config({"train": {"steps": options.steps, "seed": seed}})
                row = {"text": name, "seed": seed, "steps": options.steps, "train_documents": side.num_documents, "train_tokens": side.num_tokens,
                       **train_and_score(config, Data(tokenizer, side, val))}
                scores[name].append(row["val_bpb"])
                with open(RESULTS, "a") as results: results.write(json.dumps(row) + "\n")
                print(f"{name:<6} seed {seed}: {row['val_bpb']:.4f} bits per byte", flush=True)
    for name, values in scores.items(): print(f"{name:<6} mean {statistics.mean(values):.4f}, lowest {min(values):.4f}, highest {max(values):.4f}")


if __name__ == "__main__":
    main()
