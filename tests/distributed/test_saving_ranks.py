"Checkpoints under several ranks: one decision for all."

import json
import shutil

import pytest
from ranks import run_ranks

from llm_from_scratch import train
from llm_from_scratch.background_saves import SaveSchedule
from llm_from_scratch.checkpointing import list_checkpoints, verify_checkpoint
from llm_from_scratch.config import build_config
from llm_from_scratch.training_loop import open_saver, save_if_due


def small(folder):
    return build_config(
        {"data": dict(path=[str(folder / "text")], val_fraction=0.2, cache_dir=str(folder / "cache")), "tokenizer": dict(vocab_size=301)},
        {"model": dict(hidden_size=32, num_layers=1, num_heads=2), "train": dict(steps=6, global_batch=4, micro_batch=2, seq_len=32, dtype="fp32", num_threads=1)},
        {"optim": dict(kind="adamw", warmup_steps=2), "eval": dict(every_steps=4, num_samples=0, num_completions=0), "log": dict(tensorboard=False)},
        {"checkpoint": dict(every_steps=1, keep=6)},
    )


def train_ranks(ranks, folder, names, resume):
    config = small(folder)
    train.tell = lambda *arguments: None  # the report imports matplotlib: seconds
    return train.run(config, folder / names[ranks.rank], ranks, resume_from=resume, old=config if resume else None)


def losses(run_dir):
    return {row["step"]: row["loss"] for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}


def keep_steps(run_dir, steps):
    for path in list_checkpoints(run_dir / "checkpoints"):
        if int(path.name[-8:]) not in steps:
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "Where two ranks have trained, in the folder whole."
    home = tmp_path_factory.mktemp("saving")
    (home / "text").mkdir()
    for number in range(30):
        (home / "text" / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    assert run_ranks(train_ranks, 2, home, ("whole", "whole"), None) == [0, 0]
    return home


def test_dist_2_two_ranks_write_one_checkpoint_and_go_on(home):
    assert list(losses(home / "whole")) == list(range(1, 7))
    places = list_checkpoints(home / "whole" / "checkpoints")
    assert [path.name for path in places] == [f"step_{step:08d}" for step in range(1, 7)]
    assert [verify_checkpoint(path, kind="full") for path in places] == [[]] * 6
    assert {path.name for path in (home / "whole" / "checkpoints").iterdir()} == {path.name for path in places}


def test_dist_8_all_ranks_resume_where_rank_0_says(home):
    whole = losses(home / "whole")
    for name, steps in [("rank_0", {2, 4}), ("rank_1", {3})]:
        shutil.copytree(home / "whole", home / name)
        keep_steps(home / name, steps)
    assert run_ranks(train_ranks, 2, home, ("rank_0", "rank_1"), "auto") == [0, 0]
    rows = [json.loads(line) for line in (home / "rank_0" / "metrics.jsonl").read_text().splitlines()]
    assert [row["resumed_from"] for row in rows if "resumed_from" in row] == [4]
    assert losses(home / "rank_0") == whole


class Counted:
    "As much of a training as saving asks for."

    def __init__(self, ranks, folder):
        import torch

        from llm_from_scratch.config import Config
        from llm_from_scratch.distributed import WholeOnEachRank

        self.config = Config(checkpoint=dict(every_steps=1000, every_minutes=1, light_every_steps=1000))
        self.ranks, self.model, self.step = ranks, torch.nn.Linear(2, 2), 1
        self.engine = WholeOnEachRank()
        self.loader = type("Loader", (), {"state_dict": lambda self: {"position": 0}})()
        self.parts, self.data, self.environment = {"model": self.model}, type("Data", (), {"manifests": {}}), {}
        self.tokens, self.skipped, self.last_val, self.url = 0, 0, {}, None
        self.fuse = type("Fuse", (), {"state_dict": lambda self: {}})()
        self.model.weight.data.fill_(1.0), self.model.bias.data.fill_(1.0)


def clocks_differ(ranks, folder):
    "Rank 1's clock runs away; rank 0's says when."
    training = Counted(ranks, folder)
    saver, _ = open_saver(training, folder)
    now = [0.0]
    schedule = SaveSchedule(training.config.checkpoint, clock=lambda: now[0])
    saved = []
    with saver:
        for training.step, minutes in enumerate([0.1, 0.5, 1.1, 1.2], 1):
            now[0] = minutes * 60 * (1 if ranks.is_main else 100)
            save_if_due(training, saver, schedule, last=False, val_loss=None)
    return saver.saved.name if ranks.is_main else saver.saved


def test_rank_0s_clock_decides_for_all(tmp_path):
    assert run_ranks(clocks_differ, 2, tmp_path) == ["step_00000003", None]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000003"]
