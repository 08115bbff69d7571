"""Imports from DeepSpec: states are where their tokens are; damage and mismatches are refused with their place."""

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards.codec import CODECS
from shards.config import to_json
from shards.deepspec import import_deepspec
from shards.errors import CacheError, UsageError
from shards.manifest import Manifest
from shards.record import ShardRecord
from shards.schema import scales_name
from tests.shards.caches import CacheShape, content, make_manifest, make_plan, start_cache
from tests.shards.derived import faults, history, make_ordered_cache, refusal, report, run, stored_documents

HIDDEN_SIZE = 64
LAYERS = (1, 2, 4, 6)  # a superset of what the caches here take
SHAPE = CacheShape(layers=(1, 4, 6), final_hidden=True)  # rows of 96 tokens, vocabulary of 100, mask token 3


@dataclass(frozen=True, kw_only=True)
class Sample:
    input_ids: np.ndarray
    loss_mask: np.ndarray
    hidden: np.ndarray  # uint16 [tokens, K, H]
    last_hidden: np.ndarray  # uint16 [tokens, H]


def make_sample(seed: int, num_tokens: int) -> Sample:
    rng = np.random.default_rng(seed)

    def states(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    loss_mask = rng.integers(0, 2, num_tokens)
    loss_mask[-2:] = 1
    return Sample(
        input_ids=rng.integers(4, 100, num_tokens),
        loss_mask=loss_mask,
        hidden=states(num_tokens, len(LAYERS), HIDDEN_SIZE),
        last_hidden=states(num_tokens, HIDDEN_SIZE),
    )


SAMPLES = [make_sample(seed, num_tokens) for seed, num_tokens in enumerate([30, 7, 96, 51, 2, 88, 13, 64, 33, 5])]


def write_deepspec(directory: Path, samples: list[Sample], *, per_shard: int = 4, **changes: Any) -> Path:
    """As DeepSpec lays it out, tensor after tensor; `changes` go into the manifest."""
    directory.mkdir()
    index, shards = b"", []
    for start in range(0, len(samples), per_shard):
        stored = b""
        for i, sample in enumerate(samples[start : start + per_shard]):
            tensors = [
                sample.input_ids.astype("<i4"),
                np.ones(len(sample.input_ids), "u1"),
                sample.loss_mask.astype("u1"),
                sample.hidden.astype("<u2"),
                sample.last_hidden.astype("<u2"),
            ]
            offsets = []
            for tensor in tensors:
                offsets.append(len(stored))
                stored += tensor.tobytes()
            index += struct.pack("<QIIQQQQQ", start + i, len(shards), len(sample.input_ids), *offsets)
        shards.append({"shard_id": len(shards), "file_name": f"shard-{len(shards):05d}.bin"})
        (directory / shards[-1]["file_name"]).write_bytes(stored)
    (directory / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": len(samples),
        "num_shards": len(shards),
        "target_layer_ids": list(LAYERS),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": HIDDEN_SIZE,
        "shards": shards,
        "target_model_name_or_path": "some/target",
    }
    (directory / "manifest.json").write_text(json.dumps(manifest | changes))
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepspec(tmp_path_factory.mktemp("deepspec") / "source", SAMPLES)


@pytest.fixture(scope="module")
def likes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache in each codec that was begun, and has no shards."""
    paths = {}
    for codec in CODECS:
        paths[codec] = tmp_path_factory.mktemp("likes") / "like"
        shape = replace(SHAPE, codec=codec)
        manifest = make_manifest(shape, make_plan(shape))
        manifest = replace(manifest, cache=replace(manifest.cache, shard_bytes=50_000))  # a row or two
        start_cache(paths[codec], shape, make_plan(shape), manifest)
    return paths


@pytest.mark.parametrize("codec", CODECS)
def test_every_sample_is_there_with_its_states(
    source: Path, likes: dict[str, Path], tmp_path: Path, codec: str
) -> None:
    made = report("import", "--from", "deepspec", source, tmp_path / "cache", "--like", likes[codec])
    assert faults(tmp_path / "cache") == []
    assert (made["documents"], made["tokens"]) == (len(SAMPLES), sum(len(s.input_ids) for s in SAMPLES))
    assert made["rows"] < len(SAMPLES)  # packed
    found = stored_documents(tmp_path / "cache")
    assert sorted(found) == list(range(len(SAMPLES)))
    for record, sample in enumerate(SAMPLES):
        document = found[record]
        assert document.input_ids == sample.input_ids.tolist()
        assert document.loss_mask == sample.loss_mask.tolist()
        assert document.source == "deepspec"
        stored = {f"hidden/{layer}": sample.hidden[:, LAYERS.index(layer)] for layer in SHAPE.layers}
        for name, codes in (stored | {"final_hidden": sample.last_hidden}).items():
            values = (codes.astype(np.uint32) << 16).view(np.float32)
            expected = CODECS[codec].encode(values)
            np.testing.assert_array_equal(document.states[name], expected.codes)
            if expected.scales is not None:
                np.testing.assert_array_equal(document.states[scales_name(name)], expected.scales)


def test_what_the_cache_is_of(source: Path, likes: dict[str, Path], tmp_path: Path) -> None:
    import_deepspec(source, tmp_path / "cache", likes["bf16"])
    like, made = Manifest.read(likes["bf16"]), Manifest.read(tmp_path / "cache")
    assert (made.target, made.cache) == (like.target, like.cache)
    digest = hashlib.sha256()
    for sample in SAMPLES:
        digest.update(struct.pack("<Q", len(sample.input_ids)))
        digest.update(sample.input_ids.astype("<i4").tobytes() + sample.loss_mask.astype("u1").tobytes())
    assert to_json(made.identity) == to_json(like.identity) | {"data": digest.hexdigest()}
    assert made.data == replace(like.data, files=(str(source),))
    for name in like.checksums:
        if name.startswith("target/"):
            assert made.checksums[name] == like.checksums[name]
    assert history(tmp_path / "cache") == [
        f"imported from the DeepSpec cache of some/target, target and identity of {like.seal[:16]}"
    ]


def test_who_is_held_out_follows_from_content(likes: dict[str, Path], tmp_path: Path) -> None:
    samples = [make_sample(seed, 20) for seed in range(60)]
    source = write_deepspec(tmp_path / "source", samples)
    import_deepspec(source, tmp_path / "cache", likes["bf16"])
    fraction = Manifest.read(likes["bf16"]).data.holdout_fraction
    found = stored_documents(tmp_path / "cache")
    for record, sample in enumerate(samples):
        digest = hashlib.sha256(sample.input_ids.astype("<i4").tobytes()).digest()
        assert found[record].is_heldout == (int.from_bytes(digest[:8]) < fraction * 2**64)
    assert any(document.is_heldout for document in found.values())


def test_samples_that_can_not_be_documents_are_counted(likes: dict[str, Path], tmp_path: Path) -> None:
    long, masked, outside, unsupervised = (make_sample(seed, 40) for seed in range(4))
    long = make_sample(9, 130)
    masked.input_ids[5] = 3
    outside.input_ids[5] = 100
    unsupervised.loss_mask[:] = 0
    source = write_deepspec(tmp_path / "source", [masked, SAMPLES[0], outside, unsupervised, long])
    done = run("import", "--from", "deepspec", source, tmp_path / "cache", "--like", likes["bf16"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == (
        "1 samples left out (few_supervised), 1 samples left out (mask_token), "
        "1 samples left out (outside_embedding), 1 truncated"
    )
    found = stored_documents(tmp_path / "cache")
    assert found.keys() == {1, 4}
    assert found[4].input_ids == long.input_ids[:96].tolist()
    np.testing.assert_array_equal(found[4].states["final_hidden"], long.last_hidden[:96])


@pytest.mark.parametrize("codec", CODECS)
def test_states_that_are_not_finite_go_to_quarantine(likes: dict[str, Path], tmp_path: Path, codec: str) -> None:
    bad = make_sample(0, 40)
    bad.hidden[30, LAYERS.index(6), 5] = 0x7F80  # infinity
    bad.hidden[25, LAYERS.index(2), 5] = 0x7FC0  # NaN, in a layer that is not taken
    bad.last_hidden[3, 0] = 0x7FC0
    source = write_deepspec(tmp_path / "source", [SAMPLES[0], bad, SAMPLES[1]])
    made = import_deepspec(source, tmp_path / "cache", likes[codec])
    assert made["quarantined_documents"] == 1
    assert faults(tmp_path / "cache") == []
    manifest = Manifest.read(tmp_path / "cache")
    shards = range(manifest.plan.num_shards)
    (entry,) = (e for shard in shards for e in ShardRecord.read(tmp_path / "cache", manifest, shard).quarantined)
    assert (entry.layer, entry.position) == (6, 30)
    assert np.load(tmp_path / "cache/plan/document_record.npy")[entry.document] == 1


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def patch(path: Path, offset: int, stored: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(stored)


def patch_index(source: Path, record: int, field: int, value: int) -> None:
    """Field 0: sample, 1: shard, 2: tokens, 3 to 7: offsets."""
    kind = "<QIIQQQQQ"[field + 1]
    offset = struct.calcsize("<QIIQQQQQ"[: field + 1])
    patch(source / "samples.idx", 56 * record + offset, struct.pack("<" + kind, value))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (
        lambda s: (s / "manifest.json").unlink(),
        "is no target cache of DeepSpec: it has no manifest.json",
    ),
    "no JSON": (lambda s: (s / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "no object": (lambda s: (s / "manifest.json").write_text("[]"), "it holds no object"),
    "another version": (lambda s: edit(s / "manifest.json", lambda m: m.update(version=3)), "version 3, expected 2"),
    "fp8": (lambda s: edit(s / "manifest.json", lambda m: m.update(hidden_dtype="float8_e4m3fn")), "hidden_dtype"),
    "no layers": (lambda s: edit(s / "manifest.json", lambda m: m.pop("target_layer_ids")), "lacks target_layer_ids"),
    "odd layers": (lambda s: edit(s / "manifest.json", lambda m: m.update(target_layer_ids=[4, 1])), "ascending"),
    "odd size": (lambda s: edit(s / "manifest.json", lambda m: m.update(hidden_size="64")), "lacks target_layer_ids"),
    "another count": (
        lambda s: edit(s / "manifest.json", lambda m: m.update(num_samples=9)),
        "num_samples 9",
    ),
    "no index": (lambda s: (s / "samples.idx").unlink(), "samples.idx cannot be read"),
    "index cut": (lambda s: os.truncate(s / "samples.idx", 100), "no multiple of 56"),
    "shard missing": (lambda s: (s / "shard-00001.bin").unlink(), "shard-00001.bin cannot be read"),
    "shard cut": (lambda s: os.truncate(s / "shard-00002.bin", 5000), "sample 8 (record 8 of samples.idx)"),
    "shard empty": (lambda s: os.truncate(s / "shard-00002.bin", 0), "sample 8 (record 8 of samples.idx)"),
    "unknown shard": (lambda s: patch_index(s, 3, 1, 9), "sample 3 (record 3 of samples.idx) lies outside"),
    "huge length": (lambda s: patch_index(s, 3, 2, 2**32 - 1), "sample 3 (record 3 of samples.idx) lies outside"),
    "huge offset": (lambda s: patch_index(s, 3, 6, 2**64 - 1), "sample 3 (record 3 of samples.idx) lies outside"),
    "padding": (lambda s: patch(s / "shard-00000.bin", 4 * 30, b"\0"), "has padding in its attention mask"),
    "negative token": (lambda s: patch(s / "shard-00000.bin", 3, b"\xff"), "ids can't be negative"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(source: Path, likes: dict[str, Path], tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    damage(copy)
    with pytest.raises(CacheError) as error:
        import_deepspec(copy, tmp_path / "cache", likes["bf16"])
    assert message in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_any_index_is_read_or_refused(source: Path, likes: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(0)
    for i in range(40):
        copy = Path(shutil.copytree(source, tmp_path / f"source{i}"))
        for _ in range(3):
            patch(copy / "samples.idx", rng.randrange(560), rng.randbytes(1))
        try:
            import_deepspec(copy, tmp_path / f"cache{i}", likes["bf16"])
        except (CacheError, UsageError):
            assert not (tmp_path / f"cache{i}").exists()
        else:
            assert faults(tmp_path / f"cache{i}") == []


def test_another_target_is_refused(source: Path, likes: dict[str, Path], tmp_path: Path) -> None:
    other = replace(SHAPE, layers=(1, 5))
    start_cache(tmp_path / "layers", other, make_plan(other))
    message = refusal("import", "--from", "deepspec", source, tmp_path / "cache", "--like", tmp_path / "layers")
    assert f"has the layers [1, 2, 4, 6], not [5] of the cache.layers of {tmp_path / 'layers'}" in message
    wide = replace(SHAPE, hidden_size=128)
    start_cache(tmp_path / "wide", wide, make_plan(wide), make_manifest(wide, make_plan(wide)))
    message = refusal("import", "--from", "deepspec", source, tmp_path / "cache", "--like", tmp_path / "wide")
    assert "has hidden_size 64" in message
    assert "target.hidden_size 128" in message
    assert "is not a cache" in refusal("import", "--from", "deepspec", source, tmp_path / "c", "--like", tmp_path)
    assert run("import", "--from", "eagle", source, tmp_path / "c", "--like", likes["bf16"]).returncode == 2
    assert not (tmp_path / "cache").exists()


def test_an_import_is_continued_and_never_overwrites(source: Path, likes: dict[str, Path], tmp_path: Path) -> None:
    before = content(source), content(likes["int8"])
    arguments = ["import", "--from", "deepspec", source, tmp_path / "cache", "--like", likes["int8"]]
    report(*arguments)
    whole = content(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache/shard-00001")
    assert report(*arguments)["new_shards"] == 1
    assert content(tmp_path / "cache") == whole
    assert "complete: there is nothing to do" in refusal(*arguments)
    make_ordered_cache(tmp_path / "other", SHAPE)
    arguments[4] = tmp_path / "other"
    assert "holds another cache" in refusal(*arguments)
    assert (content(source), content(likes["int8"])) == before
