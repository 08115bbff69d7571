"""`python -m shards import --from deepspec`: a target cache of DeepSpec, version 2, as a cache of ours.

Such a cache is manifest.json, samples.idx and shard-NNNNN.bin: of each sample the tokens, masks, the chosen layers'
states side by side and the last state after the norm, in bf16, unpacked and without checksums. It records neither what
the target was, beyond its name, nor its ends; these come from a cache of ours of the same target (`--like`), begun with
any data, and with them configuration and codec. What the two say of the target is compared.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from shards.codec import CODECS, decode_bf16
from shards.derive import Blueprint, States, check_outside, make_cache
from shards.documents import BATCH_DOCUMENTS, Batch, Collector, Document, Limits, Tokenised
from shards.encoding import Values, encode_document
from shards.errors import CacheError, UsageError
from shards.manifest import Manifest, read_json
from shards.plan import make_plan
from shards.progress import Progress
from shards.record import Quarantined
from shards.room import existing_parent
from shards.schema import FINAL_HIDDEN, PlanArrays, hidden_name
from shards.verify import check_file

VERSION = 2
SOURCE = "deepspec"  # samples don't say where they are from
INDEX = np.dtype(
    [
        ("sample", "<u8"),
        ("shard", "<u4"),
        ("tokens", "<u4"),
        ("input_ids", "<u8"),  # this and the following: byte offsets in the shard's file
        ("attention_mask", "<u8"),
        ("loss_mask", "<u8"),
        ("hidden", "<u8"),
        ("last_hidden", "<u8"),
    ]
)
EXPECTED = {"version": VERSION, "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}


@dataclass(frozen=True, kw_only=True)
class DeepSpecCache:
    directory: Path
    layers: tuple[int, ...]
    hidden_size: int
    target_name: str | None
    files: tuple[np.ndarray, ...]  # uint8, mapped, by shard
    samples: np.ndarray  # INDEX

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Raise CacheError unless all tensors of all samples lie inside their files."""
        path = directory / "manifest.json"
        if not path.exists():
            raise CacheError(f"{directory} is no target cache of DeepSpec: it has no {path.name}; name one that has")
        manifest = read_json(path)
        if not isinstance(manifest, dict):
            raise CacheError(f"{path} is not the manifest of a DeepSpec cache: it holds no object")
        for key, expected in EXPECTED.items():
            if manifest.get(key) != expected:
                raise CacheError(f"{path} has {key} {manifest.get(key)!r}, expected {expected!r}")
        layers, hidden_size, shards = (manifest.get(key) for key in ("target_layer_ids", "hidden_size", "shards"))
        if not (_are_numbers(layers) and _are_numbers([hidden_size]) and hidden_size and isinstance(shards, list)):
            raise CacheError(f"{path} lacks target_layer_ids, hidden_size or shards")
        if list(layers) != sorted(set(layers)):
            raise CacheError(f"{path} has target_layer_ids {layers}: they must be ascending, each layer once")
        cache = cls(
            directory=directory,
            layers=tuple(layers),
            hidden_size=hidden_size,
            target_name=manifest.get("target_model_name_or_path"),
            files=tuple(_map(directory / f"shard-{shard:05d}.bin") for shard in range(len(shards))),
            samples=_read_index(directory / "samples.idx"),
        )
        if len(cache.samples) != manifest.get("num_samples"):
            raise CacheError(f"{path} has num_samples {manifest.get('num_samples')!r}, the index {len(cache.samples)}")
        cache._check_index()
        return cache

    def document(self, record: int) -> Document:
        """Tokens and loss mask of a sample. Raises CacheError if there is padding, which is never written."""
        input_ids = self._values(record, "input_ids", np.dtype("<i4"))
        if not self._values(record, "attention_mask", np.dtype("u1")).all():
            raise CacheError(
                f"{self._place(record)} has padding in its attention mask, which no DeepSpec writer leaves"
            )
        loss_mask = (self._values(record, "loss_mask", np.dtype("u1")) != 0).astype(np.uint8)
        if len(input_ids) and input_ids.min() < 0:
            raise CacheError(f"{self._place(record)} has token {input_ids.min()}: ids can't be negative")
        return Document(record=record, source=SOURCE, token_ids=input_ids.astype(np.int32), loss_mask=loss_mask)

    def codes(self, record: int) -> tuple[np.ndarray, np.ndarray]:
        """uint16 [tokens, K, H] of the layers and [tokens, H] of the last state, both mapped."""
        hidden = self._values(record, "hidden", np.dtype("<u2"))
        last_hidden = self._values(record, "last_hidden", np.dtype("<u2"))
        return hidden.reshape(-1, len(self.layers), self.hidden_size), last_hidden.reshape(-1, self.hidden_size)

    def token_bytes(self) -> dict[str, int]:
        """Of each tensor."""
        hidden = 2 * self.hidden_size
        sizes = {"input_ids": 4, "attention_mask": 1, "loss_mask": 1, "hidden": len(self.layers) * hidden}
        return sizes | {"last_hidden": hidden}

    def _values(self, record: int, name: str, dtype: np.dtype) -> np.ndarray:
        sample = self.samples[record]
        start = int(sample[name])
        stop = start + int(sample["tokens"]) * self.token_bytes()[name]
        return self.files[int(sample["shard"])][start:stop].view(dtype)

    def _check_index(self) -> None:
        sizes = np.array([file.size for file in self.files], np.uint64)
        is_bad = self.samples["shard"] >= len(sizes)
        file_bytes = sizes[np.where(is_bad, 0, self.samples["shard"])] if len(sizes) else np.zeros(len(is_bad), "u8")
        for name, token_bytes in self.token_bytes().items():
            num_bytes = self.samples["tokens"].astype(np.uint64) * np.uint64(token_bytes)
            is_bad |= (num_bytes > file_bytes) | (self.samples[name] > file_bytes - np.minimum(num_bytes, file_bytes))
        if is_bad.any():
            raise CacheError(f"{self._place(int(is_bad.argmax()))} lies outside of its file: it was cut")

    def _place(self, record: int) -> str:
        return f"{self.directory} sample {self.samples[record]['sample']} (record {record} of samples.idx)"


