"""Prompts to token ids: chats up to where the answer begins, or plain texts to be continued."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import jinja2

from extract.data import Record, read_records
from extract.tokenise import Encoder, first_line
from shards.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    where: str  # file and line, for messages
    source: str  # of the record; the file's name where it says none
    token_ids: list[int]


def read_prompts(path: Path, num_prompts: int | None, encoder: Encoder) -> list[Prompt]:
    """The first `num_prompts` of the file, or all; raise UsageError naming the line that is no prompt."""
    if not path.is_file():
        raise UsageError(f"{path} does not exist: prompts must be a JSONL file with `messages` or `text` on each line")
    prompts = [_encode(record, record.where, encoder) for record in islice(read_records([str(path)]), num_prompts)]
    if not prompts:
        raise UsageError(f"{path} has no prompts: each line must be an object with `messages` or `text`")
    return prompts


def _encode(record: Record, where: str, encoder: Encoder) -> Prompt:
    if record.token_ids is not None:
        token_ids = record.token_ids.tolist()
    elif record.text is not None:
        token_ids = encoder.tokenizer(record.text)["input_ids"]
    else:
        token_ids = encoder.tokenizer(_render(record, where, encoder), add_special_tokens=False)["input_ids"]
    if not token_ids:
        raise UsageError(f"{where} has no tokens")
    return Prompt(where=where, source=record.source, token_ids=list(token_ids))


def _render(record: Record, where: str, encoder: Encoder) -> str:
    if encoder.tokenizer.chat_template is None:
        raise UsageError(f"{where} is a chat, but the target's tokenizer has no chat template: use `text`")
    if record.messages[-1]["role"] == "assistant":
        raise UsageError(f"{where} ends with the assistant's turn: a prompt must end before the answer")
    try:
        return encoder.tokenizer.apply_chat_template(
            record.messages, tools=record.tools, tokenize=False, add_generation_prompt=True
        )
    except jinja2.TemplateError as error:
        raise UsageError(f"{where} is refused by the target's chat template: {first_line(error)}") from None
