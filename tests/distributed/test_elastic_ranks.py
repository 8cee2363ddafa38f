"Ranks that are killed, drift apart, leave and come back."

import random
import sys
from pathlib import Path

import psutil
import pytest
import torch
from ranks import ForkedTorchrun, run_ranks

from llm_from_scratch import train, training_loop
from llm_from_scratch.config import build_config
from llm_from_scratch.distributed import ParityError
from llm_from_scratch.env import Ranks, meet_anew

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import elastic_runs


def drift(ranks, folder, what):
    "The step at which training ended and what it said, where rank 1 changes something in step 3."
    config = build_config(
        {"data": dict(path=[str(folder / "text")], val_fraction=0.2, cache_dir=str(folder / "cache")), "tokenizer": dict(vocab_size=301)},
        {"model": dict(hidden_size=32, num_layers=1, num_heads=2), "train": dict(steps=6, global_batch=4, micro_batch=2, seq_len=32, dtype="fp32", num_threads=1, parity_every_steps=2)},
        {"optim": dict(kind="adamw"), "eval": dict(num_samples=0, num_completions=0), "log": dict(tensorboard=False)},
    )
    held, real = [], training_loop.train_on

    def train_on(training, *arguments):
        held[:] = [training]
        answer = real(training, *arguments)
        if training.step == 3 and ranks.rank == 1:
            if what == "weights":
                training.model.embedding.weight.data[5, 7] += 1e-6
            else:
                training.loader.position += 4
        return answer

    training_loop.train_on = train_on
    try:
        train.run(config, folder / what, ranks)
    except ParityError as error:
        return held[0].step, str(error)


@pytest.mark.parametrize("what", ["weights", "position"])
def test_drift_is_found_at_the_next_comparison_and_named(tmp_path, what):
    elastic_runs.make_corpus(tmp_path)
    (tmp_path / "corpus").rename(tmp_path / "text")
    (step, said), other = run_ranks(drift, 2, tmp_path, what)
    assert step == 4 and other == (step, said)
    assert said.startswith({"weights": "embedding.weight is ", "position": "loader.position is "}[what]) and "on rank 1" in said


def meet_twice(ranks):
    "Meet on the store that torchrun's agent would keep, in two rounds of one process."
    store = torch.distributed.distributed_c10d._get_default_store()
    if ranks.rank == 1:
        store.set("rank 1", "a word of the dead")
    rooms = []
    for _ in range(2):
        rooms.append(meet_anew(store, Ranks(ranks.rank, ranks.rank, 3), 60))
        torch.distributed.barrier()
    if ranks.is_main:
        rooms[0].set("round", "first"), rooms[1].set("round", "second")
    return [room.get("round").decode() for room in rooms]


def test_ranks_meet_where_dead_ones_met():
    assert run_ranks(meet_twice, 3) == [["first", "second"]] * 3


RANK = """
import os
from pathlib import Path
import elastic_runs
Path(__file__).with_suffix("." + os.environ["RANK"]).write_text(str(os.getpid()))
elastic_runs.be_training()
"""


class Forked(elastic_runs.Launcher):
    "Its ranks leave their numbers, which the command line of a copy does not tell."

    def start(self, arguments, environment):
        self.script = Path(self.log.name).with_suffix(".py")
        self.script.write_text(RANK)
        return ForkedTorchrun([self.script if part == elastic_runs.__file__ else part for part in arguments], environment, self.log.name)

    def workers(self):
        return {rank: psutil.Process(int(self.script.with_suffix(f".{rank}").read_text())) for rank in range(2)}

    def __exit__(self, *error):
        self.process.end(), self.log.close()


@pytest.mark.slow
def test_twenty_kills_in_a_row_recover(tmp_path):
    row = elastic_runs.twenty_kills(tmp_path, 20, random.Random(1), Forked)
    assert (row["exit_code"], row["same_losses"], len(row["kills"])) == (0, True, 20)
    assert all(kill["step"] - 20 < kill["back_to"] for kill in row["kills"])


@pytest.mark.slow
def test_a_launcher_leaves_and_another_one_comes(tmp_path):
    row = elastic_runs.elastic(tmp_path, launcher=Forked)
    assert (row["exit_codes"], row["same_steps"]) == ([0, 0], True)
    assert [event["ranks"] for event in row["events"] if event["what"] == "start"] == [2, 1, 2]
    assert row["largest_relative_difference"] < 1e-3
