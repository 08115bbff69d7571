"""The data files that `data.files` means, and the records in them as they lie there, whatever they are packed in.

What a file is, is told by its first bytes: gzip or zstd around it; Parquet, a JSON array, else a JSON object a line.
Memory holds one record at a time, of Parquet one row group. What a record must contain is data.py's.
"""

import bisect
import contextlib
import functools
import glob
import gzip
import importlib
import io
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from shards.errors import UsageError

STDIN = "-"
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")  # of the files in a folder that are data
PACKED_SUFFIXES = (".gz", ".zst")
GZIP, ZSTD, PARQUET, ARRAY = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"["  # what such files begin with
BOM = b"\xef\xbb\xbf"
READ_BYTES = 1 << 20
PARQUET_ROWS = 256  # that are made Python objects at a time
JSON_PART = re.compile(rb'"(?:[^"\\]|\\.)*+"|["\[\]{},]', re.DOTALL)  # a whole string, or what gives JSON its structure


class Raw(NamedTuple):
    """A record as it lies in its file: a line or an element in JSON, or what Parquet has."""

    index: int  # counted from 0 over all files, of lines also the blank ones
    where: str
    source: str  # the name of the file
    content: bytes | dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of the data, as it was read."""

    path: Path
    unit: Literal["line", "record"]
    first_index: int

    def where(self, index: int) -> str:
        return f"{name_of(self.path)}, {self.unit} {index - self.first_index + 1}"


class RecordReader:
    """Iterates once over the records of `files`, in order; knows how far it is, and where each record lay."""

    def __init__(self, files: Sequence[str], columns: Sequence[str]) -> None:
        """Of Parquet only `columns` are read, unless there is none of them."""
        self.paths = expand(files)
        self.columns = columns
        self.total_bytes = sum(path.stat().st_size for path in self.paths)
        self.bytes_read = 0
        self._parts: list[Part] = []

    def __iter__(self) -> Iterator[Raw]:
        index = bytes_before = 0
        for path in self.paths:
            source = source_of(path)
            with _open(path) as file, _reading(path):
                unit, contents = _contents(file, path, self.columns)
                part = Part(path=path, unit=unit, first_index=index)
                self._parts.append(part)
                for content in contents:
                    if unit == "record" or content.removeprefix(BOM).strip():
                        self.bytes_read = bytes_before + file.tell()
                        yield Raw(index, part.where(index), source, content)
                    index += 1
            bytes_before += path.stat().st_size

    def where(self, index: int) -> str:
        """The place of a record that was read."""
        return self._parts[bisect.bisect_right(self._parts, index, key=lambda part: part.first_index) - 1].where(index)


def expand(files: Sequence[str]) -> list[Path]:
    """The files that `files` name, those of a folder or pattern sorted; raise UsageError for what names none."""
    return [path for name in files for path in _expand(name)]


def absent(files: Sequence[str]) -> list[str]:
    """Those of `files` that name nothing that is there."""
    return [name for name in files if name != STDIN and not Path(name).exists() and not _matches(name)]


def name_of(path: Path) -> str:
    return "standard input" if _is_stdin(path) else str(path)


def source_of(path: Path) -> str:
    """What records are called that don't say it themselves: those of chats.jsonl.gz are chats."""
    name = Path(path.stem) if path.suffix in PACKED_SUFFIXES else path
    return "stdin" if _is_stdin(path) else name.stem


def _expand(name: str) -> list[Path]:
    if name == STDIN:
        return [_spooled_stdin()]
    path = Path(name)
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            return _files_below(path)
        if path.exists():
            raise UsageError(
                f"data file {path} is a pipe or a device: it is read more than once, so it must be a file, or - for "
                "standard input"
            )
        path.stat()  # says why
    except FileNotFoundError:
        if found := _matches(name):
            return found
        raise UsageError(f"data file {path} does not exist: data.files must name files, folders or patterns") from None
    except OSError as error:
        raise UsageError(f"data file {path} cannot be read: {error.strerror}") from None


