from pathlib import Path

import pytest
from ranks import server_with_torch

LONGEST = ("test_elastic_ranks.py", "test_deepspeed_engine_ranks.py")


def pytest_collection_modifyitems(items):
    "The longest first among this folder's tests, so that none of them runs alone at the end."
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[place] for place in places), key=lambda item: item.path.name not in LONGEST)
    for place, item in zip(places, ordered):
        items[place] = item


@pytest.fixture(scope="package", autouse=True)
def server():
    "One for all modules of this folder, since a new one would load torch again; other tests have their own."
    with server_with_torch():
        yield
