"""Configuration files: what is read, what is overridden, and what each mistake is answered with."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from shards.config import CacheConfig, DataConfig, TargetConfig, build_section, check_layers, to_json
from shards.config_file import ConfigFile, Values, read_values
from shards.errors import UsageError

ROOT = Path(__file__).parents[2]
TARGET = TargetConfig(path="models/tiny", hidden_size=64, num_layers=9, vocab_size=100, mask_token_id=3)


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, kw_only=True)
class Example:
    count: int
    rate: float = 0.5
    name: str = "a"
    on: bool = False
    kind: Literal["one", "two"] = "one"
    sizes: tuple[int, ...] = ()
    limit: int | None = None
    reasons: dict[str, int] | None = None
    inner: tuple[Inner, ...] = ()


def read(tmp_path: Path, text: str | bytes, *overrides: str) -> Values:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_values(path, overrides)


def example(text: str) -> Example:
    return build_section("example", Example, tomllib.loads(text), Path("x.toml"))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_configs_that_come_with_the_project_load(path: Path) -> None:
    config = ConfigFile.load(path)
    target = config.section("target", TargetConfig)
    config.section("data", DataConfig)
    check_layers("cache.layers", config.section("cache", CacheConfig).layers, target)


def test_values_become_the_types_of_their_fields() -> None:
    text = 'count = 1\nrate = 2\nsizes = [1, 2]\nlimit = 3\nreasons = {a = 1}\ninner = [{size = 4}]\nkind = "two"'
    found = example(text)
    assert found == Example(
        count=1, rate=2.0, sizes=(1, 2), limit=3, reasons={"a": 1}, inner=(Inner(size=4),), kind="two"
    )
    assert isinstance(found.rate, float)
    assert to_json(found)["sizes"] == [1, 2]


def test_overrides_in_one_string_are_taken_apart(tmp_path: Path) -> None:
    """As make passes them: space inside a value is no end."""
    one = "train.epochs=2 train.gpus=[4, 5]  target.path=models/x y train.loss='ce' train.lr = 3e-4"
    assert read(tmp_path, "[train]\nepochs = 1", one) == {
        "train": {"epochs": 2, "gpus": [4, 5], "loss": "ce", "lr": 3e-4},
        "target": {"path": "models/x y"},
    }


def test_overrides_replace_and_add(tmp_path: Path) -> None:
    overrides = (
        "train.epochs=2",
        "train.lr=3e-4",
        "target.path=models/x y",
        "train.gpus=[4]",
        "drafter.is_causal=true",
    )
    assert read(tmp_path, "[train]\nepochs = 1\nseed = 5", *overrides) == {
        "train": {"epochs": 2, "seed": 5, "lr": 3e-4, "gpus": [4]},
        "target": {"path": "models/x y"},
        "drafter": {"is_causal": True},
    }


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\xef\xbb\xbf[train]\nepochs = 2\n", id="byte order mark"),
        pytest.param(b"[train]\r\nepochs = 2\r\n", id="CRLF"),
        pytest.param(b"[train]\nepochs = 2", id="no newline at the end"),
    ],
)
def test_what_editors_do_to_a_file_changes_nothing(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path, content) == {"train": {"epochs": 2}}


@pytest.mark.parametrize(
    ("text", "override", "reason"),
    [
        (
            "[train]\nepohcs = 1",
            None,
            r"unknown key 'train\.epohcs' in .*: did you mean train\.epochs or train\.eps\? shards/sections\.py",
        ),
        (
            "[speculate]\nfoo = 1",
            None,
            r"unknown key 'speculate\.foo' in .*; shards/sections\.py explains those of \[speculate\]",
        ),
        ("[trian]\n", None, r"unknown section \[trian\] of .*: did you mean train\?"),
        ("train = 3", None, r"train must be a section, \[train\]"),
        ("[[train]]", None, r"train must be a section, \[train\]"),
        ("", "train.gpus=[a, b]", r"override .train\.gpus=\[a, b\]. is not TOML: strings in it need quotes"),
        ("[train", None, "cannot be read as TOML"),
        ("[train]\n[train]", None, r"cannot be read as TOML: Cannot declare .'train',. twice"),
        ("[train]\nlr = 1\nlr = 1", None, "cannot be read as TOML: Cannot overwrite a value"),
        (b"[train]\npath = '\xff'", None, "cannot be read as TOML: .* can't decode byte 0xff"),
        ("[train]\nepochs = " + "9" * 5000, None, "cannot be read as TOML: .* integer string conversion"),
        ("[train]\ngpus = " + "[" * 9000 + "]" * 9000, None, "cannot be read as TOML"),
        ("", "train.epochs", "override 'train.epochs' is not of the form section.key=value"),
        ("", "epochs=3", "override 'epochs=3' is not of the form section.key=value"),
        ("", "=" * 9000, "override '=*… is not of the form section.key=value"),
        ("", "trian.lr=3", "unknown section of the override 'trian.lr=3': did you mean train"),
        ("", "train.lrr=3", r"unknown key 'train\.lrr': did you mean train\.lr"),
        ("", "train.layers=[1]", r"unknown key 'train\.layers': did you mean cache\.layers"),
        (
            "",
            "cache.row_token=3",
            r"unknown key 'cache\.row_token': did you mean cache\.row_tokens\? shards/config\.py explains",
        ),
        ("", "train.betas.x=3", r"unknown key 'train\.betas\.x': did you mean train\.betas"),
        ("", "nothing.x=3", "unknown section of the override 'nothing.x=3': there are target, data, cache, extract"),
    ],
)
def test_files_and_overrides_that_are_wrong(
    tmp_path: Path, text: str | bytes, override: str | None, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        read(tmp_path, text, *([override] if override else []))
    assert len(str(error.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"x\.toml lacks the key example\.count"),
        ("cuont = 1", r"unknown key example\.cuont in x\.toml: did you mean count\?$"),
        ("count = 1.5", r"example\.count is 1\.5: it must be of type int"),
        ("count = 1e20", r"example\.count is 1e\+20: it must be of type int"),
        ("count = true", r"example\.count is True: it must be of type int"),
        ("count = 9223372036854775808", r"count is 9223372036854775808: a whole number must fit into 64 bits"),
        ("count = " + "9" * 400, r"count is 9{79}…: a whole number must fit into 64 bits"),
        ("count = 0x" + "f" * 5000, "count is a number of thousands of digits: a whole number must fit into 64 bits"),
        ("count = [0x" + "f" * 5000 + "]", "count is a number of thousands of digits: it must be of type int"),
        ("count = 1979-05-27", r"count is datetime\.date\(1979, 5, 27\): it must be of type int"),
        ("count = 1\nrate = true", "rate is True: it must be of type float"),
        ("count = 1\nrate = nan", "rate is nan: it must be finite"),
        ("count = 1\nrate = -inf", "rate is -inf: it must be finite"),
        ("count = 1\nrate = 1e999", "rate is inf: it must be finite"),
        ("count = 1\nrate = " + "9" * 400, "a whole number must fit into 64 bits"),
        ("count = 1\nname = 3", "name is 3: it must be of type str"),
        ('count = 1\nkind = "three"', r"kind is 'three': it must be one of \['one', 'two'\]"),
        ("count = 1\nkind = ['one']", r"kind is \['one'\]: it must be one of"),
        ("count = 1\nsizes = 3", "sizes is 3: it must be a list"),
        ("count = 1\nsizes = [1, 'x']", r"sizes\[1\] is 'x': it must be of type int"),
        ("count = 1\nreasons = 3", "reasons is 3: it must be a table"),
        ("count = 1\ninner = [{}]", r"lacks the key example\.inner\[0\]\.size"),
    ],
)
def test_values_that_are_wrong(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        example(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml does not exist: --config must name a TOML file"):
        ConfigFile.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"row_tokens": 0}, r"cache\.row_tokens is 0: it must be positive"),
        ({"row_tokens": 700}, r"cache\.row_tokens is 700: it must be a multiple of 512"),
        ({"row_tokens": 1 << 18}, r"cache\.row_tokens is 262144: it must be at most 131072"),
        ({"layers": ()}, r"cache\.layers is empty"),
        ({"layers": (2, 1)}, r"cache\.layers is \[2, 1\]: it must be ascending"),
        ({"layers": (1, 1)}, r"each layer once"),
        ({"shard_bytes": -1}, r"cache\.shard_bytes is -1: it must be positive"),
        ({"shard_bytes": 1 << 41}, r"cache\.shard_bytes is 2199023255552: it must be at most 1099511627776"),
    ],
)
def test_caches_that_cannot_be(change: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        CacheConfig(**({"row_tokens": 512, "layers": (1,)} | change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask_token_id": 100}, r"target\.mask_token_id is 100, outside the embedding: it must be in 0\.\.99"),
        ({"num_layers": 1001}, r"target\.num_layers is 1001: it must be at most 1000"),
        ({"hidden_size": 1 << 31}, r"target\.hidden_size is 2147483648: it must be at most 2147483647"),
        ({"path": ""}, r"target\.path has '', which can be no path"),
        ({"path": "a\0b"}, r"target\.path has 'a\\x00b', which can be no path"),
        ({"path": "models/" + "ü" * 150}, r"target\.path has 'models/ü*…: a name of 300 bytes, file systems take 255"),
    ],
)
def test_targets_that_cannot_be(change: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        dataclasses.replace(TARGET, **change)


@pytest.mark.parametrize("files", [(), ("",), ("a\0",), ("x" * 256,)])
def test_data_files_that_cannot_be(files: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"data\.files"):
        DataConfig(files=files)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (9, r"layer 9: the target's decoder layers are 0\.\.8"),
        (-1, "layer -1"),
        (8, "layer 8, the target's last: .* is 7"),
    ],
)
def test_layers_that_are_no_features(layer: int, reason: str) -> None:
    check_layers("cache.layers", [0, 7], TARGET)
    with pytest.raises(UsageError, match=f"cache.layers has {reason}"):
        check_layers("cache.layers", [0, layer], TARGET)