def import_deepspec(directory: Path, destination: Path, like: Path) -> dict[str, Any]:
    """Make `destination` from the DeepSpec cache in `directory`; return what `--json` prints."""
    check_outside(destination, directory)
    model = _read_like(like)
    source = DeepSpecCache.open(directory)
    _check_same_target(source, model, like)
    tokenised, data_hash = _read_documents(source, model, existing_parent(destination))
    data = replace(model.data, files=(str(directory),), max_documents=None)
    plan, layout = make_plan(tokenised, model.target, data, model.cache)
    arrays = layout.arrays(tokenised, existing_parent(destination))
    step = f"imported from the DeepSpec cache of {source.target_name}, target and identity of {model.seal[:16]}"
    manifest = replace(
        model,
        data=data,
        identity=replace(model.identity, data=data_hash),
        plan=plan,
        history=(step,),
    )
    blueprint = Blueprint(
        manifest=manifest,
        plan=arrays,
        target=like,
        open_documents=lambda: DeepSpecDocuments(source, arrays, manifest),
    )
    return make_cache(destination, blueprint).to_json() | {
        "source_target": source.target_name,
        "left_out_documents": plan.num_left_out,
        "truncated_documents": plan.num_truncated,
    }


def describe_left_out(made: dict[str, Any]) -> list[str]:
    left_out = [f"{count:,} samples left out ({reason})" for reason, count in made["left_out_documents"].items()]
    truncated = [f"{made['truncated_documents']:,} truncated"] if made["truncated_documents"] else []
    return [
        *([", ".join(left_out + truncated)] if left_out or truncated else []),
        f"the states are those of {made['source_target']}, as its manifest says; nothing else vouches for that",
    ]


class DeepSpecDocuments:
    """The states of the samples that became documents."""

    def __init__(self, source: DeepSpecCache, plan: PlanArrays, manifest: Manifest) -> None:
        self._source, self._plan, self._manifest = source, plan, manifest

    def read(self, document: int) -> States | Quarantined:
        hidden_TKH, last_hidden_TH = self._source.codes(int(self._plan.document_record[document]))
        layers: dict[str, tuple[int, Values]] = {}
        for layer in self._manifest.cache.layers:
            layers[hidden_name(layer)] = layer, _decoder(hidden_TKH[:, self._source.layers.index(layer)])
        if self._manifest.cache.final_hidden:
            layers[FINAL_HIDDEN] = self._manifest.target.num_layers, _decoder(last_hidden_TH)
        num_tokens = int(self._plan.document_tokens[document])  # fewer than the sample's where it was truncated
        return encode_document(CODECS[self._manifest.cache.codec], document, num_tokens, layers)

    def close(self) -> None:
        pass  # the files are shared by all threads


def _decoder(codes_TH: np.ndarray) -> Values:
    return lambda tokens: decode_bf16(codes_TH[tokens])


def _read_like(like: Path) -> Manifest:
    """The manifest of the cache whose target, identity and configuration the import takes over."""
    manifest = Manifest.read(like)
    for name, sha256 in manifest.checksums.items():
        check_file(like, name, sha256)
    return manifest


def _check_same_target(source: DeepSpecCache, model: Manifest, like: Path) -> None:
    """Raise UsageError naming the first thing that a cache like `model` can't take from `source`."""
    if source.hidden_size != model.target.hidden_size:
        raise UsageError(
            f"{source.directory} has hidden_size {source.hidden_size}, {like} has target.hidden_size "
            f"{model.target.hidden_size}: name a cache of the same target"
        )
    if missing := sorted(set(model.cache.layers) - set(source.layers)):
        raise UsageError(
            f"{source.directory} has the layers {list(source.layers)}, not {missing} of the cache.layers of {like}: "
            "name a cache whose layers are among them"
        )


def _read_documents(source: DeepSpecCache, model: Manifest, directory: Path) -> tuple[Tokenised, str]:
    """The samples that can have a place in a row, and the hash of the data that all of them are."""
    limits = Limits.of(model.target, model.data, model.cache)
    collector, digest = Collector(directory), hashlib.sha256()
    wholes = _all_documents(source)
    while batch := list(itertools.islice(wholes, BATCH_DOCUMENTS)):
        for whole in batch:
            digest.update(len(whole.token_ids).to_bytes(8, "little"))
            digest.update(whole.token_ids.tobytes() + whole.loss_mask.tobytes())
        collector.add(Batch.of(batch, limits, model.data.seed))
    return collector.finish(), digest.hexdigest()


def _all_documents(source: DeepSpecCache) -> Iterator[Document]:
    with Progress(len(source.samples), unit="sample", name=str(source.directory)) as progress:
        for record in range(len(source.samples)):
            yield source.document(record)
            progress.show(record + 1)


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _map(path: Path) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from None


def _read_index(path: Path) -> np.ndarray:
    stored = _map(path)
    if stored.size % INDEX.itemsize:
        raise CacheError(f"{path} has {stored.size} bytes, which is no multiple of {INDEX.itemsize}")
    return stored.view(INDEX)
