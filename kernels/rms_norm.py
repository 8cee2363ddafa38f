"""RMSNorm in one pass, with the addition of the residual stream in front of it (Zhang and Sennrich 2019).

Rows of D are read once forward. Backward, each program adds up the gain's gradient over its own rows and writes it to its own line;
the lines are summed afterwards, so that nothing depends on which program was faster.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .common import check_device, computable, offset

ROW_GROUPS = 256  # programs of the backward pass: about two for each of an H100's 132 processors; not yet timed on a GPU


def rms_norm_reference(x, weight, eps=1e-5, residual=None):
    "The same in plain torch."
    total = x if residual is None else x + residual
    normed = F.rms_norm(total, x.shape[-1:], weight.to(x.dtype), eps)
    return normed if residual is None else (normed, total)


@triton.jit
def rms_norm_fwd_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, inverse_ptr, size, eps,
                        WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    "One row: add, mean of squares, scale; keeps 1 / rms."
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    start = offset(row, size)
    x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + start + columns, x, mask=inside)
        x = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + columns, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(inverse_ptr + row, inverse)


@triton.jit
def rms_norm_bwd_kernel(dout_ptr, dtotal_ptr, total_ptr, weight_ptr, inverse_ptr, dx_ptr, dweight_ptr, num_rows, size, rows_each,
                        WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    "Some rows one after the other: their gradients, and one line of the gain's."
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([WIDTH], tl.float32)
    first = tl.program_id(0) * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        start = offset(row, size)
        inverse = tl.load(inverse_ptr + row)
        normed = tl.load(total_ptr + start + columns, mask=inside, other=0.0).to(tl.float32) * inverse
        dout = tl.load(dout_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        dweight += dout * normed
        dnormed = dout * weight
        dx = (dnormed - normed * (tl.sum(dnormed * normed, 0) / size)) * inverse
        if HAS_RESIDUAL:
            dx += tl.load(dtotal_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + offset(tl.program_id(0), size) + columns, dweight, mask=inside)


def _launch(size: int) -> dict:
    "A whole row in registers: 16 values a thread at most up to 8,192 columns."
    width = triton.next_power_of_2(size)
    return dict(WIDTH=width, num_warps=min(16, max(1, width // 512)))


@torch.library.custom_op("llm_from_scratch::rms_norm_forward", mutates_args=())
def rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "Normed rows, the sum with the residual (empty without one), and 1 / rms of each row."
    size, rows = x.shape[-1], x.numel() // max(x.shape[-1], 1)
    out, inverse = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=torch.float32)
    total = torch.empty_like(out) if residual is not None else x.new_empty(0)
    if rows:
        x_, weight_, residual_, out_, total_ = computable(x.contiguous(), weight, None if residual is None else residual.contiguous(), out, total)
        rms_norm_fwd_kernel[(rows,)](x_, residual_, weight_, out_, total_, inverse, size, eps, HAS_RESIDUAL=residual is not None, **_launch(size))
        out.copy_(out_), total.copy_(total_)
    return out, total, inverse


@rms_norm_forward.register_fake
def _(x, weight, eps, residual):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out) if residual is not None else x.new_empty(0)
    return out, total, x.new_empty(x.numel() // max(x.shape[-1], 1), dtype=torch.float32)


@torch.library.custom_op("llm_from_scratch::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dout: torch.Tensor, dtotal: torch.Tensor | None, total: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    "Gradients of the rows and of the gain."
    size, rows = total.shape[-1], inverse.numel()
    dx = torch.empty_like(total, memory_format=torch.contiguous_format)
    rows_each = max(1, triton.cdiv(rows, ROW_GROUPS))
    shares = inverse.new_empty(triton.cdiv(rows, rows_each), size)
    if rows:
        dout_, dtotal_, total_, weight_, dx_ = computable(
            dout.contiguous(), None if dtotal is None else dtotal.contiguous(), total.contiguous(), weight, dx)
        rms_norm_bwd_kernel[(shares.shape[0],)](
            dout_, dtotal_, total_, weight_, inverse, dx_, shares, rows, size, rows_each, HAS_RESIDUAL=dtotal is not None, **_launch(size))
        dx.copy_(dx_)
    return dx, shares.sum(0).to(weight.dtype)


@rms_norm_backward.register_fake
def _(dout, dtotal, total, weight, inverse):
    return torch.empty_like(total, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _save(ctx, inputs, output):
    x, weight, _, residual = inputs
    _, total, inverse = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(total if ctx.has_residual else x, weight, inverse)


def _backward(ctx, dout, dtotal, _):
    dx, dweight = torch.ops.llm_from_scratch.rms_norm_backward(dout, dtotal if ctx.has_residual else None, *ctx.saved_tensors)
    return dx, dweight, None, dx if ctx.has_residual else None


rms_norm_forward.register_autograd(_backward, setup_context=_save)


def rms_norm(
    x: torch.Tensor,                        # (..., D)
    weight: torch.Tensor,                   # (D,) gain
    eps: float = 1e-5,                      # added to the mean square
    residual: torch.Tensor | None = None,   # (..., D) the stream that x is added to before the norm
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # the norm; with a residual also the sum, both like x
    "Divide by the root mean square over D and multiply by the gain; raises ValueError of one line where the kernels can't run or shapes don't fit."
    check_device(x)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"the gain {tuple(weight.shape)} doesn't fit rows {tuple(x.shape)}: (D,) and (..., D) are wanted")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"the residual {tuple(residual.shape)} doesn't fit rows {tuple(x.shape)}: one shape is wanted")
    out, total, _ = torch.ops.llm_from_scratch.rms_norm_forward(x, weight, eps, residual)
    return out if residual is None else (out, total)
