"""Anchors: which tokens of a row start a block, a pure function of (seed, epoch, row id, position).

No generator state exists: the same bits on CPU and GPU, for any number of ranks, after any resume. Every position gets
a 63-bit key; a row's anchors are its valid positions with the N smallest keys.
"""

import torch
from torch import Tensor

POSITION_BITS = 17  # a row has at most 2^17 token slots
HASH_BITS = 46
INVALID_KEY = (1 << 63) - 1  # above every key


def mix(*values: Tensor | int) -> Tensor:
    """Hash integers (broadcast against each other) to int64 holding 64 uniform bits: h = f(h xor v) for each v in turn.

    f is splitmix64's finaliser with its increment. int64 products wrap modulo 2^64; right shifts must be logical.
    """
    hashed: Tensor | int = 0
    for value in values:
        hashed = _splitmix64(torch.as_tensor(value) ^ hashed)
    return hashed


def select_anchors(
    *,
    loss_mask_RT: Tensor,
    document_ids_RT: Tensor,
    row_ids_R: Tensor,
    seed: int,
    epoch: Tensor | int,
    num_anchors: int,
) -> tuple[Tensor, Tensor]:
    """Draw `num_anchors` anchors of each row, uniformly without replacement among its valid ones.

    A position is valid when it and the next one are supervised (loss mask) and of one document. Returns
    (anchors_RN int64, ascending positions in the row; is_block_RN bool). Where a row has fewer valid positions, the
    last entries are padding blocks: anchor 0, is_block False.
    """
    num_tokens = loss_mask_RT.shape[1]
    positions_T = torch.arange(num_tokens, device=loss_mask_RT.device)
    supervised_RT = loss_mask_RT.bool() & (document_ids_RT >= 0)
    valid_RT = torch.zeros_like(supervised_RT)
    valid_RT[:, :-1] = (
        supervised_RT[:, :-1] & supervised_RT[:, 1:] & (document_ids_RT[:, :-1] == document_ids_RT[:, 1:])
    )
    keys_RT = _keys(mix(seed, epoch, row_ids_R[:, None], positions_T), positions_T)
    keys_RT = torch.where(valid_RT, keys_RT, INVALID_KEY)
    chosen_RN = torch.topk(keys_RT, num_anchors, dim=1, largest=False, sorted=False).values
    positions_RN = torch.where(chosen_RN == INVALID_KEY, num_tokens, chosen_RN & ((1 << POSITION_BITS) - 1))
    positions_RN = positions_RN.sort(dim=1).values
    is_block_RN = positions_RN < num_tokens
    return torch.where(is_block_RN, positions_RN, 0), is_block_RN


def _keys(hashed: Tensor, positions: Tensor) -> Tensor:
    """Keys that are unique by construction: the hash's low bits above the position itself."""
    return (hashed & ((1 << HASH_BITS) - 1)) << POSITION_BITS | positions


def _splitmix64(z: Tensor) -> Tensor:
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own shift copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= 1 << 63 else value
