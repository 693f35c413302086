"""Finds or starts the zygote that serves this process. A zygote is a fork of this process, a fresh interpreter that
loads its modules, or a zygote's child that loads one more. Loads torch only if its orders name it.

The supervisor gives a zygote to each class process (:func:`use`). Any other process that runs tests (``python -m
unittest``, ``pytest``, a debugger) makes one: an early fork of itself, or a fresh interpreter that loads the same
modules (see Note [Fork safety]).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from torch_ext.world import _os, child, files, threads
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair, close_all
from torch_ext.world.child import (
    PACKAGE_ROOT,
    compute_on_one_thread,
    end_fork,
    load,
    load_first_uses,
    preparation_of_this_process,
    rarely_collected,
    reason_not_to_fork,
)
from torch_ext.world.protocol import (
    STACK_SIGNAL,
    CopyOrder,
    Loaded,
    ModuleOrder,
    NotLoaded,
    Preparation,
    WarmOrder,
)
from torch_ext.world.tree import ModuleZygote, RootZygote, ZygoteClient
from torch_ext.world.wording import announce
from torch_ext.world.zygote import Zygote


@dataclass(eq=False)
class _Zygotes:
    """The zygotes of this process. A forked child starts without any: its parent's zygotes do not serve it."""

    given: ZygoteClient | None = None
    lost_given: bool = False
    starts_none: bool = False
    is_watched: bool = False
    forked: ZygoteClient | None = None
    forked_modules: frozenset[str] = frozenset()
    root: RootZygote | None = None
    loaded: dict[str, ZygoteClient] = field(default_factory=dict)  # below the root, by module


_own = _Zygotes()


def _start_without_any() -> None:
    global _own
    _own = _Zygotes()


os.register_at_fork(after_in_child=_start_without_any)


def use(channel: Channel, scratch_folder: str) -> None:
    """Have the zygote behind ``channel`` serve this process for every module."""
    _own.given, _own.lost_given = ZygoteClient(channel), False
    files.use(scratch_folder)


def given_zygote_ended() -> bool:
    """Whether the zygote of :func:`use` has ended."""
    # Zygotes send nothing here: readable = ended.
    return _own.lost_given or (_own.given is not None and _own.given.channel.poll())


def never_start_ranks() -> None:
    """Have :func:`prepare` do nothing in this process, which collects tests and runs none."""
    _own.starts_none = True


def zygote_for(module: str) -> ZygoteClient:
    """Return a zygote that has loaded ``module``; start a zygote if necessary."""
    if _own.given is not None:
        return _own.given
    if _own.forked is not None and module in _own.forked_modules and _is_alive(_own.forked):
        return _own.forked
    if module in _own.loaded:
        zygote = _own.loaded[module]
        if not zygote.channel.poll():  # zygotes send nothing here: readable = ended
            return zygote
        del _own.loaded[module]
        zygote.close()
        if _own.root is not None and not _own.root.channel.closed and not _own.root.channel.poll():
            return _load(module)  # keep the root: at its end it removes the folder
        _end_root(_own)
    _os.require_supported()
    why = reason_not_to_fork()
    if not why:
        return _fork()
    announce(f"this process cannot be forked, so a fresh interpreter loads {module} for the ranks: {why}")
    return _load(module)


def zygote_of_this_process() -> ZygoteClient | None:
    """Return the zygote that adopts this process's orphans; None if this process adopts them."""
    return _own.given


def zygotes() -> tuple[int, ...]:
    """Return the pids of the zygotes that this process has started."""
    return tuple(each.pid for each in (_own.forked, _own.root) if each is not None)


def watch_this_process() -> None:
    """Adopt this process's orphans and track the threads of its transports, unless a zygote does so: see Note [Who else
    may act]. Call it in each process before a test's file can start processes.
    """
    if _own.given is None and not _own.starts_none and not _own.is_watched and not child.is_of_zygote:
        _own.is_watched = True
        _os.adopt_orphans()
        threads.prepare()


def prepare(module: str, harmless: Collection[int] = ()) -> str:
    """Fork the zygote of ``module`` now, before this process makes forks unsafe; return why it is unsafe now, if it is.
    ``harmless``: the numbers of threads that children can do without.
    """
    watch_this_process()
    has_zygote = module in _own.forked_modules or module in _own.loaded
    if _own.starts_none or _own.given is not None or has_zygote:
        return ""
    if not (why := reason_not_to_fork(harmless)):
        _fork()
    return why


