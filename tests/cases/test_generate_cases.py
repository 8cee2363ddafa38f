"Sampling, the cache, batches and streaming: EVAL-5..7, MOD-8, TOK-10, and the command's errors."

import math
import sys

import pytest
import torch
from torch import nn

from llm_from_scratch.checkpointing import save_checkpoint
from llm_from_scratch.config import Config, ModelConfig, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.generate import (
    Respelling,
    Sampling,
    complete,
    evaluation_mode,
    filter_logits,
    generate,
    generate_steps,
    heal_prompt,
    left_pad,
    main,
    penalize_repeats,
    sample_next,
    stream,
)
from llm_from_scratch.model import KVCache, Transformer
from llm_from_scratch.tokenizer import Tokenizer

LINES = ["def add(first, second):", "    return first + second", "for item in names:", "    print(item)"]


def small_model(**options):
    torch.manual_seed(0)
    shape = dict(vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, init_std=0.2)
    return Transformer(ModelConfig(**{**shape, **options}))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = ["\n".join(LINES[i % 4] for i in range(n, n + 8)) for n in range(60)]
    return Tokenizer.train(texts, vocab_size=340, out=tmp_path_factory.mktemp("tokenizer") / "t")


def num_kept(probs, **options):
    return int(filter_logits(torch.tensor(probs).log(), **options).isfinite().sum())


class Scripted(nn.Module):
    "Gives row r the id script[r][call]; remembers what it was fed."

    def __init__(self, script, vocab_size=10, max_seq_len=64):
        super().__init__()
        self.script, self.fed, self.embedding = torch.tensor(script), [], nn.Embedding(1, 1)
        self.cfg = ModelConfig(vocab_size=vocab_size, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, max_seq_len=max_seq_len)

    def forward(self, ids, **ignored):
        self.fed.append(ids.tolist())
        wanted = self.script[:, len(self.fed) - 1, None].expand(ids.shape)
        return nn.functional.one_hot(wanted, self.cfg.vocab_size).float()


def test_eval_5_the_nucleus_keeps_the_crossing_token_and_no_more():
    assert [num_kept([0.5, 0.25, 0.25], top_p=p) for p in (0.5, 0.6, 1.0)] == [1, 2, 3]
    assert num_kept([0.5, 0.25, 0.125, 0.125], top_p=0.75) == 2
    assert num_kept([0.9, 0.1], top_p=0.5) == 1
    assert num_kept([0.5, 0.25, 0.25], top_p=0.0) == 1
    assert num_kept([0.5, 0.25, 0.25], top_k=1, top_p=0.8) == 1


def test_eval_5_top_k_keeps_exactly_k_among_equals():
    assert [num_kept([0.25] * 4, top_k=k) for k in (1, 2, 3, 4, 99)] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_eval_5_the_kept_set_is_the_smallest_that_reaches_p(top_p):
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(1)) * 3
    probs = logits.double().softmax(-1)
    kept = filter_logits(logits, top_p=top_p).isfinite()
    mass = (probs * kept).sum(-1)
    smallest_kept = probs.masked_fill(~kept, math.inf).amin(-1)
    largest_dropped = probs.masked_fill(kept, 0).amax(-1)
    assert (mass >= top_p - 2e-6).all()
    assert (mass - smallest_kept < top_p).all()
    assert (smallest_kept >= largest_dropped).all()


def test_eval_5_top_p_one_still_samples_and_zero_is_greedy():
    row = torch.tensor([[1.0, 0.5, 0.0]]).expand(500, 3)
    chance = torch.Generator().manual_seed(0)
    assert set(sample_next(row, top_p=1.0, generator=chance).tolist()) == {0, 1, 2}
    for options in (dict(top_p=0.0), dict(top_k=1), dict(temperature=0), dict(top_k=1, top_p=0.8)):
        assert set(sample_next(row, generator=chance, **options).tolist()) == {0}


@pytest.mark.parametrize("options", [dict(temperature=-0.1), dict(temperature=math.inf), dict(top_k=0), dict(top_p=-0.1), dict(top_p=1.01)])
def test_eval_5_options_without_a_meaning_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        sample_next(torch.zeros(1, 3), **options)


def test_repetition_penalty_lowers_positive_and_negative_logits():
    seen = torch.tensor([[True, True, False]])
    assert penalize_repeats(torch.tensor([[2.0, -2.0, 1.0]]), seen, 2.0).tolist() == [[1.0, -4.0, 1.0]]


