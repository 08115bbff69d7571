"""Rows of the plan through the target: what one shard is to hold. A function of its rows alone, whoever runs it.

Values that are not finite would spread: attention multiplies a masked neighbour by 0, and 0 · NaN is NaN. So a row that
shows one is run again document by document, and those at fault go to quarantine: mask 0, codes 0, named in the shard.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from extract.target import Target
from shards.record import Quarantined
from shards.schema import NO_DOCUMENT, RowArrays
from shards.writer import ShardRows

SLOT_ARRAYS = ("input_ids", "position_ids", "document_ids", "loss_mask", "source_ids")


def capture_rows(
    target: Target, row_ids: Sequence[int], rows: Sequence[RowArrays], *, on_row: Callable[[int], None]
) -> ShardRows:
    """Run `rows` one by one, because a batch's size would show in the last bits; `on_row` is told how many are done."""
    slots = {name: np.stack([getattr(row, name) for row in rows]) for name in SLOT_ARRAYS}
    shape_RTH = (*slots["input_ids"].shape, target.hidden_size)
    codes_RTH = {layer: np.zeros(shape_RTH, np.uint16) for layer in target.captured_layers}
    quarantined: list[Quarantined] = []
    for row in range(len(rows)):
        codes, is_finite_LT = _run(target, slots, row, slice(None))
        if is_finite_LT.all():
            for layer in codes_RTH:
                codes_RTH[layer][row] = codes[layer]
        else:
            quarantined += _capture_documents(target, slots, codes_RTH, row)
        on_row(row + 1)
    return ShardRows(
        row_ids=np.array(row_ids, np.int64),
        final_hidden=codes_RTH.pop(target.num_layers, None),
        hidden=codes_RTH,
        quarantined=tuple(quarantined),
        **slots,
    )


def _capture_documents(
    target: Target, slots: dict[str, np.ndarray], codes_RTH: dict[int, np.ndarray], row: int
) -> list[Quarantined]:
    """Run each document of `row` alone into `codes_RTH`; take those that are not finite out of `slots`' loss mask."""
    quarantined = []
    document_ids_T = slots["document_ids"][row]
    for document in np.unique(document_ids_T[document_ids_T != NO_DOCUMENT]):
        own = np.flatnonzero(document_ids_T == document)
        tokens = slice(own[0], own[-1] + 1)
        codes, is_finite_LT = _run(target, slots, row, tokens)
        if is_finite_LT.all():
            for layer in codes_RTH:
                codes_RTH[layer][row, tokens] = codes[layer]
        else:
            slots["loss_mask"][row, tokens] = 0
            layer_idx, position = np.argwhere(~is_finite_LT)[0]
            layer = target.captured_layers[layer_idx]
            quarantined.append(Quarantined(document=int(document), layer=layer, position=int(position)))
    return quarantined


def _run(
    target: Target, slots: dict[str, np.ndarray], row: int, tokens: slice
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """bf16 codes [T, H] of slots of a row by layer, 0 in padding slots; and bool [layers, T]: all values finite.

    Encoded on the target's device: half the bytes to copy, and rounding there is what rounding here would be.
    """
    names = ("input_ids", "position_ids", "document_ids")
    ids_T, positions_T, documents_T = (torch.from_numpy(slots[n][row, tokens]).long().to(target.device) for n in names)
    is_padding_T1 = (documents_T == NO_DOCUMENT)[:, None]
    states = target.run(ids_T[None], positions_T[None], documents_T[None])
    rounded = {layer: states[layer][0].bfloat16().masked_fill(is_padding_T1, 0) for layer in target.captured_layers}
    is_finite_LT = torch.stack([values_TH.isfinite().all(-1) for values_TH in rounded.values()])
    codes = {layer: values_TH.view(torch.uint16).cpu().numpy() for layer, values_TH in rounded.items()}
    return codes, is_finite_LT.cpu().numpy()
