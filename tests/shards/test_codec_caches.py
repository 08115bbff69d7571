"""Caches with codes and scales: round trip, plain zarr, the reference reader, golden caches, damage, bytes."""

import dataclasses
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from shards.codec import CODECS, Encoded, bytes_per_token
from shards.errors import CacheError
from shards.manifest import MANIFEST_FILE, Manifest, sealed
from shards.reader import CacheReader
from shards.record import ShardRecord
from shards.schema import PlanArrays
from shards.stats import cache_statistics
from shards.verify import count_files, verify
from shards.writer import ShardRows, mark_complete, write_shard
from tests.reference import cache as reference
from tests.shards.caches import (
    CacheShape,
    allocate,
    content,
    flip_bit,
    make_cache,
    make_manifest,
    make_plan,
    make_rows,
    start_cache,
)

GOLDEN = Path(__file__).with_name("golden")
SHAPES = {
    codec: CacheShape(codec=codec, num_rows=3, row_tokens=1024, layers=(1, 4), final_hidden=True, hidden_size=192)
    for codec in ("int8", "int4")
}


@pytest.fixture(scope="module", params=SHAPES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "cache"
    make_cache(path, SHAPES[request.param])
    return path


@pytest.fixture
def cache(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "cache"))


def shape_of(cache: Path) -> CacheShape:
    return SHAPES[Manifest.read(cache).cache.codec]


def faults(cache: Path) -> list[str]:
    return [fault for part in verify(cache, Manifest.read(cache)) for fault in part.faults]


def read_all(cache: Path) -> None:
    with CacheReader(cache) as reader:
        manifest = reader.manifest
        out = allocate(manifest, len(manifest.cache.layers))
        for row in range(manifest.plan.num_rows):
            reader.read_row(row, manifest.cache.layers, out)


def test_reader_zarr_and_the_reference_give_what_was_written(whole: Path) -> None:
    manifest, shape = Manifest.read(whole), shape_of(whole)
    out = allocate(manifest, 2)
    with CacheReader(whole) as reader:
        for shard in range(manifest.plan.num_shards):
            rows = make_rows(shape, manifest, make_plan(shape), shard)
            assert {"scales/1", "scales/4", "scales/final_hidden"} == rows.scales.keys()
            group = zarr.open_group(whole / f"shard-{shard:05d}", mode="r")
            for name, values in rows.arrays.items():
                assert group[name].dtype == values.dtype
                np.testing.assert_array_equal(group[name][...], values)
            assert reference.read_shard(whole, shard) == {n: v.tobytes() for n, v in rows.arrays.items()}
            for row, row_id in enumerate(rows.row_ids):
                reader.read_row(int(row_id), (4, 1), out)
                for k, layer in enumerate((4, 1)):
                    np.testing.assert_array_equal(out.codes[k], rows.hidden[layer][row])
                    np.testing.assert_array_equal(out.scales[k], rows.scales[f"scales/{layer}"][row])


def test_a_whole_cache_has_no_faults(whole: Path) -> None:
    parts = list(verify(whole, Manifest.read(whole)))
    assert [fault for part in parts for fault in part.faults] == []
    assert sum(part.num_files for part in parts) == count_files(Manifest.read(whole)) == len(content(whole))


def test_statistics_are_of_the_decoded_values(whole: Path) -> None:
    manifest, shape = Manifest.read(whole), shape_of(whole)
    rows = make_rows(shape, manifest, make_plan(shape), 0)
    found = ShardRecord.read(whole, manifest, 0).statistics
    assert found.keys() == {"hidden/1", "hidden/4", "final_hidden"}
    codec = CODECS[shape.codec]
    values = codec.decode_stored(Encoded(rows.hidden[4], rows.scales["scales/4"]))[rows.document_ids >= 0]
    assert found["hidden/4"].max_abs == np.abs(values).max()
    # Two sums of n float64 squares in different order differ by a few n·2⁻⁵³ at most.
    expected = np.sqrt(np.mean(values.astype(np.float64) ** 2))
    assert found["hidden/4"].rms == pytest.approx(expected, rel=values.size * 2.0**-52)


