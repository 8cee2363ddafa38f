"What a hostile program may try: none passes, none reaches the parent, and nothing is left running."

import os
import socket
import subprocess
import sys
import time
import uuid

import pytest

from llm_from_scratch.env import UserError
from llm_from_scratch.sandbox import Limits, Outcome, run_limited, run_many

SHORT = Limits(cpu_seconds=1, wall_seconds=1)


def isolation_works() -> bool:
    try:
        return run_limited("", "").passed
    except UserError:
        return False


@pytest.fixture(scope="module")
def isolated():
    if not isolation_works():
        pytest.skip("no namespaces for programs here")


def commands() -> list[str]:
    "The command lines of all processes that can be seen."
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                found.append(file.read())
        except OSError:
            continue
    return found


HOSTILE = {
    "leaves before the tests": "import sys\nsys.exit(0)",
    "leaves without a word": "import os\nos._exit(0)",
    "raises an exit of its own": "raise SystemExit",
    "reads its input": "input()",
    "reads all input": "import sys\nassert sys.stdin.read()",
    "memory": "x = [bytearray(1 << 20) for _ in range(1 << 20)]",
    "memory in children": "import os\nfor _ in range(3): os.fork()\nx = [bytearray(1 << 20) for _ in range(1 << 20)]",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads without end": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "a thread that hangs": "import threading\nthreading.Thread(target=threading.Event().wait).start()",
    "prints without end": "while True: print('x' * 10000)",
    "writes to all descriptors": "import os\nwhile True:\n    for n in range(64):\n        try: os.set_blocking(n, False); os.write(n, b'x' * 65536)\n        except OSError: pass",
    "a large file": "open('x', 'wb').write(bytes(64 << 20))",
    "many files": "for n in range(100): open(f'x{n}', 'wb').write(bytes(4 << 20))",
    "catches signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGINT)\nos._exit(0)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos._exit(0)",
    "deep recursion": "def f(): f()\nf()",
    "a fault": "import ctypes\nctypes.string_at(0)",
    "swallows the assertion": "import builtins\nbuiltins.AssertionError = KeyError",
    "a syntax error": "def f(:",
    "null bytes": "x = '\0'",
    "lone surrogates": "raise ValueError('\\ud800')",
}


QUICK = ["leaves before the tests", "leaves without a word", "reads its input", "fork bomb", "kills its parent", "deep recursion", "swallows the assertion"]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE])
def test_hostile_programs_do_not_pass(isolated, name):
    assert not run_limited(HOSTILE[name], "assert False", limits=SHORT).passed


@pytest.mark.slow
def test_nothing_is_left_running(isolated):
    mark = f"left-{uuid.uuid4().hex}"
    shell = f"import os, subprocess\nos.setsid()\nfor _ in range(2): subprocess.Popen(['/bin/sh', '-c', 'sleep 600; : {mark}'], start_new_session=True)\nif os.fork(): os._exit(0)\nos.setsid()\nwhile True: pass"
    assert not run_limited(shell, "", limits=SHORT).passed
    assert not any(mark in command for command in commands())


def test_no_network_is_reached(isolated):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        program = f"import socket\ntry: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\nexcept OSError: raise SystemExit('none')"
        assert run_limited(program, "") == Outcome(False, "SystemExit: none")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_program_may_delete_its_folder_and_no_other(isolated, tmp_path):
    (tmp_path / "mine").write_text("mine")
    for path in (tmp_path, tmp_path / "mine"):
        path.chmod(0o777)
    program = f"import os, shutil\nopen('x', 'w')\nshutil.rmtree('.', True)\nassert not os.listdir('.')\nshutil.rmtree({str(tmp_path)!r}, True)\nshutil.rmtree('/etc', True)"
    assert run_limited(program, "").passed
    assert (tmp_path / "mine").read_text() == "mine" and os.listdir("/etc")


def test_the_environment_and_home_are_hidden(isolated, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    found = os.path.join(os.path.expanduser("~"), f"secret-{uuid.uuid4().hex}")
    with open(found, "w") as file:
        file.write("hidden")
    try:
        tests = f"import os\nassert 'SECRET_KEY' not in os.environ\nassert not os.path.exists({found!r})\nassert not os.listdir('/proc')"
        assert run_limited("", tests) == Outcome(True, "passed")
    finally:
        os.remove(found)


@pytest.mark.slow
def test_rights_do_not_come_back(isolated):
    tests = "import ctypes, os\nlibc = ctypes.CDLL(None)\nassert libc.mount(b'', b'/', b'', 0x20 | 0x1000, None) == -1\nassert libc.umount2(b'/proc', 2) == -1\nassert os.getuid() != 0"
    if os.getuid():
        tests = tests.replace("\nassert os.getuid() != 0", "")
    assert run_limited("", tests) == Outcome(True, "passed")


def test_a_pass_needs_the_tests_and_the_end():
    isolate = isolation_works()
    jobs = [("def f(x): return x + 1", "assert f(1) == 2"), ("def f(x): return x", "assert f(1) == 2, 'two'"), ("", "f(1)"), ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1", "assert A().x == 1")]
    reasons = [outcome.reason for outcome in run_many(jobs, isolate=isolate)]
    assert reasons == ["passed", "AssertionError: two", "NameError: name 'f' is not defined", "passed"]


@pytest.mark.slow
def test_without_isolation_limits_hold_and_orphans_end():
    mark = f"left-{uuid.uuid4().hex}"
    program = f"import os, subprocess, time\nif os.fork(): os._exit(0)\nos.setsid()\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 600; : {mark}'])\ntime.sleep(600)"
    for name in ("leaves before the tests", "leaves without a word", "reads its input", "memory", "catches signals"):
        assert not run_limited(HOSTILE[name], "", limits=SHORT, isolate=False).passed
    assert not run_limited(program, "", limits=SHORT, isolate=False).passed
    assert not any(mark in command for command in commands())


def test_where_no_namespace_can_be_made_it_refuses(monkeypatch):
    monkeypatch.setattr("llm_from_scratch.sandbox._ask_child", lambda job: {"refused": "unshare: Operation not permitted"})
    with pytest.raises(UserError, match="unshare: Operation not permitted.*switch isolation off"):
        run_limited("", "")


@pytest.mark.slow
def test_a_program_ends_with_the_process_that_started_it(isolated):
    program = "from llm_from_scratch.sandbox import Limits, run_limited\nprint(1, flush=True)\nrun_limited('import time\\ntime.sleep(600)', '', limits=Limits(wall_seconds=600))"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    parent.stdout.readline()
    children = f"/proc/{parent.pid}/task/{parent.pid}/children"
    deadline = time.monotonic() + 60
    while not (found := open(children).read().split()) and time.monotonic() < deadline:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    while any(os.path.exists(f"/proc/{child}") for child in found) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found and not any(os.path.exists(f"/proc/{child}") for child in found)
