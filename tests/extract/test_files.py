"""Which files data.files means, and the records in them, however they are packed; what is said of damaged ones."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import extract.files
from extract.data import read_records
from extract.files import RecordReader, expand
from shards.errors import UsageError

TEXTS = ["x", 'quotes " and \\ and ] and ,', "hällo\n", "y" * 3000]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def array(texts: list[str]) -> bytes:
    return json.dumps([{"text": text} for text in texts], indent=1).encode()


def write_zstd(path: Path, content: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(content)


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path, **options)


def texts_of(*files: object) -> list[str | None]:
    return [record.text for record in read_records([str(file) for file in files])]


def test_every_packing_holds_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:2])) + gzip.compress(lines(TEXTS[2:])))
    write_zstd(tmp_path / "c.jsonl.zst", lines(TEXTS))
    (tmp_path / "d.json").write_bytes(b"\xef\xbb\xbf  " + array(TEXTS))
    (tmp_path / "e.json.gz").write_bytes(gzip.compress(array(TEXTS)))
    write_zstd(tmp_path / "f.json.zst", array(TEXTS))
    write_parquet(tmp_path / "g.parquet", [{"text": text} for text in TEXTS], row_group_size=3)
    (tmp_path / "h").write_bytes(gzip.compress(array(TEXTS)))  # names say nothing
    paths = sorted(tmp_path.iterdir())
    records = list(read_records([str(path) for path in paths]))
    assert [record.text for record in records] == TEXTS * len(paths)
    assert [record.index for record in records] == list(range(len(TEXTS) * len(paths)))
    assert [record.source for record in records[:: len(TEXTS)]] == list("abcdefgh")


def test_a_place_is_told_by_file_and_line_or_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + lines(["x"]) + b"\n")
    (tmp_path / "b.json").write_bytes(array(["x", "y"]))
    reader = RecordReader([str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")], ())
    raws = list(reader)
    assert [raw.where for raw in raws] == [
        f"{tmp_path / 'a.jsonl'}, line 2",
        f"{tmp_path / 'b.json'}, record 1",
        f"{tmp_path / 'b.json'}, record 2",
    ]
    assert [reader.where(raw.index) for raw in raws] == [raw.where for raw in raws]
    assert reader.bytes_read == reader.total_bytes > 0


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', "\\", '\\"', "[", "}", ","]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(values=st.lists(VALUES, max_size=5), read_bytes=st.integers(1, 20), indent=st.sampled_from([None, 1]))
def test_an_array_is_cut_where_json_says(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], read_bytes: int, indent: int | None
) -> None:
    """However its text is cut into pieces on reading."""
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract.files, "READ_BYTES", read_bytes)
        assert [json.loads(raw.content) for raw in RecordReader([str(path)], ())] == values


def test_parquet_lacks_what_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]
    write_parquet(path, [{"messages": turns, "huge": "x"}, {"text": "t", "source": "s"}, {"input_ids": [1]}])
    first, second, third = (raw.content for raw in RecordReader([str(path)], ("messages", "text", "source")))
    assert first == {"messages": turns}
    assert second == {"text": "t", "source": "s"}
    assert third == {}  # input_ids was not asked for


def test_folders_and_patterns_are_sorted(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.json", "sub/c.jsonl.gz", "sub/.hidden.jsonl", ".cache/d.jsonl", "readme.md", "e.parquet.tmp"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "sub")

    def expanded(name: str) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in expand([str(tmp_path / name)])]

    assert expanded("") == ["a.json", "b.jsonl", "link/c.jsonl.gz", "sub/c.jsonl.gz"]
    assert expanded("*.json*") == ["a.json", "b.jsonl"]
    assert expanded("**/*.gz") == ["link/c.jsonl.gz", "sub/c.jsonl.gz"]
    (tmp_path / "*.json").touch()
    assert expanded("*.json") == ["*.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "none.jsonl does not exist: data.files must name files, folders or patterns"),
        ("*.jsonl", "*.jsonl does not exist: data.files must name files"),
        ("folder", "folder has no files whose names end with .jsonl or "),
        ("pipe", "pipe is a pipe or a device"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_what_names_no_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError) as raised:
        expand([str(tmp_path / name)])
    assert message in str(raised.value)


DAMAGED = {
    "gzip that is cut off": (gzip.compress(lines(TEXTS))[:-9], "Compressed file ended before the end-of-stream"),
    "gzip with another byte": (gzip.compress(lines(TEXTS))[:-8] + bytes(8), "CRC check failed"),
    "no gzip after all": (b"\x1f\x8b" + bytes(20), "Unknown compression method"),
    "zstd that is cut off": (bytes.fromhex("28b52ffd0458"), "Truncated"),
    "Parquet without an end": (b"PAR1" + bytes(20), "Parquet magic bytes not found in footer"),
    "an array without an end": (b'[{"text": "x"}, {"text"', "is cut off: the JSON array that it begins with has no"),
    "an array with more after it": (b'[{"text": "x"}] {}', "goes on after its JSON array, with b'{}'"),
    "an array with a gap": (b'[{"text": "x"},,{"text": "y"}]', "record 2 is not valid JSON"),
    "an array of words": (b'["x"]', "record 1 is a JSON str: each record must be an object"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "some").write_bytes(content)
    with pytest.raises(UsageError) as raised:
        texts_of(tmp_path / "some")
    assert str(tmp_path / "some") in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_pyarrow_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a", [{"text": "x"}])
    write_zstd(tmp_path / "b", lines(["x"]))
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in "ab":
        with pytest.raises(UsageError, match=f"{name} needs pyarrow.*pip install pyarrow"):
            texts_of(tmp_path / name)


def test_files_are_read_as_editors_leave_them(tmp_path: Path) -> None:
    """Marks of byte order, also where such files were joined; lines that end as on Windows; odd names; links."""
    path = tmp_path / "ein übles [1].jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n\r\n\xef\xbb\xbf{"text": "y"}\r\n\xef\xbb\xbf')
    (tmp_path / "link.jsonl").symlink_to(path)
    for name in (path.name, "link.jsonl"):
        records = read_records([str(tmp_path / name)])
        assert [(record.index, record.text) for record in records] == [(0, "x"), (2, "y")]


def test_standard_input_is_read_once_and_used_twice(tmp_path: Path) -> None:
    """By a process that has another one's pipe for it."""
    code = """
from extract.data import read_records
from extract.identity import hash_data
for _ in range(2):
    print([(record.where, record.source, record.text) for record in read_records(["-"])], hash_data(["-"]))
"""
    (tmp_path / "same").write_bytes(gzip.compress(lines(["x"])))
    done = subprocess.run(
        [sys.executable, "-c", code], input=(tmp_path / "same").read_bytes(), capture_output=True, check=True
    )
    first, second = done.stdout.decode().splitlines()
    assert first == second
    assert first.startswith("[('standard input, line 1', 'stdin', 'x')]")
