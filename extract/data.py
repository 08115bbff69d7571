"""Records of JSONL data files: chats (`messages`) and plain texts (`text`), one JSON object a line.

A line that is neither is an error that names file and line; nothing is skipped in silence. Other formats, other field
names and duplicates are left out.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Record:
    """One usable line of the data. Exactly one of `messages` and `text` is set."""

    index: int  # of its line, counted from 0 over all files
    source: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None


def read_records(files: Sequence[str]) -> Iterator[Record]:
    """Yield the records of `files` in order, blank lines left out; raise UsageError for what can't be read."""
    index = 0
    for file in files:
        path = Path(file)
        for number, line in enumerate(_read_lines(path), start=1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield _parse(line, index=index, where=f"{path}, line {number}", default_source=path.stem)
            index += 1


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        if path.is_dir():
            raise UsageError(f"data file {path} is a directory: data.files must name JSONL files, each of them")
        if not path.exists():
            hint = ", each of them: patterns are not expanded" if any(sign in str(path) for sign in "*?[") else ""
            raise UsageError(f"data file {path} does not exist: data.files must name JSONL files{hint}")
        if not path.is_file():
            raise UsageError(f"data file {path} is a pipe or a device: it is read more than once, so it must be a file")
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise UsageError(f"data file {path} cannot be read: {error.strerror}") from None


def _parse(line: bytes, *, index: int, where: str, default_source: str) -> Record:
    try:
        value = json.loads(line.decode("utf-8-sig"))  # editors and `cat` leave a mark of byte order before any line
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8: byte {line[error.start]:#04x} in column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error.msg} in column {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # ValueError: a number of too many digits
        raise UsageError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} is a JSON {type(value).__name__}: each line must be an object")
    source = value.get("source", default_source)
    if not isinstance(source, str):
        raise UsageError(f"{where}: source is {source!r}, it must be a string")
    if ("messages" in value) == ("text" in value):
        raise UsageError(f"{where} must have either `messages` or `text`; it has the keys {sorted(value)}")
    if "text" in value:
        return Record(index=index, source=source, text=_string(value["text"], "text", where))
    return Record(index=index, source=source, messages=_messages(value["messages"], where))


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: messages must be a list of at least one message")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise UsageError(f"{where}: messages[{i}] must be an object with `role` and `content`")
        for key in ("role", "content"):
            _string(message.get(key), f"messages[{i}].{key}", where)
    return value


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} is {value!r:.60}, it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        raise UsageError(f"{where}: {name} is not valid Unicode") from None
    return value