def test_repetition_penalty_counts_prompt_and_answer_but_no_padding(monkeypatch):
    seen_rows = []

    def peek(logits, seen, penalty):
        seen_rows.append([row.nonzero().flatten().tolist() for row in seen])
        return logits

    monkeypatch.setattr("llm_from_scratch.generate.penalize_repeats", peek)
    generate(Scripted([[7] * 8, [8] * 8]), [[1, 5], [2]], max_new_tokens=2, temperature=0, pad_id=5)
    assert seen_rows == [[[1, 5], [2]], [[1, 5, 7], [2, 8]]]


@torch.inference_mode()
def uncached(model, prompt, max_new_tokens):
    ids, rows = list(prompt), []
    for _ in range(max_new_tokens):
        rows.append(model(torch.tensor([ids]))[0, -1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_eval_6_left_padded_cached_batch_equals_single_uncached_runs(positions, layout):
    model = small_model(positions=positions, rope_layout=layout).eval()
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]]
    expected = [uncached(model, prompt, 10) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=10, temperature=0) == [ids for ids, _ in expected]
    tokens, places, doc_ids = left_pad(prompts)
    cfg = model.cfg
    with torch.inference_mode():
        cache = KVCache(cfg.num_layers, 2, 17, cfg.num_kv_heads, cfg.head_size, torch.float32, torch.device("cpu"))
        logits = model(tokens, positions=places, doc_ids=doc_ids, cache=cache)[:, -1]
        for step in range(10):
            wanted = torch.stack([rows[step] for _, rows in expected])
            assert (logits - wanted).abs().max() <= 1e-4
            new = torch.tensor([[ids[step]] for ids, _ in expected])
            if step < 9:
                logits = model(new, positions=places[:, -1:] + step + 1, doc_ids=torch.zeros_like(new), cache=cache)[:, -1]


def test_eval_6_a_batch_of_many_lengths_equals_its_single_prompts():
    model = small_model()
    prompts = [[1 + n + k for k in range(n)] for n in (1, 2, 5, 11, 11, 30)]
    together = generate(model, prompts, max_new_tokens=6, temperature=0)
    assert together == [generate(model, [prompt], max_new_tokens=6, temperature=0)[0] for prompt in prompts]


def test_eval_6_an_answer_beyond_the_window_is_refused_unless_positions_extrapolate():
    prompt = list(range(1, 60))
    assert len(generate(small_model(), [prompt], max_new_tokens=5, temperature=0)[0]) == 5
    with pytest.raises(UserError, match="needs 65 positions, the model has 64"):
        generate(small_model(), [prompt], max_new_tokens=6)
    assert len(generate(small_model(positions="alibi"), [prompt], max_new_tokens=20, temperature=0)[0]) == 20


def test_eval_7_rows_end_by_themselves_and_the_batch_with_the_last():
    eos, pad = 3, 0
    model = Scripted([[eos, 9, 9, 9], [5, 6, eos, 9]])
    answers = generate(model, [[1], [2]], max_new_tokens=10, eos_id=eos, pad_id=pad, temperature=0)
    assert answers == [[eos], [5, 6, eos]]
    assert model.fed == [[[1], [2]], [[eos], [5]], [[pad], [6]]]


def test_eval_7_without_an_eos_the_limit_ends_all_rows():
    model = Scripted([[3, 9, 9, 9], [5, 6, 3, 9]])
    assert generate(model, [[1], [2]], max_new_tokens=4, temperature=0) == [[3, 9, 9, 9], [5, 6, 3, 9]]
    assert len(model.fed) == 4


def test_mod_8_no_padded_vocabulary_row_is_ever_sampled():
    model = small_model(vocab_size=1003, vocab_multiple=64, tie_embeddings=False, max_seq_len=256)
    heads = [p for p in model.parameters() if p.ndim == 2 and p.size(0) == 1024]
    assert heads
    with torch.no_grad():
        for weight in heads:
            weight[1003:] = 100.0
    for options in (dict(temperature=0), dict(top_k=5), dict(top_p=0.9), dict(temperature=5.0)):
        rows = generate(model, [[1, 2]] * 8, max_new_tokens=20, seed=0, **options)
        assert max(map(max, rows)) < 1003


def test_seeds_reproduce_and_leave_the_global_state_alone():
    model = small_model()
    before = torch.random.get_rng_state()
    one, two, other = (generate(model, [[1], [2, 3]], max_new_tokens=12, seed=seed) for seed in (7, 7, 8))
    assert one == two != other
    assert torch.equal(before, torch.random.get_rng_state())


