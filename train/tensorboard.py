"""`python -m train tensorboard`: a run's metrics as an event file that TensorBoard shows, written without it.

An event file is a sequence of records: length, masked crc32c of it, a protocol buffer, masked crc32c of that
(tensorflow/core/lib/io/record_writer.h, core/util/event.proto).
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c

from shards.errors import RunError, UsageError
from train.records import METRICS_FILE, read_metrics

DIRECTORY = "tensorboard"
FILE = "events.out.tfevents.dflash"  # TensorBoard looks for the middle part
NOT_SHOWN = ("step", "bad_step", "bad_rows")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers


def convert(run: Path) -> Path:
    """Write the event file of a run anew and return its directory, which is what TensorBoard is given."""
    lines = read_metrics(run)
    if not lines:
        raise UsageError(f"{run} has no metrics yet")
    directory = run / DIRECTORY
    beside = directory / f".{FILE}"
    end = (run / METRICS_FILE).stat().st_mtime
    try:
        directory.mkdir(exist_ok=True)
        beside.write_bytes(b"".join(_records(lines, end)))
        os.replace(beside, directory / FILE)
    except OSError as error:
        raise RunError(f"{directory} could not be written: {error.strerror}") from error
    return directory


def _records(lines: list[dict[str, Any]], end: float) -> Iterator[bytes]:
    """Lines have no time. All get that of the last one, and TensorBoard's axis is to be the step."""
    yield _record(_field(1, FIXED64, struct.pack("<d", end)) + _text(3, "brain.Event:2"))
    for line in lines:
        values = b"".join(_message(1, _text(1, tag) + _field(2, FIXED32, value)) for tag, value in _scalars(line))
        step = _field(2, VARINT, _varint(line["step"]))
        yield _record(_field(1, FIXED64, struct.pack("<d", end)) + step + _message(5, values))


def _scalars(line: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Tag and fp32 of every number; those of a list, by slot."""
    for key, value in line.items():
        group, name = ("heldout", key.removeprefix("heldout_")) if key.startswith("heldout_") else ("train", key)
        entries = enumerate(value, start=1) if isinstance(value, list) else [("", value)]
        for slot, number in entries:
            if key not in NOT_SHOWN and isinstance(number, int | float):
                yield f"{group}/{name}" + (f"/{slot}" if slot else ""), struct.pack("<f", number)


def _record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + _masked_crc(length) + payload + _masked_crc(payload)


def _masked_crc(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _message(number: int, content: bytes) -> bytes:
    return _field(number, BYTES, _varint(len(content)) + content)


def _text(number: int, text: str) -> bytes:
    return _message(number, text.encode())


def _field(number: int, wire_type: int, content: bytes) -> bytes:
    return _varint(number << 3 | wire_type) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(encoded) + bytes([value])
