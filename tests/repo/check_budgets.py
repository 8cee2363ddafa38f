"""The budgets and habits of a notebook; every miss of every notebook is reported at once.

    python tests/repo/check_budgets.py nbs/03_model.ipynb ...      (no argument: all of them)
"""

import ast
import base64
import io
import re
import sys
import tokenize
from itertools import takewhile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import (
    Cell,
    Notebook,
    count_assertions,
    definitions,
    idle_expectations,
    notebook_paths,
    public_definitions,
    read_notebook,
)

MAX_CELLS = 90
MAX_NOTEBOOK_BYTES = 200_000
MAX_PLOT_BYTES = 60_000
MAX_CELL_LINES = 45
MAX_MEDIAN_CELL_LINES = 12
MAX_FUNCTION_LINES = 45
MAX_TRITON_LINES = 120
MIN_LESSON_SHARE = 0.90
MIN_ASSERTIONS = 2
PROSE_WORDS_PER_LINE = (2, 4)
MARKDOWN_WORDS = (20, 60)
MAX_CLOSING_WORDS = 110
ALT_CHARACTERS = (20, 160)
VAGUE_NAMES = re.compile(r"Manager|Utils?\b|Helper|utils?$|helper", re.ASCII)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def size_misses(nb: Notebook) -> list[str]:
    misses = []
    if len(nb.cells) > MAX_CELLS:
        misses.append(f"{len(nb.cells)} cells, at most {MAX_CELLS}")
    size = nb.path.stat().st_size
    if size > MAX_NOTEBOOK_BYTES:
        misses.append(f"{size:,} bytes with outputs, at most {MAX_NOTEBOOK_BYTES:,}")
    for cell in nb.cells:
        for output in cell.outputs:
            image = output.get("data", {}).get("image/png", "")
            num_bytes = len(base64.b64decode("".join(image)))
            if num_bytes > MAX_PLOT_BYTES:
                misses.append(f"cell {cell.index}: plot of {num_bytes:,} bytes, at most {MAX_PLOT_BYTES:,}")
    return misses


def picture_misses(nb: Notebook) -> list[str]:
    "Whoever does not see a picture reads what it shows: one line among the directives that begin its cell."
    misses, (low, high) = [], ALT_CHARACTERS
    for cell in nb.cells:
        if not any(kind.startswith("image/") for output in cell.outputs for kind in output.get("data", {})):
            continue
        directives = "\n".join(takewhile(lambda line: line.startswith("#|"), cell.source.splitlines()))
        found = re.findall(r'^#\|\s*fig-alt:\s*"([^"]*)"\s*$', directives, re.M)
        if len(found) != 1:
            misses.append(f'cell {cell.index}: a picture without `#| fig-alt: "what it shows"` on one line above the code')
        elif not low <= len(found[0]) <= high:
            misses.append(f"cell {cell.index}: alternative text of {len(found[0])} characters, {low} to {high}")
    return misses


def opening_misses(nb: Notebook) -> list[str]:
    "Cell 0 is `#| default_exp` alone, named like the file; then an H1 with a one-line subtitle."
    misses = []
    expected = re.sub(r"^\d+[a-z]*_", "", nb.path.stem)
    if nb.module != expected:
        misses.append(f"default_exp is {nb.module}, the file's name says {expected}")
    if nb.cells[0].lines or "default_exp" not in nb.cells[0].flags:
        misses.append("cell 0 is not `#| default_exp` alone")
    if not re.match(r"# \S.*\n+> \S.*$", nb.cells[1].source.strip()):
        misses.append("cell 1 is not an H1 with a one-line `>` subtitle and nothing more")
    return misses


def import_misses(cell: Cell) -> list[str]:
    imports = (ast.Import, ast.ImportFrom)
    tree = cell.tree()
    inside = any(isinstance(node, imports) for node in (tree.body if cell.is_exported else cell.nodes()))
    if inside and not all(isinstance(node, imports) for node in tree.body):
        return [f"cell {cell.index}: an import and something else in one cell (the docs build would run it)"]
    return []


