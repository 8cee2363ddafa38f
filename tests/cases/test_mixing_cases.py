"Cases of mixed sources: exact shares, changes at a step, passes, ranks, state."
import json
import tracemalloc

import numpy as np
import pytest
import torch

from llm_from_scratch.artifacts import write_json
from llm_from_scratch.config import DataConfig
from llm_from_scratch.dataloader import TokenLoader, endless
from llm_from_scratch.env import UserError
from llm_from_scratch.mixing import Mixture, counts_at, cut_streams, mix_notes, rows_due, shares_from_weights
from llm_from_scratch.row_plans import FILLER, read_rows
from llm_from_scratch.token_shards import EncodedDocument, open_shards, write_shards

SOURCES = ("book", "code", "web")


@pytest.fixture
def shards(tmp_path):
    "Interleaved documents; a token's thousands say which source it is of, and each token of a source is another one."
    rng, used, docs = np.random.default_rng(0), dict.fromkeys(range(3), 0), []
    for number in range(300):
        source, length = int(rng.choice(3, p=[0.2, 0.3, 0.5])), int(rng.integers(1, 40))
        docs.append(EncodedDocument(np.arange(used[source], used[source] + length) + 10_000 * source, str(number), SOURCES[source]))
        used[source] += length
    write_shards(docs, tmp_path / "mix", vocab_size=40_000, tokenizer_fingerprint="f1", shard_tokens=700)
    return open_shards(tmp_path / "mix")


