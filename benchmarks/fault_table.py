"""What becomes of a training run when it is killed, or its disk fails? One fault at a time, each run resumed and compared.

    python benchmarks/fault_table.py [--kills 30] [--seed 0] [--only WORDS]

Every run is a real training process; tests/faults/training.py says how it is broken. After each fault the run is resumed to its end
and compared with one that nobody disturbed: every logged number, every tensor and counter of the last checkpoint. A step is lost where
a checkpoint was reported as saved and a resume begins with an older one. Appends a line to results/fault_table.jsonl; takes minutes.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tests/faults", ".")]

from training import FAULTS, Lab, Seen, killed  # noqa: E402

from llm_from_scratch.env import environment_report  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "fault_table.jsonl"
KILLS_A_RUN = 6


def row_of(fault: str, seen: list[Seen]) -> dict:
    return {
        "fault": fault, "injected": sum(one.injected for one in seen), "during a save": sum(one.under_way for one in seen), "said": seen[-1].said,
        "steps lost": sum(one.steps_lost for one in seen), "steps done again": sum(one.steps_again for one in seen),
        "losses equal": not any(one.differences for one in seen), "first difference": next((one.differences[0] for one in seen if one.differences), None),
    }


def kill_rows(lab: Lab, num_kills: int, saving: bool, fault: str) -> dict:
    seen, done = [], 0
    while done < num_kills:
        seen.append(killed(lab, lab.home / f"killed-{'saving' if saving else 'any'}-{len(seen)}", min(KILLS_A_RUN, num_kills - done), saving))
        done += seen[-1].injected
    return row_of(fault, seen)


def show(row: dict) -> None:
    print(" | ".join(str(row[name]) for name in ("fault", "injected", "during a save", "steps lost", "steps done again", "losses equal", "said")), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name holds these words")
    options = parser.parse_args()
    started, rows, failed = time.monotonic(), [], 0
    jobs = {"kill -9 while a save is under way": lambda lab, name: kill_rows(lab, options.kills // 2, True, name),
            "kill -9 at any moment": lambda lab, name: kill_rows(lab, options.kills - options.kills // 2, False, name)}
    for number, (fault, inject) in enumerate(FAULTS.items()):
        jobs[fault] = lambda lab, name, number=number, inject=inject: (seen := inject(lab, f"fault-{number}")) and row_of(name, [seen])
    with tempfile.TemporaryDirectory() as home:
        lab = Lab(Path(home), random.Random(options.seed))
        for fault, job in jobs.items():
            if options.only not in fault:
                continue
            try:
                row = job(lab, fault)
            except AssertionError:
                failed += 1
                print(f"{fault} FAILED\n{traceback.format_exc()[-1500:]}", flush=True)
                continue
            if row is None:
                print(f"{fault}: left out, no disk can be mounted here", flush=True)
                continue
            rows.append(row)
            show(row)
    told = {"environment": environment_report(), "seed": options.seed, "seconds": round(time.monotonic() - started), "rows": rows}
    if not options.only and not failed:
        with open(RESULTS, "a") as file:
            file.write(json.dumps(told) + "\n")
    return int(failed or any(row["steps lost"] or not row["losses equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