def code_misses(nb: Notebook) -> list[str]:
    misses = []
    for cell in (cell for cell in nb.cells if cell.is_code):
        misses += import_misses(cell)
        if cell.is_exported and len(cell.lines) > MAX_CELL_LINES:
            misses.append(f"cell {cell.index}: exported, {len(cell.lines)} lines, at most {MAX_CELL_LINES}")
        for node in cell.nodes():
            if not isinstance(node, FUNCTIONS):
                continue
            is_triton = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            limit = MAX_TRITON_LINES if is_triton else MAX_FUNCTION_LINES
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > limit:
                misses.append(f"cell {cell.index}: {node.name}() has {num_lines} lines, at most {limit}")
    middle = median([len(cell.lines) for cell in nb.exported] or [0])
    if middle > MAX_MEDIAN_CELL_LINES:
        misses.append(f"median exported cell has {middle:g} lines, at most {MAX_MEDIAN_CELL_LINES}")
    return misses


def comment_lines(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.line for token in tokens if token.type == tokenize.COMMENT}


def parameters(node: ast.AST) -> list[tuple[str, int]]:
    "Names of the parameters, each with the line on which it ends, its default included."
    given = node.args
    positional = given.posonlyargs + given.args
    padding = [None] * (len(positional) - len(given.defaults))
    pairs = list(zip(positional, padding + given.defaults)) + list(zip(given.kwonlyargs, given.kw_defaults))
    pairs += [(extra, None) for extra in (given.vararg, given.kwarg) if extra]
    return [(arg.arg, (default or arg).end_lineno) for arg, default in pairs if arg.arg not in {"self", "cls"}]


def undocumented(node: ast.AST, comments: dict[int, str]) -> list[str]:
    "Parameters that share a line with another one, or have no comment beside them."
    found = parameters(node)
    lines = [line for _, line in found]
    return [name for name, line in found if lines.count(line) > 1 or line not in comments]


def naming_misses(nb: Notebook) -> list[str]:
    misses = []
    for cell in nb.exported:
        comments = comment_lines(cell.code)
        for node in definitions(cell):
            if VAGUE_NAMES.search(node.name):
                misses.append(f"cell {cell.index}: {node.name}: no Manager, Utils or Helper")
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                misses.append(f"cell {cell.index}: {node.name} has no docstring")
            if isinstance(node, FUNCTIONS) and (bare := undocumented(node, comments)):
                misses.append(f"cell {cell.index}: {node.name}(): no comment of its own beside {', '.join(bare)}")
    return misses


def lesson_span(nb: Notebook, cell: Cell) -> list[Cell]:
    "The example cells between an exported cell and the next exported one."
    span = []
    for following in nb.cells[cell.index + 1 :]:
        if following.is_exported:
            break
        if following.is_code:
            span.append(following)
    return span


def is_taught(name: str, span: list[Cell]) -> bool:
    "The span uses the name, asserts something, and shows a value or a picture."
    uses = any(re.search(rf"\b{name}\b", cell.source) for cell in span)
    shows = any(cell.outputs or cell.is_skipped for cell in span)
    return bool(span) and uses and any(count_assertions(cell) for cell in span) and shows


def lesson_misses(nb: Notebook) -> list[str]:
    public = [(node.name, cell) for cell in nb.exported for node in public_definitions(cell)]
    untaught = [(name, cell.index) for name, cell in public if not is_taught(name, lesson_span(nb, cell))]
    misses = []
    if public and 1 - len(untaught) / len(public) < MIN_LESSON_SHARE:
        names = ", ".join(f"{name} (cell {index})" for name, index in untaught)
        misses.append(
            f"{len(public) - len(untaught)} of {len(public)} public definitions have a lesson (used, asserted and with "
            f"an output) before the next exported cell, at least {MIN_LESSON_SHARE:.0%}; without: {names}"
        )
    num_assertions = sum(count_assertions(cell) for cell in nb.cells if cell.is_example)
    if num_assertions < MIN_ASSERTIONS * len(public):
        misses.append(f"{num_assertions} assertions for {len(public)} public definitions, at least {MIN_ASSERTIONS} each")
    return misses


