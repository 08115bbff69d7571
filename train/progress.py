"""What the user sees while a run goes on: a bar on a terminal, plain lines in a log."""

import sys
from typing import Any

import tqdm

from train.records import name_rows


class Progress:
    """Silent unless `enabled` (one rank speaks)."""

    def __init__(self, *, num_steps: int, first_step: int, enabled: bool) -> None:
        self.enabled = enabled
        self.num_steps = num_steps
        self.bar = tqdm.tqdm(
            total=num_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not (enabled and sys.stderr.isatty()),
        )

    def say(self, text: str) -> None:
        if not self.enabled:
            return
        self.bar.clear()
        try:
            print(text, flush=True)
        except OSError:  # nobody reads it any more: no reason to lose the run, whose metrics.jsonl has it all
            self.enabled = False
        self.bar.refresh()

    def log(self, line: dict[str, Any], *, seconds_per_step: float) -> None:
        """Report one line of metrics.jsonl."""
        self.bar.update(line["step"] - self.bar.n)
        seconds_left = (self.num_steps - line["step"]) * seconds_per_step
        parts = [
            f"step {line['step']}/{self.num_steps}",
            f"loss {_number(line['loss'], '.3f')}",
            f"τ {_number(line['acceptance_length'], '.3f')}",
            f"{line['tokens_per_second']:,.0f} tok/s",
            f"data wait {line['data_wait_fraction']:.1%}",
        ]
        if "heldout_acceptance_length" in line:
            parts.insert(3, f"held-out τ {line['heldout_acceptance_length']:.3f}")
        if line["skipped_steps"]:
            parts.append(f"skipped {line['skipped_steps']}")
        if "bad_step" in line:
            parts.append(f"not finite: step {line['bad_step']}, {name_rows(line['bad_rows'])}")
        parts.append(f"ETA {tqdm.tqdm.format_interval(seconds_left)}")
        self.say("  ".join(parts))

    def close(self) -> None:
        self.bar.close()


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
