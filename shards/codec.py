"""How hidden states become stored codes: the numpy reference of each codec, exact to the bit.

What a GPU encodes or decodes must agree with this. One codec so far, bf16: a code is the value's upper 16 bits.
"""

import numpy as np

QUIET_NAN = np.uint16(0x7FC0)


def encode_bf16(values: np.ndarray) -> np.ndarray:
    """float32 → uint16 codes, rounded to the nearest, ties to the even code.

    Values beyond the largest bf16 become infinity, as rounding has it; every NaN becomes the one quiet NaN 0x7FC0.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    tie_to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + tie_to_even)) >> np.uint32(16)
    return np.where(np.isnan(values), QUIET_NAN, rounded.astype(np.uint16))


def decode_bf16(codes: np.ndarray) -> np.ndarray:
    """uint16 codes → float32, exact."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
