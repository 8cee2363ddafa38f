"""How much of a perplexity is the seed? The `tiny` preset on WikiText-2's train split, five seeds, and ten repeats of one evaluation.

    python benchmarks/wikitext_seeds.py --data FOLDER --work FOLDER [--seeds 0 1 2 3 4] [--threads 1] [--repeats 10]

As wikitext_ten_minutes.py, but the preset's own number of steps. Runs that lie in the work folder already are scored and not trained again.
Appends a card a seed, with the seed, to results/wikitext_seeds.jsonl; the first seed's is measured as often as --repeats says.
"""

import argparse
import json
import subprocess
from pathlib import Path

from wikitext_ten_minutes import RESULTS, command, find, training_data

from llm_from_scratch.checkpointing import load_run
from llm_from_scratch.evaluation_cards import card_line, deterministic, make_card
from llm_from_scratch.wikitext import read_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    training_data(options.data, options.work)
    path = find(options.data, "wiki.test.tokens")
    split = read_split(path, "tokens")
    for seed in options.seeds:
        name = f"seed_{seed}"
        if not (options.work / name / "summary.json").exists():
            subprocess.run(command(options.work, name, options.threads, train__seed=seed), check=True, stdout=subprocess.DEVNULL)
        with deterministic():
            card = make_card(load_run(options.work / name), split, places=dict(text=path.name, run=name), window=256, stride=256, num_repeats=options.repeats if seed == options.seeds[0] else 1)
        with open(RESULTS / "wikitext_seeds.jsonl", "a") as file: file.write(json.dumps({"seed": seed, **card}) + "\n")
        print(seed, card_line(card), flush=True)


if __name__ == "__main__":
    main()
