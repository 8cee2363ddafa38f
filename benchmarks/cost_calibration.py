"""How well do ten steps predict a run, and the account its memory?

    python benchmarks/cost_calibration.py [--steps 40]       (three shapes, three seeds: some minutes)
    python benchmarks/cost_calibration.py --run NAME FOLDER  (a run that is there already, under a name)

Appends to results/cost_calibration.jsonl: `cost --calibrate` on real runs of one process; ratios of
predicted to measured time (from step 12 on, evaluations and saves left out) and memory (fullest moment).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "cost_calibration.jsonl"
SHAPES = {
    "64 wide": ["--model.hidden-size", "64"],
    "128 wide": ["--model.hidden-size", "128", "--train.global-batch", "2"],
    "rows of 256": ["--model.hidden-size", "64", "--train.seq-len", "256"],
}
QUIET = ["--model.num-layers", "2", "--train.seq-len", "128", "--train.global-batch", "4", "--train.micro-batch", "4", "--tokenizer.vocab-size", "1024",
         "--train.dtype", "fp32", "--eval.every-steps", "300", "--checkpoint.every-steps", "300", "--eval.num-samples", "0", "--eval.num-completions", "0", "--log.tensorboard", "False"]


def compare(name: str, run: Path, **more) -> None:
    "Append a run's ratios."
    told = json.loads(subprocess.run([sys.executable, "-m", "llm_from_scratch.cost", "--calibrate", str(run), "--json"], check=True, capture_output=True, text=True).stdout)
    row = {"name": name, **more, "steps": told["num_steps"] + 11, "time_ratio": told["predicted_seconds"] / told["measured_seconds"], "memory_ratio": told["predicted_bytes"] / told["measured_bytes"]}
    print(json.dumps(row), flush=True)
    with RESULTS.open("a") as file:
        print(json.dumps(row), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--run", nargs=2, metavar=("NAME", "FOLDER"))
    options = parser.parse_args()
    if options.run:
        return compare(options.run[0], Path(options.run[1]))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            for name, shape in SHAPES.items():
                run = Path(folder, f"{name.replace(' ', '-')}-{seed}")
                command = [sys.executable, "-m", "llm_from_scratch.train", "--run-dir", str(run), "--train.seed", str(seed), "--train.steps", str(options.steps), *QUIET, *shape]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                compare(name, run, seed=seed)


if __name__ == "__main__":
    main()
