"""Start gloo ranks for tests: real processes under a time limit, forked from one that has torch loaded.

The ranks' variables are set in the children only. Whatever happens, no process is left.
"""
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver

import torch
from ports import free_port
from torch.distributed import run as torchrun

from llm_from_scratch.env import close_process_group, open_process_group, read_ranks

forks = multiprocessing.get_context("forkserver")


@contextmanager
def server_with_torch(*also):
    "Ranks fork from a server of their own; one that other tests have started would leave every rank to import torch."
    before = forkserver._forkserver._preload_modules
    forkserver._forkserver._stop()
    forks.set_forkserver_preload(["pytest", "matplotlib.figure", "torch._dynamo", "llm_from_scratch.train", *also])  # the first optimizer or DDP imports dynamo: seconds a process
    first = forks.Process(target=int)
    try:
        first.start(), first.join()  # the seconds of loading count in no test's limit
        yield
    finally:
        forkserver._forkserver._stop()
        forks.set_forkserver_preload(before)


def _enter(task, environ, sender):
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        function, arguments = pickle.loads(task)
        ranks = read_ranks()
        open_process_group(ranks, torch.device("cpu"), timeout_seconds=60)
        sender.send_bytes(pickle.dumps((None, function(ranks, *arguments))))
        close_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        os._exit(1)


def run_ranks(function, num_ranks, *arguments, ranks_per_machine=None, timeout_seconds=600):
    "What `function(ranks, *arguments)` returns on each rank, in order; AssertionError where a rank fails or is late."
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    started, deadline = [], time.monotonic() + timeout_seconds
    task, late = pickle.dumps((function, arguments)), ("no answer in time", None)  # plain bytes: torch would share tensors' memory with processes that end
    try:
        for rank in range(num_ranks):
            receiver, sender = forks.Pipe(duplex=False)
            environ = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % (ranks_per_machine or num_ranks))}
            process = forks.Process(target=_enter, args=(task, environ, sender), daemon=True)
            process.start(), sender.close(), started.append((process, receiver))
        answers = [pickle.loads(receiver.recv_bytes()) if receiver.poll(max(0, deadline - time.monotonic())) else late for _, receiver in started]
        for process, _ in started: process.join(max(1, deadline - time.monotonic()))
        codes = [process.exitcode for process, _ in started]
    finally:
        for process, receiver in started: process.kill(), process.join(), receiver.close()
    errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
    assert not errors, "\n".join(errors)
    assert codes == [0] * num_ranks, f"exit codes {codes}"
    return [value for _, value in answers]


def _serve_copies():
    "Let processes that this one starts be forked from a copy of it as it is now, with one thread."
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX")), listener.listen()
        own, pid = forkserver._forkserver, os.fork()
        if pid == 0:
            os.close(alive_w)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as the ranks end with their launcher, so does what stands between
            try:
                forkserver.main(listener.detach(), alive_r, [])
            finally:
                os._exit(0)
        own._forkserver_address, own._forkserver_alive_fd, own._forkserver_pid = listener.getsockname(), alive_w, pid
    os.close(alive_r)


def _launch(arguments, environ, log):
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear(), os.environ.update(environ)
    gc.freeze()  # what all have in common is nobody's garbage
    _serve_copies()
    try:
        torchrun.main(["--run-path", "--start-method", "forkserver", *arguments])
    finally:
        forkserver._forkserver._stop()


class ForkedTorchrun:
    """torchrun and its ranks, forked with torch loaded: the agent, its restarts and its signals are torch's, only no process imports anew.

    A script's path and its arguments follow torchrun's own; what all of them say goes to the log. The interface is that of `subprocess.Popen`.
    """

    def __init__(self, arguments, environ, log):
        self.log = log
        self.process = forks.Process(target=_launch, args=([str(part) for part in arguments], dict(environ), str(log)))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("torchrun", timeout)
        return self.poll()

    def said(self):
        with open(self.log) as file:
            return file.read()

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.said(), None

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.process.kill()

    def end(self):
        "Kill the launcher and its ranks, if it is still there."
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.process.kill(), self.process.join()
