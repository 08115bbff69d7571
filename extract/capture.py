"""A row of the plan through the target: what a shard is to hold of it. A function of the row alone, whoever runs it.

A GPU is given the next row before the last one is looked at, so that it never waits for the host. Values that are not
finite would spread: attention multiplies a masked neighbour by 0, and 0 · NaN is NaN. So a row that shows one is run
again document by document, and those at fault go to quarantine: mask 0, codes 0, named in the shard.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from extract.encode import encode
from extract.storing import Arrays
from extract.target import Target
from shards.record import Quarantined
from shards.schema import FINAL_HIDDEN, NO_DOCUMENT, ROW_IDS, RowArrays, hidden_name, scales_name


@dataclass(frozen=True, kw_only=True)
class RowInFlight:
    """A row whose states may still be on their way into `arrays`."""

    arrays: Arrays
    encoded: dict[str, Tensor]  # on the target's device, kept until they are copied
    is_finite_LT: Tensor  # bool, in the host's memory: all values of a token
    is_copied: torch.cuda.Event | None


class Capture:
    """Fills the arrays of rows: what the plan says, and the target's states, encoded on its device."""

    def __init__(self, target: Target, codec: str) -> None:
        self.target = target
        self.codec = codec
        self._copying = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None

    def launch(self, row_id: int, row: RowArrays, arrays: Arrays) -> RowInFlight:
        """Begin to fill `arrays`. A row is run alone, because a batch's size would show in the last bits."""
        arrays[ROW_IDS][...] = row_id
        for name, values in vars(row).items():
            arrays[name][:] = values
        encoded, is_finite_LT = self._run(arrays, slice(None))
        if self._copying is None:
            for name, values in encoded.items():
                _tensor(arrays[name]).copy_(values)
            return RowInFlight(arrays=arrays, encoded={}, is_finite_LT=is_finite_LT, is_copied=None)
        self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying):
            for name, values in encoded.items():
                _tensor(arrays[name]).copy_(values, non_blocking=True)
            is_finite_on_host_LT = torch.empty(is_finite_LT.shape, dtype=torch.bool, pin_memory=True)
            is_finite_on_host_LT.copy_(is_finite_LT, non_blocking=True)
            is_copied = torch.cuda.Event(blocking=True)  # the host's cores have better to do than to spin
            is_copied.record()
        encoded["is_finite"] = is_finite_LT
        return RowInFlight(arrays=arrays, encoded=encoded, is_finite_LT=is_finite_on_host_LT, is_copied=is_copied)

    def finish(self, row: RowInFlight) -> tuple[Quarantined, ...]:
        """Wait until `row` is whole; returns its documents in quarantine."""
        if row.is_copied is not None:
            row.is_copied.synchronize()
        if row.is_finite_LT.all():
            return ()
        return self._capture_documents(row.arrays)

    def _capture_documents(self, arrays: Arrays) -> tuple[Quarantined, ...]:
        """Run each document of a row alone; take those that are not finite out of the loss mask."""
        quarantined = []
        document_ids_T = arrays["document_ids"]
        for document in np.unique(document_ids_T[document_ids_T != NO_DOCUMENT]):
            own = np.flatnonzero(document_ids_T == document)
            tokens = slice(own[0], own[-1] + 1)
            encoded, is_finite_LT = self._run(arrays, tokens)
            is_good = bool(is_finite_LT.all())
            for name, values in encoded.items():
                arrays[name][tokens] = values.cpu().numpy() if is_good else 0
            if not is_good:
                arrays["loss_mask"][tokens] = 0
                layer_idx, position = np.argwhere(~is_finite_LT.cpu().numpy())[0]
                layer = self.target.captured_layers[layer_idx]
                quarantined.append(Quarantined(document=int(document), layer=layer, position=int(position)))
        for name in encoded:
            arrays[name][document_ids_T == NO_DOCUMENT] = 0
        return tuple(quarantined)

    def _run(self, arrays: Arrays, tokens: slice) -> tuple[dict[str, Tensor], Tensor]:
        """What is to be stored of slots of a row, by name, 0 in padding; and bool [layers, T]: all values finite."""
        names = ("input_ids", "position_ids", "document_ids")
        ids_T, positions_T, documents_T = (_tensor(arrays[name][tokens]) for name in names)
        states = self.target.run(ids_T[None], positions_T[None], documents_T[None])
        is_padding_T1 = (documents_T.to(self.target.device, non_blocking=True) == NO_DOCUMENT)[:, None]
        encoded: dict[str, Tensor] = {}
        is_finite = []
        for layer in self.target.captured_layers:
            name = FINAL_HIDDEN if layer == self.target.num_layers else hidden_name(layer)
            of_layer = encode(self.codec, states[layer][0].masked_fill(is_padding_T1, 0))
            encoded[name] = of_layer.codes
            if of_layer.scales is not None:
                encoded[scales_name(name)] = of_layer.scales
            is_finite.append(of_layer.is_finite)
        return encoded, torch.stack(is_finite)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values)
