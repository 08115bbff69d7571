"""The sections of a configuration that describe a cache, `[target]`, `[data]` and `[cache]`, and how they are built.

A section is a dataclass: its fields are the keys; their types, and what `__post_init__` refuses, limit the values.
The other sections are in sections.py, the files in config_file.py.
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from shards.codec import CODECS, GROUP_CHANNELS
from shards.errors import UsageError

CHUNK_TOKENS = 512  # tokens of one stored chunk of hidden states
MAX_COUNT = (1 << 31) - 1  # of anything that is counted, unless it has a limit of its own
MAX_LAYERS = 1000  # of a model: far above any, and low enough for lists of them
MAX_SHOWN = 80  # characters of a value in an error message
MAX_NAME_BYTES = 255  # of one part of a path, on every file system of Linux
SMALLEST_FP32, LARGEST_FP32 = 2.0**-126, 2.0**128 - 2.0**104  # positive and normal: settings are used in fp32

Section = TypeVar("Section")
Scalar = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen large model. The sizes are stated so that `--check` needs no weights; extraction compares them."""

    path: str  # local folder in transformers' layout
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # the target runs in this, and its head is stored in it
    hidden_size: int
    num_layers: int  # decoder layers
    vocab_size: int  # rows of the embedding
    mask_token_id: int  # fills the slots to predict; never a token that text contains

    def __post_init__(self) -> None:
        require_path("target.path", self.path)
        require_positive(self, "target", "hidden_size", "vocab_size")
        require_positive(self, "target", "num_layers", at_most=MAX_LAYERS)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UsageError(
                f"target.mask_token_id is {self.mask_token_id}, outside the embedding: "
                f"it must be in 0..{self.vocab_size - 1}"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which documents, and which of them are held out."""

    files: tuple[str, ...]  # files, folders, patterns, or - for standard input: JSONL, JSON arrays, Parquet
    source_field: str = "source"  # of a record, that names its source; without it the file's name does
    max_documents: int | None = None  # read no more than the first so many, for a quick try; None: all
    holdout_fraction: float = 0.02  # share of documents that training never sees, chosen by content hash
    over_length: Literal["truncate", "drop"] = "truncate"  # what happens to a document longer than a row
    min_supervised_tokens: int = 16  # a document with fewer is left out: the field's drafters have blocks of 16
    mix: dict[str, float] = field(default_factory=dict)  # weight by source: see select.py; empty: all there is
    chat_template_kwargs: dict[str, Scalar] = field(default_factory=dict)  # enable_thinking = false
    seed: int = 0  # of the order in which documents are packed

    def __post_init__(self) -> None:
        if not self.files:
            raise UsageError("data.files is empty: name at least one file, folder or pattern")
        for file in self.files:
            require_path("data.files", file)
        if self.max_documents is not None:
            require_positive(self, "data", "max_documents")
        require_positive(self, "data", "min_supervised_tokens")
        for source, weight in self.mix.items():
            if not 0.0 <= weight <= LARGEST_FP32:
                raise UsageError(f"data.mix gives {source!r} the weight {weight}: it must be 0 or more")
        if self.mix and not any(self.mix.values()):
            raise UsageError("data.mix gives no source a weight above 0: nothing is left to train on")
        if not 0.0 <= self.holdout_fraction < 1.0:
            raise UsageError(f"data.holdout_fraction is {self.holdout_fraction}: it must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What is stored of every token, and in which shapes."""

    row_tokens: int  # T: token slots of a row
    layers: tuple[int, ...]  # 0-based decoder layers whose outputs are stored
    codec: Literal["bf16", "int8", "int4", "bf16+zstd"] = "bf16"
    final_hidden: bool = False  # also store the last hidden state, after the final norm
    shard_bytes: int = 1 << 30  # aim for the size of a shard; at least one row

    def __post_init__(self) -> None:
        require_positive(self, "cache", "row_tokens")
        require_positive(self, "cache", "shard_bytes", at_most=1 << 40)
        if self.row_tokens > CHUNK_TOKENS and self.row_tokens % CHUNK_TOKENS:
            raise UsageError(f"cache.row_tokens is {self.row_tokens}: it must be a multiple of {CHUNK_TOKENS}")
        if self.row_tokens > 1 << 17:
            raise UsageError(f"cache.row_tokens is {self.row_tokens}: it must be at most {1 << 17}")
        if not self.layers:
            raise UsageError("cache.layers is empty: name at least one decoder layer")
        if list(self.layers) != sorted(set(self.layers)):
            raise UsageError(f"cache.layers is {shown(list(self.layers))}: it must be ascending, each layer once")

    @property
    def chunk_tokens(self) -> int:
        return min(self.row_tokens, CHUNK_TOKENS)


def check_layers(key: str, layers: Sequence[int], target: TargetConfig) -> None:
    """Raise UsageError unless every layer of `layers` (the value of config key `key`) can be a context feature."""
    for layer in layers:
        if not 0 <= layer < target.num_layers:
            raise UsageError(f"{key} has layer {layer}: the target's decoder layers are 0..{target.num_layers - 1}")
        if layer == target.num_layers - 1:
            raise UsageError(
                f"{key} has layer {layer}, the target's last: its output is only seen after the final norm, "
                f"so the highest layer is {target.num_layers - 2}"
            )


def check_codec(cache: CacheConfig, target: TargetConfig) -> None:
    """Raise UsageError unless the target's hidden states can be stored with the codec."""
    if CODECS[cache.codec].is_rotated and target.hidden_size % GROUP_CHANNELS:
        raise UsageError(
            f"target.hidden_size is {target.hidden_size}: cache.codec {cache.codec!r} needs a multiple of "
            f"{GROUP_CHANNELS}; use 'bf16'"
        )


def build_section(name: str, cls: type[Section], values: dict[str, Any], where: Path) -> Section:
    """The dataclass `cls` from TOML or JSON values; raise UsageError naming the key of `where` that is wrong."""
    expected, required = _fields(cls)
    converted = {}
    for key, value in values.items():
        if key not in expected:
            raise UsageError(f"unknown key {name}.{key} in {where}{did_you_mean(near(key, expected))}")
        converted[key] = _convert(f"{name}.{key}", value, expected[key], where)
    for key in required:
        if key not in converted:
            raise UsageError(f"{where} lacks the key {name}.{key}")
    return cls(**converted)


@functools.cache
def _fields(cls: type) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The annotations of a dataclass's fields by name, and the names of those without a default."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    missing = dataclasses.MISSING
    required = tuple(f.name for f in fields if f.default is missing and f.default_factory is missing)
    return {f.name: hints[f.name] for f in fields}, required


def to_json(section: Any) -> dict[str, Any]:
    """A config dataclass as it looks after a trip through JSON (tuples are lists)."""
    return json.loads(json.dumps(dataclasses.asdict(section)))


def require_positive(section: object, name: str, *keys: str, at_most: int = MAX_COUNT) -> None:
    """Raise UsageError unless each named field of `section` (the config section `name`) is above zero.

    Whole numbers may be up to `at_most`; others must be such that fp32, which they are used in, holds them.
    """
    for key in keys:
        value = getattr(section, key)
        least, most = (SMALLEST_FP32, LARGEST_FP32) if isinstance(value, float) else (1, at_most)
        if not least <= value <= most:
            above_zero = "fp32 must hold it" if isinstance(value, float) else f"it must be at most {at_most}"
            raise UsageError(f"{name}.{key} is {shown(value)}: {above_zero if value > 0 else 'it must be positive'}")


def require_path(key: str, path: str) -> None:
    """Raise UsageError if the value of config key `key` can name no file."""
    if not path or "\0" in path:
        raise UsageError(f"{key} has {shown(path)}, which can be no path")
    longest = max(len(os.fsencode(name)) for name in path.split("/"))
    if longest > MAX_NAME_BYTES:
        raise UsageError(f"{key} has {shown(path)}: a name of {longest} bytes, file systems take {MAX_NAME_BYTES}")


def shown(value: object) -> str:
    """A value of the user's as an error message has it: on one line, and short."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def describe_choice(key: str, value: object, choices: Sequence[object]) -> str:
    return f"{key} is {shown(value)}: it must be one of {list(choices)}"


def did_you_mean(guesses: Sequence[str]) -> str:
    """The end of a sentence on something unknown."""
    return f": did you mean {' or '.join(guesses)}?" if guesses else ""


def near(name: str, known: Iterable[str]) -> list[str]:
    """At most two of `known` that look like `name`."""
    return difflib.get_close_matches(name, known, n=2)


def _convert(key: str, value: Any, expected: Any, where: Path) -> Any:
    """A TOML or JSON value as a field's annotation wants it, or UsageError.

    Lists become tuples, tables dataclasses where one is expected, and whole numbers may stand for floats.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected == Scalar:
        if not isinstance(value, Scalar):
            raise UsageError(f"{key} is {shown(value)}: it must be a string, a number, true or false")
        return value
    if origin in (types.UnionType, typing.Union):  # else only `X | None` is used; None is JSON's, TOML has none
        some = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _convert(key, value, some, where)
    if origin is Literal:
        if value not in arguments:
            raise UsageError(describe_choice(key, value, arguments))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{key} is {shown(value)}: it must be a list")
        return tuple(_convert(f"{key}[{i}]", item, arguments[0], where) for i, item in enumerate(value))
    if origin is dict or dataclasses.is_dataclass(expected):
        if not isinstance(value, dict):
            raise UsageError(f"{key} is {shown(value)}: it must be a table")
        if origin is dict:
            return {name: _convert(f"{key}.{name}", item, arguments[1], where) for name, item in value.items()}
        return build_section(key, expected, value, where)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and not -(1 << 63) <= value < 1 << 63:
        raise UsageError(f"{key} is {shown(value)}: a whole number must fit into 64 bits")
    if expected is float and is_whole:
        return float(value)
    if not isinstance(value, expected) or (expected is int and not is_whole):
        raise UsageError(f"{key} is {shown(value)}: it must be of type {expected.__name__}")
    if expected is float and not math.isfinite(value):
        raise UsageError(f"{key} is {value}: it must be finite")
    return value
