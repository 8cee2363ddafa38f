"Offsets, skipped blocks, what the package imports, and what it says where it cannot run."

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from llm_from_scratch import kernels
from llm_from_scratch.kernels.blocks import block_ranges, query_documents
from llm_from_scratch.kernels.common import offset

ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def one_offset(out_ptr, index, stride):
    tl.store(out_ptr, offset(index, stride))


def test_ker_6_offsets_do_not_wrap(device):
    out = torch.zeros(1, dtype=torch.int64, device=device)
    one_offset[(1,)](out, 300, 8_388_608)
    assert out.item() == 2_516_582_400


def test_block_ranges_hold_every_visible_pair():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        doc_ids = torch.randint(-1, 4, (2, 37), generator=generator)
        if seed % 2:
            doc_ids = doc_ids.sort(1).values
        queries = query_documents(doc_ids, 45 if seed % 3 else 20)
        ranges = block_ranges(queries, doc_ids, 8, 16)
        pairs = (queries[:, :, None] == doc_ids[:, None, :]) & (doc_ids >= 0)[:, None, :]
        for batch, row, column in pairs.nonzero().tolist():
            first, last = ranges[batch, row // 8].tolist()
            assert first <= column // 16 < last


def test_block_ranges_of_packed_documents_are_tight():
    doc_ids = torch.tensor([[-1] * 4 + [0] * 8 + [1] * 4])
    assert block_ranges(doc_ids, doc_ids, 4, 4).tolist() == [[[0, 0], [1, 3], [1, 3], [3, 4]]]


def test_the_kernels_import_torch_and_triton_only():
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.split(".")[0] for name in names} <= {"torch", "triton", "importlib"}, f"{path.name} imports {names}"


COMPILE_ONE = """
import sys, torch
sys.path.insert(0, "benchmarks")
from compile_kernels import compiled
from llm_from_scratch.kernels.attention import flash_attention
row = compiled("fwd", 64, "bf16", "causal", 90)
assert row["spill_bytes"] == 0 and row["fits"], row
try: flash_attention(*[torch.zeros(1, 1, 4, 16)] * 3)
except ValueError as error: assert "need an NVIDIA GPU" in str(error) and "\\n" not in str(error)
else: raise AssertionError("it ran")
"""


def without_the_interpreter(script: str) -> subprocess.CompletedProcess:
    "Run Python in the clone as it is without a GPU and without the tests' variable."
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the line is for machines without a GPU")
def test_without_a_gpu_it_compiles_ahead_and_refuses_in_one_line():
    result = without_the_interpreter(COMPILE_ONE)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 86, 90])
def test_default_tiles_spill_nothing_in_halves(target):
    "Every kernel at head widths up to 128, with every kind of mask."
    script = f"""
import sys
sys.path.insert(0, "benchmarks")
from compile_kernels import compiled, FEATURES, KERNELS
for width in (16, 64, 80, 128):
    for dtype in ("bf16", "fp16"):
        for kernel in KERNELS:
            for features in FEATURES:
                row = compiled(kernel, width, dtype, features, {target})
                assert row["spill_bytes"] == 0 and row["fits"], row
"""
    result = without_the_interpreter(script)
    assert result.returncode == 0, result.stderr[-3000:]


def test_without_triton_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert "not installed" in kernels.why_not_triton("cpu")


@pytest.mark.slow
def test_without_triton_the_package_imports():
    script = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import llm_from_scratch.kernels as kernels, llm_from_scratch.kernels.blocks
assert "not installed" in kernels.why_not_triton("cpu")
"""
    result = without_the_interpreter(script)
    assert result.returncode == 0, result.stderr[-3000:]
