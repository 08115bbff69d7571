"""Damage of every kind is refused with its reason, by the reader and by verify; never read, never a crash."""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from shards.errors import CacheError
from shards.manifest import MANIFEST_FILE, Manifest, json_text, sealed
from shards.reader import CacheReader
from shards.schema import PlanArrays
from shards.stats import cache_statistics
from shards.verify import count_files, verify
from tests.shards.caches import CacheShape, allocate, content, flip_bit, make_cache

SHAPE = CacheShape(num_rows=4, rows_per_shard=2, row_tokens=1024, layers=(1, 4), final_hidden=True)
ARRAY = "hidden/4/c/0/0/0"  # of shard 0: 2 rows × 2 chunks of 512 × 64 values
STRIDE = 512 * 64 * 2 + 4
EMPTY = 2**64 - 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "cache"
    make_cache(path, SHAPE)
    return path


@pytest.fixture
def cache(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "cache"))


def faults(cache: Path, *, is_deep: bool = True) -> list[str]:
    """What `python -m shards verify --deep` prints, or without it."""
    try:
        manifest = Manifest.read(cache)
    except CacheError as error:
        return [str(error)]
    return [fault for part in verify(cache, manifest, is_deep=is_deep) for fault in part.faults]


def read_all(cache: Path) -> None:
    with CacheReader(cache) as reader:
        out = allocate(reader.manifest, len(SHAPE.layers))
        for row in range(SHAPE.num_rows):
            reader.read_row(row, SHAPE.layers, out)


def is_read(name: str) -> bool:
    """Whether the trainer's reader opens this file."""
    unread = ("plan/", "target/", "complete.json", "final_hidden", "source_ids", "shard.json")
    is_group = name.endswith("/zarr.json") and (name.count("/") == 1 or name.endswith("/hidden/zarr.json"))
    return not is_group and not any(part in name for part in unread)


def test_a_whole_cache_has_no_faults(whole: Path) -> None:
    manifest = Manifest.read(whole)
    parts = list(verify(whole, manifest))
    assert [fault for part in parts for fault in part.faults] == []
    assert sum(part.num_files for part in parts) == count_files(manifest) == len(content(whole))
    assert sum(part.num_shards for part in parts) == 2
    read_all(whole)


def test_unfinished_work_and_what_the_disk_has_of_its_own_are_no_faults(cache: Path) -> None:
    for name in (".shard-00002.host.1", "lost+found"):
        (cache / name).mkdir()
    assert faults(cache) == []


def test_a_flipped_bit_in_any_file_is_found(cache: Path) -> None:
    rng = random.Random(0)
    for name, stored in content(cache).items():
        bit = rng.randrange(8 * len(stored))
        flip_bit(cache / name, bit)
        assert faults(cache), (name, bit)
        if is_read(name):
            with pytest.raises(CacheError):
                read_all(cache)
        (cache / name).write_bytes(stored)
    assert faults(cache) == []


def test_any_file_cut_short_or_missing_is_found(cache: Path) -> None:
    rng = random.Random(0)
    for name, stored in content(cache).items():
        for size in (0, rng.randrange(len(stored) - 1)):  # a JSON object does not need its last newline
            os.truncate(cache / name, size)
            assert faults(cache), (name, size)
            if is_read(name):
                with pytest.raises(CacheError):
                    read_all(cache)
            (cache / name).write_bytes(stored)
        (cache / name).unlink()
        if name == MANIFEST_FILE:
            with pytest.raises(CacheError, match="is not a cache"):
                read_all(cache)
        elif name != "complete.json":  # it can be missing
            assert faults(cache), name
        (cache / name).write_bytes(stored)
    assert faults(cache) == []


def edit_text(name: str, change: Callable[[str], str], *, seal: bool = True) -> Callable[[Path], None]:
    """Change the text of a sealed file, and, unless `seal` is off, seal it again as FORMAT.md says."""

    def damage(cache: Path) -> None:
        text = change((cache / name).read_text())
        if seal:
            text = re.sub('(?<="seal": ")[0-9a-f]{64}', "0" * 64, text)
            text = text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1)
        (cache / name).write_text(text)

    return damage


