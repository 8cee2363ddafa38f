"Perplexity, windows, bits a byte and code completion: EVAL-2..4, and the command."

import ast
import inspect
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llm_from_scratch.checkpointing import save_checkpoint
from llm_from_scratch.config import Config, ModelConfig, to_yaml
from llm_from_scratch.dataloader import Batch
from llm_from_scratch.env import UserError
from llm_from_scratch.eval import (
    Perplexity,
    bits_per_byte,
    complete_function,
    count_words,
    evaluate_loader,
    evaluate_text,
    is_python,
    main,
    perplexity,
    plan_windows,
    read_text,
    syntax_rate,
)
from llm_from_scratch.model import Transformer
from llm_from_scratch.tokenizer import Tokenizer

CPU = torch.device("cpu")


class Chosen(nn.Module):
    "Costs 1 nat for the target 1 and 3 nats for the target 2, whatever it reads."

    cfg = SimpleNamespace(positions="rope", max_seq_len=8, vocab_size=3)

    def forward(self, ids, **ignored):
        probs = torch.tensor([1 - math.exp(-1) - math.exp(-3), math.exp(-1), math.exp(-3)])
        return probs.log().expand(*ids.shape, 3)


class Recorder(nn.Module):
    "Uniform over its vocabulary unless the row begins with BOS 1, then nearly sure of id + 1; remembers the rows."

    def __init__(self, window=10, vocab_size=16):
        super().__init__()
        self.cfg, self.rows = SimpleNamespace(positions="rope", max_seq_len=window, vocab_size=vocab_size), []

    def forward(self, ids, **ignored):
        self.rows += ids.tolist()
        sure = nn.functional.one_hot((ids - 1) % (self.cfg.vocab_size - 2) + 2, self.cfg.vocab_size) * 6.0
        return sure * (ids[:, :1] == 1)[..., None]


def cyclic_text(num_tokens, vocab_size=16):
    return (torch.arange(num_tokens) % (vocab_size - 2) + 2).tolist()


def small_model(**options):
    torch.manual_seed(0)
    shape = dict(vocab_size=31, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=16, init_std=0.2)
    return Transformer(ModelConfig(**{**shape, **options}))


def padded(rows, side):
    width = max(len(row) for row in rows)

    def fill(row, value):
        pad = [value] * (width - len(row))
        return pad + row if side == "left" else row + pad

    inputs = torch.tensor([fill(row[:-1] + [0], 0) for row in rows])
    targets = torch.tensor([fill(row[1:] + [-100], -100) for row in rows])
    doc_ids = torch.tensor([fill([0] * len(row), -1) for row in rows])
    positions = torch.tensor([fill(list(range(len(row))), 0) for row in rows])
    return Batch(inputs=inputs, targets=targets, positions=positions, doc_ids=doc_ids, row_ids=torch.arange(len(rows)))


def test_eval_2_token_word_and_byte_figures_are_kept_apart():
    measured = Perplexity(12 * math.log(2), 12)
    assert measured.token_ppl == pytest.approx(2.0)
    assert measured.per_word(6) == pytest.approx(4.0)
    assert measured.bits_per_byte(24) == pytest.approx(0.5)


def test_eval_2_words_are_those_of_the_file():
    assert count_words("M @-@ 82 ends , at a junction .") == 9
    assert count_words("M-82 ends, at a junction.") == 5


def test_eval_2_bits_per_byte_of_a_split_uses_its_own_tokens_a_byte():
    shards = SimpleNamespace(num_tokens=1200, num_bytes=4800)
    for num_scored in (1200, 600, 12):
        assert bits_per_byte(num_scored * 2 * math.log(2), num_scored, shards) == pytest.approx(0.5)
    with pytest.raises(UserError, match="no token was scored"):
        bits_per_byte(0.0, 0, shards)


@pytest.mark.parametrize("side", ["left", "right"])
def test_eval_3_padding_is_not_scored_and_tokens_are_averaged(side):
    rows = [[0] + [1] * 2, [0] + [2] * 6]
    for batches in ([padded(rows, side)], [padded([row], side) for row in rows]):
        nll_sum, num_tokens = evaluate_loader(Chosen(), batches, CPU)
        assert num_tokens == 8
        assert math.exp(nll_sum / num_tokens) == pytest.approx(12.182, abs=1e-3)


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_eval_3_a_real_model_gives_one_sum_for_every_batch_and_side(positions):
    model = small_model(positions=positions)
    rows = [[(7 * n + k) % 31 for k in range(n)] for n in (3, 5, 12, 16)]
    sums = [evaluate_loader(model, [padded(rows, side)], CPU) for side in ("left", "right")]
    sums.append(evaluate_loader(model, [padded([row], "right") for row in rows], CPU))
    assert {num_tokens for _, num_tokens in sums} == {2 + 4 + 11 + 15}
    assert max(nll for nll, _ in sums) - min(nll for nll, _ in sums) < 1e-3
    assert model.training


