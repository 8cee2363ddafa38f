"Cases of the loader: ends of files, ranks, resuming, borders of documents."
import json
import threading
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from llm_from_scratch.dataloader import IGNORED, StagingBuffers, TokenLoader, endless
from llm_from_scratch.env import UserError
from llm_from_scratch.row_plans import FILLER, document_borders, epoch_order, mark_documents, plan_rows, read_rows, whole_rows
from llm_from_scratch.token_shards import open_shards, write_shards


def make_shards(path, docs, **options):
    write_shards(docs, path, vocab_size=70_000, tokenizer_fingerprint="f1", **options)
    return open_shards(path)


@pytest.fixture
def ragged(tmp_path):
    "Shards of many lengths, two of them shorter than a row of 16."
    lengths = np.random.default_rng(0).integers(1, 60, 120)
    return make_shards(tmp_path / "ragged", [np.arange(length) + 100 * number for number, length in enumerate(lengths)], shard_tokens=70)


def take(loader, count): return [batch for _, batch in zip(range(count), endless(loader))]
def rows_of(batches): return [row for batch in batches for row in batch.row_ids.tolist() if row != FILLER]
def same(left, right): return len(left) == len(right) and all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in zip(left, right) for name in ("inputs", "targets", "positions", "doc_ids", "row_ids"))


def test_data_2_nine_tokens_are_one_window(tmp_path):
    [batch] = TokenLoader(make_shards(tmp_path / "nine", [range(9)]), batch_size=1, seq_len=8)
    assert batch.inputs.tolist() == [list(range(8))] and batch.targets.tolist() == [list(range(1, 9))]


def test_data_2_eight_tokens_are_too_short(tmp_path):
    with pytest.raises(UserError, match="sequence longer than the data.*9 tokens.*has 8"):
        TokenLoader(make_shards(tmp_path / "eight", [range(8)]), batch_size=1, seq_len=8)


@pytest.mark.parametrize("length, seq_len", [(9, 8), (10, 8), (16, 8), (17, 8), (18, 8), (5, 1), (100, 7)])
def test_data_2_each_token_is_a_target_once(tmp_path, length, seq_len):
    loader = TokenLoader(make_shards(tmp_path / "tokens", [range(length)]), batch_size=3, seq_len=seq_len)
    targets = torch.cat([batch.targets.flatten() for batch in loader])
    learned = sorted(targets[targets != IGNORED].tolist())
    assert learned == list(range(1, len(learned) + 1)) and len(learned) + 1 + loader.dropped_tokens == length
    assert loader.dropped_tokens < seq_len


@pytest.mark.parametrize("shard_tokens, num_shards", [(40, 3), (1_000, 1)])
def test_data_3_each_document_once_over_all_consumers(tmp_path, shard_tokens, num_shards):
    docs = [[number] * 10 for number in range(10)]
    shards = make_shards(tmp_path / "tokens", docs, shard_tokens=shard_tokens)
    assert len(shards.shards) == num_shards
    consumers = [TokenLoader(shards, batch_size=1, seq_len=9, rank=consumer, world_size=4, seed=1) for consumer in range(4)]
    for _ in range(2):
        read = [list(consumer) for consumer in consumers]
        assert len({len(batches) for batches in read}) == 1
        assert sorted(sum(map(rows_of, read), [])) == list(range(consumers[0].num_rows))
        targets = torch.cat([batch.targets.flatten() for batches in read for batch in batches])
        counts = torch.bincount(targets[targets != IGNORED], minlength=10)
        assert counts.sum() == 100 - num_shards - consumers[0].dropped_tokens and (counts > 0).all() and counts.max() <= 10


def test_data_3_more_consumers_than_rows_all_finish(tmp_path):
    shards = make_shards(tmp_path / "tokens", [range(20)])
    read = [list(TokenLoader(shards, batch_size=4, seq_len=8, rank=rank, world_size=4)) for rank in range(4)]
    assert [len(batches) for batches in read] == [1] * 4
    assert sorted(sum(map(rows_of, read), [])) == [0, 1]
    assert (read[3][0].targets == IGNORED).all() and (read[3][0].doc_ids == -1).all() and (read[3][0].inputs == 0).all()


