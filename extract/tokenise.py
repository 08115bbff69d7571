"""Records to documents: token ids and a loss mask, as DFLASH.md ("Loss mask") defines it.

A chat is rendered by the tokenizer's own template, as shipped. Supervised are each assistant turn's answer and its
end-of-turn token. Where an answer begins is what the template marks as generated ({% generation %}); if it marks
nothing, it is found by comparing token ids with those of the conversation before the answer, which is what the target
would be prompted with, or with the header that the template gives to earlier turns. Where no comparison holds the mask
can't be trusted: the record is left out and counted.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from extract.data import Record
from extract.mask import mask_answers, mask_marked
from shards.config import Scalar
from shards.documents import Document, LeftOut, Reason
from shards.errors import UsageError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What templates raise on messages they were not made for: their own errors, and Python's on fields of another type.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class Chats:
    """What a chat template implies; read off conversations of a few turns."""

    options: Mapping[str, Scalar]  # of the template: data.chat_template_kwargs
    has_marks: bool
    end_of_turn_id: int
    header: str | None  # what stands before an answer that is not the last, after the turns before it
    is_prompt_header: bool  # the target is prompted with the same


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer with what its chat template implies."""

    tokenizer: PreTrainedTokenizerBase
    chats: Chats | None  # None: there is no chat template

    @classmethod
    def load(cls, folder: Path, options: Mapping[str, Scalar] | None = None) -> Self:
        """Load the tokenizer of the target in `folder`, its template with `options`; UsageError if there is none."""
        if not folder.is_dir():
            raise UsageError(f"target.path is {folder}, which is no folder: name one in transformers' layout")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"no tokenizer can be loaded from target.path {folder}: {first_line(error)}") from None
        has_template = tokenizer.chat_template is not None
        return cls(tokenizer=tokenizer, chats=_read_template(tokenizer, options or {}) if has_template else None)

    def encode(self, record: Record) -> Document | tuple[int, Reason]:
        """Tokenise one record; if it has no mask, its index and why."""
        try:
            token_ids, loss_mask = self._encode(record)
        except LeftOut as outcome:
            return record.index, outcome.reason
        ids = np.asarray(token_ids, np.int32)
        return Document(record=record.index, source=record.source, token_ids=ids, loss_mask=loss_mask)

    def _encode(self, record: Record) -> tuple[Sequence[int] | np.ndarray, np.ndarray]:
        if record.token_ids is not None:
            return record.token_ids, record.loss_mask
        if record.text is not None:
            token_ids = self.tokenizer(record.text)["input_ids"]
            return token_ids, np.ones(len(token_ids), np.uint8)
        if self.chats is None:
            raise UsageError(
                f"{record.where} is a chat, but the target's tokenizer has no chat template: use `text` records"
            )
        return self._encode_chat(record, self.chats)

    def _encode_chat(self, record: Record, chats: Chats) -> tuple[list[int], np.ndarray]:
        messages = record.messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        end_of_turn = self.tokenizer.convert_ids_to_tokens(chats.end_of_turn_id)
        if any(end_of_turn in json.dumps(messages[i], ensure_ascii=False) for i in answers):
            raise LeftOut("answer_spells_end")
        options = {"tools": record.tools, **chats.options}
        try:
            if chats.has_marks:
                marked = self.tokenizer.apply_chat_template(
                    messages, return_dict=True, return_assistant_tokens_mask=True, **options
                )
                return marked["input_ids"], mask_marked(
                    marked["input_ids"], marked["assistant_masks"], chats.end_of_turn_id
                )
            text = _render(self.tokenizer, messages, options)
            choices = [self._prompts(messages[:i], text, chats, options) for i in answers]
        except TEMPLATE_ERRORS:
            raise LeftOut("template_refused") from None
        token_ids, *prompts = self.tokenizer([text, *itertools.chain(*choices)], add_special_tokens=False)["input_ids"]
        remaining = iter(prompts)
        return token_ids, mask_answers(
            token_ids, [[next(remaining) for _ in texts] for texts in choices], chats.end_of_turn_id
        )

    def _prompts(
        self, messages: list[dict[str, Any]], text: str, chats: Chats, options: Mapping[str, Any]
    ) -> list[str]:
        """The texts with which an answer after `messages` may be prompted, those with which `text` begins.

        First what the target would be given; then the header of an earlier turn, since templates may take a thought,
        also an empty one, out of earlier turns, and so have another prompt for the last one.
        """
        prompts = [_render(self.tokenizer, messages, options, add_generation_prompt=True)]
        if chats.header is not None and not chats.is_prompt_header and messages:
            prompts.append(_render(self.tokenizer, messages, options) + chats.header)
        return [prompt for prompt in prompts if text.startswith(prompt)]


def first_line(error: BaseException) -> str:
    """Enough of a library's message for one sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: Mapping[str, Any], **more: Any
) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options, **more)


def _read_template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Scalar]) -> Chats:
    """Raises UsageError where the template fails on a plain conversation, or ends no answer by a special token."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        asked = _render(tokenizer, [question], options)
        prompt = _render(tokenizer, [question], options, add_generation_prompt=True)
        turn = _render(tokenizer, [question, answer], options).removeprefix(prompt)
        several = [_render(tokenizer, [question, {**answer, "content": x}, question], options) for x in "bc"]
    except TEMPLATE_ERRORS as error:
        raise UsageError(f"the target's chat template fails on a plain conversation: {first_line(error)}") from None
    num_before = next((i for i, (one, other) in enumerate(zip(*several, strict=False)) if one != other), 0)
    header = several[0][len(asked) : num_before] if several[0][:num_before].startswith(asked) else None
    return Chats(
        options=options,
        has_marks=tokenizer.is_fast and GENERATION_MARK.search(tokenizer.get_chat_template()) is not None,
        end_of_turn_id=_find_end_of_turn(tokenizer, turn),
        header=header,
        is_prompt_header=header is not None and asked + header == prompt,
    )


def _find_end_of_turn(tokenizer: PreTrainedTokenizerBase, turn: str) -> int:
    """The special token that the chat template puts after an answer, read off a `turn`.

    It is the last one: some templates put others before the answer, such as those around an empty thought.
    """
    special_ids = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    found = [id for id in tokenizer(turn, add_special_tokens=False)["input_ids"] if id in special_ids]
    if not found:
        raise UsageError("the target's chat template ends no answer with a special token, so none can be told apart")
    return found[-1]
