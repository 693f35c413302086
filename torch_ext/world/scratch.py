"""The folder for a process's short-lived files, such as rendezvous files. Standard library only."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

__all__ = ["folder", "give_up", "use"]


class _Scratch:
    """The folder of this process. A forked child does not own its parent's."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.path = ""
        self.made_here = False


_scratch = _Scratch()


def _mine() -> _Scratch:
    global _scratch
    if _scratch.owner != os.getpid():
        _scratch = _Scratch()
    return _scratch


def use(path: str) -> None:
    """Use the folder ``path``, which another process made and removes."""
    _mine().path = path


def folder() -> str:
    """Return the folder. It is made on first use and removed when the process is gone, however that ends."""
    scratch = _mine()
    if scratch.made_here and not os.path.isdir(scratch.path):
        os.mkdir(scratch.path, 0o700)  # a zygote that has ended removes it, and the next one does so again
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
    if scratch.owner == os.getpid() and scratch.made_here:
        shutil.rmtree(scratch.path, ignore_errors=True)