def test_damage_to_scales_is_found_by_reader_and_verify(cache: Path) -> None:
    rng = random.Random(0)
    names = [name for name in content(cache) if "/scales/" in name]
    assert len(names) == 2 * (2 * 3 + 1)
    for name in names:
        stored = (cache / name).read_bytes()
        is_read = "final_hidden" not in name and name.count("/") > 2
        for damage in ("flip", "cut", "remove"):
            if damage == "flip":
                flip_bit(cache / name, rng.randrange(8 * len(stored)))
            elif damage == "cut":
                os.truncate(cache / name, rng.randrange(len(stored) - 1))
            else:
                (cache / name).unlink()
            assert faults(cache), (name, damage)
            if is_read:
                with pytest.raises(CacheError):
                    read_all(cache)
            (cache / name).write_bytes(stored)
    assert faults(cache) == []


def test_scales_of_another_layer_are_refused(cache: Path) -> None:
    scales = cache / "shard-00000/scales"
    (scales / "1").rename(scales / "aside")
    (scales / "4").rename(scales / "1")
    (scales / "aside").rename(scales / "4")
    message = "shard-00000 scales/1: zarr.json has attributes {'scales_of': 'hidden/4'}, expected"
    assert any(fault.startswith(message) for fault in faults(cache))
    with pytest.raises(CacheError, match=re.escape(message)):
        read_all(cache)


def break_format(rows: ShardRows, how: str) -> ShardRows:
    scales_RTG = rows.scales["scales/4"].copy()
    if how == "padding":
        scales_RTG[rows.document_ids < 0] = 1
    elif how == "infinite":
        scales_RTG[rows.document_ids >= 0] = 0x7F80
    else:
        return dataclasses.replace(rows, scales={})
    return dataclasses.replace(rows, scales=rows.scales | {"scales/4": scales_RTG})


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("padding", "scales/4 of row 0 is not 0 in every padding slot"),
        ("infinite", "hidden/4 has values that are not finite"),
        ("missing", "the cache stores .*'scales/4'"),
    ],
)
def test_scales_that_break_the_format_are_not_written(tmp_path: Path, how: str, reason: str) -> None:
    shape = SHAPES["int8"]
    plan = make_plan(shape)
    manifest = start_cache(tmp_path, shape, plan)
    with pytest.raises(ValueError, match=reason):
        write_shard(tmp_path, manifest, 0, break_format(make_rows(shape, manifest, plan, 0), how))


def test_a_manifest_whose_codec_does_not_fit_the_target_is_damaged() -> None:
    shape = SHAPES["int8"]
    value = make_manifest(shape, make_plan(shape)).to_json()
    value["target"]["hidden_size"] = 100
    with pytest.raises(CacheError, match=r"is damaged: target\.hidden_size is 100: cache\.codec 'int8' needs"):
        Manifest.from_json(sealed(value), Path(MANIFEST_FILE))


@pytest.mark.parametrize(("codec", "limit"), [("int8", 21_200), ("int4", 11_000)])
def test_bytes_per_slot_of_a_real_shard(tmp_path: Path, codec: str, limit: int) -> None:
    """5 layers of 4096: by the codec 5·(4096 + 128) and 5·(2048 + 128), 14 for the slot, and little besides."""
    shape = CacheShape(
        codec=codec, num_rows=1, rows_per_shard=1, row_tokens=1024, hidden_size=4096, layers=(1, 2, 3, 4, 5)
    )
    plan = make_plan(shape)
    manifest = start_cache(tmp_path, shape, plan)
    values = np.random.default_rng(0).standard_normal((1, 1024, 4096), dtype=np.float32)
    row = plan.row_arrays(0, 1024)
    values[0, row.document_ids < 0] = 0
    encoded = CODECS[codec].encode(values)
    rows = ShardRows(
        row_ids=np.zeros(1, np.int64),
        hidden=dict.fromkeys(shape.layers, encoded.codes),
        scales={f"scales/{layer}": encoded.scales for layer in shape.layers},
        **{name: values[None] for name, values in vars(row).items()},
    )
    assert write_shard(tmp_path, manifest, 0, rows)
    found = cache_statistics(tmp_path)["bytes_per_slot"]
    assert 5 * bytes_per_token(CODECS[codec], 4096) + 14 < found <= limit


