"""Which key a query may see, one pair at a time."""

from collections.abc import Sequence


def is_causal_inside_block(layer_type: str, is_causal: bool | None) -> bool:
    """Full layers see the block both ways unless told otherwise, sliding layers causally unless told otherwise."""
    if is_causal is not None:
        return is_causal
    return layer_type == "sliding_attention"


def sees_context(
    document_ids: Sequence[int],
    positions: Sequence[int],
    *,
    anchor: int,
    slot: int,
    token: int,
    sliding_window: int | None,
) -> bool:
    """Does slot `slot` of the block at `anchor` see the context feature of `token`, both slots of the row?"""
    if document_ids[token] != document_ids[anchor]:
        return False
    if token >= anchor:  # at inference the anchor's own feature does not exist yet
        return False
    query_position = positions[anchor] + slot
    return sliding_window is None or query_position - positions[token] < sliding_window


def sees_slot(
    query_block: int, query_slot: int, key_block: int, key_slot: int, *, sliding_window: int | None, is_causal: bool
) -> bool:
    """Does one block slot see another? A window narrower than the block counts both ways, as the client has it."""
    if query_block != key_block:
        return False
    if is_causal and key_slot > query_slot:
        return False
    return sliding_window is None or abs(query_slot - key_slot) < sliding_window
