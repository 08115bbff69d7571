"""Extractions as users run them, each in processes of its own: interrupted, killed, refused the disk, two at a time."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from extract.__main__ import main
from extract.job import Job
from extract.launch import _describe
from extract.lock import sole_extraction
from extract.prepare import prepare
from extract.sources import SEEN_FILE
from shards.manifest import COMPLETE_FILE, Manifest
from shards.schema import missing_shards
from tests.extract.tiny import (
    change_weight,
    extract_here,
    files_of,
    job_of,
    write_config,
    write_jsonl,
)

ROOT = Path(__file__).parents[2]
EXTRACT = [sys.executable, "-m", "extract"]
# Root, too, may then write only where the mode of a directory says so: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
WITHOUT_PRIVILEGES = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP, linux/prctl.h
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(directory: Path, *before: str) -> subprocess.Popen[str]:
    """A real extraction, in a process group of its own."""
    command = [*(before or EXTRACT), "--config", str(directory / "config.toml")]
    return subprocess.Popen(
        [*command, "--cache", str(directory / "cache")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    """Until it holds or the process has ended."""
    while process.poll() is None and not condition():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)


def wait_for_shards(process: subprocess.Popen[str], cache: Path, num_shards: int) -> None:
    wait_until(process, lambda: len(list(cache.glob("shard-*"))) >= num_shards)


def write_long_project(directory: Path, *, num_documents: int = 40) -> Path:
    """The project with as many shards of a row each, so that there is something left to interrupt."""
    write_jsonl(directory / "data.jsonl", [{"text": f"{i:04d}" * 16} for i in range(num_documents)])
    write_config(directory)
    config = directory / "config.toml"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "shard_bytes" not in line))
    config.write_text(config.read_text() + "\nshard_bytes = 1\n")
    return directory


def stopped(cache: Path) -> str:
    num_shards = len(list(cache.glob("shard-*")))
    return f"stopped: {num_shards} of 40 shards are kept in {cache}, the same command goes on\n"


def test_a_killed_extraction_is_continued_to_the_same_bytes(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First asked to stop, then all of it killed, then its launcher, then torchrun; at last completed by two workers.

    The output of the killed ends with their workers, so these ended early if shards are missing.
    """
    write_long_project(copy)
    cache = copy / "cache"
    asked = start(copy)
    wait_for_shards(asked, cache, 1)
    asked.send_signal(signal.SIGTERM)
    output, error = asked.communicate()
    assert (asked.returncode, error) == (1, stopped(cache)), output + error

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for kill, command in ((os.killpg, []), (os.kill, []), (os.kill, [*torchrun, "-m", "extract"])):
        num_published = len(list(cache.glob("shard-*")))
        killed = start(copy, *command)
        wait_for_shards(killed, cache, num_published + 1)
        kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert missing_shards(cache, Manifest.read(cache))

    last = start(copy, *torchrun, "--nproc-per-node=2", "-m", "extract")
    output, error = last.communicate()
    assert last.returncode == 0, output + error
    assert (cache / COMPLETE_FILE).exists()
    assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == [SEEN_FILE]

    torch.set_num_threads(1)
    extract_here(Job.load(copy / "config.toml", directory=tmp_path / "uninterrupted"), monkeypatch)
    (tmp_path / "uninterrupted" / SEEN_FILE).write_bytes((cache / SEEN_FILE).read_bytes())  # which files were seen when
    assert files_of(cache) == files_of(tmp_path / "uninterrupted")


def test_a_worker_that_fails_ends_the_job_with_one_sentence(copy: Path) -> None:
    """A weight of a layer that the launcher has no need of is missing."""
    change_weight(copy, "model.layers.3.mlp.up_proj.weight", lambda _weight: None)
    process = start(copy)
    output, error = process.communicate()
    assert process.returncode == 1, output + error
    assert error == (
        f"error: worker 0 failed: {copy}/target lacks 1 weights of the target, the first is "
        "model.layers.3.mlp.up_proj.weight\n"
    )
    assert not list((copy / "cache").glob("shard-*"))


def test_a_worker_that_is_killed_ends_the_job_with_one_sentence(copy: Path) -> None:
    process = start(write_long_project(copy))
    wait_for_shards(process, copy / "cache", 1)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGKILL)
    output, error = process.communicate()
    assert process.returncode == 1, output + error
    assert error == (
        f"error: worker 0 failed: Signal 9 (SIGKILL) received by PID {worker}; published shards are kept, "
        "the same command continues\n"
    )


def test_a_writer_that_is_killed_ends_the_job_with_one_sentence(copy: Path) -> None:
    process = start(write_long_project(copy))
    wait_for_shards(process, copy / "cache", 1)
    (worker,) = workers_of(process)
    (writer,) = children_of(worker)
    os.kill(writer, signal.SIGKILL)
    output, error = process.communicate()
    assert process.returncode == 1, output + error
    assert error == (
        f"error: worker 0 failed: its writer, process {writer}, was ended (SIGKILL); published shards are kept, "
        "the same command continues\n"
    )


NUM_KILLS = 30


