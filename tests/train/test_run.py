"""Live runs of `python -m train` on tiny caches: real processes, stopped and continued, on one to three ranks.

A worker is started the way torchrun starts it, which spares the launcher's start-up. The pipe that a run prints to is
small and read unbuffered, so a run can't get to its end before a test that watches it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.train.caches import worker_environment, write_cache, write_config
from train.config import RunConfig
from train.status import read_status

ROOT = Path(__file__).parents[2]
PIPE_BYTES = 4096  # the smallest there is: at most 54 lines of progress, of 75 bytes or more
# Where a test that interferes does so: after steps with evaluation and checkpoint, of which the first is on the disk,
# since the second waits for it.
WATCHED_STEP = 9
NUM_STEPS = 64  # more than can be done and printed before the line of that step has been read
SETTINGS = ("train.epochs=32", "train.save_every=4", "train.eval_every=4", "train.rows_per_micro_step=6")
TIMINGS = ("tokens_per_second", "data_wait_fraction", "save_stall_seconds")
# Native threads that a trainer on the CPU may have, by name, and how many. OpenMP's are switched off here.
NATIVE_THREADS = {"python": 2}  # itself and faulthandler's watchdog
NATIVE_THREADS_OF_A_RANK = {"python": 2, "gloo_tcp_loop": 1, "pt_gloo_runloop": 2}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A directory with tiny.toml and cache/."""
    directory = tmp_path_factory.mktemp("workspace")
    write_cache(directory / "cache", RunConfig.load(write_config(directory / "tiny.toml")))
    return directory


@pytest.fixture(scope="module")
def launched(workspace, tmp_path_factory) -> tuple[Path, str]:
    """A whole run through the launcher, and what it printed."""
    run = tmp_path_factory.mktemp("runs") / "launched"
    output, _ = finish(start_launcher(workspace, run))
    return run, output


@pytest.fixture
def reporting(tmp_path) -> dict[str, str]:
    """Environment that makes Python print its threads when it gets SIGUSR1; the programs know nothing of it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import json, os, signal, threading\n"
        "def report(*_):\n"
        "    native = [open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')]\n"
        "    python = [thread.name for thread in threading.enumerate()]\n"
        "    print('\\nTHREADS', json.dumps({'python': python, 'native': native}), flush=True)\n"
        "signal.signal(signal.SIGUSR1, report)\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def start_launcher(
    workspace: Path, run: Path, *arguments: str, program: str = "train", **environment: str
) -> subprocess.Popen:
    return _start(workspace, run, arguments, {**os.environ, "OMP_NUM_THREADS": "1", **environment}, program)


def start_worker(workspace: Path, run: Path, *arguments: str) -> subprocess.Popen:
    return _start(workspace, run, arguments, worker_environment())


def start_ranks(
    workspace: Path, run: Path, world_size: int, *arguments: str, **environment: str
) -> list[subprocess.Popen]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        _start(
            workspace,
            run,
            arguments,
            worker_environment(rank=rank, world_size=world_size, store_port=store.port) | environment,
        )
        for rank in range(world_size)
    ]
    ranks[0].store = store  # lives as long as they do
    return ranks


def _start(
    workspace: Path, run: Path, arguments: Sequence[str], environment: dict[str, str], program: str = "train"
) -> subprocess.Popen:
    paths = ["--config", workspace / "tiny.toml", "--cache", workspace / "cache", "--run", run]
    return subprocess.Popen(
        [sys.executable, "-m", *program.split(), *map(str, paths), *SETTINGS, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pipesize=PIPE_BYTES,
    )


def finish(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    """Wait for the end; returns what was printed since, and stderr."""
    output, errors = (stream.decode() for stream in process.communicate())
    assert process.returncode == code, f"exit code {process.returncode}\n{output}\n{errors}"
    return output, errors


def read_until(process: subprocess.Popen, beginning: str) -> str:
    """Read the output up to the line that begins so, and return the rest of that line."""
    while line := process.stdout.readline().decode():
        if line.startswith(beginning):
            return line.removeprefix(beginning)
    pytest.fail(f"the run ended before it printed {beginning!r}: {process.stderr.read().decode()}")


def watch(process: subprocess.Popen) -> None:
    """Return when the run has taken a few steps, and before it can have taken all."""
    read_until(process, f"step {WATCHED_STEP}/")


def children(process: subprocess.Popen) -> list[int]:
    """The process ids of its children; a launcher's are its workers, in the order of their ranks."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sorted(int(process_id) for task in tasks for process_id in (task / "children").read_text().split())


def latest(run: Path) -> Path:
    return (run / "checkpoints/latest").resolve()


