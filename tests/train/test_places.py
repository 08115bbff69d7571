"""Live runs where the disk is not as one would like: read-only caches, links, odd names, no room, flipped bits."""

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.caches import worker_environment, write_cache, write_config
from train.config import RunConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A directory with tiny.toml and cache/."""
    directory = tmp_path_factory.mktemp("workspace")
    write_cache(directory / "cache", RunConfig.load(write_config(directory / "tiny.toml")))
    return directory


def train(*arguments: str | Path, limit_bytes: int | None = None, **options) -> subprocess.CompletedProcess[str]:
    """A worker, as torchrun starts it, with no more rights than its user has, and no file larger than `limit_bytes`."""

    def restrict() -> None:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root's way past permissions
            ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP, linux/prctl.h
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    command = [sys.executable, "-m", "train", *map(str, arguments)]
    environment = {name: value for name, value in worker_environment().items() if name != "HOME"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, preexec_fn=restrict, capture_output=True, text=True, **options)


def test_a_read_only_cache_behind_links_and_odd_names_from_elsewhere_without_a_home(workspace, tmp_path):
    cache = Path(shutil.copytree(workspace / "cache", tmp_path / "nur lesen ü"))
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "cache").symlink_to(cache.name)
    (tmp_path / "läuft 漢").mkdir()
    (tmp_path / "run").symlink_to("läuft 漢")
    shutil.copy(workspace / "tiny.toml", tmp_path / "my config.toml")
    names = ("--config", "my config.toml", "--cache", "cache", "--run", "run", "train.compile_cache=kept")
    ended = train(*names, "train.max_steps=1", cwd=tmp_path)
    for path in cache.rglob("*"):  # so that pytest can remove it
        path.chmod(0o755)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "läuft 漢/checkpoints/latest/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("limit_bytes", "what"),
    [
        (1000, "config.json could not be written: File too large"),
        (3000, "metrics.jsonl could not be written: File too large"),
        (6000, "checkpoints/step-16 could not be written"),
    ],
)
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(workspace, tmp_path, limit_bytes, what):
    """A limit on the size of files stands for the disk: either refuses a write in the middle of a file."""
    paths = ("--config", workspace / "tiny.toml", "--cache", workspace / "cache", "--run", tmp_path / "run")
    settings = ("train.epochs=8", "train.save_every=16", "train.eval_every=16")
    ended = train(*paths, *settings, limit_bytes=limit_bytes, cwd=ROOT)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {tmp_path / 'run'}")
    assert what in ended.stderr
    assert ended.stderr.count("\n") == 1
    ended = train(*paths, *settings, "--resume", cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 17))


def test_a_flipped_bit_of_a_hidden_state_is_named(workspace, tmp_path):
    """Row 5 is the second of shard 1; the codes of a row are 48·16·2 bytes and their crc32c."""
    cache = Path(shutil.copytree(workspace / "cache", tmp_path / "cache"))
    path = cache / "shard-00001/hidden/4/c/0/0/0"
    content = bytearray(path.read_bytes())
    content[1540 + 200] ^= 4
    path.write_bytes(content)
    ended = train("--config", workspace / "tiny.toml", "--cache", cache, "--run", tmp_path / "run", cwd=ROOT)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: shard-00001 hidden/4 row 5: crc32c is 0x")
    assert ended.stderr.endswith(f": run `python -m shards verify {cache}`\n")
    assert not os.path.lexists(tmp_path / "run")
