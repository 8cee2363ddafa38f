"""The two halves of scripts/docs.sh round the renderer.

    process OUT    run nbdev's processors over each notebook of nbs/ and write the result to OUT
    finish SITE    serve fonts and formulas from the site itself, and count the pages against the notebooks
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import unquote

SOURCE = Path("nbs")
FORKS = get_context("forkserver")  # Linux and macOS; what is loaded once is in every process that it forks
PRELOADED = ["torch", "matplotlib.pyplot", "nbdev.processors", "nbdev.serve_drv"]
KATEX = "katex@0.16.11"
KATEX_URL = f"https://cdn.jsdelivr.net/npm/{KATEX}/dist"
FONTS = re.compile(r"@import url\([^)]*fonts\.googleapis\.com[^)]*\);?|<link[^>]*fonts\.g[^>]*>")
NUMBERED = re.compile(r"\b\d+[a-z]*_(\w+)\.ipynb")


def notebooks() -> list[Path]:
    return sorted(path for path in SOURCE.glob("*.ipynb") if not path.name.startswith("_"))


def without_number(text: str) -> str:
    "03_model.ipynb -> model.ipynb, in a name or in links: the pages' names that nbdev's own links expect."
    return NUMBERED.sub(r"\1.ipynb", text)


def process_notebook(source: Path, page: Path, faults: Connection) -> None:
    "Run nbdev's processors over one notebook, in a process of its own: they leave their marks on it."
    from nbdev.processors import FilterDefaults
    from nbdev.serve_drv import exec_nb

    os.environ |= {"IN_TEST": "1", "MPLBACKEND": "agg"}
    sys.path.insert(0, str(Path.cwd()))
    try:
        exec_nb(source, page, FilterDefaults)
    except Exception as error:
        reason = f"{error} {error.__cause__ or ''}"
        return faults.send(f"{source}: {' '.join(reason.split())[:500]}")
    raw = json.loads(page.read_text(encoding="utf-8"))
    raw["cells"] = headings_for_shown_source(raw["cells"])
    text = re.sub(r"output-file: [\w.]+\\n", "", json.dumps(raw, ensure_ascii=False))
    page.write_text(without_number(text), encoding="utf-8")
    faults.send("")


def start_notebook(source: Path, page: Path) -> str:
    "What went wrong with a notebook, or an empty string; a crash has its name too."
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=process_notebook, args=(source, page, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return f"{source}: its process ended without a word"
    finally:
        process.join()


def headings_for_shown_source(cells: list[dict]) -> list[dict]:
    "Where the source of a definition is shown, show_doc would repeat its signature: put a heading there instead."
    sources = ["".join(cell["source"]) for cell in cells]
    names = [defined_names(source) for source in sources]
    shown = {name for found in names for name in found}
    kept = []
    for number, (cell, source) in enumerate(zip(cells, sources)):
        if cell["cell_type"] == "code" and (found := re.search(r"^show_doc\((\w+)\)", source, re.M)):
            if found.group(1) in shown:
                continue
            for output in cell["outputs"]:
                output["data"]["text/markdown"] = "".join(output["data"]["text/markdown"]).replace("```python\n\n", "```python\n")
        kept += [markdown_cell(f"### {name} {{#{name.lower()}}}", f"{number}-{name}") for name in names[number]]
        cell["source"] = re.sub(r"^#\| code-(fold|summary):.*\n", "", source, flags=re.M)
        kept.append(cell)
    return kept


def defined_names(source: str) -> list[str]:
    "Public definitions of a cell whose source nbdev shows: it marks the cell as one that could be folded."
    is_shown = source.startswith("#| code-fold: show")
    return re.findall(r"^(?:async )?(?:def|class) ([A-Za-z]\w*)", source, re.M) if is_shown else []


def markdown_cell(source: str, name: str) -> dict:
    return {"cell_type": "markdown", "id": re.sub(r"\W", "-", name)[:60], "metadata": {}, "source": source}


def process(out: Path) -> list[str]:
    out.mkdir()
    for path in SOURCE.iterdir():
        if path.is_file() and path.suffix not in {".ipynb", ".py"}:
            (out / path.name).write_bytes(path.read_bytes())
    config = out / "_quarto.yml"
    config.write_text(without_number(config.read_text(encoding="utf-8")), encoding="utf-8")
    pages = [out / without_number(path.name) for path in notebooks()]
    FORKS.set_forkserver_preload(PRELOADED)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [fault for fault in pool.map(start_notebook, notebooks(), pages) if fault]


def local_katex(site: Path) -> bool:
    "Put KaTeX beside the pages; False where npm is missing or cannot fetch it."
    if not shutil.which("npm"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        fetched = subprocess.run(["npm", "pack", KATEX, "--silent"], cwd=folder, capture_output=True, timeout=60)
        archives = list(Path(folder).glob("*.tgz"))
        if fetched.returncode or not archives:
            return False
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # not before 3.11.4
        dist = Path(folder) / "package" / "dist"
        unused = shutil.ignore_patterns("*.mjs", "*.ttf", "*.woff", "README*", "katex.css", "katex.js", "katex-swap*")
        shutil.copytree(dist, site / "site_libs" / "katex", ignore=unused)
    return True


def finish(site: Path) -> list[str]:
    settings = ConfigParser(delimiters=["="])
    settings.read("settings.ini", encoding="utf-8")
    own_url = re.escape(settings["DEFAULT"]["doc_host"] + settings["DEFAULT"]["doc_baseurl"])
    own_links = re.compile(rf'(<a [^>]*href="){own_url}/')
    pages = list(site.rglob("*.html"))
    has_formulas = any(KATEX_URL in page.read_text(encoding="utf-8") for page in pages)
    is_local = has_formulas and local_katex(site)
    if has_formulas and not is_local:
        print("docs: formulas are drawn with KaTeX from its CDN, since npm could not fetch it")
    for path in pages + list(site.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        offset = "../" * (len(path.relative_to(site).parts) - 1)
        changed = own_links.sub(rf"\g<1>{offset}", FONTS.sub("", text))
        if is_local:
            changed = changed.replace(KATEX_URL, f"{offset}site_libs/katex")
        if changed != text:
            path.write_text(changed, encoding="utf-8")
    return missing_pages(site) + broken_links(site) + foreign_requests(site)


def foreign_requests(site: Path) -> list[str]:
    "What a browser would fetch from another host when it shows a page; links that a reader may follow are none, nor is KaTeX where npm was missing."
    host, faults = r"((?:https?:)?//[^\"'\s)>]+)", []
    tags = [rf"<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=[\"']{host}", rf"<link\b(?=[^>]*rel=[\"'](?:stylesheet|preload|icon|modulepreload))[^>]*\shref=[\"']{host}"]
    styles = [rf"url\([\"']?{host}", rf"@import\s+[\"']{host}"]
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        text = path.read_text(encoding="utf-8")
        found = {url for pattern in (tags + styles if path.suffix == ".html" else styles) for url in re.findall(pattern, text) if not url.startswith(KATEX_URL)}
        faults += [f"{path}: a request to another host, {url}" for url in sorted(found)]
    return faults


def broken_links(site: Path) -> list[str]:
    "Links of a page to a file of the site that is not there."
    pages_of = defaultdict(list)
    for page in sorted(site.rglob("*.html")):
        for href in sorted(set(re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")))):
            if not re.match(r"[a-z]+:|//", href) and not (page.parent / unquote(href)).exists():
                pages_of[href].append(page)
    more = {1: ""}
    return [f"{pages[0]}: broken link {href}{more.get(len(pages), f', and on {len(pages) - 1} more pages')}" for href, pages in pages_of.items()]


def missing_pages(site: Path) -> list[str]:
    "Notebooks without a page that has a title, or a count that does not agree."
    faults = []
    for path in notebooks():
        page = site / Path(without_number(path.name)).with_suffix(".html")
        if not page.exists():
            faults.append(f"{path}: no page {page}")
        elif "<h1" not in page.read_text(encoding="utf-8"):
            faults.append(f"{path}: {page} has no title")
    num_pages = len([page for page in site.glob("*.html") if page.stem != "404"])
    if not faults and num_pages != len(notebooks()):
        faults.append(f"{SOURCE}: {len(notebooks())} notebooks, but {num_pages} pages in {site}")
    print(f"docs: {num_pages} pages for {len(notebooks())} notebooks in {site}/")
    return faults


def main(step: str, folder: str) -> int:
    faults = {"process": process, "finish": finish}[step](Path(folder))
    for fault in faults:
        print(f"docs: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
