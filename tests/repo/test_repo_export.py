"The package is what the notebooks export: no hand edit, no orphan, no shared target."

import shutil

import pytest
from export_drift import PACKAGE, copy_project, drift, orphans, shared_targets
from notebooks import ROOT, notebook_paths
from test_repo_budgets import GOOD, write_notebook


@pytest.fixture
def small_project(tmp_path):
    "One notebook and its export, in a folder of its own."
    root = tmp_path / "project"
    (root / "nbs").mkdir(parents=True)
    (root / PACKAGE).mkdir()
    shutil.copy(ROOT / "settings.ini", root)
    shutil.copy(ROOT / PACKAGE / "__init__.py", root / PACKAGE)
    write_notebook(root / "nbs" / "00_sums.ipynb", GOOD)
    exported = tmp_path / "exported"
    exported.mkdir()
    drift(root, exported)
    shutil.copytree(exported / PACKAGE, root / PACKAGE, dirs_exist_ok=True)
    return root


def test_doc_1_the_package_is_a_fresh_export(tmp_path):
    faults = drift(ROOT, tmp_path)
    assert not faults, "\n".join(faults + ["run nbdev_export; change exported code in its notebook only"])


def test_doc_1_a_hand_edit_names_file_and_notebook(small_project, tmp_path):
    (clean := tmp_path / "clean").mkdir()
    assert drift(small_project, clean) == []
    module = small_project / PACKAGE / "sums.py"
    module.write_text(module.read_text().replace("a + b", "a - b"))
    (edited := tmp_path / "edited").mkdir()
    [fault] = drift(small_project, edited)
    assert f"{PACKAGE}/sums.py differs from 00_sums.ipynb" in fault


def test_doc_1_no_two_notebooks_share_a_target(small_project):
    assert shared_targets(ROOT) == []
    write_notebook(small_project / "nbs" / "00a_sums.ipynb", GOOD)
    assert shared_targets(small_project) == ["00_sums.ipynb and 00a_sums.ipynb both export to sums"]


def test_doc_2_a_module_without_notebook_is_listed(small_project):
    assert orphans(ROOT) == []
    (small_project / PACKAGE / "left_behind.py").write_text("x = 1\n")
    assert orphans(small_project) == [f"{PACKAGE}/left_behind.py has no notebook"]


def test_the_copy_is_complete(tmp_path):
    copied = copy_project(ROOT, tmp_path)
    assert [path.name for path in notebook_paths(copied)] == [path.name for path in notebook_paths()]
