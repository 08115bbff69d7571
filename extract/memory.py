"""What to do when a GPU's memory is too small, in a sentence: where the memory is, and what would fit."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from extract.job import Job
from extract.target import Architecture, num_run_layers
from shards.errors import RunError

USABLE = 0.9  # of the memory that is left, given how it is split up
ENCODING_VALUES = 4  # float32 [T, H] that encoding a layer holds at a time


@contextlib.contextmanager
def explained_out_of_memory(job: Job, architecture: Architecture, device: torch.device) -> Iterator[None]:
    """Raise RunError with that sentence where torch says that memory is used up."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        name = torch.cuda.get_device_name(device)
        raise RunError(
            f"{name} has too little memory: {advise(job, architecture, total=total, others=others)}"
        ) from None


def advise(job: Job, architecture: Architecture, *, total: int, others: int) -> str:
    """The end of the sentence, for a GPU of `total` bytes of which other processes hold `others`."""
    weights = weight_bytes(architecture, num_run_layers(architecture, job.cache))
    left = total - others - weights
    held = f"of {_gb(total)} the target's weights take {_gb(weights)}" + (
        f" and other processes hold {_gb(others)}" if others > 0 else ""
    )
    otherwise = "free the GPU, or take one with more memory"
    if left <= 0:
        return f"{held}; {otherwise}, or lower the last of cache.layers, above which no layer is loaded"
    fitting = job.cache.row_tokens // 2
    while fitting * token_bytes(job, architecture) > USABLE * left:
        fitting //= 2
    fitting -= fitting % job.cache.chunk_tokens
    shorter = f"cache.row_tokens={fitting}, for a cache of its own, would fit; else " if fitting else ""
    return f"{held}, and a row of {job.cache.row_tokens:,} tokens needs more than the rest; {shorter}{otherwise}"


def weight_bytes(architecture: Architecture, num_layers: int) -> int:
    """Of the target with its first `num_layers` decoder layers."""
    layers = architecture.skeleton.get_decoder().layers
    values = _num_values(architecture.skeleton) - sum(_num_values(layer) for layer in layers[num_layers:])
    return values * architecture.dtype.itemsize


def token_bytes(job: Job, architecture: Architecture) -> int:
    """About what a token of a row takes: the widest layer's inner values, the captured states, what encoding holds."""
    config, dtype_bytes = architecture.text_config, architecture.dtype.itemsize
    hidden = config.hidden_size
    inner = 3 * (getattr(config, "intermediate_size", None) or 4 * hidden) + 8 * hidden
    captured = (len(job.cache.layers) + job.cache.final_hidden) * 2 * hidden
    return (inner + captured) * dtype_bytes + ENCODING_VALUES * 4 * hidden


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
