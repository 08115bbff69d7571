"""Live runs of `python -m train` on one GPU and on two: they end, resume to the same bits, and agree."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.test_run import (
    NUM_STEPS,
    assert_bitwise_equal,
    children,
    finish,
    latest,
    read_metrics,
    start_launcher,
    watch,
    workspace,
)

__all__ = ["workspace"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SETTINGS = ("drafter.head_dim=16", "train.rows_per_micro_step=3")  # the kernels' smallest head; two micro-steps on one
ONE, TWO = "train.gpus=[0]", "train.gpus=[0,1]"


@pytest.fixture(scope="module")
def on_one(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "one"
    finish(start_launcher(workspace, run, *SETTINGS, ONE))
    return run


def test_a_run_ends_with_its_checkpoint(on_one: Path) -> None:
    lines = read_metrics(on_one)
    assert lines[-1]["step"] == NUM_STEPS
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert latest(on_one).name == f"step-{NUM_STEPS}"


def test_a_stopped_run_resumes_to_the_same_bits(workspace: Path, on_one: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = start_launcher(workspace, run, *SETTINGS, ONE)
    watch(launcher)
    launcher.send_signal(signal.SIGTERM)
    finish(launcher, code=1)
    assert read_metrics(run)[-1]["step"] < NUM_STEPS
    finish(start_launcher(workspace, run, *SETTINGS, ONE, "--resume"))
    assert_bitwise_equal(run, on_one)


@needs_two
def test_two_gpus_train_what_one_does(workspace: Path, on_one: Path, tmp_path: Path) -> None:
    """Sums in another order change the last bits; Adam at a learning rate of 1e-2 makes up to 2 % of that in time."""
    finish(start_launcher(workspace, tmp_path / "two", *SETTINGS, TWO))
    for line, other in zip(read_metrics(tmp_path / "two"), read_metrics(on_one), strict=True):
        tolerance = 1e-5 if line["step"] <= 5 else 2e-2
        assert line["loss"] == pytest.approx(other["loss"], rel=tolerance), f"step {line['step']}"
    masters, others = (load_file(latest(r) / "state/state.safetensors")["masters"] for r in (tmp_path / "two", on_one))
    assert torch.linalg.vector_norm(masters - others) < 0.02 * torch.linalg.vector_norm(others)


@needs_two
def test_the_death_of_one_rank_ends_the_job(workspace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = start_launcher(workspace, run, *SETTINGS, TWO)
    watch(launcher)
    os.kill(children(launcher)[0], signal.SIGKILL)
    _, errors = finish(launcher, code=1)  # which waits until nobody holds its pipes: all ranks are gone
    assert errors.splitlines()[-1].startswith("error: rank 0 was ended by SIGKILL")
    assert latest(run).is_dir()
