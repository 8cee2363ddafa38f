"Tables in 80 columns: nothing is cut off, and no value is lost."

import json

import pytest
from rich.console import Console

from llm_from_scratch.config import build_config, load_preset, replace
from llm_from_scratch.cost import GPUS, estimate, kinds_table
from llm_from_scratch.elastic import read_sittings, sittings_table
from llm_from_scratch.links import PROFILES, links_table
from llm_from_scratch.recipes import RECIPES, recipe_table


def is_whole(table, width=80):
    "rich marks a cut value by an ellipsis, and a table that is too wide loses its right border without a mark."
    console = Console(width=width, color_system=None, force_jupyter=False)
    with console.capture() as shown:
        console.print(table)
    lines = shown.get().splitlines()
    has_borders = all(line.rstrip()[-1] in "┓┃┩│┤┘" for line in lines if line[:1] in tuple("┏┃┡│├└"))
    return "…" not in shown.get() and max(map(len, lines)) <= width and has_borders


def test_the_kinds_of_gpu():
    seven = replace(build_config(load_preset("7b")), model={"vocab_size": 32000})
    for tokens, price in ((1e12, 1.5), (3e13, None), (1e15, 12345.678)):
        assert is_whole(kinds_table([estimate(seven, gpu, 32, tokens, price_per_hour=price) for gpu in GPUS.values()]))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    assert is_whole(recipe_table(RECIPES[name]))


@pytest.mark.parametrize("profile", PROFILES)
def test_links(profile):
    assert is_whole(links_table(profile, {"NCCL_SOCKET_IFNAME": "=enp193s0f0np0,enp193s0f1np1,enp65s0f0np0", "NCCL_P2P_LEVEL": "PXB"}))


def test_sittings(tmp_path):
    lines = [dict(message="start", time=f"2026-11-30T12:0{number}:00+00:00", step=number * 1_000_000, ranks=1024) for number in range(4)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert is_whole(sittings_table(read_sittings(tmp_path)))