def test_eval_3_nothing_to_score_gives_zero_sums():
    assert evaluate_loader(Chosen(), [], CPU) == (0.0, 0)


def test_eval_4_each_window_begins_with_one_bos_that_is_not_scored():
    text = cyclic_text(27)
    for stride in (1, 4, 9, 10):
        model = Recorder()
        result = perplexity(model, text, window=10, stride=stride, bos_id=1)
        assert result.num_tokens == 27
        assert all(row[0] == 1 and row.count(1) == 1 and len(row) <= 10 for row in model.rows)


def test_eval_4_a_text_that_brings_its_bos_gets_no_second_one():
    model = Recorder()
    with_own = perplexity(model, [1] + cyclic_text(27), window=10, stride=10, bos_id=1)
    assert with_own == perplexity(Recorder(), cyclic_text(27), window=10, stride=10, bos_id=1)
    assert all(row.count(1) == 1 for row in model.rows)


def test_eval_4_bos_in_the_first_window_only_is_far_worse():
    text = cyclic_text(28)
    each = perplexity(Recorder(), text, window=10, stride=10, bos_id=1)
    first_only = perplexity(Recorder(), [1] + text, window=10, stride=10)
    assert first_only.num_tokens == each.num_tokens
    assert each.token_ppl < 2 < 5 < first_only.token_ppl


@pytest.mark.parametrize("stride", [1, 2, 7, 15, 16])
def test_every_token_counts_once_whatever_the_stride(stride):
    model = small_model()
    text = [(5 * k + 3) % 31 for k in range(50)]
    assert perplexity(model, text, window=16, stride=stride).num_tokens == 49
    assert perplexity(model, text, window=16, stride=stride, bos_id=1).num_tokens == 50
    counted = [target for begin, end, first in plan_windows(49, 16, stride) for target in range(first, end)]
    assert counted == list(range(49))


@pytest.mark.parametrize("stride", [1, 5, 16])
@pytest.mark.parametrize("bos_id", [None, 1])
def test_windows_equal_a_loop_over_single_targets(stride, bos_id):
    model, window = small_model().eval(), 16
    text = [(5 * k + 3) % 29 + 2 for k in range(41)]
    whole = text if bos_id is None else [bos_id] + text
    nll_sum, done, begin = 0.0, 0, 0
    while done < len(whole) - 1:
        context = whole[begin : begin + window] if bos_id is None else [bos_id] + text[begin : begin + window - 1]
        targets = whole[begin + 1 : begin + window + 1]
        with torch.no_grad():
            logs = model(torch.tensor([context[: len(targets)]]))[0].log_softmax(-1)
        for place in range(done - begin, len(targets)):
            nll_sum -= float(logs[place, targets[place]])
        done, begin = begin + len(targets), begin + stride
    result = perplexity(model, text, window=window, stride=stride, bos_id=bos_id)
    assert result.nll_sum == pytest.approx(nll_sum, rel=1e-5)


