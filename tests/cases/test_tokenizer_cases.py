import multiprocessing
import os
import pickle
import random

import pytest
import sentencepiece
import torch

from llm_from_scratch import tokenizer as tk
from llm_from_scratch.config import TokenizerConfig
from llm_from_scratch.documents import corpus_files, is_validation, read_documents
from llm_from_scratch.env import UserError
from llm_from_scratch.tokenizer import SpecialIds, StreamDecoder, Tokenizer, train_model

LINES = [f"line {number}: the {animal} {verb} on a {place}\n"
         for number, (animal, verb, place) in enumerate([("cat", "sat", "mat"), ("hen", "ran", "log"), ("cow", "lay", "road"), ("bat", "fed", "roof")] * 100)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_model(LINES, vocab_size=320))


@pytest.fixture(scope="module")
def unigram():
    return Tokenizer(train_model(LINES, vocab_size=320, kind="unigram"))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_tok_2_newlines_survive(kind, byte_fallback):
    tokenizer = Tokenizer(train_model(["a\nb\n", "a b\nb a\n"] * 50, vocab_size=266 if byte_fallback else 10, kind=kind, byte_fallback=byte_fallback))
    for text in ["a\nb\n", "\n", "\n\n a\n", "a\r\nb\ta\r\n"]:
        ids = tokenizer.encode(text)
        assert tokenizer.unk_id not in ids
        assert tokenizer.decode(ids) == text


def test_tok_3_long_lines_are_not_lost():
    tokenizer = Tokenizer(train_model(LINES + ["zebra " * 1000], vocab_size=80, byte_fallback=False))
    assert tokenizer.unk_id not in tokenizer.encode("zebra")


def test_tok_3_a_corpus_of_long_lines_only_trains():
    tally = tk.Counter()
    model = train_model(["zebra " * 900, "ab" * 3000, "漢字" * 3000], vocab_size=285, tally=tally)
    assert tally["cut_lines"] == 3 and tally["sentences"] >= 3 * 5
    assert all(piece in tk.load_processor(model).encode("z漢", out_type=str) for piece in "z漢")


def test_tok_3_cutting_loses_no_character():
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice("ab  \n漢🙂\u2585\r\t") for _ in range(rng.randrange(5000)))
        sentences = list(tk.training_sentences([text], tk.Counter()))
        assert "".join(sentences) == text.replace("\n", "").replace("\u2585", "")
        assert all(sentence and len(sentence.encode()) <= 4192 for sentence in sentences)


def test_tok_3_a_line_with_the_trainers_own_marker_is_not_lost():
    tokenizer = Tokenizer(train_model(LINES + ["quiz \u2585 quiz"] * 20, vocab_size=60, byte_fallback=False))
    assert tokenizer.unk_id not in tokenizer.encode("quiz")


def test_tok_4_the_error_names_the_largest_size():
    with pytest.raises(UserError, match=r"vocab_size 5000 .* at most (\d+)") as error:
        train_model(LINES, vocab_size=5000)
    most = int(error.value.args[0].split("at most ")[1].split(";")[0])
    assert Tokenizer(train_model(LINES, vocab_size=most)).vocab_size == most
    with pytest.raises(UserError):
        train_model(LINES, vocab_size=most + 1)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_tok_4_the_error_names_the_smallest_size(kind, byte_fallback):
    with pytest.raises(UserError, match=r"vocab_size 5 .* at least (\d+)") as error:
        train_model(LINES, vocab_size=5, kind=kind, byte_fallback=byte_fallback)
    least = int(error.value.args[0].split("at least ")[1].split(",")[0])
    assert "\n" not in str(error.value)
    assert Tokenizer(train_model(LINES, vocab_size=least, kind=kind, byte_fallback=byte_fallback)).vocab_size == least


def test_tok_4_an_empty_corpus_says_so():
    for texts in ([], [""], ["\n\n"]):
        with pytest.raises(UserError, match="no text to train"):
            train_model(texts, vocab_size=300)


