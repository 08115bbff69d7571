"""One rank as a process: how it starts, how it ends with its launcher, and how it leaves.

It leaves by `os._exit`: after a failure nothing may wait for peers that are gone, and with NCCL's collectives captured
in graphs the orderly end of the process group would hang.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from shards.errors import EXIT_FAILED, EXPECTED_ERRORS, CacheError, RunError
from train.parent import end_with_parent

LAUNCHER_VARIABLE = "DFLASH_LAUNCHER"  # its process id; torchrun sets none
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # set by torch's agent, our launcher's or torchrun's


def work(arguments: argparse.Namespace) -> NoReturn:
    """Be one rank, from configuration to exit code."""
    end_with_launcher()
    faulthandler.enable()  # where a crash in native code was
    code, text = 0, ""
    try:
        run_rank(arguments)
    except EXPECTED_ERRORS as error:
        code, text = error.exit_code, f"error: {error}"
    except BaseException:
        code, text = EXIT_FAILED, f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}"
    leave(code, text)


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM when the parent process dies, however it does: no worker outlives its job."""
    for number in (signal.SIGTERM, signal.SIGINT):  # until there is something to save
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(int(os.environ.get(LAUNCHER_VARIABLE, os.getppid())), signal.SIGTERM)


def run_rank(arguments: argparse.Namespace) -> None:
    """Check what the launcher checked, because `torchrun` has not; then train."""
    from train.config import RunConfig
    from train.runtime import keep_compiled_kernels, quiet_thread_starters

    config = RunConfig.load(arguments.config, arguments.overrides)
    quiet_thread_starters()
    keep_compiled_kernels(Path(config.train.compile_cache))

    import torch

    from train.gpus import claim_gpu, find_gpus
    from train.lock import refuse_if_locked
    from train.preflight import preflight
    from train.ranks import EXIT_PEER_LOST, PeerLostError
    from train.run import train

    claim_gpu(find_gpus(config.train))
    if os.environ["RANK"] == "0":
        refuse_if_locked(arguments.run)
    world_size = int(os.environ["WORLD_SIZE"])
    begin = preflight(config, arguments.cache, arguments.run, world_size=world_size, resume=arguments.resume)
    try:
        train(config, arguments.cache, arguments.run, begin.checkpoint)
    except CacheError as error:  # damaged under the run: no longer a matter of usage
        raise RunError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"{str(error).splitlines()[0]} Lower train.rows_per_micro_step or train.num_anchors, and see that nothing "
            "else runs on this GPU"
        ) from error
    except PeerLostError as error:
        leave(EXIT_PEER_LOST, f"error: the ranks lost touch with each other: {error}")


def leave(code: int, text: str) -> NoReturn:
    """End this process. What there is to say goes to the launcher, which says it once for all ranks, or to stderr."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if text and not _left_for_launcher(text):
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _left_for_launcher(text: str) -> bool:
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path is None:
        return False
    beside = Path(f"{path}.tmp")  # the launcher never finds half a file
    try:
        beside.write_text(json.dumps({"message": text, "timestamp": int(time.time())}), encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        return False
    return True
