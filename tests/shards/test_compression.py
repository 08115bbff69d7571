"""bf16+zstd: chunks that are compressed without loss, opened by plain zarr; damaged or hostile ones are refused."""

import random
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Shuffle, zstd

from shards.compression import compress, decompress
from shards.errors import CacheError
from shards.manifest import Manifest
from shards.reader import CacheReader
from shards.stats import cache_statistics
from tests.reference import cache as reference
from tests.shards.caches import CacheShape, allocate, content, flip_bit, make_cache, make_plan, make_rows
from tests.shards.derived import faults

SHAPE = CacheShape(codec="bf16+zstd", num_rows=3, row_tokens=1024, layers=(1, 4), final_hidden=True, hidden_size=192)
ARRAY = "shard-00000/hidden/4/c/0/0/0"  # 2 rows × 2 chunks
INDEX_BYTES = 4 * 16 + 4
CHUNK_BYTES = 512 * 192 * 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compression") / "cache"
    make_cache(path, SHAPE)
    return path


@pytest.fixture
def cache(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "cache"))


def read_all(cache: Path) -> None:
    with CacheReader(cache) as reader:
        out = allocate(reader.manifest, 2)
        for row in range(SHAPE.num_rows):
            reader.read_row(row, (1, 4), out)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 3000), st.integers(1, 0xFFFF), st.integers(0, 99))
def test_any_codes_come_back_and_zarrs_codecs_give_the_same_bytes(num_codes: int, largest: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, largest + 1, num_codes).astype(np.uint16)
    stored = compress(codes.view(np.uint8))
    assert stored.tobytes() == zstd.compress(Shuffle(elementsize=2).encode(codes), 1, False)
    found = np.full(2 * num_codes, 7, np.uint8)
    decompress(stored, found)
    np.testing.assert_array_equal(found.view(np.uint16), codes)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3:UserWarning")
def test_reader_zarr_and_the_reference_give_what_was_written(whole: Path) -> None:
    manifest, out = Manifest.read(whole), allocate(Manifest.read(whole), 2)
    with CacheReader(whole) as reader:
        for shard in range(manifest.plan.num_shards):
            rows = make_rows(SHAPE, manifest, make_plan(SHAPE), shard)
            assert reference.read_shard(whole, shard) == {name: v.tobytes() for name, v in rows.arrays.items()}
            group = zarr.open_group(whole / f"shard-{shard:05d}", mode="r")
            for name, values in rows.arrays.items():
                np.testing.assert_array_equal(group[name][...], values)
            for row, row_id in enumerate(rows.row_ids):
                reader.read_row(int(row_id), (4, 1), out)
                for k, layer in enumerate((4, 1)):
                    np.testing.assert_array_equal(out.codes[k], rows.hidden[layer][row])


def test_it_takes_fewer_bytes_than_bf16_and_holds_the_same(whole: Path, tmp_path: Path) -> None:
    plain = CacheShape(**(vars(SHAPE) | {"codec": "bf16"}))
    make_cache(tmp_path, plain)
    compressed, uncompressed = cache_statistics(whole), cache_statistics(tmp_path)
    assert compressed["bytes"] < 0.9 * uncompressed["bytes"]
    assert compressed["layers"] == uncompressed["layers"]
    assert faults(whole) == []


def test_any_damage_is_found_by_reader_and_verify(cache: Path) -> None:
    rng = random.Random(0)
    stored = (cache / ARRAY).read_bytes()
    bits = [rng.randrange(8 * len(stored)) for _ in range(20)] + [8 * (len(stored) - byte) for byte in (1, 4, 5, 68)]
    for bit in bits:
        flip_bit(cache / ARRAY, bit)
        assert faults(cache), bit
        with pytest.raises(CacheError):
            read_all(cache)
        (cache / ARRAY).write_bytes(stored)
    for size in (0, 3, INDEX_BYTES - 1, INDEX_BYTES, *(rng.randrange(len(stored)) for _ in range(10))):
        (cache / ARRAY).write_bytes(stored[:size])
        assert faults(cache), size
        with pytest.raises(CacheError):
            read_all(cache)
    (cache / ARRAY).write_bytes(stored)
    assert faults(cache) == []


def replace_chunk(frame: bytes) -> Callable[[Path], None]:
    """Another first chunk of the array file, with all checksums and the index as they should be."""

    def damage(cache: Path) -> None:
        stored = (cache / ARRAY).read_bytes()
        places = list(struct.iter_unpack("<QQ", stored[-INDEX_BYTES:-4]))
        chunks = [stored[offset : offset + length] for offset, length in places]
        chunks[0] = frame + struct.pack("<I", google_crc32c.value(frame))
        starts = np.cumsum([0, *map(len, chunks)]).tolist()
        index = b"".join(struct.pack("<QQ", start, len(chunk)) for start, chunk in zip(starts, chunks, strict=False))
        (cache / ARRAY).write_bytes(b"".join(chunks) + index + struct.pack("<I", google_crc32c.value(index)))

    return damage


def edit_place(chunk: int, offset: int, length: int) -> Callable[[Path], None]:
    """Add to one entry of the index, modulo 2⁶⁴, and give it its right checksum."""

    def damage(cache: Path) -> None:
        stored = bytearray((cache / ARRAY).read_bytes())
        index = np.frombuffer(bytes(stored[-INDEX_BYTES:-4]), "<u8").reshape(4, 2).copy()
        index[chunk] += np.array([offset % 2**64, length % 2**64], np.uint64)
        stored[-INDEX_BYTES:] = index.tobytes() + struct.pack("<I", google_crc32c.value(index.tobytes()))
        (cache / ARRAY).write_bytes(stored)

    return damage


FRAME = "shard-00000 hidden/4 row 0 tokens 0–511: the compressed chunk is not one zstd frame of 196608 bytes"
BROKEN = "row 0 tokens 0–511: the compressed chunk cannot be read"
LAYOUT = "shard-00000 hidden/4 index: its chunks overlap, leave gaps or lie outside the file"
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bomb": (replace_chunk(zstd.compress(bytes(1 << 28), 1)), FRAME),
    "one value too few": (replace_chunk(zstd.compress(bytes(CHUNK_BYTES - 2), 1)), FRAME),
    "a frame after the frame": (replace_chunk(zstd.compress(bytes(CHUNK_BYTES), 1) * 2), BROKEN),
    "no frame": (replace_chunk(b"\0" * 100), FRAME),
    "four bytes": (replace_chunk(b"\x28\xb5\x2f\xfd"), FRAME),
    "nothing": (replace_chunk(b""), FRAME),
    "a frame that breaks off": (replace_chunk(zstd.compress(random.Random(0).randbytes(CHUNK_BYTES), 1)[:-50]), BROKEN),
    "lengths that add up modulo 2⁶⁴": (edit_place(1, 0, 2**63), r"the index says 9\d{18} bytes, expected 4 to"),
    "an overlap": (edit_place(1, -8, 0), LAYOUT),
    "a gap": (edit_place(3, 0, -8), LAYOUT),
    "beyond the file": (edit_place(3, 1 << 40, 0), LAYOUT),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_chunks_are_refused_in_little_memory(cache: Path, what: str) -> None:
    damage, reason = HOSTILE[what]
    damage(cache)
    tracemalloc.start()
    with pytest.raises(CacheError, match=reason):
        read_all(cache)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 23
    assert any(re.search(reason, fault) for fault in faults(cache))


def test_writing_again_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    make_cache(tmp_path / "again", SHAPE)
    assert content(tmp_path / "again") == content(whole)
