"""A slow reader of the cache format, written from FORMAT.md alone: struct, json and open().read().

Arrays come back as the bytes of their values in C order, after everything that FORMAT.md promises of them was checked.
"""

import hashlib
import json
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

from numcodecs import zstd

ELEMENT_BYTES = {"int64": 8, "int32": 4, "uint16": 2, "uint8": 1, "int8": 1}
# type, values in a code
CODES = {"bf16": ("uint16", 1), "bf16+zstd": ("uint16", 1), "int8": ("int8", 1), "int4": ("uint8", 2)}
COMPRESSION = [
    {"name": "numcodecs.shuffle", "configuration": {"elementsize": 2}},
    {"name": "zstd", "configuration": {"level": 1, "checksum": False}},
]


def read_shard(cache: Path, shard: int) -> dict[str, bytes]:
    """Every array of a shard, by name."""
    manifest = read_sealed(cache / "manifest.json")
    assert (manifest["format"], manifest["version"]) == ("dflash-cache", 1)
    directory = cache / f"shard-{shard:05d}"
    record = read_sealed(directory / "shard.json")
    assert record["shard"] == shard
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    assert found.keys() == record["files"].keys() | {"shard.json"}
    for name, expected in record["files"].items():
        assert len(found[name]) == expected["bytes"]
        assert hashlib.sha256(found[name]).hexdigest() == expected["sha256"]
    groups = ["", "hidden/"] + ["scales/"] * (manifest["cache"]["codec"] in ("int8", "int4"))
    for name in groups:
        assert json.loads(found[f"{name}zarr.json"]) == {"attributes": {}, "node_type": "group", "zarr_format": 3}
    return {
        name: read_array(json.loads(found[f"{name}/zarr.json"]), found[f"{name}/c/" + "/".join("0" * len(shape))], *of)
        for name, (shape, *of) in expected_arrays(manifest, shard).items()
    }


def expected_arrays(
    manifest: dict[str, Any], shard: int
) -> dict[str, tuple[list[int], str, list[int], dict[str, Any]]]:
    """By name: shape, type, chunk, attributes."""
    plan, config, num_hidden = manifest["plan"], manifest["cache"], manifest["target"]["hidden_size"]
    num_rows = min(plan["rows_per_shard"], plan["num_rows"] - shard * plan["rows_per_shard"])
    num_tokens = config["row_tokens"]
    element, values_per_code = CODES[config["codec"]]
    arrays = {"row_ids": ([num_rows], "int64", [1], {})}
    for name in ("input_ids", "position_ids", "document_ids"):
        arrays[name] = ([num_rows, num_tokens], "int32", [1, num_tokens], {})
    for name in ("loss_mask", "source_ids"):
        arrays[name] = ([num_rows, num_tokens], "uint8", [1, num_tokens], {})

    def per_token(element: str, width: int, attributes: dict[str, Any]) -> tuple:
        return [num_rows, num_tokens, width], element, [1, min(num_tokens, 512), width], attributes

    states = {f"hidden/{layer}": {"layer": layer} for layer in config["layers"]}
    states |= {"final_hidden": {"normed": True}} if config["final_hidden"] else {}
    for name, attributes in states.items():
        arrays[name] = per_token(element, num_hidden // values_per_code, {"codec": config["codec"], **attributes})
        if config["codec"] in ("int8", "int4"):
            arrays[f"scales/{name.split('/')[-1]}"] = per_token("uint16", num_hidden // 64, {"scales_of": name})
    return arrays


def read_array(
    metadata: dict[str, Any], file: bytes, element: str, chunk: list[int], attributes: dict[str, Any]
) -> bytes:
    shape = metadata["shape"]
    order = {"name": "bytes", "configuration": {"endian": "little"}}
    is_compressed = attributes.get("codec") == "bf16+zstd"
    assert metadata == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": element,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "dimension_names": ["row", "token", "hidden"][: len(shape)],
        "attributes": attributes,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": chunk,
                    "codecs": [
                        {"name": "bytes"} if element in ("uint8", "int8") else order,
                        *COMPRESSION * is_compressed,
                        {"name": "crc32c"},
                    ],
                    "index_codecs": [order, {"name": "crc32c"}],
                    "index_location": "end",
                },
            }
        ],
    }
    num_rows, chunks_per_row = shape[0], shape[1] // chunk[1] if len(shape) > 1 else 1
    num_chunks, num_bytes = num_rows * chunks_per_row, prod(chunk) * ELEMENT_BYTES[element]
    if not is_compressed:
        assert len(file) == num_chunks * (num_bytes + 4) + 16 * num_chunks + 4
    *index, index_crc = struct.unpack_from(f"<{2 * num_chunks}QI", file, len(file) - 16 * num_chunks - 4)
    assert crc32c(struct.pack(f"<{2 * num_chunks}Q", *index)) == index_crc

    places = [(row, column) for row in range(num_rows) for column in range(chunks_per_row)]
    in_file_order = sorted(places, key=lambda place: interleave(place, (num_rows, chunks_per_row)))
    values = []
    compressed_stop = 0
    for number, place in enumerate(places):
        offset, length = index[2 * number : 2 * number + 2]
        stored = file[offset : offset + length - 4]
        assert struct.unpack_from("<I", file, offset + length - 4) == (crc32c(stored),)
        if is_compressed:
            assert offset == compressed_stop
            compressed_stop += length
            stored = unshuffle(zstd.decompress(stored))
        else:
            assert offset == in_file_order.index(place) * length
        assert len(stored) == num_bytes
        values.append(stored)
    assert compressed_stop in (0, len(file) - 16 * num_chunks - 4)
    return b"".join(values)


def unshuffle(shuffled: bytes) -> bytes:
    """Low bytes, then high bytes, back to pairs."""
    half = len(shuffled) // 2
    return bytes(byte for pair in zip(shuffled[:half], shuffled[half:], strict=True) for byte in pair)


def interleave(place: tuple[int, int], sizes: tuple[int, int]) -> int:
    """The bits of a chunk's place, the row's first, from the lowest to the highest."""
    widths = [(size - 1).bit_length() for size in sizes]
    bits = [place[axis] >> bit & 1 for bit in range(max(widths)) for axis in (0, 1) if bit < widths[axis]]
    return sum(bit << position for position, bit in enumerate(bits))


def read_sealed(path: Path) -> dict[str, Any]:
    content = path.read_text(encoding="utf-8")
    without = re.sub(r'"seal": "[0-9a-f]{64}"', '"seal": "' + "0" * 64 + '"', content)
    value = json.loads(content)
    assert hashlib.sha256(without.encode()).hexdigest() == value["seal"]
    return value


def crc32c(values: bytes) -> int:
    """CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), a bit at a time through a table."""
    crc = 0xFFFFFFFF
    for byte in values:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_entry(byte) for byte in range(256)]