def test_tok_5_byte_fallback_returns_the_text_and_without_it_unk_is_counted(tokenizer):
    text = "cat 漢 mat"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tk.count_unknown(tokenizer, [text])[0] == 0
    lossy = Tokenizer(train_model(["cat mat " * 60 + "xyz"], vocab_size=17, character_coverage=0.98, byte_fallback=False))
    num_unknown, num_ids = tk.count_unknown(lossy, [text])
    assert num_unknown == 1 and num_ids == len(lossy.encode(text))
    once = lossy.decode(lossy.encode(text))
    assert once == "cat \ufffd mat" == lossy.decode(lossy.encode(once))


def test_tok_7_one_bos_and_one_eos(tokenizer):
    ids = tokenizer.encode("the cat", bos=True, eos=True)
    assert tk.with_ends(ids, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id) == ids
    assert ids.count(tokenizer.bos_id) == ids.count(tokenizer.eos_id) == 1
    packed = sum(tokenizer.encode_batch(["the cat", "", "a hen"], bos=True, eos=True), [])
    assert packed.count(tokenizer.bos_id) == packed.count(tokenizer.eos_id) == 3
    assert all((left, right) not in {(2, 2), (3, 3)} for left, right in zip(packed, packed[1:]))
    assert tokenizer.decode(packed) == "the cata hen"
    assert tokenizer.encode("the cat") == ids[1:-1]


def test_tok_8_padding_is_a_valid_id_and_takes_no_part_in_the_loss(tokenizer):
    rows = [[2, 10, 11], [2, 12, 13, 14, 3]]
    inputs, targets = map(torch.from_numpy, tk.pad_rows(rows, pad_id=tokenizer.pad_id))
    assert inputs.min() >= 0 and (targets != -100).sum() == 6
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(tokenizer.vocab_size, 8), torch.nn.Linear(8, tokenizer.vocab_size)
    loss = torch.nn.functional.cross_entropy(head(embed(inputs)).flatten(0, 1), targets.flatten())
    alone = [torch.nn.functional.cross_entropy(head(embed(torch.tensor(row[:-1]))), torch.tensor(row[1:]), reduction="sum") for row in rows]
    torch.testing.assert_close(loss, sum(alone) / 6)


def test_tok_9_a_clash_of_special_ids_is_named():
    with pytest.raises(UserError, match="bos and unk are both id 2"):
        SpecialIds(pad=0, eos=1, unk=2)
    with pytest.raises(UserError, match="eos and bos are both id 1"):
        SpecialIds(pad=0, unk=2, bos=1, eos=1)
    moved = Tokenizer(train_model(LINES, vocab_size=320, special_ids=SpecialIds(pad=3, unk=0, bos=1, eos=2)))
    assert (moved.pad_id, moved.unk_id, moved.bos_id, moved.eos_id) == (3, 0, 1, 2)


def test_tok_10_bytes_become_characters_whole_and_streamed(tokenizer):
    ids = tokenizer.encode("漢")
    assert len(ids) == 3 and tokenizer.decode(ids) == "漢"
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(number) for number in ids] == ["", "", "漢"] and decoder.flush() == ""


