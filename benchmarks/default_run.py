"""The README's run, from an empty cache: its curve, its samples, and where its time goes.

    python benchmarks/default_run.py [--run-dir RUN]

Writes results/default_run.json, which 09_train draws. With --run-dir a finished run is read instead of making one.
Compiling is timed on the same model: its start, and a step's time as a share of an eager one.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from llm_from_scratch.artifacts import Lock
from llm_from_scratch.config import Config, replace
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks, set_deterministic
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.optim import set_lr
from llm_from_scratch.train import run
from llm_from_scratch.training_loop import build_training, prepare_data, split_batch

RESULTS = Path(__file__).parent / "results" / "default_run.json"


def compile_against_eager(config: Config, num_steps: int = 12) -> dict[str, float]:
    "Seconds until the first compiled step is done, and the median compiled step as a share of an eager one, in turn."
    data = prepare_data(config)
    runs = {choice: build_training(replace(config, train={"compile": choice}), data, Ranks()) for choice in ("never", "always")}
    batches, seconds = {choice: endless(training.loader) for choice, training in runs.items()}, {choice: [] for choice in runs}
    for step in range(num_steps):
        for choice, training in runs.items():
            batch, began = next(batches[choice]), time.perf_counter()
            set_lr(training.engine.optimizer, step, training.schedule)
            training.engine.train_step(split_batch(batch, config.train.micro_batch))
            seconds[choice].append(time.perf_counter() - began)
    ratio = statistics.median(seconds["always"][3:]) / statistics.median(seconds["never"][3:])
    return {"first compiled step": round(seconds["always"][0], 1), "compiled step / eager step": round(ratio, 2)}


def describe(run_dir: Path) -> dict:
    "Curve, samples and seconds of a finished run; its files' times are those of its stages."
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validations = [row for row in rows if "val_loss" in row]
    claimed, described, told = ((run_dir / name).stat().st_mtime for name in (".lock", "config.yaml", "summary.json"))
    steps = sum(row["step_seconds"] for row in rows)
    environment = json.loads((run_dir / "env.json").read_text())
    return {
        "step": [row["step"] for row in rows], "loss": [round(row["loss"], 4) for row in rows],
        "val_step": [row["step"] for row in validations], "val_loss": [row["val_loss"] for row in validations],
        "summary": json.loads((run_dir / "summary.json").read_text()), "cpu": environment["cpu"],
        "seconds": {"tokenizer and shards": round(described - claimed, 1), "steps": round(steps, 1), "validation, samples, report": round(told - described - steps, 1)},
    }


def new_run(folder: Path) -> Path:
    "The default run with an empty cache; its folder."
    run_dir = folder / "tiny"
    with Lock(run_dir / ".lock"):
        assert run(replace(Config(), data={"cache_dir": str(folder / "cache")}), run_dir) == 0
    return run_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=None, help="a finished run; none: make one")
    options = parser.parse_args()
    set_threads(None, Ranks())
    keep_freed_memory()
    set_deterministic(True)
    with tempfile.TemporaryDirectory() as folder: described = describe(options.run_dir or new_run(Path(folder)))
    described["compile"] = compile_against_eager(Config())
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(described, indent=1) + "\n")
    print(described["seconds"], described["compile"])


if __name__ == "__main__":
    main()
