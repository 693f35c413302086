"""The private torch names that torch_ext uses, one lazy module per area of torch, and the tested releases.

A name is looked up on first use, so one that has moved breaks only the feature that needs it, and the error names it.
Suites that mirror upstream files import private names of torch directly, as upstream's files do.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata

from torch_ext.compat._lookup import MissingTorchNameError

__all__ = ["MissingTorchNameError", "UntestedTorchWarning", "untested_torch"]

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
