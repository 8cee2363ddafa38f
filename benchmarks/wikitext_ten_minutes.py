"""What does ten minutes on two cores give on WikiText-2? The `tiny` preset on the train split, then cards over windows and strides.

    python benchmarks/wikitext_ten_minutes.py --data FOLDER --work FOLDER [--minutes 10] [--threads 2] [--note TEXT]

FOLDER of the data holds wiki.train.tokens(.txt)(.xz), wiki.test.tokens(.txt) and wiki.test.raw. The model is trained on the word-level split
after `wikitext-1` made it readable, an article a document; `<unk>` stays text. The number of steps comes from fifteen steps timed before;
a run that is not through in time is stopped, evaluated as it is, and says so. Appends a line to results/wikitext_ten_minutes.jsonl and
writes a card a row to results/wikitext_cards/.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from llm_from_scratch.artifacts import write_json
from llm_from_scratch.checkpointing import load_run
from llm_from_scratch.evaluation_cards import card_line, deterministic, make_card
from llm_from_scratch.monitoring import read_metrics
from llm_from_scratch.wikitext import read_split, write_articles

RESULTS = Path(__file__).parent / "results"
PLANS = [("tokens", None, 256, 256), ("tokens", None, 256, 128), ("raw", None, 256, 256), ("tokens", None, 64, 64), ("tokens", None, 64, 32), ("tokens", "none", 256, 256), ("tokens", None, 256, 64)]


def find(folder: Path, name: str) -> Path:
    return next(path for path in sorted(folder.glob(f"{name}*")) if path.is_file())


def training_data(data: Path, work: Path) -> Path:
    out = work / "wikitext2_train.jsonl"
    if not out.exists(): write_articles(find(data, "wiki.train.tokens"), out, "tokens")
    return out


def command(work: Path, name: str, threads: int, **options) -> list[str]:
    words = [word for key, value in options.items() for word in (f"--{key.replace('__', '.').replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "llm_from_scratch.train", "--preset", "tiny", "--run-dir", str(work / name), "--data.path", str(work / "wikitext2_train.jsonl"),
            "--train.num-threads", str(threads), "--log.tensorboard", "False", "--eval.num-completions", "0", *words]


def train(work: Path, minutes: float, threads: int) -> dict:
    "Train for so many minutes of wall time, start and closing evaluation included; what is left of a run in `work` is used as it is."
    begun = time.monotonic()
    subprocess.run(command(work, "calibration", threads, train__steps=15, eval__every_steps=1000, eval__num_samples=0), check=True, stdout=subprocess.DEVNULL)
    step_seconds = median(row["step_seconds"] for row in read_metrics(work / "calibration")[2:])
    calibration_seconds, begun = time.monotonic() - begun, time.monotonic()
    steps = int((minutes * 60 - 25) / step_seconds)
    process = subprocess.Popen(command(work, "run", threads, train__steps=steps, eval__every_steps=max(1, steps // 8), checkpoint__every_steps=steps), stdout=subprocess.DEVNULL)
    try: process.wait(max(1, minutes * 60))
    except subprocess.TimeoutExpired: process.send_signal(signal.SIGTERM)
    code, rows = process.wait(600), read_metrics(work / "run")
    return dict(minutes=round((time.monotonic() - begun) / 60, 2), steps_planned=steps, steps=rows[-1]["step"], tokens=rows[-1]["tokens"], exit_code=code, threads=threads,
                calibration_seconds=round(calibration_seconds, 1), curve=[{key: row[key] for key in ("step", "tokens", "val_loss", "val_bpb")} for row in rows if "val_loss" in row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    training_data(options.data, options.work)
    facts = train(options.work, options.minutes, options.threads)
    with open(RESULTS / "wikitext_ten_minutes.jsonl", "a") as file: file.write(json.dumps({**facts, "load_over_five_minutes": os.getloadavg()[1], "note": options.note}) + "\n")
    print(f"{facts['steps']} of {facts['steps_planned']} steps in {facts['minutes']} minutes, exit code {facts['exit_code']}", flush=True)
    run = load_run(options.work / "run")
    for split_format, detokeniser, window, stride in PLANS:
        path = find(options.data, f"wiki.test.{split_format}")
        with deterministic():
            card = make_card(run, read_split(path, split_format, detokeniser), places=dict(text=path.name, run="run"), window=window, stride=stride)
        write_json(RESULTS / "wikitext_cards" / f"{split_format}{'-asis' if detokeniser == 'none' else ''}-w{window}-s{stride}.json", card)
        print(card_line(card), flush=True)


if __name__ == "__main__":
    main()
