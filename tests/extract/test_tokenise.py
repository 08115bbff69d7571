"""Token ids and loss masks: the answer and its end-of-turn token, nothing else; and what is left out, by reason."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_target import CHATML, MASK_ID, MIN_VOCAB_SIZE, make_random_target
from extract.data import Record
from extract.tokenise import Encoder
from shards.documents import Batch, Document, LeftOut, Limits, fit
from shards.errors import UsageError
from tests.extract.tiny import SHAPES, chat

LIMITS = Limits(
    row_tokens=100, over_length="truncate", min_supervised_tokens=3, mask_token_id=MASK_ID, vocab_size=MIN_VOCAB_SIZE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenise") / "target"
    make_random_target(folder, SHAPES["qwen3"])
    return folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return Encoder.load(folder)


def with_template(folder: Path, tmp_path: Path, template: str | None) -> Encoder:
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Encoder.load(tmp_path)


def record(value: dict[str, Any], index: int = 0) -> Record:
    return Record(index=index, where="w", source="s", messages=value.get("messages"), text=value.get("text"))


def document(encoder: Encoder, value: dict[str, Any]) -> Document:
    encoded = encoder.encode(record(value))
    assert isinstance(encoded, Document), encoded
    return encoded


def marked(encoder: Encoder, document: Document) -> str:
    """The text of a document with its supervised stretches in brackets."""
    pieces, inside = [], 0
    for token_id, supervised in zip(document.token_ids, document.loss_mask, strict=True):
        pieces.append(("", "[", "]")[int(supervised) - inside])
        pieces.append(encoder.tokenizer.decode([int(token_id)]))
        inside = int(supervised)
    return "".join(pieces) + "]" * inside


GOLDEN = {
    "one turn": (
        chat("Hi", "Yo"),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yo<|im_end|>]\n",
    ),
    "several turns": (
        chat("a", "b", "c", "dd"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[dd<|im_end|>]\n",
    ),
    "system": (
        chat("a", "b", system="Be."),
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n",
    ),
    "the user has the last word": (
        chat("a", "b", "c"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n<|im_start|>user\nc<|im_end|>\n",
    ),
    "the user spells a header": (
        chat("assistant\nx", "b"),
        "<|im_start|>user\nassistant\nx<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n",
    ),
    "an empty answer": (
        chat("a", ""),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[<|im_end|>]\n",
    ),
    "text": ({"text": "Hi\nyou"}, "[Hi\nyou]"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_masks(encoder: Encoder, name: str) -> None:
    value, expected = GOLDEN[name]
    assert marked(encoder, document(encoder, value)) == expected


def test_what_a_template_puts_before_an_answer_belongs_to_it(folder: Path, tmp_path: Path) -> None:
    """As Qwen3's does: the target is prompted without the thought, so it says it itself."""
    thinking = CHATML.replace(
        "message['content']", "('<t></t>' if message.role == 'assistant' else '') + message.content"
    )
    encoder = with_template(folder, tmp_path, thinking)
    assert marked(encoder, document(encoder, chat("a", "b"))).endswith("assistant\n[<t></t>b<|im_end|>]\n")


def test_a_template_that_rewrites_earlier_turns_is_followed(folder: Path, tmp_path: Path) -> None:
    """As Qwen3's does: thoughts of earlier turns are gone once the next one begins."""
    template = CHATML.replace(
        "message['content']", "(message.content if loop.last else message.content.split('/')[-1])"
    )
    encoder = with_template(folder, tmp_path, template)
    text = marked(encoder, document(encoder, chat("a", "t/b", "c", "t/d")))
    assert text.count("[") == 2
    assert "\n[b<|im_end|>]\n" in text
    assert "\n[t/d<|im_end|>]\n" in text


