"""The mask pair by pair on packings that are easy to get wrong, and attention through it."""

import pytest
import torch

from tests.reference import mask as reference
from tests.reference.drafter import attend
from tests.train.rows import Row, adversarial_packings, pack, stack
from train.attention import block_attention, block_mask
from train.blocks import build_blocks

NUM_TOKENS = 32
WINDOWS = [None, 1, 3, 8]


def context_ranges(row: Row, anchors: list[int], *, num_padding_blocks: int, block_size: int) -> dict:
    blocks = build_blocks(
        input_ids_RT=stack([row], "input_ids"),
        position_ids_RT=stack([row], "position_ids"),
        document_ids_RT=stack([row], "document_ids"),
        loss_mask_RT=stack([row], "loss_mask"),
        anchors_RN=torch.tensor([anchors + [0] * num_padding_blocks]),
        is_block_RN=torch.tensor([[True] * len(anchors) + [False] * num_padding_blocks]),
        block_size=block_size,
        mask_token_id=0,
    )
    return {"context_start_RN": blocks.context_start_RN, "context_end_RN": blocks.context_end_RN}


def expected_mask(
    row: Row, anchors: list[int | None], *, block_size: int, sliding_window: int | None, is_causal: bool
) -> torch.Tensor:
    """[N·B, T + N·B], asked pair by pair."""
    queries = [(n, slot) for n in range(len(anchors)) for slot in range(block_size)]
    sees = torch.zeros(len(queries), len(row.input_ids) + len(queries), dtype=torch.bool)
    for q, (n, slot) in enumerate(queries):
        for token in range(len(row.input_ids)):
            sees[q, token] = anchors[n] is not None and reference.sees_context(
                row.document_ids,
                row.position_ids,
                anchor=anchors[n],
                slot=slot,
                token=token,
                sliding_window=sliding_window,
            )
        for k, (m, other) in enumerate(queries):
            sees[q, len(row.input_ids) + k] = reference.sees_slot(
                n, slot, m, other, sliding_window=sliding_window, is_causal=is_causal
            )
    return sees


@pytest.mark.parametrize("name", adversarial_packings(NUM_TOKENS))
@pytest.mark.parametrize("sliding_window", WINDOWS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_pair_equals_the_predicate(name, sliding_window, is_causal):
    row = pack(adversarial_packings(NUM_TOKENS)[name], NUM_TOKENS)
    anchors = [t for t, document in enumerate(row.document_ids) if document >= 0][::2]
    ranges = context_ranges(row, anchors, num_padding_blocks=2, block_size=3)
    [sees] = block_mask(
        **ranges, num_context_tokens=NUM_TOKENS, block_size=3, sliding_window=sliding_window, is_causal=is_causal
    )
    expected = expected_mask(
        row, [*anchors, None, None], block_size=3, sliding_window=sliding_window, is_causal=is_causal
    )
    wrong = (sees != expected).nonzero().tolist()
    assert not wrong, f"query {wrong[0][0]}, key {wrong[0][1]} of {name}: {len(wrong)} pairs differ"


def test_padding_blocks_see_themselves_only():
    row = pack([NUM_TOKENS], NUM_TOKENS)
    ranges = context_ranges(row, [9], num_padding_blocks=1, block_size=4)
    [sees] = block_mask(**ranges, num_context_tokens=NUM_TOKENS, block_size=4, sliding_window=None, is_causal=False)
    keys = sees[4:].nonzero()[:, 1].unique().tolist()
    assert keys == [NUM_TOKENS + 4 + slot for slot in range(4)]


@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("sliding_window", "is_causal"), [(None, False), (None, True), (4, True), (4, False)])
def test_attention_equals_the_oracle(num_heads, num_key_value_heads, sliding_window, is_causal):
    """fp32 against fp64: the softmax of ≤ 40 unit-scale terms is off by a few units in the last place, 1e-6 at most."""
    row, block_size, head_dim = pack([11, 1, 14], NUM_TOKENS), 3, 8
    anchors = [2, 10, 12, 20, 25]
    num_blocks = len(anchors) + 1
    ranges = context_ranges(row, anchors, num_padding_blocks=1, block_size=block_size)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, head_dim, generator=generator)

    query = normal(num_blocks, block_size, num_heads)
    context_key, context_value = (normal(NUM_TOKENS, num_key_value_heads) for _ in range(2))
    block_key, block_value = (normal(num_blocks, block_size, num_key_value_heads) for _ in range(2))
    output = block_attention(
        query,
        context_key,
        context_value,
        block_key,
        block_value,
        **ranges,
        sliding_window=sliding_window,
        is_causal=is_causal,
    )

    sees = expected_mask(
        row, [*anchors, None], block_size=block_size, sliding_window=sliding_window, is_causal=is_causal
    )
    keys = torch.cat((context_key[0], block_key[0].flatten(0, 1))).double()
    values = torch.cat((context_value[0], block_value[0].flatten(0, 1))).double()
    queries = query[0].flatten(0, 1).double()
    expected = torch.empty(len(queries), num_heads, head_dim, dtype=torch.float64)
    for q in range(len(queries)):
        seen = sees[q].nonzero()[:, 0].tolist()
        for head in range(num_heads):
            group = head * num_key_value_heads // num_heads
            expected[q, head] = attend(
                queries[q, head], [keys[k, group] for k in seen], [values[k, group] for k in seen]
            )
    torch.testing.assert_close(output[0].flatten(0, 1).double(), expected, atol=2e-6, rtol=1e-5)
