"""Text to exported drafter with each lossy codec: extract, train in a worker of its own, export.

The exported drafter gets the target's own features, the trained one what was stored of them.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.random_target import TargetShape, make_random_target
from extract.job import Job
from shards.codec import CODECS, Encoded
from tests.extract.tiny import LAYERS, ROW_TOKENS, SIZES, extract_here, records, write_config, write_jsonl
from tests.reference.cache import read_shard
from tests.train.caches import worker_environment

ROOT = Path(__file__).parents[1]
HIDDEN_SIZE = 64
DRAFTER = f"""
[drafter]
num_layers = 1
block_size = 4
target_layer_ids = [{LAYERS[2]}, {LAYERS[0]}]
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 32
rope_theta = 10_000.0

[train]
num_anchors = 16
rows_per_step = 2
epochs = 4
lr = 3e-3
gamma = 3.0
precision = "fp32"
log_every = 4
save_every = 8
eval_every = 8
"""


def write_project(directory: Path, codec: str) -> Path:
    make_random_target(directory / "target", TargetShape(**SIZES | {"hidden_size": HIDDEN_SIZE}))
    write_jsonl(directory / "data.jsonl", records())
    config = write_config(directory, f'codec = "{codec}"', DRAFTER)
    config.write_text(config.read_text().replace("hidden_size = 32", f"hidden_size = {HIDDEN_SIZE}"))
    return config


def run_training(directory: Path, *overrides: str, code: int = 0) -> str:
    paths = ["--config", directory / "config.toml", "--cache", directory / "cache", "--run", directory / "run"]
    done = subprocess.run(
        [sys.executable, "-m", "train", *map(str, paths), *overrides],
        cwd=ROOT,
        env=worker_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def stored_features(cache: Path, codec: str, *, in_target_basis: bool) -> torch.Tensor:
    """[tokens, K·H] of the first shard, layers in the drafter's order."""
    shard, kind = read_shard(cache, 0), CODECS[codec]
    parts = []
    for layer in (LAYERS[2], LAYERS[0]):
        codes = np.frombuffer(shard[f"hidden/{layer}"], kind.code_dtype)
        scales = np.frombuffer(shard[f"scales/{layer}"], "<u2")
        encoded = Encoded(codes.reshape(-1, kind.code_width(HIDDEN_SIZE)), scales.reshape(-1, HIDDEN_SIZE // 64))
        parts.append(kind.decode(encoded) if in_target_basis else kind.decode_stored(encoded))
    return torch.from_numpy(np.concatenate(parts, axis=1))


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_text_to_exported_drafter(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.load(write_project(tmp_path, codec), directory=tmp_path / "cache")
    extract_here(job, monkeypatch)
    assert "held-out τ" in run_training(tmp_path)
    checkpoint = (tmp_path / "run/checkpoints/latest").resolve()
    exported = load_file(checkpoint / "model.safetensors")["fc.weight"].float()
    trained = load_file(checkpoint / "state/state.safetensors")["masters"]
    trained = trained[: exported.numel()].view_as(exported)  # fc comes first
    assert len(stored_features(tmp_path / "cache", codec, in_target_basis=True)) >= ROW_TOKENS * 2
    by_exported = stored_features(tmp_path / "cache", codec, in_target_basis=True) @ exported.T
    by_trained = stored_features(tmp_path / "cache", codec, in_target_basis=False) @ trained.T
    # The exported weights are bf16: each is off by up to 2⁻⁹ of itself.
    error = torch.linalg.vector_norm(by_exported - by_trained) / torch.linalg.vector_norm(by_trained)
    assert error < 2**-8

    # A run that begins with it and learns nothing exports it again.
    begun = run_training(tmp_path, f"--init-from={tmp_path / 'run'}", "train.lr=1e-30", "--run", str(tmp_path / "next"))
    assert "held-out τ" in begun
    exported_again = load_file((tmp_path / "next/checkpoints/latest").resolve() / "model.safetensors")["fc.weight"]
    torch.testing.assert_close(exported_again.float(), exported, rtol=2**-8, atol=2**-18)
    assert json.loads((tmp_path / "next/config.json").read_text())["train.init_from"] == str(tmp_path / "run")
    assert json.loads((tmp_path / "next/start.json").read_text())["directory"] == str(checkpoint)

    other = "bf16" if codec == "int8" else "int8"
    refusal = run_training(tmp_path, f"cache.codec={other}", "--resume", code=2)
    assert f"was made with cache.codec = '{codec}', the config says '{other}'" in refusal
