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
    target: Target,
    row_ids: Sequence[int],
    rows: Sequence[RowArrays],
    *,
    codec: str,
    rows_per_batch: int,
    on_rows: Callable[[int], None],
) -> ShardRows:
    """Run `rows`, encode with `codec`; `on_rows` is told after each batch how many are done."""
    slots = {name: np.stack([getattr(row, name) for row in rows]) for name in SLOT_ARRAYS}
    stored = _allocate(target, codec, slots["input_ids"].shape)
    quarantined: list[Quarantined] = []
    for start in range(0, len(rows), rows_per_batch):
        batch = range(start, min(start + rows_per_batch, len(rows)))
        encoded, is_finite_LRT = _run(target, codec, slots, (slice(batch.start, batch.stop), slice(None)))
        for i, row in enumerate(batch):
            if is_finite_LRT[:, i].all():
                for name in stored:
                    stored[name][row] = encoded[name][i]
            else:
                quarantined += _capture_documents(target, codec, slots, stored, row)
        on_rows(batch.stop)
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
        encoded, is_finite_LRT = _run(target, codec, slots, (slice(row, row + 1), tokens))
        if is_finite_LRT.all():
            for name in stored:
                stored[name][row, tokens] = encoded[name][0]
        else:
            slots["loss_mask"][row, tokens] = 0
            layer_idx, _, position = np.argwhere(~is_finite_LRT)[0]
            layer = target.captured_layers[layer_idx]
            quarantined.append(Quarantined(document=int(document), layer=layer, position=int(position)))
    return quarantined


def _run(
    target: Target, codec: str, slots: dict[str, np.ndarray], part: tuple[slice, slice]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What is to be stored of a part of the rows, by array, 0 in padding slots; and bool [layers, R, T]: all finite.

    Encoded on the target's device: half the bytes to copy or less, and the codes there are the codes here.
    """
    names = ("input_ids", "position_ids", "document_ids")
    ids_RT, positions_RT, documents_RT = (torch.from_numpy(slots[n][part]).long().to(target.device) for n in names)
    is_padding_RT1 = (documents_RT == NO_DOCUMENT)[..., None]
    states = target.run(ids_RT, positions_RT, documents_RT)
    encoded: dict[str, np.ndarray] = {}
    is_finite = []
    for layer in target.captured_layers:
        name = _states_name(target, layer)
        of_layer = encode(codec, states[layer].masked_fill(is_padding_RT1, 0))
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
