"""The data to a plan: records tokenised on all cores, chosen from, and laid into rows.

Records are handed out in batches and taken back in their order, so the plan does not depend on who tokenised what.
Only a few batches are under way at any time.
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path

from extract.data import FIELDS, parse
from extract.files import Raw, RecordReader
from extract.job import Job
from extract.tokenise import Encoder
from shards.documents import BATCH_DOCUMENTS, REASONS, Batch, Collector, Limits, Tokenised
from shards.errors import RunError
from shards.manifest import Plan
from shards.plan import Layout, make_plan
from shards.progress import Progress
from shards.select import select

FEW_BATCHES = 16  # a process takes seconds to start, and these not longer to tokenise
BATCHES_A_PROCESS = 3  # under way: one at work, one waiting, one done
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MEGABYTE = 1_000_000


class Planned:
    """A plan, and what it was made of."""

    def __init__(self, job: Job, encoder: Encoder, *, directory: Path | None, num_processes: int | None = None) -> None:
        """Tokens are kept on the disk of `directory`; None: they are not, and the plan says sizes only."""
        self.reader = RecordReader(job.data.files, (*FIELDS, job.data.source_field))
        collector = Collector(directory)
        batch_of = BatchMaker(job, encoder)
        num_processes = num_processes or len(os.sched_getaffinity(0))
        with Progress(self.reader.total_bytes // MEGABYTE, unit="megabyte", name="tokenising") as progress:
            for batch in tokenised_batches(_batches(self.reader, job.data.max_documents), batch_of, num_processes):
                collector.add(batch)
                progress.show(self.reader.bytes_read // MEGABYTE)
        self.tokenised: Tokenised = select(collector.finish(), job.data.mix)
        self.plan: Plan
        self.layout: Layout
        self.plan, self.layout = make_plan(self.tokenised, job.target, job.data, job.cache)

    def left_out(self) -> Iterator[dict[str, str | int]]:
        """Each record that has no place in the plan, in their order: which it is, where it lies, and why."""
        records, reasons = self.tokenised.left_out_record, self.tokenised.left_out_reason
        for i in records.argsort(kind="stable").tolist():
            record = int(records[i])
            yield {"record": record, "where": self.reader.where(record), "reason": REASONS[reasons[i]]}


class BatchMaker:
    """Tokenises batches of records; goes to other processes."""

    def __init__(self, job: Job, encoder: Encoder) -> None:
        self.encoder, self.data = encoder, job.data
        self.limits = Limits.of(job.target, job.data, job.cache)

    def __call__(self, raws: list[Raw]) -> Batch:
        records = (parse(raw, self.data.source_field) for raw in raws)
        return Batch.of(map(self.encoder.encode, records), self.limits, self.data.seed)


def tokenised_batches(
    batches: Iterator[list[Raw]], batch_of: Callable[[list[Raw]], Batch], num_processes: int
) -> Iterator[Batch]:
    """`batch_of` each, in order; the first few in this process, and those after them in others."""
    yield from map(batch_of, itertools.islice(batches, FEW_BATCHES))
    first = next(batches, None)
    if first is None:
        return
    batches = itertools.chain([first], batches)
    if num_processes == 1:
        yield from map(batch_of, batches)
        return
    with _processes(num_processes, batch_of) as pool:
        waiting: deque[Future[Batch]] = deque()
        for batch in batches:
            with _interrupts_blocked():  # a process may be started here
                waiting.append(pool.submit(_make_batch, batch))
            if len(waiting) == BATCHES_A_PROCESS * num_processes:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())


def _batches(reader: RecordReader, max_records: int | None) -> Iterator[list[Raw]]:
    raws = itertools.islice(reader, max_records)
    while batch := list(itertools.islice(raws, BATCH_DOCUMENTS)):
        yield batch


@contextlib.contextmanager
def _processes(count: int, batch_of: Callable[[list[Raw]], Batch]) -> Iterator[Executor]:
    """Processes that end with this one, however it ends, and leave interrupts to it."""
    context = multiprocessing.get_context("spawn")  # this process has torch and its threads, which a fork would not
    resource_tracker.ensure_running()  # which unblocks SIGINT, so it comes before the first process
    pool = ProcessPoolExecutor(count, context, _begin, (batch_of, os.getpid()))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_batch_of: Callable[[list[Raw]], Batch]


def _begin(batch_of: Callable[[list[Raw]], Batch], parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    global _batch_of
    _batch_of = batch_of


def _make_batch(raws: list[Raw]) -> Batch:
    return _batch_of(raws)


def _result(future: Future[Batch]) -> Batch:
    try:
        return future.result()
    except BrokenProcessPool:
        raise RunError(
            "a process that tokenised was ended from outside, which the kernel does when memory runs out: "
            "nothing was written, run the same command again"
        ) from None


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let this process be interrupted later, and the one that is started here never: a terminal asks that one, too.

    An interrupt now would leave it half of what it is sent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
