"Other people's weights: against transformers and tokenizers where they are installed, against the files everywhere."

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from llm_from_scratch import export
from llm_from_scratch.checkpointing import load_run, save_checkpoint
from llm_from_scratch.config import Config, ModelConfig, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.export import check_hf, export_gguf, export_hf, import_hf, import_run, main, write_hf
from llm_from_scratch.generate import complete, generate, heal_prompt, stream
from llm_from_scratch.gguf_files import read_gguf
from llm_from_scratch.hf_weights import config_from_hf, config_to_hf, plain_tensors, read_tensors
from llm_from_scratch.launch import load_initial_weights
from llm_from_scratch.model import Transformer, permute_rotary
from llm_from_scratch.moe import build_model
from llm_from_scratch.tokenizer import StreamDecoder, Tokenizer, train_model

TEXTS = ["the cat sat on the mat\n", "a cat, the hat; that rat\n", "a <s> is 漢 text\n", "    return self.x + 1\n", "naïve é\tx\r\n"] * 9
STRANGE = ["", "  \n ", "a\r\nb", "<s> x </s> <unk> <pad> <0x41>", "🙂 漢", "\t\tx", "▁a", "é" * 5, "   leading", "trail   ", "a.b ?! ,", "the   that"]
FAMILY = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_model(TEXTS, vocab_size=320))


def build(tokenizer=None, **shape):
    shape = dict(vocab_size=tokenizer.vocab_size if tokenizer else 101, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, init_std=0.2) | shape
    torch.manual_seed(1)
    return Transformer(ModelConfig(**shape)).eval()


@pytest.fixture(scope="module")
def run_dir(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    tokenizer.save(folder / "tokenizer")
    shape = dict(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, vocab_multiple=128, rope_layout="interleaved", init_std=0.2)
    (folder / "config.yaml").write_text(to_yaml(Config(model=shape, tokenizer=dict(vocab_size=320), train=dict(seq_len=64))))
    save_checkpoint(folder / "checkpoints", {"model": build(tokenizer, **shape)}, step=3, inputs={"tokenizer": tokenizer.fingerprint})
    return folder


@pytest.fixture
def alone(monkeypatch):
    "As where neither transformers nor tokenizers is installed."
    monkeypatch.setattr(export, "find_spec", lambda name: None)


def largest(one, other):
    return float((one - other).detach().abs().max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [{}, dict(head_dim=12, rope_theta=5e5), dict(num_key_value_heads=1, rms_norm_eps=1e-5),
    dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16})])
