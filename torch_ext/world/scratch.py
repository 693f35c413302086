"""The folder for a process's short-lived files, such as rendezvous files. Standard library only."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile

from torch_ext.world import _os

__all__ = ["folder", "give_up", "restore", "use"]


class _Scratch:
    """The folder of this process. A forked child does not own its parent's."""

    def __init__(self) -> None:
        self.owner = _os.getpid()
        self.path = ""
        self.made_here = False
        self.temporary = ""  # the folder for everybody's short-lived files


_scratch = _Scratch()


def _mine() -> _Scratch:
    global _scratch
    if _scratch.owner != _os.getpid():
        _scratch = _Scratch()
    return _scratch


def use(path: str) -> None:
    """Use the folder ``path``, which another process made and removes."""
    scratch = _mine()
    scratch.path, scratch.temporary = path, tempfile.gettempdir()


def restore() -> None:
    """Make the folders for short-lived files anew that a test has removed."""
    scratch = _mine()
    for path in (scratch.temporary, scratch.path):
        if path and not os.path.isdir(path):
            with contextlib.suppress(OSError):  # who needs the folder says so
                os.makedirs(path, 0o700)


def folder() -> str:
    """Return the folder. It is made on first use and removed when the process is gone, however that ends."""
    scratch = _mine()
    restore()  # a zygote that has ended removes it, and the next one does so again
    if not scratch.path:
        scratch.path = tempfile.mkdtemp(prefix="torch_ext-")
        scratch.made_here = True
        atexit.register(_remove, scratch)
    return scratch.path


def give_up() -> None:
    """Remove the folder if it was made here; the next use makes another. A zygote that ends removes its folder too."""
    scratch = _mine()
    _remove(scratch)
    if scratch.made_here:
        scratch.path, scratch.made_here = "", False


def _remove(scratch: _Scratch) -> None:
    if scratch.owner == _os.getpid() and scratch.made_here:
        shutil.rmtree(scratch.path, ignore_errors=True)
