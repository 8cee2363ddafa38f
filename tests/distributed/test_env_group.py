import os
import subprocess
import sys

from ports import free_port

CODE = """
import os
from pathlib import Path
import torch, torch.distributed as dist
from llm_from_scratch.env import choose_device, close_process_group, open_process_group, read_ranks, run_command
def main(arguments):
    ranks = read_ranks()
    open_process_group(ranks, torch.device("cpu"), timeout_seconds=float(os.environ.get("LIMIT", 60)))
    total = torch.tensor([ranks.rank + 1.0])
    dist.all_reduce(total)
    close_process_group()
    assert not dist.is_initialized()
    said = f"{ranks.rank} {dist.is_initialized()} {total.item()}"
    if "SAY_IN" in os.environ: Path(os.environ["SAY_IN"], str(ranks.rank)).write_text(said)
    print(said, flush=True)
run_command(main)
"""


def clean_environment():
    return {name: value for name, value in os.environ.items()
            if name not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}} | {
        "OMP_NUM_THREADS": "1"}


def test_two_processes_meet_and_part():
    port = str(free_port())
    shared = clean_environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    lonely = {"MASTER_PORT": str(free_port()), "LIMIT": "2", "RANK": "0", "LOCAL_RANK": "0"}
    processes = [subprocess.Popen([sys.executable, "-c", CODE], env=shared | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                 for own in ({"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "1", "LOCAL_RANK": "1"}, lonely)]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 2], said
    *said, (_, alone) = said
    assert len(alone.splitlines()) == 1 and "within 2 s: no answer within 2 s" in alone
    assert [out.split() for out, _ in said] == [["0", "False", "3.0"], ["1", "False", "3.0"]]
    honoured = f"2 met by RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT={port} (set by hand or by another launcher), gloo on cpu"
    assert [errors.count(honoured) for _, errors in said] == [1, 0]


def test_torchrun_hosts_the_meeting(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(CODE)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
                          env=clean_environment() | {"SAY_IN": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 False 3.0", "1 False 3.0"]
