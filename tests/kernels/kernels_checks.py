"What the tests of kernels share."

import torch


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    "Largest difference over the largest value, 0.1 at least; infinite where something is not finite."
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if not found.numel():
        return 0.0
    error = (found.double() - wanted.double()).abs().max() / max(wanted.double().abs().max().item(), 0.1)
    return error.item() if torch.isfinite(error) else float("inf")


def surrounded(*shape: int, dtype=torch.float32, device="cpu", margin: int = 40) -> torch.Tensor:
    "A random leaf (B, heads, T, K) that lies as (B, T, heads, K) in memory which holds NaN everywhere else."
    batch, heads, length, width = shape
    memory = torch.full((batch, length + margin, heads, width + 16), float("nan"), device=device, dtype=dtype)
    inside = memory[:, :length, :, :width].transpose(1, 2)
    inside.copy_(torch.randn(shape, device=device))
    return inside.detach().requires_grad_()