def test_data_6_order_depends_on_seed_and_epoch_alone(ragged):
    def epochs(seed, count=2):
        loader = TokenLoader(ragged, batch_size=4, seq_len=16, seed=seed)
        return [rows_of(loader) for _ in range(count)]
    np.random.seed(1)
    torch.manual_seed(1)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = epochs(1)
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    np.random.seed(99)
    torch.manual_seed(99)
    assert epochs(1) == first and first[0] != first[1] and epochs(2) != first
    assert sorted(first[0]) == sorted(first[1]) == list(range(len(first[0])))


def test_data_6_ranks_draw_different_rows(ragged):
    ranks = [TokenLoader(ragged, batch_size=2, seq_len=16, seed=1, rank=rank, world_size=4) for rank in range(4)]
    for batches in zip(*ranks):
        drawn = rows_of(batches)
        assert len(drawn) == len(set(drawn))


def test_data_6_order_is_pinned():
    assert epoch_order(8, seed=1, epoch=0).tolist() == [2, 0, 1, 4, 5, 6, 7, 3]


def test_data_7_ranks_take_the_same_steps_and_the_tail_is_reported(tmp_path):
    shards = make_shards(tmp_path / "tokens", [range(100), range(1_000, 1_100)], shard_tokens=100)
    ranks = [TokenLoader(shards, batch_size=2, seq_len=8, rank=rank, world_size=4, shuffle=False) for rank in range(4)]
    read = [list(loader) for loader in ranks]
    assert {len(batches) for batches in read} == {3} == {loader.num_batches for loader in ranks}
    assert {loader.dropped_tokens for loader in ranks} == {6}
    assert sorted(sum(map(rows_of, read), [])) == list(range(24))
    first_tokens = {row: tokens[0].item() for batches in read for batch in batches for row, tokens in zip(batch.row_ids.tolist(), batch.inputs)}
    assert first_tokens[11] == 88 and first_tokens[12] == 1_000


def test_trn_1_three_sittings_see_each_batch_once(tmp_path):
    shards = make_shards(tmp_path / "tokens", [np.arange(40 * 2 * 8 + 1)])
    options = dict(batch_size=2, seq_len=8, seed=5)
    undisturbed = list(TokenLoader(shards, **options))
    assert len(undisturbed) == 40
    seen, state = [], None
    for count in (30, 10, 40):
        loader = TokenLoader(shards, **options)
        if state: loader.load_state_dict(json.loads(json.dumps(state)))
        seen += [batch for _, batch in zip(range(count), loader)]
        state = loader.state_dict()
    assert same(seen, undisturbed)


@pytest.mark.parametrize("stop", [0, 1, 7, 12, 13, 14, 26, 30])
def test_trn_1_resumed_anywhere_gives_the_same_batches(ragged, stop):
    options = dict(batch_size=16, seq_len=16, seed=5)
    undisturbed = take(TokenLoader(ragged, **options), 40)
    loader, resumed = TokenLoader(ragged, **options), TokenLoader(ragged, **options)
    begun = take(loader, stop)
    resumed.load_state_dict(loader.state_dict())
    assert same(begun + take(resumed, 40 - stop), undisturbed)


