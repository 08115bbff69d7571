"""Anchors: golden vectors, the oracle, and what the draw promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference import anchors as reference
from tests.train.rows import Row, adversarial_packings, pack, stack
from train.anchors import mix, select_anchors

GOLDEN = [
    ((0, 0, 0, 0), 0x2130748AAAC80268, 7572052425537748992),
    ((42, 3, 1234567, 4095), 0x98EE80B03532B68D, 99196175656816639),
]
UNSIGNED = 1 << 64


def draw(rows: list[Row], row_ids: list[int], *, seed: int, epoch: int | Tensor, num_anchors: int) -> list[list[int]]:
    anchors_RN, is_block_RN = select_anchors(
        loss_mask_RT=stack(rows, "loss_mask", torch.uint8),
        document_ids_RT=stack(rows, "document_ids", torch.int32),
        row_ids_R=torch.tensor(row_ids),
        seed=seed,
        epoch=epoch,
        num_anchors=num_anchors,
    )
    assert anchors_RN.dtype == torch.int64
    assert anchors_RN.shape == is_block_RN.shape == (len(rows), num_anchors)
    drawn = []
    for anchors, is_block in zip(anchors_RN, is_block_RN, strict=True):
        num_blocks = int(is_block.sum())
        assert is_block[:num_blocks].all(), "padding blocks come last"
        assert (anchors[num_blocks:] == 0).all()
        drawn.append(anchors[:num_blocks].tolist())
    return drawn


@pytest.mark.parametrize(("values", "hashed", "key"), GOLDEN)
def test_golden_vectors(values, hashed, key):
    assert reference.mix(*values) == hashed
    assert reference.key(*values) == key
    assert int(mix(*values)) % UNSIGNED == hashed


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=5))
def test_mix_equals_the_oracle(values):
    assert int(mix(*values)) % UNSIGNED == reference.mix(*values)


def test_mix_broadcasts():
    rows, positions = torch.arange(3)[:, None], torch.arange(4)
    expected = [[reference.mix(7, row, position) for position in range(4)] for row in range(3)]
    assert [[int(h) % UNSIGNED for h in row] for row in mix(7, rows, positions)] == expected


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=8),
    holes=st.sampled_from([0.0, 0.2, 1.0]),
    row_id=st.integers(-1, 1 << 40),
    seed=st.integers(0, 1 << 31),
    epoch=st.integers(0, 100),
    num_anchors=st.integers(1, 40),
)
def test_any_row_equals_the_oracle(lengths, holes, row_id, seed, epoch, num_anchors):
    row = pack(lengths, 72, holes=holes)
    expected = reference.choose(
        row.loss_mask, row.document_ids, row_id=row_id, seed=seed, epoch=epoch, num_anchors=num_anchors
    )
    assert draw([row], [row_id], seed=seed, epoch=epoch, num_anchors=num_anchors) == [expected]


@pytest.mark.parametrize("name", adversarial_packings(64))
def test_adversarial_packings_equal_the_oracle(name):
    row = pack(adversarial_packings(64)[name], 64, holes=0.1)
    for num_anchors in (1, 16, 64):
        expected = reference.choose(row.loss_mask, row.document_ids, row_id=5, seed=1, epoch=2, num_anchors=num_anchors)
        assert draw([row], [5], seed=1, epoch=2, num_anchors=num_anchors) == [expected]


def test_the_longest_row_equals_the_oracle():
    """Positions take the key's low 17 bits: the last valid one of a row of 2^17 slots must survive the round trip."""
    num_tokens = 1 << 17
    row = pack([num_tokens], num_tokens)
    valid = num_tokens - 1
    [drawn] = draw([row], [3], seed=0, epoch=0, num_anchors=valid)
    assert drawn == list(range(valid))
    keys = sorted((reference.key(0, 0, 3, position), position) for position in range(valid))
    [drawn] = draw([row], [3], seed=0, epoch=0, num_anchors=100)
    assert drawn == sorted(position for _, position in keys[:100])


def test_a_row_is_drawn_alike_in_any_batch():
    """Independent of the rows beside it, of its place among them, and of how the epoch is passed."""
    rows = [pack([20, 12], 40, holes=0.1, seed=seed) for seed in range(4)]
    together = draw(rows, [10, 11, 12, 13], seed=4, epoch=1, num_anchors=9)
    alone = [draw([row], [10 + i], seed=4, epoch=1, num_anchors=9)[0] for i, row in enumerate(rows)]
    reverse = draw(rows[::-1], [13, 12, 11, 10], seed=4, epoch=torch.tensor(1), num_anchors=9)
    assert together == alone == reverse[::-1]


def test_every_key_input_changes_the_draw():
    row = pack([200], 200)
    draws = {
        tuple(draw([row], [row_id], seed=seed, epoch=epoch, num_anchors=20)[0])
        for row_id in range(3)
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(draws) == 27


def test_the_draw_is_uniform_without_replacement():
    """Over E epochs each of M valid positions is drawn about E·N/M times, whatever document it is in.

    A position's count has the variance E·(N/M)(1 − N/M); the counts add up to E·N, so Σ (count − mean)²/variance
    times (M − 1)/M is χ² with M − 1 degrees of freedom, whose standard deviation is √(2(M − 1)).
    """
    lengths = [2, 40, 3, 17, 2, 30, 5]
    num_epochs, num_anchors = 2000, 24
    row = pack(lengths, 104)
    valid = reference.valid_positions(row.loss_mask, row.document_ids)
    counts = torch.zeros(104)
    for epoch in range(num_epochs):
        [drawn] = draw([row], [77], seed=9, epoch=epoch, num_anchors=num_anchors)
        assert len(set(drawn)) == num_anchors
        counts[drawn] += 1
    share = num_anchors / len(valid)
    assert counts[[p for p in range(104) if p not in valid]].sum() == 0
    freedom = len(valid) - 1
    squares = (counts[valid] - num_epochs * share) ** 2 / (num_epochs * share * (1 - share))
    chi_square = squares.mean() * freedom
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)
