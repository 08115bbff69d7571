"""What a record becomes, in each of the forms it may have, and what is said of one that can't be used."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from extract.data import Record, read_records
from shards.errors import UsageError

CHAT = '{"messages": [{"role": "user", "content": "a"}]}'


def read(tmp_path: Path, content: str | bytes) -> list[Record]:
    path = tmp_path / "some.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_records([str(path)]))


def messages(*turns: str) -> list[dict[str, Any]]:
    """ "user: a" as a message."""
    return [dict(zip(("role", "content"), turn.split(": "), strict=True)) for turn in turns]


def test_chats_and_texts(tmp_path: Path) -> None:
    first, second = read(tmp_path, CHAT + '\n\n{"text": "hällo", "source": "mine", "licence": "MIT"}')
    where = f"{tmp_path / 'some.jsonl'}, line"
    assert first == Record(index=0, where=f"{where} 1", source="some", messages=messages("user: a"))
    assert second == Record(index=2, where=f"{where} 3", source="mine", text="hällo")


CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
CHATS = {
    "ShareGPT": (
        {"id": 5, "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]},
        messages("system: s", "user: a"),
    ),
    "ShareGPT, all names": (
        {
            "conversations": [
                {"from": name, "value": name[0]} for name in ("human", "gpt", "tool", "observation", "chatgpt", "model")
            ]
        },
        messages("user: h", "assistant: g", "tool: t", "tool: o", "assistant: c", "assistant: m"),
    ),
    "ShareGPT in the words of messages": ({"conversations": messages("user: a")}, messages("user: a")),
    "prompt and response": ({"prompt": "a", "response": "b"}, messages("user: a", "assistant: b")),
    "prompt and completion": ({"prompt": "a", "completion": "b"}, messages("user: a", "assistant: b")),
    "question and answer": ({"question": "a", "answer": "b"}, messages("user: a", "assistant: b")),
    "instruction": ({"instruction": "a", "input": "", "output": "b"}, messages("user: a", "assistant: b")),
    "instruction on something": (
        {"instruction": "a", "input": "x", "output": "b"},
        messages("user: a\n\nx", "assistant: b"),
    ),
    "prompt and completion as messages": (
        {"prompt": messages("system: s", "user: a"), "completion": messages("assistant: b")},
        messages("system: s", "user: a", "assistant: b"),
    ),
    "the system's word beside": (
        {"system": "s", "conversations": [{"from": "human", "value": "a"}]},
        messages("system: s", "user: a"),
    ),
    "messages with another prompt beside": ({"messages": messages("user: a"), "prompt": "a"}, messages("user: a")),
    "a call": (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
    ),
    "a call as it comes from the API": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}]},
        [{"role": "assistant", "tool_calls": [CALL]}],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_in_other_words(tmp_path: Path, name: str) -> None:
    value, expected = CHATS[name]
    (record,) = read(tmp_path, json.dumps(value))
    assert record.messages == expected
    assert record.text is record.token_ids is record.tools is None


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_go_to_the_template(tmp_path: Path, tools: Any) -> None:
    (record,) = read(tmp_path, json.dumps({"messages": messages("user: a"), "tools": tools}))
    assert record.tools == [{"name": "f"}]


def test_tokens(tmp_path: Path) -> None:
    (record,) = read(tmp_path, '{"input_ids": [5, 6, 7], "loss_mask": [0, 1, true], "attention_mask": [1, 1, 1]}')
    assert record.token_ids.tolist() == [5, 6, 7]
    assert record.loss_mask.tolist() == [0, 1, 1]


BAD_LINES = {
    "not JSON": ('{"text": "a" "b"}', "line 2 is not valid JSON: Expecting ',' delimiter in column 14"),
    "cut off": ('{"text": \n', "line 2 is not valid JSON: Expecting value in column "),
    "not UTF-8": (b'{"text": "\xff"}', "line 2 is not UTF-8: byte 0xff in column 11"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "line 2 is not UTF-8: byte 0xff in column 1"),
    "too long a number": ('{"text": ' + "1" * 5000 + "}", "line 2 is not valid JSON: Exceeds the limit"),
    "not an object": ("[1]", "line 2 is a JSON list: each record must be an object"),
    "nothing known": (
        '{"words": "x"}',
        "must have `messages`, `conversations`, `text`, `input_ids`, or one of prompt,",
    ),
    "a prompt alone": (
        '{"prompt": "x"}',
        "with one of response, completion, answer, output; it has the keys ['prompt']",
    ),
    "two responses": ('{"prompt": "x", "response": "a", "answer": "b"}', "it has the keys ['answer', 'prompt', "),
    "both": ('{"messages": [], "text": ""}', "only one of messages, conversations, text, input_ids"),
    "a response of another kind": ('{"prompt": "x", "response": 5}', "response is 5, it must be a string"),
    "a stranger": ('{"conversations": [{"from": "bob", "value": "x"}]}', "conversations[0].from is 'bob', it must be"),
    "no value": ('{"conversations": [{"from": "gpt"}]}', "conversations[0].value is None, it must be a string"),
    "neither role nor from": ('{"conversations": [{}]}', "conversations[0].role is None"),
    "tools in words": ('{"messages": [{"role": "user", "content": ""}], "tools": "f"}', "what `tools` holds is not"),
    "tools by name": ('{"messages": [{"role": "user", "content": ""}], "tools": ["f"]}', "tools must be a list of obj"),
    "calls by name": ('{"messages": [{"role": "a", "tool_calls": ["f"]}]}', "messages[0].tool_calls must be a list"),
    "a call of nothing": ('{"messages": [{"role": "a", "tool_calls": [{"function": 1}]}]}', "[0].function must be an"),
    "bad arguments": (
        '{"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}]}',
        "messages[0].tool_calls[0]: what `arguments` holds is not valid JSON",
    ),
    "no mask": ('{"input_ids": [1]}', "loss_mask has None, it must be a list of whole numbers"),
    "a shorter mask": ('{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask has 1 values for 2 input_ids"),
    "a mask of weights": ('{"input_ids": [1], "loss_mask": [2]}', "loss_mask has 2, it must be 0 or 1"),
    "labels for tokens": ('{"input_ids": [1, -100], "loss_mask": [1, 0]}', "input_ids has -100, it must be a list of"),
    "a broken token": ('{"input_ids": [1.5], "loss_mask": [1]}', "input_ids has 1.5, it must be a list of whole"),
    "text is no string": ('{"text": 5}', "text is 5, it must be a string"),
    "source is no string": ('{"text": "x", "source": null}', "source is None, it must be a string"),
    "no messages": ('{"messages": []}', "messages must be a list of at least one message"),
    "message is no object": ('{"messages": ["x"]}', "messages[0] must be an object"),
    "no content": ('{"messages": [{"role": "user"}]}', "messages[0].content is None, it must be a string"),
    "content in parts": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}',
        "messages[0].content is [{",
    ),
    "no role": ('{"messages": [{"content": "x"}]}', "messages[0].role is None, it must be a string"),
    "half a character": ('{"text": "\\ud800"}', "text is not valid Unicode"),
    "nested too deep": ("[" * 100_000, "line 2 is not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    content = CHAT.encode() + b"\n" + (line if isinstance(line, bytes) else line.encode())
    with pytest.raises(UsageError) as raised:
        read(tmp_path, content)
    assert f"{tmp_path / 'some.jsonl'}, line 2" in str(raised.value)
    assert len(re.findall(r"\bline \d", str(raised.value))) == 1
    assert message in str(raised.value)
