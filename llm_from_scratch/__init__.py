__version__ = "0.1.0"

import os
import signal
import sys
from pathlib import Path

# Installed, `llm_from_scratch.kernels` lies in the package; in a clone it is the folder beside it.
if (Path(__file__).parents[1] / "kernels" / "attention.py").is_file() and (Path(__file__).parents[1] / "settings.ini").is_file():
    __path__.append(str(Path(__file__).parents[1]))

# Before torch loads: threads that wait spin for microseconds, not milliseconds, so that another busy process costs half
# of a run's speed instead of most of it; see 07d_launch, "Cores are shared".
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Also before: torch's own warnings of a meeting that fails are a page of addresses each, beside our one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


_begun = os.getpid(), os.getppid()  # a launcher may die in the seconds before its worker can ask to be told; see distributed.watch_launcher

_may_repeat = False  # `train` that a launcher has started again: perhaps for a final stop only, which a faster rank has repeated by now

_end = []  # of a command: empty while it runs, [None] while it says how it ended, [exit code] once that is said


def _leave(number, frame):
    if not (_end or _may_repeat) and os.environ.get("RANK", "0") == "0": os.write(2, f"interrupted by {signal.Signals(number).name}\n".encode())
    if _end != [None]: os._exit(_end[0] if _end else 130)


# Only in `python -m llm_from_scratch.X`, and until env.run_command takes over: imports take seconds, there is nothing to
# finish, and Python's own answers are a trace for Ctrl-C and silence for SIGTERM. What a shell ignores stays ignored.
if sys.argv[:1] == ["-m"] and any(word.removeprefix("-m").startswith("llm_from_scratch.") for word in sys.orig_argv):
    _trains = sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "llm_from_scratch.train"
    _may_repeat = _trains and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").strip("0") != ""
    for _number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(_number) != signal.SIG_IGN: signal.signal(_number, _leave)
    if _trains:
        from llm_from_scratch.train_options import answer_early
        answer_early(sys.argv[1:])
