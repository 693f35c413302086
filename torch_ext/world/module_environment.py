"""The environment variables that importing a test module set or removed, for the processes that run its tests.

Such a process is a fork of the module's zygote, but runs under an environment of its own: without this, a file's
``os.environ[...] = ...`` would hold for nobody. The standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["enter", "note"]

_changed: dict[str, str | None] = {}


def note(before: Mapping[str, str]) -> None:
    """Remember what has changed since the environment was ``before``."""
    names = {*before, *os.environ}
    _changed.clear()
    _changed.update({name: os.environ.get(name) for name in names if os.environ.get(name) != before.get(name)})


def enter(environment: Mapping[str, str]) -> None:
    """Make ``environment`` that of this process, with what the import changed."""
    os.environ.clear()
    os.environ.update(environment)
    for name, value in _changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