def test_a_transformers_llama_imports_matches_and_comes_back(tied, shape, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(FAMILY | shape), tie_word_embeddings=tied, initializer_range=0.2)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours, tokenizer = import_hf(tmp_path / "theirs")
    ids = torch.randint(101, (3, 64))
    assert tokenizer is None and ours.cfg.tie_embeddings == tied
    assert largest(ours(ids), theirs(ids).logits) < 1e-4
    greedy = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = theirs.generate(ids[:1, :5], attention_mask=torch.ones(1, 5, dtype=torch.long), **greedy)[0, 5:].tolist()
    assert generate(ours, ids[:1, :5].tolist(), max_new_tokens=20, temperature=0) == [answer]
    export_hf(tmp_path / "theirs", tmp_path / "back")
    before, after = read_tensors(tmp_path / "theirs"), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert largest(again(ids).logits, theirs(ids).logits) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_mixtral_imports_matches_and_comes_back(tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(**FAMILY, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=tied, initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = import_hf(tmp_path / "theirs")
    ids = torch.randint(101, (3, 64))
    assert (ours.cfg.num_experts, ours.cfg.experts_per_token, ours.cfg.rope_base) == (3, 2, 1e6) and largest(ours(ids), theirs(ids).logits) < 1e-4
    assert export_hf(tmp_path / "theirs", tmp_path / "back").keys() == {"llm_from_scratch", "transformers"}
    before, after = read_tensors(tmp_path / "theirs"), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert largest(again(ids).logits, theirs(ids).logits) == 0


@pytest.mark.parametrize("change, complaint", [(dict(experts_per_token=1), "experts_per_token 1"), (dict(router_temperature=0.5), "router_temperature 0.5")])
def test_experts_without_a_home_are_refused(change, complaint, tmp_path):
    model = build_model(ModelConfig(vocab_size=50, hidden_size=32, num_layers=1, num_experts=3, **change))
    with pytest.raises(UserError, match=complaint): write_hf(tmp_path, model, None)


def test_a_run_with_experts_is_exported_and_comes_back(tokenizer, tmp_path, alone):
    model = build_model(ModelConfig(vocab_size=320, hidden_size=32, num_layers=2, num_experts=3, capacity_factor=1.0, rope_layout="interleaved", max_seq_len=64, init_std=0.2)).eval()
    write_hf(tmp_path, model, tokenizer)
    assert check_hf(tmp_path, model, tokenizer, "fp32")["llm_from_scratch"].max_logit < 1e-5
    import_run(tmp_path, tmp_path / "run")
    assert load_run(tmp_path / "run").model.cfg.num_experts == 3


def gguf_run(folder, tokenizer, **shape):
    "A run of an untrained model, and the model."
    shape = dict(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, vocab_multiple=64, init_std=0.2) | shape
    torch.manual_seed(2)
    model = build_model(ModelConfig(vocab_size=tokenizer.vocab_size, **shape)).eval()
    tokenizer.save(folder / "tokenizer")
    (folder / "config.yaml").write_text(to_yaml(Config(model=shape, tokenizer=dict(vocab_size=320), train=dict(seq_len=64))))
    save_checkpoint(folder / "checkpoints", {"model": model}, step=1, inputs={"tokenizer": tokenizer.fingerprint})
    return folder, model


LLAMA3 = dict(rope_scaling="llama3", rope_factor=8.0, rope_low_factor=1.0, rope_high_factor=4.0, rope_original_len=16, rope_base=100.0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_llama3_stretch_goes_into_a_gguf_file_as_factors(layout, tokenizer, tmp_path):
    pytest.importorskip("gguf")
    folder, ours = gguf_run(tmp_path / "run", tokenizer, rope_layout=layout, head_dim=16, **LLAMA3)
    assert export_gguf(folder, tmp_path / "model.gguf").max_logit < 1e-5
    fields, tensors = read_gguf(tmp_path / "model.gguf")
    factors, plain = tensors["rope_freqs.weight"], 100.0 ** (-torch.arange(8) / 8)
    for factor, frequency in zip(factors.tolist(), plain.tolist()): # as llama.cpp's converter has it
        wavelength = 2 * math.pi / frequency
        smooth = (16 / wavelength - 1) / 3
        assert factor == pytest.approx(1 if wavelength < 4 else 8 if wavelength > 16 else 1 / ((1 - smooth) / 8 + smooth), rel=1e-5)
    assert len({round(factor, 3) for factor in factors.tolist()}) > 2 and not [name for name in fields if "scaling" in name]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    ids = torch.randint(320, (2, 64))
    theirs.model.rotary_emb.inv_freq.copy_(plain / factors) # version 5 passes over the factors
    assert largest(theirs(ids).logits, ours(ids)) < 1e-4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [dict(tie_embeddings=False), dict(rope_layout="interleaved", experts_per_token=3, **LLAMA3)])
def test_experts_go_into_a_gguf_file_as_one_tensor(shape, dtype, tokenizer, tmp_path):
    gguf = pytest.importorskip("gguf")
    folder, ours = gguf_run(tmp_path / "run", tokenizer, num_experts=4, capacity_factor=1.0, **shape)
    export_gguf(folder, tmp_path / "model.gguf", dtype=dtype)
    kinds = {tensor.name: (tensor.tensor_type, tensor.shape.tolist()) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    large, width = {"fp32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}[dtype], ours.cfg.mlp_size
    assert kinds["blk.1.ffn_gate_inp.weight"] == (gguf.GGMLQuantizationType.F32, [32, 4])
    assert kinds["blk.1.ffn_gate_exps.weight"] == kinds["blk.1.ffn_up_exps.weight"] == (large, [32, width, 4])
    assert kinds["blk.1.ffn_down_exps.weight"] == (large, [width, 32, 4])
    fields, tensors = read_gguf(tmp_path / "model.gguf")
    assert (fields["llama.expert_count"], fields["llama.expert_used_count"]) == (4, ours.cfg.experts_per_token)
    for part in ("gate", "up", "down"):
        for expert in range(4):
            weight = getattr(ours.blocks[1].mlp.experts[expert], part).weight
            assert torch.equal(tensors[f"blk.1.ffn_{part}_exps.weight"][expert], weight if dtype == "fp32" else weight.bfloat16().float())


def test_experts_of_a_gguf_file_are_the_same_in_mixtral(tokenizer, tmp_path):
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    folder, ours = gguf_run(tmp_path / "run", tokenizer, num_experts=4, tie_embeddings=False)
    export_gguf(folder, tmp_path / "model.gguf")
    _, tensors = read_gguf(tmp_path / "model.gguf")
    theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{name: value for name, value in config_to_hf(ours.cfg, tokenizer).items() if name not in ("architectures", "model_type")})).eval()
    kept = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    state = {f"{theirs}.weight": tensors[f"{name}.weight"] for theirs, name in kept.items()}
    for layer in range(2):
        part = {name: tensors[f"blk.{layer}.{name}.weight"] for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")}
        for name in ("attn_q", "attn_k"): part[name] = permute_rotary(part[name], ours.cfg.head_size, source="interleaved", target="half")
        state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in {
            "input_layernorm.weight": part["attn_norm"], "post_attention_layernorm.weight": part["ffn_norm"], "self_attn.q_proj.weight": part["attn_q"],
            "self_attn.k_proj.weight": part["attn_k"], "self_attn.v_proj.weight": part["attn_v"], "self_attn.o_proj.weight": part["attn_output"],
            "mlp.gate.weight": part["ffn_gate_inp"], "mlp.experts.gate_up_proj": torch.cat([part["ffn_gate_exps"], part["ffn_up_exps"]], 1), "mlp.experts.down_proj": part["ffn_down_exps"]}.items()}
    theirs.load_state_dict(state)
    ids = torch.randint(320, (2, 64))
    assert largest(theirs(ids).logits, ours(ids)) < 1e-4


@pytest.fixture
def llama_cpp():
    "Starts llama.cpp's server on a GGUF file, inside this process."
    llama = pytest.importorskip("xllamacpp")

    def start(path):
        options = llama.CommonParams()
        options.model.path, options.n_ctx, options.n_parallel, options.port, options.verbosity = str(path), 64, 1, 0, 0
        options.warmup = options.fit_params = False
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.cache_type_k = options.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return llama.Server(options)

    return start


@pytest.mark.parametrize("dtype, limit", [("fp32", 1e-4), ("bf16", 0.1)])
@pytest.mark.parametrize("shape", [{}, LLAMA3, dict(rope_scaling="linear", rope_factor=4.0, rope_base=100.0), dict(num_experts=4, tie_embeddings=False),
    dict(num_experts=5, experts_per_token=3, head_dim=16, rope_layout="interleaved", **LLAMA3)])
def test_llama_cpp_computes_what_the_model_computes(shape, dtype, limit, tokenizer, tmp_path, llama_cpp):
    folder, ours = gguf_run(tmp_path / "run", tokenizer, **shape)
    export_gguf(folder, tmp_path / "model.gguf", dtype=dtype)
    ids = torch.randint(5, 320, (60,), generator=torch.Generator().manual_seed(5))
    answer = llama_cpp(tmp_path / "model.gguf").handle_completions({"prompt": ids.tolist(), "max_tokens": 1, "logprobs": 320, "temperature": 0.0})
    found = {token["id"]: token["logprob"] for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    meant = ours(ids[None])[0, -1].log_softmax(-1)
    assert sorted(found) == list(range(320)) and largest(torch.tensor([found[number] for number in range(320)]), meant) < limit


def test_llama_cpp_cuts_texts_as_the_tokenizer_does(tokenizer, tmp_path, llama_cpp):
    folder, _ = gguf_run(tmp_path / "run", tokenizer)
    export_gguf(folder, tmp_path / "model.gguf")
    server = llama_cpp(tmp_path / "model.gguf")
    for text in [*STRANGE, *TEXTS[:5]]:
        question = urllib.request.Request(f"{server.listening_address}/tokenize", json.dumps(dict(content=text, add_special=True, parse_special=False)).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(question, timeout=60) as answer: assert json.load(answer)["tokens"] == tokenizer.encode(text, bos=True)


@pytest.mark.parametrize("change, complaint", [(dict(experts_per_token=1), "experts_per_token 1"), (dict(router_temperature=0.5), "router_temperature 0.5")])
def test_experts_without_a_home_get_no_gguf_file(change, complaint, tokenizer, tmp_path):
    pytest.importorskip("gguf")
    folder, _ = gguf_run(tmp_path / "run", tokenizer, num_experts=3, **change)
    with pytest.raises(UserError, match=complaint): export_gguf(folder, tmp_path / "out" / "x.gguf")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("tensor", ["rope_freqs.weight", "blk.1.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_gguf_file_with_a_wrong_factor_or_expert_is_not_kept(tensor, tokenizer, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    folder, _ = gguf_run(tmp_path / "run", tokenizer, num_experts=3, **LLAMA3)
    write = export.write_gguf

    def write_badly(path, *args, **options):
        write(path, *args, **options)
        found = next(found for found in gguf.GGUFReader(path, "r+").tensors if found.name == tensor)
        found.data[...] = found.data[::-1].copy() # the last one first

    monkeypatch.setattr(export, "write_gguf", write_badly)
    with pytest.raises(UserError, match=f"{tensor} is not what was written"): export_gguf(folder, tmp_path / "out" / "x.gguf")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_exported_run_is_the_same_in_transformers(run_dir, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    found = export_hf(run_dir, tmp_path / "out")
    assert found.keys() == {"llm_from_scratch", "transformers"} and found["transformers"].max_logit < 1e-4
    model, ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), load_run(run_dir).model
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = (reader.pad_token_id, reader.unk_token_id, reader.bos_token_id, reader.eos_token_id)
    assert ids == (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id)
    for text in [*STRANGE, *TEXTS[:5]]:
        assert reader(text).input_ids == tokenizer.encode(text, bos=True)
        assert reader.decode(reader(text).input_ids, skip_special_tokens=True) == tokenizer.decode(tokenizer.encode(text))
    prompt = reader("the cat", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=15, do_sample=False)[0, prompt.input_ids.shape[1]:].tolist()
    assert generate(ours, prompt.input_ids.tolist(), max_new_tokens=15, temperature=0, eos_id=tokenizer.eos_id) == [answer]


def test_a_gguf_file_is_the_same_model_to_another_reader(run_dir, tmp_path):
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    export_gguf(run_dir, tmp_path / "model.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    ids = torch.randint(320, (2, 40))
    assert largest(model(ids).logits, load_run(run_dir).model(ids)) < 1e-4


@pytest.mark.parametrize("kind, vocab_size", [("bpe", 320), ("unigram", 290)])
def test_tokenizer_json_gives_the_same_ids(kind, vocab_size, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    export_tokenizer = Tokenizer(train_model(TEXTS, vocab_size=vocab_size, kind=kind))
    export.write_hf_tokenizer(tmp_path, export_tokenizer, 64)
    reader = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reader.encode_special_tokens = True
    for text in [*STRANGE, *TEXTS[:5]]:
        ids = reader.encode(text).ids
        assert ids == export_tokenizer.encode(text, bos=True)
        assert reader.decode(ids) == export_tokenizer.decode(ids)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [dict(vocab_multiple=1), dict(vocab_multiple=64, head_dim=10, rope_base=5e5, norm_eps=1e-6), dict(num_kv_heads=4, intermediate_size=40)])
def test_a_written_folder_reads_back_as_the_model(layout, tied, shape, tmp_path, alone):
    model = build(rope_layout=layout, tie_embeddings=tied, **shape)
    write_hf(tmp_path, model, None, max_shard_bytes=20_000)
    found = check_hf(tmp_path, model, None, "fp32")
    assert found.keys() == {"llm_from_scratch"} and found["llm_from_scratch"].max_logit < 1e-5
    assert (tmp_path / "model.safetensors.index.json").exists()
    tensors = read_tensors(tmp_path)
    assert tensors["model.embed_tokens.weight"].shape[0] == 101 and ("lm_head.weight" in tensors) != tied


@pytest.mark.parametrize("dtype, kept", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_files_of_half_the_size_round_trip_to_the_bit(dtype, kept, run_dir, tmp_path, alone):
    export_hf(run_dir, tmp_path / "one", dtype=dtype)
    model, _ = import_hf(tmp_path / "one")
    export_hf(tmp_path / "one", tmp_path / "two", dtype=dtype)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(tensor.dtype == kept and torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_what_is_not_equal_leaves_nothing_behind(run_dir, tmp_path, monkeypatch, alone):
    tensors = plain_tensors
    monkeypatch.setattr(export, "plain_tensors", lambda model, layout: tensors(model, "interleaved"))
    with pytest.raises(UserError, match="is not the model: logits differ by .* nothing was exported"):
        export_hf(run_dir, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_beyond_the_range_of_fp16_are_refused(tmp_path, alone):
    model = build()
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[0, 0] = 1e6
    write_hf(tmp_path, model, None, dtype="fp16")
    with pytest.raises(UserError, match="nan nats a token"):
        check_hf(tmp_path, model, None, "fp16")


def test_a_damaged_gguf_file_is_not_kept(run_dir, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    write = export.write_gguf

    def write_badly(path, *args, **options):
        write(path, *args, **options)
        data = bytearray(path.read_bytes())
        data[-40] ^= 64
        path.write_bytes(data)

    monkeypatch.setattr(export, "write_gguf", write_badly)
    with pytest.raises(UserError, match="is not what was written; nothing was exported"):
        export_gguf(run_dir, tmp_path / "out" / "model.gguf")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("change, complaint", [
    (dict(model_type="qwen2"), "model_type 'qwen2' is not Llama-shaped"),
    (dict(attention_bias=True), "attention_bias True"),
    (dict(mlp_bias=True), "mlp_bias True"),
    (dict(hidden_act="gelu"), "hidden_act gelu"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    (dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "yarn"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5"),
    (dict(num_key_value_heads=3), "num_heads 4 is not divisible by num_kv_heads 3"),
    (dict(hidden_size="wide"), "hidden_size"),
    (dict(num_hidden_layers="2"), "num_hidden_layers '2' is no whole number, but a str"),
    (dict(num_hidden_layers=True), "num_hidden_layers 'True' is no whole number, but a bool"),
    (dict(tie_word_embeddings="false"), "tie_word_embeddings 'false' is no true or false, but a str"),
    (dict(rms_norm_eps="1e-5"), "rms_norm_eps '1e-5' is no number, but a str"),
    (dict(vocab_size=50), None),
])
def test_another_architecture_is_named_in_one_line(change, complaint, tmp_path):
    fields = config_to_hf(build().cfg) | change
    if complaint is None:
        with pytest.raises(UserError, match="below the tokenizer's 60 pieces"):
            config_from_hf(fields, 60)
        return
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=complaint) as error:
        import_hf(tmp_path)
    assert "\n" not in str(error.value) and "config.json" in str(error.value)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    model = build(tie_embeddings=False)
    write_hf(tmp_path, model, None)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for change, complaint in ((lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"), (lambda t: t.update(extra=torch.ones(2)), "extra is unknown"),
                              (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"model.norm.weight is \(5,\), but \(32,\)")):
        changed = dict(tensors)
        change(changed)
        save_file(changed, path)
        with pytest.raises(UserError, match=complaint):
            import_hf(tmp_path)


@pytest.mark.parametrize("positions", ["alibi", "none"])
def test_positions_without_a_home_are_refused(positions, tmp_path):
    with pytest.raises(UserError, match=f"positions {positions}: Llama's format has a home for rope only"):
        write_hf(tmp_path, build(positions=positions), None)


def test_mod_8_padded_rows_are_cut_on_the_way_out_and_kept_silent_on_the_way_in(tokenizer, tmp_path, alone):
    model = build(tokenizer, vocab_multiple=128)
    with torch.no_grad():
        model.head.weight[320:] = 100.0
    write_hf(tmp_path, model, tokenizer)
    assert read_tensors(tmp_path)["model.embed_tokens.weight"].shape[0] == 320
    wide = build(vocab_size=384)
    with torch.no_grad():
        wide.head.weight[320:] = 100.0
    write_hf(tmp_path, wide, tokenizer)
    imported, _ = import_hf(tmp_path)
    assert (imported.cfg.vocab_size, imported.embedding.weight.shape[0]) == (320, 384)
    for options in (dict(temperature=0), dict(top_k=5), dict(top_p=0.9), dict(temperature=5.0)):
        assert max(map(max, generate(imported, [[2, 9]] * 4, max_new_tokens=20, seed=0, **options))) < 320


def test_an_imported_run_generates_and_exports(run_dir, tmp_path, alone):
    export_hf(run_dir, tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "run")
    one, other = load_run(run_dir), load_run(tmp_path / "run")
    ids = [one.tokenizer.encode("the cat", bos=True)]
    assert generate(one.model, ids, max_new_tokens=9, temperature=0) == generate(other.model, ids, max_new_tokens=9, temperature=0)
    assert (other.step, other.tokenizer.fingerprint) == (0, one.tokenizer.fingerprint)


@pytest.mark.parametrize("arguments, complaint", [
    (["hf", "nowhere", "out"], "nowhere is not a run"),
    (["hf", "nowhere", "."], "exists already"),
    (["gguf", "nowhere", "out.gguf", "--dtype", "q8"], "invalid choice: 'q8'"),
    (["import", "nowhere", "out"], "nowhere has no config.json"),
    ([], "{hf,gguf,import}"),
])
def test_command_names_what_is_wrong(arguments, complaint):
    with pytest.raises(UserError, match=complaint):
        main(arguments)


def test_command_errors_are_one_line_with_exit_code_2(command, tmp_path):
    code, out, err = command("export", "hf", tmp_path / "nowhere", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.fixture(scope="module")
def llama_tokenizer():
    "As Llama 2's: a space in front, no padding, ids in their default places."
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", vocab_size=310, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, minloglevel=2)
    return model.getvalue()


def test_a_llama_tokenizer_is_taken_and_handed_back(llama_tokenizer, tmp_path, alone):
    write_hf(tmp_path, build(vocab_size=320), None)
    (tmp_path / "tokenizer.model").write_bytes(llama_tokenizer)
    model, tokenizer = import_hf(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_proto=llama_tokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    for text in STRANGE:
        assert tokenizer.encode(text) == reference.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    import_run(tmp_path, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == load_run(tmp_path / "run").tokenizer.model
    tokenizers = pytest.importorskip("tokenizers")
    reader = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    reader.encode_special_tokens = True
    for text in [*STRANGE, *TEXTS[:5]]:
        assert reader.encode(text).ids == tokenizer.encode(text, bos=True)
        assert reader.decode(reader.encode(text).ids) == tokenizer.decode(tokenizer.encode(text))


def test_a_llama_tokenizer_streams_and_heals_with_its_spaces(llama_tokenizer):
    tokenizer = Tokenizer(llama_tokenizer)
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, tokenizer.encode("the cat  sat 漢"))) + decoder.flush() == " the cat  sat 漢"
    for prompt in ("the cat", "the ca", " the", "the ", "", "漢 sa", "a  c"):
        ids, tail = heal_prompt(tokenizer, prompt)
        assert tokenizer.decode(ids) + tail == prompt
    model = build(vocab_size=310)
    texts = complete(model, tokenizer, "the ca", max_new_tokens=9, seed=0)
    assert all(text.startswith("the ca") for text in texts)
    assert "".join(stream(model, tokenizer, "the ca", max_new_tokens=9, seed=0)) == texts[0][len("the ca"):]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_in_the_wrong_layout_are_noticed_on_fresh_weights_in_every_type(tmp_path, monkeypatch, dtype):
    model = build(init_std=0.02, rope_layout="interleaved") # attention is almost flat: nothing shows in the probabilities
    monkeypatch.setattr(export, "plain_tensors", lambda model, layout: plain_tensors(model, "interleaved"))
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    (tmp_path / "out").mkdir()
    write_hf(tmp_path / "out", model, None, dtype=dtype)
    with pytest.raises(UserError, match="is not the model"): check_hf(tmp_path / "out", model, None, dtype)


@pytest.mark.parametrize("change", [dict(hidden_size=10_000_000), dict(num_hidden_layers=10_000_000), dict(intermediate_size=10**9), dict(vocab_size=10**12)])
def test_a_model_that_the_files_do_not_hold_is_refused_before_it_is_built(change, tokenizer, tmp_path, monkeypatch):
    write_hf(tmp_path, build(tokenizer), tokenizer)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    monkeypatch.setattr(export, "build_model", lambda cfg: pytest.fail("a model was built"))
    with pytest.raises(UserError, match="does not fit its config.json|asks for 10,000,000 layers"):
        import_hf(tmp_path)


def test_an_import_is_gated_by_what_was_written_and_by_transformers(tokenizer, tmp_path, monkeypatch, capsys):
    (tmp_path / "theirs").mkdir()
    write_hf(tmp_path / "theirs", build(tokenizer), tokenizer)
    monkeypatch.setattr(export, "transformers_logits", lambda folder, ids: None)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "one")]) == 0
    out = capsys.readouterr().out
    assert "the run: logits differ by 0.0e+00 at most" in out and "transformers: not installed, and so not asked" in out and "imported 2 layers" in out
    monkeypatch.setattr(export, "transformers_logits", lambda folder, ids: torch.zeros(*ids.shape, 320))
    with pytest.raises(UserError, match="what transformers reads is not the model: .* nothing was imported"):
        import_run(tmp_path / "theirs", tmp_path / "two")
    monkeypatch.setattr(export, "transformers_logits", lambda folder, ids: None)
    whole = export.load_run
    def damaged(path):
        run = whole(path)
        with torch.no_grad(): run.model.blocks[0].attention.query.weight.neg_()
        return run
    monkeypatch.setattr(export, "load_run", damaged)
    with pytest.raises(UserError, match="what the run reads is not the model: .* nothing was imported"):
        import_run(tmp_path / "theirs", tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "theirs"]


def test_weights_that_are_no_numbers_are_named_before_anything_is_written(tokenizer, tmp_path, alone):
    model = build(tokenizer)
    with torch.no_grad(): model.final_norm.weight[3] = float("nan")
    write_hf(tmp_path, model, tokenizer)
    with pytest.raises(UserError, match="1 of 32 values of model.norm.weight are NaN or infinite"):
        import_run(tmp_path, tmp_path / "run")


def test_what_transformers_refuses_is_one_line(tokenizer, tmp_path):
    pytest.importorskip("transformers")
    write_hf(tmp_path, build(tokenizer), tokenizer)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"attention_dropout": "none"}))
    with pytest.raises(UserError, match=r"^transformers can't read [^\n]*attention_dropout[^\n]*$"):
        import_run(tmp_path, tmp_path / "run")


@pytest.mark.parametrize("file, content", [(None, {}), ("added_tokens.json", {"<tool>": 320}), ("tokenizer.json", {"added_tokens": [{"id": 1}, {"id": 321}]})])
def test_rows_without_a_piece_are_told_of(tokenizer, tmp_path, warnings_said, file, content):
    write_hf(tmp_path, build(vocab_size=328), tokenizer)
    (tmp_path / "tokenizer.json").unlink()
    if file: (tmp_path / file).write_text(json.dumps(content))
    model, _ = import_hf(tmp_path)
    load_initial_weights(str(tmp_path), model)
    lines = [f"8 rows of the embedding have no piece and are left out{f'; {tmp_path / file} names what they stand for' if file else ''}"]
    assert warnings_said == lines * 2


def test_weights_of_an_integer_type_are_refused(tmp_path):
    write_hf(tmp_path, build(), None)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="model.norm.weight is of int8"): import_hf(tmp_path)


def test_an_import_without_a_tokenizer_is_one_line(tmp_path, caplog, monkeypatch):
    write_hf(tmp_path, build(), None)
    monkeypatch.setattr(logging.getLogger("llm_from_scratch"), "propagate", True)
    with pytest.raises(UserError, match="has no tokenizer.model; a run needs the model's tokenizer") as error:
        main(["import", str(tmp_path), str(tmp_path / "out")])
    assert str(error.value).endswith("the model's tokenizer") and "import_hf" not in str(error.value) and not caplog.records


@pytest.mark.parametrize("action", ["hf", "gguf", "import"])
def test_what_a_killed_export_left_is_gone_after_the_next(action, run_dir, tmp_path, alone):
    if action == "gguf": pytest.importorskip("gguf")
    export_hf(run_dir, tmp_path / "theirs")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mark = re.search(r"-\d+-([0-9a-f]{8})", export._temporary_sibling(tmp_path / "out").name)[1]
    left = [tmp_path / f".out.tmp-{ended.pid}-{mark}12345678", tmp_path / f".out.tmp-{os.getpid()}-{mark}12345678"]
    for path in left: path.mkdir()
    assert main([action, str(tmp_path / "theirs"), str(tmp_path / "out")]) == 0
    assert [path.exists() for path in left] == [False, True] # the second one's process lives


def test_ids_of_a_bpe_vocabulary_must_agree_in_order(tokenizer, tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    export.write_hf_tokenizer(tmp_path, tokenizer, 64)
    class Backwards:
        def __init__(self, reader): self.reader = reader
        def encode(self, text): return SimpleNamespace(ids=self.reader.encode(text).ids[::-1])
    whole = tokenizers.Tokenizer.from_file
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_file=lambda path: Backwards(whole(path))))
    with pytest.raises(UserError, match="it cuts .* otherwise"):
        export.require_same_ids(tmp_path, tokenizer)


@pytest.mark.parametrize("index, words", [('{"weight_map": {}}', "no weight_map"), ('{"weight_map": {"a": "../a.safetensors"}}', "is no file of its folder"), ('{"weight_map": {"a": "/a.safetensors"}}', "is no file of its folder")])
def test_an_index_that_names_nothing_here_is_one_line(tmp_path, index, words):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=words): read_tensors(tmp_path)


def test_a_folder_in_the_place_of_the_weights_is_one_line(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UserError, match="has no file model.safetensors"): read_tensors(tmp_path)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": null}', '{"weight_map": {"a": 3}}', "{}"])
def test_an_index_that_names_no_files_is_one_line(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="no weight_map"): read_tensors(tmp_path)


@pytest.mark.parametrize("odd", [{"rope_theta": None}, {"rope_scaling": [1]}, {"vocab_size": "50"}, {"rope_scaling": {"type": "linear", "factor": "x"}}])
def test_a_configuration_with_values_of_the_wrong_kind_is_one_line(odd):
    with pytest.raises(UserError, match="^config.json: "): config_from_hf({"model_type": "llama", **FAMILY, **odd}, num_pieces=None if "vocab_size" not in odd else 50)