def prose_words(source: str) -> int:
    "Words outside headings, quotes, code fences, tables and displayed formulas."
    source = re.sub(r"```.*?```|\$\$.*?\$\$|<!--.*?-->", " ", source, flags=re.S)
    kept = [line for line in source.splitlines() if not re.match(r"\s*(#|>|\||:::)", line)]
    return len(re.findall(r"\S*\w\S*", " ".join(kept)))


def prose_misses(nb: Notebook) -> list[str]:
    "The closing section is a list, and may be longer than other prose."
    misses = []
    for cell in (cell for cell in nb.cells[2:] if cell.kind == "markdown"):
        low, high = MARKDOWN_WORDS if cell is not nb.closing else (MARKDOWN_WORDS[0], MAX_CLOSING_WORDS)
        num_words = prose_words(cell.source)
        has_more = re.search(r"```|\$\$|^\s*\||^\s*>", cell.source, re.M)
        if num_words > high or (0 < num_words < low and not has_more):
            misses.append(f"cell {cell.index}: Markdown of {num_words} words, {low} to {high}")
    num_words = sum(prose_words(cell.source) for cell in nb.cells if cell.kind == "markdown")
    num_lines = sum(len(cell.lines) for cell in nb.cells if cell.is_code)
    share = num_words / max(num_lines, 1)
    if not PROSE_WORDS_PER_LINE[0] <= share <= PROSE_WORDS_PER_LINE[1]:
        misses.append(f"{share:.2f} words of prose a line of code ({num_words} / {num_lines}), 2 to 4")
    return misses


def example_misses(nb: Notebook) -> list[str]:
    misses = []
    for cell in (cell for cell in nb.cells if cell.is_code):
        for name in idle_expectations(cell):
            misses.append(f"cell {cell.index}: a bare {name}(...) checks nothing: write `with {name}(UserError, \"text\"):` and the call under it")
        if cell.is_example:
            narrating = [line for line in comment_lines(cell.code).values() if line.strip().startswith("#")]
            misses += [f"cell {cell.index}: narrates: {line.strip()[:60]}" for line in narrating]
        for output in cell.outputs:
            text = "".join(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
            if output["output_type"] == "error":
                misses.append(f"cell {cell.index}: its output is an error: {output.get('ename')}")
            if found := re.search(r"/tmp/\w+|/home/\w+|/root/\w+", text):
                misses.append(f"cell {cell.index}: its output shows a path of one machine: {found.group()}")
    return misses


def command_misses(nb: Notebook) -> list[str]:
    "A module that is also a command ends in the guarded cell, which no notebook run executes."
    misses = []
    for cell in nb.exported:
        if "__main__" not in cell.source:
            continue
        if not cell.is_skipped or '"__file__" in globals()' not in cell.source:
            misses.append(f"cell {cell.index}: wants `#| eval: false` and `\"__file__\" in globals()`")
        if cell is not nb.exported[-1]:
            misses.append(f"cell {cell.index}: the command's cell is not the last exported one")
    return misses


CHECKS = [opening_misses, size_misses, picture_misses, code_misses, naming_misses, lesson_misses, prose_misses, example_misses, command_misses]


def budget_misses(path: Path) -> list[str]:
    nb = read_notebook(path)
    if nb.module is None:
        return size_misses(nb) + picture_misses(nb) + example_misses(nb)
    misses = []
    for cell in (cell for cell in nb.cells if cell.is_code):
        try:
            cell.tree()
        except SyntaxError as error:
            misses.append(f"cell {cell.index}: not plain Python: {error.msg}")
    return misses or [miss for check in CHECKS for miss in check(nb)]


def summary(path: Path) -> str:
    nb = read_notebook(path)
    public = sum(len(public_definitions(cell)) for cell in nb.exported)
    asserted = sum(count_assertions(cell) for cell in nb.cells if cell.is_example)
    return f"{nb.name}: {len(nb.cells)} cells, {path.stat().st_size / 1000:.0f} kB, {public} public definitions, {asserted} assertions"


def main(arguments: list[str]) -> int:
    num_misses = 0
    for path in [Path(argument) for argument in arguments if argument.endswith(".ipynb")] or notebook_paths():
        misses = budget_misses(path)
        num_misses += len(misses)
        print("\n".join([path.name if misses else summary(path)] + [f"  {miss}" for miss in misses]))
    return 1 if num_misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
