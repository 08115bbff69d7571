"""Extraction with int8 and int4: the codes are those of the target's states, quarantine and padding are zeros."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.random_target import TargetShape, make_random_target
from extract.__main__ import main
from extract.job import Job
from shards.codec import CODECS, Encoded, bytes_per_token, decode_bf16
from shards.manifest import Manifest
from shards.record import ShardRecord
from shards.schema import NO_DOCUMENT
from shards.verify import verify
from tests.extract.tiny import LAYERS, SIZES, extract_here, records, write_config, write_jsonl
from tests.reference.cache import read_shard

HIDDEN_SIZE, ROW_TOKENS = 128, 64


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A target whose width the codecs take, data, and a config."""
    make_random_target(tmp_path / "target", TargetShape(**SIZES | {"hidden_size": HIDDEN_SIZE}))
    write_jsonl(tmp_path / "data.jsonl", records())
    write_config(tmp_path)
    return tmp_path


def job_of(project: Path, codec: str, *overrides: str) -> Job:
    settings = [f"target.hidden_size={HIDDEN_SIZE}", f"cache.codec={codec}", "cache.shard_bytes=65536", *overrides]
    return Job.load(project / "config.toml", settings, project / "cache")


def read_states(cache: Path, name: str) -> tuple[np.ndarray, Encoded]:
    """Document ids [R, T] of all rows, and what is stored in one array and its scales."""
    manifest = Manifest.read(cache)
    codec = CODECS[manifest.cache.codec]
    shards = [read_shard(cache, shard) for shard in range(manifest.plan.num_shards)]

    def joined(array: str, dtype: np.dtype, *width: int) -> np.ndarray:
        return np.concatenate([np.frombuffer(shard[array], dtype).reshape(-1, ROW_TOKENS, *width) for shard in shards])

    codes = joined(name, codec.code_dtype, codec.code_width(HIDDEN_SIZE))
    scales = joined(f"scales/{name.split('/')[-1]}", np.dtype("<u2"), codec.scale_width(HIDDEN_SIZE))
    return joined("document_ids", np.dtype("<i4")), Encoded(codes, scales)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_cache_holds_the_encoded_states(project: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(project, codec, "cache.final_hidden=true")
    extract_here(job, monkeypatch)
    manifest = Manifest.read(job.directory)
    assert [fault for part in verify(job.directory, manifest) for fault in part.faults] == []
    model = AutoModelForCausalLM.from_pretrained(project / "target", dtype=torch.float32).model
    documents, _ = read_states(job.directory, "final_hidden")
    ids = np.concatenate(
        [
            np.frombuffer(read_shard(job.directory, s)["input_ids"], "<i4").reshape(-1, ROW_TOKENS)
            for s in range(manifest.plan.num_shards)
        ]
    )
    with torch.inference_mode():
        outputs = [
            model(torch.tensor(ids[documents == d][None].astype(np.int64)), output_hidden_states=True).hidden_states
            for d in range(3)
        ]
    for name, index in [*((f"hidden/{layer}", layer + 1) for layer in LAYERS), ("final_hidden", -1)]:
        documents, stored = read_states(job.directory, name)
        decoded = CODECS[codec].decode(stored)
        steps = np.linalg.norm(np.repeat(decode_bf16(stored.scales), 64, axis=-1), axis=-1)
        for document, states in enumerate(outputs):
            own = documents == document
            # Every value is within half a step of its group, a few of int4's, which lacks the code 8, within one.
            error = np.linalg.norm(decoded[own] - states[index][0].numpy(), axis=-1)
            assert (error <= 0.55 * steps[own]).all()
        padding = documents == NO_DOCUMENT
        assert padding.any()
        assert not stored.codes[padding].any()
        assert not stored.scales[padding].any()


def test_quarantine_leaves_neither_codes_nor_scales(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (weights,) = (project / "target").glob("*.safetensors")
    tensors = load_file(weights)
    tokenizer = json.loads((project / "target" / "tokenizer.json").read_text())
    tensors["model.embed_tokens.weight"][tokenizer["model"]["vocab"]["T"]] = torch.inf
    save_file(tensors, weights, {"format": "pt"})
    job = job_of(project, "int8")
    extract_here(job, monkeypatch)
    manifest = Manifest.read(job.directory)
    found = [
        q for s in range(manifest.plan.num_shards) for q in ShardRecord.read(job.directory, manifest, s).quarantined
    ]
    assert [(q.layer, q.position) for q in found] == [(LAYERS[0], 0)]
    documents, stored = read_states(job.directory, "hidden/2")
    bad = documents == found[0].document
    assert bad.any()
    assert not stored.codes[bad].any()
    assert not stored.scales[bad].any()
    good = (documents != NO_DOCUMENT) & ~bad
    assert stored.scales[good].all()


@pytest.mark.parametrize("codec", CODECS)
def test_check_reckons_with_the_codec(codec: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[2] / "configs" / "qwen3-8b.toml"
    arguments = ["--config", str(config), "data.files=['none.jsonl']", f"cache.codec={codec}", "--check", "--json"]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["codec"] == codec
    assert figures["bytes_per_slot"] == 5 * bytes_per_token(CODECS[codec], 4096) + 14


def test_a_width_without_whole_groups_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(project / "config.toml"), "--cache", str(project / "cache"), "cache.codec=int8"]
    assert main(arguments) == 2
    assert "target.hidden_size is 32: cache.codec 'int8' needs a multiple of 64" in capsys.readouterr().err
    assert not (project / "cache").exists()
