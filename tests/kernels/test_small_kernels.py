"RMSNorm, RoPE, SwiGLU and the fused cross entropy against plain torch: values and every gradient, at ragged sizes."

import pytest
import torch
from kernels_checks import relative_error, surrounded

from llm_from_scratch.kernels import cross_entropy, rms_norm, rope, swiglu
from llm_from_scratch.model import cross_entropy as cross_entropy_of_logits
from llm_from_scratch.model import rotary_angles

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16]


def leaf(*shape, dtype=torch.float32, device="cpu"):
    return surrounded(shape[0], 1, *shape[1:], dtype=dtype, device=device)[:, 0].detach().requires_grad_()


def check(function, reference, leaves, tolerance):
    "Outputs and gradients of two functions of the leaves agree."
    results = []
    for f in (function, reference):
        out = f(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(1)
        loss = sum((x.float() * torch.randn_like(x.float())).sum() for x in outs if x.is_floating_point())
        results.append([*outs, *torch.autograd.grad(loss, leaves)])
    errors = [relative_error(one, other) for one, other in zip(*results)]
    assert max(errors) < tolerance, errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(device, dtype, with_residual, monkeypatch):
    monkeypatch.setattr(rms_norm, "ROW_GROUPS", 4)
    leaves = [leaf(2, 5, 37, dtype=dtype, device=device), torch.rand(37, device=device, requires_grad=True)]
    if with_residual:
        leaves.append(leaf(2, 5, 37, dtype=dtype, device=device))
    functions = [lambda x, weight, *rest, f=f: f(x, weight, 1e-5, *rest) for f in (rms_norm.rms_norm, rms_norm.rms_norm_reference)]
    check(*functions, leaves, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope(device, dtype, layout):
    positions = torch.arange(7, device=device) if layout == "half" else torch.randint(0, 50, (2, 7), device=device)
    angles = rotary_angles(positions, 20, layout=layout)
    leaves = [surrounded(2, heads, 7, 20, dtype=dtype, device=device) for heads in (3, 1)]
    functions = [lambda q, k, f=f: f(q, k, *angles, layout) for f in (rope.rotate_queries_keys, rope.rotate_reference)]
    check(*functions, leaves, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(device, dtype, monkeypatch):
    monkeypatch.setattr(swiglu, "BLOCK", 32)
    leaves = [leaf(2, 3, 37, dtype=dtype, device=device) for _ in range(2)]
    check(swiglu.swiglu, swiglu.swiglu_reference, leaves, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy(device, dtype, z_loss, monkeypatch):
    "Chunks of 3 tokens, blocks of 16 logits, some targets that count nothing."
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 3 * 37)
    monkeypatch.setattr(cross_entropy, "BLOCK", 16)
    hidden, weight = leaf(2, 5, 24, dtype=dtype, device=device), torch.randn(37, 24, device=device, requires_grad=True)
    targets = torch.tensor([[0, 36, -100, 5, 5], [-100, 1, 15, 16, 31]], device=device)
    functions = [lambda hidden, weight, f=f: f(hidden, weight, targets, z_loss=z_loss)
                 for f in (cross_entropy.linear_cross_entropy, cross_entropy.linear_cross_entropy_reference)]
    check(*functions, [hidden, weight], TOLERANCE[dtype])
    total, count = functions[0](hidden, weight)
    assert count == 8 and total.dtype == torch.float32
    if not z_loss and dtype == torch.float32:
        wanted, _ = cross_entropy_of_logits(hidden @ weight.T, targets)
        assert torch.allclose(total, wanted)


def test_cross_entropy_never_holds_all_logits(device, monkeypatch):
    "The largest tensor that it asks for is a chunk's logits, or as large as its inputs."
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 4 * 64)
    hidden, weight = torch.randn(32, 8, device=device, requires_grad=True), torch.randn(64, 8, device=device, requires_grad=True)
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            seen.extend(x.nbytes for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    with torch.no_grad(), Sizes():
        cross_entropy.linear_cross_entropy_op._init_fn(hidden, weight, torch.zeros(32, dtype=torch.int64, device=device), -100, 0.0, True)
    assert max(seen) <= max(4 * 4 * 64, hidden.nbytes, weight.nbytes) < 4 * 32 * 64


def test_a_target_outside_the_vocabulary_shows(device):
    hidden, weight = torch.randn(2, 8, device=device), torch.randn(5, 8, device=device)
    total, _ = cross_entropy.linear_cross_entropy(hidden, weight, torch.tensor([1, 5], device=device))
    assert torch.isnan(total)


def test_shapes_that_do_not_fit_are_refused(device):
    x, q = torch.zeros(2, 3, 8, device=device), torch.zeros(2, 4, 3, 8, device=device)
    angles, token = torch.zeros(3, 8, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    for function, inputs, message in [
        (rms_norm.rms_norm, (x, x[0, 0, :4]), r"gain \(4,\) doesn't fit rows \(2, 3, 8\)"),
        (rms_norm.rms_norm, (x, x[0, 0], 1e-5, x[:, :2]), r"residual \(2, 2, 8\) doesn't fit rows \(2, 3, 8\)"),
        (swiglu.swiglu, (x, x[..., :4]), r"gate \(2, 3, 8\) doesn't fit what it gates \(2, 3, 4\)"),
        (rope.rotate_queries_keys, (q, q[:, :, :2], angles, angles), r"queries \(2, 4, 3, 8\) and keys \(2, 4, 2, 8\)"),
        (rope.rotate_queries_keys, (q, q, angles[:2], angles[:2]), r"angles \(2, 8\) and \(2, 8\) don't fit queries \(2, 4, 3, 8\)"),
        (rope.rotate_queries_keys, (q, q, angles, angles[:2]), r"angles \(3, 8\) and \(2, 8\)"),
        (rope.rotate_queries_keys, (q, q, angles[None], angles[None]), r"angles \(1, 3, 8\)"),
        (rope.rotate_queries_keys, (q[..., :7], q[..., :7], angles[:, :7], angles[:, :7]), "head width 7"),
        (rope.rotate_queries_keys, (q, q, angles, angles, "quarter"), "layout 'quarter' is unknown"),
        (cross_entropy.linear_cross_entropy, (x, x[0], token[:5]), r"targets \(5,\) don't fit hidden states \(2, 3, 8\)"),
        (cross_entropy.linear_cross_entropy, (x, x[0, :, :4], token), r"head \(3, 4\) doesn't fit hidden states \(2, 3, 8\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            function(*inputs)


def test_nothing_in_nothing_out(device):
    empty = torch.zeros(0, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    for out in (rms_norm.rms_norm(empty, weight), swiglu.swiglu(empty, empty)):
        assert out.shape == (0, 8)
        assert not torch.autograd.grad(out.sum(), empty)[0].numel()
    total, count = cross_entropy.linear_cross_entropy(empty, torch.ones(3, 8, device=device), torch.zeros(0, dtype=torch.int64, device=device))
    assert total == 0 and count == 0


@pytest.mark.slow
def test_the_operators_keep_torchs_rules(device):
    x, weight = leaf(2, 3, 20, device=device), torch.rand(20, device=device, requires_grad=True)
    q, k = surrounded(1, 2, 3, 16, device=device), surrounded(1, 1, 3, 16, device=device)
    head, targets = torch.randn(11, 20, device=device, requires_grad=True), torch.tensor([1, 2, -100, 4, 5, 6], device=device)
    torch.library.opcheck(rms_norm.rms_norm_forward, (x, weight, 1e-5, None))
    torch.library.opcheck(rms_norm.rms_norm_forward, (x, weight, 1e-5, leaf(2, 3, 20, device=device)))
    torch.library.opcheck(swiglu.swiglu_forward, (x, x))
    torch.library.opcheck(rope.rotate, (q, k, *rotary_angles(torch.arange(3, device=device), 16), False, False))
    rows = x.detach().reshape(-1, 20).requires_grad_()
    torch.library.opcheck(cross_entropy.linear_cross_entropy_op, (rows, head, targets, -100, 1e-3, True))


@pytest.mark.slow
def test_no_graph_breaks(device):
    torch._dynamo.reset()
    x, weight = leaf(2, 3, 20, device=device), torch.rand(20, device=device, requires_grad=True)
    q, k = surrounded(1, 2, 3, 16, device=device), surrounded(1, 1, 3, 16, device=device)
    angles = rotary_angles(torch.arange(3, device=device), 16)
    head, targets = torch.randn(11, 20, device=device, requires_grad=True), torch.tensor([1, 2, -100, 4, 5, 6], device=device)

    def compiled(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    check(compiled(rms_norm.rms_norm), rms_norm.rms_norm, [x, weight], 1e-6)
    check(compiled(swiglu.swiglu), swiglu.swiglu, [x, leaf(2, 3, 20, device=device)], 1e-6)
    check(compiled(lambda q, k: rope.rotate_queries_keys(q, k, *angles)), lambda q, k: rope.rotate_queries_keys(q, k, *angles), [q, k], 1e-6)
    loss = lambda x, head: cross_entropy.linear_cross_entropy(x, head, targets)  # noqa: E731
    check(compiled(loss), loss, [x, head], 1e-6)
