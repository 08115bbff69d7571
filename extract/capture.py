"""Rows of the plan through the target: what one shard is to hold. A function of its rows alone, whoever runs it.

Values that are not finite would spread: attention multiplies a masked neighbour by 0, and 0 · NaN is NaN. So a row that
shows one is run again document by document, and those at fault go to quarantine: mask 0, codes 0, named in the shard.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from extract.encode import encode
from extract.target import Target
from shards.codec import CODECS
from shards.record import Quarantined
from shards.schema import FINAL_HIDDEN, NO_DOCUMENT, RowArrays, hidden_name, scales_name
from shards.writer import ShardRows

SLOT_ARRAYS = ("input_ids", "position_ids", "document_ids", "loss_mask", "source_ids")


def capture_rows(
    target: Target, row_ids: Sequence[int], rows: Sequence[RowArrays], *, codec: str, on_row: Callable[[int], None]
) -> ShardRows:
    """Run `rows` one by one, because a batch's size would show in the last bits; `on_row` is told how many are done."""
    slots = {name: np.stack([getattr(row, name) for row in rows]) for name in SLOT_ARRAYS}
    stored = _allocate(target, codec, slots["input_ids"].shape)
    quarantined: list[Quarantined] = []
    for row in range(len(rows)):
        encoded, is_finite_LT = _run(target, codec, slots, row, slice(None))
        if is_finite_LT.all():
            for name in stored:
                stored[name][row] = encoded[name]
        else:
            quarantined += _capture_documents(target, codec, slots, stored, row)
        on_row(row + 1)
    return ShardRows(
        row_ids=np.array(row_ids, np.int64),
        hidden={layer: stored.pop(hidden_name(layer)) for layer in target.captured_layers if layer < target.num_layers},
        final_hidden=stored.pop(FINAL_HIDDEN, None),
        scales=stored,  # what is left
        quarantined=tuple(quarantined),
        **slots,
    )


def _capture_documents(
    target: Target, codec: str, slots: dict[str, np.ndarray], stored: dict[str, np.ndarray], row: int
) -> list[Quarantined]:
    """Run each document of `row` alone into `stored`; take those that are not finite out of `slots`' loss mask."""
    quarantined = []
    document_ids_T = slots["document_ids"][row]
    for document in np.unique(document_ids_T[document_ids_T != NO_DOCUMENT]):
        own = np.flatnonzero(document_ids_T == document)
        tokens = slice(own[0], own[-1] + 1)
        encoded, is_finite_LT = _run(target, codec, slots, row, tokens)
        if is_finite_LT.all():
            for name in stored:
                stored[name][row, tokens] = encoded[name]
        else:
            slots["loss_mask"][row, tokens] = 0
            layer_idx, position = np.argwhere(~is_finite_LT)[0]
            layer = target.captured_layers[layer_idx]
            quarantined.append(Quarantined(document=int(document), layer=layer, position=int(position)))
    return quarantined


def _run(
    target: Target, codec: str, slots: dict[str, np.ndarray], row: int, tokens: slice
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What is to be stored of slots of a row, by array, 0 in padding; and bool [layers, T]: all values finite.

    Encoded on the target's device: half the bytes to copy or less, and the codes there are the codes here.
    """
    names = ("input_ids", "position_ids", "document_ids")
    ids_T, positions_T, documents_T = (torch.from_numpy(slots[n][row, tokens]).long().to(target.device) for n in names)
    is_padding_T1 = (documents_T == NO_DOCUMENT)[:, None]
    states = target.run(ids_T[None], positions_T[None], documents_T[None])
    encoded: dict[str, np.ndarray] = {}
    is_finite = []
    for layer in target.captured_layers:
        name = _states_name(target, layer)
        of_layer = encode(codec, states[layer][0].masked_fill(is_padding_T1, 0))
        encoded[name] = of_layer.codes.cpu().numpy()
        if of_layer.scales is not None:
            encoded[scales_name(name)] = of_layer.scales.cpu().numpy()
        is_finite.append(of_layer.is_finite)
    return encoded, torch.stack(is_finite).cpu().numpy()


def _allocate(target: Target, codec: str, shape_RT: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Zeros for all that is to be stored, by array."""
    kind, stored = CODECS[codec], {}
    for name in (_states_name(target, layer) for layer in target.captured_layers):
        stored[name] = np.zeros((*shape_RT, kind.code_width(target.hidden_size)), kind.code_dtype)
        if scale_width := kind.scale_width(target.hidden_size):
            stored[scales_name(name)] = np.zeros((*shape_RT, scale_width), np.uint16)
    return stored


def _states_name(target: Target, layer: int) -> str:
    return FINAL_HIDDEN if layer == target.num_layers else hidden_name(layer)
