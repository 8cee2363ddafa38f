"""README.md is nbs/index.ipynb in Markdown; no Quarto needed.

    python scripts/readme.py            write README.md
    python scripts/readme.py --check    exit 1, with the difference, unless README.md is what would be written
"""

import difflib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTICE = "<!-- Written by scripts/readme.py from nbs/index.ipynb: edit that one. -->"


def render(notebook: Path) -> str:
    "Markdown cells as they are, code in fences, printed output in fences of its own; cells without echo stay out; links get the folder's name."
    parts = [NOTICE]
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\((?!\w+:|/|#|\.\.)([^)]+)\)", r"](nbs/\1)", source).replace("](../", "]("))
        elif cell["cell_type"] == "code" and source and not source.startswith("#| echo: false"):
            parts.append(f"```python\n{source}\n```")
            parts += [f"```text\n{text}\n```" for text in map(output_text, cell["outputs"]) if text]
    return "\n\n".join(part for part in parts if part) + "\n"


def output_text(output: dict) -> str:
    if any(kind.startswith("image/") for kind in output.get("data", {})):
        raise SystemExit("index.ipynb: README.md cannot hold the picture of an output; link an image file")
    return "".join(output.get("text", output.get("data", {}).get("text/plain", ""))).strip()


def main(arguments: list[str]) -> int:
    readme, wanted = ROOT / "README.md", render(ROOT / "nbs" / "index.ipynb")
    if arguments != ["--check"]:
        readme.write_text(wanted, encoding="utf-8")
        return 0
    lines = difflib.unified_diff(readme.read_text(encoding="utf-8").splitlines(), wanted.splitlines(), "README.md", "nbs/index.ipynb", lineterm="")
    difference = "\n".join(lines)
    if difference:
        print(f"{difference}\nREADME.md is not nbs/index.ipynb: run python scripts/readme.py", file=sys.stderr)
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
