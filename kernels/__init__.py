"""Hand-written Triton kernels, installed as `llm_from_scratch.kernels`; they import torch and triton only.

One file an operation: its reference in plain torch, the kernels, the operator that torch knows, one public function. Importing this
package needs no Triton; importing a file with kernels does.
"""

from importlib.util import find_spec

import torch


def why_not_triton(
    device: torch.device | str,  # where the tensors are
) -> str | None:                 # in words; none: they can run
    "Why the kernels can't run on tensors there."
    if find_spec("triton") is None:
        return "Triton is not installed; it comes for Linux only"
    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"Triton kernels need compute capability 8.0, {device} has {major}.{minor}"
    from .common import INTERPRETED

    if INTERPRETED:
        return None
    return f"Triton kernels need an NVIDIA GPU, the tensors are on {device}; TRITON_INTERPRET=1 set before Python starts runs them slowly"


def why_not_attention(
    q: torch.Tensor,  # (B, H, Tq, K)
    k: torch.Tensor,  # (B, G, Tk, K)
    v: torch.Tensor,  # (B, G, Tk, K)
) -> str | None:      # in words; none: they can run
    "Why flash attention can't take these tensors."
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} query heads can't share {k.shape[1]} key heads: num_heads must be divisible by num_kv_heads"
    if not 16 <= q.shape[3] <= 256:
        return f"flash attention takes head widths from 16 to 256, not {q.shape[3]}"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        return f"flash attention takes q, k and v all in bf16, fp16 or fp32, not {q.dtype}, {k.dtype} and {v.dtype}"
    return why_not_triton(q.device)