def test_generation_restores_the_model_and_the_callers_mode():
    model = small_model()
    steps = generate_steps(model, [[1]], max_new_tokens=3)
    next(steps)
    assert not torch.is_inference_mode_enabled()
    list(steps)
    assert model.training
    with pytest.raises(RuntimeError, match="inside"):
        with evaluation_mode(model):
            raise RuntimeError("inside")
    assert model.training


@pytest.mark.parametrize("prompts, complaint", [([[1], []], "prompt 1 has no token"), ([[97]], "vocabulary of 97"), ([[-1]], "vocabulary of 97")])
def test_prompts_without_a_meaning_are_refused_by_number(prompts, complaint):
    with pytest.raises(UserError, match=complaint):
        generate(small_model(), prompts, max_new_tokens=2)


def test_a_diverged_model_is_named_and_not_sampled():
    model = small_model()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        generate(model, [[1]], max_new_tokens=1)


def test_tok_10_the_stream_emits_nothing_until_the_third_byte(tokenizer):
    ids = tokenizer.encode("漢")
    assert len(ids) == 3 and tokenizer.decode(ids) == "漢"
    model = Scripted([ids + [tokenizer.eos_id]], tokenizer.vocab_size)
    seen = []
    for piece in stream(model, tokenizer, "x", max_new_tokens=9, temperature=0, heal=False):
        seen.append((piece, len(model.fed)))
    assert seen == [("漢", 3)]
    assert len(model.fed) == 4


def test_tok_10_a_stream_equals_the_decoded_answer(tokenizer):
    for text in ("a 漢字 b\n", "🙂", "naïve\n\tx  y", "é" * 5):
        ids = tokenizer.encode(text)
        model = Scripted([ids + [tokenizer.eos_id]], tokenizer.vocab_size)
        pieces = list(stream(model, tokenizer, "x", max_new_tokens=len(ids) + 5, temperature=0, heal=False))
        assert "".join(pieces) == text and all(pieces)


@pytest.mark.parametrize("prompt", ["return", "return ", "    ret", "item in na", "x = 漢", "", "é"])
def test_a_healed_prompt_lacks_only_its_tail(tokenizer, prompt):
    ids, tail = heal_prompt(tokenizer, prompt)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) + tail == prompt


def test_a_healed_prompt_is_continued_without_a_gap_or_a_repeat(tokenizer):
    ids, tail = heal_prompt(tokenizer, "    return")
    assert tail
    whole = tokenizer.encode("    return first + x", bos=True)
    assert whole[: len(ids)] == ids
    model = Scripted([whole[len(ids) :] + [tokenizer.eos_id]], tokenizer.vocab_size)
    assert "".join(stream(model, tokenizer, "    return", max_new_tokens=30, temperature=0)) == " first + x"


def test_respelling_allows_the_old_spelling_and_forbids_another_text():
    respell = Respelling(["", "a", "ab", "abc", "b", "c", "\ufffd"], "ab", num_rows=2)
    assert respell.mask(torch.zeros(2, 7)).isfinite()[0].tolist() == [False, True, True, True, False, False, False]
    respell.take([1, 3])
    assert respell.mask(torch.zeros(2, 7)).isfinite().sum(1).tolist() == [1, 7]
    respell.take([4, 0])
    assert respell.left == ["", ""]


def test_completions_begin_with_the_prompt_and_end_with_the_window(tokenizer):
    model = small_model(vocab_size=tokenizer.vocab_size)
    for prompt in ("    return", "def ", "x = 漢", "", "a\n" * 20):
        for max_new_tokens in (1, 5, 999):
            texts = complete(model, tokenizer, prompt, count=3, max_new_tokens=max_new_tokens, seed=1)
            assert len(texts) == 3 and all(text.startswith(prompt) for text in texts)
            assert texts == complete(model, tokenizer, prompt, count=3, max_new_tokens=max_new_tokens, seed=1)
    with pytest.raises(UserError, match="shorten it"):
        complete(model, tokenizer, "a\n" * 99, max_new_tokens=5)


def test_completions_spell_the_healed_end_once_and_leave_eos_out(tokenizer):
    ids, tail = heal_prompt(tokenizer, "    return")
    whole = tokenizer.encode("    return first + x", bos=True)
    model = Scripted([whole[len(ids) :] + [tokenizer.eos_id]], tokenizer.vocab_size)
    assert tail and complete(model, tokenizer, "    return", max_new_tokens=30, temperature=0) == ["    return first + x"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    tokenizer = Tokenizer.train([f"def f{n}(x):\n    return x + {n}\n" for n in range(200)], vocab_size=300, out=folder / "tokenizer")
    config = Config(model=dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, max_seq_len=64), tokenizer=dict(vocab_size=300), train=dict(seq_len=32))
    (folder / "config.yaml").write_text(to_yaml(config))
    torch.manual_seed(0)
    model = Transformer(config.model.model_copy(update={"vocab_size": 300}))
    save_checkpoint(folder / "checkpoints", {"model": model}, step=7, inputs={"tokenizer": tokenizer.fingerprint})
    return folder


