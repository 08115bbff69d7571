"""The layout of a cache: names, shapes and element types of everything below its directory.

FORMAT.md in code, for the writer to follow and for every reader to hold a file against. Imports numpy only, so that
the trainer can import it. How values become codes is codec.py's part, what the manifest says manifest.py's.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from shards.codec import CODECS
from shards.compression import ZARR_CODECS
from shards.config import CacheConfig
from shards.errors import CacheError
from shards.manifest import Manifest, Plan

LOST_AND_FOUND = "lost+found"  # of the file system, where a cache is the root of a disk

TARGET_DIRECTORY = "target"
HEAD_FILE = "target/head.safetensors"  # embed_tokens [V, H] and, unless tied, lm_head [V, H]; the target's dtype
HEAD_CONFIG_FILE = "target/head.json"  # input_embedding_scale, output_multiplier, final_logit_softcapping, tied

PLAN_DIRECTORY = "plan"
PLAN_COLUMNS = {  # file plan/<name>.npy → element type; documents in the order of their ids
    "document_record": np.dtype("<i8"),  # [D] line of the data: files in order, lines in order, counted over all files
    "document_source": np.dtype("u1"),  # [D] index into plan.sources of the manifest
    "document_split": np.dtype("u1"),  # [D] 0 training, 1 held out
    "document_row": np.dtype("<i8"),  # [D]
    "document_start": np.dtype("<i4"),  # [D] first slot in the row
    "document_tokens": np.dtype("<i4"),  # [D] slots
    "token_ids": np.dtype("<i4"),  # [sum of document_tokens] documents one after the other
    "loss_mask": np.dtype("u1"),  # [sum of document_tokens]
}

SHARD_FILE = "shard.json"
ROW_IDS = "row_ids"
FINAL_HIDDEN = "final_hidden"
ZARR_FILE = "zarr.json"
CRC_BYTES = 4  # after each chunk and after the index, little-endian
INDEX_ENTRY_BYTES = 16  # offset and length of a chunk, uint64 each
NO_DOCUMENT = -1  # document_ids of a padding slot


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}"


def published_shards(cache: Path, manifest: Manifest) -> set[int]:
    """The shards of the plan whose directories are in place; a published shard is whole."""
    try:
        names = os.listdir(cache)
    except OSError as error:
        raise CacheError(f"{cache} cannot be read: {error.strerror}") from None
    found = (re.fullmatch(r"shard-(\d{5})", name) for name in names)
    return {int(match[1]) for match in found if match and int(match[1]) < manifest.plan.num_shards}


def missing_shards(cache: Path, manifest: Manifest) -> list[int]:
    """The shards of the plan that are not published (yet)."""
    published = published_shards(cache, manifest)
    return [shard for shard in range(manifest.plan.num_shards) if shard not in published]


def file_names(directory: Path) -> list[str]:
    """The files below `directory`, with forward slashes, sorted."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One array of a shard. The first axis is the row, and a chunk never spans two rows."""

    name: str  # path below the shard, with forward slashes
    dtype: np.dtype
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    axes: tuple[str, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_compressed: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def holds_states(self) -> bool:
        """Whether the values are codes of hidden states."""
        return "codec" in self.attributes

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def chunks_per_row(self) -> int:
        return self.shape[1] // self.chunk_shape[1] if len(self.shape) > 1 else 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's values, without the checksum that follows them."""
        return int(np.prod(self.chunk_shape)) * self.dtype.itemsize

    @property
    def chunk_stride(self) -> int:
        """Bytes of a chunk with its checksum, uncompressed."""
        return self.chunk_bytes + CRC_BYTES

    @property
    def index_bytes(self) -> int:
        return self.num_rows * self.chunks_per_row * INDEX_ENTRY_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of the array file, which shape and chunks determine unless it is compressed."""
        num_chunks = self.num_rows * self.chunks_per_row
        return num_chunks * self.chunk_stride + self.index_bytes + CRC_BYTES

    def chunk_offsets(self) -> np.ndarray:
        """int64 [R, chunks of a row]: where each chunk begins in the array file, unless it is compressed.

        Chunks lie in Morton order.
        """
        rows, chunks = np.indices((self.num_rows, self.chunks_per_row))
        row_bits, chunk_bits = ((size - 1).bit_length() for size in rows.shape)
        interleaved, num_bits = np.zeros_like(rows), 0
        for bit in range(max(row_bits, chunk_bits)):
            for index, width in ((rows, row_bits), (chunks, chunk_bits)):
                if bit < width:
                    interleaved |= (index >> bit & 1) << num_bits
                    num_bits += 1
        offsets = np.empty_like(rows)
        offsets.flat[interleaved.argsort(axis=None)] = np.arange(rows.size) * self.chunk_stride
        return offsets

    @property
    def file_name(self) -> str:
        """The one file that holds the values, below the shard: zarr's key of the chunk at the origin."""
        return "/".join([self.name, "c", *("0" for _ in self.shape)])

    def zarr_metadata(self) -> dict[str, Any]:
        """The content of the array's zarr.json; a stored one must equal it."""
        little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
        single_bytes = {"name": "bytes"}  # an element of one byte has no order
        values = single_bytes if self.dtype.itemsize == 1 else little_endian
        sharding = {
            "chunk_shape": list(self.chunk_shape),
            "codecs": [values, *(ZARR_CODECS if self.is_compressed else ()), {"name": "crc32c"}],
            "index_codecs": [little_endian, {"name": "crc32c"}],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.shape)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "dimension_names": list(self.axes),
            "attributes": self.attributes,
        }


