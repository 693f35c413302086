"""The user's cache folder: compiled libraries, names of tests and the history. Standard library only.

Note [Trusted folders]
~~~~~~~~~~~~~~~~~~~~~~
Every rank loads files of the cache, and other files decide which tests run. So a file is used only if no user but its
owner and root could have written it: the file, its folder and every folder above belong to one of the two, and neither
their group nor others may write there. A sticky folder such as ``/tmp`` is allowed above, because other users cannot
replace entries in it. Folders are made with mode 0700.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder() -> Path | None:
    """Return the folder, which need not exist: ``$TORCH_EXT_CACHE``, else ``torch_ext`` in the user's own cache folder;
    None if the user has no home.
    """
    if chosen := os.environ.get("TORCH_EXT_CACHE"):
        return Path(os.path.expanduser(chosen))
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(os.path.expanduser(base)) / "torch_ext"
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home) / ".cache" / "torch_ext"


def why_not_trusted(path: Path) -> str:
    """Return a sentence about why ``path`` must not be used, with the remedy; empty if it is trusted.

    If ``path`` does not exist, the folders above it decide. See Note [Trusted folders].
    """
    path = Path(os.path.abspath(path))
    real = path.resolve()  # the owner of a link in the path could replace it
    places = dict.fromkeys((path, *path.parents, real, *real.parents))
    return next((why for each in places if (why := _problem(each, above=each not in (path, real)))), "")


def make(path: Path) -> None:
    """Make the folder ``path`` and missing folders above it, accessible to the user alone."""
    for each in reversed((path, *path.parents)):
        if not each.is_dir():
            os.makedirs(each, mode=0o700, exist_ok=True)


def write(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader sees all of it or none; make its folder. After an error, no
    temporary file stays.
    """
    make(path.parent)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def _problem(path: Path, *, above: bool) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    remedy = "or point TORCH_EXT_CACHE at a folder of your own"
    if found.st_uid not in (os.geteuid(), 0):
        owner = f"user {found.st_uid}, not you (user {os.geteuid()})"
        return f"the cache is not used because {path} belongs to {owner}: take it over with chown, {remedy}"
    if found.st_mode & _OTHERS_WRITE and not (above and found.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(found.st_mode)
        return f"the cache is not used because others may write {path} (mode {mode:04o}): chmod go-w it, {remedy}"
    return ""