def golden_states(codec: str) -> np.ndarray:
    """float32 [2, 64, 64] by whole numbers, in sixteenths; a channel is massive, and slots from 60 on are padding."""
    values = (np.arange(2 * 64 * 64) * 7919 % 1009 - 504).reshape(2, 64, 64).astype(np.float32) / 16
    values[..., 7] *= 100
    values[:, 60:] = 0
    return values


def write_golden(cache: Path, codec: str) -> Manifest:
    """A cache of two rows, from values that no library version changes."""
    slots_RT = np.tile(np.arange(64), (2, 1))
    real_RT = slots_RT < 60
    plan = PlanArrays(
        document_record=np.array([0, 1]),
        document_source=np.zeros(2, np.uint8),
        document_split=np.array([0, 1], np.uint8),
        document_row=np.array([0, 1]),
        document_start=np.zeros(2, np.int32),
        document_tokens=np.full(2, 60, np.int32),
        token_ids=np.tile(np.arange(60, dtype=np.int32), 2),
        loss_mask=np.ones(120, np.uint8),
    )
    shape = CacheShape(codec=codec, num_rows=2, rows_per_shard=2, row_tokens=64, hidden_size=64, layers=(3,))
    manifest = start_cache(cache, shape, plan)
    encoded = CODECS[codec].encode(golden_states(codec))
    rows = ShardRows(
        row_ids=np.arange(2),
        input_ids=(slots_RT * real_RT).astype(np.int32),
        position_ids=(slots_RT * real_RT).astype(np.int32),
        document_ids=np.where(real_RT, [[0], [1]], -1).astype(np.int32),
        loss_mask=real_RT.astype(np.uint8),
        source_ids=np.zeros((2, 64), np.uint8),
        hidden={3: encoded.codes},
        scales={} if encoded.scales is None else {"scales/3": encoded.scales},
    )
    assert write_shard(cache, manifest, 0, rows)
    assert mark_complete(cache, manifest)
    return manifest


@pytest.mark.parametrize("codec", CODECS)
def test_golden_caches_are_written_to_the_byte(tmp_path: Path, codec: str) -> None:
    """If this fails, the format has changed. The manifest is left out, since its sections grow."""
    write_golden(tmp_path / "cache", codec)
    found, golden = content(tmp_path / "cache"), content(GOLDEN / codec)
    assert found.keys() == golden.keys()
    open_to_change = {MANIFEST_FILE}
    if CODECS[codec].is_compressed:  # zstd's versions compress differently, and shard.json has the file's checksum
        open_to_change |= {"shard-00000/hidden/3/c/0/0/0", "shard-00000/shard.json"}
    assert {name for name in golden if found[name] != golden[name]} <= open_to_change


@pytest.mark.parametrize("codec", CODECS)
def test_golden_caches_are_read(codec: str) -> None:
    """The files of the repository, manifest included, whatever has become of the writer."""
    cache = GOLDEN / codec
    assert faults(cache) == []
    out = allocate(Manifest.read(cache), 1)
    with CacheReader(cache) as reader:
        for row in range(2):
            reader.read_row(row, [3], out)
            expected = CODECS[codec].encode(golden_states(codec)[row])
            np.testing.assert_array_equal(out.codes[0], expected.codes)
            if expected.scales is not None:
                np.testing.assert_array_equal(out.scales[0], expected.scales)


def test_golden_caches_are_small() -> None:
    assert sum(len(stored) for stored in content(GOLDEN).values()) < 200_000
