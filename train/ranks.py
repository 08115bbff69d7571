"""The processes of a run: who this one is, its device, and the few things that they do together."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from train.runtime import wait_for

# How long ranks wait for each other on the host. The longest that all is well: the first one writes a checkpoint.
# A peer that dies is not waited for: its connections close.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
EXIT_PEER_LOST = 3  # of a rank that ended because another did


class PeerLostError(Exception):
    """Another rank is gone, or does not answer. The launcher knows which one ended, and how."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Tensors are reduced on their own device. What the host has to know is agreed on without touching the GPU."""

    rank: int
    world_size: int
    device: torch.device
    local_process_ids: tuple[int, ...] = ()  # of the ranks on this machine that may be waited for

    @classmethod
    def join(cls) -> Self:
        """Join the ranks that the launcher's environment describes; this process sees at most one GPU."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        me = (socket.gethostname(), os.getpid())
        everyone: list[Any] = [me]
        if world_size > 1:
            on_gpu = device.type == "cuda"
            everyone = [None] * world_size
            with _peers_needed():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                    timeout=COLLECTIVE_TIMEOUT,
                    device_id=device if on_gpu else None,
                )
                dist.all_gather_object(everyone, me)
        local_process_ids = tuple(process_id for host, process_id in everyone if host == me[0])
        return cls(rank=rank, world_size=world_size, device=device, local_process_ids=local_process_ids)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over ranks. May be captured in a graph."""
        if self.world_size == 1:
            return
        if tensor.is_cuda:
            dist.all_reduce(tensor)
        else:
            with _peers_needed():
                dist.all_reduce(tensor)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _peers_needed():
            dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. The GPU is neither used nor waited for."""
        if self.world_size == 1:
            return flag
        num_set = torch.tensor(int(flag))
        self.sum_(num_set)
        return num_set.item() > 0

    def barrier(self) -> None:
        """Return when every rank's host has come here."""
        self.any(False)

    def wait_for_device(self) -> None:
        """Return when the device has done all that it was given; signals are handled meanwhile."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait_for(event)

    def have_lost_a_peer(self) -> bool:
        """Whether a rank of this machine has ended."""
        return not all(_is_process(process_id) for process_id in self.local_process_ids)


@contextmanager
def _peers_needed() -> Iterator[None]:
    """What gloo raises on the host means that a peer closed its connection, or does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


def _is_process(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists
    return True
