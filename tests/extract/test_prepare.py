"""A quick try: only the first records of the data are read."""

from pathlib import Path

import pytest

from extract.job import Job
from extract.planning import Planned
from extract.tokenise import Encoder
from shards.errors import UsageError
from tests.extract.tiny import write_project


def test_max_documents_reads_no_further(tmp_path: Path) -> None:
    config = write_project(tmp_path)
    with open(tmp_path / "data.jsonl", "a", encoding="utf-8") as file:
        file.write("not JSON\n")
    encoder = Encoder.load(tmp_path / "target")
    few = Planned(Job.load(config, ["data.max_documents=7"]), encoder, directory=None)
    assert few.plan.num_documents == 7
    assert few.tokenised.record.tolist() == list(range(7))
    with pytest.raises(UsageError, match="not valid JSON"):
        Planned(Job.load(config), encoder, directory=None)


def test_max_documents_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.max_documents is 0"):
        Job.load(write_project(tmp_path), ["data.max_documents=0"])
