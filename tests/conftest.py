"Tests marked slow or cuda are skipped, and counted, unless they are asked for and can run."

import logging
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes with two threads each would spin against one another

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: kernels then run on the CPU


def pytest_collection_modifyitems(config, items):
    asked = config.getoption("markexpr")
    for item in items:
        if "slow" in item.keywords and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if "cuda" in item.keywords and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="cuda: no NVIDIA GPU here"))


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    "What a test draws does not depend on those that ran before it in the same process."
    import random
    import sys

    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def warnings_said():
    "What the library's logger warned of."
    said = []

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler = Keep(level=logging.WARNING)
    logging.getLogger("llm_from_scratch").addHandler(handler)
    yield said
    logging.getLogger("llm_from_scratch").removeHandler(handler)
