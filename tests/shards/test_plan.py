"""The plan: every document once, whole, in its split; rows full and mixed; a function of data and configuration."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.documents import Batch, Collector, Document, Limits, Tokenised
from shards.errors import UsageError
from shards.manifest import Plan
from shards.plan import make_plan, pack, rows_per_shard
from shards.schema import PLAN_COLUMNS, PlanArrays
from tests.reference.packing import check_plan, heldout, least_rows

LIMITS = Limits(row_tokens=1 << 17, over_length="drop", min_supervised_tokens=1, mask_token_id=3, vocab_size=300)
TARGET = TargetConfig(path="t", hidden_size=8, num_layers=4, vocab_size=300, mask_token_id=3)


def document(record: int, length: int, source: str = "a", seed: int = 0) -> Document:
    rng = np.random.default_rng([seed, record])
    return Document(
        record=record,
        source=source,
        token_ids=rng.integers(4, 300, length, dtype=np.int32),
        loss_mask=np.concatenate([rng.integers(0, 2, length - 2, dtype=np.uint8), np.ones(2, np.uint8)]),
    )


def plan_of(
    documents: Sequence[Document], row_tokens: int, holdout_fraction: float = 0.25, seed: int = 0
) -> tuple[Plan, PlanArrays]:
    data = DataConfig(files=("f",), holdout_fraction=holdout_fraction, seed=seed)
    tokenised = collect(documents, seed=seed)
    plan, layout = make_plan(tokenised, TARGET, data, CacheConfig(row_tokens=row_tokens, layers=(0, 2)))
    return plan, layout.arrays(tokenised, Path())


def collect(documents: Sequence[Document], seed: int = 0, batch_size: int = 7) -> Tokenised:
    collector = Collector(Path())
    for i in range(0, len(documents), batch_size):
        collector.add(Batch.of(documents[i : i + batch_size], LIMITS, seed))
    return collector.finish()


def check(documents: Sequence[Document], plan: Plan, arrays: PlanArrays, row_tokens: int, fraction: float) -> None:
    check_plan(
        {d.record: (d.source, d.token_ids.tolist(), d.loss_mask.tolist()) for d in documents},
        {name: getattr(arrays, name).tolist() for name in PLAN_COLUMNS},
        plan.sources,
        row_tokens,
        plan.num_rows,
        plan.num_train_rows,
        fraction,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60),
    row_tokens=st.integers(40, 90),
    fraction=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 5),
)
def test_every_document_is_planned_once_and_whole(
    lengths: list[int], row_tokens: int, fraction: float, seed: int
) -> None:
    documents = [document(i, n, source="abc"[i % 3], seed=seed) for i, n in enumerate(lengths)]
    assume(not all(heldout(d.token_ids.tolist(), fraction) for d in documents))
    plan, arrays = plan_of(documents, row_tokens, fraction)
    check(documents, plan, arrays, row_tokens, fraction)
    arrays.check(plan)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200),
    row_tokens=st.integers(50, 120),
    window=st.integers(1, 64),
)
def test_packing_is_a_partition_for_any_window(lengths: list[int], row_tokens: int, window: int) -> None:
    rows = list(pack(lengths, row_tokens, window))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= row_tokens for row in rows)
    # Best fit leaves no two rows that would fit into one, but for what the window could not see.
    if window >= len(lengths):
        assert len(rows) <= 2 * least_rows(lengths, row_tokens)


@pytest.mark.parametrize(
    ("mean", "sigma", "row_tokens"),
    [(948, 1.0, 8192), (948, 1.0, 4096), (240, 0.7, 2048), (100, 1.0, 8192), (1500, 0.5, 8192)],
)
def test_rows_are_full_and_mixed(mean: float, sigma: float, row_tokens: int) -> None:
    rng = np.random.default_rng(7)
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 4000)
    lengths = np.clip(drawn, 8, row_tokens).astype(int)
    rows = list(pack(lengths.tolist(), row_tokens))
    assert lengths.sum() / (len(rows) * row_tokens) >= 0.98
    # Neither long nor short documents are left for the end: a quarter of the rows has about a quarter of them.
    quarter = len(rows) // 4
    shares = [sum(map(len, rows[i * quarter : (i + 1) * quarter])) / len(lengths) for i in range(4)]
    assert max(shares) < 0.35
    assert min(shares) > 0.15


def test_few_documents_are_packed_as_tightly() -> None:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(np.log(200), 0.7, 200), 8, 2048).astype(int).tolist()
    assert len(list(pack(lengths, 2048))) == least_rows(lengths, 2048)


def test_documents_that_fill_a_row_have_one_each() -> None:
    assert list(pack([8, 8, 8], 8)) == [[0], [1], [2]]


def test_the_plan_is_a_pure_function() -> None:
    documents = [document(i, 5 + i % 30, source="ab"[i % 2]) for i in range(200)]
    plan, arrays = plan_of(documents, 64)
    again, arrays_again = plan_of(documents, 64)
    assert plan == again
    assert all((getattr(arrays, name) == getattr(arrays_again, name)).all() for name in PLAN_COLUMNS)


def test_the_seed_moves_documents_but_holds_out_the_same() -> None:
    documents = [document(i, 5 + i % 30) for i in range(200)]
    plan, arrays = plan_of(documents, 64, seed=0)
    other, arrays_other = plan_of(documents, 64, seed=1)

    def held(arrays: PlanArrays) -> set[int]:
        return set(arrays.document_record[arrays.document_split == 1].tolist())

    assert arrays.document_record.tolist() != arrays_other.document_record.tolist()
    assert held(arrays) == held(arrays_other)
    assert 0.15 < len(held(arrays)) / len(documents) < 0.35  # of a fraction of 0.25
    assert plan.num_heldout_documents == other.num_heldout_documents == len(held(arrays))


def test_copies_of_a_document_share_a_split() -> None:
    documents = [document(i, 20) for i in range(40)]
    copies = [dataclasses.replace(d, record=d.record + 40) for d in documents]
    _, arrays = plan_of([*documents, *copies], 64)
    split = dict(zip(arrays.document_record.tolist(), arrays.document_split.tolist(), strict=True))
    assert all(split[i] == split[i + 40] for i in range(40))


def test_rows_mix_sources_that_lie_apart_in_the_data() -> None:
    documents = [document(i, 20, source="a" if i < 200 else "b") for i in range(400)]
    plan, arrays = plan_of(documents, 400, holdout_fraction=0.0)
    for row in range(plan.num_rows):
        sources = arrays.document_source[arrays.document_row == row]
        assert 0.1 < sources.mean() < 0.9


def test_the_last_rows_in_packing_order_are_not_the_last_rows() -> None:
    documents = [document(i, 30) for i in range(61)]  # 30 rows of two and one of one
    plans = [plan_of(documents, 64, holdout_fraction=0.0, seed=seed)[1] for seed in range(4)]
    partial = [np.flatnonzero(np.bincount(arrays.document_row) == 1).tolist() for arrays in plans]
    assert len({tuple(rows) for rows in partial}) > 1


@pytest.mark.parametrize(("shard_bytes", "expected"), [(1, 1), (2 * 8 * 2 * 64 * 3, 3), (2 * 8 * 2 * 64 * 4 - 1, 3)])
def test_shards_are_no_larger_than_asked(shard_bytes: int, expected: int) -> None:
    cache = CacheConfig(row_tokens=64, layers=(0, 2), shard_bytes=shard_bytes)  # 2 layers · H 8 · 2 bytes · T 64 a row
    assert rows_per_shard(TARGET, cache) == expected


def test_the_final_hidden_state_counts_as_a_layer() -> None:
    cache = CacheConfig(row_tokens=64, layers=(0, 2), shard_bytes=3 * 8 * 2 * 64 * 2, final_hidden=True)
    assert rows_per_shard(TARGET, cache) == 2


def test_nothing_left_is_said_with_the_reasons() -> None:
    collector = Collector(None)
    collector.add(Batch.of([*((record, "no_anchor") for record in range(3)), (3, "empty")], LIMITS, 0))
    tokenised = collector.finish()
    data, cache = DataConfig(files=("f",)), CacheConfig(row_tokens=64, layers=(0,))
    with pytest.raises(UsageError, match="empty 1, no_anchor 3"):
        make_plan(tokenised, TARGET, data, cache)


def test_all_held_out_is_refused() -> None:
    one = document(0, 5)
    with pytest.raises(UsageError, match=r"all 1 documents are held out.*lower data\.holdout_fraction"):
        plan_of([one], 64, holdout_fraction=0.999_999_999)


def test_too_many_sources_are_refused() -> None:
    with pytest.raises(UsageError, match=r"more than 255 sources, '255' is one.*data\.source_field"):
        plan_of([document(i, 5, source=str(i)) for i in range(256)], 64)
