"Export the notebooks into a copy and compare: the package is generated, and nothing else may be in it."

import filecmp
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from notebooks import PACKAGE, modules_in_order

GENERATED = {"__init__.py", "_modidx.py"}


def copy_project(root: Path, to: Path) -> Path:
    "The part of a project that an export reads and writes."
    for name in ["settings.ini", "pyproject.toml"]:
        if (root / name).exists():
            shutil.copy(root / name, to / name)
    for folder in ["nbs", PACKAGE]:
        ignore = shutil.ignore_patterns("__pycache__", "*.py" if folder == "nbs" else "__pycache__", ".ipynb_checkpoints", "runs")
        shutil.copytree(root / folder, to / folder, symlinks=True, ignore=ignore)
    return to


def shared_targets(root: Path) -> list[str]:
    "Notebooks that export to one module: each would delete the other's names."
    targets = defaultdict(list)
    for nb in modules_in_order(root):
        targets[nb.module].append(nb.name)
    return [f"{' and '.join(names)} both export to {module}" for module, names in targets.items() if len(names) > 1]


def orphans(root: Path) -> list[str]:
    "Modules of the package that no notebook exports."
    targets = {nb.module.replace(".", "/") + ".py" for nb in modules_in_order(root)} | GENERATED
    package = root / PACKAGE
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    return sorted(f"{PACKAGE}/{name} has no notebook" for name in found - targets)


def drift(root: Path, scratch: Path) -> list[str]:
    "Differences between the package and a fresh export of its notebooks, by file and notebook."
    copy_project(root, scratch)
    for path in (scratch / PACKAGE).glob("*.py"):
        if path.name != "__init__.py":
            path.unlink()
    script = "from nbdev.doclinks import nbdev_export; nbdev_export()"
    result = subprocess.run([sys.executable, "-c", script], cwd=scratch, capture_output=True, text=True, timeout=300)
    if result.returncode:
        return [f"nbdev_export fails: {result.stderr.strip().splitlines()[-1]}"]
    notebook_of = {nb.module.replace(".", "/") + ".py": nb.name for nb in modules_in_order(root)}
    faults = []
    for fresh in sorted((scratch / PACKAGE).rglob("*.py")):
        name = fresh.relative_to(scratch / PACKAGE).as_posix()
        committed = root / PACKAGE / name
        source = notebook_of.get(name, "the notebooks")
        if not committed.exists():
            faults.append(f"{PACKAGE}/{name} is missing: export {source}")
        elif not filecmp.cmp(fresh, committed, shallow=False):
            faults.append(f"{PACKAGE}/{name} differs from {source} at line {first_difference(fresh, committed)}")
    return faults


def first_difference(one: Path, other: Path) -> int:
    left, right = one.read_text(encoding="utf-8").splitlines(), other.read_text(encoding="utf-8").splitlines()
    for number, pair in enumerate(zip(left, right), 1):
        if pair[0] != pair[1]:
            return number
    return min(len(left), len(right)) + 1
