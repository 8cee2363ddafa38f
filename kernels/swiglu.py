"""The gate of the MLP, silu(gate) * up, in one pass each way (Shazeer 2020).

Nothing but gate and up is kept for the backward pass; the sigmoid is computed again.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .common import check_device, computable, offset

BLOCK = 1024  # elements a program; bound by memory: 8 bf16 values a thread at 4 warps; not yet timed on a GPU


def swiglu_reference(gate, up):
    "The same in plain torch."
    return F.silu(gate) * up


@triton.jit
def swiglu_fwd_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    "One block of elements."
    index = offset(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    inside = index < size
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd_kernel(dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, size, BLOCK: tl.constexpr):
    "One block: d silu = sigmoid + gate sigmoid (1 - sigmoid)."
    index = offset(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    inside = index < size
    dout = tl.load(dout_ptr + index, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    dgate = dout * up * chance * (1 + gate * (1 - chance))
    tl.store(dgate_ptr + index, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + index, (dout * gate * chance).to(dup_ptr.dtype.element_ty), mask=inside)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("llm_from_scratch::swiglu_forward", mutates_args=())
def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    "silu(gate) * up."
    out = _plain(gate)
    if out.numel():
        gate_, up_, out_ = computable(gate.contiguous(), up.contiguous(), out)
        swiglu_fwd_kernel[(triton.cdiv(out.numel(), BLOCK),)](gate_, up_, out_, out.numel(), BLOCK=BLOCK)
        out.copy_(out_)
    return out


@swiglu_forward.register_fake
def _(gate, up):
    return _plain(gate)


@torch.library.custom_op("llm_from_scratch::swiglu_backward", mutates_args=())
def swiglu_backward(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    "Gradients of gate and up."
    dgate, dup = _plain(gate), _plain(up)
    if gate.numel():
        dout_, gate_, up_, dgate_, dup_ = computable(dout.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup)
        swiglu_bwd_kernel[(triton.cdiv(gate.numel(), BLOCK),)](dout_, gate_, up_, dgate_, dup_, gate.numel(), BLOCK=BLOCK)
        dgate.copy_(dgate_), dup.copy_(dup_)
    return dgate, dup


@swiglu_backward.register_fake
def _(dout, gate, up):
    return _plain(gate), _plain(up)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dout):
    return torch.ops.llm_from_scratch.swiglu_backward(dout, *ctx.saved_tensors)


swiglu_forward.register_autograd(_backward, setup_context=_save)


def swiglu(
    gate: torch.Tensor,  # (..., M) what the gate's projection gave
    up: torch.Tensor,    # (..., M) what it gates
) -> torch.Tensor:       # (..., M)
    "silu(gate) * up, in fp32 inside; raises ValueError of one line where the kernels can't run or shapes don't fit."
    check_device(gate)
    if gate.shape != up.shape:
        raise ValueError(f"the gate {tuple(gate.shape)} doesn't fit what it gates {tuple(up.shape)}: one shape is wanted")
    return torch.ops.llm_from_scratch.swiglu_forward(gate, up)
