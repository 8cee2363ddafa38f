"The order of imports, what exported code may import, and what every notebook owes its reader."

import ast
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from configparser import ConfigParser

import pytest
from notebooks import (
    PACKAGE,
    ROOT,
    SKIP_FLAGS,
    count_assertions,
    imported_modules,
    modules_in_order,
    notebook_paths,
    public_definitions,
    read_notebook,
)

MODULES = modules_in_order()
DEVELOPMENT_ONLY = {"nbdev", "fastcore", "execnb", "IPython", "jupyter_client", "nbclient", "pytest"}
SET_BY_TOOLS = {"IN_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}
DISTRIBUTION_OF = {"yaml": "PyYAML", "fasttext": "fasttext_predict", "pynvml": "nvidia_ml_py"}


def exported_imports(nb) -> set[str]:
    return set().union(*[imported_modules(cell.tree()) for cell in nb.exported] or [set()])


def test_a_module_imports_only_from_earlier_notebooks():
    order = [nb.module for nb in MODULES]
    faults = []
    for nb in MODULES:
        for name in sorted(exported_imports(nb)):
            own = re.match(rf"{PACKAGE}\.(\w+)", name)
            if name.startswith("."):
                faults.append(f"{nb.name}: relative import {name}; write {PACKAGE}.NAME")
            elif own and own.group(1) not in ["kernels", *order[: order.index(nb.module)]]:
                faults.append(f"{nb.name} ({nb.module}) imports {own.group(1)}, which does not come before it")
    assert not faults, "\n".join(faults)


def distributions(text: str) -> set[str]:
    return {re.match(r"[\w-]+", name).group().lower().replace("-", "_") for name in text.split()}


def test_exported_code_imports_only_what_the_package_requires():
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    settings = parser["DEFAULT"]
    required = distributions(settings["requirements"])
    by_extra = distributions(" ".join(text for name, text in settings.items() if name.endswith("_requirements") and not name.startswith("dev")))
    faults = []
    for nb in MODULES:
        at_start = set().union(*[imported_modules(cell.tree(), deep=False) for cell in nb.exported] or [set()])
        for name in sorted(exported_imports(nb)):
            top = name.split(".")[0]
            library = DISTRIBUTION_OF.get(top, top).lower()
            if top in DEVELOPMENT_ONLY:
                faults.append(f"{nb.name}: exported code imports {top}, a development tool")
            elif top in {"", PACKAGE} or top in sys.stdlib_module_names or library in required:
                continue
            elif library not in by_extra:
                faults.append(f"{nb.name}: exported code imports {top}, which settings.ini does not require")
            elif name in at_start:
                faults.append(f"{nb.name}: {top} comes by an extra; import it inside the function that needs it")
    assert not faults, "\n".join(faults)


def test_no_star_import_in_exported_code():
    faults = [f"{nb.name}: cell {cell.index}" for nb in MODULES for cell in nb.exported if re.search(r"^\s*from .* import \*", cell.code, re.M)]
    assert not faults, faults


def test_doc_3_every_kernelspec_is_python3():
    found = {path.name: read_notebook(path).metadata.get("kernelspec", {}).get("name") for path in notebook_paths()}
    assert {name: kernel for name, kernel in found.items() if kernel != "python3"} == {}


def test_doc_3_the_python3_kernel_is_this_interpreter():
    kernelspec = importlib.import_module("jupyter_client.kernelspec")
    try:
        command = kernelspec.KernelSpecManager().get_kernel_spec("python3").argv[0]
    except kernelspec.NoSuchKernel:
        pytest.fail('no python3 kernel in this environment: pip install -e ".[dev]"')
    assert command == "python" or os.path.samefile(command, sys.executable), f"the kernel python3 starts {command}"


def test_doc_4_no_magic_in_an_exported_cell():
    pattern = re.compile(r"^\s*(%|!|\?)|get_ipython\(", re.M)
    faults = [f"{nb.name}: cell {cell.index}" for nb in MODULES for cell in nb.exported if pattern.search(cell.code)]
    assert not faults, faults


@pytest.mark.parametrize("nb", MODULES, ids=lambda nb: nb.module)
def test_doc_4_every_name_in_all_is_importable(nb):
    module = importlib.import_module(f"{PACKAGE}.{nb.module}")
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing, f"{nb.name}: __all__ names what does not exist: {missing}"
    defined = {node.name for cell in nb.exported if "#| exporti" not in cell.source for node in public_definitions(cell)}
    assert defined <= set(module.__all__), f"{nb.name}: public, not in __all__: {defined - set(module.__all__)}"


def test_doc_5_every_notebook_runs_an_asserting_cell():
    silent = [nb.name for nb in MODULES if not any(count_assertions(cell) for cell in nb.cells if cell.is_example and not cell.is_skipped)]
    assert not silent, f"no assertion runs without flags in: {silent}"


def test_doc_5_flagged_cells_are_counted(record_property):
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    flags = set(settings["DEFAULT"]["tst_flags"].split())
    assert flags <= SKIP_FLAGS, f"settings.ini skips flags that are not counted: {flags - SKIP_FLAGS}"
    counts = Counter(flag for nb in MODULES for cell in nb.cells if cell.is_code for flag in cell.flags & flags)
    record_property("flagged_cells", dict(counts))
    unknown = {flag for nb in MODULES for cell in nb.cells if cell.is_code for flag in cell.flags & (SKIP_FLAGS - flags)}
    assert not unknown, f"flags that nbdev_test does not skip: {unknown}"
    print("cells skipped without their flag:", ", ".join(f"{flag} {counts[flag]}" for flag in sorted(flags)))


def changed_variables(cell) -> set[str]:
    "Environment variables that a cell sets outside `patch.dict(os.environ)` and does not take back."
    tree, changed, restored = cell.tree(), set(), set()
    protected = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.With) and "environ" in ast.unparse(node.items[0]) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Subscript, ast.Call)) else ""
        if id(node) in protected or not text.startswith("os.environ"):
            continue
        if isinstance(node, ast.Subscript):
            key = ast.unparse(node.slice)
            (changed if isinstance(node.ctx, ast.Store) else restored if isinstance(node.ctx, ast.Del) else set()).add(key)
        elif node.func.attr == "pop":
            restored.add(ast.unparse(node.args[0]))
        elif node.func.attr in {"update", "setdefault", "clear"}:
            changed.add(text)
    return changed - restored