def test_tok_10_a_stream_is_the_whole_for_any_ids(tokenizer):
    rng = random.Random(1)
    starts = [tokenizer.processor.piece_to_id(f"<0x{byte:02X}>") for byte in (0xE6, 0xBC, 0xA2, 0xF0, 0x9F, 0x99, 0x82, 0xED, 0xA0, 0x80, 0xC0, 0xF4, 0x90)]
    for _ in range(2000):
        ids = [rng.choice([rng.randrange(tokenizer.vocab_size), rng.choice(starts), rng.choice(starts)]) for _ in range(rng.randrange(12))]
        decoder = StreamDecoder(tokenizer)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids), ids


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_every_string_comes_back(kind, tokenizer, unigram):
    one, rng = {"bpe": tokenizer, "unigram": unigram}[kind], random.Random(2)
    ranges = [(0, 128), (0, 128), (0x80, 0x250), (0x300, 0x370), (0x590, 0x700), (0x2000, 0x2100), (0x2580, 0x2590), (0x4E00, 0x5000),
              (0xE000, 0x10000), (0x1F600, 0x1F640), (0x10000, 0x110000)]
    texts = ["<s>", "</s><pad>", "<unk>", "<0x41>", "\0", "\ufeff", "  a  ", "\r\n\r\n", " " * 300]
    texts += ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(20))) for _ in range(3000)]
    rows = one.encode_batch(texts)
    assert [one.decode(ids) for ids in rows] == [text.replace("\u2581", " ") for text in texts]
    assert not {0, 1, 2, 3} & {number for ids in rows for number in ids}
    assert rows == [one.encode(text) for text in texts]


def test_control_pieces_never_come_from_text_even_when_trained_on_it():
    texts = ["<s> </s> <pad> <unk> <0x41> s pad unk\n"] * 200
    tokenizer = Tokenizer(train_model(texts, vocab_size=278))
    assert not {0, 1, 2, 3} & set(tokenizer.encode(texts[0]))
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


def test_wrong_ids_and_wrong_texts_are_named(tokenizer):
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"id {wrong} is outside of the vocabulary of 320"):
            tokenizer.decode([5, wrong])
    with pytest.raises(UserError, match="text 1 holds a lone surrogate"):
        tokenizer.encode_batch(["a", "b\udc80"])
    with pytest.raises(UserError, match="NoneType"):
        tokenizer.encode(None)
    assert tokenizer.decode(torch.tensor(tokenizer.encode("the cat"))) == "the cat"


def test_an_error_in_the_texts_is_passed_on():
    def texts():
        yield "the cat"
        raise UserError("file 2: cannot be read")

    with pytest.raises(UserError, match="^file 2: cannot be read$"):
        train_model(texts(), vocab_size=300)


def test_texts_may_be_any_iterable_and_order_of_calls_does_not_matter():
    models = {train_model(texts, vocab_size=300) for texts in (LINES, tuple(LINES), iter(LINES), (line for line in LINES), ["".join(LINES)])}
    assert len(models) == 1


def test_a_sample_is_bounded_and_the_same_each_time():
    kept = tk.sample_sentences(LINES, max_bytes=1000)
    assert 900 < sum(len(line.encode()) for line in kept) <= 1000
    assert kept == tk.sample_sentences(iter(LINES), max_bytes=1000) != tk.sample_sentences(LINES, max_bytes=1000, seed=1)
    assert train_model(LINES, vocab_size=300, train_bytes=1000) == train_model(LINES, vocab_size=300, train_bytes=1000)


def _hashes_on_one_core(kinds):
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, set(list(os.sched_getaffinity(0))[:1]))
    return [Tokenizer(train_model(LINES, vocab_size=320, kind=kind)).fingerprint for kind in kinds]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot limit the cores")
def test_the_model_file_does_not_depend_on_the_process_or_its_cores(tokenizer, unigram):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_hashes_on_one_core, [("bpe", "unigram")]) == [tokenizer.fingerprint, unigram.fingerprint]


def test_a_folder_is_whole_verified_and_never_overwritten(tmp_path):
    made = Tokenizer.train(LINES, vocab_size=300, out=tmp_path / "t", inputs={"files": "abc"})
    loaded = Tokenizer.load(tmp_path / "t")
    assert loaded.fingerprint == made.fingerprint == pickle.loads(pickle.dumps(loaded)).fingerprint
    assert loaded.origin["inputs"] == {"files": "abc"} and loaded.origin["extra"]["training"]["documents"] == len(LINES)
    with pytest.raises(UserError, match="exists already"):
        Tokenizer.train(LINES, vocab_size=300, out=tmp_path / "t")
    data = bytearray((tmp_path / "t" / "tokenizer.model").read_bytes())
    data[100] ^= 1
    (tmp_path / "t" / "tokenizer.model").write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        Tokenizer.load(tmp_path / "t")


