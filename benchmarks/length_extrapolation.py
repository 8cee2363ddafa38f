"""Trained on rows of 256 tokens, how does each kind of position read rows of 1,024?

    python benchmarks/length_extrapolation.py [--positions rope alibi alibi-learned none] [--steps N] [--threads N]

Small models on the standard library, a vocabulary of 1,024 pieces, no document masks, so that a row is one long text.
Appends a line a kind to results/length_extrapolation.jsonl: perplexity by position, in buckets of 64 tokens. A model with
RoPE is read twice, as trained and with its angles slowed down four times.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

from llm_from_scratch.config import Config, build_config
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.training_loop import build_training, prepare_data, train_on

RESULTS = Path(__file__).parent / "results" / "length_extrapolation.jsonl"
TRAINED, READ, BUCKET, ROWS = 256, 1024, 64, 48


def configure(positions: str, steps: int) -> Config:
    return build_config({
        "model": {"positions": positions, "max_seq_len": READ}, "tokenizer": {"vocab_size": 1024},
        "data": {"document_mask": False}, "train": {"steps": steps, "seq_len": TRAINED},
    })  # fmt: skip


def train(config: Config, data):
    training = build_training(config, data, Ranks())
    for batch in endless(training.loader):
        train_on(training, batch, stop=False)
        if training.step == config.train.steps:
            return training.model.eval()


@torch.no_grad()
def perplexity_by_position(model, rows: torch.Tensor) -> list[float]:
    "Perplexity of the targets at each bucket of positions, over all rows."
    total = torch.zeros(READ)
    for ids in rows.split(4):
        log_probabilities = model(ids[:, :-1]).float().log_softmax(-1)
        total -= log_probabilities.gather(-1, ids[:, 1:, None])[..., 0].sum(0)
    return [round(math.exp(value), 4) for value in (total / len(rows)).view(-1, BUCKET).mean(-1).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", nargs="+", default=["rope", "alibi", "alibi-learned", "none"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=None, help="of this process; none: all cores")
    options = parser.parse_args()
    set_threads(options.threads, Ranks())
    keep_freed_memory()
    data = prepare_data(configure("rope", options.steps))
    text = np.concatenate([np.asarray(shard[: ROWS * (READ + 1)]) for shard in data.val.shards])[: ROWS * (READ + 1)]
    rows = torch.from_numpy(text.astype(np.int64)).view(-1, READ + 1)
    for positions in options.positions:
        model = train(configure(positions, options.steps), data)
        row = {"positions": positions, "steps": options.steps, "trained": TRAINED, "bucket": BUCKET, "rows": len(rows),
               "perplexity": perplexity_by_position(model, rows), "torch": torch.__version__}  # fmt: skip
        if positions == "rope":
            model.cfg = model.cfg.model_copy(update={"rope_scaling": "linear", "rope_factor": READ / TRAINED})
            row["stretched"] = perplexity_by_position(model, rows)
        print(row)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
