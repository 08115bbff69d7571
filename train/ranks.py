"""The processes of a run: who this one is, its device, and the few things that they do together."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def join(cls) -> Self:
        """Join the ranks that the launcher's environment describes; this process sees at most one GPU."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if world_size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            device_id = device if device.type == "cuda" else None
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device_id)
        return cls(rank=rank, world_size=world_size, device=device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over ranks. May be captured in a graph."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()
