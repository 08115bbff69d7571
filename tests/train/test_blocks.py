"""Blocks: labels without a shift, the contiguous prefix, context ranges, slot weights, simulated acceptance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import blocks as reference
from tests.train.rows import Row, adversarial_packings, pack, stack
from train.blocks import Blocks, accepted_lengths, build_blocks, slot_weights
from train.config import DEFAULT_GAMMA, default_target_layer_ids

MASK_TOKEN_ID = 49


def build(row: Row, anchors: list[int], block_size: int, *, num_padding_blocks: int = 0) -> Blocks:
    """The blocks of one row, [1, N, …]."""
    return build_blocks(
        input_ids_RT=stack([row], "input_ids", torch.int32),
        position_ids_RT=stack([row], "position_ids", torch.int32),
        document_ids_RT=stack([row], "document_ids", torch.int32),
        loss_mask_RT=stack([row], "loss_mask", torch.uint8),
        anchors_RN=torch.tensor([anchors + [0] * num_padding_blocks]),
        is_block_RN=torch.tensor([[True] * len(anchors) + [False] * num_padding_blocks]),
        block_size=block_size,
        mask_token_id=MASK_TOKEN_ID,
    )


def check_against_reference(row: Row, block_size: int) -> None:
    """Every slot of the row that lies in a document starts a block, valid anchor or not."""
    anchors = [t for t, document in enumerate(row.document_ids) if document >= 0]
    blocks = build(row, anchors, block_size, num_padding_blocks=2)
    for n, anchor in enumerate(anchors):
        supervised = reference.supervised_slots(row.loss_mask, row.document_ids, anchor=anchor, block_size=block_size)
        assert blocks.supervised_RNB[0, n].tolist() == supervised
        assert blocks.token_ids_RNB[0, n].tolist() == [row.input_ids[anchor]] + [MASK_TOKEN_ID] * (block_size - 1)
        position = row.position_ids[anchor]
        assert blocks.position_ids_RNB[0, n].tolist() == [position + slot for slot in range(block_size)]
        for slot in range(block_size):
            if supervised[slot]:
                assert blocks.labels_RNB[0, n, slot] == row.input_ids[anchor + slot]
        assert blocks.context_start_RN[0, n] == row.document_ids.index(row.document_ids[anchor])
        assert blocks.context_end_RN[0, n] == anchor
    padding = slice(len(anchors), None)
    assert not blocks.supervised_RNB[0, padding].any()
    assert (blocks.context_start_RN[0, padding] == blocks.context_end_RN[0, padding]).all()


@pytest.mark.parametrize("name", adversarial_packings(40))
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_adversarial_packings_equal_the_oracle(name, block_size):
    check_against_reference(pack(adversarial_packings(40)[name], 40), block_size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=5), st.sampled_from([0.1, 0.5]), st.integers(2, 9), st.integers(0, 99))
def test_rows_with_holes_in_the_loss_mask_equal_the_oracle(lengths, holes, block_size, seed):
    check_against_reference(pack(lengths, 48, holes=holes, seed=seed), block_size)


def test_a_hole_ends_the_supervised_prefix():
    row = pack([12], 12)
    row.loss_mask[4] = 0
    blocks = build(row, [1], 8)
    assert blocks.supervised_RNB[0, 0].tolist() == [False, True, True, False, False, False, False, False]


def test_labels_are_not_shifted():
    row = pack([20], 20, vocab_size=1000)
    blocks = build(row, [3], 5)
    assert blocks.labels_RNB[0, 0].tolist() == row.input_ids[3:8]


def test_inputs_of_any_integer_type_give_the_same_blocks():
    row = pack([9, 7], 18, holes=0.2)
    narrow = build(row, [0, 5, 10], 4)
    wide = build_blocks(
        input_ids_RT=stack([row], "input_ids"),
        position_ids_RT=stack([row], "position_ids"),
        document_ids_RT=stack([row], "document_ids"),
        loss_mask_RT=stack([row], "loss_mask"),
        anchors_RN=torch.tensor([[0, 5, 10]]),
        is_block_RN=torch.ones(1, 3, dtype=torch.bool),
        block_size=4,
        mask_token_id=MASK_TOKEN_ID,
    )
    for name, value in narrow._asdict().items():
        assert torch.equal(value, getattr(wide, name)), name


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (7, 4.0), (2, 0.5)])
def test_slot_weights(block_size, gamma):
    expected = [reference.slot_weight(slot, gamma) for slot in range(block_size)]
    assert slot_weights(block_size, gamma).tolist() == pytest.approx(expected, rel=1e-6)
    assert expected[:2] == [0.0, 1.0]


def test_default_gamma_is_the_published_one():
    assert DEFAULT_GAMMA == {16: 7.0, 10: 5.0, 8: 4.0, 7: 4.0}
    assert slot_weights(16, DEFAULT_GAMMA[16])[8] == pytest.approx(math.exp(-1))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(0, 999))
def test_accepted_lengths_equal_the_oracle(block_size, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 5, block_size)
    labels = torch.randint(0, 3, shape, generator=generator)
    predicted = torch.where(torch.rand(shape, generator=generator) < 0.7, labels, labels + 1)
    supervised = torch.rand(shape, generator=generator) < 0.8
    supervised[..., 0] = False
    expected = [
        [
            reference.accepted_length(predicted[r, n].tolist(), labels[r, n].tolist(), supervised[r, n].tolist())
            for n in range(5)
        ]
        for r in range(2)
    ]
    assert accepted_lengths(predicted == labels, supervised).tolist() == expected


@pytest.mark.parametrize(
    ("num_target_layers", "expected"),
    [
        (24, [1, 6, 11, 16, 21]),
        (28, [1, 7, 13, 19, 25]),
        (30, [1, 8, 14, 20, 27]),
        (36, [1, 9, 17, 25, 33]),
        (64, [1, 16, 31, 46, 61]),
    ],
)
def test_default_layers_of_five(num_target_layers, expected):
    assert list(default_target_layer_ids(num_target_layers, 5)) == expected
    assert reference.default_target_layer_ids(num_target_layers, 5) == expected


def test_default_layers_of_any_drafter_equal_the_oracle():
    for num_target_layers in range(6, 100):
        assert default_target_layer_ids(num_target_layers, 1) == (num_target_layers // 2,)
        for num_draft_layers in range(1, 9):
            expected = reference.default_target_layer_ids(num_target_layers, num_draft_layers)
            assert list(default_target_layer_ids(num_target_layers, num_draft_layers)) == expected
            assert max(expected) <= num_target_layers - 2, "the last layer is never a feature"
