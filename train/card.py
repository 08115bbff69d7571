"""The model card of an exported drafter: what it is for, of what it was made, how much of it was accepted.

Everything comes from the run's directory. What a person must decide, such as the licence, is left to them.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shards.durable import json_text
from shards.errors import UsageError
from train.start import START_FILE

CARD_FILE = "README.md"
LIVE_FILE = "speculate.json"  # `make evaluate` leaves it in the run
PATHS = {"target.path", "data.files", "train.init_from", "train.compile_cache"}  # of the machine: nobody's business
SOFTWARE = ("torch", "safetensors", "numpy")


def model_card(run: Path, recorded: dict[str, Any], metrics: list[dict[str, Any]], *, step: int) -> str:
    """Markdown, from the run's recorded configuration, its metrics, and the step that is exported."""
    name = Path(str(recorded["target.path"])).name
    return "\n".join(
        [
            f"# DFlash drafter for {name}",
            "",
            f"A drafter for block-parallel speculative decoding of {name}, of {recorded['drafter.num_layers']} layers "
            f"and blocks of {recorded['drafter.block_size']}. It is of use with that target alone.",
            "",
            "Licence: not chosen yet. Whoever publishes this chooses it, within what the target and the data allow.",
            "",
            *_section("Target", _target(recorded)),
            *_section("Data", _data(recorded)),
            *_section("Training", _training(recorded, _read(run / START_FILE), step)),
            *_section("Acceptance length τ (tokens per target pass, bonus included)", _acceptance(run, metrics, step)),
            *_section("Software", {"Python": platform.python_version()} | {name: version(name) for name in SOFTWARE}),
            "## Configuration",
            "",
            "```json",
            json_text({key: recorded[key] for key in recorded.keys() - PATHS if recorded[key] is not None}).rstrip(),
            "```",
            "",
        ]
    )


def _section(title: str, facts: dict[str, Any]) -> list[str]:
    return [f"## {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]


def _target(recorded: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": Path(recorded["target.path"]).name,
        "content hash": recorded.get("identity.target"),
        "layers read": recorded["drafter.target_layer_ids"],
        "mask token": recorded["target.mask_token_id"],
        "chat template's hash": recorded.get("identity.chat_template"),
    }


def _data(recorded: dict[str, Any]) -> dict[str, Any]:
    return {
        "files": ", ".join(Path(file).name for file in recorded["data.files"]),
        "content hash": recorded.get("identity.data"),
        "held out": f"{recorded['data.holdout_fraction']:.1%} of the documents",
        "stored as": recorded["cache.codec"],
    }


def _training(recorded: dict[str, Any], start: dict[str, Any], step: int) -> dict[str, Any]:
    slots = step * recorded["train.rows_per_step"] * recorded["cache.row_tokens"]
    return {
        "steps": f"{step:,}, {slots:,} token slots",
        "anchors a row": f"{recorded['train.num_anchors']}, of {recorded['cache.row_tokens']} slots",
        "loss": recorded["train.loss"],
        "learning rate": recorded["train.lr"],
        "precision": recorded["train.precision"],
        "begun with": f"{Path(start['directory']).name}, sha256 {start['sha256']}" if start else "random weights",
    }


def _acceptance(run: Path, metrics: list[dict[str, Any]], step: int) -> dict[str, str]:
    """Simulated on held-out documents, at the last evaluation up to the step; live, where it was measured."""
    facts = {"held-out documents": "not measured"}
    if evaluated := [line for line in metrics if line["step"] <= step and "heldout_acceptance_length" in line]:
        key = "heldout_acceptance_length"
        facts = {
            f"held-out documents, step {evaluated[-1]['step']}": _interval(evaluated[-1], key),
            "the same without the target's context": _interval(evaluated[-1], f"{key}_without_context"),
        }
    live = _read(run / LIVE_FILE)
    if live.get("acceptance_length_macro") is not None:
        facts[f"live, {live['prompts']} prompts"] = f"{live['acceptance_length_macro']:.3f}"
        by_source = {source: tau for source, tau in live.get("by_source", {}).items() if tau is not None}
        facts |= {f"live, source {source}": f"{tau:.3f}" for source, tau in by_source.items()}
    return facts


def _interval(line: dict[str, Any], key: str) -> str:
    mean, half_width = line.get(key), line.get(f"{key}_half_width")
    if mean is None:
        return "not measured"
    return f"{mean:.3f}" + ("" if half_width is None else f" ± {half_width:.3f} (95 %)")


def _read(path: Path) -> dict[str, Any]:
    """What a file of the run says, or nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; remove it to export without what it says") from None
