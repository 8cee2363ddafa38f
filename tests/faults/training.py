"""A real training run, one fault at a time, and what came of it.

Imported, this file starts runs, breaks them, resumes them and compares them with one that nobody disturbed.
Run as a script, it is the process that breaks: it patches what the fault in TRAINING_FAULT needs, keeps a list of
the checkpoints that the run was told are saved, leaves out the report, and then is `python -m llm_from_scratch.train`.
"""

import errno
import json
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS, SAVE_EVERY = 24, 2
OPTIONS = [
    "--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--tokenizer.vocab-size", "300", "--train.seq-len", "32",
    "--train.global-batch", "4", "--train.micro-batch", "2", "--train.num-threads", "1", "--train.dtype", "fp32", "--train.deterministic", "True",
    "--optim.kind", "adamw", "--log.tensorboard", "False", "--eval.num-samples", "0", "--eval.num-completions", "0", "--eval.every-steps", "8",
    "--data.val-fraction", "0.2", "--train.steps", str(NUM_STEPS), "--checkpoint.every-steps", str(SAVE_EVERY),
]


# The process that breaks


def saving_step() -> int:
    "The step that this thread is saving, or 0."
    name = threading.current_thread().name
    return int(name.split()[-1]) if name.startswith("saving step") else 0


def wrap(owner, name: str, change: Callable) -> None:
    "Replace a function by one that gets it first."
    setattr(owner, name, partial(change, getattr(owner, name)))


def keep_list(told: str) -> None:
    from llm_from_scratch import background_saves

    def write(real, folder, packed, **options):
        path = real(folder, packed, **options)
        with open(told, "a") as file:
            file.write(f"{packed.step}\n")
        return path

    wrap(background_saves, "write_checkpoint", write)


def slow_saves(seconds: float) -> None:
    def fsync(real, descriptor):
        if saving_step():
            time.sleep(seconds)
        return real(descriptor)

    wrap(os, "fsync", fsync)


def stand_in_save(from_step: int) -> None:
    "Let a save never end, at its first sync."
    def fsync(real, descriptor):
        if saving_step() >= from_step:
            time.sleep(600)
        return real(descriptor)

    wrap(os, "fsync", fsync)


def refuse(number: int, where: str, from_step: int, times: int) -> None:
    "Let the system refuse: os.fsync, save_file, or the making of a draft."
    from llm_from_scratch import checkpointing

    left = [times]

    def change(real, *arguments, **options):
        draft = where != "mkdir" or Path(arguments[0]).name.startswith(".step_")
        if saving_step() >= from_step and left[0] and draft:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    if where == "mkdir":
        real = pathlib.Path.mkdir
        pathlib.Path.mkdir = lambda *arguments, **options: change(real, *arguments, **options)
    else:
        wrap(os if where == "fsync" else checkpointing, where, change)


