"A key of the configuration is renamed or dropped on purpose or not at all."

import importlib.util

import pytest
from check_config_keys import changes, current_keys

has_config = importlib.util.find_spec("llm_from_scratch.config") is not None


@pytest.mark.skipif(not has_config, reason="llm_from_scratch.config is not exported yet")
def test_the_configuration_has_exactly_the_frozen_keys():
    faults = changes()
    assert not faults, "\n".join(faults + ["wanted? python tests/repo/check_config_keys.py --write"])


@pytest.mark.skipif(not has_config, reason="llm_from_scratch.config is not exported yet")
def test_every_section_has_keys():
    sections = {line.split(".")[0] for line in current_keys()}
    assert {"model", "tokenizer", "data", "train", "optim", "eval", "checkpoint", "engine", "log"} <= sections
