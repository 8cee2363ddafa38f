"What every kernel needs: offsets that do not wrap, tiles with edges, and the interpreter's gap."

import torch
import triton
import triton.language as tl

from . import why_not_triton


@triton.jit
def offset(index, stride):
    "Elements from the start in int64: 300 rows of 2**23 elements are beyond int32."
    return tl.cast(index, tl.int64) * stride


@triton.jit
def tile_pointers(base, start, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    "Addresses of rows start, start + 1, ... of a matrix whose rows lie `stride` apart."
    rows = tl.arange(0, SIZE)
    return base + offset(start, stride) + offset(rows, stride)[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_tile(base, start, stride, present, K: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    "A tile (SIZE, WIDTH); zeros in rows that are not present and in columns from K on."
    inside = present[:, None] & (tl.arange(0, WIDTH) < K)[None, :]
    return tl.load(tile_pointers(base, start, stride, SIZE, WIDTH), mask=inside, other=0.0)


@triton.jit
def store_tile(base, start, stride, present, tile, K: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    "Write a tile's rows that are present, K columns of each."
    inside = present[:, None] & (tl.arange(0, WIDTH) < K)[None, :]
    tl.store(tile_pointers(base, start, stride, SIZE, WIDTH), tile.to(base.dtype.element_ty), mask=inside)


INTERPRETED = not isinstance(offset, triton.runtime.JITFunction)


def check_device(tensor: torch.Tensor) -> None:
    "Raise ValueError of one line where the kernels can't run on a tensor."
    if not torch.compiler.is_compiling() and (reason := why_not_triton(tensor.device)):
        raise ValueError(reason)


def padded(width: int) -> int:
    "The power of two that a tile needs for so many columns, 16 at least."
    return max(16, triton.next_power_of_2(width))


def computable(*tensors: torch.Tensor | None) -> list:
    "Rows made contiguous; under the interpreter bf16 becomes fp32, since its bf16 arithmetic is wrong (triton 3.7)."
    rows = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tensors]
    if not INTERPRETED:
        return rows
    return [x.float() if x is not None and x.dtype == torch.bfloat16 else x for x in rows]