def edit_json(name: str, change: Callable[[dict], object], *, seal: bool = True) -> Callable[[Path], None]:
    """Change a JSON file as somebody would who knows the format."""

    def damage(cache: Path) -> None:
        value = json.loads((cache / name).read_text())
        change(value)
        (cache / name).write_text(json_text(sealed(value) if seal and "seal" in value else value))

    return damage


def edit_index(chunk: int, offset: int, length: int) -> Callable[[Path], None]:
    """Change one entry of the array file's index, with the right crc32c."""

    def damage(cache: Path) -> None:
        path = cache / "shard-00000" / ARRAY
        stored = bytearray(path.read_bytes())
        index = stored[-68:-4]
        index[16 * chunk : 16 * chunk + 16] = struct.pack("<QQ", offset % 2**64, length % 2**64)
        stored[-68:] = bytes(index) + struct.pack("<I", google_crc32c.value(bytes(index)))
        path.write_bytes(stored)

    return damage


def flip(name: str, byte: int) -> Callable[[Path], None]:
    def damage(cache: Path) -> None:
        size = (cache / name).stat().st_size
        flip_bit(cache / name, 8 * (byte % size))

    return damage


def write(name: str, stored: bytes) -> Callable[[Path], None]:
    return lambda cache: (cache / name).write_bytes(stored) and None


def swap(one: str, other: str) -> Callable[[Path], None]:
    def damage(cache: Path) -> None:
        os.rename(cache / one, cache / "aside")
        os.rename(cache / other, cache / one)
        os.rename(cache / "aside", cache / other)

    return damage