def test_batched_windows_equal_single_ones():
    text = [(5 * k + 3) % 31 for k in range(100)]
    results = [perplexity(small_model(), text, window=16, stride=8, batch_size=size).nll_sum for size in (1, 3, 64)]
    assert results == pytest.approx([results[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    "ids, options, complaint",
    [
        ([], {}, "0 tokens"),
        ([5], {}, "1 tokens, at least 2"),
        ([5, 31], {}, "id 31"),
        ([5, 6], dict(window=17), "needs 17 positions, the model has 16"),
        ([5, 6], dict(stride=17), "stride 17"),
        ([5, 6], dict(stride=0), "stride 0"),
    ],
)
def test_a_text_or_protocol_without_a_meaning_is_refused(ids, options, complaint):
    with pytest.raises(UserError, match=complaint):
        perplexity(small_model(), ids, **{**dict(window=16, stride=8), **options})


def test_code_completion_is_cut_where_the_function_ends():
    code = "def pick(a,\n    b=(1,\n2),\n) -> str:\n    '''Two\nlines'''\n    if a:\n        return b\n\n    return a\n"
    for rest in ("\n\ndef next(self, x", "\n\nclass A:\n    x = ", "\n# a remark (\n", "print(1\n"):
        assert complete_function(code + rest) == code
        assert complete_function(complete_function(code + rest)) == code


def test_code_completion_drops_only_an_unfinished_last_line():
    assert complete_function("def f(x):\n    y = x\n    return y + (") == "def f(x):\n    y = x\n"
    assert complete_function("def f(x):\n    return x") == "def f(x):\n    return x"
    assert complete_function("def f(x):\n    retrn x y\n    return (") == "def f(x):\n    retrn x y\n"
    assert complete_function("def f(x") == "def f(x"


def test_code_completion_rate_counts_faults_and_empty_texts():
    good = ["def f():\n    return 1\n\ndef g(", "async def f(): pass", "    def m(self):\n        return 1\n    x ="]
    bad = ["def f(:\n    pass\n", "", "# only words\n", "def f():\nreturn 1\n", "def f():\n    return '\0'\n", "def f():\n" + "(" * 3000]
    assert [is_python(complete_function(text)) for text in good] == [True] * 3
    assert syntax_rate(good + bad) == pytest.approx(3 / 9)
    with pytest.raises(UserError):
        syntax_rate([])


def test_code_completion_keeps_what_the_parser_accepts():
    source = inspect.getsource(padded)
    assert ast.dump(ast.parse(complete_function(source + "\nleftover("))) == ast.dump(ast.parse(source))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    texts = ["\n".join(f"word {k} and 漢 naïve {n}" for k in range(9)) for n in range(40)]
    tokenizer = Tokenizer.train(texts, vocab_size=320, out=tmp_path_factory.mktemp("tokenizer") / "t")
    model = small_model(vocab_size=tokenizer.vocab_size, max_seq_len=32)
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=SimpleNamespace(train=SimpleNamespace(seq_len=32)))


def test_a_card_divides_by_the_files_own_words_and_bytes(run):
    text = "word 3 and naïve 漢\r\n" * 20
    card = evaluate_text(run, text)
    ids = run.tokenizer.encode(text)
    assert (card["num_tokens"], card["num_words"], card["num_bytes"]) == (len(ids), 100, len(text.encode()))
    assert card["bits_per_byte"] == pytest.approx(card["nll_sum"] / math.log(2) / len(text.encode()))
    assert card["word_perplexity"] == pytest.approx(math.exp(card["nll_sum"] / 100))
    assert (card["window"], card["stride"], card["bos"]) == (32, 16, True)
    assert json.loads(json.dumps(card)) == card
    without = evaluate_text(run, text, bos=False)
    assert without["num_tokens"] == len(ids) - 1
    assert without["num_bytes"] == len(run.tokenizer.decode(ids[1:]).encode())


@pytest.mark.parametrize("data, complaint", [(b"", "is empty"), (b"ab\xffc", "not UTF-8 .byte 2 is 0xff"), (None, "can't read")])
def test_command_names_a_text_that_cannot_be_read(tmp_path, data, complaint):
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=complaint):
        main(["--run-dir", str(tmp_path), "--text", str(path)])


def test_a_text_is_read_with_its_own_newlines(tmp_path):
    (tmp_path / "text.txt").write_bytes("\ufeffa\r\nb\rc\n".encode())
    assert read_text(tmp_path / "text.txt") == "a\r\nb\rc\n"


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


def test_command_prints_the_figures_with_their_protocol(run_dir, tmp_path, capsys):
    text = tmp_path / "text.py"
    text.write_text("def f3(x):\n    return x + 3\n" * 20)
    assert main(["--run-dir", str(run_dir), "--text", str(text), "--stride", "8"]) == 0
    shown = capsys.readouterr().out
    for part in ("perplexity a token", "perplexity a word", "bits a byte", "window 32", "stride 8", "BOS"):
        assert part in shown
    assert main(["--run-dir", str(run_dir), "--text", str(text), "--stride", "8", "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert (card["stride"], card["checkpoint"], card["num_bytes"]) == (8, "step_00000007", len(text.read_bytes()))
    assert len(card["checkpoint_hash"]) == 64


def test_command_refuses_a_window_or_a_text_that_the_model_cannot_take(run_dir, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("x = 1\n")
    with pytest.raises(UserError, match="the model has 64"):
        main(["--run-dir", str(run_dir), "--text", str(text), "--window", "65"])
    text.write_text("x")
    with pytest.raises(UserError, match="at least 2"):
        main(["--run-dir", str(run_dir), "--text", str(text)])


def test_command_refuses_a_run_without_a_checkpoint(run_dir, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("x = 1\n")
    with pytest.raises(UserError, match=tmp_path.name):
        main(["--run-dir", str(tmp_path), "--text", str(text)])


def test_command_errors_are_one_line_with_exit_code_2(command, tmp_path):
    (tmp_path / "text.txt").write_text("some words\n")
    code, out, err = command("eval", "--run-dir", tmp_path / "nowhere", "--text", tmp_path / "text.txt")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "nowhere" in err


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--text", "x"], "--run-dir is missing"),
        (["--run-dir", "x"], "--text is missing"),
        (["--run-dir", "x", "--text", "y", "--strid", "3"], "did you mean '--stride'"),
        (["--run-dir", "x", "--text", "y", "--window", "-1"], "--window is -1"),
    ],
)
def test_command_names_what_is_wrong(arguments, complaint):
    with pytest.raises(UserError, match=complaint):
        main(arguments)
