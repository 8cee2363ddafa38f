"Every notebook has a page, and a build that fails says so with its exit code and the file's name."

import json
import re
import shutil
import subprocess
import sys

import pytest
from notebooks import PACKAGE, ROOT, notebook_paths, read_notebook
from test_repo_budgets import GOOD, write_notebook

CONFIG = """project: {type: website, output-dir: _docs}
format: {html: {css: styles.css}}
website: {title: sums, page-navigation: true, sidebar: {contents: [index.ipynb, 00_sums.ipynb]}}
"""


@pytest.fixture
def small_site(tmp_path):
    "A project of two notebooks with the real scripts and settings, in a folder whose name has no dot."
    root = tmp_path / "site"
    (root / "nbs").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "settings.ini", root)
    (root / PACKAGE).mkdir()
    shutil.copy(ROOT / PACKAGE / "__init__.py", root / PACKAGE)
    (root / "_quarto.yml").write_text(CONFIG)
    (root / "nbs" / "_quarto.yml").symlink_to("../_quarto.yml")
    shutil.copy(ROOT / "nbs" / "styles.css", root / "nbs")
    write_notebook(root / "nbs" / "index.ipynb", ["md:# Numbers\n> A small site", "md:See [sums](00_sums.ipynb)."])
    write_notebook(root / "nbs" / "00_sums.ipynb", GOOD)
    return root


def build(root):
    return subprocess.run(["bash", root / "scripts" / "docs.sh"], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_doc_6_a_good_site_has_a_page_for_each_notebook(small_site):
    result = build(small_site)
    assert result.returncode == 0, result.stderr
    assert "2 pages for 2 notebooks" in result.stdout
    page = (small_site / "_docs" / "sums.html").read_text()
    assert "Sums" in page and "add" in page and "fonts.googleapis" not in page
    home = (small_site / "_docs" / "index.html").read_text()
    assert 'nav-page-next"><a href="sums.html"' in home and 'nav-page-previous"><a href="index.html"' in page
    assert 'type="search"' in home and "sums.html" in (small_site / "_docs" / "search.json").read_text()
    assert not (small_site / "_proc").exists()


def test_doc_6_a_notebook_that_breaks_is_an_exit_code_and_a_name(small_site):
    raw = json.loads((small_site / "nbs" / "00_sums.ipynb").read_text())
    raw["cells"].insert(0, {"id": "front", "cell_type": "raw", "metadata": {}, "source": "---\ntitle: [unclosed\n---"})
    (small_site / "nbs" / "00_sums.ipynb").write_text(json.dumps(raw))
    write_notebook(small_site / "nbs" / "00a_more.ipynb", ["#| default_exp more", "md:# More\n> Numbers", "#| export\nimport no_such_module"])
    result = build(small_site)
    assert result.returncode != 0
    assert "nbs/00_sums.ipynb: " in result.stderr and "nbs/00a_more.ipynb: " in result.stderr
    assert "no_such_module" in result.stderr


def test_doc_6_a_missing_page_and_a_broken_link_are_named(small_site):
    (small_site / "_docs").mkdir()
    (small_site / "_docs" / "index.html").write_text('<h1>Numbers</h1><a href="gone.html#x">there</a><a href="https://example.org">far</a>')
    command = [sys.executable, "scripts/docs.py", "finish", "_docs"]
    result = subprocess.run(command, cwd=small_site, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "nbs/00_sums.ipynb: no page _docs/sums.html" in result.stderr
    assert "_docs/index.html: broken link gone.html" in result.stderr and "example.org" not in result.stderr


def test_a_page_that_asks_another_host_for_something_is_named(small_site):
    site = small_site / "_docs"
    site.mkdir()
    for name in ("index", "sums"):
        (site / f"{name}.html").write_text("<h1>Numbers</h1>")
    finish = [sys.executable, "scripts/docs.py", "finish", "_docs"]
    assert subprocess.run(finish, cwd=small_site, capture_output=True, timeout=300).returncode == 0
    link, quiet = '<link href="https://a.example/s.css" rel="stylesheet">', '<a href="https://b.example">far</a><link rel="canonical" href="https://c.example">'
    (site / "index.html").write_text(f'<h1>Numbers</h1>{link}{quiet}<script src="//d.example/x.js"></script>')
    (site / "own.css").write_text("body { background: url(https://e.example/i.png) }")
    result = subprocess.run(finish, cwd=small_site, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    told = [line.rpartition(" ")[2] for line in result.stderr.splitlines() if "another host" in line]
    assert told == ["//d.example/x.js", "https://a.example/s.css", "https://e.example/i.png"]


def test_every_notebook_is_in_the_sidebar_and_in_the_table_of_the_home_page():
    sidebar = (ROOT / "_quarto.yml").read_text().partition("sidebar:")[2]
    home = "\n".join(cell.source for cell in read_notebook(ROOT / "nbs" / "index.ipynb").cells)
    for path in notebook_paths():
        assert f"- {path.name}\n" in sidebar, f"_quarto.yml: the sidebar lacks {path.name}"
        assert path.stem == "index" or f"({path.name})" in home, f"index.ipynb: the table lacks {path.name}"


def test_the_site_reads_the_top_level_configuration():
    link = ROOT / "nbs" / "_quarto.yml"
    assert link.is_symlink() and str(link.readlink()) == "../_quarto.yml"
    assert re.search(r"^  page-navigation: true$", link.read_text(), re.M)


def test_readme_is_the_home_page():
    result = subprocess.run([sys.executable, "scripts/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def readme_commands() -> list[str]:
    "The lines of the bash blocks that install the package."
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith("pip install")]


def test_ci_runs_exactly_the_two_commands_of_the_readme():
    commands = readme_commands()
    assert len(commands) == 2, f"README.md wants two commands, one to train and one to test: {commands}"
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^(?:TRAIN|TEST)='(.*)'$", ci, re.M) == commands
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert [line for line in re.findall(r"run: (pip install .*)", workflow)] == commands
