"""Cross entropy fused with the output projection: the logits of a chunk of tokens at a time, never those of all.

The loss is a sum, so its gradient is known up to one factor while the chunk's logits are still there: the kernel writes it over them,
and two matrix products turn it into the gradients of the hidden states and of the weight (as in Liger, Hsu et al. 2024).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .common import check_device, computable, offset

CHUNK_ELEMENTS = 2**26  # logits held at once: 128 MiB in bf16, 2,048 tokens of a vocabulary of 32,768; not yet timed on a GPU
BLOCK = 4096            # logits of a row read at once; not yet timed on a GPU


def linear_cross_entropy_reference(hidden, weight, targets, *, ignore_index=-100, z_loss=0.0):
    "The same in plain torch, with all the logits."
    logits = (hidden @ weight.to(hidden.dtype).T).flatten(0, -2).float()
    targets = targets.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    squares = logits.logsumexp(-1).square().masked_fill(targets == ignore_index, 0)
    return total + z_loss * squares.sum(), (targets != ignore_index).sum()


@triton.jit
def cross_entropy_kernel(logits_ptr, targets_ptr, losses_ptr, vocab_size, ignore_index, z_loss, BLOCK: tl.constexpr):
    "One row of logits: its loss (NaN for a target outside the vocabulary), and its gradient in the logits' place."
    row = tl.program_id(0)
    base = logits_ptr + offset(row, vocab_size)
    target = tl.load(targets_ptr + row)
    counted = target != ignore_index
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    chosen = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(base + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, logits)
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - safe_top) + tl.exp(logits - safe_top)
        chosen += tl.where(columns == target, logits, 0.0)
        top = new_top
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    loss = log_sum - tl.sum(chosen, 0) + z_loss * log_sum * log_sum
    possible = (target >= 0) & (target < vocab_size)
    tl.store(losses_ptr + row, tl.where(counted, tl.where(possible, loss, float("nan")), 0.0))
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(base + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(logits - log_sum) * (1.0 + 2.0 * z_loss * log_sum) - tl.where(columns == target, 1.0, 0.0)
        gradient = tl.where(counted, gradient, 0.0)
        tl.store(base + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < vocab_size)


def chunk_tokens(vocab_size: int) -> int:
    "Tokens whose logits are held at once."
    return max(1, CHUNK_ELEMENTS // vocab_size)


@torch.library.custom_op("llm_from_scratch::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int, z_loss: float, differentiate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "Sum of the losses, and its gradients for hidden (N, D) and weight (V, D), empty unless asked for."
    losses = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    dhidden = torch.zeros_like(hidden) if differentiate else hidden.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=torch.float32) if differentiate else weight.new_empty(0, dtype=torch.float32)
    matrix, size = weight.to(hidden.dtype), chunk_tokens(weight.shape[0])
    for start in range(0, hidden.shape[0], size):
        part = slice(start, start + size)
        logits = computable(hidden[part] @ matrix.T)[0]
        cross_entropy_kernel[(logits.shape[0],)](
            logits, targets[part], losses[part], weight.shape[0], ignore_index, z_loss, BLOCK=min(BLOCK, triton.next_power_of_2(weight.shape[0])))
        if differentiate:
            gradient = logits.to(hidden.dtype)
            dhidden[part] = gradient @ matrix
            dweight += gradient.T @ hidden[part]
    return losses.sum(), dhidden, dweight


@linear_cross_entropy_op.register_fake
def _(hidden, weight, targets, ignore_index, z_loss, differentiate):
    shapes = (hidden.shape, weight.shape) if differentiate else ((0,), (0,))
    return hidden.new_empty((), dtype=torch.float32), hidden.new_empty(shapes[0]), weight.new_empty(shapes[1], dtype=torch.float32)


def _save(ctx, inputs, output):
    ctx.kind = inputs[1].dtype
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dtotal, *_):
    dhidden, dweight = ctx.saved_tensors
    return dhidden * dtotal.to(dhidden.dtype), (dweight * dtotal).to(ctx.kind), None, None, None, None


linear_cross_entropy_op.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy(
    hidden: torch.Tensor,      # (..., D) what the head would read
    weight: torch.Tensor,      # (V, D) the head's matrix, rows of the real vocabulary only
    targets: torch.Tensor,     # (...) token ids
    *,
    ignore_index: int = -100,  # a label that counts nothing
    z_loss: float = 0.0,       # times the square of each counted token's log-sum-exp, added to the sum (PaLM: 1e-4)
) -> tuple[torch.Tensor, torch.Tensor]:  # nats summed over counted targets in fp32, and their number
    "Like `cross_entropy` of the head's logits, without them; raises ValueError of one line where the kernels can't run or shapes don't fit."
    check_device(hidden)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"the head {tuple(weight.shape)} doesn't fit hidden states {tuple(hidden.shape)}: (V, D) and (..., D) are wanted")
    if targets.numel() != hidden.shape[:-1].numel():
        raise ValueError(f"targets {tuple(targets.shape)} don't fit hidden states {tuple(hidden.shape)}: one each is wanted")
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total = torch.ops.llm_from_scratch.linear_cross_entropy(rows, weight, targets, ignore_index, z_loss, differentiate)[0]
    return total, (targets != ignore_index).sum()
