"""The data to a plan: the same however many processes tokenise it, and nothing left out without being listed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import extract.planning
from extract.job import Job
from extract.planning import Planned, tokenised_batches
from extract.prepare import LEFT_OUT_FILE, prepare
from extract.tokenise import Encoder
from shards.documents import COLUMNS
from shards.errors import RunError, UsageError
from shards.schema import PLAN_COLUMNS
from tests.extract.tiny import ROW_TOKENS, chat, job_of, write_jsonl, write_project


def plan(job: Job, directory: Path | None = None, num_processes: int | None = None) -> Planned:
    encoder = Encoder.load(Path(job.target.path), job.data.chat_template_kwargs)
    return Planned(job, encoder, directory=directory, num_processes=num_processes)


def test_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 4 records, of which only the first is tokenised in this process."""
    monkeypatch.setattr(extract.planning, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(extract.planning, "FEW_BATCHES", 1)
    job = Job.load(write_project(tmp_path))
    one, two = (plan(job, tmp_path, num_processes) for num_processes in (1, 2))
    assert one.plan == two.plan
    arrays = [planned.layout.arrays(planned.tokenised, tmp_path) for planned in (one, two)]
    for name in PLAN_COLUMNS:
        np.testing.assert_array_equal(*(getattr(columns, name) for columns in arrays))
    for name in COLUMNS:
        np.testing.assert_array_equal(*(getattr(planned.tokenised, name) for planned in (one, two)))
    with open(tmp_path / "data.jsonl", "a", encoding="utf-8") as file:
        file.write("not JSON\n" + '{"text": "fine"}\n' * 50 + "neither\n")
    with pytest.raises(UsageError, match="line 41 is not valid JSON"):
        plan(job, None, 2)


def test_sizes_need_no_tokens(tmp_path: Path) -> None:
    job = Job.load(write_project(tmp_path))
    assert plan(job).plan == plan(job, tmp_path).plan


def test_what_is_left_out_is_listed_in_the_cache(tmp_path: Path) -> None:
    write_project(tmp_path)
    values = [
        chat("a", "bcd"),
        {"text": ""},
        chat("a", "bcd") | {"source": "copies"},
        {"text": "a" * (ROW_TOKENS + 1)},
        {"text": "a" * ROW_TOKENS},
        {"input_ids": [9, 300], "loss_mask": [1, 1]},
        *({"text": "z" * n} for n in range(2, 40)),
    ]
    write_jsonl(tmp_path / "data.jsonl", values)
    manifest = prepare(job_of(tmp_path))
    lines = (tmp_path / "cache" / "plan" / LEFT_OUT_FILE).read_text(encoding="utf-8").splitlines()
    listed = [json.loads(line) for line in lines]
    where = f"{tmp_path / 'data.jsonl'}, line"
    assert listed == [
        {"record": 1, "reason": "empty", "where": f"{where} 2"},
        {"record": 2, "reason": "duplicate", "where": f"{where} 3"},
        {"record": 4, "reason": "duplicate", "where": f"{where} 5"},  # of what is left of the one before
        {"record": 5, "reason": "outside_embedding", "where": f"{where} 6"},
    ]
    assert manifest.plan.num_left_out == {"duplicate": 2, "empty": 1, "outside_embedding": 1}
    assert manifest.plan.sources == ("data",)
    assert f"plan/{LEFT_OUT_FILE}" in manifest.checksums


def test_sources_come_from_the_field_that_is_named(tmp_path: Path) -> None:
    config = write_project(tmp_path)
    write_jsonl(tmp_path / "data.jsonl", [{"text": "abc" * n, "from": "xy"[n % 2]} for n in range(1, 20)])
    assert plan(Job.load(config, ["data.source_field=from"])).plan.sources == ("x", "y")


def test_the_mix_is_part_of_the_configuration(tmp_path: Path) -> None:
    job = Job.load(write_project(tmp_path), ["data.mix={chats = 1, texts = 0}"])
    planned = plan(job).plan
    assert planned.sources == ("chats",)
    assert planned.num_left_out == {"mix": 20}
    with pytest.raises(UsageError, match=r"data\.mix names the source 'chat', of which .* did you mean chats"):
        plan(Job.load(tmp_path / "config.toml", ["data.mix={chat = 1, texts = 1}"]))


def test_a_process_that_dies_ends_the_command_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract.planning, "FEW_BATCHES", 0)
    with pytest.raises(RunError, match="a process that tokenised was ended from outside"):
        list(tokenised_batches(iter([1, 1, 1]), os._exit, 2))
