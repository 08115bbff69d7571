"""What the codecs cost: the error of every token of a bf16 cache, layer by layer, and after a drafter's `fc`.

    python -m benchmarks.codec --cache caches/smollm2-135m [--drafter runs/smollm2-135m/checkpoints/latest]

Prints the table of FORMAT.md. Without a drafter, fc is isotropic, as every run begins. Uses the numpy reference.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shards.codec import CODECS, decode_bf16
from shards.errors import UsageError, run_command
from shards.reader import CacheReader, RowBuffers
from shards.schema import NO_DOCUMENT

LOSSY = ("int8", "int4")
MASSIVE = 100  # times the median rms of a layer's tokens: the largest channel of a token that is left out once
FC_WEIGHT = "fc.weight"


def read_tokens(cache: Path) -> Iterator[np.ndarray]:
    """The hidden states float32 [K, tokens, H] of one row after the other, without padding."""
    with CacheReader(cache) as reader:
        manifest, layers = reader.manifest, reader.manifest.cache.layers
        if manifest.cache.codec != "bf16":
            raise UsageError(f"{cache} has the codec {manifest.cache.codec!r}: errors are measured against bf16")
        num_tokens = manifest.cache.row_tokens
        slots = {name: np.empty(num_tokens, np.int32) for name in ("input_ids", "position_ids", "document_ids")}
        codes = np.empty((len(layers), num_tokens, manifest.target.hidden_size), np.uint16)
        out = RowBuffers(**slots, loss_mask=np.empty(num_tokens, np.uint8), codes=codes)
        for row in range(manifest.plan.num_rows):
            reader.read_row(row, layers, out)
            yield decode_bf16(codes[:, out.document_ids != NO_DOCUMENT])


def relative(errors: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """‖errors‖ / ‖truth‖ over the last axis."""
    return np.linalg.norm(errors, axis=-1) / np.linalg.norm(truth, axis=-1)


def fc_weight(drafter: Path | None, num_inputs: int, hidden_size: int) -> np.ndarray:
    """float32 [H, K·H]."""
    if drafter is None:
        return np.random.default_rng(0).standard_normal((hidden_size, num_inputs), dtype=np.float32)
    import torch  # numpy has no bf16, so that safetensors can't give it
    from safetensors.torch import load_file as load_torch

    return load_torch(drafter / "model.safetensors")[FC_WEIGHT].to(torch.float32).numpy()


def measure(cache: Path, drafter: Path | None) -> None:
    errors: dict[str, list[np.ndarray]] = {codec: [] for codec in LOSSY}  # [K + 1, tokens]: the last is after fc
    sizes = []  # [2, K, tokens]: rms and largest magnitude
    weight = None
    for states_KTH in read_tokens(cache):
        features = np.concatenate(states_KTH, axis=-1)
        if weight is None:
            weight = fc_weight(drafter, features.shape[-1], states_KTH.shape[-1])
        sizes.append(np.stack([np.sqrt(np.square(states_KTH).mean(-1)), np.abs(states_KTH).max(-1)]))
        for name in LOSSY:
            off_KTH = CODECS[name].decode(CODECS[name].encode(states_KTH)) - states_KTH
            after_fc = relative(np.concatenate(off_KTH, axis=-1) @ weight.T, features @ weight.T)
            errors[name].append(np.concatenate([relative(off_KTH, states_KTH), after_fc[None]]))
    print_table(
        cache, {name: np.concatenate(parts, axis=1) for name, parts in errors.items()}, *np.concatenate(sizes, 2)
    )


def print_table(cache: Path, errors: dict[str, np.ndarray], rms_KT: np.ndarray, largest_KT: np.ndarray) -> None:
    with CacheReader(cache) as reader:
        layers = [str(layer) for layer in reader.manifest.cache.layers]
    is_massive_KT = largest_KT > MASSIVE * np.median(rms_KT, axis=1, keepdims=True)
    left_out_KT = np.concatenate([is_massive_KT, is_massive_KT.any(0, keepdims=True)])
    print("| layer | tokens | massive |" + "".join(f" {name} | without massive |" for name in errors))
    print("|---|---|---|" + "---|---|" * len(errors))
    for k, layer in enumerate([*layers, "after fc"]):
        cells = [f"{left_out_KT.shape[1]:,}", f"{np.count_nonzero(left_out_KT[k]):,}"]
        for error in errors.values():
            cells += [f"{of.mean():.2%}, {of.max():.2%}" for of in (error[k], error[k][~left_out_KT[k]])]
        print(f"| {layer} | " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="a cache with the codec bf16")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="an exported drafter, for its fc")
    options = parser.parse_args()
    return run_command(lambda: measure(options.cache, options.drafter))


if __name__ == "__main__":
    sys.exit(main())