def test_doc_5_no_cell_leaves_the_environment_changed():
    found = [f"{nb.name}: cell {cell.index}: {sorted(names)}" for nb in MODULES for cell in nb.cells if cell.is_example and (names := changed_variables(cell))]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("nb", MODULES, ids=lambda nb: nb.module)
def test_doc_5_the_environment_is_equal_before_and_after_a_notebook(nb):
    script = (
        "import os, pathlib, nbdev.test\n"
        "before = dict(os.environ)\n"
        f"passed, seconds = nbdev.test.test_nb(pathlib.Path({str(nb.path)!r}), skip_flags={sorted(SKIP_FLAGS)!r}, basepath={str(ROOT)!r})\n"
        "assert passed\n"
        f"added = {{name: value for name, value in os.environ.items() if before.get(name) != value and name not in {sorted(SET_BY_TOOLS)!r}}}\n"
        "assert not added and before.keys() <= os.environ.keys(), added"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{nb.name}: {result.stderr[-2000:]}"


def test_importing_every_module_leaves_the_environment_alone():
    "A module that sets a variable at import changes every other one; run apart, so that order plays no part."
    names = [f"{PACKAGE}.{nb.module}" for nb in MODULES]
    script = f"import os, importlib, torch, tensorboard\nbefore = dict(os.environ)\nfor name in {names!r}: importlib.import_module(name)\nassert before == dict(os.environ)\n"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