def test_trn_2_second_epoch_is_full_after_a_resume(ragged):
    options = dict(batch_size=4, seq_len=16, seed=5)
    loader = TokenLoader(ragged, **options)
    take(loader, loader.num_batches // 2)
    resumed = TokenLoader(ragged, **options)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == loader.num_batches - loader.num_batches // 2
    assert (resumed.epoch, resumed.position) == (1, 0)
    second = rows_of(resumed)
    assert sorted(second) == list(range(loader.num_rows))
    assert second == epoch_order(loader.num_rows, seed=5, epoch=1).tolist()


def test_trn_3_positions_restart_with_each_document(tmp_path):
    shards = make_shards(tmp_path / "tokens", [[1, 3, 3, 3], [1, 3, 3, 3]])
    [batch] = TokenLoader(shards, batch_size=1, seq_len=7)
    assert batch.inputs.tolist() == [[1, 3, 3, 3, 1, 3, 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]] and batch.doc_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1]]


def test_trn_3_marks_equal_a_walk_over_the_tokens(ragged):
    loader = TokenLoader(ragged, batch_size=8, seq_len=16, seed=3)
    for batch in loader:
        for row_id, positions, doc_ids in zip(batch.row_ids.tolist(), batch.positions.tolist(), batch.doc_ids.tolist()):
            if row_id == FILLER: continue
            [shard], [start] = loader.plan.locate(np.array([row_id]))
            begins, expected, document, position = set(ragged.starts[shard].tolist()), [], 0, 0
            for step in range(16):
                if step and start + step in begins: document, position = document + 1, 0
                expected.append((document, position))
                position += 1
            assert list(zip(doc_ids, positions)) == expected


def test_trn_7_one_validation_batch_reaches_both_ranks(tmp_path):
    shards = make_shards(tmp_path / "tokens", [range(9)])
    read = [list(TokenLoader(shards, batch_size=1, seq_len=8, rank=rank, world_size=2, shuffle=False)) for rank in range(2)]
    assert [int((batch.targets != IGNORED).sum()) for [batch] in read] == [8, 0]


@pytest.mark.parametrize("before, after", [((4, 2), (3, 3)), ((1, 16), (4, 1)), ((3, 5), (1, 7)), ((2, 4), (2, 3))])
def test_state_saved_on_n_ranks_loads_on_m(ragged, before, after):
    def loaders(ranks): return [TokenLoader(ragged, batch_size=ranks[1], seq_len=16, seed=7, rank=rank, world_size=ranks[0]) for rank in range(ranks[0])]
    first, second = loaders(before), loaders(after)
    seen = sum((rows_of(batch for _, batch in zip(range(3), loader)) for loader in first), [])
    assert all(loader.state_dict() == first[0].state_dict() for loader in first)
    for loader in second: loader.load_state_dict(first[0].state_dict())
    rest = [list(loader) for loader in second]
    assert len({len(batches) for batches in rest}) == 1
    assert sorted(seen + sum(map(rows_of, rest), [])) == list(range(first[0].num_rows))
    assert sorted(sum((rows_of(loader) for loader in second), [])) == list(range(first[0].num_rows))


def test_state_is_small_json_and_changes_only_when_a_batch_is_handed_out(ragged):
    loader = TokenLoader(ragged, batch_size=4, seq_len=16)
    start = loader.state_dict()
    batches = iter(loader)
    assert loader.state_dict() == start
    next(batches)
    assert loader.state_dict()["position"] == 4 and len(json.dumps(loader.state_dict())) < 300


@pytest.mark.parametrize("name, change", [("seq_len", dict(seq_len=8)), ("seed", dict(seed=6)), ("shuffle", dict(shuffle=False))])
def test_state_of_other_options_is_refused_naming_both(ragged, name, change):
    options = dict(batch_size=4, seq_len=16, seed=5, shuffle=True)
    state = TokenLoader(ragged, **options).state_dict()
    with pytest.raises(UserError) as error: TokenLoader(ragged, **{**options, **change}).load_state_dict(state)
    assert f"{name} {options[name]}" in str(error.value) and f"it is {change[name]}" in str(error.value)


