"""Which releases of torch this project is tested on, and what to say once where another one is installed.

Imports no torch: the runner asks before anything that is slow to load is loaded.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata

__all__ = ["UntestedTorchWarning", "untested_torch"]

_OLDEST, _NEWEST = (2, 11), (2, 15)

# A release, with or without what its build adds ("2.13.0+cpu"); nightly and source builds have letters before the plus.
_RELEASE = re.compile(r"(\d+)\.(\d+)(\.\d+)*(\.post\d+)?(\+.*)?")

# Set once something has been said, so that the processes that this one starts do not say it again.
_TOLD_VARIABLE = "TORCH_EXT_TOLD_VERSION"


class UntestedTorchWarning(UserWarning):
    """The installed torch is none of the releases that this project is tested on."""


def untested_torch() -> str:
    """Return what to tell the user about the installed torch; empty if it is tested, not installed, or told already.

    "Already" is meant for this process and those that it starts: call it where the text is shown.
    """
    version = _installed()
    if not version or _is_tested(version) or os.environ.get(_TOLD_VARIABLE):
        return ""
    os.environ[_TOLD_VARIABLE] = version
    oldest, newest = (".".join(map(str, bound)) for bound in (_OLDEST, _NEWEST))
    return (
        f"torch {version} is untested: torch_ext is tested on the releases {oldest} to {newest}. "
        "Private names of torch may have moved; an error about one says where it was looked for."
    )


def _installed() -> str:
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _is_tested(version: str) -> bool:
    found = _RELEASE.fullmatch(version)
    return found is not None and _OLDEST <= (int(found[1]), int(found[2])) <= _NEWEST
