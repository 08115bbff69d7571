"""Extraction on a real GPU: documents are as isolated there as on the CPU, and the command makes the same cache."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.random_target import make_random_target
from extract.encode import encode
from extract.job import Job
from extract.target import Target, read_architecture
from shards.codec import decode_bf16
from shards.manifest import Manifest
from shards.reader import CacheReader
from shards.schema import NO_DOCUMENT, PLAN_DIRECTORY, PlanArrays
from tests.extract.tiny import LAYERS, ROW_TOKENS, SHAPES, extract_here, read_all, write_project

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def extract_on_gpu(config: Path, cache: Path, *overrides: str) -> None:
    command = [sys.executable, "-m", "extract", "--config", str(config), "--cache", str(cache), *overrides]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2**-8), ("bfloat16", 0.05)])
def test_a_gpu_stores_what_a_cpu_stores(
    tmp_path: Path, dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 to a rounding of the codes (2^-8 of a value); in bf16 to what five layers of rounding do."""
    config = write_project(tmp_path)
    extract_here(Job.load(config, directory=tmp_path / "cpu"), monkeypatch)
    extract_on_gpu(config, tmp_path / "gpu", f"target.dtype={dtype}", "extract.gpus=[0]")
    expected, found = read_all(tmp_path / "cpu"), read_all(tmp_path / "gpu")
    used = expected["document_ids"] != NO_DOCUMENT
    assert np.array_equal(expected["document_ids"], found["document_ids"])
    for layer in LAYERS:
        values, truth = (decode_bf16(arrays[f"hidden/{layer}"][used]) for arrays in (found, expected))
        errors = np.linalg.norm(values - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
        assert errors.max() < tolerance
        assert not found[f"hidden/{layer}"][~used].any()


def states_of(target: Target, lengths: list[int], ids: list[list[int]]) -> dict[int, torch.Tensor]:
    """Of one row of documents with these lengths and tokens; padding to ROW_TOKENS."""
    padding = ROW_TOKENS - sum(lengths)
    row = torch.tensor([*itertools.chain.from_iterable(ids), *[0] * padding])[None]
    positions = torch.cat([torch.arange(length) for length in (*lengths, padding)])[None]
    documents = torch.tensor([*(d for d, length in enumerate(lengths) for _ in range(length)), *[-1] * padding])[None]
    return target.run(row, positions, documents)


@pytest.mark.parametrize("shape", ["qwen3", "qwen3, sliding", "llama, tied"])
def test_attention_by_document_is_that_of_documents_alone(tmp_path: Path, shape: str) -> None:
    """To the rounding of bf16, against an fp32 target on the CPU; and what stands beside a document changes no bit."""
    job = Job.load(write_project(tmp_path, SHAPES[shape]), ["target.dtype=bfloat16"], tmp_path / "cache")
    exact = Job.load(tmp_path / "config.toml", (), tmp_path / "cache")
    target = Target.load(read_architecture(job.target, job.cache), job.cache, torch.device("cuda", 0))
    assert target.attends_by_document
    truth = Target.load(read_architecture(exact.target, exact.cache), exact.cache, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 20, 30]
    ids, others = ([torch.randint(4, 264, (n,), generator=generator).tolist() for n in lengths] for _ in range(2))
    packed = states_of(target, lengths, ids)
    beside_others = states_of(target, lengths, [others[0], ids[1], others[2]])
    start = 0
    for length, tokens in zip(lengths, ids, strict=True):
        alone = states_of(truth, [length], [tokens])
        for layer in LAYERS:
            found, expected = packed[layer][0, start : start + length].float().cpu(), alone[layer][0, :length]
            assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.05
        start += length
    for layer in LAYERS:
        assert torch.equal(packed[layer][0, 1:21], beside_others[layer][0, 1:21])


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_rows_in_flight_are_stored_as_if_one_after_the_other(tmp_path: Path, codec: str) -> None:
    """The command copies beside the next row's work; here each row is waited for, and read from the device itself."""
    config = write_project(tmp_path)
    overrides = ("target.dtype=bfloat16", f"cache.codec={codec}")
    if codec != "bf16":
        overrides += ("target.hidden_size=64", f"target.path={tmp_path}/wide")
        make_random_target(tmp_path / "wide", dataclasses.replace(SHAPES["qwen3"], hidden_size=64))
    extract_on_gpu(config, tmp_path / "cache", *overrides, "extract.gpus=[0]")
    job = Job.load(config, overrides, tmp_path / "cache")
    manifest, plan = Manifest.read(job.directory), PlanArrays.read(job.directory / PLAN_DIRECTORY)
    target = Target.load(read_architecture(job.target, job.cache), job.cache, torch.device("cuda", 0))
    with CacheReader(job.directory) as reader:
        for row in range(manifest.plan.num_rows):
            slots = plan.row_arrays(row, ROW_TOKENS)
            ids, positions, documents = (
                torch.from_numpy(values)[None] for values in (slots.input_ids, slots.position_ids, slots.document_ids)
            )
            states = target.run(ids, positions, documents)
            for layer in LAYERS:
                encoded = encode(codec, states[layer][0])
                used = slots.document_ids != NO_DOCUMENT
                stored = reader.read_arrays(row, [f"hidden/{layer}"])[f"hidden/{layer}"]
                assert np.array_equal(stored[used], encoded.codes.cpu().numpy()[used])
                assert not stored[~used].any()


def test_too_little_memory_is_one_sentence(tmp_path: Path) -> None:
    """This process holds nearly all of it: there is room for the driver, but not for rows of this length."""
    config = write_project(tmp_path)
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    overrides = ["cache.row_tokens=65536", "target.dtype=float32", "extract.gpus=[0]"]
    command = [sys.executable, "-m", "extract", "--config", str(config), "--cache", str(tmp_path / "cache"), *overrides]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1, process.stdout + process.stderr
    assert process.stderr.startswith("error: worker 0 failed: ")
    assert "has too little memory: of " in process.stderr
    assert process.stderr.count("\n") == 1
    assert held.numel()


def test_the_bytes_do_not_depend_on_who_makes_them(tmp_path: Path) -> None:
    config = write_project(tmp_path)
    for cache in ("one", "two"):
        extract_on_gpu(config, tmp_path / cache)
    first, second = read_all(tmp_path / "one"), read_all(tmp_path / "two")
    assert all(np.array_equal(values, second[name]) for name, values in first.items())
