"""The last words of a run: where it is, how the loss fell, and what the drafter would get accepted."""

from pathlib import Path
from typing import Any

from train.records import (
    BEST_LINK,
    CHECKPOINTS_DIRECTORY,
    HELDOUT_ACCEPTANCE_LENGTH,
    LATEST_LINK,
    best_acceptance_length,
    read_metrics,
)


def print_summary(run: Path) -> None:
    lines = read_metrics(run)
    last = lines[-1]
    print(f"\nrun {run}: {last['step']} steps, drafter in {run / CHECKPOINTS_DIRECTORY / LATEST_LINK}")
    if measured := [line for line in lines if line["loss"] is not None]:
        begin, end = measured[0], measured[-1]
        print(f"loss {begin['loss']:.3f} at step {begin['step']} → {end['loss']:.3f} at step {end['step']}")
    if HELDOUT_ACCEPTANCE_LENGTH not in last:
        print("no held-out τ: the cache has no held-out documents, data.holdout_fraction sets them apart")
        return
    print(f"held-out τ {_interval(last, HELDOUT_ACCEPTANCE_LENGTH)} (95 % interval over documents)")
    if best_acceptance_length([last]) < (best := best_acceptance_length(lines)):
        step = next(line["step"] for line in lines if line.get(HELDOUT_ACCEPTANCE_LENGTH) == best)
        print(f"the best was {best:.3f} at step {step}: {run / CHECKPOINTS_DIRECTORY / BEST_LINK}")
    if last["heldout_acceptance_length_without_context"] is None:
        print("no τ without context: each held-out row gets the features of the next for it, and there is only one")
    else:
        print(f"without context {_interval(last, 'heldout_acceptance_length_without_context')}")


def _interval(line: dict[str, Any], key: str) -> str:
    half_width = line[f"{key}_half_width"]
    return f"{line[key]:.3f}" + ("" if half_width is None else f" ± {half_width:.3f}")