def test_state_of_other_data_is_refused(tmp_path, ragged):
    other = make_shards(tmp_path / "other", [range(500)])
    loader = TokenLoader(other, batch_size=4, seq_len=16)
    with pytest.raises(UserError, match=ragged.manifest["hash"]): loader.load_state_dict(TokenLoader(ragged, batch_size=4, seq_len=16).state_dict())
    for state in ({}, {**loader.state_dict(), "position": 10**9}, {**loader.state_dict(), "epoch": -1}):
        with pytest.raises(UserError): loader.load_state_dict(state)


def test_document_mask_false_is_plain_and_cached(ragged):
    options = dict(batch_size=4, seq_len=16, seed=5)
    masked, plain = list(TokenLoader(ragged, **options)), list(TokenLoader(ragged, document_mask=False, **options))
    for left, right in zip(masked, plain, strict=True):
        assert torch.equal(left.inputs, right.inputs) and torch.equal(left.targets, right.targets)
        assert torch.equal(right.positions, torch.arange(16).expand(4, 16)) and not right.doc_ids.any() and right.doc_ids.shape == (4, 16)
    assert len({batch.positions.data_ptr() for batch in plain}) == len({batch.doc_ids.data_ptr() for batch in plain}) == 1


def test_batches_are_int64_of_the_promised_shapes(ragged):
    for batch in TokenLoader(ragged, batch_size=4, seq_len=16):
        tensors = batch.inputs, batch.targets, batch.positions, batch.doc_ids
        assert {tensor.shape for tensor in tensors} == {(4, 16)} and batch.row_ids.shape == (4,)
        assert {tensor.dtype for tensor in (*tensors, batch.row_ids)} == {torch.int64}
        assert batch.inputs.stride() == batch.targets.stride()


