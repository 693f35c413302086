"""What the tests of a module may depend on besides its text, seen while it is imported. Standard library only.

Note [What an import depends on]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A test file may make its tests from a data file, the entries of a folder or a variable. Python's audit events tell what
is opened, listed, started and connected to; a class in the place of that of ``os.environ`` tells which variables are
asked for. Whatever happens while a library is itself being imported counts as the library's, whose version is known;
what it does when the project's code calls it counts as the project's.

An audit hook cannot be taken away again, and then costs a fraction of a microsecond at each event. So it is set only
where somebody asks for a record, which a run does for files whose tests it does not remember.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch_ext.world.protocol import Dependencies

__all__ = ["Record", "recorded"]

# What leads to results that cannot be told apart later.
_UNSURE = {
    **dict.fromkeys(
        (
            "subprocess.Popen",
            "os.system",
            "os.fork",
            "os.forkpty",
            "os.exec",
            "os.posix_spawn",
            "os.spawn",
            "pty.spawn",
        ),
        "starts a process",
    ),
    **dict.fromkeys(
        ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"),
        "uses the network",
    ),
}
_LISTS = frozenset({"os.listdir", "os.scandir"})
_WATCHED = _UNSURE.keys() | _LISTS | {"open"}
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_MOST_PATHS = 2000


class Record:
    """What was seen. Paths are absolute."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.variables: set[str] = set()
        self.unsure = ""
        self._libraries = _library_folders()

    def dependencies(self, imported: tuple[str, ...]) -> Dependencies:
        """Return it with ``imported``, the project files that were imported."""
        unsure = self.unsure or ("reads very many files" if len(self.paths) > _MOST_PATHS else "")
        paths = () if unsure else tuple(sorted(self.paths - set(imported)))
        return Dependencies(imported, paths, tuple(sorted(self.variables)), unsure)

    def event(self, name: str, arguments: tuple[Any, ...], frame: FrameType | None) -> None:
        """Take one audit event, raised by ``frame``."""
        if name in _UNSURE:
            if self._is_projects(frame):
                self.unsure = self.unsure or _UNSURE[name]
        elif name in _LISTS or (name == "open" and _reads(arguments)):
            path = _absolute(arguments[0])
            if path and not path.startswith(self._libraries) and self._is_projects(frame):
                self.paths.add(path)

    def variable(self, name: str | bytes, frame: FrameType | None) -> None:
        """Take note that a variable was asked for."""
        if self._is_projects(frame):
            self.variables.add(os.fsdecode(name))  # the search for a program asks for bytes

    def all_variables(self, frame: FrameType | None) -> None:
        """Take note that every variable was asked for."""
        if self._is_projects(frame):
            self.unsure = self.unsure or "reads the whole environment"

    def _is_projects(self, frame: FrameType | None) -> bool:
        """Whether the innermost module that is being imported is the project's, and it is not the import that acts."""
        if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        while frame is not None:
            file = frame.f_code.co_filename
            if frame.f_code.co_name == "<module>" and not file.startswith("<"):
                return not file.startswith(self._libraries)
            frame = frame.f_back
        return True


def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch:
        folders.add(os.path.dirname(os.path.dirname(torch)))
    spellings = {spelling for folder in folders if folder for spelling in (folder, os.path.realpath(folder))}
    return (*_SYSTEM, *(f"{folder}{os.sep}" for folder in sorted(spellings)))


def _reads(arguments: tuple[Any, ...]) -> bool:
    """Whether the arguments of an ``open`` event, a path, a mode and flags, ask for what lies there."""
    _, mode, flags = arguments
    if isinstance(mode, str):
        return "r" in mode or "+" in mode
    return (flags or 0) & os.O_ACCMODE != os.O_WRONLY and not (flags or 0) & os.O_EXCL


def _absolute(path: Any) -> str:
    """Return an absolute path; empty for an open descriptor."""
    if path is None:
        path = "."
    if not isinstance(path, (str, bytes, os.PathLike)):
        return ""
    try:
        return os.path.abspath(os.fsdecode(path))
    except (OSError, ValueError):
        return ""


class _Hook:
    """The audit hook of this process, which stays for good and passes events to the record of the moment."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.is_set = False

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            sys.addaudithook(self)

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.record is not None and name in _WATCHED:  # asking for the frame is an event as well
            self.record.event(name, arguments, sys._getframe(1))


_hook = _Hook()


class _Environment(type(os.environ)):  # type: ignore[misc]  # the class is private, its objects are not
    """An ``os.environ`` that tells the record what is asked of it."""

    def __getitem__(self, name: str) -> str:
        if _hook.record is not None:
            _hook.record.variable(name, sys._getframe(1))
        value: str = super().__getitem__(name)
        return value

    def __iter__(self) -> Iterator[str]:
        if _hook.record is not None:
            _hook.record.all_variables(sys._getframe(1))
        return iter(super().__iter__())


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """Record what happens in the block. See Note [What an import depends on]."""
    _hook.set()
    record = _hook.record = Record()
    plain = type(os.environ)
    os.environ.__class__ = _Environment
    try:
        yield record
    finally:
        os.environ.__class__ = plain
        _hook.record = None
