"""Reading data files: what each line becomes, and what is said of a line that is no record."""

import os
import re
from pathlib import Path

import pytest

from extract.data import Record, read_records
from shards.errors import UsageError

CHAT = '{"messages": [{"role": "user", "content": "a"}]}'


def read(tmp_path: Path, content: str | bytes) -> list[Record]:
    path = tmp_path / "some.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_records([str(path)]))


def test_chats_and_texts(tmp_path: Path) -> None:
    first, second = read(tmp_path, CHAT + '\n\n{"text": "hällo", "source": "mine", "licence": "MIT"}')
    assert first == Record(index=0, source="some", messages=[{"role": "user", "content": "a"}])
    assert second == Record(index=2, source="mine", text="hällo")


def test_lines_are_counted_over_all_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    records = list(read_records([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")]))
    assert [(r.index, r.source, r.text) for r in records] == [
        (0, "b", "x"),
        (1, "b", "y"),
        (2, "a", "x"),
        (3, "a", "y"),
    ]


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl does not exist: data\.files must name JSONL files$"):
        list(read_records([str(tmp_path / "none.jsonl")]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "folder is a directory: data.files must name JSONL files"),
        (
            "*.jsonl",
            "*.jsonl does not exist: data.files must name JSONL files, each of them: patterns are not expanded",
        ),
        ("pipe", "pipe is a pipe or a device"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_what_is_no_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError) as raised:
        list(read_records([str(tmp_path / name)]))
    assert message in str(raised.value)


def test_files_are_read_as_editors_leave_them(tmp_path: Path) -> None:
    """Marks of byte order, also where such files were joined; lines that end as on Windows; odd names; links."""
    path = tmp_path / "ein übles [1].jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n\r\n\xef\xbb\xbf{"text": "y"}\r\n\xef\xbb\xbf')
    (tmp_path / "link.jsonl").symlink_to(path)
    for name in (path.name, "link.jsonl"):
        assert [(r.index, r.text) for r in read_records([str(tmp_path / name)])] == [(0, "x"), (2, "y")]


BAD_LINES = {
    "not JSON": ('{"text": "a" "b"}', "line 2 is not valid JSON: Expecting ',' delimiter in column 14"),
    "cut off": ('{"text": \n', "line 2 is not valid JSON: Expecting value in column "),
    "not UTF-8": (b'{"text": "\xff"}', "line 2 is not UTF-8: byte 0xff in column 11"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "line 2 is not UTF-8: byte 0xff in column 1"),
    "too long a number": ('{"text": ' + "1" * 5000 + "}", "line 2 is not valid JSON: Exceeds the limit"),
    "not an object": ("[1]", "line 2 is a JSON list: each line must be an object"),
    "neither": ('{"prompt": "x"}', "either `messages` or `text`; it has the keys ['prompt']"),
    "both": ('{"messages": [], "text": ""}', "either `messages` or `text`"),
    "text is no string": ('{"text": 5}', "text is 5, it must be a string"),
    "source is no string": ('{"text": "x", "source": null}', "source is None, it must be a string"),
    "no messages": ('{"messages": []}', "messages must be a list of at least one message"),
    "message is no object": ('{"messages": ["x"]}', "messages[0] must be an object"),
    "no content": ('{"messages": [{"role": "user"}]}', "messages[0].content is None, it must be a string"),
    "content in parts": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}',
        "messages[0].content is [{",
    ),
    "no role": ('{"messages": [{"content": "x"}]}', "messages[0].role is None, it must be a string"),
    "half a character": ('{"text": "\\ud800"}', "text is not valid Unicode"),
    "nested too deep": ("[" * 100_000, "line 2 is not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    content = CHAT.encode() + b"\n" + (line if isinstance(line, bytes) else line.encode())
    with pytest.raises(UsageError) as raised:
        read(tmp_path, content)
    assert f"{tmp_path / 'some.jsonl'}, line 2" in str(raised.value)
    assert len(re.findall(r"\bline \d", str(raised.value))) == 1
    assert message in str(raised.value)
