"Recipes: scripts that a shell runs."

import os
import subprocess

import pytest

from llm_from_scratch.launch import command_parser
from llm_from_scratch.recipes import RECIPES, launch_script

TOOLS = {
    "torchrun": 'printf "%s\\n" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"',
    "srun": 'exec "$@"',
    "scontrol": 'printf "node-%s\\n" 1 2 3 4',
}


def start(tmp_path, recipe, launcher, **environ):
    for name, body in TOOLS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node-[1-4]", **environ}
    return subprocess.run(["bash", "-s", "--", "--train.steps", "7"], input=launch_script(recipe, launcher), env=given, text=True, capture_output=True)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_script_starts_training_with_what_it_was_given(tmp_path, recipe, launcher):
    given = {"DATA": "/my data", "RUN": "/shared/run", "NVME": "/nvme", "HEAD": "node-1:29400"}
    done = start(tmp_path, recipe, launcher, **given)
    assert done.returncode == 0, done.stderr
    variable, *words = done.stdout.splitlines()
    place = words.index("-m")
    launch, training = words[:place], command_parser().parse_args(words[place + 2:])
    assert (variable, words[place + 1]) == ("1", "llm_from_scratch.train")
    assert launch[launch.index("--rdzv-endpoint") + 1] == ("node-1:29400" if launcher == "torchrun" else "node-1:24567")
    assert [int(launch[launch.index(name) + 1]) for name in ("--nnodes", "--nproc-per-node")] == [recipe.num_machines, recipe.cards_a_machine]
    assert (training.preset, training.run_dir, training.resume) == (recipe.preset, "/shared/run", "auto")
    assert vars(training)["data.path"] == ["/my data"] and vars(training)["train.steps"] == "7"
    assert vars(training).get("engine.nvme_path") == ("/nvme" if recipe.preset == "ws-2b7" else None)


def test_a_script_asks_for_what_is_missing(tmp_path):
    done = start(tmp_path, RECIPES["ws-2b7"], "slurm", DATA="/data", RUN="/run")
    assert done.returncode != 0 and "NVME: folder on a local NVMe disk" in done.stderr

