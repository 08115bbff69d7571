"""The states of a document as they are to be stored, by the numpy reference; extraction encodes on the target's device.

In pieces of a chunk, so that memory does not grow with the document.
"""

from collections.abc import Callable, Mapping

import numpy as np

from shards.codec import Codec, Encoded
from shards.config import CHUNK_TOKENS
from shards.derive import States
from shards.record import Quarantined
from shards.schema import scales_name

Values = Callable[[slice], np.ndarray]  # some tokens of a document at one layer: float32 [tokens, H]


def encode_document(
    codec: Codec, document: int, num_tokens: int, layers: Mapping[str, tuple[int, Values]]
) -> States | Quarantined:
    """Encode all layers, which come by the name of their array, with their number, in ascending order.

    A value that has no code puts the document into quarantine.
    """
    states = {}
    for name, (layer, values) in layers.items():
        encoded = _encode(codec, num_tokens, values)
        if isinstance(encoded, int):
            return Quarantined(document=document, layer=layer, position=encoded)
        states[name] = encoded.codes
        if encoded.scales is not None:
            states[scales_name(name)] = encoded.scales
    return states


def _encode(codec: Codec, num_tokens: int, values: Values) -> Encoded | int:
    """The codes of one layer, or the position of the first token that has none."""
    pieces = []
    for start in range(0, num_tokens, CHUNK_TOKENS):
        piece = values(slice(start, min(start + CHUNK_TOKENS, num_tokens)))
        try:
            pieces.append(codec.encode(piece))
        except ValueError:
            return start + next(i for i in range(len(piece)) if not _has_codes(codec, piece[i : i + 1]))
    scales = None if pieces[0].scales is None else np.concatenate([piece.scales for piece in pieces])
    return Encoded(np.concatenate([piece.codes for piece in pieces]), scales)


def _has_codes(codec: Codec, token: np.ndarray) -> bool:
    try:
        codec.encode(token)
    except ValueError:
        return False
    return True
