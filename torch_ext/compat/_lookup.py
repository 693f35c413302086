"""Lazy lookup of private torch names, which move between releases."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any


class MissingTorchNameError(ImportError):
    """A private torch name that torch_ext needs is in none of its known places."""


def lazy_names(area: str, places: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` for the compat module ``area`` that looks up each name on first use and caches
    it, in its ``places``: to try in order, newest release first, each as ``"module:attribute"``.

    Raises (on use):
        AttributeError: the name is not in ``places``.
        MissingTorchNameError: no place has it; the message names the torch version and the places tried.
    """

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {area!r} has no attribute {name!r}")
        for place in places[name]:
            try:
                value = pkgutil.resolve_name(place)
            except (ImportError, AttributeError):
                continue
            setattr(sys.modules[area], name, value)
            return value
        import torch

        raise MissingTorchNameError(
            f"torch {torch.__version__} has {name} in none of: {', '.join(places[name])}. "
            f"Find where it moved and add the place to {area}."
        )

    __getattr__.places = places  # type: ignore[attr-defined]  # for `torch_ext export`
    return __getattr__
