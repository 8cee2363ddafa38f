"Cases of row lengths that follow the documents: no target lost or doubled, padding, ranks, state."
import json

import numpy as np
import pytest
import torch

from llm_from_scratch.dataloader import IGNORED, TokenLoader, endless
from llm_from_scratch.env import UserError
from llm_from_scratch.row_plans import FILLER
from llm_from_scratch.token_shards import open_shards, write_shards

LENGTHS = [8, 16, 32]


@pytest.fixture
def shards(tmp_path):
    "Documents of 1 to 90 tokens; all tokens are different."
    ends = np.cumsum(np.random.default_rng(0).integers(1, 90, 150))
    write_shards([np.arange(begin, end) + 1 for begin, end in zip([0, *ends[:-1]], ends)], tmp_path / "docs", vocab_size=20_000, tokenizer_fingerprint="f1", shard_tokens=900)
    return open_shards(tmp_path / "docs")


def rows_of(batches): return [row for batch in batches for row in batch.row_ids.tolist() if row != FILLER]


def test_each_target_once_and_none_across_documents(shards):
    loader = TokenLoader(shards, batch_size=4, seq_len=16, lengths=LENGTHS, pad_id=19_999)
    targets, firsts = [], {int(shard[begin]) for shard, begins in zip(shards.shards, shards.starts) for begin in begins}
    for batch in loader:
        counted = batch.targets != IGNORED
        assert (batch.targets[counted] == batch.inputs[counted] + 1).all()
        targets += batch.targets[counted].tolist()
    assert sorted(targets) == sorted(set(range(1, shards.num_tokens + 1)) - firsts)
    assert loader.dropped_tokens == sum(int((np.diff(begins, append=len(shard)) == 1).sum()) for shard, begins in zip(shards.shards, shards.starts)) > 0


def test_padding_is_pads_ignored_targets_and_no_document(shards):
    loader = TokenLoader(shards, batch_size=4, seq_len=16, lengths=LENGTHS, pad_id=19_999)
    places = padding = 0
    for batch in loader:
        counted = batch.targets != IGNORED
        assert (batch.inputs[~counted] == 19_999).all() and (batch.doc_ids == torch.where(counted, 0, -1)).all() and not batch.positions[~counted].any()
        assert (batch.positions[counted] == torch.arange(batch.inputs.shape[1]).expand_as(counted)[counted]).all()
        places, padding = places + counted.numel(), padding + int((~counted).sum())
    assert loader.report()["padding"] == pytest.approx(padding / places)


def test_batches_have_one_length_on_all_ranks_and_the_same_tokens(shards):
    ranks = [list(TokenLoader(shards, batch_size=4, seq_len=16, lengths=LENGTHS, rank=rank, world_size=3, seed=2)) for rank in range(3)]
    loader = TokenLoader(shards, batch_size=4, seq_len=16, lengths=LENGTHS, world_size=3, seed=2)
    assert {len(batches) for batches in ranks} == {loader.num_batches}
    for batches in zip(*ranks): assert len({batch.inputs.shape for batch in batches}) == 1 and batches[0].inputs.numel() == 64
    assert sorted(sum(map(rows_of, ranks), [])) == list(range(loader.num_rows))


def test_lengths_alternate_in_proportion_over_the_epoch(shards):
    order = [batch.inputs.shape[1] for batch in TokenLoader(shards, batch_size=2, seq_len=16, lengths=LENGTHS)]
    for length in LENGTHS:
        counts = np.cumsum(np.array(order) == length)
        assert np.abs(counts - counts[-1] * np.arange(1, len(order) + 1) / len(order)).max() <= 2


def test_order_depends_on_seed_and_epoch(shards):
    def epochs(seed):
        loader = TokenLoader(shards, batch_size=4, seq_len=16, lengths=LENGTHS, seed=seed)
        return [rows_of(loader), rows_of(loader)]
    assert epochs(1) == epochs(1) and epochs(1)[0] != epochs(1)[1] and epochs(1) != epochs(2)


@pytest.mark.parametrize("before, after", [((4, 2), (3, 3)), ((1, 16), (4, 2)), ((2, 4), (1, 5))])
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_state_saved_on_n_ranks_loads_on_m(shards, before, after, stop):
    def loaders(ranks): return [TokenLoader(shards, batch_size=ranks[1], seq_len=16, seed=7, rank=rank, world_size=ranks[0], lengths=LENGTHS) for rank in range(ranks[0])]
    first, second = loaders(before), loaders(after)
    seen = sum((rows_of(batch for _, batch in zip(range(stop), endless(loader))) for loader in first), [])
    state = json.loads(json.dumps(first[0].state_dict()))
    assert all(loader.state_dict() == state for loader in first) and len(json.dumps(state)) < 400
    for loader in second: loader.load_state_dict(state)
    rest = [list(loader) for loader in second]
    assert len({len(batches) for batches in rest}) == 1
    assert sorted(seen + sum(map(rows_of, rest), [])) == list(range(first[0].num_rows))


def test_resumed_anywhere_gives_the_same_batches(shards):
    options = dict(batch_size=4, seq_len=16, lengths=LENGTHS, seed=5)
    undisturbed = [batch for _, batch in zip(range(160), endless(TokenLoader(shards, **options)))]
    assert TokenLoader(shards, **options).num_batches < 140
    for stop in (1, 50, 120, 159):
        loader = TokenLoader(shards, **options)
        for _ in zip(range(stop), endless(loader)): pass
        resumed = TokenLoader(shards, **options)
        resumed.load_state_dict(loader.state_dict())
        for batch, expected in zip(endless(resumed), undisturbed[stop:]): assert torch.equal(batch.inputs, expected.inputs) and torch.equal(batch.row_ids, expected.row_ids)


def test_impossible_lengths_are_refused(shards):
    with pytest.raises(UserError, match="row of 32 tokens is longer than a batch"): next(iter(TokenLoader(shards, batch_size=1, seq_len=16, lengths=LENGTHS)))
    with pytest.raises(UserError, match="none below 1"): TokenLoader(shards, batch_size=1, seq_len=16, lengths=[0])
    with pytest.raises(UserError, match="can't be combined"): TokenLoader(shards, batch_size=1, seq_len=16, lengths=[8], weights={"": 1})
    loader = TokenLoader(shards, batch_size=4, seq_len=16, lengths=LENGTHS)
    with pytest.raises(UserError, match=r"lengths \[8, 16\]"): loader.load_state_dict(TokenLoader(shards, batch_size=4, seq_len=32, lengths=[8, 16]).state_dict() | {"seq_len": 32})
