"Faults while batches are read ahead: a shard that shrinks, a loop that is left, a main process that is killed."
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from llm_from_scratch.dataloader import TicketReader, TokenLoader, endless
from llm_from_scratch.env import UserError
from llm_from_scratch.row_plans import FILLER
from llm_from_scratch.token_shards import open_shards, write_shards

ROOT = Path(__file__).parents[2]


def make_shards(path):
    write_shards([np.arange(50) + number for number in range(400)], path, vocab_size=1_000, tokenizer_fingerprint="f1", shard_tokens=5_000)
    return open_shards(path)


def rows_of(batches): return [row for batch in batches for row in batch.row_ids.tolist() if row != FILLER]
def threads(): return [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]


def is_alive(pid):
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError: return False


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_shrinks_is_named_with_its_offset(tmp_path, num_workers, monkeypatch):
    read, tally, deadline = TicketReader.__call__, tmp_path / "tally", time.monotonic() + 300
    def counted(*arguments):
        batch = read(*arguments)
        with tally.open("a") as file: file.write("x")
        return batch
    monkeypatch.setattr(TicketReader, "__call__", counted)
    loader = TokenLoader(make_shards(tmp_path / "tokens"), batch_size=8, seq_len=16, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    while len(tally.read_text()) < 3 and time.monotonic() < deadline: time.sleep(0.01) # a file cut while its bytes are copied ends the process, as under any map
    os.truncate(tmp_path / "tokens" / "00002.bin", 4_096)
    with pytest.raises(UserError, match=r"00002.bin: 4096 bytes, but it had 10000.*shard 00002 can't be read at token \d+") as error: list(batches)
    assert "\n" not in str(error.value) and not threads()
    loader.close()


@pytest.mark.parametrize("leave", ["break", "error", "close", "forget"])
def test_a_loop_that_is_left_keeps_its_place_and_leaves_no_thread(tmp_path, leave):
    shards = make_shards(tmp_path / "tokens")
    loader, undisturbed = (TokenLoader(shards, batch_size=8, seq_len=16, prefetch_batches=3) for _ in range(2))
    expected, batches = rows_of(undisturbed), endless(loader)
    try:
        for number, batch in enumerate(batches):
            if number == 4 and leave == "error": raise KeyError
            if number == 4: break
    except KeyError: pass
    assert len(threads()) == 1
    if leave == "close": batches.close()
    del batches
    gc.collect()
    assert not threads() and loader.position == 40
    assert rows_of(loader) == expected[40:]


def test_workers_read_the_same_batches_and_a_state_means_those_handed_out(tmp_path):
    options = dict(batch_size=8, seq_len=16, seed=3)
    shards = make_shards(tmp_path / "tokens")
    expected, loader = rows_of(TokenLoader(shards, **options)), TokenLoader(shards, num_workers=2, prefetch_batches=4, **options)
    batches = iter(loader)
    seen = rows_of(next(batches) for _ in range(5))
    resumed = TokenLoader(shards, num_workers=1, **options)
    resumed.load_state_dict(loader.state_dict())
    assert loader.state_dict()["position"] == 40 and seen + rows_of(resumed) == expected == seen + rows_of(batches)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 80})
    assert rows_of(loader) == expected[80:]
    for one in (loader, resumed): one.close()


MAIN = """
    import sys, time, torch
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2
    from llm_from_scratch.dataloader import TokenLoader
    from llm_from_scratch.token_shards import open_shards
    loader = TokenLoader(open_shards(sys.argv[1]), batch_size=8, seq_len=16, num_workers=2)
    next(iter(loader))
    print(*(worker.pid for worker in loader.processes.loader._iterator._workers), flush=True)
    time.sleep(600)
"""


def test_workers_end_with_a_main_process_that_is_killed(tmp_path):
    make_shards(tmp_path / "tokens")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    main = subprocess.Popen([sys.executable, "-c", textwrap.dedent(MAIN), str(tmp_path / "tokens")], env=environment, stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in main.stdout.readline().split()]
    assert len(workers) == 2 and all(map(is_alive, workers))
    main.send_signal(signal.SIGKILL)
    main.wait()
    deadline = time.monotonic() + 120
    while any(map(is_alive, workers)) and time.monotonic() < deadline: time.sleep(0.1)
    assert not any(map(is_alive, workers))
