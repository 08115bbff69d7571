"""A checkpoint of a GPU's state: copied through page-locked memory, to the bit, while training goes on."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.test_captured_step import EXTREME_ROWS, VOCAB_SIZE, device, fill_rows, fresh_trainer, small_config
from train.checkpoint import STATE_FILE
from train.records import latest_checkpoint
from train.saver import Saver

__all__ = ["device"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_state_of_the_moment_is_written_though_training_goes_on(device: torch.device, tmp_path: Path) -> None:
    config = small_config()
    saver = Saver(tmp_path, config)
    saver.page_lock()
    assert all(tensor.is_pinned() for tensor in saver.state.values())
    trainer = fresh_trainer(config, device)
    fill_rows(trainer.rows, [EXTREME_ROWS["ordinary"]], VOCAB_SIZE, seed=1)
    trainer.step.micro_step(0)
    expected = {name: tensor.cpu() for name, tensor in trainer.flat.state().items()}
    os.kill(saver.writer, signal.SIGSTOP)
    saver.save(trainer, trainer.step.ranks, is_best=False, say=pytest.fail)
    for _ in range(3):
        trainer.step.micro_step(0)
    os.kill(saver.writer, signal.SIGCONT)
    saver.finish()
    saver.close()
    saved = load_file(latest_checkpoint(tmp_path) / STATE_FILE)
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name
    assert not torch.equal(trainer.flat.masters.cpu(), expected["masters"])
