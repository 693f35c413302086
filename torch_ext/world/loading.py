"""How a process becomes a zygote: by loading modules in a fresh interpreter, by loading one more in a child, or by
forking as it is.

Runs in zygotes. :func:`main` and :func:`load_module` import what they are told to, torch included; this file itself
imports the standard library and its own layer only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
import unittest
from collections.abc import Iterator, Sequence
from typing import NoReturn

from torch_ext.world import _os, child, frames
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.child import (
    PACKAGE_ROOT,
    compute_on_one_thread,
    end_fork,
    load,
    load_first_uses,
    preparation_of_this_process,
    uncollected,
)
from torch_ext.world.protocol import STACK_SIGNAL, CopyOrder, Loaded, ModuleOrder, NotLoaded, Preparation, RootOrder
from torch_ext.world.zygote import Zygote

__all__ = ["become_zygote", "load_and_serve", "load_module", "main", "serve_as_copy"]

frames.hide(r"/world/loading\.py", "load_module", outwards=True)
frames.hide(r"<frozen importlib\._bootstrap(?:_external)?>", "_call_with_frames_removed")


def main() -> NoReturn:
    """Program of the root zygote: ``python -c ... <descriptor>``. Its first message is a
    :class:`~torch_ext.world.protocol.RootOrder`.
    """
    command = Channel.from_descriptor(int(sys.argv[1]))
    os.set_inheritable(command.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _os.lead_process_group()
    try:
        order, _ = command.receive()
        # What a module prints while it is imported must not mix with the runner's own output.
        os.dup2(2, 1)
        load_and_serve(command, order)
    except ChannelClosedError:  # whoever started this process was interrupted, and is gone or needs it no more
        os._exit(0)


def load_and_serve(command: Channel, order: RootOrder) -> NoReturn:
    """Load what ``order`` says, tell whether that went well, and serve as the first zygote of a run.

    Raises:
        ChannelClosedError: the run is gone.
    """
    try:
        load(order.preparation)
    except BaseException:
        command.send(NotLoaded(_trace_of_import()))
        os._exit(1)
    command.send(Loaded(hidden_frames=frames.hidden()))
    Zygote(command, "the zygote", order.preparation, order.scratch).serve()


def load_module(order: ModuleOrder, descriptors: Sequence[int]) -> NoReturn:
    """Target of a child of the root zygote: import one test module and serve.

    Descriptors: the command channel, and a pipe for the stack of an import that hangs.
    """
    command = Channel.from_descriptor(descriptors[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _os.lead_process_group()
    _os.adopt_orphans()  # those of the import too: see Note [Who else may act]
    os.environ.clear()
    os.environ.update(order.environment)
    # In front, wherever it stood: another folder may have a module of the same name.
    sys.path[:] = [order.import_root, *(entry for entry in sys.path if entry != order.import_root)]
    sys.argv[:] = order.argv
    importing = _os.getpid()
    try:
        with _stacks_to(descriptors[1]), child.noted(), uncollected():
            for name in (*order.first, order.name):
                importlib.import_module(name)
            load_first_uses(getattr(sys.modules[order.name], "__file__", None) or "")
    except BaseException as error:
        if _os.getpid() != importing:
            end_fork(error, _trace_of_import())
        command.send(NotLoaded(_trace_of_import(), _leave(error)))
        os._exit(1)
    if _os.getpid() != importing:
        end_fork(None)
    command.send(Loaded(_files_below((order.import_root, PACKAGE_ROOT)), frames.hidden()))
    preparation = Preparation(tuple(entry or os.getcwd() for entry in sys.path), (*order.first, order.name))
    Zygote(command, f"the zygote of {order.name}", preparation).serve()


def serve_as_copy(order: CopyOrder, descriptors: Sequence[int]) -> NoReturn:
    """Target of a child of a zygote, which has loaded what that has: serve as it does. Descriptor: the command
    channel.
    """
    command = Channel.from_descriptor(descriptors[0])
    compute_on_one_thread()
    command.send(Loaded())
    Zygote(command, order.description, order.preparation, original=order.original, others=order.others).serve()


@contextlib.contextmanager
def _stacks_to(pipe: int) -> Iterator[None]:
    """Have the stack signal write to ``pipe``, which is closed at the end so that no child keeps it."""
    faulthandler.register(STACK_SIGNAL, pipe, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(STACK_SIGNAL)
        os.close(pipe)


def become_zygote(command: Channel, modules: tuple[str, ...], scratch: str) -> NoReturn:
    """Serve as the zygote of ``modules``, all of them loaded, in a process that was just forked to do so."""
    _os.lead_process_group()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    load_first_uses(*(getattr(sys.modules.get(name), "__file__", None) or "" for name in modules))
    compute_on_one_thread()
    Zygote(command, "the zygote of this program", preparation_of_this_process(modules), scratch).serve()


def _leave(error: BaseException) -> str:
    """Return why a module that raised ``error`` asked not to be run; empty if ``error`` is a failure.

    >>> _leave(SystemExit(0)), _leave(SystemExit(1)), _leave(unittest.SkipTest("no C++ compiler"))
    ('the file ends the program while it is imported: sys.exit(0)', '', 'no C++ compiler')
    """
    if isinstance(error, unittest.SkipTest):
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
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    # torch.ops and torch.classes give themselves names of files that do not exist.
    real = {os.path.realpath(file) for file in files if file and os.path.isabs(file)}
    return tuple(sorted(file for file in real if file.startswith(roots) and not file.startswith(own)))