def write_short(name: str, from_step: int, times: int) -> None:
    "Let half of one file of a checkpoint get lost without a word."
    from llm_from_scratch import checkpointing

    left = [times]

    def cut(path, final):
        if saving_step() >= from_step and left[0] and Path(final).name == name:
            left[0] -= 1
            os.truncate(path, os.path.getsize(path) // 2)

    def save_file(real, tensors, path):
        real(tensors, path)
        cut(path, path)

    def replace(real, source, target):
        cut(source, target)
        real(source, target)

    wrap(checkpointing, "save_file", save_file)
    wrap(os, "replace", replace)


def turn_clock_back(seconds: float) -> None:
    "Let every look at the clock see an earlier time than the last."
    now, looks = time.time, [0]

    def back():
        looks[0] += 1
        return now() - looks[0] * seconds

    time.time = back


def fill_disk(from_step: int, leave: int) -> None:
    "Let somebody else fill the disk just after the free space was looked at."
    from llm_from_scratch import checkpointing

    def check_room(real, folder, num_bytes):
        free = real(folder, num_bytes)
        if saving_step() >= from_step:
            with open(Path(folder).parents[1] / "filler", "ab") as file:
                file.write(bytes(max(0, free - leave)))
        return free

    wrap(checkpointing, "check_room", check_room)


def fill_metrics(from_step: int) -> None:
    "Let the metrics go to a device that is always full."
    from llm_from_scratch.monitoring import MetricsWriter

    real = MetricsWriter.log

    def log(writer, step, **values):
        if step == from_step:
            writer.file = open("/dev/full", "w")
        real(writer, step, **values)

    MetricsWriter.log = log


def die(rank: int, at_step: int) -> None:
    "Let one rank be killed once the checkpoint before stands."
    if int(os.environ.get("RANK", "0")) != rank:
        return
    from llm_from_scratch.distributed import Engine

    real, steps = Engine.train_step, [0]
    checkpoints = Path(sys.argv[sys.argv.index("--run-dir") + 1], "checkpoints")

    def train_step(engine, *arguments, **options):
        steps[0] += 1
        if steps[0] == at_step:
            before = checkpoints / f"step_{(at_step - 1) // SAVE_EVERY * SAVE_EVERY:08d}"
            while not before.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(engine, *arguments, **options)

    Engine.train_step = train_step


def be_training() -> None:
    fault = json.loads(os.environ["TRAINING_FAULT"])
    sys.path.pop(0)
    from llm_from_scratch import monitoring

    monitoring.write_report = lambda *arguments, **options: None
    monitoring.utilisation = lambda *arguments, **options: "not measured"
    keep_list(fault["told"])
    for name, options in fault["faults"].items():
        globals()[name](**options)
    runpy.run_module("llm_from_scratch.train", run_name="__main__", alter_sys=True)


# The process that looks


@dataclass
class Lab:
    "Where runs are broken: a corpus, its cache, and a run that nobody disturbed."
    home: Path
    chance: random.Random = field(default_factory=random.Random)
    num_ranks: int = 1

    def __post_init__(self):
        corpus = self.home / "corpus"
        if corpus.exists():
            return
        corpus.mkdir(parents=True)
        for number in range(30):
            (corpus / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))

    def told(self, run_dir: Path) -> list[int]:
        "Steps that this run was told are saved."
        path = self.home / f"{run_dir.name}.told"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def arguments(self, run_dir: Path) -> list[str]:
        "Of a new run, or to go on with one that holds something already."
        if (run_dir / "config.yaml").exists():
            return ["--run-dir", str(run_dir), "--resume", "auto"]
        return [*OPTIONS, "--data.path", str(self.home / "corpus"), "--data.cache-dir", str(self.home / "cache"), "--run-dir", str(run_dir)]

    def begin(self, run_dir: Path, **faults: dict) -> subprocess.Popen:
        fault = {"told": str(self.home / f"{run_dir.name}.told"), "faults": faults}
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRAINING_FAULT": json.dumps(fault)}
        launch = [] if self.num_ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_ranks}"]
        return subprocess.Popen([sys.executable, *launch, __file__, *self.arguments(run_dir)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def train(self, run_dir: Path, **faults: dict) -> tuple[int, str]:
        "A sitting to its end: exit code, and all that it said."
        return self.end(self.begin(run_dir, **faults), run_dir)

    def end(self, process: subprocess.Popen, run_dir: Path) -> tuple[int, str]:
        before = len(log_lines(run_dir))
        out, err = process.communicate(timeout=180)
        return process.returncode, "\n".join([err, *log_lines(run_dir)[before:], out]).replace(str(run_dir), "RUN").replace(str(self.home), "")

    @property
    def undisturbed(self) -> Path:
        "A run in one sitting; made when first asked for."
        run_dir = self.home / "undisturbed"
        if not run_dir.exists():
            code, said = self.train(run_dir)
            assert code == 0, said
        return run_dir

    def differences(self, run_dir: Path) -> list[str]:
        "Everything in which a finished run is not the undisturbed one."
        from llm_from_scratch.certify import compare_checkpoints, compare_metrics

        last = f"step_{NUM_STEPS:08d}"
        whole = self.undisturbed
        return compare_metrics(whole, run_dir) + compare_checkpoints(whole / "checkpoints" / last, run_dir / "checkpoints" / last, leave_out=("environment",))


def log_lines(run_dir: Path) -> list[str]:
    path = run_dir / "log.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [row["message"] for row in rows if row.get("message") not in ("start", "end", "validation", "saved")]


def newest_step(run_dir: Path) -> int:
    "Of the newest checkpoint that verifies; 0 for none."
    from llm_from_scratch.checkpointing import checkpoint_step, latest_checkpoint

    path = latest_checkpoint(run_dir / "checkpoints", kind="full")
    return checkpoint_step(path) if path else 0


def last_step(run_dir: Path) -> int:
    "The last step in the metrics; 0 for none."
    path = run_dir / "metrics.jsonl"
    steps = re.findall(r'(?m)^\{"step": (\d+),.*\}$', path.read_text()) if path.exists() else []
    return int(steps[-1]) if steps else 0


def drafts(run_dir: Path, pid: int | None = None) -> list[Path]:
    return list((run_dir / "checkpoints").glob(f".step_*.tmp-{pid or ''}*"))


def wait_until(happened: Callable[[], bool], process: subprocess.Popen, seconds: float = 120) -> bool:
    "False where the process ended first."
    limit = time.monotonic() + seconds
    while not happened():
        if process.poll() is not None:
            return False
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.002)
    return True


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def line_with(said: str, words: str) -> str:
    "The first line that holds the words, on one line; empty where none does."
    found = [line for line in said.splitlines() if re.search(words, line)]
    return re.sub(r"\.tmp-[\w-]+", ".tmp-N", " ".join(found[0].split())) if found else ""


# Faults: each breaks a run of this name, resumes it to its end, and tells what was seen


@dataclass
class Seen:
    "What came of one run with a fault."
    injected: int                   # times
    said: str                       # the line that names cause and cure
    steps_lost: int                 # between the last report of a save and what a resume began with
    steps_again: int                # between the last step done and what a resume began with
    differences: list[str]          # from the undisturbed run
    under_way: int = 0              # kills that left a draft: a save was under way


def after(lab: Lab, run_dir: Path, promised: int) -> tuple[int, int]:
    "Steps lost and steps to be done again."
    begins = newest_step(run_dir)
    return max(0, promised - begins), max(0, last_step(run_dir) - begins)


def killed(lab: Lab, run_dir: Path, num_kills: int, saving: bool) -> Seen:
    "Kill -9 again and again, at any moment or while a save is under way."
    done, under_way, lost, again, words = 0, 0, 0, 0, ""
    while done < num_kills:
        start = last_step(run_dir) if (run_dir / "config.yaml").exists() else -1
        process = lab.begin(run_dir, **({"slow_saves": {"seconds": 0.03}} if saving else {}))
        skip = newest_step(run_dir) + SAVE_EVERY * lab.chance.randrange(3)
        begun = (lambda: drafts(run_dir, process.pid) and newest_step_by_name(run_dir) >= skip) if saving else (lambda: last_step(run_dir) > start >= 0 or (start < 0 and last_step(run_dir)))
        early = not saving and lab.chance.random() < 0.2
        if not early and not wait_until(begun, process):
            break
        time.sleep(lab.chance.uniform(0, 3 if early else 0.55))
        if process.poll() is not None:
            break
        kill(process)
        done += 1
        under_way += bool(drafts(run_dir, process.pid))
        steps = after(lab, run_dir, max(lab.told(run_dir), default=0))
        lost, again = lost + steps[0], again + steps[1]
    if done < num_kills:
        process.communicate()
    code, said = lab.train(run_dir)
    assert code == 0, said
    words = line_with(said, "resumed from") or words
    return Seen(done, words, lost, again, lab.differences(run_dir), under_way)


def newest_step_by_name(run_dir: Path) -> int:
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*")), default=0)


def refused(lab: Lab, run_dir: Path, words: str, **faults: dict) -> Seen:
    "A save that fails twice ends the run; put right, it goes on."
    code, said = lab.train(run_dir, **faults)
    line = line_with(said, words)
    assert code == 2 and line, f"exit code {code}: {said}"
    lost, again = after(lab, run_dir, max(lab.told(run_dir), default=0))
    (run_dir.parent / "filler").unlink(missing_ok=True)
    code, more = lab.train(run_dir)
    assert code == 0, more
    return Seen(1, line, lost, again, lab.differences(run_dir))


def overcome(lab: Lab, run_dir: Path, words: str, **faults: dict) -> Seen:
    "A fault that the run gets over by itself."
    code, said = lab.train(run_dir, **faults)
    line = line_with(said, words)
    assert code == 0 and line, f"exit code {code}: {said}"
    return Seen(1, line, *after(lab, run_dir, max(lab.told(run_dir))), lab.differences(run_dir))


def kill_after(lab: Lab, run_dir: Path, step: int) -> None:
    "A run killed once this step's checkpoint stands."
    process = lab.begin(run_dir)
    assert wait_until(lambda: step in lab.told(run_dir), process)
    kill(process)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit in the newest checkpoint": (lambda newest: flip(newest / "engine.safetensors"), "passed over .*engine.safetensors: content changed"),
    "a file of the newest checkpoint is gone": (lambda newest: (newest / "model.safetensors").unlink(), "passed over .*model.safetensors: missing"),
    "a file of the newest checkpoint has no bytes": (lambda newest: (newest / "train_state.json").write_bytes(b""), "passed over .*train_state.json: 0 bytes, expected"),
}


