"""How long does training stand still for a checkpoint: torch.save, our own save, and the one in the background?

    python benchmarks/save_blocking.py [--width 4096] [--layers 8] [--rounds 4] [--folder DIR]

The state is weights and moments. All kinds save in turn, in one process. Background saves come in two kinds: with memory that was
fetched beside the training, as in a run, and without. Appends a line to results/save_blocking.jsonl.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from llm_from_scratch.background_saves import BackgroundSaver
from llm_from_scratch.checkpointing import save_checkpoint
from llm_from_scratch.config import CheckpointConfig
from llm_from_scratch.env import environment_report

RESULTS = Path(__file__).parent / "results" / "save_blocking.jsonl"


def build(width: int, layers: int):
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in net.parameters():
        parameter.grad = None
    return {"model": net, "optimizer": optimizer}


def seconds(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def torch_save(state, path):
    torch.save({name: value.state_dict() for name, value in state.items()}, path)


def longest_pause(saver, step_seconds: float = 0.005) -> float:
    "The longest time that a loop of tiny steps stands still while the save goes on."
    longest, last = 0.0, time.perf_counter()
    while saver.under_way is not None and saver.under_way.is_alive():
        time.sleep(step_seconds)
        now = time.perf_counter()
        longest, last = max(longest, now - last - step_seconds), now
    return longest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    state = build(options.width, options.layers)
    state_bytes = sum(4 * parameter.numel() for parameter in state["model"].parameters()) * 3
    times = {name: [] for name in ("torch.save", "save_checkpoint", "no memory yet", "background", "longest pause")}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        saver = BackgroundSaver(Path(folder, "background"), CheckpointConfig(keep=1))
        saver.reserve(state)
        saver.reserving.join()
        for number in range(options.rounds):
            times["torch.save"].append(seconds(lambda: torch_save(state, Path(folder, "torch.pt"))))
            times["save_checkpoint"].append(seconds(lambda: save_checkpoint(Path(folder, "own"), state, step=1)))
            times["background"].append(seconds(lambda: saver.save(state, step=number)))
            times["longest pause"].append(longest_pause(saver))
            saver.wait()
            cold = BackgroundSaver(Path(folder, "cold"), CheckpointConfig(keep=1))
            times["no memory yet"].append(seconds(lambda: cold.save(state, step=number)))
            cold.wait()
            del cold
            print({name: f"{values[-1]:.3f}" for name, values in times.items()}, flush=True)
    middle = {name: statistics.median(values) for name, values in times.items()}
    blocked = {
        "torch.save": middle["torch.save"],
        "save_checkpoint, verified": middle["save_checkpoint"],
        "background, no memory yet": middle["no memory yet"],
        "background": middle["background"],
        "longest pause beside it": middle["longest pause"],
    }
    row = {"state_bytes": state_bytes, "rounds": options.rounds, "threads": torch.get_num_threads(), "torch_save_seconds": middle["torch.save"],
           "blocked": blocked, "cpu": environment_report()["cpu"]}
    for name, value in blocked.items():
        print(f"{name:28} {value:7.3f} s  {value / middle['torch.save']:6.1%} of torch.save")
    with open(RESULTS, "a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