def read_metrics(run: Path) -> list[dict]:
    """Without what differs between any two runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def assert_bitwise_equal(run: Path, other: Path) -> None:
    for name in ("model.safetensors", "config.json", "state/state.safetensors", "state/counters.json"):
        assert (latest(run) / name).read_bytes() == (latest(other) / name).read_bytes(), name
    assert read_metrics(run) == read_metrics(other)
    assert (run / "checkpoints/best").readlink() == (other / "checkpoints/best").readlink()


def assert_threads(report: str, allowed_native: dict[str, int]) -> None:
    threads = json.loads(report)
    assert threads["python"] == ["MainThread"]
    for name in set(threads["native"]):
        count = threads["native"].count(name)
        assert count <= allowed_native.get(name, 0), f"{count} native threads are named {name}: {threads['native']}"


def test_a_run_leaves_what_it_promises(launched):
    run, output = launched
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert [line["epoch"] for line in lines] == [step // 2 for step in range(NUM_STEPS)]
    every_line = {"step", "epoch", "loss", "acceptance_length", "accuracy_per_slot", "tokens_per_second"}
    every_line |= {"data_wait_fraction", "learning_rate", "grad_norm", "skipped_steps", "save_stall_seconds"}
    assert all(every_line <= line.keys() for line in lines)
    assert all(len(line["accuracy_per_slot"]) == 3 for line in lines)
    readme = (ROOT / "README.md").read_text()
    documented = {key.removesuffix("_half_width") for line in lines for key in line}
    assert [key for key in documented if f"`{key}`" not in readme] == []
    evaluated = [line["step"] for line in lines if "heldout_acceptance_length" in line]
    assert evaluated == list(range(4, NUM_STEPS + 1, 4))
    assert {"heldout_loss", "heldout_accuracy_per_slot"} <= lines[-1].keys()
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]

    assert (run / "checkpoints/latest").is_symlink()
    best = max(lines, key=lambda line: line.get("heldout_acceptance_length", 0))["step"]
    assert (run / "checkpoints/best").resolve().name == f"step-{best}"
    kept = {"best", "latest", "step-60", "step-64", f"step-{best}"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == kept
    assert json.loads((run / "config.json").read_text())["drafter.num_layers"] == 2
    for said in (str(run), f"step {NUM_STEPS}/{NUM_STEPS}", "loss", "held-out τ", "without context"):
        assert said in output


def test_a_finished_run_says_so_and_is_left_alone(workspace, launched):
    run, _ = launched
    before = sorted((path, path.lstat().st_mtime_ns) for path in run.rglob("*"))
    output, _ = finish(start_launcher(workspace, run, "--resume"))
    assert "nothing to train" in output
    assert read_status(run)["state"] == "finished"
    assert before == sorted((path, path.lstat().st_mtime_ns) for path in run.rglob("*"))


def test_a_run_stopped_by_sigterm_to_the_launcher_resumes_to_the_same_bits(workspace, launched, tmp_path):
    run = tmp_path / "run"
    launcher = start_launcher(workspace, run)
    watch(launcher)
    status = read_status(run)
    assert (status["state"], status["num_steps"]) == ("training", NUM_STEPS)
    assert status["held_by"].startswith(f"process {launcher.pid} on ")
    launcher.send_signal(signal.SIGTERM)
    _, errors = finish(launcher, code=1)
    assert read_status(run)["state"] == "stopped"
    stopped = read_metrics(run)[-1]["step"]
    assert WATCHED_STEP <= stopped < NUM_STEPS
    assert errors == (
        f"error: interrupted at step {stopped} of {NUM_STEPS}, saved in {run}: `make train` or --resume continues\n"
    )
    assert latest(run).name == f"step-{stopped}"
    finish(start_worker(workspace, run, "--resume"))
    assert_bitwise_equal(run, launched[0])


def test_a_run_killed_while_its_checkpoint_is_written_resumes_to_the_same_bits(workspace, launched, tmp_path):
    """The writer is halted once the run has a checkpoint, so a later one is in writing when the run waits for it."""
    run = tmp_path / "run"
    worker = start_worker(workspace, run)
    watch(worker)
    [writer] = children(worker)
    os.kill(writer, signal.SIGSTOP)
    while "waits to be saved" not in worker.stdout.readline().decode():
        pass
    worker.kill()
    worker.communicate()  # to the end of its output, which the writer holds, too: it is gone
    assert latest(run).name in {f"step-{step}" for step in range(4, NUM_STEPS, 4)}
    # What a kill at the worst of times leaves: a line that is cut short, a checkpoint without its name.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 9')
    shutil.copytree(latest(run), run / "checkpoints/.step-64")
    finish(start_worker(workspace, run, "--resume"))
    assert_bitwise_equal(run, launched[0])


def test_ranks_stop_together_have_one_thread_each_and_resume_on_another_number(
    workspace, launched, reporting, tmp_path
):
    """Six rows a step: on two ranks in three micro-steps, then on three ranks in two, as on one rank in one.

    Sums in another order change the last bits; Adam at a learning rate of 1e-2 makes them 1e-3 of the loss in time.
    """
    run, row_by_row = tmp_path / "run", "train.rows_per_micro_step=1"
    ranks = start_ranks(workspace, run, 2, row_by_row, **reporting)
    watch(ranks[0])
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)
        assert_threads(read_until(rank, "THREADS "), NATIVE_THREADS_OF_A_RANK)
    ranks[1].send_signal(signal.SIGTERM)  # only one of them is told
    for rank in ranks:
        _, errors = finish(rank, code=1)
        assert f"interrupted at step {read_metrics(run)[-1]['step']} of {NUM_STEPS}, saved in {run}" in errors
    for rank in start_ranks(workspace, run, 3, row_by_row, "--resume"):
        finish(rank)

    lines, expected = read_metrics(run), read_metrics(launched[0])
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        tolerance = 1e-5 if line["step"] <= 5 else 2e-2
        assert line["loss"] == pytest.approx(other["loss"], rel=tolerance), f"step {line['step']}"
        assert line["learning_rate"] == other["learning_rate"]
    masters, others = (load_file(latest(r) / "state/state.safetensors")["masters"] for r in (run, launched[0]))
    assert torch.linalg.vector_norm(masters - others) < 0.02 * torch.linalg.vector_norm(others)


def test_a_launched_worker_has_one_thread_and_its_death_ends_the_job(workspace, reporting, tmp_path):
    """The threads are those after steps with their backward, an evaluation and checkpoints."""
    launcher = start_launcher(workspace, tmp_path / "run", **reporting)
    watch(launcher)
    [worker] = children(launcher)
    os.kill(worker, signal.SIGUSR1)
    assert_threads(read_until(launcher, "THREADS "), NATIVE_THREADS)
    os.kill(worker, signal.SIGKILL)
    _, errors = finish(launcher, code=1)
    assert errors.startswith("error: rank 0 was ended by SIGKILL")


def test_a_worker_that_no_launcher_checked_refuses_by_itself(workspace, launched, tmp_path):
    """As under torchrun: a run directory in use without --resume, and a cache that was made with another config."""
    before = read_metrics(launched[0])
    _, errors = finish(start_worker(workspace, launched[0]), code=2)
    assert "is not empty: --resume continues" in errors
    assert read_metrics(launched[0]) == before
    _, errors = finish(start_worker(workspace, tmp_path / "run", "data.holdout_fraction=0.5"), code=2)
    assert "was made with data.holdout_fraction = 0.02, the config says 0.5" in errors
    assert not (tmp_path / "run").exists()


def test_losses_that_are_not_finite_end_the_run(tmp_path):
    write_cache(tmp_path / "cache", RunConfig.load(write_config(tmp_path / "tiny.toml")), head_value=float("nan"))
    run = tmp_path / "run"
    _, errors = finish(start_worker(tmp_path, run, "train.max_bad_steps=3"), code=1)
    assert errors.startswith(
        "error: 3 steps in a row up to step 3 had a loss or gradient that is not finite, step 3 with rows "
    )
    assert errors.count("\n") == 1
    lines = read_metrics(run)
    assert [line["skipped_steps"] for line in lines] == [1, 2]
    assert [line["bad_step"] for line in lines] == [1, 2]
    assert sorted(lines[0]["bad_rows"] + lines[1]["bad_rows"]) == list(range(11))  # an epoch


def test_a_row_that_is_not_finite_is_named_whichever_rank_has_it(tmp_path):
    """Row by row on two ranks; in an epoch of two steps it comes once, and the other step trains."""
    write_cache(tmp_path / "cache", RunConfig.load(write_config(tmp_path / "tiny.toml")), bad_row=0)
    run = tmp_path / "run"
    ranks = start_ranks(
        tmp_path, run, 2, "train.rows_per_micro_step=1 train.epochs=2 train.log_every=2 drafter.init_std=1.0"
    )
    outputs = [finish(rank)[0] for rank in ranks]
    lines = read_metrics(run)
    assert [line["skipped_steps"] for line in lines] == [1, 2]
    assert [line["bad_rows"] for line in lines] == [[0], [0]]
    for line in lines:
        assert f"not finite: step {line['bad_step']}, row 0" in outputs[0]
        assert line["loss"] is not None
