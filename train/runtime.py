"""How a training process is set up before it computes: no threads but its own, and the same bits every time."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import tqdm

if TYPE_CHECKING:
    import torch

POLL_S = 0.0005  # steps take 0.1 s and more, and the host is ahead by two


def quiet_thread_starters() -> None:
    """Keep inductor and tqdm from starting threads: a trainer has one. To be called before torch is imported."""
    tqdm.tqdm.monitor_interval = 0
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic matrix products need


def keep_compiled_kernels(directory: Path) -> None:
    """Have inductor and Triton keep what they compile in `directory`, unless the environment names another place.

    To be called before torch is imported.
    """
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(variable, str(directory.absolute() / name))


def compute_on_one_thread_deterministically() -> None:
    import torch

    torch.autograd.set_multithreading_enabled(False)  # the CUDA backward would run on a thread of its own
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # every buffer is written before it is read


def wait_for(event: "torch.cuda.Event") -> None:
    """As `event.synchronize()`, but signals are handled meanwhile.

    A collective in a captured graph waits for ever when its peer has died, and so would the call; NCCL's timeout does
    not see it.
    """
    while not event.query():
        time.sleep(POLL_S)
