"""A row of the plan through the target: what a shard is to hold of it. A function of the row alone, whoever runs it.

Values that are not finite would spread: attention multiplies a masked neighbour by 0, and 0 · NaN is NaN. So a row that
shows one is run again document by document, and those at fault go to quarantine: mask 0, codes 0, named in the shard.
"""

import numpy as np
import torch

from extract.encode import encode
from extract.target import Target
from shards.codec import CODECS
from shards.record import Quarantined
from shards.schema import FINAL_HIDDEN, NO_DOCUMENT, ROW_IDS, RowArrays, hidden_name, scales_name
from shards.writer import ShardRow

Arrays = dict[str, np.ndarray]  # by the name of the array that they are stored in


def capture_row(target: Target, row_id: int, row: RowArrays, *, codec: str) -> ShardRow:
    """Run `row` alone, because a batch's size would show in the last bits."""
    slots = {ROW_IDS: np.int64(row_id), **vars(row)}
    stored, is_finite_LT = _run(target, codec, slots, slice(None))
    if is_finite_LT.all():
        return ShardRow(arrays=slots | stored)
    return _capture_documents(target, codec, slots)


def _capture_documents(target: Target, codec: str, slots: Arrays) -> ShardRow:
    """Run each document of a row alone; take those that are not finite out of the loss mask."""
    stored, loss_mask_T = _allocate(target, codec, len(slots["input_ids"])), slots["loss_mask"].copy()
    quarantined = []
    document_ids_T = slots["document_ids"]
    for document in np.unique(document_ids_T[document_ids_T != NO_DOCUMENT]):
        own = np.flatnonzero(document_ids_T == document)
        tokens = slice(own[0], own[-1] + 1)
        of_document, is_finite_LT = _run(target, codec, slots, tokens)
        if is_finite_LT.all():
            for name in stored:
                stored[name][tokens] = of_document[name]
        else:
            loss_mask_T[tokens] = 0
            layer_idx, position = np.argwhere(~is_finite_LT)[0]
            layer = target.captured_layers[layer_idx]
            quarantined.append(Quarantined(document=int(document), layer=layer, position=int(position)))
    return ShardRow(arrays=slots | stored | {"loss_mask": loss_mask_T}, quarantined=tuple(quarantined))


def _run(target: Target, codec: str, slots: Arrays, tokens: slice) -> tuple[Arrays, np.ndarray]:
    """What is to be stored of slots of a row, 0 in padding; and bool [layers, T]: all values finite.

    Encoded on the target's device: half the bytes to copy or less, and the codes there are the codes here.
    """
    names = ("input_ids", "position_ids", "document_ids")
    ids_T, positions_T, documents_T = (torch.from_numpy(slots[n][tokens]).long().to(target.device) for n in names)
    is_padding_T1 = (documents_T == NO_DOCUMENT)[:, None]
    states = target.run(ids_T[None], positions_T[None], documents_T[None])
    encoded: Arrays = {}
    is_finite = []
    for layer in target.captured_layers:
        name = _states_name(target, layer)
        of_layer = encode(codec, states[layer][0].masked_fill(is_padding_T1, 0))
        encoded[name] = of_layer.codes.cpu().numpy()
        if of_layer.scales is not None:
            encoded[scales_name(name)] = of_layer.scales.cpu().numpy()
        is_finite.append(of_layer.is_finite)
    return encoded, torch.stack(is_finite).cpu().numpy()


def _allocate(target: Target, codec: str, num_tokens: int) -> Arrays:
    """Zeros for all that is to be stored of a row's states."""
    kind, stored = CODECS[codec], {}
    for name in (_states_name(target, layer) for layer in target.captured_layers):
        stored[name] = np.zeros((num_tokens, kind.code_width(target.hidden_size)), kind.code_dtype)
        if scale_width := kind.scale_width(target.hidden_size):
            stored[scales_name(name)] = np.zeros((num_tokens, scale_width), np.uint16)
    return stored


def _states_name(target: Target, layer: int) -> str:
    return FINAL_HIDDEN if layer == target.num_layers else hidden_name(layer)