def test_thirty_kills_later_the_bytes_are_the_same(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without a launcher, forked from here to save the imports, each killed at a random moment of its writing.

    The next one starts while the writer of the last one may still be at work.
    """
    torch.set_num_threads(1)
    write_long_project(copy, num_documents=100)
    job, rng = job_of(copy), random.Random(0)
    prepare(job)
    for _ in range(NUM_KILLS):
        missing = missing_shards(job.directory, Manifest.read(job.directory))
        worker = os.fork()
        if worker == 0:
            with contextlib.suppress(BaseException):
                extract_here(job, monkeypatch)
            os._exit(1)
        published = job.directory / f"shard-{missing[rng.randrange(2)]:05d}"
        while not published.exists() and os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            pass
        time.sleep(rng.uniform(0, 0.02))  # waits for nothing: it is when the worker dies
        os.kill(worker, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGKILL
    assert missing_shards(job.directory, Manifest.read(job.directory))
    extract_here(job, monkeypatch)
    extract_here(Job.load(copy / "config.toml", directory=tmp_path / "uninterrupted"), monkeypatch)
    (tmp_path / "uninterrupted" / SEEN_FILE).write_bytes((job.directory / SEEN_FILE).read_bytes())
    assert files_of(job.directory) == files_of(tmp_path / "uninterrupted")


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    workers = []
    for child in children_of(launcher.pid):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                workers.append(child)
    return workers


def children_of(process: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # threads and processes come and go meanwhile
            children += [int(child) for child in (task / "children").read_text().split()]
    return children


def test_what_nobody_expects_comes_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    message = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback: here"}}
    assert _describe(message) == "KeyError: 'x'; published shards are kept, the same command continues"
    assert capsys.readouterr().err == "Traceback: here\n"


def wait_for_plan(process: subprocess.Popen[str], _cache: Path) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "extract: tokenising and packing\n"


def wait_for_worker(process: subprocess.Popen[str], _cache: Path) -> None:
    wait_until(process, lambda: workers_of(process))


MOMENTS: dict[str, Callable[[subprocess.Popen[str], Path], None]] = {
    "planning": wait_for_plan,
    "starting a worker": wait_for_worker,
    "running": lambda process, cache: wait_for_shards(process, cache, 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_from_the_keyboard_is_one_sentence(copy: Path, moment: str) -> None:
    """A terminal sends it to launcher and workers. They all end, else the output would not."""
    process = start(write_long_project(copy))
    MOMENTS[moment](process, copy / "cache")
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate()
    before = "interrupted before a shard was begun: run the same command again\n"
    assert (process.returncode, error) == (1, before if moment == "planning" else stopped(copy / "cache"))
    assert (copy / "cache").exists() == (moment != "planning")


def test_a_request_to_end_while_a_worker_is_started_is_one_sentence(copy: Path) -> None:
    """It comes to the launcher alone, while that sends the worker what it is to do."""
    process = start(write_long_project(copy))
    wait_for_worker(process, copy / "cache")
    process.terminate()
    output, error = process.communicate()
    assert (process.returncode, error) == (1, stopped(copy / "cache")), output + error


def test_one_extraction_at_a_time(project: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Begun or not, the second is refused; of two at the same moment one does it all."""
    arguments = ["--config", str(copy / "config.toml"), "--cache", str(copy / "cache")]
    for begun in (False, True):
        if begun:
            shutil.copytree(project / "cache", copy / "cache")
            shutil.rmtree(copy / "cache" / "shard-00001")
        with sole_extraction(copy / "cache"):
            assert main(arguments) == 2
        assert capsys.readouterr().err == (
            f"error: another extraction is at work in {copy}/cache: wait until it ends, or stop it\n"
        )
        assert (copy / "cache").exists() == begun
    shutil.rmtree(copy / "cache")
    processes = [start(copy) for _ in range(2)]
    errors = {process.communicate()[1] for process in processes}
    assert sorted(process.returncode for process in processes) == [0, 2], errors
    assert "another extraction is at work in" in "".join(errors)
    made, expected = files_of(copy / "cache"), files_of(project / "cache")
    assert {name for name in made if made[name] != expected.get(name)} <= {"manifest.json", SEEN_FILE}
    assert made.keys() == expected.keys()


def test_a_directory_that_nothing_was_written_into_goes_again(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with sole_extraction(tmp_path / "mine"), sole_extraction(tmp_path / "made" / "deep"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("kilobytes", [8, 40])
def test_a_disk_that_takes_no_more_is_one_sentence(
    project: Path, copy: Path, kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may become larger: neither an array of the shard that is missing, nor the head of a new cache."""
    if kilobytes == 8:
        extract_here(job_of(copy), monkeypatch, num_shards=1)
    before = files_of(copy)
    process = start(copy, "bash", "-c", f'ulimit -f {kilobytes} && exec "$@"', "bash", *EXTRACT)
    output, error = process.communicate()
    assert process.returncode == 1, output + error
    assert "File too large" in error
    assert "could not be written: " in error
    assert error.count("\n") == 1
    assert files_of(copy) == before


def test_a_cache_that_can_not_be_written_to_is_one_sentence(
    project: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract_here(job_of(copy), monkeypatch, num_shards=1)
    (copy / "cache").chmod(0o555)
    process = start(copy, sys.executable, "-c", WITHOUT_PRIVILEGES, *EXTRACT)
    _, error = process.communicate()
    (copy / "cache").chmod(0o755)
    assert process.returncode == 2
    assert error == (f"error: {copy}/cache cannot be written to: make it writable, or extract into another directory\n")