def damaged(lab: Lab, run_dir: Path, name: str) -> Seen:
    "Damage done to a checkpoint between two sittings: the one before it is taken."
    from llm_from_scratch.checkpointing import list_checkpoints

    harm, words = DAMAGE[name]
    kill_after(lab, run_dir, 8)
    newest = list_checkpoints(run_dir / "checkpoints")[-1]
    harm(newest)
    lost, again = after(lab, run_dir, int(newest.name[5:]) - SAVE_EVERY)
    code, said = lab.train(run_dir)
    assert code == 0 and line_with(said, words), said
    return Seen(1, line_with(said, words), lost, again, lab.differences(run_dir))


def left_over(lab: Lab, run_dir: Path) -> Seen:
    "A draft of a process that is gone."
    from llm_from_scratch.artifacts import _temporary_sibling

    kill_after(lab, run_dir, 8)
    gone = subprocess.Popen(["true"])
    gone.wait()
    draft = _temporary_sibling(run_dir / "checkpoints" / "step_00000010")
    draft = draft.with_name(draft.name.replace(f"-{os.getpid()}-", f"-{gone.pid}-"))
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    lost, again = after(lab, run_dir, max(lab.told(run_dir)))
    code, said = lab.train(run_dir)
    assert code == 0 and not draft.exists(), said
    return Seen(1, line_with(said, "resumed from") + ", the draft is gone", lost, again, lab.differences(run_dir))


