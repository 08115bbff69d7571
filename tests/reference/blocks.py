"""What the blocks of a row hold, must predict and weigh; simulated acceptance."""

import math
from collections.abc import Sequence


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def supervised_slots(
    loss_mask: Sequence[int], document_ids: Sequence[int], *, anchor: int, block_size: int
) -> list[bool]:
    """Slot j counts when slots 1..j are all inside the anchor's document and in the loss mask; slot 0 never counts."""
    supervised = [False] * block_size
    for slot in range(1, block_size):
        for other in range(1, slot + 1):
            token = anchor + other
            if token >= len(loss_mask) or document_ids[token] != document_ids[anchor] or not loss_mask[token]:
                break
        else:
            supervised[slot] = True
    return supervised


def slot_weight(slot: int, gamma: float) -> float:
    return math.exp(-(slot - 1) / gamma) if slot > 0 else 0.0


def accepted_length(predicted: Sequence[int], labels: Sequence[int], supervised: Sequence[bool]) -> int:
    """1 (the bonus token) + the leading slots predicted right, of those that the block has."""
    accepted = 1
    for slot in range(1, len(labels)):
        if not supervised[slot] or predicted[slot] != labels[slot]:
            break
        accepted += 1
    return accepted
