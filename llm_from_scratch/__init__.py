__version__ = "0.1.0"

import os
import signal
import sys

# Before torch loads: threads that wait spin for microseconds, not milliseconds, so that another busy process costs half
# of a run's speed instead of most of it; see 07d_launch, "Cores are shared".
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _leave(number, frame):
    if os.environ.get("RANK", "0") == "0": os.write(2, f"interrupted by {signal.Signals(number).name}\n".encode())
    os._exit(130)


# Only in `python -m llm_from_scratch.X`, and until env.run_command takes over: imports take seconds, there is nothing to
# finish, and Python's own answers are a trace for Ctrl-C and silence for SIGTERM. What a shell ignores stays ignored.
if sys.argv[:1] == ["-m"] and any(word.removeprefix("-m").startswith("llm_from_scratch.") for word in sys.orig_argv):
    for _number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(_number) != signal.SIG_IGN: signal.signal(_number, _leave)
