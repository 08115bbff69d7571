"""What make runs, from a fresh clone and later: what it would (`make -n`), and set-up for real.

Nothing is installed: in the environments that set-up makes here pip is a few lines that write down what they are asked.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = (
    ".venv/bin/python -m train --config configs/smollm2-135m.toml --cache caches/smollm2-135m --run runs/smollm2-135m"
)
INSTALLS = ["--upgrade pip", "torch==2.13.0", "--group run --group test"]  # of a set-up, in order

# A `python3` whose `-m venv` leaves out the real pip, which takes seconds to install.
BASE_PYTHON = """\
#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
{python} -m venv --without-pip "$3" && cp -r {pip} "$3"/lib/python3.*/site-packages
"""
# Says where it was asked to install what. With HOLD, a pipe, it is in the middle of torch until that is closed.
PIP = """\
import os, sys
if "install" in sys.argv:
    words = [word for word in sys.argv[1:] if word not in ("install", "--quiet")]
    with open(os.environ["PIP_LOG"], "a") as log:
        print(sys.prefix, *words, file=log)
    if "HOLD" in os.environ and words[0].startswith("torch"):
        print("in the middle", flush=True)
        open(os.environ["HOLD"]).read()
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def environment() -> dict[str, str]:
    """As from a shell, whatever make runs these tests; and a real pip, should one run, installs nothing."""
    of_make = {"PYTHON", "CONFIG", "CACHE", "RUN", "SET", "TORCH", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS"}
    kept = {key: value for key, value in os.environ.items() if key not in of_make and not key.startswith("PIP_")}
    return kept | {"PIP_REQUIRE_VIRTUALENV": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def run_make(
    clone: Path, *arguments: str, fails: bool = False, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(["make", *arguments], cwd=clone, env=env or environment(), capture_output=True, text=True)
    assert (process.returncode != 0) == fails, process.stderr
    return process


def planned(clone: Path, *arguments: str) -> list[str]:
    """The commands that make would run, without those that only print."""
    lines = run_make(clone, "-n", *arguments).stdout.splitlines()
    return [line for line in lines if not line.startswith("echo")]


def make_environment(clone: Path, python: str = "") -> None:
    """As `make setup` leaves it, for all that make looks at; `python` is what its interpreter, a script, does."""
    (ready,) = [
        line.removeprefix("touch ") for line in planned(clone, "setup") if line.startswith("touch .venv/.ready")
    ]
    (clone / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (clone / ready).touch()
    (clone / ".venv/bin/python").write_text(f"#!/bin/sh\n{python}\n")
    (clone / ".venv/bin/python").chmod(0o755)


class Setup:
    """`make setup` in a clone, with a Python that makes environments in which pip only writes down what it is asked."""

    def __init__(self, clone: Path, folder: Path) -> None:
        self.clone, self.log, self.hold = clone, folder / "log", folder / "hold"
        self.env = environment() | {"PATH": f"{folder}:{os.environ['PATH']}", "PIP_LOG": str(self.log)}
        (folder / "pip").mkdir(parents=True)
        (folder / "pip/__init__.py").touch()
        (folder / "pip/__main__.py").write_text(PIP)
        (folder / "python3").write_text(BASE_PYTHON.format(python=sys.executable, pip=folder / "pip"))
        (folder / "python3").chmod(0o755)
        os.mkfifo(self.hold)

    def run(self, *, fails: bool = False) -> subprocess.CompletedProcess[str]:
        return run_make(self.clone, "setup", fails=fails, env=self.env)

    @contextlib.contextmanager
    def held(self) -> Iterator[subprocess.Popen[str]]:
        """One that is in the middle of torch until the end of the context."""
        holding = os.open(self.hold, os.O_RDWR)
        try:
            process = self.start()
            assert process.stdout is not None
            assert "in the middle\n" in process.stdout, process.communicate()
            yield process
        finally:
            os.close(holding)

    def start(self) -> subprocess.Popen[str]:
        """In a process group of its own, as a shell does it."""
        return subprocess.Popen(
            ["make", "setup"],
            cwd=self.clone,
            env=self.env | {"HOLD": str(self.hold)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def installed(self) -> list[str]:
        """What pip was asked for since the last time, each time in .venv."""
        lines = self.log.read_text().splitlines()
        self.log.unlink()
        place = f"{self.clone}/.venv "
        assert all(line.startswith(place) for line in lines), lines
        return [line.removeprefix(place) for line in lines]


@pytest.fixture
def setup(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(clone, tmp_path_factory.mktemp("base"))


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
    assert process.stdout.splitlines()[-3:] == [overrides] * 3


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


def test_set_up_says_what_it_installs_and_is_done_once(setup: Setup) -> None:
    process = setup.run()
    assert [line.partition(":")[0] for line in process.stdout.splitlines()] == ["setup"] * 3
    assert "installing torch 2.13.0: 0.2 GB" in process.stdout
    assert setup.installed() == INSTALLS
    assert setup.run().stdout == "make: Nothing to be done for 'setup'.\n"


@pytest.mark.parametrize("lost", ["pyvenv.cfg", "bin/python"])
def test_an_environment_that_is_none_any_more_is_made_again(setup: Setup, lost: str) -> None:
    """Without pyvenv.cfg its interpreter is the base Python: nothing may be installed there."""
    setup.run()
    setup.installed()
    (setup.clone / ".venv" / lost).unlink()
    setup.run()
    assert setup.installed() == INSTALLS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_set_up_that_was_stopped_is_done_by_the_next(setup: Setup, number: signal.Signals) -> None:
    """From the beginning: pip takes a package for installed once its metadata is there."""
    with setup.held() as process:
        os.killpg(process.pid, number)
        _, error = process.communicate()
    assert process.returncode != 0, error
    setup.installed()
    junk = setup.clone / ".venv/junk"
    junk.touch()
    setup.run()
    assert setup.installed() == INSTALLS
    assert not junk.exists()


def test_a_second_set_up_waits_and_finds_all_done(setup: Setup) -> None:
    with setup.held() as first:
        second = setup.start()
        assert second.stdout is not None
        assert second.stdout.readline() == "setup: another make is setting up the environment: waiting for it\n"
    for process in (first, second):
        _, error = process.communicate()
        assert process.returncode == 0, error
    assert setup.installed() == INSTALLS


def test_pip_is_kept_out_of_the_base_python(clone: Path) -> None:
    """Whatever happened to .venv since make looked at it."""
    make_environment(clone, 'echo "$PIP_REQUIRE_VIRTUALENV" "$@"')
    without = {key: value for key, value in environment().items() if not key.startswith("PIP_")}
    (clone / ".venv/bin/python").write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$PIP_REQUIRE_VIRTUALENV" "$@"\n')
    process = run_make(clone, "test-kernels", env=without)
    assert "\n1 -m pip install --quiet --group kernels\n" in process.stdout


def test_a_venv_in_a_place_that_is_no_directory_of_its_own_is_refused(setup: Setup, tmp_path: Path) -> None:
    venv = setup.clone / ".venv"
    venv.touch()
    assert setup.run(fails=True).stderr.startswith("error: .venv is no directory")
    venv.unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/precious").touch()
    venv.symlink_to(tmp_path / "elsewhere")
    assert setup.run(fails=True).stderr.startswith(
        f"error: .venv is a link to {tmp_path}/elsewhere, where make installs"
    )
    assert [path.name for path in venv.iterdir()] == ["precious"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_checkout_that_cannot_be_written_to_is_one_sentence(setup: Setup) -> None:
    setup.clone.chmod(0o555)
    error, of_make = setup.run(fails=True).stderr.splitlines()
    assert error.startswith(f"error: {setup.clone} can't be written to: ")
    assert of_make.startswith("make: ***")


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        (
            "CONFIG=",
            "CONFIG= is empty, as from a shell variable that is not set: give it a value, or leave CONFIG= out",
        ),
        ("CACHE=", "CACHE= is empty"),
        ("RUN= ", "RUN= is empty"),
        ("PYTHON=", "PYTHON= is empty"),
        ("TORCH=", "TORCH= is empty"),
        ("CONFIG=none.toml", "CONFIG=none.toml does not exist: name a TOML file, see configs/"),
        ("CONFIG=configs", "CONFIG=configs is a directory: name a TOML file in it"),
        ("CACHE=/a disk/cache", "CACHE=/a disk/cache has a space in it"),
        ("RUN=runs/it's", "RUN=runs/it's has a ' in it"),
        ("RUN=runs/a;b", "RUN=runs/a;b has a ; in it"),
    ],
)
def test_a_value_that_make_cannot_take_is_one_sentence(clone: Path, argument: str, sentence: str) -> None:
    process = run_make(clone, "train", argument, fails=True)
    (error,) = process.stderr.splitlines()
    assert sentence in error
    assert process.stdout == ""
