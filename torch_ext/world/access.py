"""Which zygote serves this process, and where its scratch files go.

A case process is told by its supervisor (:func:`use`). Any other process that runs tests (``python -m unittest``,
``pytest``, a debugger) gets a zygote of its own: a fork of itself, taken early, while it is still safe (see Note [Fork
safety]); else a fresh interpreter that loads what this process has loaded. Standard library and own layer only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile

from torch_ext.world.guard import reason_not_to_fork
from torch_ext.world.interpreter import prepare_like_this_process
from torch_ext.world.loading import ModuleOrder, become_zygote
from torch_ext.world.tree import ModuleZygote, RootZygote
from torch_ext.world.wire import Channel, channel_pair

__all__ = [
    "announce",
    "interpreter_wanted",
    "prepare",
    "scratch",
    "spares_wanted",
    "start_no_ranks",
    "use",
    "zygote_for",
]

INTERPRETER_VARIABLE = "TORCH_EXT_START_METHOD"
SPARES_VARIABLE = "TORCH_EXT_SPARES"


class _Access:
    """The zygotes of this process. A fork of it must not think that they are its own."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.given: Channel | None = None
        self.starts_no_ranks = False
        self.forked: tuple[Channel, frozenset[str], int] | None = None
        self.root: RootZygote | None = None
        self.loaded: dict[str, Channel] = {}
        self.zygotes: list[ModuleZygote] = []
        self.scratch = ""
        self.scratch_is_ours = False
        self.announced: set[str] = set()


_access = _Access()


def _mine() -> _Access:
    global _access
    if _access.owner != os.getpid():
        _access = _Access()
    return _access


def use(channel: Channel, scratch_folder: str) -> None:
    """Serve this process, and every module it asks for, by the zygote at the other end of ``channel``."""
    access = _mine()
    access.given, access.scratch = channel, scratch_folder


def start_no_ranks() -> None:
    """Have :func:`prepare` do nothing in this process: it looks at tests and runs none."""
    _mine().starts_no_ranks = True


def zygote_for(module: str) -> Channel:
    """Return a command channel to a zygote that has loaded ``module``, starting one if need be."""
    access = _mine()
    if access.given is not None:
        return access.given
    if access.forked is not None and module in access.forked[1] and _alive(access):
        return access.forked[0]
    if module in access.loaded:
        return access.loaded[module]
    why = reason_not_to_fork()
    if not why:
        return _fork(access)
    announce(f"this process cannot fork its ranks' zygote, so a fresh interpreter loads {module} for them: {why}")
    return _load(access, module)


def prepare(module: str) -> None:
    """Fork the zygote of ``module`` now if that is safe, so that what runs later in this process cannot make it unsafe.
    Else do nothing.
    """
    access = _mine()
    known = (
        access.starts_no_ranks
        or access.given is not None
        or (access.forked is not None and module in access.forked[1])
        or module in access.loaded
    )
    if not known and not reason_not_to_fork():
        _fork(access)


def forget(channel: Channel) -> None:
    """The zygote behind ``channel`` is gone: have the next request start another."""
    access = _mine()
    channel.close()
    if access.forked is not None and access.forked[0] is channel:
        access.forked = None
    if access.given is channel:
        access.given = None
    if channel in access.loaded.values():
        access.loaded = {}
        for zygote in access.zygotes:
            zygote.close()
        if access.root is not None:
            access.root.close()
        access.root, access.zygotes = None, []


def scratch() -> str:
    """Return a folder for this process's short-lived files; it is removed when the process is gone, however it ends."""
    access = _mine()
    if not access.scratch:
        access.scratch = tempfile.mkdtemp(prefix="torch_ext-")
        access.scratch_is_ours = True
        atexit.register(_remove_scratch, access)
    return access.scratch


def interpreter_wanted() -> bool:
    """Whether every rank is to get an interpreter of its own (``TORCH_EXT_START_METHOD=interpreter``)."""
    return os.environ.get(INTERPRETER_VARIABLE, "") == "interpreter"


def spares_wanted(world_size: int) -> int:
    """How many ranks to fork ahead: as many as the last world had, none with ``TORCH_EXT_SPARES=0``; large worlds start
    on demand.
    """
    return 0 if os.environ.get(SPARES_VARIABLE) == "0" or world_size > 16 else world_size


def announce(message: str) -> None:
    """Tell the user something once, on stderr."""
    access = _mine()
    if message not in access.announced:
        access.announced.add(message)
        print(f"torch_ext: {message}", file=sys.stderr, flush=True)


def _fork(access: _Access) -> Channel:
    if access.forked is not None:
        access.forked[0].close()
    ours, theirs = channel_pair()
    modules = frozenset(sys.modules)
    folder = scratch()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            become_zygote(theirs, tuple(name for name in modules if _is_loadable(name)), folder)
        finally:
            os._exit(1)
    theirs.close()
    access.forked = (ours, modules, pid)
    atexit.register(_end_fork, access, ours, pid)
    return ours


def _is_loadable(name: str) -> bool:
    """Whether a fresh interpreter should import ``name`` at once: test modules and ``__main__``; whatever they need
    follows.
    """
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    return name == "__main__" or os.path.basename(file).startswith("test_")


def _alive(access: _Access) -> bool:
    """Whether the forked zygote still runs; reap it if not."""
    if access.forked is None:
        return False
    channel, _, pid = access.forked
    try:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            return True
    except ChildProcessError:
        pass  # somebody else in this process reaped it
    forget(channel)
    return False


def _load(access: _Access, module: str) -> Channel:
    if access.root is None:
        main = prepare_like_this_process(("__main__",) if module == "__main__" else ())
        access.root = RootZygote(main, scratch(), os.environ)
        atexit.register(access.root.close)
    access.root.wait_ready()
    if module == "__main__":
        access.loaded[module] = access.root.channel
        return access.root.channel
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    order = ModuleOrder(module, sys.path[0] or os.getcwd(), file, dict(os.environ), tuple(sys.argv))
    zygote = access.root.load(order)
    zygote.wait_loaded()
    access.zygotes.append(zygote)
    access.loaded[module] = zygote.channel
    return zygote.channel


def _end_fork(access: _Access, channel: Channel, pid: int) -> None:
    if access.owner == os.getpid():
        channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _remove_scratch(access: _Access) -> None:
    if access.owner == os.getpid() and access.scratch_is_ours:
        shutil.rmtree(access.scratch, ignore_errors=True)
