"""Rotary positions on queries and keys in one pass (Su et al. 2021, RoFormer).

A program turns all heads of one token, so that its cosines and sines are read once. Backward is the same kernel with the angle's sign
turned round. Tables come from `rotary_angles`: cosine and signed sine of every coordinate.
"""

import torch
import triton
import triton.language as tl

from .common import check_device, computable, offset


def rotate_reference(q, k, cos, sin, layout="half"):
    "The same in plain torch."
    def turned(x):
        table = [angle.unsqueeze(-3) for angle in (cos, sin)]
        swapped = torch.cat(x.chunk(2, -1)[::-1], -1) if layout == "half" else x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return (x * table[0] + swapped * table[1]).to(x.dtype)

    return turned(q), turned(k)


@triton.jit
def turn_heads(x_ptr, out_ptr, x_head, out_head, cos_one, cos_two, sin_one, sin_two, one, two, real,
               HEADS: tl.constexpr, PADDED: tl.constexpr, BACKWARD: tl.constexpr):
    "Turn the pairs (one, two) of every head of one token."
    heads = tl.arange(0, PADDED)[:, None]
    inside = (heads < HEADS) & real[None, :]
    x_one = tl.load(x_ptr + offset(heads, x_head) + one[None, :], mask=inside, other=0.0).to(tl.float32)
    x_two = tl.load(x_ptr + offset(heads, x_head) + two[None, :], mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        sin_one, sin_two = sin_two, sin_one
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + offset(heads, out_head) + one[None, :], (x_one * cos_one[None, :] + x_two * sin_one[None, :]).to(kind), mask=inside)
    tl.store(out_ptr + offset(heads, out_head) + two[None, :], (x_two * cos_two[None, :] + x_one * sin_two[None, :]).to(kind), mask=inside)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
    q_out_batch, q_out_head, q_out_row, k_out_batch, k_out_head, k_out_row, angle_batch, length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PADDED: tl.constexpr, PADDED_KEYS: tl.constexpr,
    K: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):
    "One program: one token."
    batch = tl.program_id(0) // length
    row = tl.program_id(0) % length
    pair = tl.arange(0, PAIRS)
    real = pair < K // 2
    one = 2 * pair if INTERLEAVED else pair
    two = one + 1 if INTERLEAVED else pair + K // 2
    angles = offset(batch, angle_batch) + offset(row, K)
    cos_one = tl.load(cos_ptr + angles + one, mask=real, other=0.0)
    cos_two = tl.load(cos_ptr + angles + two, mask=real, other=0.0)
    sin_one = tl.load(sin_ptr + angles + one, mask=real, other=0.0)
    sin_two = tl.load(sin_ptr + angles + two, mask=real, other=0.0)
    turn_heads(q_ptr + offset(batch, q_batch) + offset(row, q_row), q_out_ptr + offset(batch, q_out_batch) + offset(row, q_out_row),
               q_head, q_out_head, cos_one, cos_two, sin_one, sin_two, one, two, real, HEADS, PADDED, BACKWARD)
    turn_heads(k_ptr + offset(batch, k_batch) + offset(row, k_row), k_out_ptr + offset(batch, k_out_batch) + offset(row, k_out_row),
               k_head, k_out_head, cos_one, cos_two, sin_one, sin_two, one, two, real, KEY_HEADS, PADDED_KEYS, BACKWARD)


@torch.library.custom_op("llm_from_scratch::rotate", mutates_args=())
def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    "Queries and keys turned by the angles, or back."
    out = [_like(x) for x in (q, k)]
    if q.numel():
        tensors = computable(q, k, *out)
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = [stride for x in tensors for stride in x.stride()[:3]]
        rope_kernel[(q.shape[0] * q.shape[2],)](
            *tensors, cos, sin, *strides, cos.stride(0) if cos.ndim == 3 else 0, q.shape[2], HEADS=q.shape[1], KEY_HEADS=k.shape[1],
            PADDED=triton.next_power_of_2(q.shape[1]), PADDED_KEYS=triton.next_power_of_2(k.shape[1]), K=q.shape[3],
            PAIRS=triton.next_power_of_2(q.shape[3] // 2), INTERLEAVED=interleaved, BACKWARD=backward, num_warps=4)
        for one, result in zip(out, tensors[2:]):
            one.copy_(result)
    return out[0], out[1]


def _like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


@rotate.register_fake
def _(q, k, cos, sin, interleaved, backward):
    return _like(q), _like(k)


def _save(ctx, inputs, output):
    _, _, cos, sin, ctx.interleaved, ctx.turned_back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    back = torch.ops.llm_from_scratch.rotate(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.turned_back)
    return *back, None, None, None, None


rotate.register_autograd(_backward, setup_context=_save)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    "Raise ValueError where queries, keys and angles don't fit together."
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(f"queries {tuple(q.shape)} and keys {tuple(k.shape)} don't fit: (B, H, T, K) and (B, G, T, K) are wanted")
    if q.shape[3] % 2:
        raise ValueError(f"RoPE turns pairs: the head width {q.shape[3]} of queries {tuple(q.shape)} must be even")
    fit = cos.shape[-2:] == q.shape[2:] and (cos.ndim == 2 or cos.ndim == 3 and cos.shape[0] == q.shape[0])
    if not fit or cos.shape != sin.shape:
        raise ValueError(f"angles {tuple(cos.shape)} and {tuple(sin.shape)} don't fit queries {tuple(q.shape)}: (T, K) or (B, T, K) are wanted")


def rotate_queries_keys(
    q: torch.Tensor,       # (B, H, T, K)
    k: torch.Tensor,       # (B, G, T, K)
    cos: torch.Tensor,     # (T, K) or (B, T, K) in fp32, from `rotary_angles`
    sin: torch.Tensor,     # the signed sine, like `cos`; neither gets a gradient
    layout: str = "half",  # the layout that the angles were made for: "half" or "interleaved"
) -> tuple[torch.Tensor, torch.Tensor]:  # like q and k
    "Turn queries and keys by their angles, in fp32; raises ValueError of one line where the kernels can't run or shapes don't fit."
    check_device(q)
    _check_shapes(q, k, cos, sin)
    if layout not in ("half", "interleaved"):
        raise ValueError(f"RoPE layout {layout!r} is unknown; use 'half' or 'interleaved'")
    return torch.ops.llm_from_scratch.rotate(q, k, cos, sin, layout == "interleaved", False)
