"""Extraction on a real GPU: documents are as isolated there as on the CPU, and the command makes the same cache."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from extract.job import Job
from shards.codec import decode_bf16
from shards.schema import NO_DOCUMENT
from tests.extract.tiny import LAYERS, extract_here, read_all, write_project

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


def test_the_bytes_do_not_depend_on_who_makes_them(tmp_path: Path) -> None:
    config = write_project(tmp_path)
    for cache in ("one", "two"):
        extract_on_gpu(config, tmp_path / cache)
    first, second = read_all(tmp_path / "one"), read_all(tmp_path / "two")
    assert all(np.array_equal(values, second[name]) for name, values in first.items())