def _files_below(folder: Path) -> list[Path]:
    endings = tuple(suffix + packed for suffix in DATA_SUFFIXES for packed in ("", *PACKED_SUFFIXES))
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if name.endswith(endings) and not name.startswith(".")]
    if not found:
        raise UsageError(f"data folder {folder} has no files whose names end with {' or '.join(DATA_SUFFIXES)}")
    return sorted(found)


def _matches(pattern: str) -> list[Path]:
    return sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())


@functools.cache
def _spooled_stdin() -> Path:
    """Standard input in a file without a name: data is read twice, once to hash it and once to use it."""
    try:
        with tempfile.TemporaryFile() as file:
            while chunk := os.read(0, READ_BYTES):
                file.write(chunk)
            file.flush()
            return Path("/proc/self/fd", str(os.dup(file.fileno())))
    except OSError as error:
        raise UsageError(
            f"standard input cannot be copied to {tempfile.gettempdir()}, which TMPDIR names: {error.strerror}"
        ) from None


def _is_stdin(path: Path) -> bool:
    return path.parent == Path("/proc/self/fd")


def _open(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"data file {name_of(path)} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make one sentence of whatever the libraries that unpack say of a damaged file."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"data file {name_of(path)} cannot be read: {reason}") from None


def _contents(
    file: io.BufferedReader, path: Path, columns: Sequence[str]
) -> tuple[Literal["line", "record"], Iterator[Any]]:
    """How the records of a file are called and counted, and what each of them contains, unparsed."""
    if file.peek(4).startswith(PARQUET):
        return "record", _parquet_rows(file, path, columns)
    stream = _unpacked(file, path)
    if stream.peek(READ_BYTES).removeprefix(BOM).lstrip().startswith(ARRAY):
        return "record", _array_elements(stream, path)
    return "line", iter(stream)


def _unpacked(file: io.BufferedReader, path: Path) -> Any:
    """A stream with `peek`, `read` and lines."""
    start = file.peek(4)
    if start.startswith(GZIP):
        return gzip.open(file)
    if start.startswith(ZSTD):
        return io.BufferedReader(_pyarrow("pyarrow", path).CompressedInputStream(file, "zstd"))
    return file


def _array_elements(stream: Any, path: Path) -> Iterator[bytes]:
    """The text of each element of a JSON array, which is told apart by quotes and brackets alone."""
    text, begin, position, depth = b"", 0, 0, 0
    while chunk := stream.read(READ_BYTES):
        text, position, begin = text[begin:] + chunk, position - begin, 0
        for match in JSON_PART.finditer(text, position):
            part, position = match.group(), match.end()
            if part == b'"':  # a string that goes on in the next chunk
                position = match.start()
                break
            if part in (b"[", b"{"):
                depth += 1
                begin = position if depth == 1 else begin
            elif part in (b"]", b"}"):
                depth -= 1
            if (part == b"," and depth == 1) or (depth == 0 and text[begin : match.start()].strip()):
                yield text[begin : match.start()]
                begin = position
            if depth == 0:
                if rest := (text[position:] + stream.read(READ_BYTES)).strip():
                    raise UsageError(f"{name_of(path)} goes on after its JSON array, with {rest[:20]!r}")
                return
    raise UsageError(f"{name_of(path)} is cut off: the JSON array that it begins with has no end")


def _parquet_rows(file: io.BufferedReader, path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows without their nulls: what a record lacks has no place in it, as in JSON."""
    table = _pyarrow("pyarrow.parquet", path).ParquetFile(file)
    known = [name for name in table.schema_arrow.names if name in columns]
    for batch in table.iter_batches(PARQUET_ROWS, columns=known or None, use_threads=False):
        yield from map(_without_nulls, batch.to_pylist())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _pyarrow(module: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"data file {name_of(path)} needs pyarrow, which reads Parquet and zstd: pip install pyarrow"
        ) from None
