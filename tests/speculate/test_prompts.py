"""Prompts: what the target is asked, and which lines are no prompts."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from extract.tokenise import Encoder
from shards.errors import UsageError
from speculate.prompts import read_prompts
from tests.speculate.conftest import Pair


@pytest.fixture(scope="module")
def encoder(qwen3: Pair) -> Encoder:
    return Encoder.load(qwen3.target_folder)


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_chats_end_where_the_answer_begins_and_texts_stay_as_they_are(tmp_path: Path, encoder: Encoder) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "hi"}]}, "", {"text": "once"})
    chat, text = read_prompts(path, None, encoder)
    decode = encoder.tokenizer.decode
    assert decode(chat.token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert decode(text.token_ids) == "once"
    assert (chat.where, text.where) == (f"{path}, line 1", f"{path}, line 3")


def test_special_tokens_are_added_to_texts_only(tmp_path: Path, qwen3: Pair) -> None:
    """A template writes its own."""
    encoder = Encoder.load(qwen3.target_folder)
    begin = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    encoder.tokenizer.backend_tokenizer.post_processor = begin
    path = write(tmp_path, {"messages": [{"role": "user", "content": "hi"}]}, {"text": "once"})
    chat, text = read_prompts(path, None, encoder)
    assert chat.token_ids.count(0) == 0
    assert text.token_ids.index(0) == 0


def test_only_the_first_are_taken(tmp_path: Path, encoder: Encoder) -> None:
    path = write(tmp_path, {"text": "a"}, {"text": "b"}, "not reached")
    assert len(read_prompts(path, 2, encoder)) == 2
    assert len(read_prompts(write(tmp_path, {"text": "a"}), 9, encoder)) == 1


BAD_LINES = {
    "line 2 is not valid JSON": "{",
    "line 2 must have `messages`, ": {"question": "why"},
    "line 2: text is 3": {"text": 3},
    "line 2 has no tokens": {"text": ""},
    "line 2 ends with the assistant's turn": {"messages": [{"role": "assistant", "content": "hi"}]},
    r"line 2: messages\[0\].content": {"messages": [{"role": "user"}]},
}


@pytest.mark.parametrize("message", BAD_LINES)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, encoder: Encoder, message: str) -> None:
    path = write(tmp_path, {"text": "fine"}, BAD_LINES[message])
    with pytest.raises(UsageError, match=message) as error:
        read_prompts(path, None, encoder)
    assert str(path) in str(error.value)


def test_files_without_prompts_are_refused(tmp_path: Path, encoder: Encoder) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl", None, encoder)
    with pytest.raises(UsageError, match="has no prompts"):
        read_prompts(write(tmp_path), None, encoder)


def test_a_chat_needs_a_template(tmp_path: Path, qwen3: Pair) -> None:
    encoder = Encoder.load(qwen3.target_folder)
    encoder.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        read_prompts(write(tmp_path, {"messages": [{"role": "user", "content": "hi"}]}), None, encoder)


def test_what_the_template_refuses_is_named(tmp_path: Path, qwen3: Pair) -> None:
    encoder = Encoder.load(qwen3.target_folder)
    encoder.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(UsageError, match="line 1 is refused by the target's chat template: no such role"):
        read_prompts(write(tmp_path, {"messages": [{"role": "judge", "content": "hi"}]}), None, encoder)
