"""Workers through torch's elastic launcher: `python -m train` again, once for each GPU."""

import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shards.errors import RunError


def run_workers(arguments: Sequence[str], *, num_workers: int) -> None:
    """Start the workers and wait for them; raise RunError when one fails, after the others have been ended.

    A worker's own message or traceback is on stderr before that. Each is a fresh interpreter, not a fork of this one.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "train", *arguments)
    except SignalException:
        raise RunError("interrupted; --resume continues") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RunError(f"the worker of rank {rank} ended with exit code {failure.exitcode}") from None