def forget(zygote: ZygoteClient) -> None:
    """Forget a zygote of :func:`zygote_for` that is gone; the next request starts another."""
    zygote.channel.close()
    if zygote is _own.given:
        _own.given, _own.lost_given = None, True
    elif zygote is _own.forked:
        _end_fork(_own, zygote)
        _own.forked, _own.forked_modules = None, frozenset()
    elif zygote in _own.loaded.values():
        _end_root(_own)


def _fork() -> ZygoteClient:
    others = _os.identify(set(_os.children_of(_os.getpid())).difference(zygotes()))  # started by imports
    if _own.forked is not None:
        _own.forked.close()
        files.remove_own()
    load_first_uses()  # here, since this process needs them too, and each fork would repeat the import
    local, remote = channel_pair()
    modules = frozenset(sys.modules)
    folder = files.folder()
    _os.flush_output()
    pid = _os.fork()
    if pid == 0:
        try:
            local.close()
            _os.lead_process_group()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            loadable = tuple(name for name in modules if _is_loadable(name))
            load_first_uses(*(getattr(sys.modules.get(name), "__file__", None) or "" for name in loadable))
            compute_on_one_thread()
            preparation = preparation_of_this_process(loadable)
            Zygote(remote, "the zygote of this program", preparation, folder, others=others).serve()
        finally:
            os._exit(1)
    remote.close()
    _own.forked, _own.forked_modules = ZygoteClient(local, pid), modules
    atexit.register(_end_fork, _own, _own.forked)
    return _own.forked


