"Small copies of the recipes on two ranks, under the recipe's own engine."

import pytest
from ranks import run_ranks, server_with_torch

from llm_from_scratch.config import replace
from llm_from_scratch.launch import StopRequest
from llm_from_scratch.recipes import RECIPES, recipe_config, shrink
from llm_from_scratch.training_loop import build_training, fit, prepare_data


@pytest.fixture(scope="module", autouse=True)
def server_with_deepspeed():
    with server_with_torch("deepspeed.runtime.engine"):
        yield


def two_steps(ranks, folder, name):
    "Losses of two steps under the recipe's engine and under DDP, and the stage."
    place = dict(path=[str(folder / "text")], cache_dir=str(folder / "cache"), val_fraction=0.2)
    recipe = recipe_config(RECIPES[name])
    offload = "none" if recipe.engine.offload == "nvme" else recipe.engine.offload  # its kernel for disks is compiled against libaio
    small = shrink(recipe, data=place, engine=dict(offload=offload))
    losses = {}
    for config in (replace(small, engine=dict(kind="ddp", offload="none")), small):
        training, found = build_training(config, prepare_data(config), ranks), losses.setdefault(config.engine.kind, [])
        assert fit(training, folder / config.engine.kind, lambda step, loss, **values: found.append(loss), StopRequest()) == 0
        training.engine.close()
    return losses, small.engine.zero, small.engine.offload


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("ws-1b3", 2), ("ws-2b7", 3), ("7b", 3)])
def test_a_small_copy_trains_under_its_own_stage(tmp_path, name, stage):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    first, second = run_ranks(two_steps, 2, tmp_path, name, timeout_seconds=150)
    assert first == second
    losses, zero, offload = first
    assert (zero, offload) == (stage, "cpu" if name == "ws-1b3" else "none")
    assert losses["deepspeed"] == pytest.approx(losses["ddp"], rel=1e-4) and len(losses["ddp"]) == 2
