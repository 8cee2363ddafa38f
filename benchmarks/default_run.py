"""The README's run, from an empty cache: its curve, its samples, and where its time goes.

    python benchmarks/default_run.py

Writes results/default_run.json, which 09_train draws. Compiling is timed on the same model: its start, and a step's time as a ratio.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

from llm_from_scratch.config import Config, replace
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks, environment_report, set_deterministic
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.optim import set_lr
from llm_from_scratch.train import build_training, prepare_data, run, split_batch

RESULTS = Path(__file__).parent / "results" / "default_run.json"


def compile_against_eager(config: Config, num_steps: int = 15) -> dict[str, float]:
    "Seconds until the first compiled step is done, and the median compiled step as a share of an eager one, in turn."
    data = prepare_data(config)
    runs = {choice: build_training(replace(config, train={"compile": choice}), data, Ranks()) for choice in ("never", "always")}
    batches, seconds = {choice: endless(training.loader) for choice, training in runs.items()}, {choice: [] for choice in runs}
    for step in range(num_steps):
        for choice, training in runs.items():
            batch, began = next(batches[choice]), time.perf_counter()
            set_lr(training.engine.optimizer, step, config.optim, config.train.steps)
            training.engine.train_step(split_batch(batch, config.train.micro_batch))
            seconds[choice].append(time.perf_counter() - began)
    ratio = statistics.median(seconds["always"][3:]) / statistics.median(seconds["never"][3:])
    return {"first compiled step": round(seconds["always"][0], 1), "compiled step / eager step": round(ratio, 2)}


def main() -> None:
    set_threads(None, Ranks())
    keep_freed_memory()
    set_deterministic(True)
    with tempfile.TemporaryDirectory() as folder:
        config, run_dir = replace(Config(), data={"cache_dir": f"{folder}/cache"}), Path(folder) / "tiny"
        began = time.perf_counter()
        prepare_data(config)
        prepared = time.perf_counter()
        assert run(config, run_dir) == 0
        ended = time.perf_counter()
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text())
        steps = sum(row["step_seconds"] for row in rows)
        seconds = {"tokenizer and shards": round(prepared - began, 1), "steps": round(steps, 1), "validation, samples, report": round(ended - prepared - steps, 1)}
        compiled = compile_against_eager(config)
    validations = [row for row in rows if "val_loss" in row]
    report = environment_report()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({
        "step": [row["step"] for row in rows], "loss": [round(row["loss"], 4) for row in rows],
        "val_step": [row["step"] for row in validations], "val_loss": [row["val_loss"] for row in validations],
        "summary": summary, "seconds": seconds, "compile": compiled, "cpu": report.get("cpu"), "torch": report.get("torch"),
    }, indent=1) + "\n")
    print(seconds, compiled)


if __name__ == "__main__":
    main()
