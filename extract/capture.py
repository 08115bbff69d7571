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
    target: Target,
    row_ids: Sequence[int],
    rows: Sequence[RowArrays],
    *,
    rows_per_batch: int,
    on_rows: Callable[[int], None],
) -> ShardRows:
    """Run `rows`; `on_rows` is told after each batch how many are done."""
    slots = {name: np.stack([getattr(row, name) for row in rows]) for name in SLOT_ARRAYS}
    shape_RTH = (*slots["input_ids"].shape, target.hidden_size)
    codes_RTH = {layer: np.zeros(shape_RTH, np.uint16) for layer in target.captured_layers}
    quarantined: list[Quarantined] = []
    for start in range(0, len(rows), rows_per_batch):
        batch = range(start, min(start + rows_per_batch, len(rows)))
        codes, is_finite_LRT = _run(target, slots, (slice(batch.start, batch.stop), slice(None)))
        for i, row in enumerate(batch):
            if is_finite_LRT[:, i].all():
                for layer in codes_RTH:
                    codes_RTH[layer][row] = codes[layer][i]
            else:
                quarantined += _capture_documents(target, slots, codes_RTH, row)
        on_rows(batch.stop)
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
        codes, is_finite_LRT = _run(target, slots, (slice(row, row + 1), tokens))
        if is_finite_LRT.all():
            for layer in codes_RTH:
                codes_RTH[layer][row, tokens] = codes[layer][0]
        else:
            slots["loss_mask"][row, tokens] = 0
            layer_idx, _, position = np.argwhere(~is_finite_LRT)[0]
            layer = target.captured_layers[layer_idx]
            quarantined.append(Quarantined(document=int(document), layer=layer, position=int(position)))
    return quarantined


def _run(
    target: Target, slots: dict[str, np.ndarray], part: tuple[slice, slice]
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """bf16 codes [R, T, H] of a part of the rows by layer, 0 in padding slots; and bool [layers, R, T]: all finite.

    Encoded on the target's device: half the bytes to copy, and rounding there is what rounding here would be.
    """
    names = ("input_ids", "position_ids", "document_ids")
    ids_RT, positions_RT, documents_RT = (torch.from_numpy(slots[n][part]).long().to(target.device) for n in names)
    is_padding_RT1 = (documents_RT == NO_DOCUMENT)[..., None]
    states = target.run(ids_RT, positions_RT, documents_RT)
    rounded = {layer: states[layer].bfloat16().masked_fill(is_padding_RT1, 0) for layer in target.captured_layers}
    is_finite_LRT = torch.stack([values_RTH.isfinite().all(-1) for values_RTH in rounded.values()])
    codes = {layer: values_RTH.view(torch.uint16).cpu().numpy() for layer, values_RTH in rounded.items()}
    return codes, is_finite_LRT.cpu().numpy()
