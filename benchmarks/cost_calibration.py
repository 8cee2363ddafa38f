"""How well do ten steps predict a run, and the account its memory?

    python benchmarks/cost_calibration.py       (three shapes, three seeds, 40 steps each: some minutes)

Appends to results/cost_calibration.jsonl: `cost --calibrate` on real runs of one process; ratios of
predicted to measured time (steps 12 to 40, evaluations and saves left out) and memory (fullest moment).
"""

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
QUIET = ["--model.num-layers", "2", "--train.seq-len", "128", "--train.global-batch", "4", "--train.micro-batch", "4", "--tokenizer.vocab-size", "1024", "--train.steps", "40",
         "--train.dtype", "fp32", "--eval.every-steps", "40", "--checkpoint.every-steps", "40", "--eval.num-samples", "0", "--eval.num-completions", "0", "--log.tensorboard", "False"]



def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            for name, options in SHAPES.items():
                run = Path(folder, f"{name.replace(' ', '-')}-{seed}")
                command = [sys.executable, "-m", "llm_from_scratch.train", "--run-dir", str(run), "--train.seed", str(seed), *QUIET, *options, *sys.argv[1:]]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                told = json.loads(subprocess.run([sys.executable, "-m", "llm_from_scratch.cost", "--calibrate", str(run), "--json"], check=True, capture_output=True, text=True).stdout)
                row = {"name": name, "seed": seed, "time_ratio": told["predicted_seconds"] / told["measured_seconds"], "memory_ratio": told["predicted_bytes"] / told["measured_bytes"]}
                print(json.dumps(row), flush=True)
                with RESULTS.open("a") as file: print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
