"""Training under torchrun while workers and launchers are killed: does it go on, how fast, and with the same losses?

    python benchmarks/elastic_runs.py kills [--kills 20]    one launcher, two ranks; a rank is killed with -9 again and again
    python benchmarks/elastic_runs.py elastic               two launchers, --nnodes 1:2; one is killed, and another one comes

Every run is compared, loss by loss, with one that nobody disturbed. A row goes to benchmarks/results/elastic_runs.jsonl.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "elastic_runs.jsonl"
OPTIONS = [
    "--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--tokenizer.vocab-size", "300", "--train.seq-len", "32",
    "--train.global-batch", "8", "--train.micro-batch", "4", "--train.num-threads", "1", "--train.dtype", "fp32", "--train.deterministic", "True",
    "--optim.kind", "adamw", "--optim.warmup-steps", "10", "--log.tensorboard", "False", "--eval.num-samples", "0", "--eval.num-completions", "0",
    "--eval.every-steps", "100000", "--data.val-fraction", "0.2", "--checkpoint.every-steps", "10", "--engine.timeout-seconds", "60",
]


def be_training() -> None:
    "Train without a report; a rank that is alone takes its time, so that another one can come."
    from llm_from_scratch import train, training_loop
    from llm_from_scratch.env import run_command

    train.tell = lambda *arguments: None
    take_step = training_loop.train_on

    def train_on(training, *arguments):
        time.sleep(0.25 * (training.ranks.world_size == 1))
        return take_step(training, *arguments)

    training_loop.train_on = train_on
    del sys.argv[1]
    run_command(train.main)


def make_corpus(home: Path) -> list[str]:
    "Thirty small pages, and the options that name them."
    folder = home / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(30):
        (folder / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    return ["--data.path", str(folder), "--data.cache-dir", str(home / "cache")]


class Launcher:
    "A torchrun and its workers, all of which are gone at the end."

    def __init__(self, home: Path, run_dir: Path, steps: int, *launch: str, **environ: str):
        program = [__file__, "train", *OPTIONS, *make_corpus(home), "--train.steps", str(steps), "--run-dir", str(run_dir), "--resume", "auto"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        self.log = open(home / f"launcher-{time.time_ns()}.log", "w+")
        self.process = self.start([*launch, *program], environment)

    def start(self, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *arguments], env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def workers(self) -> dict[int, psutil.Process]:
        "Training processes by rank."
        found = {}
        try:
            for worker in psutil.Process(self.process.pid).children():
                if __file__ in worker.cmdline():
                    found[int(worker.environ()["RANK"])] = worker
        except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
            pass
        return found

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __exit__(self, *error):
        family = [self.process, *self.workers().values()]
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.process.wait()
        self.log.close()


def starts(run_dir: Path) -> list[dict]:
    "The sittings of a run, from its log: time, step and ranks of each."
    path = run_dir / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["message"] == "start"]


def losses(run_dir: Path) -> dict[int, float]:
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def wait_for(what, seconds: float, launchers: list[Launcher]):
    "What the function returns once it is true; SystemExit with the launchers' words where it does not come, or where all of them end."
    end = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > end or all(one.process.poll() is not None for one in launchers):
            raise SystemExit("it did not come:\n" + "\n".join(one.said()[-3000:] for one in launchers))
        time.sleep(0.02)
    return found


def undisturbed(home: Path, steps: int, launcher: type[Launcher]) -> dict[int, float]:
    "The losses of a run in one sitting, on two ranks."
    with launcher(home, home / "undisturbed", steps, "--standalone", "--nproc-per-node", "2") as calm:
        assert calm.process.wait(timeout=300) == 0, calm.said()
    return losses(home / "undisturbed")


def twenty_kills(home: Path, num_kills: int, chance: random.Random, launcher: type[Launcher] = Launcher) -> dict:
    "Kill a rank with -9 some steps after each start."
    run_dir, steps, kills, begun_at = home / "killed", 20 * num_kills + 20, [], time.monotonic()
    with launcher(home, run_dir, steps, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(num_kills)) as one:
        for number in range(num_kills):
            begun = wait_for(lambda: len(starts(run_dir)) > number and starts(run_dir)[number], 120, [one])
            first_start = time.monotonic() - begun_at if number == 0 else first_start
            target = begun["step"] + chance.randrange(12, 20)
            step = wait_for(lambda: (newest := max(losses(run_dir), default=0)) >= target and newest, 120, [one])
            rank = chance.randrange(2)
            one.workers()[rank].kill()
            killed = time.monotonic()
            again = wait_for(lambda: len(starts(run_dir)) > number + 1 and starts(run_dir)[number + 1], 120, [one])
            kills.append({"rank": rank, "step": step, "back_to": again["step"], "seconds": round(time.monotonic() - killed, 2)})
            print(kills[-1], flush=True)
        one.process.wait(timeout=200)
        code = one.process.returncode
    same = losses(run_dir) == undisturbed(home, steps, launcher)
    return {"what": "kills", "steps": steps, "kills": kills, "first_start_seconds": round(first_start, 2), "exit_code": code, "same_losses": same}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def elastic(home: Path, steps: int = 400, launcher: type[Launcher] = Launcher) -> dict:
    """Two launchers; the one that does not hold the rendezvous is killed with -9, the run goes on alone, another one joins.

    Without the variable a newcomer waits in vain for the address of a store that the old launchers told each other in an earlier round (torch 2.13).
    """
    run_dir, port, environ = home / "elastic", free_port(), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launch = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--local-addr", "localhost",
              "--rdzv-endpoint", f"localhost:{port}"]
    conf = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3,join_timeout=120"
    events, begun = [], time.monotonic()

    def note(what, **values):
        events.append({"seconds": round(time.monotonic() - begun, 2), "what": what, "step": max(losses(run_dir), default=0), **values})
        print(events[-1], flush=True)

    def goes_on(num_starts, num_ranks, others):
        again = wait_for(lambda: len(starts(run_dir)) > num_starts and starts(run_dir)[-1]["ranks"] == num_ranks and starts(run_dir)[-1], 150, others)
        note("start", ranks=num_ranks, from_step=again["step"])
        wait_for(lambda: max(losses(run_dir), default=0) >= again["step"] + 15, 150, others)

    with launcher(home, run_dir, steps, *launch, "--rdzv-conf", f"is_host=1,{conf}", **environ) as first:
        with launcher(home, run_dir, steps, *launch, "--rdzv-conf", f"is_host=0,{conf}", **environ) as second:
            goes_on(0, 2, [first])
            second.kill()
            note("a launcher is killed")
            goes_on(len(starts(run_dir)), 1, [first])
        with launcher(home, run_dir, steps, *launch, "--rdzv-conf", f"is_host=0,{conf}", **environ) as third:
            note("a launcher comes")
            goes_on(len(starts(run_dir)), 2, [first, third])
            first.process.wait(timeout=200), third.process.wait(timeout=60)
            codes = [first.process.returncode, third.process.returncode]
    calm, found = undisturbed(home, steps, launcher), losses(run_dir)
    worst = max(abs(found[step] - calm[step]) / calm[step] for step in calm)
    return {"what": "elastic", "steps": steps, "events": events, "exit_codes": codes, "same_steps": list(found) == list(calm), "largest_relative_difference": worst}


def main():
    if sys.argv[1:2] == ["train"]:
        return be_training()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["kills", "elastic"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print the row, keep none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = twenty_kills(Path(folder), options.kills, random.Random(0)) if options.what == "kills" else elastic(Path(folder))
    print(json.dumps(row))
    if not options.dry:
        with RESULTS.open("a") as file:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M"), **row}) + "\n")


if __name__ == "__main__":
    main()
