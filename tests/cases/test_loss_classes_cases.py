"Loss by class: what a token is, where it stands, where it comes from; sums that add up over batches and ranks."

import math

import numpy as np
import pytest
import torch
from torch import nn

from llm_from_scratch.config import EvalConfig, ModelConfig
from llm_from_scratch.dataloader import IGNORED, Batch, TokenLoader
from llm_from_scratch.eval import evaluate_loader
from llm_from_scratch.loss_classes import FREQUENCY_LABELS, LossClasses, class_means, count_tokens, loss_classes, trend_of
from llm_from_scratch.model import Transformer
from llm_from_scratch.token_shards import EncodedDocument, open_shards, write_shards

BOS, EOS, VOCABULARY = 2, 3, 40
CPU = torch.device("cpu")


class ByTarget(nn.Module):
    "Probabilities that make the loss of a target known, whatever is read: id k costs as much as the table says."

    def __init__(self):
        super().__init__()
        self.logs = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)).log_softmax(0)

    def forward(self, ids, **ignored): return self.logs.expand(*ids.shape, VOCABULARY)


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)

    def documents(count):
        for number in range(count):
            ids = [BOS, *random.integers(4, VOCABULARY - 2, random.integers(1, 40)).tolist(), EOS]
            yield EncodedDocument(ids, id=str(number), source=["web", "books", ""][number % 3], lang=["en", "de"][number % 2])

    for name, count in (("train", 300), ("val", 90)):
        write_shards(documents(count), folder / name, vocab_size=VOCABULARY, tokenizer_fingerprint="t", shard_tokens=500, bos_id=BOS, eos_id=EOS)
    return open_shards(folder / "train"), open_shards(folder / "val")


def fed(splits, model, **options):
    train, val = splits
    classes = loss_classes(TokenLoader(val, shuffle=False, **{**dict(batch_size=4, seq_len=16), **options}), train)
    return classes, evaluate_loader(model, classes.loader, CPU, observe=classes.add)


def by_hand(splits, model, seq_len=16):
    "Every scored token of every shard, one by one."
    train, val = splits
    found = {}
    counts = np.concatenate([np.asarray(shard) for shard in train.shards])
    for number, (tokens, starts) in enumerate(zip(val.shards, val.starts)):
        before = sum(len(begin) for begin in val.starts[:number])
        rows = (len(tokens) - 1) // seq_len
        for place in range(1, rows * seq_len + 1):
            document = before + int(np.searchsorted(starts, place, side="right")) - 1
            own, last = int(tokens[place]), int(tokens[place - 1])
            kind = "bos" if own == BOS else "eos" if own == EOS else "first" if last == BOS else "other"
            row_start = (place - 1) // seq_len * seq_len
            read = place - max(row_start, int(starts[np.searchsorted(starts, place - 1, side="right") - 1]))
            share = (counts == own).sum() / len(counts)
            band = next((label for label, edge in zip(FREQUENCY_LABELS, (1e-2, 1e-3, 1e-4, 1e-5)) if share >= edge), "rarer") if share else "unseen"
            groups = {"class": kind, "position": "1-3" if read < 4 else "4-16", "frequency": band, "source": ["web", "books", "unknown"][document % 3], "lang": ["en", "de"][document % 2]}
            for name in (f"val_loss/{key}/{value}" for key, value in groups.items()):
                nats, num = found.get(name, (0.0, 0))
                found[name] = nats - float(model.logs[own]), num + 1
    return {name: nats / num for name, (nats, num) in found.items()}


def test_each_group_equals_a_loop_over_tokens(splits):
    model = ByTarget()
    classes, _ = fed(splits, model)
    assert class_means(classes, classes.sums) == pytest.approx(by_hand(splits, model), rel=1e-5)


@pytest.mark.parametrize("world_size, batch_size", [(1, 1), (1, 7), (2, 3), (3, 4)])
def test_sums_add_up_exactly_over_batches_ranks_and_kinds(splits, world_size, batch_size):
    model = ByTarget()
    classes, (total, count) = fed(splits, model)
    parts = [fed(splits, model, batch_size=batch_size, rank=rank, world_size=world_size)[0].sums for rank in range(world_size)]
    assert torch.equal(sum(parts), classes.sums)
    kinds = [sums.sum(0).tolist() for sums in classes.sums.split([len(names) for names in classes.labels.values()])]
    assert len(kinds) == 5 and all(kind == kinds[0] for kind in kinds)
    assert kinds[0] == [pytest.approx(total, rel=1e-6), count]


def test_watching_changes_no_validation_loss(splits):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=VOCABULARY, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, max_seq_len=16))
    classes, watched = fed(splits, model)
    assert watched == evaluate_loader(model, TokenLoader(splits[1], batch_size=4, seq_len=16, shuffle=False), CPU)


def test_a_broken_loss_is_shown_and_not_hidden(splits):
    model = ByTarget()
    model.logs[EOS] = -math.inf
    classes, (total, _) = fed(splits, model)
    means = class_means(classes, classes.sums)
    assert total == means["val_loss/class/eos"] == math.inf and means["val_loss/class/first"] < math.inf


def test_padding_and_empty_batches_count_nothing(splits):
    classes, _ = fed(splits, ByTarget())
    before, ids = classes.sums.clone(), torch.zeros(1, 1, dtype=torch.int64)
    classes.add(Batch(ids, ids + IGNORED, ids, ids, ids[0]), torch.zeros(1, 1))
    assert torch.equal(before, classes.sums)
    classes.reset()
    assert class_means(classes, classes.sums) == {}


def test_a_split_without_borders_has_no_eos_group(tmp_path):
    write_shards([list(range(4, 30))] * 5, tmp_path / "bare", vocab_size=VOCABULARY, tokenizer_fingerprint="t")
    bare = open_shards(tmp_path / "bare")
    classes, _ = fed((bare, bare), ByTarget())
    assert isinstance(classes, LossClasses) and {name for name in class_means(classes, classes.sums) if "class" in name} == {"val_loss/class/other"}
    assert "source" not in classes.labels and "lang" not in classes.labels


def test_large_data_is_sampled_evenly(splits):
    train, _ = splits
    whole, part = count_tokens(train), count_tokens(train, most=3000)
    assert whole.sum() == train.num_tokens and 1000 < part.sum() <= 3000
    assert abs(part[BOS] / part.sum() - whole[BOS] / whole.sum()) < 0.02


def test_every_logged_group_has_its_story_and_the_option_exists(splits):
    classes, _ = fed(splits, ByTarget())
    assert all(trend_of(name) for name in class_means(classes, classes.sums))
    assert EvalConfig().loss_classes and not EvalConfig(loss_classes=False).loss_classes