S = "shard-00000"
NO_READER = ""  # the trainer's reader does not look there
CATALOGUE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what: the damage, the reason that the reader gives, the reason that verify gives
    "values": (
        flip(f"{S}/{ARRAY}", 2 * STRIDE + 5),  # Morton order: (0, 0), (1, 0), (0, 1), (1, 1)
        f"{S} hidden/4 row 0 tokens 512–1023: crc32c is 0x.{{8}}, expected 0x.{{8}}: run `python -m shards verify .*`",
        f"{S} hidden/4 row 0 tokens 512–1023: crc32c is 0x.{{8}}, expected 0x.{{8}}",
    ),
    "checksum of a chunk": (flip(f"{S}/{ARRAY}", STRIDE - 1), "row 0 tokens 0–511: crc32c is", "row 0 tokens 0–511"),
    "index": (flip(f"{S}/{ARRAY}", -30), "hidden/4 index: crc32c is", "hidden/4 index: crc32c is"),
    "checksum of the index": (flip(f"{S}/{ARRAY}", -1), "hidden/4 index: crc32c", "hidden/4 index: crc32c"),
    "loss mask": (flip(f"{S}/loss_mask/c/0/0", 1024 + 4), "loss_mask row 1: crc32c is", "loss_mask row 1: crc32c is"),
    "values the reader skips": (flip(f"{S}/final_hidden/c/0/0/0", 9), NO_READER, "final_hidden row 0 tokens 0–511"),
    "empty chunk": (edit_index(1, EMPTY, EMPTY), "row 0 tokens 512–1023: the chunk is empty", "the chunk is empty"),
    "length": (edit_index(3, 3 * STRIDE, 2**40), "row 1 tokens 512–1023: the index says 1099511627776 bytes", "says 1"),
    "overlap": (edit_index(3, 0, STRIDE), "hidden/4 index: its chunks overlap, leave gaps or", "hidden/4 index: its"),
    "far offset": (edit_index(0, 2**63, STRIDE), "hidden/4 index: its chunks", "hidden/4 index: its chunks"),
    "negative offset": (edit_index(0, -STRIDE, STRIDE), "hidden/4 index: its chunks", "hidden/4 index: its chunks"),
    "array file too long": (
        lambda cache: os.truncate(cache / S / ARRAY, 4 * STRIDE + 69),
        f"hidden/4: the array file has {4 * STRIDE + 69} bytes, expected {4 * STRIDE + 68}",
        "hidden/4: the array file has",
    ),
    "array file missing": (
        lambda cache: (cache / S / ARRAY).unlink(),
        "hidden/4: the array file cannot be opened: No such file or directory",
        "hidden/4: the array file cannot be opened",
    ),
    "shape in zarr.json": (
        edit_json(f"{S}/hidden/4/zarr.json", lambda value: value.update(shape=[2, 1024, 128])),
        r"hidden/4: zarr.json has shape \[2, 1024, 128\], expected \[2, 1024, 64\]",
        "hidden/4: zarr.json has shape",
    ),
    "codec in zarr.json": (
        edit_json(f"{S}/hidden/4/zarr.json", lambda value: value["codecs"][0]["configuration"]["codecs"].pop()),
        "hidden/4: zarr.json has codecs .*, expected .*crc32c",
        "hidden/4: zarr.json has codecs",
    ),
    "a key more in zarr.json": (
        edit_json(f"{S}/hidden/4/zarr.json", lambda value: value.update(storage_transformers=["gzip"])),
        r"hidden/4: zarr.json has storage_transformers \['gzip'\], expected None",
        "hidden/4: zarr.json has storage_transformers",
    ),
    "zarr.json is a list": (write(f"{S}/hidden/4/zarr.json", b"[]"), "zarr.json holds no object", "holds no object"),
    "zarr.json is no UTF-8": (write(f"{S}/hidden/4/zarr.json", b"\xff"), "hidden/4/zarr.json cannot be read", "utf-8"),
    "zarr.json is deep": (write(f"{S}/hidden/4/zarr.json", b"[" * 10**6), "cannot be read: maximum rec", "recursion"),
    "group": (write(f"{S}/hidden/zarr.json", b"{}"), NO_READER, f"{S}/hidden/zarr.json holds {{}}, expected"),
    "layers swapped": (
        swap(f"{S}/hidden/1", f"{S}/hidden/4"),
        "hidden/1: zarr.json has attributes .*'layer': 4}, expected .*'layer': 1}",
        "hidden/1: zarr.json has attributes",
    ),
    "array files swapped": (  # each is right in itself
        swap(f"{S}/hidden/1/c", f"{S}/hidden/4/c"),
        NO_READER,
        f"{S}/hidden/1/c/0/0/0: sha256 is",
    ),
    "shards swapped": (
        swap(S, "shard-00001"),
        f"{S} has row 2 in the place of row 0: run",
        f"{S}: shard.json is of shard 1, expected 0",
    ),
    "shards swapped with their records edited": (
        lambda cache: (
            swap(S, "shard-00001")(cache),
            edit_json(f"{S}/shard.json", lambda value: value.update(shard=0))(cache),
        ),
        f"{S} has row 2 in the place of row 0: run",
        f"{S} row_ids: row 2 in the place of row 0",
    ),
    "shard missing": (lambda cache: shutil.rmtree(cache / S), f"{S} is missing: run", f"{S} is missing"),
    "shard is a file": (
        lambda cache: (shutil.rmtree(cache / S), (cache / S).write_text("")),
        f"{S} is missing",
        f"{S} is missing",
    ),
    "file more in a shard": (
        write(f"{S}/hidden/4/c/0/0/1", b"x"),
        NO_READER,
        "'shard-00000/hidden/4/c/0/0/1': a shard has no such file",
    ),
    "statistics": (flip(f"{S}/shard.json", -20), NO_READER, "shard.json"),
    "statistics edited": (
        edit_json(f"{S}/shard.json", lambda value: value["statistics"]["hidden/4"].update(rms=1.0), seal=False),
        NO_READER,
        "shard.json is damaged or was edited: its seal is",
    ),
    "record of a file": (
        edit_json(f"{S}/shard.json", lambda value: value["files"][ARRAY].update(bytes=7)),
        NO_READER,
        f"{S}/{ARRAY} has {4 * STRIDE + 68} bytes, expected 7",
    ),
    "record without a file": (
        edit_json(f"{S}/shard.json", lambda value: value["files"].pop(ARRAY)),
        NO_READER,
        f"{S}: shard.json is of files",
    ),
    "record of the wrong type": (
        edit_json(f"{S}/shard.json", lambda value: value.update(quarantined=[{"document": "1"}])),
        NO_READER,
        r"shard.quarantined\[0\].document is '1': it must be of type int",
    ),
    "record is a number": (write(f"{S}/shard.json", b"7"), NO_READER, "shard.json is damaged: it holds no object"),
    "infinite statistics": (
        edit_text(f"{S}/shard.json", lambda text: re.sub('"rms": [0-9.]+', '"rms": Infinity', text)),
        NO_READER,
        "rms is inf: it must be finite",
    ),
    "record with a blank more": (
        edit_text(f"{S}/shard.json", lambda text: text + " ", seal=False),
        NO_READER,
        "shard.json is damaged or was edited: its seal is",
    ),
    "plan": (flip("plan/token_ids.npy", -3), NO_READER, "plan/token_ids.npy: sha256 is .{64}, expected .{64}"),
    "plan column missing": (lambda cache: (cache / "plan/token_ids.npy").unlink(), NO_READER, "token_ids.npy cannot"),
    "target": (flip("target/head.json", 3), NO_READER, "target/head.json: sha256 is"),
    "file more in target": (
        write("target/pickle.bin", b"x"),
        NO_READER,
        "'target/pickle.bin': the manifest has no such",
    ),
    "shard more than planned": (
        lambda cache: shutil.copytree(cache / S, cache / "shard-00002"),
        NO_READER,
        "'shard-00002' is no part of this cache, whose plan has 2 shards",
    ),
    "file more in the cache": (write("notes.txt", b"x"), NO_READER, "'notes.txt' is no part of this cache"),
    "a shard that is a link": (
        lambda cache: ((cache / S).rename(cache.parent / "theirs"), (cache / S).symlink_to("../theirs")),
        NO_READER,
        f"'{S}' is neither file nor directory; the rest was not looked at",
    ),
    "an array file that is a link": (
        lambda cache: (
            (cache / S / ARRAY).rename(cache.parent / "theirs"),
            (cache / S / ARRAY).symlink_to(cache.parent / "theirs"),
        ),
        NO_READER,
        f"'{S}/{ARRAY}' is neither file nor directory",
    ),
    "a pipe, which never ends": (
        lambda cache: ((cache / "target/head.json").unlink(), os.mkfifo(cache / "target/head.json")),
        NO_READER,
        "'target/head.json' is neither file nor directory",
    ),
    "file more with an odd name": (
        lambda cache: (cache / os.fsdecode(b"\xff\n")).write_text(""),
        NO_READER,
        r"'\\udcff\\n' is no part of this cache",
    ),
    "complete.json": (
        write("complete.json", b'{"num_shards": 3}'),
        NO_READER,
        "complete.json holds .*3}, expected .*2}",
    ),
    "version": (
        edit_json(MANIFEST_FILE, lambda value: value.update(version=2)),
        "manifest.json has version 2, this program reads version 1: extract again",
        "has version 2, this program reads version 1",
    ),
    "format": (
        edit_json(MANIFEST_FILE, lambda value: value.update(format="zip")),
        "is not the manifest of a",
        "is not",
    ),
    "manifest with a newline more": (
        edit_text(MANIFEST_FILE, lambda text: text + "\n", seal=False),
        "manifest.json is damaged or was edited: its seal is",
        "its seal is",
    ),
    "manifest on one line": (
        edit_text(MANIFEST_FILE, lambda text: json.dumps(json.loads(text)), seal=False),
        "manifest.json is damaged or was edited: its seal is",
        "its seal is",
    ),
    "manifest without a seal": (
        edit_text(MANIFEST_FILE, lambda text: re.sub('"seal": "[0-9a-f]*"', '"seal": null', text), seal=False),
        "manifest.json is damaged or was edited: its seal is None",
        "its seal is None",
    ),
    "manifest edited": (
        edit_json(MANIFEST_FILE, lambda value: value["identity"].update(data="e" * 64), seal=False),
        "manifest.json is damaged or was edited: its seal is",
        "its seal is",
    ),
    "manifest of the wrong type": (
        edit_json(MANIFEST_FILE, lambda value: value["plan"].update(num_rows="3")),
        "manifest.plan.num_rows is '3': it must be of type int",
        "must be of type int",
    ),
    "manifest without a section": (
        edit_json(MANIFEST_FILE, lambda value: value.pop("plan")),
        "lacks the key manifest.plan",
        "lacks the key manifest.plan",
    ),
    "a huge plan": (
        edit_json(MANIFEST_FILE, lambda value: value["plan"].update(num_rows=10**18)),
        "shards, at most 100000 fit",
        "shards, at most 100000 fit",
    ),
    "no rows in a shard": (
        edit_json(MANIFEST_FILE, lambda value: value["plan"].update(rows_per_shard=0)),
        "0 to a shard: these can't all be true",
        "0 to a shard",
    ),
    "another plan": (
        edit_json(MANIFEST_FILE, lambda value: value["plan"].update(num_tokens=9)),
        NO_READER,
        "the manifest's plan.num_tokens is 9, the plan's columns say .*; the shards were not looked at",
    ),
    "checksums outside of the cache": (
        edit_json(MANIFEST_FILE, lambda value: value["checksums"].update({"plan/../../x": "0"})),
        "checksums names 'plan/../../x', which is not below plan/ or target/",
        "which is not below plan/ or target/",
    ),
    "checksums of an impossible name": (
        edit_json(MANIFEST_FILE, lambda value: value["checksums"].update({"plan/\0": "0"})),
        NO_READER,
        "cannot be read: embedded null byte",
    ),
    "manifest is no JSON": (write(MANIFEST_FILE, b"{"), "manifest.json cannot be read", "manifest.json cannot be read"),
}


