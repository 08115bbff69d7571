"""CUDA graphs: a function is captured once and replayed by the thread that captured it, or the run stops.

The failure that this project exists for: a graph captured on one thread and replayed on another. Here the graph knows
its owner and refuses. There is no fallback: when capture fails, the reason is the user's to see.
"""

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from shards.errors import RunError

MAX_SHAPES = 64  # that one function may be compiled for; past that the compiler fails rather than falls back
NUM_WARMUPS = 2  # compilation, autotuning and lazy handles come before capture


class CapturedFunction:
    """`function`, which takes nothing and returns nothing, as one CUDA graph over fixed addresses."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self.function = function
        self.name = name
        self.owner = threading.get_ident()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(NUM_WARMUPS):
                function()
        torch.cuda.current_stream().wait_stream(side_stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has memory of its own and can't take what warming up has left
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                function()
        except RuntimeError as error:
            raise RunError(
                f"the {name} could not be captured as a CUDA graph: {error}; train.capture=false runs without"
            ) from error

    def __call__(self) -> None:
        if threading.get_ident() != self.owner:
            raise RunError(
                f"the {self.name} was captured on thread {self.owner} and cannot be replayed on thread "
                f"{threading.get_ident()}: a CUDA graph belongs to the thread that captured it"
            )
        self.graph.replay()


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` fused by inductor, for fixed shapes. Made on first use: importing the compiler takes seconds."""
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    return torch.compile(function, fullgraph=True, dynamic=False)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for elementwise work: few passes over memory on CUDA, as written on the CPU."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        return (compiled(function) if on_gpu else function)(*args, **kwargs)

    return call


def prepare(function: Callable[[], None], name: str, device: torch.device, *, capture: bool) -> Callable[[], None]:
    """The captured function on CUDA; on the CPU, or where it is not to be captured, the function itself.

    The function must be harmless when it runs on empty rows, because warming up runs it.
    """
    return CapturedFunction(function, name) if capture and device.type == "cuda" else function
