"Cases from practice about the mixture of experts."

import pytest
import torch

from llm_from_scratch.checkpointing import load_checkpoint, save_checkpoint
from llm_from_scratch.config import ModelConfig, OptimConfig, build_config, load_preset, replace
from llm_from_scratch.dataloader import IGNORED, Batch
from llm_from_scratch.distributed import prepare
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.generate import generate
from llm_from_scratch.model import Transformer, check_shapes, count_parameters, cross_entropy, flops_per_token
from llm_from_scratch.moe import MoE, balance_loss, build_model, choice_fractions, choose_experts, router_report, z_loss
from llm_from_scratch.optim import build_optimizer


def config(**changes) -> ModelConfig:
    shape = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, init_std=0.1, num_experts=4)
    return ModelConfig(**(shape | changes))


def build(seed=0, **changes) -> Transformer:
    torch.manual_seed(seed)
    return build_model(config(**changes))


def random_ids(*shape, seed=0) -> torch.Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def batch(rows=3, tokens=16, counted=16, seed=0) -> Batch:
    ids = random_ids(rows, tokens + 1, seed=seed)
    targets = ids[:, 1:].clone()
    targets[:, counted:] = IGNORED
    positions = torch.arange(tokens).expand(rows, -1)
    return Batch(ids[:, :-1], targets, positions, torch.zeros_like(positions), torch.arange(rows))


def certain(expert: int, num_tokens: int) -> torch.Tensor:
    "Router logits that give one of two experts a probability of 0.9."
    return torch.tensor([[0.9, 0.1], [0.1, 0.9]])[expert].log().expand(num_tokens, 2)


def test_mod_9_a_uniform_router_gives_one():
    for num_experts, num_chosen in ((4, 2), (4, 1), (8, 3)):
        assert balance_loss(choose_experts(torch.zeros(16, num_experts), num_chosen)).item() == pytest.approx(1, abs=1e-6)


def test_mod_9_layers_are_judged_apart_then_averaged():
    layers = [choose_experts(certain(expert, 10), 1) for expert in (0, 1)]
    assert torch.stack([balance_loss(routes) for routes in layers]).mean().item() == pytest.approx(1.8, abs=1e-6)
    joined = choose_experts(torch.cat([routes.logits for routes in layers]), 1)
    assert balance_loss(joined).item() == pytest.approx(1.0, abs=1e-6)


def test_mod_9_padding_is_left_out():
    padded, counted = torch.cat([certain(1, 10), certain(0, 10)]), torch.arange(20) < 10
    for loss in (balance_loss, z_loss):
        assert loss(choose_experts(padded, 1), counted).item() == pytest.approx(loss(choose_experts(certain(1, 10), 1)).item(), abs=1e-6)
    assert balance_loss(choose_experts(padded, 1), torch.zeros(20, dtype=torch.bool)).item() == 0


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_mod_9_padding_in_a_model_changes_no_loss_and_no_other_row(capacity_factor):
    model, ids = build(capacity_factor=capacity_factor), random_ids(2, 12)
    logits, wanted = model(ids), model.aux_losses()
    padded = torch.cat([ids.new_zeros(2, 20), ids], 1)
    doc_ids = (torch.arange(32) >= 20).long().expand(2, -1) - 1
    close = model(padded, doc_ids=doc_ids)[:, 20:] - logits
    assert close.abs().max() < 1e-5
    for name, loss in model.aux_losses().items():
        assert loss.item() == pytest.approx(wanted[name].item(), rel=1e-5)


def test_mod_9_the_models_losses_are_the_mean_of_its_layers_weighted():
    model = build(balance_weight=0.5, router_z_weight=0.25)
    model(random_ids(2, 12))
    losses = [block.mlp.aux_losses() for block in model.blocks]
    for name in ("balance", "router_z"):
        assert model.aux_losses()[name].item() == pytest.approx(sum(layer[name].item() for layer in losses) / 2, rel=1e-6)
    assert 0.5 <= model.aux_losses()["balance"].item() < 1


