"""Read the notebooks as plain JSON: what every check of tests/repo builds on.

No nbdev here, so that a fault in a notebook is reported by a check and not by the tool that trips over it.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "llm_from_scratch"
EXPORT_FLAGS = {"export", "exports", "exporti"}
SKIP_FLAGS = {"slow", "cuda", "data", "distributed"}
CLOSING = "## What can go wrong"
EXPECTATIONS = {"expect_fail", "ExceptionExpected"}


@lru_cache(maxsize=256)  # more than a notebook has cells
def parse(code: str) -> ast.Module:
    "Read by many checks, changed by none."
    return ast.parse(code)


@lru_cache(maxsize=256)
def nodes_of(code: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parse(code)))


@dataclass
class Cell:
    index: int
    kind: str
    source: str
    outputs: list = field(default_factory=list)

    @property
    def flags(self) -> set[str]:
        lines = [line for line in self.source.splitlines() if line.startswith("#|")]
        return {line[2:].split()[0].rstrip(":") for line in lines if line[2:].split()}

    @property
    def is_code(self) -> bool:
        return self.kind == "code"

    @property
    def is_exported(self) -> bool:
        return self.is_code and bool(self.flags & EXPORT_FLAGS)

    @property
    def is_example(self) -> bool:
        return self.is_code and not self.flags & (EXPORT_FLAGS | {"default_exp"})

    @property
    def is_skipped(self) -> bool:
        return bool(self.flags & SKIP_FLAGS) or bool(re.search(r"^#\|\s*eval:\s*false", self.source, re.M))

    @property
    def code(self) -> str:
        "The source with directives blanked, so that line numbers stay."
        return "\n".join("" if line.startswith("#|") else line for line in self.source.splitlines())

    @property
    def lines(self) -> list[str]:
        return [line for line in self.code.splitlines() if line.strip()]

    def tree(self) -> ast.Module:
        return parse(self.code)

    def nodes(self) -> tuple[ast.AST, ...]:
        return nodes_of(self.code)


@dataclass
class Notebook:
    path: Path
    cells: list[Cell]
    metadata: dict

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def module(self) -> str | None:
        for cell in self.cells:
            if cell.is_code and (found := re.search(r"^#\|\s*default_exp\s+(\S+)", cell.source, re.M)):
                return found.group(1)
        return None

    @property
    def exported(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.is_exported]

    @property
    def opening(self) -> Cell | None:
        "The first Markdown after the title, if it has no heading and says what the reader will be able to do."
        second = [cell for cell in self.cells if cell.kind == "markdown"][1:2]
        says = second and not second[0].source.startswith("#") and re.search(r"\bable\s+to\b", second[0].source)
        return second[0] if says else None

    @property
    def closing(self) -> Cell | None:
        "The last Markdown, if it is the section on what can go wrong."
        last = [cell for cell in self.cells if cell.kind == "markdown"][-1:]
        return last[0] if last and last[0].source.startswith(f"{CLOSING}\n") else None


def read_notebook(path: Path) -> Notebook:
    raw = json.loads(Path(path).read_text(encoding="utf-8"))
    cells = []
    for index, cell in enumerate(raw["cells"]):
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        cells.append(Cell(index, cell["cell_type"], source, cell.get("outputs", [])))
    return Notebook(Path(path), cells, raw.get("metadata", {}))


def notebook_paths(root: Path = ROOT) -> list[Path]:
    "All notebooks in the order of the modules: the numbers sort, and `00_` comes before `00a_`."
    return sorted(path for path in (Path(root) / "nbs").glob("*.ipynb") if not path.name.startswith("_"))


def modules_in_order(root: Path = ROOT) -> list[Notebook]:
    return [nb for nb in map(read_notebook, notebook_paths(root)) if nb.module]


def called_name(node: ast.AST) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""


def is_assertion(node: ast.AST) -> bool:
    "A context manager asserts as an item of a `with` only: called by itself, it never enters."
    if isinstance(node, ast.withitem):
        return called_name(node.context_expr) in EXPECTATIONS
    name = called_name(node)
    return isinstance(node, ast.Assert) or name.startswith(("test_", "assert_")) or name == "raises"


def idle_expectations(cell: Cell) -> list[str]:
    "Calls of a context manager that stand outside a `with`, and so check nothing."
    nodes = cell.nodes()
    entered = {id(node.context_expr) for node in nodes if isinstance(node, ast.withitem)}
    return [called_name(node) for node in nodes if called_name(node) in EXPECTATIONS and id(node) not in entered]


def count_assertions(cell: Cell) -> int:
    return sum(is_assertion(node) for node in cell.nodes())


def definitions(cell: Cell) -> list[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in cell.tree().body if isinstance(node, kinds)]


def public_definitions(cell: Cell) -> list[ast.AST]:
    return [node for node in definitions(cell) if not node.name.startswith("_")]


def imported_modules(tree: ast.Module, *, deep: bool = True) -> set[str]:
    "Every module that the code imports, inside functions too unless not deep; a relative one keeps its dots."
    found = set()
    for node in ast.walk(tree) if deep else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {f"{PACKAGE}.{alias.name}" for alias in node.names} if base == PACKAGE else {base}
    return found
