"The project speaks of itself alone: no path of the machine that it was written on."

import re
import subprocess

from notebooks import ROOT

FORBIDDEN = [r"/wo" + r"rk/(?!flows)\w", r"/tmp/l" + r"fs\b", r"(?<![\w.])/ro" + r"ot/\w", r"/Us" + r"ers/\w", r"/ho" + r"me/(?!user\b|you\b)\w"]


def tracked_files() -> list[str]:
    "The files of the checkout that git knows; all but the generated ones where there is no git."
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 0 and result.stdout:
        return result.stdout.strip("\0").split("\0")
    skip = {"_docs", "_proc", "__pycache__", ".git"}
    return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file() and not skip & set(path.parts)]


def test_no_path_of_the_machine():
    found = []
    for name in tracked_files():
        path = ROOT / name
        if not path.is_file() or path.suffix in {".png", ".ico", ".woff2", ".gz", ".parquet"}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {match.group()}" for pattern in FORBIDDEN for match in re.finditer(pattern, text)]
    assert not found, "\n".join(found[:50])