def test_rows_are_copied_once():
    tokens, starts, out = np.zeros(2_000_000, "<u2"), np.arange(64) * 4_096, np.empty((64, 4_097), np.int64)
    spans = whole_rows(np.zeros(64, np.int64), starts, 4_097)
    read_rows([tokens], spans, out)
    tracemalloc.start()
    read_rows([tokens], spans, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1_024


def test_handed_out_batches_do_not_change_later(ragged):
    batches = list(TokenLoader(ragged, batch_size=4, seq_len=16))
    assert same(batches, list(TokenLoader(ragged, batch_size=4, seq_len=16)))
    assert len({batch.inputs.data_ptr() for batch in batches}) == len(batches)


def test_plan_counts_every_token():
    for lengths in ([9], [100, 5, 17], [8, 9, 1], [16, 17, 33]):
        plan = plan_rows(lengths, 8)
        covered = sum(max(0, length - 1) // 8 * 8 + (length > 8) for length in lengths)
        assert covered + plan.dropped_tokens == sum(lengths)


def test_marks_of_one_token_documents():
    doc_ids, positions = mark_documents(document_borders([np.arange(10)], whole_rows(np.array([0]), np.array([3]), 6), 1, 5))
    assert doc_ids.tolist() == [[0, 1, 2, 3, 4]] and positions.tolist() == [[0] * 5]


@pytest.mark.parametrize("wrong", [dict(batch_size=0), dict(seq_len=0), dict(rank=2), dict(rank=-1), dict(world_size=0), dict(seed=-1)])
def test_impossible_options_are_refused(ragged, wrong):
    with pytest.raises(UserError): TokenLoader(ragged, **{**dict(batch_size=1, seq_len=8, world_size=2), **wrong})


class FarShards(Sequence):
    "Shards that say which of them are asked for, and which are to come."

    def __init__(self, shards): self.shards, self.read, self.announced = list(shards), [], []
    def __len__(self): return len(self.shards)
    def prefetch(self, numbers): self.announced.append(list(numbers))
    def __getitem__(self, number):
        self.read.append(number)
        return self.shards[number]


def test_shards_from_afar_are_read_window_by_window_and_announced(ragged):
    far = FarShards(ragged.shards)
    loader = TokenLoader(replace(ragged, shards=far), batch_size=4, seq_len=16, seed=1, shuffle_shards=3, prefetch_batches=0)
    assert not far.read
    rows = rows_of(loader)
    windows, order = loader.feed.epoch(0)
    assert sorted(rows) == list(range(loader.num_rows)) and rows == order.tolist()
    entered = [number for number, before in zip(far.read, [None, *far.read]) if number != before]
    place = {shard: number for number, window in enumerate(windows) for shard in window.tolist()}
    assert [place[number] for number in far.read] == sorted(place[number] for number in far.read) and len(entered) > len(set(far.read))
    assert far.announced[0] == [*windows[0], *windows[1]] and far.announced[-1] == list(windows[-1])
    assert all(set(ahead) <= set(sum((window.tolist() for window in windows), [])) and len(ahead) <= 6 for ahead in far.announced)


def test_the_window_is_part_of_the_state(ragged):
    options = dict(batch_size=4, seq_len=16, seed=1)
    far = replace(ragged, shards=FarShards(ragged.shards))
    loader = TokenLoader(far, **options)
    assert loader.state_dict()["shuffle_shards"] == 4
    take(loader, 5)
    resumed = TokenLoader(ragged, shuffle_shards=4, **{**options, "batch_size": 7})
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert rows_of(resumed) == rows_of(loader)
    with pytest.raises(UserError, match="shuffle_shards 4, but here it is 2"): TokenLoader(ragged, shuffle_shards=2, **options).load_state_dict(loader.state_dict())


def test_states_of_the_first_version_still_load(ragged):
    options = dict(batch_size=4, seq_len=16, seed=1)
    loader, resumed = TokenLoader(ragged, **options), TokenLoader(ragged, **options)
    take(loader, 5)
    state = loader.state_dict()
    resumed.load_state_dict({**{name: state[name] for name in ("data", "seq_len", "seed", "shuffle", "epoch", "position")}, "version": 1})
    assert rows_of(resumed) == rows_of(loader)
    with pytest.raises(UserError, match="rows packed.*it is by length"): TokenLoader(ragged, lengths=[16], **options).load_state_dict({**state, "version": 1})


def test_the_report_counts_what_a_walk_over_the_documents_counts(ragged):
    loader, cut = TokenLoader(ragged, batch_size=4, seq_len=16), 0
    for shard, starts, rows in zip(ragged.shards, ragged.starts, np.diff(loader.plan.first_row)):
        for begin, end in zip(starts, [*starts[1:], len(shard)]): cut += len({place // 16 if place < rows * 16 else None for place in range(begin, end)}) > 1 or end > rows * 16
    report = loader.report()
    assert report["cut_documents"] == cut / ragged.num_documents and report["dropped_tokens"] == loader.dropped_tokens
    assert report["padding"] == pytest.approx(1 - loader.num_rows / (4 * loader.num_batches))


def test_batches_that_are_kept_are_never_written_over(ragged):
    for options in ({}, {"prefetch_batches": 0}, {"document_mask": False}):
        kept = list(TokenLoader(ragged, batch_size=2, seq_len=8, seed=3, **options))
        fresh = [batch for batch in TokenLoader(ragged, batch_size=2, seq_len=8, seed=3, **options)]
        passing = TokenLoader(ragged, batch_size=2, seq_len=8, seed=3, **options)
        for one, other, third in zip(kept, fresh, passing, strict=True): # the third's buffers are used again, the others' are held
            for a, b, c in zip(one.tensors(), other.tensors(), third.tensors(), strict=True): assert torch.equal(a, b) and torch.equal(a, c)


def test_buffers_asked_for_by_many_threads_at_once_are_never_the_same():
    buffers, found = StagingBuffers(most=4), []

    def ask():
        for _ in range(300):
            mine = [buffers((4, 4)) for _ in range(3)]
            mark = np.int64(threading.get_ident())
            for array in mine: array[:] = mark
            time.sleep(0)
            found.append(all((array == mark).all() for array in mine) and len({id(array) for array in mine}) == 3)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(found) == 1200 and all(found)
