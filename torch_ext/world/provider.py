"""Which zygote serves this process. Standard library and own layer only.

A class process is told by its supervisor (:func:`use`). Any other process that runs tests (``python -m unittest``,
``pytest``, a debugger) gets a zygote of its own: a fork of itself, taken early, while forking is still safe (see Note
[Fork safety]); otherwise a fresh interpreter that loads what this process has loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

from torch_ext.world import _os, files, transports
from torch_ext.world.channel import Channel, channel_pair
from torch_ext.world.child import preparation_of_this_process, reason_not_to_fork
from torch_ext.world.loading import become_zygote
from torch_ext.world.protocol import ModuleOrder
from torch_ext.world.tree import ModuleZygote, RootZygote, start_root
from torch_ext.world.wording import announce

__all__ = [
    "forget",
    "given_is_gone",
    "never_start_ranks",
    "pid_behind",
    "prepare",
    "use",
    "watch_this_process",
    "zygote_for",
    "zygote_of_this_process",
    "zygotes",
]


class _Zygotes:
    """The zygotes of this process. A forked child has none: its parent's are not its own."""

    def __init__(self) -> None:
        self.owner = _os.getpid()
        self.given: Channel | None = None
        self.lost_given = False
        self.starts_none = False
        self.is_watched = False
        self.forked: tuple[Channel, frozenset[str], int] | None = None
        self.root: RootZygote | None = None
        self.loaded: dict[str, Channel] = {}
        self.zygotes: list[ModuleZygote] = []


_zygotes = _Zygotes()


def _mine() -> _Zygotes:
    global _zygotes
    if _zygotes.owner != _os.getpid():
        _zygotes = _Zygotes()
    return _zygotes


def use(channel: Channel, scratch_folder: str) -> None:
    """Have the zygote at the other end of ``channel`` serve this process, whatever module it asks for."""
    own = _mine()
    own.given, own.lost_given = channel, False
    files.use(scratch_folder)


def given_is_gone() -> bool:
    """Whether the zygote that this process was told to use has ended."""
    own = _mine()
    return own.lost_given or (own.given is not None and own.given.poll())  # nothing is sent on it unasked


def never_start_ranks() -> None:
    """Have :func:`prepare` do nothing in this process, which collects tests and runs none."""
    _mine().starts_none = True


def zygote_for(module: str) -> Channel:
    """Return a command channel to a zygote that has loaded ``module``, starting one if need be."""
    own = _mine()
    if own.given is not None:
        return own.given
    if own.forked is not None and module in own.forked[1] and _alive(own):
        return own.forked[0]
    if module in own.loaded:
        if not own.loaded[module].poll():  # nothing is sent on it unasked: what can be read is its end
            return own.loaded[module]
        if _loads_again(own, module):
            return _load(own, module)
    _os.require_supported()
    why = reason_not_to_fork()
    if not why:
        return _fork(own)
    announce(f"this process cannot be forked, so a fresh interpreter loads {module} for the ranks: {why}")
    return _load(own, module)


def pid_behind(channel: Channel) -> int:
    """Return the pid of the zygote that :func:`zygote_for` has answered with; 0 if another process started it."""
    own = _mine()
    if own.forked is not None and own.forked[0] is channel:
        return own.forked[2]
    return next((zygote.pid for zygote in own.zygotes if zygote.channel is channel), 0)


def zygote_of_this_process() -> Channel | None:
    """Return a command channel to the zygote that adopts what this process leaves behind; None if this process does."""
    return _mine().given


def zygotes() -> tuple[int, ...]:
    """Return the pids of the zygotes that this process has started."""
    own = _mine()
    forked = (own.forked[2],) if own.forked is not None else ()
    return (*forked, own.root.process.pid) if own.root is not None else forked


def watch_this_process() -> None:
    """Have this process, which runs tests by itself, adopt its orphans, and know the threads of its transports. A child
    of a zygote need not: see Note [Who else may act].
    """
    own = _mine()
    if own.given is None and not own.starts_none and not own.is_watched:
        own.is_watched = True
        _os.adopt_orphans()
        transports.prepare()