def two_runs(lab: Lab, run_dir: Path) -> Seen:
    "A second process on the folder of one that trains."
    process = lab.begin(run_dir, slow_saves={"seconds": 0.1})
    assert wait_until(lambda: last_step(run_dir) > 0, process)
    code, said = lab.train(run_dir)
    words = f"is in use by process {process.pid} on .*; wait for it, stop it, or take another folder"
    assert code == 2 and process.poll() is None, said
    line = line_with(said, words)
    code, more = lab.end(process, run_dir)
    assert code == 0, more
    return Seen(1, re.sub(r"process \d+ on \S+?;", "process N on HOST;", line), *after(lab, run_dir, max(lab.told(run_dir))), lab.differences(run_dir))


def clock_back(lab: Lab, run_dir: Path) -> Seen:
    "A clock that goes back an hour at every look, after files were dated in the future."
    kill_after(lab, run_dir, 8)
    for path in [run_dir / "checkpoints", *(run_dir / "checkpoints").rglob("*")]:
        os.utime(path, times=(time.time() + 10**6 - path.name.count("8") * 10**5,) * 2)
    lost, again = after(lab, run_dir, max(lab.told(run_dir)))
    code, said = lab.train(run_dir, turn_clock_back={"seconds": 3600})
    assert code == 0, said
    return Seen(1, line_with(said, "resumed from"), lost, again, lab.differences(run_dir))


@contextmanager
def small_disk(folder: Path, num_bytes: int = 4 << 20):
    "A file system of its own, where we may mount one; else None."
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True)
    try:
        yield folder if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    for _ in range(100):
        if subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], capture_output=True).returncode == 0:
            return
        time.sleep(0.02)
    raise AssertionError(f"{folder} can't be mounted {how}")


def full_disk(lab: Lab, name: str, leave: int, words: str) -> Seen | None:
    "A real disk, full after the free space was looked at; None where none can be mounted."
    with small_disk(lab.home / f"disk-{name}") as disk:
        return disk and refused(lab, disk / name, words, fill_disk={"from_step": 8, "leave": leave})


def read_only_disk(lab: Lab, name: str) -> Seen | None:
    "A resume on a disk that is mounted for reading; None where none can be mounted."
    with small_disk(lab.home / f"disk-{name}") as disk:
        if disk is None:
            return None
        run_dir = disk / name
        kill_after(lab, run_dir, 8)
        lost, again = after(lab, run_dir, max(lab.told(run_dir)))
        remount(disk, "ro")
        code, said = lab.train(run_dir)
        remount(disk, "rw")
        line = line_with(said, "Read-only file system")
        assert code == 2 and line, said
        code, more = lab.train(run_dir)
        assert code == 0, more
        return Seen(1, line, lost, again, lab.differences(run_dir))


