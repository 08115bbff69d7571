"""Small caches of random content for the tests of shards/."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shards.codec import CODECS, Encoded
from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.manifest import MANIFEST_FILE, Identity, Manifest, Plan
from shards.reader import RowBuffers
from shards.schema import (
    FINAL_HIDDEN,
    PLAN_DIRECTORY,
    TARGET_DIRECTORY,
    PlanArrays,
    hidden_name,
    missing_shards,
    scales_name,
)
from shards.writer import ShardRows, mark_complete, new_cache, publish_cache, write_shard


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    num_rows: int = 5
    rows_per_shard: int = 2
    row_tokens: int = 96
    hidden_size: int = 64
    layers: tuple[int, ...] = (1, 4, 6)
    final_hidden: bool = False
    codec: str = "bf16"
    seed: int = 0


def make_plan(shape: CacheShape) -> PlanArrays:
    """Documents of random lengths in every row; some rows end with padding."""
    rng = np.random.default_rng([shape.seed, 0])
    places = []
    for row in range(shape.num_rows):
        edges = np.unique([0, 1, *rng.integers(0, shape.row_tokens + 1, size=3)])
        places += [(row, start, stop - start) for start, stop in pairwise(edges)]
    rng.shuffle(places)
    row, start, tokens = np.array(places).T
    return PlanArrays(
        document_record=rng.permutation(len(places)).astype(np.int64),
        document_source=rng.integers(0, 2, len(places)).astype(np.uint8),
        document_split=(row == shape.num_rows - 1).astype(np.uint8),
        document_row=row.astype(np.int64),
        document_start=start.astype(np.int32),
        document_tokens=tokens.astype(np.int32),
        token_ids=rng.integers(0, 100, tokens.sum()).astype(np.int32),
        loss_mask=rng.integers(0, 2, tokens.sum()).astype(np.uint8),
    )


def make_manifest(shape: CacheShape, plan: PlanArrays) -> Manifest:
    """Without checksums, as `publish_cache` takes it."""
    num_heldout = int(plan.document_split.sum())
    return Manifest(
        target=TargetConfig(
            path="models/tiny", hidden_size=shape.hidden_size, num_layers=9, vocab_size=100, mask_token_id=3
        ),
        data=DataConfig(files=("data/tiny.jsonl",), min_supervised_tokens=1),
        cache=CacheConfig(
            row_tokens=shape.row_tokens, layers=shape.layers, codec=shape.codec, final_hidden=shape.final_hidden
        ),
        identity=Identity(target="a" * 64, tokenizer="b" * 64, chat_template="c" * 64, data="d" * 64),
        plan=Plan(
            num_rows=shape.num_rows,
            num_train_rows=shape.num_rows - 1,
            rows_per_shard=shape.rows_per_shard,
            num_documents=len(plan.document_row),
            num_heldout_documents=num_heldout,
            num_tokens=len(plan.token_ids),
            num_supervised_tokens=int(plan.loss_mask.sum()),
            sources=("chats", "texts"),
            num_left_out={"mask token": 1},
            num_truncated=2,
        ),
        checksums={},
        software={"zarr": "any"},
    )


def make_rows(shape: CacheShape, manifest: Manifest, plan: PlanArrays, shard: int) -> ShardRows:
    """The plan's rows of one shard with random finite hidden states, a function of the arguments."""
    rows = [plan.row_arrays(row, shape.row_tokens) for row in manifest.plan.shard_rows(shard)]
    stacked = {name: np.stack([getattr(row, name) for row in rows]) for name in vars(rows[0])}
    real_RT = stacked["document_ids"] >= 0

    def states(stream: int) -> Encoded:
        rng = np.random.default_rng([shape.seed, 1, shard, stream])
        values = rng.normal(scale=1 + stream, size=(*real_RT.shape, shape.hidden_size))
        return CODECS[shape.codec].encode(np.where(real_RT[..., None], values, 0).astype(np.float32))

    hidden = {layer: states(layer) for layer in shape.layers}
    final = {FINAL_HIDDEN: states(99)} if shape.final_hidden else {}
    by_array = {hidden_name(layer): encoded for layer, encoded in hidden.items()} | final
    return ShardRows(
        row_ids=np.array(manifest.plan.shard_rows(shard), np.int64),
        hidden={layer: encoded.codes for layer, encoded in hidden.items()},
        final_hidden=final[FINAL_HIDDEN].codes if final else None,
        scales={scales_name(name): e.scales for name, e in by_array.items() if e.scales is not None},
        **stacked,
    )


def start_cache(path: Path, shape: CacheShape, plan: PlanArrays, manifest: Manifest | None = None) -> Manifest:
    """Write a cache without shards, of another manifest if one is given."""
    with new_cache(path) as staging:
        plan.write(staging / PLAN_DIRECTORY)
        (staging / TARGET_DIRECTORY / "head.json").write_text('{"tied": true}\n')
        return publish_cache(path, staging, manifest or make_manifest(shape, plan))


def make_cache(path: Path, shape: CacheShape) -> Manifest:
    """Write a whole cache, or what is missing of it."""
    plan = make_plan(shape)
    manifest = Manifest.read(path) if (path / MANIFEST_FILE).exists() else start_cache(path, shape, plan)
    for shard in missing_shards(path, manifest):
        write_shard(path, manifest, shard, make_rows(shape, manifest, plan, shard))
    mark_complete(path, manifest)
    return manifest


def content(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, hidden ones too."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def flip_bit(path: Path, bit: int) -> None:
    stored = bytearray(path.read_bytes())
    stored[bit // 8] ^= 1 << bit % 8
    path.write_bytes(stored)


def allocate(manifest: Manifest, num_layers: int) -> RowBuffers:
    """Buffers full of wrong values."""
    num_tokens, hidden_size = manifest.cache.row_tokens, manifest.target.hidden_size
    codec = CODECS[manifest.cache.codec]
    return RowBuffers(
        input_ids=np.full(num_tokens, -7, np.int32),
        position_ids=np.full(num_tokens, -7, np.int32),
        document_ids=np.full(num_tokens, -7, np.int32),
        loss_mask=np.full(num_tokens, 7, np.uint8),
        codes=np.full((num_layers, num_tokens, codec.code_width(hidden_size)), 7, codec.code_dtype),
        scales=np.full((num_layers, num_tokens, codec.scale_width(hidden_size)), 7, np.uint16),
    )