def test_command_streams_text_and_tells_the_speed_apart_from_it(run_dir, capsys):
    arguments = ["--run-dir", str(run_dir), "--prompt", "def f", "--max-new-tokens", "12", "--seed", "3"]
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert first.out.startswith("def f") and "tokens/s" in first.err and "tokens/s" not in first.out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first.out
    assert main(["--run-dir", str(run_dir), "--prompt", "def f(x):\n" * 4]) == 0


def test_command_refuses_an_answer_beyond_the_window(run_dir):
    with pytest.raises(UserError, match="the model has 64"):
        main(["--run-dir", str(run_dir), "--prompt", "def f", "--max-new-tokens", "100"])


def test_command_errors_are_one_line_with_exit_code_2(command, tmp_path):
    code, out, err = command("generate", "--run-dir", tmp_path / "nowhere", "--prompt", "x")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "nowhere" in err


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--run-dir", "x", "--max-new-token", "3"], "did you mean '--max-new-tokens'"),
        (["--prompt", "x"], "--run-dir is missing"),
        (["--run-dir", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["--run-dir", "x", "--top-k", "many"], "--top-k"),
        (["--run-dir", "x", "--seed", "-1"], "seed is -1"),
        (["--run-dir", "x", "--seed", str(2**64)], "seed is"),
        (["--run-dir", ""], "--run-dir is empty"),
    ],
)
def test_command_names_what_is_wrong(arguments, complaint):
    with pytest.raises(UserError, match=complaint):
        main(arguments)


def test_command_refuses_a_run_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match=tmp_path.name):
        main(["--run-dir", str(tmp_path), "--prompt", "x"])


def test_a_closed_or_binary_standard_input_is_one_line(command, run_dir, monkeypatch):
    with open(run_dir / "checkpoints" / "step_00000007" / "model.safetensors", encoding="utf-8") as binary:
        for given in (None, binary):  # what Python makes of `<&-` is None
            monkeypatch.setattr(sys, "stdin", given)
            code, _, err = command("generate", "--run-dir", run_dir, "--prompt", "-")
            assert (code, err.count("\n")) == (2, 1), err
            assert err.startswith("error: --prompt - reads standard input, which is closed or not UTF-8")


def test_healing_looks_at_the_end_of_a_long_prompt_only(tokenizer, monkeypatch):
    prompt = "".join(f"{line}\n" for line in LINES * 700) + "    return"
    num_ids, short = len(tokenizer.encode(prompt)), heal_prompt(tokenizer, "    return")
    decoded = []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, **place: decoded.append(len(ids)) or decode(self, ids, **place))
    ids, tail = heal_prompt(tokenizer, prompt)
    assert num_ids > 10_000 and tail == short[1]
    assert sum(decoded) < num_ids
    model = small_model(vocab_size=tokenizer.vocab_size)
    with pytest.raises(UserError, match="shorten it"):
        next(stream(model, tokenizer, prompt, max_new_tokens=1))


def test_one_group_of_options_serves_every_way_to_draw(tokenizer):
    model, options = small_model(vocab_size=tokenizer.vocab_size), dict(temperature=0.7, top_k=9, top_p=0.9, repetition_penalty=1.2, seed=5)
    ids = [tokenizer.encode("def ", bos=True)]
    row = generate(model, ids, max_new_tokens=12, **options)[0]
    steps = generate_steps(model, ids, max_new_tokens=12, sampling=Sampling(**options))
    assert [step[0] for step in steps] == row
    text = "".join(stream(model, tokenizer, "def ", max_new_tokens=12, heal=False, **options))
    assert text == tokenizer.decode(generate(model, ids, max_new_tokens=12, eos_id=tokenizer.eos_id, **options)[0])
    with pytest.raises(TypeError, match="temprature"):
        complete(model, tokenizer, "def ", max_new_tokens=3, temprature=1.0)


@pytest.mark.parametrize("option", [{"temperature": 1e-320}, {"top_k": 2.0}, {"repetition_penalty": 1e-320}, {"repetition_penalty": 1e40}])
def test_options_that_no_float_can_divide_by_are_refused(option):
    with pytest.raises(UserError, match=f"^{next(iter(option))} is "): Sampling(**option)
