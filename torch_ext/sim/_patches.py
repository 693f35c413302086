"""Replaces functions and methods of other packages: one way for all of this package's patches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that replaces each ``owner.name`` and receives the original as its first argument.

    >>> from types import SimpleNamespace
    >>> owner = SimpleNamespace(half=lambda number: number / 2)
    >>> @wrap(owner, "half")
    ... def half(original, number):
    ...     return round(original(number))
    >>> owner.half(5)
    2
    """

    def install(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            setattr(owner, name, _bind(getattr(owner, name), replacement))
        return replacement

    return install


def _bind(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return wrapped
