"""The environment variables that importing a test module set or removed, for the processes that run its tests.

Such a process holds the module, by a fork of its zygote or by an import of its own, but runs under an environment of
its own: without this, a file's ``os.environ[...] = ...`` would hold for nobody. The standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ["enter", "noted"]

_changed: dict[str, str | None] = {}


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Remember what changes within, and nothing from before."""
    before = dict(os.environ)
    yield
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