def test_a_failed_training_leaves_nothing(tmp_path):
    with pytest.raises(UserError):
        Tokenizer.train(LINES, vocab_size=5000, out=tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_model_that_is_not_lossless_is_refused(tmp_path):
    model = tk.io.BytesIO()
    options = dict(vocab_size=40, minloglevel=2, pad_id=3)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=model, **options)
    (tmp_path / "foreign.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match="foreign.model: does not keep whitespace"):
        Tokenizer.load(tmp_path / "foreign.model")


def test_the_cache_knows_options_and_inputs_and_mends_itself(tmp_path):
    calls = []

    def texts():
        calls.append(1)
        return LINES

    def get(inputs="a", **options):
        return tk.cached_tokenizer(TokenizerConfig(**{"vocab_size": 300} | options), texts, inputs, tmp_path)

    first = get()
    assert get().fingerprint == first.fingerprint and len(calls) == 1
    get(vocab_size=310), get("b")
    assert len(calls) == 3
    for model in tmp_path.rglob("tokenizer.model"):
        model.write_bytes(b"junk")
    assert get().fingerprint == first.fingerprint and len(calls) == 4
    first.save(tmp_path / "mine")
    assert get(path=str(tmp_path / "mine")).fingerprint == first.fingerprint and len(calls) == 4


def _train_in_cache(arguments):
    folder, marks = arguments

    def texts():
        (marks / str(os.getpid())).touch()
        return LINES

    return tk.cached_tokenizer(TokenizerConfig(vocab_size=300), texts, "a", folder).fingerprint


def test_two_processes_train_once(tmp_path):
    (tmp_path / "marks").mkdir()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        hashes = pool.map(_train_in_cache, [(tmp_path / "cache", tmp_path / "marks")] * 2, chunksize=1)
    assert len(set(hashes)) == 1 and len(list((tmp_path / "marks").iterdir())) == 1


def test_a_prompt_that_ends_in_a_space_is_cut_as_in_training():
    texts = [document.text for document in read_documents(list(corpus_files())[:150], tk.Counter())]
    tokenizer = Tokenizer(train_model(texts, vocab_size=1500))
    prompt = tokenizer.encode("def ")
    found = [tokenizer.encode("def " + rest[:20])[:len(prompt)] == prompt for text in texts for rest in text.split("def ")[1:]]
    assert sum(found) > 0.95 * len(found)


def test_the_command_trains_encodes_and_tells(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("".join(LINES))
    assert tk.main(["train", "--inputs", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t"), "--vocab-size", "300"]) == 0
    assert tk.main(["encode", "--tokenizer", str(tmp_path / "t"), "the cat\n"]) == 0
    assert "4\t'\\n'" in capsys.readouterr().out
    assert tk.main(["info", str(tmp_path / "t")]) == 0
    assert Tokenizer.load(tmp_path / "t").fingerprint in capsys.readouterr().out


@pytest.mark.parametrize("args, words", [
    (["train", "--out", "d", "--vocab-sise", "9"], "did you mean '--vocab-size'"),
    (["train", "--out", "d", "--inputs", "nowhere/*.txt"], r"nowhere/\*.txt: no file here"),
    (["train", "--out", "d", "--kind", "wordpiece"], "wordpiece"),
    (["info", "nowhere"], "nowhere: no tokenizer here"),
    (["trian"], "'trian'"),
    ([], "command"),
])
def test_a_mistake_in_a_command_is_one_line(args, words):
    with pytest.raises(UserError, match=words) as error:
        tk.main(args)
    assert "\n" not in str(error.value)


def test_a_mistake_ends_the_process_with_exit_code_2(command):
    assert command("tokenizer", "info", "nowhere") == (2, "", "error: nowhere: no tokenizer here\n")