def group_metadata() -> dict[str, Any]:
    """The zarr.json of a shard and of the groups inside it."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def hidden_name(layer: int) -> str:
    return f"hidden/{layer}"


def scales_name(states: str) -> str:
    """The array of the scales that belong to the codes in the array `states`: hidden/9 → scales/9."""
    return f"scales/{states.rpartition('/')[2]}"


def shard_arrays(manifest: Manifest, shard: int) -> Mapping[str, ArraySpec]:
    """Every array of a shard, by name, in the order in which they are written."""
    return _arrays(manifest.cache, manifest.target.hidden_size, len(manifest.plan.shard_rows(shard)))


@functools.cache
def _arrays(cache: CacheConfig, hidden_size: int, num_rows: int) -> Mapping[str, ArraySpec]:
    shape_RT = (num_rows, cache.row_tokens)
    codec = CODECS[cache.codec]
    scale_width = codec.scale_width(hidden_size)

    def slots(name: str, dtype: str) -> ArraySpec:
        return ArraySpec(
            name=name, dtype=np.dtype(dtype), shape=shape_RT, chunk_shape=(1, cache.row_tokens), axes=("row", "token")
        )

    def tokens(name: str, dtype: np.dtype, width: int, is_compressed: bool = False, **attributes: Any) -> ArraySpec:
        return ArraySpec(
            name=name,
            dtype=dtype,
            shape=(*shape_RT, width),
            chunk_shape=(1, cache.chunk_tokens, width),
            axes=("row", "token", "hidden"),
            attributes=attributes,
            is_compressed=is_compressed,
        )

    def states(name: str, **attributes: Any) -> list[ArraySpec]:
        width = codec.code_width(hidden_size)
        codes = tokens(name, codec.code_dtype, width, codec.is_compressed, codec=codec.name, **attributes)
        scales = tokens(scales_name(name), np.dtype("<u2"), scale_width, scales_of=name)
        return [codes, scales] if scale_width else [codes]

    arrays = [
        ArraySpec(name=ROW_IDS, dtype=np.dtype("<i8"), shape=(num_rows,), chunk_shape=(1,), axes=("row",)),
        slots("input_ids", "<i4"),
        slots("position_ids", "<i4"),
        slots("document_ids", "<i4"),
        slots("loss_mask", "u1"),
        slots("source_ids", "u1"),
    ]
    for layer in cache.layers:
        arrays += states(hidden_name(layer), layer=layer)
    if cache.final_hidden:
        arrays += states(FINAL_HIDDEN, normed=True)  # after the target's final norm
    return MappingProxyType({array.name: array for array in arrays})


def group_names(arrays: Iterable[str]) -> list[str]:
    """The zarr groups that hold `arrays`, by path below the shard, outer before inner; the shard itself is ""."""
    return sorted({"", *(name.rpartition("/")[0] for name in arrays)})


def shard_files(arrays: Mapping[str, ArraySpec]) -> set[str]:
    """Every file of a shard but shard.json, by path below it."""
    metadata = {f"{name}/{ZARR_FILE}".lstrip("/") for name in (*group_names(arrays), *arrays)}
    return metadata | {array.file_name for array in arrays.values()}


@dataclass(frozen=True, kw_only=True)
class RowArrays:
    """What the plan says of one row: everything but the hidden states."""

    input_ids: np.ndarray  # int32 [T], 0 in padding slots
    position_ids: np.ndarray  # int32 [T], from 0 in each document, 0 in padding slots
    document_ids: np.ndarray  # int32 [T], NO_DOCUMENT in padding slots
    loss_mask: np.ndarray  # uint8 [T], 0 in padding slots
    source_ids: np.ndarray  # uint8 [T], 0 in padding slots


@dataclass(frozen=True, kw_only=True)
class PlanArrays:
    """The columns of plan/: which document lies where, and its tokens. See PLAN_COLUMNS for types and meaning."""

    document_record: np.ndarray
    document_source: np.ndarray
    document_split: np.ndarray
    document_row: np.ndarray
    document_start: np.ndarray
    document_tokens: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in PLAN_COLUMNS.items():
            column = getattr(self, name)
            if column.dtype != dtype or column.ndim != 1:
                raise CacheError(f"plan column {name} is {column.dtype} {list(column.shape)}, expected {dtype} [any]")
        num_documents, num_tokens = len(self.document_tokens), int(self.document_tokens.sum(dtype=np.int64))
        for name in PLAN_COLUMNS:
            expected = num_documents if name.startswith("document_") else num_tokens
            if len(getattr(self, name)) != expected:
                raise CacheError(f"plan column {name} has {len(getattr(self, name))} elements, expected {expected}")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Map the columns below `directory`, a cache's plan/; nothing is unpickled."""
        columns = {}
        for name in PLAN_COLUMNS:
            path = directory / f"{name}.npy"
            try:
                columns[name] = np.lib.format.open_memmap(path, mode="r")
            except (OSError, ValueError) as error:
                raise CacheError(f"{path} cannot be read: {error}") from None
        return cls(**columns)

    def write(self, directory: Path) -> None:
        for name in PLAN_COLUMNS:
            np.save(directory / f"{name}.npy", getattr(self, name), allow_pickle=False)

    def check(self, plan: Plan) -> None:
        """Raise CacheError naming the first count in which these columns differ from the manifest's `plan`."""
        if min(column.min(initial=0) for column in (self.document_row, self.document_start, self.document_tokens)) < 0:
            raise CacheError("the plan's columns have negative rows, starts or lengths")
        counts = {
            "num_rows": int(self.document_row.max(initial=-1)) + 1,
            "num_documents": len(self.document_row),
            "num_heldout_documents": int(np.count_nonzero(self.document_split)),
            "num_tokens": len(self.token_ids),
        }
        for key, count in counts.items():
            if getattr(plan, key) != count:
                raise CacheError(f"the manifest's plan.{key} is {getattr(plan, key)}, the plan's columns say {count}")
        if self.document_source.max(initial=0) >= max(1, len(plan.sources)):
            raise CacheError(
                f"the plan has documents of source {self.document_source.max()}, the manifest names {len(plan.sources)}"
            )

    @cached_property
    def token_offsets(self) -> np.ndarray:
        """int64 [D+1]: document d has tokens token_offsets[d] up to, not including, token_offsets[d+1]."""
        return np.concatenate([[0], np.cumsum(self.document_tokens, dtype=np.int64)])

    @cached_property
    def _documents_by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """Document ids in the order of (row, start), and the row of each."""
        documents = np.lexsort((self.document_start, self.document_row))
        return documents, self.document_row[documents]

    def row_documents(self, row: int) -> np.ndarray:
        """The ids of the documents in `row`, in the order in which they lie there."""
        documents, rows = self._documents_by_row
        return documents[slice(*np.searchsorted(rows, [row, row + 1]))]

    def row_arrays(self, row: int, row_tokens: int) -> RowArrays:
        """The slots of `row`, whose width is `row_tokens`."""
        arrays = RowArrays(
            input_ids=np.zeros(row_tokens, np.int32),
            position_ids=np.zeros(row_tokens, np.int32),
            document_ids=np.full(row_tokens, NO_DOCUMENT, np.int32),
            loss_mask=np.zeros(row_tokens, np.uint8),
            source_ids=np.zeros(row_tokens, np.uint8),
        )
        for document in self.row_documents(row):
            start, num_tokens = self.document_start[document], self.document_tokens[document]
            slots = slice(start, start + num_tokens)
            tokens = slice(*self.token_offsets[document : document + 2])
            arrays.input_ids[slots] = self.token_ids[tokens]
            arrays.position_ids[slots] = np.arange(num_tokens)
            arrays.document_ids[slots] = document
            arrays.loss_mask[slots] = self.loss_mask[tokens]
            arrays.source_ids[slots] = self.document_source[document]
        return arrays
