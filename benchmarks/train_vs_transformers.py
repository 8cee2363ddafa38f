"""The same model, tokens, batches and schedule through transformers' LlamaForCausalLM: the same curve, and how fast?

    pip install -e ".[bench]" && python benchmarks/train_vs_transformers.py [--steps 100]

Both start from the same weights and take their steps in turn on the same rows, so that both meet the machine's noise.
Theirs is the usual loop by hand: mean loss of the model, clip_grad_norm_, torch.optim.AdamW with its defaults.
Prints both curves and the ratio of the median tokens per second; appends a line to results/train_vs_transformers.jsonl.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers

from llm_from_scratch.config import Config, build_config
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks, environment_report
from llm_from_scratch.launch import keep_freed_memory, schedule_lr, set_threads
from llm_from_scratch.model import Transformer
from llm_from_scratch.optim import param_groups, set_lr
from llm_from_scratch.training_loop import build_training, prepare_data, split_batch

RESULTS = Path(__file__).parent / "results" / "train_vs_transformers.jsonl"
NAMES = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
         "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
         "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}


def llama_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if not name.startswith("blocks."):
        return f"{NAMES[name]}.weight"
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def same_llama(model: Transformer) -> transformers.LlamaForCausalLM:
    "transformers' model of the same shape, with the same weights."
    cfg = model.cfg
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.hidden_size, intermediate_size=cfg.mlp_size, num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads, num_key_value_heads=cfg.num_kv_heads, head_dim=cfg.head_size, max_position_embeddings=cfg.max_seq_len,
        rms_norm_eps=cfg.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_base}, tie_word_embeddings=cfg.tie_embeddings, attn_implementation="sdpa", use_cache=False))
    llama.load_state_dict({llama_name(name): weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}, strict=True)
    return llama


def their_step(llama, optimizer, batch, rate: float, max_norm: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(llama(input_ids=batch.inputs).logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(llama.parameters(), max_norm)
    optimizer.step()
    return loss.item()


def compare(config: Config) -> dict[str, dict[str, list[float]]]:
    "Losses and seconds of both, step by step in turn."
    training = build_training(config, prepare_data(config), Ranks())
    llama, optim = same_llama(training.model), config.optim
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in param_groups(llama, weight_decay=optim.weight_decay)]
    optimizer = torch.optim.AdamW(groups, lr=optim.adamw_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    seen = {name: {"loss": [], "seconds": []} for name in ("ours", "transformers")}
    for step, batch in zip(range(config.train.steps), endless(training.loader)):
        began = time.perf_counter()
        set_lr(training.engine.optimizer, step, training.schedule)
        loss = training.engine.train_step(split_batch(batch, config.train.micro_batch)).loss
        between = time.perf_counter()
        theirs = their_step(llama, optimizer, batch, schedule_lr(config, step), optim.max_grad_norm)
        for name, value, seconds in (("ours", loss, between - began), ("transformers", theirs, time.perf_counter() - between)):
            seen[name]["loss"].append(value)
            seen[name]["seconds"].append(seconds)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    set_threads(None, Ranks())
    keep_freed_memory()
    config = build_config({"train": {"steps": options.steps, "dtype": "fp32"}, "optim": {"kind": "adamw"}, "data": {"document_mask": False}})
    seen = compare(config)
    tokens = config.train.global_batch * config.train.seq_len
    speed = {name: tokens / statistics.median(values["seconds"][2:]) for name, values in seen.items()}
    gap = max(abs(ours - theirs) / theirs for ours, theirs in zip(seen["ours"]["loss"], seen["transformers"]["loss"]))
    for step in sorted({0, 1, 2, *range(9, options.steps, max(1, options.steps // 10)), options.steps - 1}):
        print(f"step {step + 1:4}  ours {seen['ours']['loss'][step]:.5f}  transformers {seen['transformers']['loss'][step]:.5f}")
    print(f"largest relative difference {gap:.1e}")
    print(f"tokens/s: ours {speed['ours']:,.0f}, transformers {speed['transformers']:,.0f}, ratio {speed['ours'] / speed['transformers']:.2f}")
    report = environment_report()
    row = {"steps": options.steps, "largest_difference": gap, "tokens_per_second": speed, "ratio": speed["ours"] / speed["transformers"],
           "transformers": transformers.__version__, "torch": report.get("torch"), "cpu": report.get("cpu")}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
