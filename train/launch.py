"""The workers of this machine, started by torch's elastic agent: each is `python -m train` again.

The agent starts the workers, watches them, and ends all when one fails. What is asked of the launcher by a signal is
handed on to them; what a worker has to say at its end it leaves in a file, so that the launcher says it once.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from shards.errors import EXIT_FAILED, Interrupted, RunError
from train.checkpoint import checkpoint_step
from train.interrupt import GRACE_S
from train.ranks import EXIT_PEER_LOST
from train.records import latest_checkpoint
from train.worker import LAUNCHER_VARIABLE

LOCALHOST = "127.0.0.1"
ENDS = {
    signal.SIGKILL: "was ended by SIGKILL, as the kernel does when memory runs out (`dmesg` tells)",
    signal.SIGSEGV: "crashed (SIGSEGV), where is said above",
    signal.SIGALRM: f"had not saved {GRACE_S} s after it was asked to stop, and was ended",
}


def run_workers(arguments: Sequence[str], run: Path, *, num_workers: int) -> int:
    """Start the workers, wait for them, and return the exit code; what the first that failed left to say was said.

    Raises RunError when a worker could not say why it ended, and Interrupted when all were stopped before there
    was anything to save. Each is a fresh interpreter, not a fork of this one.
    """
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="dflash-") as directory:
        agent = _make_agent(arguments, directory, num_workers)
        signals = HandedOn(agent)
        try:
            failures = agent.run().failures
        finally:
            agent.get_worker_group().spec.rdzv_handler.shutdown()
        return _conclude(failures, run, was_asked_to_stop=signals.received) if failures else 0


def _make_agent(arguments: Sequence[str], directory: str, num_workers: int) -> LocalElasticAgent:
    """torch's agent for the workers of this machine, with `directory` for their error files."""
    log = logging.getLogger("torch.distributed.elastic")  # what is to be said about a failure is said here
    log.propagate = False
    log.addHandler(logging.NullHandler())
    run_id = uuid.uuid4().hex
    rendezvous = RendezvousParameters(
        backend="c10d", endpoint=f"{LOCALHOST}:0", run_id=run_id, min_nodes=1, max_nodes=1, local_addr=LOCALHOST
    )
    spec = WorkerSpec(
        role="train",
        local_world_size=num_workers,
        entrypoint=sys.executable,
        args=("-m", "train", *arguments),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        local_addr=LOCALHOST,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=directory))


class HandedOn:
    """Signals to the launcher, handed on to its workers as SIGTERM: they save and stop, however long that takes.

    The agent by itself would kill them after 30 seconds (up to torch 2.11 that can't be changed). Before there are
    workers a signal raises Interrupted.
    """

    def __init__(self, agent: LocalElasticAgent) -> None:
        self.agent = agent
        self.received = False
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # by the agent: none
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.received = True
        process_ids = [worker.id for worker in self.agent.get_worker_group().workers if worker.id is not None]
        if not process_ids:
            raise Interrupted
        for process_id in process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGTERM)


def _conclude(failures: Mapping[int, ProcessFailure], run: Path, *, was_asked_to_stop: bool) -> int:
    """Find the failure, by rank, that the others follow from; say what it left to say and return its exit code."""
    effects = {-signal.SIGTERM, EXIT_PEER_LOST}
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode not in effects}
    if was_asked_to_stop and not causes:
        raise Interrupted
    rank, failure = min((causes or failures).items(), key=lambda item: (item[1].timestamp, item[0]))
    if os.path.isfile(failure.error_file):
        print(failure.message, file=sys.stderr)
        return EXIT_FAILED if failure.exitcode == EXIT_PEER_LOST else failure.exitcode
    raise RunError(f"rank {rank} {_describe_end(failure.exitcode)}: {_what_is_left(run)}")


def _describe_end(exitcode: int) -> str:
    if exitcode == EXIT_FAILED:  # any other end with it leaves a word
        return "made no step for train.stall_seconds, where it stood is said above"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    return ENDS.get(-exitcode, f"was ended by {signal.Signals(-exitcode).name}")


def _what_is_left(run: Path) -> str:
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        return "nothing was saved yet, `make train` or --resume begins again"
    return f"`make train` or --resume continues from step {checkpoint_step(checkpoint)}"
