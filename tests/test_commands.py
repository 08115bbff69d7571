"""What holds for every command: an interrupt at its start is one sentence, and `| head` is none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.caches import write_cache, write_config
from train.config import RunConfig

ROOT = Path(__file__).parent.parent
INTERRUPTED = {  # command, with PIPE for the file that it reads first → what it says
    "train --config PIPE": "interrupted before training began: nothing was lost\n",
    "extract --config PIPE": "interrupted before a shard was begun: run the same command again\n",
    "speculate --config PIPE": "interrupted\n",
    "shards verify .": "interrupted\n",
    "shards stats .": "interrupted\n",
}


def start(command: str, directory: Path, **options: object) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", *command.split()]
    return subprocess.Popen(arguments, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", INTERRUPTED)
def test_an_interrupt_is_one_sentence(tmp_path: Path, command: str, number: int) -> None:
    """The command waits for what it reads first, from a pipe into which nothing is written."""
    pipe = tmp_path / ("manifest.json" if command.startswith("shards") else "config.toml")
    os.mkfifo(pipe)
    process = start(command.replace("PIPE", str(pipe)), tmp_path, stdout=subprocess.PIPE)
    with open(pipe, "wb"):  # which waits for the reader
        process.send_signal(number)
        output, errors = process.communicate()
    assert (process.returncode, output, errors) == (1, "", INTERRUPTED[command])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_code_that_is_made_at_run_time_is_caught_too(tmp_path: Path, number: int) -> None:
    """CPython ends `python -m` by SIGINT once a KeyboardInterrupt has passed through `exec`, though it was caught."""
    (tmp_path / "interrupted.py").write_text(
        "import os, sys\nfrom shards.errors import run_command\n"
        f"sys.exit(run_command(lambda: exec('os.kill(os.getpid(), {int(number)})')))\n"
    )
    process = start("interrupted", tmp_path)
    assert (process.communicate()[1], process.returncode) == ("interrupted\n", 1)


@pytest.mark.parametrize("command", ["shards stats cache", "shards verify cache", "shards stats cache --json"])
def test_a_reader_that_has_gone_is_no_failure_to_tell_of(tmp_path: Path, command: str) -> None:
    write_cache(tmp_path / "cache", RunConfig.load(write_config(tmp_path / "tiny.toml")))
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command, tmp_path, stdout=writer)
    os.close(writer)
    assert process.communicate()[1] == ""