UNCLEAR = {
    "the prompt is not a prefix": ("{{ messages | length }}" + CHATML, "answer_unclear"),
    "the answer has no end": (
        CHATML.replace("'<|im_end|>\n'", "('<|im_end|>' if messages | length == 2 else '') + '\n'"),
        "answer_without_end",
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_mask_that_cannot_be_told_is_not_guessed(folder: Path, tmp_path: Path, name: str) -> None:
    template, reason = UNCLEAR[name]
    encoder = with_template(folder, tmp_path, template)
    assert encoder.encode(record(chat("a", "b", "c", "d"), 5)) == (5, reason)


def test_an_answer_that_spells_the_end_of_turn_is_not_guessed(encoder: Encoder) -> None:
    assert encoder.encode(record(chat("a", "b<|im_end|>c"))) == (0, "answer_spells_end")
    thought = {"role": "assistant", "content": "b", "reasoning_content": "<|im_end|>"}
    assert encoder.encode(record({"messages": [thought]})) == (0, "answer_spells_end")


def test_a_template_may_refuse_a_conversation(folder: Path, tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    encoder = with_template(folder, tmp_path, refusing)
    assert encoder.encode(record(chat("a", "b", system="c"))) == (0, "template_refused")
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert encoder.encode(record({"messages": [called]})) == (0, "template_refused")  # it adds strings to content


def test_chats_need_a_template(folder: Path, tmp_path: Path) -> None:
    encoder = with_template(folder, tmp_path, None)
    assert document(encoder, {"text": "abc"}).loss_mask.tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="no chat template"):
        encoder.encode(record(chat("a", "b")))


def test_a_template_without_an_end_of_turn_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ends no answer with a special token"):
        with_template(folder, tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer can be loaded from target\.path"):
        Encoder.load(tmp_path)


def batch_of(encoder: Encoder, values: list[dict[str, Any]], limits: Limits = LIMITS) -> Batch:
    return Batch.of((encoder.encode(record(value, i)) for i, value in enumerate(values)), limits, seed=0)


def test_records_are_counted_by_what_became_of_them(encoder: Encoder) -> None:
    values = [
        chat("a", "bcd"),
        {"text": ""},
        {"text": "a <|mask|> b"},
        chat("nobody answers"),
        {"text": "x"},
        {"text": "y" * 101},
        chat("z" * 90, "the answer is cut off"),
        chat("a", "b<|im_end|>"),
        chat("a", "b"),
    ]
    batch = batch_of(encoder, values)
    assert batch.record.tolist() == [0, 5]
    assert batch.num_tokens.tolist()[1] == LIMITS.row_tokens
    assert batch.num_supervised.tolist() == [4, LIMITS.row_tokens]
    assert batch.num_truncated == 1
    few = dict.fromkeys((3, 4, 6, 8), "few_supervised")
    assert dict(batch.left_out) == few | {1: "empty", 2: "mask_token", 7: "answer_spells_end"}


def test_over_length_documents_can_be_dropped(encoder: Encoder) -> None:
    limits = dataclasses.replace(LIMITS, over_length="drop")
    batch = batch_of(encoder, [{"text": "y" * n} for n in (99, 100, 101)], limits)
    assert batch.record.tolist() == [0, 1]
    assert batch.left_out == ((2, "over_length"),)
    assert batch.num_truncated == 0


def test_a_cut_answer_keeps_the_mask_of_what_is_left(encoder: Encoder) -> None:
    whole = document(encoder, chat("a", "b" * 200))
    cut = fit(whole, LIMITS)
    assert cut.loss_mask.tolist() == whole.loss_mask[:100].tolist()
    assert cut.loss_mask[-1] == 1


def test_ids_beyond_the_embedding_are_left_out() -> None:
    ids = np.array([5, MIN_VOCAB_SIZE, 6], np.int32)
    with pytest.raises(LeftOut, match="outside_embedding"):
        fit(Document(record=0, source="s", token_ids=ids, loss_mask=np.ones(3, np.uint8)), LIMITS)


@pytest.mark.parametrize(("mask", "has_anchor"), [([1, 0, 1, 0, 1], False), ([0, 1, 1, 0, 0], True)])
def test_an_anchor_needs_a_supervised_successor(mask: list[int], has_anchor: bool) -> None:
    ids, limits = np.arange(4, 9, dtype=np.int32), dataclasses.replace(LIMITS, min_supervised_tokens=1)
    document = Document(record=0, source="s", token_ids=ids, loss_mask=np.array(mask, np.uint8))
    if has_anchor:
        assert fit(document, limits).loss_mask.tolist() == mask
    else:
        with pytest.raises(LeftOut, match="no_anchor"):
            fit(document, limits)