def _is_loadable(name: str) -> bool:
    """Whether a fresh interpreter must import ``name``: ``__main__`` and test modules, which import the rest."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    return name == "__main__" or os.path.basename(file).startswith("test_")


def _is_alive(forked: ZygoteClient) -> bool:
    """Whether the forked zygote still runs; forgets one that does not."""
    with contextlib.suppress(ChildProcessError):  # other code of this process has reaped the zygote
        if _os.waitpid(forked.pid, os.WNOHANG) == (0, 0):
            return True
    forget(forked)
    return False


def _load(module: str) -> ZygoteClient:
    if _own.root is None:
        main = preparation_of_this_process(("__main__",) if module == "__main__" else ())
        _own.root = RootZygote(main, files.folder(), os.environ)
        atexit.register(_end_root, _own)
    _own.root.wait_ready()
    if module == "__main__":
        _own.loaded[module] = _own.root
        return _own.root
    order = ModuleOrder(module, sys.path[0] or os.getcwd(), dict(os.environ), tuple(sys.argv))
    _own.loaded[module] = zygote = ModuleZygote(_own.root, order)
    zygote.wait_loaded()
    return zygote


def _end_fork(own: _Zygotes, zygote: ZygoteClient) -> None:
    if own is _own:
        zygote.close()
        with contextlib.suppress(ChildProcessError):
            _os.waitpid(zygote.pid, 0)


def _end_root(own: _Zygotes) -> None:
    if own is _own:
        for zygote in own.loaded.values():
            zygote.close()
        if own.root is not None:
            own.root.close()
        own.root, own.loaded = None, {}


def main() -> NoReturn:
    """Program of the root zygote: ``python -c ... <descriptor>``. Its first message is a
    :class:`~torch_ext.world.protocol.RootOrder`.
    """
    command = Channel.from_descriptor(int(sys.argv[1]))
    os.set_inheritable(command.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _os.lead_process_group()
    _serve_run(command)


def serve_run(order: WarmOrder, descriptors: Sequence[int]) -> NoReturn:
    """Target of a child of a warm zygote: become the root zygote of a run. Descriptors: the command channel, the run's
    stderr, and a pipe for stacks.
    """
    command = Channel.from_descriptor(descriptors[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(descriptors[1], 2)
    close_all(descriptors[1:])
    child.environment_of_run = order.environment
    child.enter(order.environment)
    os.chdir(order.directory)
    os.umask(order.umask)
    time.tzset()
    tempfile.tempdir = None
    _serve_run(command)


def _serve_run(command: Channel) -> NoReturn:
    scratch = ""
    try:
        order, _ = command.receive()
        scratch = order.scratch
        # Modules may print during their import: keep that out of the runner's output.
        os.dup2(2, 1)
        try:
            load(order.preparation)
        except BaseException:
            command.send(NotLoaded(_trace_of_import()))
            os._exit(1)
        command.send(Loaded())
        Zygote(command, "the zygote", order.preparation, order.scratch).serve()
    except ChannelClosedError:  # the parent was interrupted or killed, and has ended or dropped this process
        with contextlib.suppress(OSError):
            os.rmdir(scratch)  # unless others use it
        os._exit(0)


def load_module(order: ModuleOrder, descriptors: Sequence[int]) -> NoReturn:
    """Target of a child of the root zygote: import one test module and serve.

    Descriptors: the command channel, and a pipe for the stack of an import that hangs.
    """
    command = Channel.from_descriptor(descriptors[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _os.lead_process_group()
    _os.adopt_orphans()  # before the import starts processes: see Note [Who else may act]
    os.environ.clear()
    os.environ.update(order.environment)
    # First on the path: another folder may have a module of the same name.
    sys.path[:] = [order.import_root, *(entry for entry in sys.path if entry != order.import_root)]
    sys.argv[:] = order.argv
    importing = _os.getpid()
    faulthandler.register(STACK_SIGNAL, descriptors[1], all_threads=True)
    try:
        with child.track_environment(), rarely_collected():
            for name in (*order.first, order.name):
                importlib.import_module(name)
            load_first_uses(getattr(sys.modules[order.name], "__file__", None) or "")
    except BaseException as error:
        if _os.getpid() != importing:
            end_fork(error, _trace_of_import())
        command.send(NotLoaded(_trace_of_import(), _exit_reason(error)))
        os._exit(1)
    if _os.getpid() != importing:
        end_fork(None)
    faulthandler.unregister(STACK_SIGNAL)
    close_all([descriptors[1]])  # so that no child keeps it
    command.send(Loaded(_files_below((order.import_root, PACKAGE_ROOT))))
    preparation = Preparation(tuple(entry or os.getcwd() for entry in sys.path), (*order.first, order.name))
    Zygote(command, f"the zygote of {order.name}", preparation).serve()


def serve_as_copy(order: CopyOrder, descriptors: Sequence[int]) -> NoReturn:
    """Target of a child of a zygote: serve as its copy. Descriptors: the command channel, a pipe for stacks."""
    command = Channel.from_descriptor(descriptors[0])
    close_all([descriptors[1]])
    compute_on_one_thread()
    command.send(Loaded())
    Zygote(command, order.description, order.preparation, original=order.original, others=order.others).serve()


def is_skip_of_pytest(error: BaseException) -> bool:
    """Whether ``pytest.skip()`` or one of its kin has raised ``error``."""
    return isinstance(error, getattr(sys.modules.get("_pytest.outcomes"), "Skipped", ()))


def _exit_reason(error: BaseException) -> str:
    """Return the reason why a module skipped itself or ended the program by ``error``; empty for a failure.

    >>> _exit_reason(SystemExit(0)), _exit_reason(SystemExit(1)), _exit_reason(unittest.SkipTest("no C++ compiler"))
    ('the file ends the program while it is imported: sys.exit(0)', '', 'no C++ compiler')
    """
    if isinstance(error, unittest.SkipTest) or is_skip_of_pytest(error):
        return str(error) or "the file raises SkipTest while it is imported"
    if not isinstance(error, SystemExit) or error.code:
        return ""
    lines = traceback.extract_tb(error.__traceback__)
    where = f" in line {lines[-1].lineno} of {os.path.basename(lines[-1].filename)}" if lines else ""
    return f"the file ends the program while it is imported: sys.exit(0){where}"


def _trace_of_import() -> str:
    """Format the current exception without the frames of the import system and of this file."""
    shown = traceback.TracebackException(*sys.exc_info())
    kept = [f for f in shown.stack if f.filename != __file__ and "importlib" not in f.filename]
    shown.stack[:] = kept
    return "".join(shown.format())


def _files_below(folders: Sequence[str]) -> tuple[str, ...]:
    roots = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    own = os.path.realpath(sys.prefix) + os.sep
    real_folder = functools.cache(os.path.realpath)  # a system call for each part of a path, and 2,000 modules
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    # torch.ops and torch.classes have a __file__ that does not exist.
    split = {os.path.split(file) for file in files if file and os.path.isabs(file)}
    paths = (os.path.join(real_folder(folder), name) for folder, name in split)
    real = {os.path.realpath(path) for path in paths if not path.startswith(own)}
    return tuple(sorted(file for file in real if file.startswith(roots) and not file.startswith(own)))
