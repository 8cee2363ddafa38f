"The table of claims follows its measurements, and leaves none out."
import json
import math
import shutil
from pathlib import Path

import pytest

from llm_from_scratch.claims import Claim, Trial, all_claims, claims_table, compare_seeds
from llm_from_scratch.env import UserError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VERDICTS = {"holds", "holds under conditions", "does not hold", "cannot be tested here"}
NAMED = ["Arrow 3.2", "Prefetching 14 %", "ALiBi RoPE", "Kaiming Xavier", "Clipping group", "warmup", "bf16 fp16", "bf16 precise", "Breathing cosine", "server 8 % 37 %", "experts 68 %",
         "Quality quantity", "padding masks", "mask kernel 3.6", "Compiling", "empty_cache", "SwiGLU 11,008 11,000", "checkpointing perplexity"]


@pytest.fixture
def results(tmp_path):
    "A copy that a test may change."
    return Path(shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("wikitext_cards")))


def test_every_claim_has_one_row_and_one_of_four_verdicts():
    claims = all_claims(RESULTS)
    for words in NAMED:
        assert sum(all(word in claim.text for word in words.split()) for claim in claims) == 1, words
    assert {claim.verdict for claim in claims} <= VERDICTS and len(claims) == len(NAMED)
    rows = claims_table(claims).splitlines()[2:]
    assert all(row.count(" | ") == 4 and row.endswith(f"**{claim.verdict}** |") for row, claim in zip(rows, claims, strict=True))


def test_claims_about_training_tell_their_seeds():
    trained = [claim for claim in all_claims(RESULTS) if claim.source in {"claims", "warmup", "does_cleaning_pay", "parameter_server"} and claim.runs != "exact"]
    assert len(trained) == 10 and all(" seed" in claim.runs for claim in trained)


def test_a_figure_and_its_verdict_change_with_the_measurements(results):
    path = results / "loader_speed.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["tokens_per_second"]["plain memmap"] = 2 * row["tokens_per_second"]["datasets"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    claim = next(claim for claim in all_claims(results) if "Arrow" in claim.text)
    assert claim.verdict == "does not hold" and {trial.figure[:9] for trial in claim.trials} == {"2.0 times"}


def test_missing_measurements_name_the_script_that_makes_them(results):
    (results / "claims_timing.jsonl").unlink()
    with pytest.raises(UserError, match=r"run benchmarks/claims_timing\.py"):
        all_claims(results)


def test_a_seed_that_one_side_lacks_is_an_error():
    with pytest.raises(UserError, match="two to ten in common"):
        compare_seeds({0: 1.0, 1: 2.0}, {0: 1.0, 2: 2.0})
    with pytest.raises(UserError):
        compare_seeds({}, {})


def test_students_interval_is_the_textbooks():
    found = compare_seeds({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert found.mean == 2.0 and found.error == pytest.approx(4.303 / math.sqrt(3)) and not found.is_higher


def test_what_was_not_tried_is_neither_yes_nor_no():
    claim = Claim("x", "00_env", "y", "1 run", (Trial("a", "b", False), Trial("c", "d", None)))
    assert claim.verdict == "cannot be tested here" and "*untried*, c: d" in claims_table([claim])