@pytest.mark.parametrize("what", CATALOGUE)
def test_catalogue_of_damage(cache: Path, what: str) -> None:
    damage, reader_reason, verify_reason = CATALOGUE[what]
    damage(cache)
    found = faults(cache)
    assert any(re.search(verify_reason, fault) for fault in found), found
    if reader_reason:
        with pytest.raises(CacheError, match=reader_reason):
            read_all(cache)
    else:
        read_all(cache)
    with contextlib.suppress(CacheError):
        cache_statistics(cache)  # may not notice, may not crash


NEEDS_VALUES = {"values", "checksum of a chunk", "loss mask", "values the reader skips", "array files swapped"}


@pytest.mark.parametrize("what", CATALOGUE)
def test_without_reading_values_all_other_damage_is_found(cache: Path, what: str) -> None:
    damage, _, verify_reason = CATALOGUE[what]
    damage(cache)
    found = faults(cache, is_deep=False)
    if what in NEEDS_VALUES:
        assert found == []
    else:
        assert any(re.search(verify_reason, fault) for fault in found), found


def test_values_that_are_not_finite_are_found_with_their_tokens(cache: Path) -> None:
    """With the right checksum: as a writer that does not look would have it."""
    path = cache / S / ARRAY
    stored = bytearray(path.read_bytes())
    chunk = np.frombuffer(bytes(stored[STRIDE : 2 * STRIDE - 4]), "<u2").reshape(512, 64).copy()  # row 1, the first
    chunk[7, 3], chunk[100, 9] = 0xFF80, 0x7FC0
    stored[STRIDE : 2 * STRIDE] = chunk.tobytes() + struct.pack("<I", google_crc32c.value(chunk.tobytes()))
    path.write_bytes(stored)
    assert f"{S} hidden/4 row 1 tokens 7–100: values that are not finite" in faults(cache)


def test_who_stops_looking_leaves_no_thread(cache: Path) -> None:
    before = set(threading.enumerate())  # other tests may have had zarr start its own
    parts = verify(cache, Manifest.read(cache))
    while next(parts).num_shards == 0:
        pass
    assert set(threading.enumerate()) > before
    parts.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("stored", [b"", b"\x80\x04N.", b"PK\x03\x04" + bytes(100)], ids=["nothing", "pickle", "zip"])
def test_plan_columns_that_are_none_are_refused(cache: Path, stored: bytes) -> None:
    (cache / "plan/document_row.npy").write_bytes(stored)
    with pytest.raises(CacheError, match=r"document_row\.npy cannot be read"):
        PlanArrays.read(cache / "plan")


def test_pickled_objects_are_not_loaded(cache: Path) -> None:
    np.save(cache / "plan/document_row.npy", np.array([None]), allow_pickle=True)
    with pytest.raises(CacheError, match=r"document_row\.npy cannot be read: .*object"):
        PlanArrays.read(cache / "plan")
