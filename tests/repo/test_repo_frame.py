"Each page opens with what the reader will be able to do and closes with what can go wrong."

import pytest
from notebooks import CLOSING, notebook_paths, read_notebook
from test_repo_budgets import CLOSING as LAST
from test_repo_budgets import GOOD, write_notebook
from test_repo_budgets import OPENING as FIRST


def frame_misses(path) -> list[str]:
    nb = read_notebook(path)
    misses = []
    if not nb.opening:
        misses.append(f"{nb.name}: the first Markdown after the title has a heading, or does not say `able to`")
    if not nb.closing or nb.closing is not nb.cells[-1]:
        misses.append(f"{nb.name}: the last cell is not the section `{CLOSING}`")
    return misses


def test_every_notebook_has_its_frame():
    pages = [path for path in notebook_paths() if path.stem != "index"]
    misses = [miss for path in pages for miss in frame_misses(path)]
    assert not misses, "\n".join(misses)


def test_a_frame_is_seen(tmp_path):
    cells = GOOD[:2] + [FIRST] + GOOD[2:] + [LAST]
    assert frame_misses(write_notebook(tmp_path / "00_sums.ipynb", cells)) == []


@pytest.mark.parametrize(
    "cells, word",
    [
        (GOOD + [LAST], "able to"),
        (GOOD[:2] + ["md:## Sums\n\n" + FIRST[3:]] + GOOD[2:] + [LAST], "able to"),
        (GOOD[:2] + [FIRST] + GOOD[2:], "the last cell"),
        (GOOD[:2] + [FIRST] + GOOD[2:] + [LAST, "x = 1"], "the last cell"),
        (GOOD[:2] + [FIRST] + GOOD[2:] + [LAST, "md:## More\n\nand more"], "the last cell"),
    ],
)
def test_a_frame_that_is_missing_is_named(tmp_path, cells, word):
    misses = frame_misses(write_notebook(tmp_path / "00_sums.ipynb", cells))
    assert len(misses) == 1 and word in misses[0]
