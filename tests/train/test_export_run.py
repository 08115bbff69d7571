"""`python -m train export` on a real run: the files, the card, and what is refused."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.train.caches import write_cache, write_config
from tests.train.test_run import finish, latest, start_worker
from train.__main__ import main
from train.config import RunConfig
from train.published import DraftCheckpoint

WIDE = ("target.hidden_size=64", "cache.codec=int8")  # rotated, so that masters are not what is exported


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints at 4 and 6, and what `make evaluate` leaves."""
    directory = tmp_path_factory.mktemp("exported")
    write_cache(directory / "cache", RunConfig.load(write_config(directory / "tiny.toml"), WIDE))
    finish(start_worker(directory, directory / "run", *WIDE, "train.max_steps=6"))
    live = {"acceptance_length_macro": 2.345, "prompts": 7, "by_source": {"code": 3.25, "empty": None}}
    (directory / "run/speculate.json").write_text(json.dumps(live))
    return directory / "run"


def export(*arguments: object) -> int:
    with patch.object(sys, "argv", ["train", "export", *map(str, arguments)]), patch.dict(os.environ):
        return main()


def test_bf16_is_the_checkpoint_without_its_state(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (latest(run) / name).read_bytes()


def test_fp32_is_the_masters_in_the_targets_basis(run: Path, tmp_path: Path) -> None:
    assert export(run / "checkpoints/step-4", tmp_path / "out", "--dtype", "fp32") == 0
    exact, rounded = (load_file(d / "model.safetensors") for d in (tmp_path / "out", run / "checkpoints/step-4"))
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), rounded[name]), name
    assert any(not torch.equal(tensor, rounded[name].float()) for name, tensor in exact.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"
    DraftCheckpoint.read(tmp_path / "out").load_drafter(torch.device("cpu"), torch.float32)


def test_the_card_says_what_it_is(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    evaluated = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for said in (
        "# DFlash drafter for nowhere",
        "Licence: not chosen yet.",
        "- name: nowhere",
        "- layers read: [1, 4]",
        "- files: nowhere.jsonl",
        "- stored as: int8",
        "- steps: 6, 1,728 token slots",  # 6 rows of 48 a step
        "- begun with: random weights",
        f"- held-out documents, step 6: {evaluated['heldout_acceptance_length']:.3f}",
        "- live, 7 prompts: 2.345",
        "- live, source code: 3.250",
        "- torch: 2.",
        '"train.lr": 0.01',
    ):
        assert said in card, said
    assert str(run) not in card
    assert "nowhere.jsonl" not in card.partition("## Configuration")[2]


REFUSED = {
    "no run": (lambda run, out: (out / "none", out / "x"), "is no run with a checkpoint"),
    "taken": (lambda run, out: (run, out), "is there already: name a directory to make"),
    "no parent": (lambda run, out: (run, out / "no/x"), "is no directory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_exported_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    paths, said = REFUSED[name]
    assert export(*paths(run, tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-6"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.mkdir()
    os.symlink(latest(run) / "state", checkpoint / "state")
    (checkpoint / "config.json").write_text((latest(run) / "config.json").read_text())
    (checkpoint / "model.safetensors").write_bytes((latest(run) / "model.safetensors").read_bytes()[:-1])
    assert export(checkpoint, tmp_path / "out") == 2
    assert "model.safetensors cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
