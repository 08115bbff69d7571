"""Loss masks with the chat templates of well-known families, in short: which tokens are supervised, written out."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from benchmarks.random_target import make_random_target
from extract.data import Record
from extract.tokenise import Encoder
from shards.documents import Document
from tests.extract.tiny import SHAPES, chat

# Thoughts only after the last question, also an empty one; the prompt has an empty one when thinking is switched off.
QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}\
{{ '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Its answers can't be found by prefixes: the first line counts the messages.
MARKED = """\
{{- '<|im_start|>' + messages | length | string + '\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}\
{% generation %}{{ message.content + END }}{% endgeneration %}{{ AFTER }}
{%- else %}{{ message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPECIAL = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
U, A = "<|im_start|>user\n", "<|im_start|>assistant\n"
LU, LA = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
CALL = {"function": {"name": "f", "arguments": {}}}
TOOLS = chat("q") | {"tools": [{"name": "f"}]}
TOOLS["messages"] += [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "five"},
]
THOUGHT = chat("a", "b", "c", "d")
THOUGHT["messages"][1]["reasoning_content"] = "hm"
THOUGHT["messages"][3]["reasoning_content"] = "oh"

GOLDEN: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "Qwen3, the target thinks nothing of itself": (
        QWEN3,
        {},
        chat("a", "b", system="s"),
        f"<|im_start|>system\ns<|im_end|>\n{U}a<|im_end|>\n{A}[<think>\n\n</think>\n\nb<|im_end|>]\n",
    ),
    "Qwen3, thinking off": (
        QWEN3,
        {"enable_thinking": False},
        chat("a", "b"),
        f"{U}a<|im_end|>\n{A}<think>\n\n</think>\n\n[b<|im_end|>]\n",
    ),
    "Qwen3, thinking off, several turns": (
        QWEN3,
        {"enable_thinking": False},
        chat("a", "b", "c", "d"),
        f"{U}a<|im_end|>\n{A}[b<|im_end|>]\n{U}c<|im_end|>\n{A}<think>\n\n</think>\n\n[d<|im_end|>]\n",
    ),
    "Qwen3, thoughts of earlier turns are gone": (
        QWEN3,
        {},
        THOUGHT,
        f"{U}a<|im_end|>\n{A}[b<|im_end|>]\n{U}c<|im_end|>\n{A}[<think>\noh\n</think>\n\nd<|im_end|>]\n",
    ),
    "Qwen3, tools": (
        QWEN3,
        {"enable_thinking": False},
        TOOLS,
        '<|im_start|>system\n# Tools\n{"name": "f"}<|im_end|>\n'
        f'{U}q<|im_end|>\n{A}[<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call><|im_end|>]\n'
        f"{U}<tool_response>\n5\n</tool_response><|im_end|>\n{A}<think>\n\n</think>\n\n[five<|im_end|>]\n",
    ),
    "Llama 3": (
        LLAMA3,
        {},
        chat("a", " b ", "c", "d"),
        f"<|endoftext|>{LU}a<|eot_id|>{LA}[b<|eot_id|>]{LU}c<|eot_id|>{LA}[d<|eot_id|>]",
    ),
    "ChatML": (
        CHATML,
        {},
        chat("a", "b", "c", "", "e"),
        f"{U}a<|im_end|>\n{A}[b<|im_end|>]\n{U}c<|im_end|>\n{A}[<|im_end|>]\n{U}e<|im_end|>\n",
    ),
    **{
        f"marked, {name}": (
            MARKED.replace("END", repr(end)).replace("AFTER", repr(after)),
            {},
            chat("a", "b", "c", "d"),
            f"<|im_start|>4\n{U}a<|im_end|>\n{A}[b<|im_end|>]\n{U}c<|im_end|>\n{A}[d<|im_end|>]\n",
        )
        for name, end, after in (
            ("with the end of the turn", "<|im_end|>", "\n"),
            ("without it", "", "<|im_end|>\n"),
            ("with the newline after it", "<|im_end|>\n", ""),
        )
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, and of the special tokens that the templates have."""
    folder = tmp_path_factory.mktemp("templates") / "target"
    make_random_target(folder, SHAPES["qwen3"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def load(folder: Path, template: str, options: dict[str, Any]) -> Encoder:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": template, "bos_token": "<|endoftext|>"}
    path.write_text(json.dumps(settings))
    return Encoder.load(folder, options)


def encode(encoder: Encoder, value: dict[str, Any]) -> Document | tuple[int, str]:
    return encoder.encode(Record(index=0, where="w", source="s", messages=value["messages"], tools=value.get("tools")))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_masks(folder: Path, name: str) -> None:
    template, options, value, expected = GOLDEN[name]
    encoder = load(folder, template, options)
    document = encode(encoder, value)
    assert isinstance(document, Document), document
    shown, inside = "", 0
    for token_id, supervised in zip(document.token_ids.tolist(), document.loss_mask.tolist(), strict=True):
        shown += ("", "[", "]")[supervised - inside] + encoder.tokenizer.decode([token_id])
        inside = supervised
    assert shown + "]" * inside == expected


def test_marks_without_an_end_of_turn_are_not_trusted(folder: Path) -> None:
    unended = MARKED.replace("END", "'x' if loop.index0 == 1 else '<|im_end|>'").replace("AFTER", "'\n'")
    assert encode(load(folder, unended, {}), chat("a", "b", "c", "d")) == (0, "answer_without_end")
