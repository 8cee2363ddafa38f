"""Every failure of the doctor's pages, made, diagnosed from its folder, and its rule asked about healthy runs.

    python benchmarks/doctor.py [NAME ...]      (no name: all; writes results/doctor.jsonl, or its lines of these names)
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llm_from_scratch.troubleshooting import FAILURES, healthy_runs, load_rules, try_failure

RESULTS = Path(__file__).parent / "results" / "doctor.jsonl"


def main(names):
    rules, folder, rows = load_rules(), Path(tempfile.mkdtemp()), []
    healthy = healthy_runs(folder / "healthy")
    table = Table("failure", "kind", "reproduced", "diagnosed", "rank", "false alarms", "seconds")
    for name in names or [name for name in rules if name in FAILURES]:
        begun = time.perf_counter()
        row = try_failure(FAILURES[name], folder / name, healthy)
        rows.append({key: value for key, value in row.items() if key != "evidence"})
        table.add_row(name, row["kind"], str(row["reproduced"]), str(row["diagnosed"]), str(row["rank"]), f"{row['false_alarms']} of {row['healthy']}", f"{time.perf_counter() - begun:.1f}")
    Console(width=120).print(table)
    old = [json.loads(line) for line in RESULTS.read_text().splitlines()] if names and RESULTS.exists() else []
    known = {row["failure"]: row for row in [*old, *rows]}
    order = [name for name in rules if name in known]
    RESULTS.write_text("".join(json.dumps(known[name]) + "\n" for name in order))


if __name__ == "__main__":
    main(sys.argv[1:])
