"""What is asked for away from the command line: ``[tool.torch_ext]`` of a ``pyproject.toml``, and the environment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ext.runner.options import REMOVED, TABLE, Row

__all__ = ["OPTIONS_VARIABLE", "ConfigError", "Setting", "from_environment", "from_file", "nearest_file"]

# Flags that stand in front of those that are typed.
OPTIONS_VARIABLE = "TORCH_EXT_OPTIONS"
_SECTION = "[tool.torch_ext]"


class ConfigError(ValueError):
    """The configuration says something that no option understands. The message is for users."""


@dataclass(frozen=True)
class Setting:
    """The value of one option, and where it comes from. ``typed`` is the text of a variable that others obey."""

    value: object
    source: str
    typed: str | None = None


def nearest_file(folder: Path) -> Path | None:
    """Return the nearest ``pyproject.toml`` with our section, in ``folder`` or above; None if there is none."""
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        try:
            if "tool.torch_ext" in path.read_text(encoding="utf-8", errors="replace"):
                return path
        except OSError:
            continue
    return None


def from_file(path: Path) -> dict[str, Setting]:
    """Return what ``path`` sets, by the names of fields.

    Raises:
        ConfigError: it cannot be read, or has a key or value that no option takes.
    """
    section = _section(path)
    rows = {row.name: row for row in TABLE if row.name}
    found: dict[str, Setting] = {}
    for key, value in section.items():
        row = rows.get(key.replace("_", "-"))
        if row is None:
            instead = REMOVED.get(key.replace("_", "-"))
            why = instead or f"is no option{_advice(key, rows)}"
            raise ConfigError(f"{path}: {_SECTION} has the key {key!r}, which {why}")
        try:
            found[row.field] = Setting(_value(row, value), str(path))
        except ValueError as error:
            raise ConfigError(f"{path}: {key} of {_SECTION}: {error}") from None
    if root := found.get("typed_root"):
        found["typed_root"] = Setting(str(path.parent / str(root.value)), root.source)
    return found


def _section(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("torch_ext", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {_SECTION} is no table")
    return section


def _advice(key: str, rows: Mapping[str, Row]) -> str:
    from torch_ext.runner.keywords import nearest

    near = nearest(key.replace("_", "-"), rows)
    return f"; nearest: {', '.join(near)}" if near else f"; the options are {', '.join(sorted(rows))}"


def _value(row: Row, value: object) -> object:
    """Return what ``row`` makes of a value of TOML."""
    if not row.metavar:
        if not isinstance(value, bool):
            raise ValueError(f"got {value!r}, expected true or false")
        return row.const if value else (0 if isinstance(row.const, int) and row.const is not True else False)
    if row.many:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"got {value!r}, expected a list of strings")
        return tuple(texts)
    if isinstance(value, bool):
        if row.const is True or not value:
            raise ValueError(f"got {str(value).lower()}, expected a value")
        return row.const
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"got {value!r}, expected one value")
    return row.value_of(str(value))


def from_environment(
    environment: Mapping[str, str], parse: Callable[[Sequence[str]], Mapping[str, object]]
) -> dict[str, Setting]:
    """Return what the environment sets, by the names of fields.

    Args:
        environment: the environment.
        parse: reads flags; a ValueError of its says what is wrong with them.

    Raises:
        ConfigError: ``TORCH_EXT_OPTIONS`` is no list of flags, or a variable has a value that its option cannot have.
    """
    found: dict[str, Setting] = {}
    if typed := environment.get(OPTIONS_VARIABLE):
        try:
            found = {field: Setting(value, OPTIONS_VARIABLE) for field, value in parse(shlex.split(typed)).items()}
        except ValueError as error:
            raise ConfigError(f"{OPTIONS_VARIABLE}: {error}") from None
    for row in TABLE:
        if row.variable and (text := environment.get(row.variable)):
            try:
                row.value_of(text)
            except ValueError as error:
                raise ConfigError(f"{row.variable}: {error}") from None
            found[row.field] = Setting(None, row.variable, text)
    return found
