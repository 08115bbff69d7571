"""What a record of the data may be: a chat, a text, or tokens. FIELDS lists the names that are known.

A record that is none of these, or has what can't be used under a known name, is an error that names file, place and
field; nothing is skipped in silence.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extract.files import Raw, RecordReader
from shards.errors import UsageError

KINDS = ("messages", "conversations", "text", "input_ids")  # a record has one of these, or prompt and response
PROMPTS = ("prompt", "instruction", "question")
RESPONSES = ("response", "completion", "answer", "output")
FIELDS = (*KINDS, "loss_mask", *PROMPTS, "input", *RESPONSES, "system", "tools")
SPEAKERS = {  # ShareGPT's `from` → role
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"},
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One usable record. Exactly one of `messages`, `text` and `token_ids` is set."""

    index: int  # of its line or element, counted from 0 over all files
    where: str
    source: str
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None  # for the chat template
    text: str | None = None
    token_ids: np.ndarray | None = None  # int32 [tokens]
    loss_mask: np.ndarray | None = None  # uint8 [tokens], with token_ids


def read_records(files: Sequence[str]) -> Iterator[Record]:
    """Yield the records of `files` in order; raise UsageError for what can't be read."""
    return map(parse, RecordReader(files, (*FIELDS, "source")))


def parse(raw: Raw, source_field: str = "source") -> Record:
    """The record in `raw`; raise UsageError naming what is wrong with it."""
    where = raw.where
    value = _load(raw.content, where) if isinstance(raw.content, bytes) else raw.content
    if not isinstance(value, dict):
        raise UsageError(f"{where} is a JSON {type(value).__name__}: each record must be an object")
    source = value.get(source_field, raw.source)
    if not isinstance(source, str):
        raise UsageError(f"{where}: {source_field} is {source!r:.60}, it must be a string")
    return Record(index=raw.index, where=where, source=source, **_content(value, where))


def _load(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))  # editors and `cat` leave a mark of byte order before any line
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8: byte {content[error.start]:#04x} in column {error.start + 1}"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error.msg} in column {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # ValueError: a number of too many digits
        raise UsageError(f"{where} is not valid JSON: {error}") from None


def _content(value: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of Record that hold the content."""
    kinds = [name for name in KINDS if name in value]
    if len(kinds) > 1:
        raise UsageError(f"{where} must have only one of {', '.join(KINDS)}; it has the keys {sorted(value)}")
    if kinds == ["text"]:
        return {"text": _string(value["text"], "text", where)}
    if kinds == ["input_ids"]:
        return _tokens(value, where)
    if kinds == ["messages"]:
        messages = _messages(value["messages"], "messages", where)
    elif kinds == ["conversations"]:
        messages = _messages(_translated(value["conversations"], where), "conversations", where)
    else:
        messages = _exchange(value, where)
    if "system" in value:
        system = {"role": "system", "content": _string(value["system"], "system", where)}
        messages = [system, *messages] if system["content"] and messages[0]["role"] != "system" else messages
    return {"messages": messages, "tools": _tools(value.get("tools"), where)}


def _messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: roles, and contents unless something is called instead."""
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: {name} must be a list of at least one message")
    return [_message(message, f"{name}[{i}]", where) for i, message in enumerate(value)]


def _message(message: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UsageError(f"{where}: {name} must be an object with `role` and `content`")
    _string(message.get("role"), f"{name}.role", where)
    calls = message.get("tool_calls")
    if not calls or message.get("content") is not None:
        _string(message.get("content"), f"{name}.content", where)
    if message.get("reasoning_content") is not None:
        _string(message["reasoning_content"], f"{name}.reasoning_content", where)
    if not calls:
        return message
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UsageError(f"{where}: {name}.tool_calls must be a list of objects")
    calls = [_with_arguments(call, f"{name}.tool_calls[{i}]", where) for i, call in enumerate(calls)]
    return message | {"tool_calls": calls}


def _with_arguments(call: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """A call whose arguments are an object, which templates want; the API that calls come from has them as JSON."""
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise UsageError(f"{where}: {name}.function must be an object")
    if not isinstance(function.get("arguments"), str):
        return call
    arguments = _load(function["arguments"].encode(errors="replace"), f"{where}: {name}: what `arguments` holds")
    parsed = function | {"arguments": arguments}
    return call | {"function": parsed} if "function" in call else parsed


def _translated(value: Any, where: str) -> Any:
    """ShareGPT's turns as messages. Some call their turns so, too: then they stay as they are."""
    if not isinstance(value, list):
        return value
    return [_turn(turn, f"conversations[{i}]", where) for i, turn in enumerate(value)]


def _turn(turn: Any, name: str, where: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise UsageError(f"{where}: {name}.from is {speaker!r:.60}, it must be one of {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker], "content": _string(turn.get("value"), f"{name}.value", where)}


def _exchange(value: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Prompt and response, each a string or messages."""
    prompts, responses = ([name for name in names if name in value] for names in (PROMPTS, RESPONSES))
    if len(prompts) != 1 or len(responses) != 1:
        raise UsageError(
            f"{where} must have {', '.join(f'`{kind}`' for kind in KINDS)}, or one of {', '.join(PROMPTS)} with one of "
            f"{', '.join(RESPONSES)}; it has the keys {sorted(value)}"
        )
    prompt = value[prompts[0]]
    if isinstance(prompt, str) and (context := value.get("input")):  # Alpaca's: what the instruction is about
        prompt = f"{prompt}\n\n{_string(context, 'input', where)}"
    turns = []
    for name, content, role in ((prompts[0], prompt, "user"), (responses[0], value[responses[0]], "assistant")):
        if isinstance(content, list):
            turns += _messages(content, name, where)
        else:
            turns.append({"role": role, "content": _string(content, name, where)})
    return turns


def _tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str) and value:
        value = _load(value.encode(errors="replace"), f"{where}: what `tools` holds")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UsageError(f"{where}: tools must be a list of objects")
    return value


def _tokens(value: dict[str, Any], where: str) -> dict[str, np.ndarray]:
    lists = {name: _whole_numbers(value.get(name), name, where) for name in ("input_ids", "loss_mask")}
    token_ids, loss_mask = lists["input_ids"], lists["loss_mask"]
    if len(loss_mask) != len(token_ids):
        raise UsageError(f"{where}: loss_mask has {len(loss_mask)} values for {len(token_ids)} input_ids")
    if loss_mask.max(initial=0) > 1:
        raise UsageError(f"{where}: loss_mask has {loss_mask.max()}, it must be 0 or 1 for each token")
    return {"token_ids": token_ids.astype(np.int32), "loss_mask": loss_mask.astype(np.uint8)}


def _whole_numbers(value: Any, name: str, where: str) -> np.ndarray:
    """int64, none below 0, all within 31 bits."""
    numbers = value if isinstance(value, list) else [None]
    if bad := [x for x in numbers if not isinstance(x, int) or not 0 <= x < 1 << 31]:
        raise UsageError(f"{where}: {name} has {bad[0]!r:.60}, it must be a list of whole numbers from 0 on")
    return np.array(numbers, np.int64)


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} is {value!r:.60}, it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        raise UsageError(f"{where}: {name} is not valid Unicode") from None
    return value
