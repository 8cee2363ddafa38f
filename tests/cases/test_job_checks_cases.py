"Jobs that would be spoilt, each by one thing, and the check that says so before they start."

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llm_from_scratch import job_checks
from llm_from_scratch.artifacts import read_manifest, write_manifest
from llm_from_scratch.config import build_config, replace, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.job_checks import check_job, main
from llm_from_scratch.token_shards import EncodedDocument, map_folder, write_shards
from llm_from_scratch.tokenizer import Tokenizer

ENVIRONMENT = tuple(job_checks.CURES)
LEFT_OUT = ("kill and resume", *ENVIRONMENT)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "Thirty pages of tables as files, and a tokenizer of them."
    folder = tmp_path_factory.mktemp("job")
    (folder / "pages").mkdir()
    pages = {f"page-{number}.txt": "".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)) for number in range(30)}
    for name, text in pages.items():
        (folder / "pages" / name).write_text(text)
    Tokenizer.train(pages.values(), vocab_size=300, out=folder / "tokenizer")
    return folder


def job(home: Path, pages: str = "pages"):
    return build_config(
        {
            "model": dict(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2),
            "tokenizer": dict(vocab_size=300),
            "train": dict(seq_len=64, global_batch=4, micro_batch=2, dtype="fp32", steps=20, num_threads=1),
            "optim": dict(kind="adamw", lr=0.01),
            "data": dict(path=[str(home / pages)], cache_dir=str(home / "cache"), val_fraction=0.2),
            "eval": dict(num_samples=0, num_completions=0),
            "log": dict(tensorboard=False),
        }
    )


def encoded(home: Path, name: str, change) -> str:
    "A folder of encoded splits in which something was done to the documents' ids."
    tokenizer = Tokenizer.load(home / "tokenizer")
    texts = [path.read_text() for path in sorted((home / "pages").glob("*.txt"))]
    rows = [tokenizer.encode(text, bos=True, eos=True) for text in texts]
    for split, part in {"train": rows[:24], "val": rows[24:]}.items():
        documents = [EncodedDocument(ids, str(number), num_bytes=100) for number, ids in enumerate(change(split, part, rows))]
        write_shards(documents, home / name / split, vocab_size=tokenizer.vocab_size, tokenizer_fingerprint=tokenizer.fingerprint, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
    tokenizer.save(home / name / "tokenizer")
    write_manifest(home / name, kind="tokens", inputs={"tokenizer": tokenizer.fingerprint})
    return name


def failed(config, home: Path) -> dict[str, str]:
    checks = check_job(config, home / "run", leave_out=LEFT_OUT)
    return {check.name: check.evidence for check in checks if check.verdict == "fail"}


def test_a_good_job_passes(home):
    checks = check_job(job(home), home / "run", leave_out=LEFT_OUT)
    assert {check.verdict for check in checks} <= {"pass", "warn"}, checks
    assert {"ids (train)", "document ends (val)", "tokenizer", "label shift", "gradient flow", "causality", "document masks", "one batch overfitted", "memory fit"} <= {check.name for check in checks}
    assert not (home / "run").exists()


def test_documents_without_eos_are_named(home):
    name = encoded(home, "endless", lambda split, part, rows: [ids[:-1] if split == "train" else ids for ids in part])
    found = failed(job(home, name), home)
    assert list(found) == ["document ends (train)"] and "24 of 24 documents without EOS; the first is document 0 of shard 00000" in found["document ends (train)"]


def test_validation_text_under_another_name_is_found(home):
    name = encoded(home, "leaky", lambda split, part, rows: part + rows[24:26] if split == "train" else part)
    found = failed(job(home, name), home)
    assert list(found) == ["validation in training"] and "2 of 6 validation documents" in found["validation in training"]


def test_an_id_behind_a_manifest_that_lies_is_found(home):
    name = encoded(home, "foreign", lambda split, part, rows: part)
    folder = home / name / "train"
    ids = np.memmap(folder / "00000.bin", dtype="<u2", mode="r+")
    ids[500] = 999
    ids.flush()
    found = failed(job(home, name), home)
    assert list(found) == ["data"] and "00000.bin" in found["data"], "training itself refuses a file with another hash"
    check = job_checks.check_ids(map_folder(folder, read_manifest(folder)), 300)
    assert check.verdict == "fail" and "id 999 in shard 00000" in check.evidence


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("gradient flow", lambda model: model.blocks[0].mlp.up.weight.requires_grad_(False), "blocks.0.mlp.up.weight is frozen"),
        ("causality", lambda model: setattr(model.blocks[0].attention, "attend", lambda q, k, v, **_: torch.nn.functional.scaled_dot_product_attention(q, k, v)), "move earlier logits"),
        (
            "document masks",
            lambda model: setattr(model.blocks[0].attention, "attend", lambda q, k, v, **_: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
            "move the next document's logits",
        ),
        ("one batch overfitted", lambda model: [block.mlp.register_forward_hook(lambda module, given, out: out * 0) for block in model.blocks] and model.head.register_forward_hook(lambda module, given, out: out * 0.01), "bound"),
    ],
)
def test_a_broken_model_is_named(home, monkeypatch, name, damage, words):
    from llm_from_scratch import training_loop

    real = training_loop.build_training

    def build(*arguments, **options):
        training = real(*arguments, **options)
        damage(training.model)
        return training

    monkeypatch.setattr(training_loop, "build_training", build)
    found = failed(job(home), home)
    assert name in found and words in found[name]


def test_the_command_names_what_failed_and_prints_json(home, capsys):
    file = home / "job.yaml"
    file.write_text(to_yaml(job(home)))
    with pytest.raises(UserError, match="2 of .* checks failed: plan, one batch overfitted"):
        main(["--config", str(file), "--json", "--ranks", "3", "--optim.lr", "1e-9", "--leave-out", *LEFT_OUT])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert "x 3 ranks" in checks["plan"]["evidence"] and checks["plan"]["cure"]


def test_texts_that_see_one_another_by_choice_are_a_warning(home):
    checks = check_job(replace(job(home), data={"document_mask": False}), home / "run", leave_out=LEFT_OUT)
    assert [check.name for check in checks if check.verdict == "warn"] == ["document masks"]


@pytest.mark.slow
def test_a_job_is_killed_and_resumed_by_the_command(home):
    file = home / "whole.yaml"
    file.write_text(to_yaml(job(home)))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "llm_from_scratch.job_checks", "--config", str(file), "--run-dir", str(home / "new"), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["kill and resume"]["verdict"] == "pass" and "equal to the bit" in checks["kill and resume"]["evidence"], done.stdout
    hard = [name for name, check in checks.items() if check["verdict"] == "fail"]
    assert set(hard) <= set(ENVIRONMENT) and done.returncode == (2 if hard else 0), done.stderr
