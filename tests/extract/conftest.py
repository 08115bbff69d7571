"""A tiny project and its cache, made once for all tests of extraction that need one."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from extract.job import Job
from tests.extract.tiny import extract_here, write_config, write_project


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    """`main` takes them over for its process, which here is the tests'."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, data and config, with a complete cache beside them; tests copy what they change."""
    directory = tmp_path_factory.mktemp("project")
    job = Job.load(write_project(directory), directory=directory / "cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        extract_here(job, monkeypatch)
    return directory


@pytest.fixture
def copy(project: Path, tmp_path: Path) -> Path:
    """The project without its cache, to change."""
    shutil.copytree(project, tmp_path / "copy", ignore=shutil.ignore_patterns("cache"))
    write_config(tmp_path / "copy")
    return tmp_path / "copy"