def prepare(module: str) -> None:
    """Fork the zygote of ``module`` now if that is safe, before something in this process makes it unsafe. Otherwise do
    nothing.
    """
    own = _mine()
    watch_this_process()
    known = (
        own.starts_none
        or own.given is not None
        or (own.forked is not None and module in own.forked[1])
        or module in own.loaded
    )
    if not known and not reason_not_to_fork():
        _fork(own)


def forget(channel: Channel) -> None:
    """The zygote behind ``channel`` is gone: have the next request start another."""
    own = _mine()
    channel.close()
    if own.forked is not None and own.forked[0] is channel:
        with contextlib.suppress(ChildProcessError):
            _os.waitpid(own.forked[2], 0)
        own.forked = None
    if own.given is channel:
        own.given, own.lost_given = None, True
    if channel in own.loaded.values():
        _end_root(own)


def _fork(own: _Zygotes) -> Channel:
    if own.forked is not None:
        own.forked[0].close()
        files.give_up()
    ours, theirs = channel_pair()
    modules = frozenset(sys.modules)
    folder = files.folder()
    _os.flush_output()
    pid = _os.fork()
    if pid == 0:
        try:
            ours.close()
            become_zygote(theirs, tuple(name for name in modules if _is_loadable(name)), folder)
        finally:
            os._exit(1)
    theirs.close()
    own.forked = (ours, modules, pid)
    atexit.register(_end_fork, own, ours, pid)
    return ours


def _is_loadable(name: str) -> bool:
    """Whether a fresh interpreter should import ``name`` at once: test modules and ``__main__``; whatever they need
    follows.
    """
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    return name == "__main__" or os.path.basename(file).startswith("test_")


def _alive(own: _Zygotes) -> bool:
    """Whether the forked zygote still runs; reap it if not."""
    if own.forked is None:
        return False
    channel, _, pid = own.forked
    try:
        if _os.waitpid(pid, os.WNOHANG) == (0, 0):
            return True
    except ChildProcessError:
        pass  # somebody else in this process reaped it
    forget(channel)
    return False


def _load(own: _Zygotes, module: str) -> Channel:
    if own.root is None:
        main = preparation_of_this_process(("__main__",) if module == "__main__" else ())
        own.root = start_root(main, files.folder(), os.environ)
        atexit.register(_end_root, own)
    own.root.wait_ready()
    if module == "__main__":
        own.loaded[module] = own.root.channel
        return own.root.channel
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    order = ModuleOrder(module, sys.path[0] or os.getcwd(), file, dict(os.environ), tuple(sys.argv))
    zygote = own.root.load(order)
    zygote.wait_loaded()
    own.zygotes.append(zygote)
    own.loaded[module] = zygote.channel
    return zygote.channel


def _loads_again(own: _Zygotes, module: str) -> bool:
    """Let go of the dead zygote of ``module``; return whether the root that loaded it is there to load it once more.

    The root stays, and so does the scratch folder, which it removes when it ends and where a test may have files.
    """
    channel = own.loaded.pop(module)
    for zygote in [each for each in own.zygotes if each.channel is channel]:
        own.zygotes.remove(zygote)
        zygote.close()
    if own.root is not None and not own.root.channel.closed and not own.root.channel.poll():
        return True
    forget(channel)
    return False


def _end_fork(own: _Zygotes, channel: Channel, pid: int) -> None:
    if own.owner == _os.getpid():
        channel.close()
        with contextlib.suppress(ChildProcessError):
            _os.waitpid(pid, 0)


def _end_root(own: _Zygotes) -> None:
    if own.owner == _os.getpid():
        for zygote in own.zygotes:
            zygote.close()
        if own.root is not None:
            own.root.close()
        own.root, own.zygotes, own.loaded = None, [], {}
