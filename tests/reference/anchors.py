"""Anchors with Python's unbounded integers, one position after the other."""

from collections.abc import Sequence

MODULUS = 1 << 64


def splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) % MODULUS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % MODULUS
    return z ^ (z >> 31)


def mix(*values: int) -> int:
    """Unsigned 64-bit hash of a sequence of integers; a negative one counts as its two's complement."""
    hashed = 0
    for value in values:
        hashed = splitmix64(hashed ^ (value % MODULUS))
    return hashed


def key(seed: int, epoch: int, row_id: int, position: int) -> int:
    return (mix(seed, epoch, row_id, position) % (1 << 46)) * (1 << 17) + position


def valid_positions(loss_mask: Sequence[int], document_ids: Sequence[int]) -> list[int]:
    """Positions whose own and next token are both supervised and of one document."""
    valid = []
    for position in range(len(loss_mask) - 1):
        supervised = loss_mask[position] and loss_mask[position + 1]
        if supervised and document_ids[position] == document_ids[position + 1] >= 0:
            valid.append(position)
    return valid


def choose(
    loss_mask: Sequence[int], document_ids: Sequence[int], *, row_id: int, seed: int, epoch: int, num_anchors: int
) -> list[int]:
    """Ascending anchors of one row: at most `num_anchors`, fewer when the row has fewer valid positions."""
    by_key = sorted(valid_positions(loss_mask, document_ids), key=lambda position: key(seed, epoch, row_id, position))
    return sorted(by_key[:num_anchors])
