"""Runs that are stopped, killed, doubled, or left alone by whoever read their output: nothing is lost, one sentence.

Real processes and signals; what they wait for is a line of output, a file, or a state of the kernel.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.schema import file_names
from tests.train.test_run import (
    NUM_STEPS,
    WATCHED_STEP,
    children,
    finish,
    latest,
    read_metrics,
    read_until,
    start_launcher,
    start_ranks,
    start_worker,
    watch,
    workspace,
)
from train.__main__ import INTERRUPTED
from train.lock import LOCK_FILE

__all__ = ["workspace"]  # a fixture

ROW_BY_ROW = "train.rows_per_micro_step=1"  # on two ranks, or three
# More steps than a test lasts, and nothing read off the device on the way.
ENDLESS = ("train.epochs=100000", "train.log_every=200000", "train.save_every=200000", "train.eval_every=200000")


def start_two_ranks(workspace: Path, run: Path, *arguments: str) -> subprocess.Popen:
    return start_launcher(workspace, run, ROW_BY_ROW, *arguments, program="tests.train.launch_two")


def wait_until(is_so: Callable[[], object]) -> None:
    while not is_so():
        os.sched_yield()


def has_mapped(process: subprocess.Popen, library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_between_two_log_intervals_stops_at_once_and_saves(workspace: Path, tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    launcher = start_two_ranks(workspace, run, *ENDLESS)
    read_until(launcher, "training on")
    launcher.send_signal(number)
    _, errors = finish(launcher, code=1)
    [line] = read_metrics(run)
    assert errors == (
        f"error: interrupted at step {line['step']} of 200000, saved in {run}: `make train` or --resume continues\n"
    )
    assert latest(run).name == f"step-{line['step']}"


def test_a_run_that_is_asked_twice_says_so_once(workspace: Path, tmp_path: Path) -> None:
    launcher = start_launcher(workspace, tmp_path / "run")
    watch(launcher)
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGTERM)
    _, errors = finish(launcher, code=1)
    assert errors.startswith("error: interrupted at step ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
def test_an_interrupt_while_the_launcher_starts_is_one_sentence(
    workspace: Path, tmp_path: Path, library: str, number: int
) -> None:
    launcher = start_launcher(workspace, tmp_path / "run")
    wait_until(lambda: has_mapped(launcher, library))
    launcher.send_signal(number)
    output, errors = finish(launcher, code=1)
    assert (output, errors) == ("", f"{INTERRUPTED}\n")
    assert not (tmp_path / "run").exists()


def test_an_interrupt_while_the_workers_start_is_one_sentence(workspace: Path, tmp_path: Path) -> None:
    launcher = start_two_ranks(workspace, tmp_path / "run")
    wait_until(lambda: len(children(launcher)) == 2)
    launcher.send_signal(signal.SIGTERM)
    output, errors = finish(launcher, code=1)
    assert (output, errors) == ("", f"{INTERRUPTED}\n")
    assert not (tmp_path / "run").exists()


def test_workers_whose_launcher_is_killed_save_and_end(workspace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = start_two_ranks(workspace, run)
    watch(launcher)
    launcher.kill()
    launcher.communicate()  # to the end of its output, which the workers hold: they are gone
    stopped = read_metrics(run)[-1]["step"]
    assert WATCHED_STEP <= stopped < NUM_STEPS
    assert latest(run).name == f"step-{stopped}"


def test_workers_whose_launcher_is_killed_before_they_train_end(workspace: Path, tmp_path: Path) -> None:
    launcher = start_two_ranks(workspace, tmp_path / "run")
    wait_until(lambda: len(children(launcher)) == 2)
    launcher.kill()
    launcher.communicate()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "was ended by SIGKILL, as the kernel does when memory runs out (`dmesg` tells)"),
        (signal.SIGSEGV, "crashed (SIGSEGV), where is said above"),
        (signal.SIGABRT, "was ended by SIGABRT"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_ends_the_job_and_is_told(
    workspace: Path, tmp_path: Path, rank: int, number: int, said: str
) -> None:
    run = tmp_path / "run"
    launcher = start_two_ranks(workspace, run)
    watch(launcher)
    os.kill(children(launcher)[rank], number)
    _, errors = finish(launcher, code=1)
    step = latest(run).name.removeprefix("step-")
    *trace, sentence = errors.splitlines()
    assert sentence == f"error: rank {rank} {said}: `make train` or --resume continues from step {step}"
    assert bool(trace) == (number != signal.SIGKILL)  # that of the crash
    assert not any(line.startswith("error:") for line in trace)


def test_a_rank_that_hangs_ends_the_job_and_every_stack_is_shown(workspace: Path, tmp_path: Path) -> None:
    """One rank is halted, so the other waits for it. When that one has ended, the launcher ends the halted one."""
    run = tmp_path / "run"
    launcher = start_two_ranks(workspace, run, "train.stall_seconds=2")
    watch(launcher)
    waiting, halted = children(launcher)
    os.kill(halted, signal.SIGSTOP)
    while not launcher.stderr.readline().startswith(b"Timeout"):
        pass
    wait_until(lambda: not os.path.exists(f"/proc/{waiting}/cwd"))  # it is gone, or a zombie
    os.kill(halted, signal.SIGCONT)
    _, errors = finish(launcher, code=1)
    *stacks, sentence = errors.splitlines()
    step = latest(run).name.removeprefix("step-")
    assert sentence.removeprefix("error: rank ")[2:] == (
        "made no step for train.stall_seconds, where it stood is said above: `make train` or --resume continues "
        f"from step {step}"
    )
    assert any("in sum_" in line or "in all_reduce" in line for line in stacks)


def test_a_rank_that_is_killed_before_anything_was_saved(workspace: Path, tmp_path: Path) -> None:
    launcher = start_two_ranks(workspace, tmp_path / "run", *ENDLESS)
    read_until(launcher, "training on")
    os.kill(children(launcher)[1], signal.SIGKILL)
    _, errors = finish(launcher, code=1)
    assert errors.startswith("error: rank 1 was ended by SIGKILL")
    assert errors.endswith(": nothing was saved yet, `make train` or --resume begins again\n")
    assert not (tmp_path / "run").exists()


def test_torchrun_is_a_launcher_too(workspace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = "torch.distributed.run --standalone --nproc-per-node=2 -m -- train"
    launcher = start_launcher(workspace, run, ROW_BY_ROW, program=torchrun)
    watch(launcher)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate()
    stopped = read_metrics(run)[-1]["step"]
    assert WATCHED_STEP <= stopped < NUM_STEPS
    assert latest(run).name == f"step-{stopped}"


def test_a_second_run_in_the_same_directory_is_refused(workspace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start_launcher(workspace, run)
    watch(first)
    for start, options in ((start_launcher, ()), (start_launcher, ("--resume",)), (start_worker, ("--resume",))):
        output, errors = finish(start(workspace, run, *options), code=2)
        assert output == ""
        assert errors.startswith(f"error: {run} is in use: process {first.pid} on {os.uname().nodename} is training")
        assert errors.count("\n") == 1
    finish(first)
    assert read_metrics(run)[-1]["step"] == NUM_STEPS
    assert (run / LOCK_FILE).is_file()


def test_a_directory_is_free_again_when_its_run_was_killed(workspace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in start_ranks(workspace, run, 2, ROW_BY_ROW, *ENDLESS):
        if rank.args and rank.stdout:
            rank.kill()
            rank.communicate()
    run.mkdir(exist_ok=True)
    (run / LOCK_FILE).write_text("process 1 on nowhere")  # and the directory is as good as empty
    finish(start_worker(workspace, run))


def test_a_damaged_cache_is_one_sentence_and_leaves_no_run(workspace: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(workspace, tmp_path / "copied"))
    for name in file_names(copied / "cache"):
        if "/hidden/" in name and not name.endswith(".json"):
            path = copied / "cache" / name
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    _, errors = finish(start_two_ranks(copied, tmp_path / "run"), code=1)
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1, errors
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_when_nobody_reads_its_output(workspace: Path, tmp_path: Path) -> None:
    """As when Ctrl-C in `make train | tee log` ends tee first."""
    run = tmp_path / "run"
    launcher = start_launcher(workspace, run)
    watch(launcher)
    launcher.stdout.close()
    wait_until(lambda: read_metrics(run)[-1]["step"] > WATCHED_STEP + 2)
    launcher.send_signal(signal.SIGINT)
    errors = launcher.stderr.read().decode()
    assert launcher.wait() == 1
    stopped = read_metrics(run)[-1]["step"]
    assert errors.startswith(f"error: interrupted at step {stopped} of ")
    assert errors.count("\n") == 1
    assert latest(run).name == f"step-{stopped}"