def read_only_checkpoints(lab: Lab, name: str) -> Seen | None:
    "A disk of checkpoints that turns read-only while the run goes on; None where none can be mounted."
    run_dir = lab.home / name
    with small_disk(run_dir / "checkpoints") as disk:
        if disk is None:
            return None
        process = lab.begin(run_dir, slow_saves={"seconds": 0.01})
        assert wait_until(lambda: max(lab.told(run_dir), default=0) >= 8, process)
        remount(disk, "ro")
        code, said = lab.end(process, run_dir)
        line = line_with(said, "Read-only file system.*older checkpoints are untouched; .*mount it for writing")
        assert code == 2 and line, said
        lost, again = after(lab, run_dir, max(lab.told(run_dir)))
        remount(disk, "rw")
        code, more = lab.train(run_dir)
        assert code == 0, more
        return Seen(1, line, lost, again, lab.differences(run_dir))


def copy_of(run_dir: Path, name: str) -> Path:
    return Path(shutil.copytree(run_dir, run_dir.with_name(name)))


FAILS = r"error: can't write checkpoint RUN.*: .*{}.*; older checkpoints are untouched; {}"
SHORT = ["model.safetensors", "engine.safetensors", "rng.safetensors", "train_state.json", "rng.json", "manifest.json"]
READ_BACK = "read back, .*not what was written.*older checkpoints are untouched; the disk is failing"


def refusal(number: int, where: str, times: int = 10**9) -> dict:
    return {"refuse": {"number": number, "where": where, "from_step": 8, "times": times}}


FAULTS: dict[str, Callable[[Lab, str], Seen | None]] = {
    "no space (ENOSPC) for a file": lambda lab, name: refused(lab, lab.home / name, FAILS.format("No space left on device", "free some space"), **refusal(errno.ENOSPC, "save_file")),
    "no space (ENOSPC) at a sync": lambda lab, name: refused(lab, lab.home / name, FAILS.format("No space left on device", "free some space"), **refusal(errno.ENOSPC, "fsync")),
    "no space, once": lambda lab, name: overcome(lab, lab.home / name, "No space left on device.*trying once more", **refusal(errno.ENOSPC, "fsync", 1)),
    "a real disk, full during a save": lambda lab, name: full_disk(lab, name, 60_000, "no room for a checkpoint: it takes .* free some space"),
    "a real disk, full to the last byte": lambda lab, name: full_disk(lab, name, 0, "error: .*no room for a checkpoint.*free some space"),
    "a full device (/dev/full) for the metrics": lambda lab, name: refused(lab, lab.home / name, "error: RUN/metrics.jsonl: No space left on device; check the path, its rights and the space left", fill_metrics={"from_step": 8}),
    "an input/output error (EIO)": lambda lab, name: refused(lab, lab.home / name, FAILS.format("Input/output error", "the disk is failing"), **refusal(errno.EIO, "fsync")),
    "an input/output error, once": lambda lab, name: overcome(lab, lab.home / name, "Input/output error.*trying once more", **refusal(errno.EIO, "fsync", 1)),
    **{f"a short write of {file}": (lambda lab, name, file=file: refused(lab, lab.home / name, READ_BACK, write_short={"name": file, "from_step": 8, "times": 10**9})) for file in SHORT},
    "a short write, once": lambda lab, name: overcome(lab, lab.home / name, f"{READ_BACK}.*trying once more", write_short={"name": "manifest.json", "from_step": 8, "times": 1}),
    **{fault: (lambda lab, name, fault=fault: damaged(lab, lab.home / name, fault)) for fault in DAMAGE},
    "a draft left over": lambda lab, name: left_over(lab, lab.home / name),
    "two runs on one folder": lambda lab, name: two_runs(lab, lab.home / name),
    "a clock that goes back": lambda lab, name: clock_back(lab, lab.home / name),
    "a folder read-only (EROFS) at a save": lambda lab, name: refused(lab, lab.home / name, FAILS.format("Read-only file system", "the file system is read-only: mount it"), **refusal(errno.EROFS, "mkdir")),
    "a real disk, read-only on a resume": read_only_disk,
    "a real disk, read-only during a run": read_only_checkpoints,
}


if __name__ == "__main__":
    be_training()
