"STYLE's budgets over every notebook, and the checker's own cases."

import json

import pytest
from check_budgets import budget_misses, summary
from notebooks import notebook_paths


def write_notebook(path, cells):
    "Cells are source strings; one that starts with `md:` is Markdown, `out:` code with an output, `png:` code with a picture."
    raw = {"cells": [], "metadata": {"kernelspec": {"name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}
    for number, source in enumerate(cells):
        kind, _, rest = source.partition(":") if source[:3] in {"md:", "out", "png"} else ("code", "", source)
        cell = {"id": str(number), "cell_type": "markdown" if kind == "md" else "code", "metadata": {}, "source": rest}
        if cell["cell_type"] == "code":
            data = {"text/plain": "1"} | ({"image/png": ""} if kind == "png" else {})
            output = {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": 1}
            cell |= {"outputs": [output] if kind in {"out", "png"} else [], "execution_count": None}
        raw["cells"].append(cell)
    path.write_text(json.dumps(raw))
    return path


WHY = "md:## Why\n\n" + "A sum is the smallest thing that can be right or wrong, so it makes a fine example here. " * 2
GOOD = [
    "#| default_exp sums",
    "md:# Sums\n> Numbers put together",
    "from fastcore.test import test_eq",
    WHY,
    '#| exports\ndef add(\n    a: int,  # first addend\n    b: int,  # second addend\n) -> int:\n    "Give a + b."\n    return a + b',
    "out:test_eq(add(1, 2), 3)\ntest_eq(add(-1, 1), 0)\nadd(1, 2)",
]


def test_a_good_notebook_has_no_miss(tmp_path):
    path = write_notebook(tmp_path / "00_sums.ipynb", GOOD)
    assert budget_misses(path) == []
    assert "1 public definitions, 2 assertions" in summary(path)


@pytest.mark.parametrize(
    "position, cell, words",
    [
        (0, "#| default_exp other", "the file's name says sums"),
        (1, "md:# Sums", "subtitle"),
        (2, "from fastcore.test import test_eq\nx = 1", "an import and something else"),
        (3, "md:too short", "Markdown of 2 words"),
        (4, '#| export\ndef add(a, b):\n    "Give a + b."\n    return a + b', "no comment of its own beside a, b"),
        (4, "#| export\ndef add(\n    a,  # one\n    b,  # two\n):\n    return a + b", "no docstring"),
        (4, "#| export\ndef add_helper(\n    a,  # one\n):\n    'Give a.'\n    return a", "no Manager"),
        (5, "out:add(1, 2)", "0 of 1 public definitions have a lesson"),
        (5, "test_eq(add(1, 2), 3)\ntest_eq(add(1, 2), 3)", "0 of 1 public definitions have a lesson"),
        (5, "out:test_eq(add(1, 2), 3)", "1 assertions for 1"),
        (5, "out:test_eq(add(1, 2), 3)\nexpect_fail(lambda: add('1', 2))", "a bare expect_fail(...) checks nothing"),
        (5, "out:test_eq(add(1, 2), 3)\nexpect_fail(lambda: add('1', 2))", "1 assertions for 1"),
        (5, "out:# now add\ntest_eq(add(1, 2), 3)\ntest_eq(add(0, 2), 2)", "narrates"),
        (5, "%time add(1, 2)", "not plain Python"),
        (5, "png:test_eq(add(1, 2), 3)\ntest_eq(add(0, 2), 2)", "a picture without"),
        (5, 'png:test_eq(add(1, 2), 3)\n#| fig-alt: "Sums of small numbers, on a line"', "a picture without"),
        (5, 'png:#| fig-alt: "a line"\ntest_eq(add(1, 2), 3)', "alternative text of 6 characters, 20 to 160"),
        (5, "x = 0\n" * 60, "words of prose a line of code"),
        (4, "#| export\ndef add(a):  # one\n    'Give.'\n" + "    a += 1\n" * 50, "has 52 lines"),
    ],
)
def test_a_miss_is_named(tmp_path, position, cell, words):
    cells = GOOD[:position] + [cell] + GOOD[position + 1 :]
    misses = budget_misses(write_notebook(tmp_path / "00_sums.ipynb", cells))
    assert any(words in miss for miss in misses), misses


def test_expect_fail_in_a_with_block_is_an_assertion(tmp_path):
    lesson = "out:test_eq(add(1, 2), 3)\nwith expect_fail(TypeError):\n    add('1', 2)\nadd(1, 2)"
    assert budget_misses(write_notebook(tmp_path / "00_sums.ipynb", GOOD[:5] + [lesson])) == []


def test_a_picture_with_its_alternative_text_is_no_miss(tmp_path):
    lesson = 'png:#| slow\n#| fig-alt: "Sums of small numbers lie on a line: one more, one higher"\ntest_eq(add(1, 2), 3)\ntest_eq(add(0, 2), 2)\nadd(0, 2)'
    assert budget_misses(write_notebook(tmp_path / "00_sums.ipynb", GOOD[:5] + [lesson])) == []


OPENING = "md:You will be able to add two numbers, and to say of any sum whether it is right, with nothing but this page and no calculator at hand."
CLOSING = "md:## What can go wrong\n\n- **A sum is a word.** " + "Two texts were added, so convert them first. " * 11


def test_a_closing_section_has_a_budget_too(tmp_path):
    path = write_notebook(tmp_path / "00_sums.ipynb", GOOD + [CLOSING + "word " * 30])
    assert any("20 to 110" in miss for miss in budget_misses(path))


def test_every_notebook_keeps_the_budgets():
    misses = {path.name: budget_misses(path) for path in notebook_paths()}
    report = "\n".join(f"{name}: {miss}" for name, found in misses.items() for miss in found)
    assert not report, f"misses of the budgets:\n{report}"
