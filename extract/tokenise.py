"""Records to documents: token ids and a loss mask, as DFLASH.md ("Loss mask") defines it.

A chat is rendered by the tokenizer's own template, as shipped. Supervised are each assistant turn's answer and its
end-of-turn token; where an answer begins is found by comparing token ids with those of the conversation before it,
which is what the target would be prompted with. Where that comparison fails the mask can't be trusted: the record is
left out and counted. Templates with generation marks get no special treatment.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from extract.data import Record
from shards.documents import Document, LeftOut, Limits, Tokenised, fit
from shards.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer with what its chat template implies."""

    tokenizer: PreTrainedTokenizerBase
    end_of_turn_id: int | None  # None: there is no chat template

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of the target in `folder`; raise UsageError if there is none."""
        if not folder.is_dir():
            raise UsageError(f"target.path is {folder}, which is no folder: name one in transformers' layout")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"no tokenizer can be loaded from target.path {folder}: {first_line(error)}") from None
        if tokenizer.chat_template is None:
            return cls(tokenizer=tokenizer, end_of_turn_id=None)
        return cls(tokenizer=tokenizer, end_of_turn_id=_find_end_of_turn(tokenizer))

    def encode(self, record: Record) -> Document:
        """Tokenise one record; raise LeftOut if it has no tokens or no mask."""
        if record.text is not None:
            token_ids = self.tokenizer(record.text)["input_ids"]
            loss_mask = np.ones(len(token_ids), np.uint8)
        elif record.token_ids is not None:
            token_ids, loss_mask = record.token_ids, record.loss_mask
        else:
            token_ids, loss_mask = self._encode_chat(record.messages)
        ids = np.asarray(token_ids, np.int32)
        return Document(record=record.index, source=record.source, token_ids=ids, loss_mask=loss_mask)

    def _encode_chat(self, messages: list[dict[str, Any]]) -> tuple[list[int], np.ndarray]:
        if self.end_of_turn_id is None:
            raise UsageError("the data has chats, but the target's tokenizer has no chat template: use `text` records")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        end_of_turn = self.tokenizer.convert_ids_to_tokens(self.end_of_turn_id)
        if any(end_of_turn in messages[i]["content"] for i in answers):
            raise LeftOut("mask_unclear")
        try:
            texts = [_render(self.tokenizer, messages)]
            texts += [_render(self.tokenizer, messages[:i], add_generation_prompt=True) for i in answers]
        except jinja2.TemplateError:
            raise LeftOut("template_refused") from None
        token_ids, *prompts = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return token_ids, mask_answers(token_ids, prompts, self.end_of_turn_id)


def mask_answers(token_ids: list[int], prompts: list[list[int]], end_of_turn_id: int) -> np.ndarray:
    """The loss mask of a chat, uint8 [tokens].

    Each of `prompts` is what comes before one answer, in order; each must be a proper prefix of `token_ids`. An answer
    goes to its first `end_of_turn_id`, which must come before the next answer begins. Else: LeftOut("mask_unclear").
    """
    loss_mask = np.zeros(len(token_ids), np.uint8)
    limits = [*(len(prompt) for prompt in prompts[1:]), len(token_ids)]
    for prompt, limit in zip(prompts, limits, strict=False):
        start = len(prompt)
        if start >= limit or token_ids[:start] != prompt or end_of_turn_id not in token_ids[start:limit]:
            raise LeftOut("mask_unclear")
        loss_mask[start : token_ids.index(end_of_turn_id, start) + 1] = 1
    return loss_mask


def tokenise(records: Iterable[Record], encoder: Encoder, limits: Limits) -> Tokenised:
    """Make a document of every record that can be one, and count the others by reason."""
    documents, num_left_out, num_truncated = [], Counter[str](), 0
    for record in records:
        try:
            whole = encoder.encode(record)
            documents.append(fit(whole, limits))
            num_truncated += len(whole.token_ids) > limits.row_tokens
        except LeftOut as left_out:
            num_left_out[left_out.reason] += 1
    return Tokenised(documents=documents, num_left_out=dict(num_left_out), num_truncated=num_truncated)


def first_line(error: BaseException) -> str:
    """Enough of a library's message for one sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def _find_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """The special token that the chat template puts after an answer, read off a conversation of one turn.

    It is the last one: some templates put others before the answer, such as those around an empty thought.
    """
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        prompt = _render(tokenizer, [question], add_generation_prompt=True)
        turn = _render(tokenizer, [question, answer]).removeprefix(prompt)
    except jinja2.TemplateError as error:
        raise UsageError(f"the target's chat template fails on a plain conversation: {first_line(error)}") from None
    special_ids = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    found = [id for id in tokenizer(turn, add_special_tokens=False)["input_ids"] if id in special_ids]
    if not found:
        raise UsageError("the target's chat template ends no answer with a special token, so none can be told apart")
    return found[-1]
