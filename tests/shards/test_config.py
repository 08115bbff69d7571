"""Configuration files: what is read, what is overridden, and what each mistake is answered with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from shards.config import CacheConfig, ConfigFile, DataConfig, TargetConfig, check_layers, to_json
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


def load(tmp_path: Path, text: str, *overrides: str) -> ConfigFile:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return ConfigFile.load(path, overrides)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_configs_that_come_with_the_project_load(path: Path) -> None:
    config = ConfigFile.load(path)
    target = config.section("target", TargetConfig)
    config.section("data", DataConfig)
    check_layers("cache.layers", config.section("cache", CacheConfig).layers, target)


def test_values_become_the_types_of_their_fields(tmp_path: Path) -> None:
    text = (
        '[train]\ncount = 1\nrate = 2\nsizes = [1, 2]\nlimit = 3\nreasons = {a = 1}\ninner = [{size = 4}]\nkind = "two"'
    )
    example = load(tmp_path, text).section("train", Example)
    assert example == Example(
        count=1, rate=2.0, sizes=(1, 2), limit=3, reasons={"a": 1}, inner=(Inner(size=4),), kind="two"
    )
    assert isinstance(example.rate, float)
    assert to_json(example)["sizes"] == [1, 2]


def test_overrides_in_one_string_are_taken_apart(tmp_path: Path) -> None:
    """As make passes them: space inside a value is no end."""
    one = "train.count=2 train.sizes=[4, 5]  train.name=models/x y train.kind='two' train.rate = 3e-4"
    example = load(tmp_path, "[train]\ncount = 1", one).section("train", Example)
    assert example == Example(count=2, rate=3e-4, name="models/x y", sizes=(4, 5), kind="two")


def test_overrides_replace_and_add(tmp_path: Path) -> None:
    overrides = ("train.count=2", "train.rate=3e-4", "train.name=models/x y", "train.sizes=[4]", "train.on=true")
    example = load(tmp_path, "[train]\ncount = 1", *overrides).section("train", Example)
    assert example == Example(count=2, rate=3e-4, name="models/x y", sizes=(4,), on=True)


@pytest.mark.parametrize(
    ("text", "override", "reason"),
    [
        ("[train]\ncuont = 1", None, r"unknown key train\.cuont in .*: did you mean count\? Known: count, rate"),
        ("[trian]\n", None, r"unknown section \[trian\] of .*: did you mean train\?"),
        ("train = 3", None, r"train must be a section, \[train\]"),
        ("[train]\n", None, r"lacks the key train\.count"),
        ("[train]\ncount = 1.5", None, r"train\.count is 1\.5: it must be of type int"),
        ("[train]\ncount = true", None, r"train\.count is True: it must be of type int"),
        ('[train]\ncount = 1\nkind = "three"', None, r"train\.kind is 'three': it must be one of \['one', 'two'\]"),
        ("[train]\ncount = 1\nsizes = 3", None, r"train\.sizes is 3: it must be a list"),
        ("[train]\ncount = 1\nsizes = [1, 'x']", None, r"train\.sizes\[1\] is 'x': it must be of type int"),
        ("[train]\ncount = 1\nreasons = 3", None, r"train\.reasons is 3: it must be a table"),
        ("[train]\ncount = 1\ninner = [{}]", None, r"lacks the key train\.inner\[0\]\.size"),
        ("", "train.sizes=[a, b]", r"override .train\.sizes=\[a, b\]. is not TOML: strings in it need quotes"),
        ("[train", None, "cannot be read as TOML"),
        ("", "train.count", "override 'train.count' is not of the form section.key=value"),
        ("", "count=3", "override 'count=3' is not of the form section.key=value"),
        ("", "trian.count=3", "unknown section of the override 'trian.count=3': did you mean train"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, override: str | None, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load(tmp_path, text, *([override] if override else [])).section("train", Example)


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
        ({"shard_bytes": -1}, r"cache\.shard_bytes is -1"),
    ],
)
def test_caches_that_cannot_be(change: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        CacheConfig(**({"row_tokens": 512, "layers": (1,)} | change))


def test_the_mask_token_is_in_the_embedding() -> None:
    with pytest.raises(UsageError, match=r"target\.mask_token_id is 100, outside the embedding: it must be in 0\.\.99"):
        TargetConfig(path="x", hidden_size=64, num_layers=9, vocab_size=100, mask_token_id=100)


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
