"""Saving beside training: what is written is the step's state to the bit, however slow, failing or dead the writer."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shards.errors import RunError
from tests.train.caches import write_config
from tests.train.test_checkpoint import CPU, new_trainer, save_checkpoint
from train.config import RunConfig
from train.records import latest_checkpoint
from train.saver import Saver


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig.load(write_config(tmp_path / "tiny.toml"), ["train.precision=bf16"])


@pytest.fixture
def saver(config, tmp_path) -> Iterator[Saver]:
    saver = Saver(tmp_path / "run", config)
    yield saver
    saver.connection.close()
    os.kill(saver.writer, signal.SIGCONT)


def say_nothing(text: str) -> None:
    pytest.fail(text)


def test_the_state_of_the_moment_is_written_though_training_goes_on(saver, config, tmp_path):
    trainer = new_trainer(config, step=8)
    expected = save_checkpoint(tmp_path / "other", config, trainer)
    os.kill(saver.writer, signal.SIGSTOP)
    saver.save(trainer, CPU, is_best=False, say=say_nothing)
    for tensor in (*trainer.flat.state().values(), *trainer.step.counters):
        tensor.add_(1)
    assert latest_checkpoint(tmp_path / "run") is None
    os.kill(saver.writer, signal.SIGCONT)
    saver.finish()
    saved = latest_checkpoint(tmp_path / "run")
    for path in expected.rglob("*.*"):
        assert (saved / path.relative_to(expected)).read_bytes() == path.read_bytes(), path.name


def test_a_save_waits_for_the_one_before_and_says_so(saver, config, tmp_path):
    said = []

    def go_on(text: str) -> None:
        said.append(text)
        os.kill(saver.writer, signal.SIGCONT)

    os.kill(saver.writer, signal.SIGSTOP)
    saver.save(new_trainer(config, step=8), CPU, is_best=True, say=say_nothing)
    saver.save(new_trainer(config, step=9), CPU, is_best=False, say=go_on)
    assert said == [
        "step 9 waits to be saved until step 8 is, which began 0 s ago: the disk is slower than checkpoints come"
    ]
    saver.finish()
    checkpoints = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "latest", "step-8", "step-9"]
    assert (checkpoints / "best").readlink() == Path("step-8")
    assert saver.take_stall() > 0
    assert saver.take_stall() == 0


def test_what_the_disk_refuses_is_raised_with_the_next_look(saver, config, tmp_path):
    (tmp_path / "run").write_text("in the way")
    saver.save(new_trainer(config, step=8), CPU, is_best=False, say=say_nothing)
    while not saver.connection.poll():
        os.sched_yield()
    with pytest.raises(RunError, match=r"step-8 could not be written: .*; the checkpoints before it are intact"):
        saver.check()


def test_a_writer_that_is_killed_is_told(saver, config, tmp_path):
    saver.save(new_trainer(config, step=8), CPU, is_best=False, say=say_nothing)
    saver.finish()
    os.kill(saver.writer, signal.SIGSTOP)
    saver.save(new_trainer(config, step=9), CPU, is_best=False, say=say_nothing)
    os.kill(saver.writer, signal.SIGKILL)
    with pytest.raises(RunError, match=r"the process that writes the checkpoints of .* was ended \(SIGKILL\)"):
        saver.finish()
    saver.writer = os.getpid()  # for the fixture
    assert latest_checkpoint(tmp_path / "run").name == "step-8"


def test_a_save_is_due_by_steps_or_by_the_clock(config, tmp_path):
    config = replace(config, train=replace(config.train, save_every=4, save_seconds=1000))
    saver = Saver(tmp_path / "run", config)
    assert [step for step in range(1, 9) if saver.is_due(step)] == [4, 8]
    saver.last_begun -= 1000
    assert all(saver.is_due(step) for step in range(1, 9))
    saver.save(new_trainer(config, step=3), CPU, is_best=False, say=say_nothing)
    assert not saver.is_due(3)
    saver.finish()
    saver.close()
