"""Rows of random codes on disk, as a cache and in the formats that its reader is measured against."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shards.codec import CODECS
from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.manifest import Identity, Manifest, Plan
from shards.reader import SLOT_ARRAYS, RowBuffers
from shards.schema import PLAN_DIRECTORY, PlanArrays, hidden_name, scales_name
from shards.writer import ShardRow, new_cache, publish_cache, write_shard

SHARD_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """The same rows in three formats below one directory: `cache/`, `flat/*.npy`, `rows.safetensors`."""

    directory: Path
    codec: str
    num_rows: int
    row_tokens: int
    hidden_size: int
    layers: tuple[int, ...]

    @property
    def cache(self) -> Path:
        return self.directory / "cache"

    @property
    def safetensors_file(self) -> Path:
        return self.directory / "rows.safetensors"

    @property
    def row_bytes(self) -> int:
        return sum(values.nbytes for values in self.by_name(self.allocate()).values())

    def flat_file(self, name: str) -> Path:
        return self.directory / "flat" / f"{name.replace('/', '-')}.npy"

    def allocate(self) -> RowBuffers:
        """Buffers whose pages exist."""
        codec, shape_KT = CODECS[self.codec], (len(self.layers), self.row_tokens)
        return RowBuffers(
            **{name: np.ones(self.row_tokens, np.int32) for name in SLOT_ARRAYS[:3]},
            loss_mask=np.ones(self.row_tokens, np.uint8),
            codes=np.ones((*shape_KT, codec.code_width(self.hidden_size)), codec.code_dtype),
            scales=np.ones((*shape_KT, codec.scale_width(self.hidden_size)), np.uint16),
        )

    def by_name(self, buffers: RowBuffers) -> dict[str, np.ndarray]:
        """The buffers of one row by the names of the arrays that they are for."""
        found = {name: getattr(buffers, name) for name in SLOT_ARRAYS}
        found |= {hidden_name(layer): codes for layer, codes in zip(self.layers, buffers.codes, strict=True)}
        if buffers.scales.size:
            names = [scales_name(hidden_name(layer)) for layer in self.layers]
            found |= dict(zip(names, buffers.scales, strict=True))
        return found


class Content:
    """What the rows hold: one block of encoded normal values, rolled by another number of tokens for each array."""

    def __init__(self, data: DataSet) -> None:
        self.data = data
        rng = np.random.default_rng(0)
        values_TH = rng.standard_normal((data.row_tokens, data.hidden_size), dtype=np.float32)
        self.encoded = CODECS[data.codec].encode(values_TH)

    def row(self, row: int) -> dict[str, np.ndarray]:
        num_tokens = self.data.row_tokens
        arrays = {
            "input_ids": (np.arange(num_tokens, dtype=np.int32) + row) % 1000,
            "position_ids": np.arange(num_tokens, dtype=np.int32),
            "document_ids": np.full(num_tokens, row, np.int32),
            "loss_mask": np.ones(num_tokens, np.uint8),
        }
        for k, layer in enumerate(self.data.layers):
            shift = row * len(self.data.layers) + k
            arrays[hidden_name(layer)] = np.roll(self.encoded.codes, shift, axis=0)
            if self.encoded.scales is not None:
                arrays[scales_name(hidden_name(layer))] = np.roll(self.encoded.scales, shift, axis=0)
        return arrays


def write_cache(data: DataSet, content: Content) -> None:
    manifest = begin_cache(data)

    def rows(shard: int) -> Iterator[ShardRow]:
        for row in manifest.plan.shard_rows(shard):
            others = {"row_ids": np.int64(row), "source_ids": np.zeros(data.row_tokens, np.uint8)}
            yield ShardRow(arrays=content.row(row) | others)

    for shard in range(manifest.plan.num_shards):
        write_shard(data.cache, manifest, shard, rows(shard))


def begin_cache(data: DataSet) -> Manifest:
    num_rows, num_tokens = data.num_rows, data.row_tokens
    plan = PlanArrays(
        document_record=np.arange(num_rows),
        document_source=np.zeros(num_rows, np.uint8),
        document_split=np.zeros(num_rows, np.uint8),
        document_row=np.arange(num_rows),
        document_start=np.zeros(num_rows, np.int32),
        document_tokens=np.full(num_rows, num_tokens, np.int32),
        token_ids=np.zeros(num_rows * num_tokens, np.int32),
        loss_mask=np.ones(num_rows * num_tokens, np.uint8),
    )
    manifest = Manifest(
        target=TargetConfig(
            path="random",
            hidden_size=data.hidden_size,
            num_layers=data.layers[-1] + 2,
            vocab_size=1000,
            mask_token_id=0,
        ),
        data=DataConfig(files=("random",)),
        cache=CacheConfig(row_tokens=num_tokens, layers=data.layers, codec=data.codec),
        identity=Identity(**dict.fromkeys(("target", "tokenizer", "chat_template", "data"), "0" * 64)),
        plan=Plan(
            num_rows=num_rows,
            num_train_rows=num_rows,
            rows_per_shard=max(1, SHARD_BYTES // data.row_bytes),
            num_documents=num_rows,
            num_heldout_documents=0,
            num_tokens=num_rows * num_tokens,
            num_supervised_tokens=num_rows * num_tokens,
            sources=("random",),
            num_left_out={},
            num_truncated=0,
        ),
        checksums={},
        software={},
    )
    with new_cache(data.cache) as staging:
        plan.write(staging / PLAN_DIRECTORY)
        return publish_cache(data.cache, staging, manifest)


def write_flat(data: DataSet, content: Content) -> None:
    """One .npy file for each array, and one safetensors file of all."""
    data.flat_file("any").parent.mkdir()
    arrays = {}
    for name, values in content.row(0).items():
        shape = (data.num_rows, *values.shape)
        arrays[name] = np.lib.format.open_memmap(data.flat_file(name), "w+", values.dtype, shape)
    for row in range(data.num_rows):
        for name, values in content.row(row).items():
            arrays[name][row] = values
    save_file(dict(arrays), data.safetensors_file)
