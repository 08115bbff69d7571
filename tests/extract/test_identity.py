"""Content hashes: a tokenizer is told apart by whichever files it comes in."""

from pathlib import Path

import pytest

from benchmarks.random_target import make_random_target
from extract.identity import hash_tokenizer
from extract.tokenise import Encoder
from shards.errors import UsageError
from tests.extract.tiny import SHAPES


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("target")
    make_random_target(folder, SHAPES["qwen3"])
    return Encoder.load(folder).tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "spiece.model", "tekken.json", "of its class"])
def test_every_kind_of_vocabulary_is_hashed(
    tokenizer: object, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "of its class":
        monkeypatch.setattr(tokenizer, "vocab_files_names", {"vocab_file": name})
    hashes = set()
    for content in ("a", "b"):
        (tmp_path / name).write_text(content)
        hashes.add(hash_tokenizer(tmp_path, tokenizer))
    assert len(hashes) == 2


def test_a_tokenizer_in_no_known_file_is_refused(tokenizer: object, tmp_path: Path) -> None:
    (tmp_path / "words.bin").write_text("a")
    with pytest.raises(UsageError, match="has no tokenizer in a file that is known: ") as error:
        hash_tokenizer(tmp_path, tokenizer)
    assert "\n" not in str(error.value)
