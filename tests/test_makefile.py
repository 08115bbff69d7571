"""What make would run (`make -n`), from a fresh clone and later."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = (
    ".venv/bin/python -m train --config configs/smollm2-135m.toml --cache caches/smollm2-135m --run runs/smollm2-135m"
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def run_make(clone: Path, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """As from a shell, whatever the make says that runs these tests."""
    of_make = {"PYTHON", "CONFIG", "CACHE", "RUN", "SET", "TORCH", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS"}
    environment = {key: value for key, value in os.environ.items() if key not in of_make}
    process = subprocess.run(["make", *arguments], cwd=clone, env=environment, capture_output=True, text=True)
    assert (process.returncode != 0) == fails, process.stderr
    return process


def planned(clone: Path, *arguments: str) -> list[str]:
    """The commands that make would run, without those that only print."""
    lines = run_make(clone, "-n", *arguments).stdout.splitlines()
    return [line for line in lines if not line.startswith("echo")]


def make_environment(clone: Path) -> None:
    """As `make setup` leaves it, for all that make looks at."""
    (ready,) = [line.removeprefix("touch ") for line in planned(clone, "setup") if line.startswith("touch ")]
    (clone / ready).parent.mkdir(exist_ok=True)
    (clone / ready).touch()


def test_help_comes_first_and_names_every_command(clone: Path) -> None:
    process = run_make(clone)
    for command in ("setup", "extract", "train", "stats", "verify", "evaluate", "test", "test-gpu", "lint"):
        assert f"make {command} " in process.stdout or f"make {command}:" in process.stdout


def test_a_fresh_clone_does_all_in_order(clone: Path) -> None:
    commands = planned(clone, "train")
    torch = commands.index(".venv/bin/python -m pip install --quiet torch==2.13.0")
    others = commands.index(".venv/bin/python -m pip install --quiet --group run --group test")
    assert torch < others
    assert commands[-4:] == [
        f"{TRAIN} --resume --preflight ",
        ".venv/bin/python -m extract.embedded",
        ".venv/bin/python -m extract --config configs/smollm2-135m.toml --cache caches/smollm2-135m ",
        f"{TRAIN} --resume ",
    ]


def test_a_complete_cache_is_compared_and_trained_on(clone: Path) -> None:
    """What it was made from is not built again, should it have gone."""
    make_environment(clone)
    (clone / "caches/smollm2-135m").mkdir(parents=True)
    (clone / "caches/smollm2-135m/complete.json").touch()
    assert planned(clone, "train") == [
        ".venv/bin/python -m extract --config configs/smollm2-135m.toml --cache caches/smollm2-135m ",
        f"{TRAIN} --resume ",
    ]


def test_the_environment_is_made_again_when_its_requirements_change(clone: Path) -> None:
    make_environment(clone)
    assert planned(clone, "setup") == ["make: Nothing to be done for 'setup'."]
    assert "torch==2.12.0" in " ".join(planned(clone, "setup", "TORCH=2.12.0"))
    with open(clone / "pyproject.toml", "a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert "torch==2.13.0" in " ".join(planned(clone, "setup"))


def test_an_environment_of_the_users_is_completed_without_touching_torch(clone: Path) -> None:
    commands = planned(clone, "train", "PYTHON=/opt/python")
    installs = [line for line in commands if "pip install" in line]
    assert installs == [
        "/opt/python -m pip install --quiet 'pip>=25.1'",
        "/opt/python -m pip install --quiet --group run --group test",
    ]
    assert not any(".venv" in line for line in commands)


def test_the_embedded_default_is_only_built_for_configs_that_name_it(clone: Path) -> None:
    make_environment(clone)
    config = "--config configs/qwen3-8b.toml"
    train = f".venv/bin/python -m train {config} --cache caches/qwen3-8b --run runs/qwen3-8b --resume "
    assert planned(clone, "train", "CONFIG=configs/qwen3-8b.toml") == [
        f"{train}--preflight ",
        f".venv/bin/python -m extract {config} --cache caches/qwen3-8b ",
        train,
    ]


def test_overrides_reach_the_programs_with_their_quotes(clone: Path, tmp_path: Path) -> None:
    """Run for real, with a Python that is asked for its last argument."""
    overrides = """train.lr=1e-4 data.files=["a b.jsonl", 'c.jsonl'] cache.layers=[1, 8] target.path=$HOME/x"""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor last; do :; done\ncase "$2" in extract|train) echo "$last" ;; esac\n')
    python.chmod(0o755)
    process = run_make(clone, "train", f"PYTHON={python}", f"SET={overrides}", "CONFIG=configs/qwen3-8b.toml", "-s")
    assert process.stdout.splitlines() == [overrides] * 3


def test_a_python_that_is_not_there_is_one_sentence(clone: Path, tmp_path: Path) -> None:
    process = run_make(clone, "setup", f"PYTHON={tmp_path}/none", fails=True)
    error, of_make = process.stderr.splitlines()
    assert error.startswith(f"error: PYTHON={tmp_path}/none is no Python that can be run: ")
    assert of_make.startswith("make: ***")


def test_a_missing_torch_is_one_sentence(clone: Path, tmp_path: Path) -> None:
    """A Python that is new enough and has nothing installed: this one, without site-packages."""
    python = tmp_path / "bare-python"
    python.write_text(f'#!/bin/sh\nexec {shutil.which("python3")} -S -I "$@"\n')
    python.chmod(0o755)
    process = run_make(clone, "setup", f"PYTHON={python}", fails=True)
    assert "has no torch 2.11 or newer" in process.stderr
