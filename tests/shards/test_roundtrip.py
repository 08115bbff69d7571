"""What goes into a shard comes out of it: by the reader, by plain zarr, by the reference reader; and golden bytes."""

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shards.codec import CODECS
from shards.manifest import Manifest
from shards.reader import CacheReader
from shards.schema import PlanArrays
from shards.writer import ShardRows, write_shard
from tests.reference import cache as reference
from tests.shards.caches import CacheShape, allocate, content, make_cache, make_plan, make_rows, start_cache

GOLDEN = Path(__file__).with_name("golden.json")

row_tokens = st.one_of(st.integers(1, 512), st.sampled_from([1024, 1536]))
cache_shapes = st.builds(
    CacheShape,
    num_rows=st.integers(1, 5),
    rows_per_shard=st.integers(1, 4),
    row_tokens=row_tokens,
    hidden_size=st.integers(1, 5).map(lambda groups: 64 * groups),
    codec=st.sampled_from(list(CODECS)),
    layers=st.sets(st.integers(0, 7), min_size=1, max_size=3).map(lambda layers: tuple(sorted(layers))),
    final_hidden=st.booleans(),
    seed=st.integers(0, 1000),
)


def shards_of(shape: CacheShape, manifest: Manifest) -> list[ShardRows]:
    plan = make_plan(shape)
    return [make_rows(shape, manifest, plan, shard) for shard in range(manifest.plan.num_shards)]


# Without shrinking, which would take minutes here: the shapes are small as they are.
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3:UserWarning")
@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cache_shapes, st.randoms(use_true_random=False))
def test_reader_and_zarr_give_what_was_written(shape: CacheShape, random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        manifest = make_cache(cache, shape)
        layers = random.sample(shape.layers, random.randint(0, len(shape.layers)))
        out = allocate(manifest, len(layers))
        with CacheReader(cache) as reader:
            for shard, rows in enumerate(shards_of(shape, manifest)):
                group = zarr.open_group(cache / f"shard-{shard:05d}", mode="r")
                for name, values in rows.arrays.items():
                    np.testing.assert_array_equal(group[name][...], values)
                for row, row_id in enumerate(rows.row_ids):
                    reader.read_row(int(row_id), layers, out)
                    for name in ("input_ids", "position_ids", "document_ids", "loss_mask"):
                        np.testing.assert_array_equal(getattr(out, name), getattr(rows, name)[row])
                    for layer, codes_TC in zip(layers, out.codes, strict=True):
                        np.testing.assert_array_equal(codes_TC, rows.hidden[layer][row])
                    for layer, scales_TG in zip(layers, out.scales, strict=True):
                        if scales_TG.size:
                            np.testing.assert_array_equal(scales_TG, rows.scales[f"scales/{layer}"][row])


@pytest.mark.parametrize(
    "shape",
    [
        CacheShape(final_hidden=True),
        CacheShape(num_rows=7, rows_per_shard=5, row_tokens=1536, layers=(0,)),  # Morton order of 5 × 3 chunks
        CacheShape(num_rows=1, rows_per_shard=1, row_tokens=1),
    ],
)
def test_reference_reader_agrees(tmp_path: Path, shape: CacheShape) -> None:
    cache = tmp_path / "cache"
    manifest = make_cache(cache, shape)
    for shard, rows in enumerate(shards_of(shape, manifest)):
        expected = {name: values.tobytes() for name, values in rows.arrays.items()}
        assert reference.read_shard(cache, shard) == expected


def golden_rows() -> ShardRows:
    """Rows 0..2 of 1024 slots, 1000 of them one document, by arithmetic that no library version changes."""
    slots_RT = np.tile(np.arange(1024), (3, 1))
    real_RT = slots_RT < 1000
    codes_RTH = (np.arange(3 * 1024 * 64) * 7919 % 0x4400).reshape(3, 1024, 64).astype(np.uint16) * real_RT[..., None]
    return ShardRows(
        row_ids=np.arange(3),
        input_ids=(slots_RT * 31 % 97 * real_RT).astype(np.int32),
        position_ids=(slots_RT * real_RT).astype(np.int32),
        document_ids=np.where(real_RT, [[0], [1], [2]], -1).astype(np.int32),
        loss_mask=(real_RT & (slots_RT % 3 > 0)).astype(np.uint8),
        source_ids=real_RT.astype(np.uint8),
        hidden={1: codes_RTH.astype(np.uint16), 4: codes_RTH[::-1].astype(np.uint16)},
        final_hidden=np.ascontiguousarray(codes_RTH[:, :, ::-1]).astype(np.uint16),
    )


def golden_plan() -> PlanArrays:
    return PlanArrays(
        document_record=np.array([5, 3, 4]),
        document_source=np.ones(3, np.uint8),
        document_split=np.array([0, 0, 1], np.uint8),
        document_row=np.arange(3),
        document_start=np.zeros(3, np.int32),
        document_tokens=np.full(3, 1000, np.int32),
        token_ids=np.tile(np.arange(1000, dtype=np.int32) * 31 % 97, 3),
        loss_mask=np.tile((np.arange(1000) % 3 > 0).astype(np.uint8), 3),
    )


def test_golden_bytes(tmp_path: Path) -> None:
    """If this fails, the format has changed: caches that exist can't be read, and FORMAT.md needs a new version.

    The manifest is left out, since its sections grow with the configuration.
    """
    cache, plan = tmp_path / "cache", golden_plan()
    shape = CacheShape(num_rows=3, rows_per_shard=3, row_tokens=1024, hidden_size=64, layers=(1, 4), final_hidden=True)
    manifest = start_cache(cache, shape, plan)
    rows = golden_rows()
    for name, values in vars(plan.row_arrays(1, 1024)).items():
        np.testing.assert_array_equal(getattr(rows, name)[1], values)
    assert write_shard(cache, manifest, 0, rows)
    found = {
        name: hashlib.sha256(stored).hexdigest() for name, stored in content(cache).items() if "manifest" not in name
    }
    assert found == json.loads(GOLDEN.read_text())
