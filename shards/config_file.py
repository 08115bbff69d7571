"""Configuration files: one TOML per target, read by all programs, each for its own sections.

A file is wrong for all of them when any of its sections is: what only the last program uses is refused before the first
has worked for days.
"""

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shards.config import Section, build_section, did_you_mean, near, shown
from shards.errors import UsageError
from shards.sections import SECTIONS

Values = dict[str, dict[str, Any]]  # by section and key, as TOML has them


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The sections of one TOML file with overrides applied, valid each by itself."""

    path: Path
    sections: dict[type, Any]  # those that are in the file, by their class

    @classmethod
    def load(
        cls, path: str | Path, overrides: Sequence[str] = (), flags: Mapping[str, dict[str, Any]] | None = None
    ) -> Self:
        """Read `path`, with overrides (see `read_values`) and then `flags`, values by section and key, in its place."""
        path = Path(path)
        values = read_values(path, overrides)
        for name, given in (flags or {}).items():
            values[name] = values.get(name, {}) | given
        built = {SECTIONS[name]: build_section(name, SECTIONS[name], section, path) for name, section in values.items()}
        return cls(path=path, sections=built)

    def section(self, name: str, cls: type[Section]) -> Section:
        """Section `name`, of class `cls`; its defaults if it isn't in the file, UsageError if a key has none."""
        return self.sections.get(cls) or build_section(name, cls, {}, self.path)


def read_values(path: Path, overrides: Sequence[str] = ()) -> Values:
    """All values of the file `path`, with overrides of the form `section.key=value`: TOML, or a bare string.

    One string may hold several, with space between them. Raises UsageError for keys that no section has.
    """
    values = _read_toml(path)
    for name, section in values.items():
        _require_section(name, f"[{name}] of {path}")
        if not isinstance(section, dict):
            raise UsageError(f"{path}: {name} must be a section, [{name}]")
        for key in section:
            _require_key(name, key, f" in {path}")
    for override in _split_overrides(overrides):
        name, key, value = _parse_override(override)
        values.setdefault(name, {})[key] = value
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: --config must name a TOML file, see configs/") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; --config must name a TOML file") from None
    except (ValueError, RecursionError) as error:  # ValueError: TOML, UTF-8, an integer of too many digits
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None


def _split_overrides(overrides: Sequence[str]) -> Iterator[str]:
    """One by one: a new one begins after space where there is another `section.key=`."""
    for several in overrides:
        yield from re.split(r"\s+(?=\w+\.\w+\s*=)", several)


def _parse_override(override: str) -> tuple[str, str, Any]:
    path, equals, text = override.partition("=")
    name, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise UsageError(f"override {shown(override)} is not of the form section.key=value, for example train.lr=3e-4")
    _require_section(name, f"of the override {shown(override)}")
    _require_key(name, key)
    try:
        return name, key, tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError, RecursionError):
        if text.strip().startswith(("[", "{")):
            raise UsageError(
                f"the override {shown(override)} is not TOML: strings in it need quotes, and the shell takes "
                f'them away unless all of it is in others: \'{name}.{key}=["a", "b"]\''
            ) from None
        return name, key, text.strip()


def _require_section(name: str, where: str) -> None:
    if name not in SECTIONS:
        guess = did_you_mean(near(name, SECTIONS)) or f": there are {', '.join(SECTIONS)}"
        raise UsageError(f"unknown section {where}{guess}")


def _require_key(name: str, key: str, where: str = "") -> None:
    keys = {section: [field.name for field in dataclasses.fields(cls)] for section, cls in SECTIONS.items()}
    if key not in keys[name]:
        elsewhere = [f"{section}.{key}" for section in keys if key in keys[section]]
        guess = did_you_mean([*elsewhere, *(f"{name}.{other}" for other in near(key, keys[name]))])
        module = SECTIONS[name].__module__.replace(".", "/")
        raise UsageError(
            f"unknown key {shown(f'{name}.{key}')}{where}{guess or ';'} {module}.py explains those of [{name}]"
        )
