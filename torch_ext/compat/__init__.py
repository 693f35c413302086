"""The private torch names that torch_ext uses, one lazy module per area of torch, and the tested releases.

A name is looked up on first use, so one that has moved breaks only the feature that needs it, and the error names it.
Suites that mirror upstream files import private names of torch directly, as upstream's files do.
"""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

_OLDEST, _NEWEST = (2, 13), (2, 15)

# A release, with or without a local version ("2.13.0+cpu"). Nightly and source builds have letters before the plus.
_RELEASE = re.compile(r"(\d+)\.(\d+)(\.\d+)*(\.post\d+)?(\+.*)?")

# Set once the warning was given, so that child processes do not repeat it.
_WARNED_VARIABLE = "TORCH_EXT_TOLD_VERSION"


class UntestedTorchWarning(UserWarning):
    """torch_ext is not tested on the installed release of torch."""


def untested_torch() -> str:
    """Return a warning about the installed torch; empty if it is tested or not installed.

    Also empty if this process or one of its ancestors has called this before: call it where you show the text.
    """
    version = _installed()
    found = _RELEASE.fullmatch(version)
    is_tested = found is not None and _OLDEST <= (int(found[1]), int(found[2])) <= _NEWEST
    if not version or is_tested or os.environ.get(_WARNED_VARIABLE):
        return ""
    os.environ[_WARNED_VARIABLE] = version
    oldest, newest = (".".join(map(str, bound)) for bound in (_OLDEST, _NEWEST))
    return (
        f"torch {version} is untested: torch_ext is tested on the releases {oldest} to {newest}. "
        "Private names of torch may have moved; an error about one lists the places that were tried."
    )


def _installed() -> str:
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


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