def take(loader, count): return [batch for _, batch in zip(range(count), endless(loader))]
def rows_of(batches): return [row for batch in batches for row in batch.row_ids.tolist() if row != FILLER]
def sources_in(batches): return np.concatenate([(batch.inputs[batch.row_ids != FILLER] // 10_000)[:, 0].numpy() for batch in batches])


@pytest.mark.parametrize("weights", [{"book": 0.2, "code": 0.3, "web": 0.5}, {"book": 1, "code": 1, "web": 1}, {"book": 1e-3, "web": 1}, {"web": 7}])
def test_every_source_is_near_its_share_after_any_number_of_rows(shards, weights):
    seen = sources_in(take(TokenLoader(shards, batch_size=10, seq_len=16, weights=weights), 60))
    total = sum(weights.values())
    for number, name in enumerate(SOURCES):
        counts, share = np.cumsum(seen == number), weights.get(name, 0) / total
        assert np.abs(counts - share * np.arange(1, len(seen) + 1)).max() <= 1


def rows_off(shares, num_rows):
    streams, numbers = rows_due(shares, 0, num_rows)
    worst = 0
    for stream, share in enumerate(shares):
        own = streams == stream
        assert numbers[own].tolist() == list(range(own.sum()))
        worst = max(worst, np.abs(np.cumsum(own) - share * np.arange(1, num_rows + 1)).max())
    return worst


@pytest.mark.parametrize("weights", [[0.5] + [0.1] * 5, [0.8] + [0.02] * 10, [0.9] + [0.001] * 100, [0.9] + [0.001 + 1e-6 * i for i in range(100)], [1 / i for i in range(1, 80)], [1.618**-i for i in range(20)]])
def test_many_small_sources_do_not_come_all_at_once(weights):
    shares = np.array(weights) / np.sum(weights)
    assert rows_off(shares, 10_000) < 1.001


def test_no_stream_is_two_rows_off_for_any_shares():
    rng = np.random.default_rng(0)
    for _ in range(100):
        shares = rng.dirichlet(np.full(rng.integers(1, 40), rng.choice([0.1, 0.5, 1, 10]))) + 1e-9
        assert rows_off(shares / shares.sum(), 1_000) < 2


def test_counts_and_rows_agree_at_every_position():
    shares = np.random.default_rng(1).dirichlet(np.full(30, 0.5))
    streams = rows_due(shares, 0, 600)[0]
    for position in range(0, 590, 7):
        assert counts_at(shares, position).tolist() == np.bincount(streams[:position], minlength=30).tolist()
        assert rows_due(shares, position, position + 9)[0].tolist() == streams[position:position + 9].tolist()


def test_thousands_of_streams_cost_a_batch_little():
    shares = np.random.default_rng(2).dirichlet(np.full(5_000, 1.0)) + 1e-7
    shares /= shares.sum()
    counts = counts_at(shares, 10**9)
    assert counts.sum() == 10**9 and np.abs(counts - shares * 10**9).max() < 2
    streams, numbers = rows_due(shares, 10**9, 10**9 + 64)
    assert all(counts[stream] <= number <= counts[stream] + 64 for stream, number in zip(streams, numbers))


def test_a_row_is_of_one_source_in_stored_order_and_each_token_a_target_once(shards):
    loader = TokenLoader(shards, batch_size=4, seq_len=16, weights=dict.fromkeys(SOURCES, 1.0))
    plan, out = loader.plan, np.empty((loader.num_rows, 17), np.int64)
    read_rows(shards.shards, plan.spans(np.arange(loader.num_rows)), out)
    assert len({tuple(np.unique(row // 10_000)) for row in out}) == 3
    for number in range(3):
        rows = out[out[:, 0] // 10_000 == number]
        assert rows[:, 1:].flatten().tolist() == list(range(10_000 * number + 1, 10_000 * number + 1 + rows[:, 1:].size))
    assert out[:, 1:].size + 3 + loader.dropped_tokens == shards.num_tokens


def test_documents_are_marked_across_stretches(shards):
    starts = {int(shard[begin]) for shard, begins in zip(shards.shards, shards.starts) for begin in begins}
    for batch in TokenLoader(shards, batch_size=8, seq_len=16, weights={"code": 1, "web": 1}):
        for row, ids, positions, documents in zip(batch.row_ids.tolist(), batch.inputs.tolist(), batch.positions.tolist(), batch.doc_ids.tolist()):
            if row == FILLER: continue
            begins = [place > 0 and token in starts for place, token in enumerate(ids)]
            assert documents == np.cumsum(begins).tolist()
            assert all((position == 0) == (begin or place == 0) for place, (position, begin) in enumerate(zip(positions, begins)))


def test_each_row_once_a_pass_then_again_in_another_order(shards):
    loader = TokenLoader(shards, batch_size=6, seq_len=16, seed=3, weights={"book": 0.5, "web": 0.5})
    plan, rows = loader.plan, rows_of(take(loader, 100))
    book = [row for row in rows if plan.first_row[0] <= row < plan.first_row[1]]
    count = int(plan.num_rows[0])
    passes = [book[start:start + count] for start in range(0, len(book) - count + 1, count)]
    assert len(passes) > 2 and all(sorted(one) == sorted(passes[0]) for one in passes) and len(set(map(tuple, passes))) == len(passes)


@pytest.mark.parametrize("before, after", [((4, 2), (3, 3)), ((1, 16), (4, 1)), ((2, 4), (1, 5))])
def test_state_saved_on_n_ranks_loads_on_m(shards, before, after):
    def loaders(ranks): return [TokenLoader(shards, batch_size=ranks[1], seq_len=16, seed=7, rank=rank, world_size=ranks[0], weights={"book": 0.1, "web": 0.9}) for rank in range(ranks[0])]
    [alone] = loaders((1, 1))
    expected = rows_of(take(alone, 2 * alone.num_rows))
    first, second = loaders(before), loaders(after)
    seen = [rows_of(batches) for batches in zip(*(take(loader, 3) for loader in first))]
    state = json.loads(json.dumps(first[0].state_dict()))
    assert all(loader.state_dict() == state for loader in first)
    for loader in second: loader.load_state_dict(state)
    rest = [list(loader) for loader in second]
    assert len({len(batches) for batches in rest}) == 1
    assert sum(seen, []) + sum((rows_of(batches) for batches in zip(*rest)), []) == expected[:alone.num_rows]


def test_weights_change_with_the_next_batch_whatever_was_read_ahead(shards):
    def run(prefetch_batches, resume_at=None):
        options = dict(batch_size=5, seq_len=16, seed=1, weights={"code": 0.5, "web": 0.5}, prefetch_batches=prefetch_batches)
        loader, batches = TokenLoader(shards, **options), []
        for step in range(40):
            if step == 7: loader.set_weights({"book": 0.8, "web": 0.2})
            if step == 21: loader.set_weights({"code": 1})
            if step == resume_at:
                state, loader = json.dumps(loader.state_dict()), TokenLoader(shards, **options)
                loader.load_state_dict(json.loads(state))
            batches.append(next(endless(loader)))
        return rows_of(batches), sources_in(batches)
    rows, sources = run(2)
    assert run(0)[0] == rows
    assert [run(2, stop)[0] == rows for stop in (0, 6, 7, 8, 21, 30)] == [True] * 6
    assert set(sources[:35]) == {1, 2} and set(sources[105:]) == {1}
    assert np.abs(np.cumsum(sources[35:105] == 0) - 0.8 * np.arange(1, 71)).max() <= 1


def test_the_running_iterator_takes_new_weights_at_once(shards):
    loader = TokenLoader(shards, batch_size=10, seq_len=16, weights={"web": 1})
    batches = iter(loader)
    assert set(sources_in([next(batches)])) == {2}
    loader.set_weights({"code": 1})
    assert set(sources_in([next(batches)])) == {1}
    assert loader.position == 20


def test_sources_without_a_share_are_counted(shards):
    loader = TokenLoader(shards, batch_size=4, seq_len=16, weights={"web": 1})
    sizes = np.bincount(np.concatenate([shard // 10_000 for shard in shards.shards]), minlength=3)
    assert loader.left_out == {"book": sizes[0], "code": sizes[1]}
    report = loader.report()
    assert report["left_out_tokens"] == sizes[0] + sizes[1]
    assert loader.num_rows * 16 + 1 + report["dropped_tokens"] + report["left_out_tokens"] == shards.num_tokens


def test_weights_that_rows_by_length_leave_unused_are_named(shards):
    cfg = DataConfig(lengths=[8, 16])
    feed = TokenLoader(shards, batch_size=4, seq_len=16, lengths=[8, 16]).feed
    assert mix_notes(feed, cfg) == []
    write_json(shards.path / "weights.json", {"web": 0.5})
    [note] = mix_notes(feed, cfg)
    assert note.startswith("data.lengths mixes nothing: the weights in ") and "weights.json are not used" in note
    assert mix_notes(feed, DataConfig(lengths=[8, 16], source_weights="none")) == []


def test_a_shift_of_names_is_refused(shards):
    options = dict(batch_size=4, seq_len=16)
    with pytest.raises(UserError, match="no source 'wbe'.*did you mean 'web'"): TokenLoader(shards, weights={"wbe": 1}, **options)
    with pytest.raises(UserError, match="share of web is -1"): TokenLoader(shards, weights={"web": -1}, **options)
    with pytest.raises(UserError, match="too few for a row"): TokenLoader(shards, batch_size=4, seq_len=5_000, weights={"web": 1})
    loader = TokenLoader(shards, weights={"web": 1}, **options)
    with pytest.raises(UserError, match="rows packed.*it is mixed"): loader.load_state_dict(TokenLoader(shards, **options).state_dict())
    state = loader.state_dict()
    with pytest.raises(UserError, match="mixed in order 1, this release mixes them in order 2"): loader.load_state_dict({**state, "mix": {key: value for key, value in state["mix"].items() if key != "order"}})
    with pytest.raises(UserError, match="by film"): loader.load_state_dict({**state, "mix": {**state["mix"], "counts": {**state["mix"]["counts"], "film": 0}}})


def test_thousands_of_hosts_are_pooled_and_drawn_by_their_multiplier(tmp_path):
    rng = np.random.default_rng(1)
    docs = [EncodedDocument(np.full(33, host), str(number), f"host{host:04d}") for number, host in enumerate(rng.permutation(np.repeat(np.arange(2_000), 4)))]
    write_shards(docs, tmp_path / "hosts", vocab_size=40_000, tokenizer_fingerprint="f1", shard_tokens=50_000)
    shards = open_shards(tmp_path / "hosts")
    multipliers = {f"host{host:04d}": (0.25, 0.5)[host % 2] for host in range(1_000)}
    mixture = shares_from_weights(shards, multipliers)
    assert set(mixture.streams.values()) == {"x0.25", "x0.50", "x1.00"} and len(mixture.streams) == 2_000
    loader = TokenLoader(shards, batch_size=50, seq_len=32, weights=mixture)
    assert len(json.dumps(loader.state_dict())) < 600
    tokens = np.bincount(torch.cat([batch.inputs.flatten() for batch in take(loader, 60)]).numpy(), minlength=2_000)
    means = tokens[:1_000:2].mean(), tokens[1:1_000:2].mean(), tokens[1_000:].mean()
    assert abs(means[0] / means[2] - 0.25) < 0.04 and abs(means[1] / means[2] - 0.5) < 0.06
    assert TokenLoader(shards, batch_size=50, seq_len=32, weights=Mixture({"all": 1}, dict.fromkeys(mixture.streams, "all"))).num_rows == 8_000 * 33 // 32 - (8_000 * 33 % 32 == 0)


def test_positions_far_into_a_run_are_found_at_once():
    shares = np.array([0.7, 0.2, 0.0999, 0.0001])
    counts = counts_at(shares, 10**11)
    assert counts.sum() == 10**11 and np.abs(counts - shares * 10**11).max() <= 2
    streams, numbers = rows_due(shares, 10**11, 10**11 + 5_000)
    for stream in range(4):
        own = numbers[streams == stream]
        assert own.tolist() == list(range(counts[stream], counts[stream] + len(own)))


def test_rows_of_many_stretches_are_copied_once(tmp_path):
    docs = [EncodedDocument(np.arange(500) % 7, str(number), ("a", "b")[number % 2]) for number in range(2_000)]
    write_shards(docs, tmp_path / "two", vocab_size=10, tokenizer_fingerprint="f1")
    shards = open_shards(tmp_path / "two")
    plan = cut_streams(shards, 4_096)
    spans, out, maps = plan.spans(np.arange(64)), np.empty((64, 4_097), np.int64), [np.asarray(shard) for shard in shards.shards]
    assert len(spans.rows) > 500
    tracemalloc.start()
    read_rows(maps, spans, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.2 * out.nbytes / 4
