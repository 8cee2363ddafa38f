"""Compile the attention kernels for GPUs that are not here: registers, shared memory and spills of every tile.

    python benchmarks/compile_kernels.py [--targets 80 86 90] [--widths 64 128] [--dtypes bf16 fp16] [--save]

Needs no GPU: Triton writes PTX for a named architecture and the ptxas that comes with it says what the program takes. With --save
the table goes to results/compile_kernels.jsonl. TRITON_INTERPRET must not be set.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llm_from_scratch.kernels import attention
from llm_from_scratch.kernels.common import INTERPRETED, padded

RESULTS = Path(__file__).parent / "results" / "compile_kernels.jsonl"
KERNELS = {"fwd": attention.attention_fwd_kernel, "dq": attention.attention_bwd_dq_kernel, "dkv": attention.attention_bwd_dkv_kernel}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FEATURES = {"causal": (True, False, False), "full": (False, False, False), "alibi": (True, True, False), "docs": (True, False, True),
            "alibi+docs": (True, True, True)}
SHARED_LIMIT = {80: 166_912, 86: 101_376, 90: 232_448}  # bytes a block can have: CUDA C programming guide, technical specifications
FP32_POINTERS = {"log_ptr", "delta_ptr", "dslopes_ptr", "slopes_ptr"}


def signature(kernel, dtype: str) -> dict[str, str]:
    "The type of every argument as a launch would give it."
    kinds = {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            kinds[name] = "constexpr"
        elif name.endswith("_ptr"):
            kinds[name] = {"docs_ptr": "*i32", "ranges_ptr": "*i32"}.get(name, "*fp32" if name in FP32_POINTERS else f"*{dtype}")
        else:
            kinds[name] = "fp32" if name == "scale" else "i32"
    return kinds


def compiled(kernel_name: str, width: int, dtype: str, features: str, target: int, tiles: dict | None = None) -> dict:
    "Compile one kernel at the tiles that a launch would choose, and ask ptxas what it takes."
    kernel, (causal, slopes, docs) = KERNELS[kernel_name], FEATURES[features]
    tiles = dict(tiles or attention.attention_tiles(kernel_name, padded(width), DTYPES[dtype]))
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constants = dict(HEADS=16, GROUP=4, K=width, WIDTH=padded(width), CAUSAL=causal, HAS_SLOPES=slopes, HAS_DOCS=docs,
                     PRECISION=attention.PRECISION, **tiles)
    kinds = signature(kernel, dtype)
    aligned = [name for name, kind in kinds.items() if kind.startswith("*") or name.endswith(("_batch", "_head", "_row"))]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, kinds, constants, attributes)
    result = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    row = dict(kernel=kernel_name, width=width, dtype=dtype, features=features, target=target, **tiles, **options)
    row |= ptxas_report(result.asm["ptx"])
    return row | dict(shared_bytes=result.metadata.shared, fits=result.metadata.shared <= SHARED_LIMIT[target])


def ptxas_report(ptx: str) -> dict[str, int]:
    "Registers a thread and bytes spilled to memory, as ptxas -v words them."
    chip = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={chip}", str(path), "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = (max(map(int, re.findall(rf"(\d+) bytes spill {kind}", text))) for kind in ("stores", "loads"))
    return dict(registers=int(re.search(r"Used (\d+) registers", text).group(1)), spill_bytes=stores + loads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 86, 90])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=DTYPES)
    parser.add_argument("--features", nargs="+", default=list(FEATURES), choices=FEATURES)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if INTERPRETED:
        print("error: TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it", file=sys.stderr)
        return 2
    for target in options.targets:
        for width in options.widths:
            for dtype in options.dtypes:
                for kernel in options.kernels:
                    for features in options.features:
                        row = compiled(kernel, width, dtype, features, target)
                        print(json.dumps(row), flush=True)
                        if options.save:
                            with RESULTS.open("a") as file:
                                print(json.dumps(row), file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
