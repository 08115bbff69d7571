"""`python -m speculate`: decodes prompts with target and drafter, says how much was accepted, and that nothing changed.

Either all parts are named, or a configuration names them and a run has the drafter. All but the arguments is imported
late: a wrong flag should not take seconds, and an interrupt meanwhile is answered as at any other time.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from shards.errors import UsageError, run_command

DESCRIPTION = "Decode prompts speculatively and compare with the target's own greedy answers."
EPILOG = """\
With --config, flags win over what it says, and keys can be overridden: speculate.num_prompts=4
Exit codes: 0 decoded, nothing changed; 1 an answer differs from the target's own; 2 wrong usage."""


def main() -> int:
    arguments = parse_arguments()
    return run_command(lambda: start(arguments))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m speculate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", type=Path, metavar="DIR", help="the target, in transformers' layout")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="an exported drafter: config.json and weights")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL with `messages` or `text` on each line")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="end an answer after N tokens")
    parser.add_argument("--config", metavar="FILE", help="take target and prompts from this TOML file")
    parser.add_argument("--run", type=Path, metavar="DIR", help="with --config: the run whose latest drafter is taken")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a key of --config")
    return parser.parse_intermixed_args()


def start(arguments: argparse.Namespace) -> None:
    settings = settings_of_config(arguments) if arguments.config else settings_of_flags(arguments)
    from speculate.run import Job, run

    run(Job(**settings, json=arguments.json))


def settings_of_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Target and prompts from the configuration, the drafter from its run."""
    from shards.config import TargetConfig
    from shards.config_file import ConfigFile
    from shards.sections import SpeculateConfig

    file = ConfigFile.load(arguments.config, arguments.overrides, {"speculate": flags_of_section(arguments)})
    target = file.section("target", TargetConfig)
    return {
        "target": arguments.target or Path(target.path),
        "dtype": target.dtype,
        "speculate": file.section("speculate", SpeculateConfig),
        "drafter": arguments.drafter or latest_drafter(arguments.run or Path("runs") / file.path.stem),
    }


def latest_drafter(run: Path) -> Path:
    from train.checkpoint import latest_checkpoint

    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise UsageError(f"{run} has no checkpoint: `make train` makes one, or --drafter names a drafter")
    return checkpoint


def settings_of_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    from shards.config import build_section
    from shards.sections import SpeculateConfig

    for name in ("target", "drafter", "prompts"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing: name it, or give --config")
    if arguments.run or arguments.overrides:
        name = "--run" if arguments.run else f"the override {arguments.overrides[0]!r}"
        raise UsageError(f"{name} has no effect without --config")
    section = build_section("speculate", SpeculateConfig, flags_of_section(arguments), Path("the command line"))
    return {"target": arguments.target, "dtype": None, "drafter": arguments.drafter, "speculate": section}


def flags_of_section(arguments: argparse.Namespace) -> dict[str, Any]:
    flags = {key: getattr(arguments, key) for key in ("prompts", "num_prompts", "max_new_tokens")}
    return {key: value for key, value in flags.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
