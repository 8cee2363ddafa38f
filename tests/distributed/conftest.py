from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import server_with_torch

LOADED = []  # the server that this folder's ranks fork from, while there is one
LONGEST = ("test_signal_ranks.py", "test_elastic_ranks.py", "test_deepspeed_engine_ranks.py")


def pytest_collection_modifyitems(items):
    "The longest first among this folder's tests, so that none of them runs alone at the end."
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[place] for place in places), key=lambda item: item.path.name not in LONGEST)
    for place, item in zip(places, ordered):
        items[place] = item


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    "One server for all modules of this folder, since each would load torch again."
    if not LOADED:
        LOADED.append(ExitStack())
        LOADED[0].enter_context(server_with_torch())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    "Tests of other folders fork from servers of their own."
    if LOADED and (nextitem is None or nextitem.path.parent != Path(__file__).parent):
        LOADED.pop().close()