def test_one_expert_and_top_1_is_the_dense_model_to_the_bit():
    sparse, dense = build(num_experts=1, experts_per_token=1), Transformer(config(num_experts=0))
    state = {name.replace("mlp.experts.0.", "mlp."): tensor for name, tensor in sparse.state_dict().items() if "router" not in name}
    dense.load_state_dict(state)
    ids = random_ids(3, 20)
    assert torch.equal(sparse(ids), dense(ids))
    for model in (sparse, dense):
        cross_entropy(model(ids), ids)[0].backward()
    gradients = {name.replace("mlp.experts.0.", "mlp."): weight.grad for name, weight in sparse.named_parameters()}
    for name, weight in dense.named_parameters():
        assert torch.allclose(gradients[name], weight.grad, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_an_expert_without_tokens_has_zero_gradients_and_trains_on(capacity_factor):
    model = build(experts_per_token=1, capacity_factor=capacity_factor)
    x = torch.rand(2, 8, 32) + 0.1
    layer = model.blocks[0].mlp
    with torch.no_grad():
        layer.router.weight.fill_(0)
        layer.router.weight[2] = 1
    (layer(x).square().sum() + sum(layer.aux_losses().values())).backward()
    assert layer.statistics["fractions"].tolist() == [0, 0, 1, 0]
    for number, expert in enumerate(layer.experts):
        for weight in expert.parameters():
            assert weight.grad is not None and weight.grad.isfinite().all()
            assert (weight.grad.abs().max() > 0) == (number == 2)
    assert layer.router.weight.grad.isfinite().all() and layer.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_adds_the_losses_by_the_convention(kind):
    def engine():
        model = build(balance_weight=0.5)
        optimizer = build_optimizer(model, OptimConfig(kind=kind))
        return prepare(model, optimizer, ranks=Ranks(), device=torch.device("cpu"), dtype=torch.float32, max_grad_norm=1e9)

    ours, batches = engine(), [batch(seed=0), batch(seed=1, counted=4), batch(seed=2, counted=0)]
    result = ours.train_step(batches)
    reference, texts = build(balance_weight=0.5), 0.0
    for part in batches:
        loss, count = cross_entropy(reference(part.inputs), part.targets)
        ((loss + count * sum(reference.aux_losses().values())) / result.num_tokens).backward()
        texts += loss.item()
    for weight, wanted in zip(ours.model.parameters(), reference.parameters()):
        assert torch.allclose(weight.grad, wanted.grad, rtol=1e-4, atol=1e-6)
    assert result.loss == pytest.approx(texts / result.num_tokens, rel=1e-6) and not result.skipped
    report = router_report(ours.model)
    assert set(report) == {"expert_most", "expert_least", "router_dropped", "router_entropy"}


def test_a_later_token_never_takes_an_earlier_ones_place():
    model, ids = build(capacity_factor=0.6), random_ids(1, 24)
    logits = model(ids)
    assert router_report(model)["router_dropped"] > 0.1
    layer = model.blocks[0].mlp
    x = torch.randn(1, 24, 32)
    whole, half = layer(x), layer(torch.cat([x[:, :12], torch.randn(1, 12, 32)], 1))
    assert torch.equal(whole[:, :12], half[:, :12]) and logits.isfinite().all()


def test_capacity_holds_in_training_only_and_a_cache_changes_nothing():
    model = build(capacity_factor=0.5).eval()
    ids = random_ids(1, 12)[0].tolist()
    prompts = [ids[:3], ids]
    together = generate(model, prompts, max_new_tokens=6, temperature=0.0)
    assert together == [generate(model, [prompt], max_new_tokens=6, temperature=0.0)[0] for prompt in prompts]


def test_bf16_routes_in_fp32():
    model, ids = build(), random_ids(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids).dtype == torch.bfloat16
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in model.aux_losses().values())
    layer = model.blocks[0].mlp.bfloat16()
    assert layer(torch.randn(2, 4, 32).bfloat16()).dtype == torch.bfloat16


def test_parameters_and_work_count_the_experts_that_a_token_meets():
    model, dense = build(), Transformer(config(num_experts=0))
    one, router = 3 * 32 * model.cfg.mlp_size, 4 * 32
    counts = count_parameters(model)
    assert counts["total"] == count_parameters(dense)["total"] + 2 * (3 * one + router)
    assert counts["active"] == count_parameters(dense)["total"] + 2 * (one + router)
    assert flops_per_token(model.cfg, 20) - flops_per_token(dense.cfg, 20) == 6 * 2 * (one + router)
    assert check_shapes(model) == 3 + 2 * (6 + 1 + 4 * 3)
    with pytest.raises(UserError, match="mlp=MoE"):
        Transformer(config())


def test_presets_of_experts_are_valid_and_known_by_size():
    for preset, least, most in (("moe-tiny", 1e6, 3e6), ("moe", 1e8, 6e8)):
        cfg = replace(build_config(load_preset(preset)), model={"vocab_size": None})
        shape = cfg.model.model_copy(update={"vocab_size": cfg.tokenizer.vocab_size})
        with torch.device("meta"):
            counts = count_parameters(build_model(shape))
        assert least < counts["active"] < counts["total"] < most, (preset, counts)


def test_a_checkpoint_of_experts_comes_back(tmp_path):
    model, other, ids = build(), build(seed=1), random_ids(2, 8)
    path = save_checkpoint(tmp_path, {"model": model}, step=1)
    load_checkpoint(path, {"model": other})
    assert torch.equal(model(ids), other(ids))


def test_fractions_sum_to_one():
    routes = choose_experts(torch.randn(50, 6, generator=torch.Generator().manual_seed(0)), 3)
    assert choice_fractions(routes).sum().item() == pytest.approx(1, abs=1e-6)
    assert torch.allclose(routes.shares.sum(-1), torch.ones(50))
    with pytest.raises(ValueError, match="above num_experts"):
        config(num_experts=2, experts_per_token=3)


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0}])
@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32)])
def test_no_tokens_in_no_tokens_out(shape, options):
    layer = MoE(ModelConfig(vocab_size=50, hidden_size=32, num_layers=1, num_experts=3, **options))
    assert layer(torch.zeros(shape)).shape == shape
    assert all(loss == 0 for loss in layer.aux_losses().values())
