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
