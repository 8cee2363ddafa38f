import pytest
from ranks import server_with_torch


@pytest.fixture(scope="session", autouse=True)
def server():
    "One for all modules: a new one would load torch again."
    with server_with_torch():
        yield
