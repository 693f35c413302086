"""How a process becomes a zygote: by loading modules in a fresh interpreter, by loading one more in a child, or by
forking as it is.

Runs in zygotes. :func:`main` and :func:`load_module` import what they are told to, torch among it; this file itself
imports none of it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch_ext.world.interpreter import Preparation, compute_on_one_thread, prepare_like_this_process
from torch_ext.world.wire import Channel
from torch_ext.world.zygote import Zygote

__all__ = ["Loaded", "ModuleOrder", "NotLoaded", "RootOrder", "become_zygote", "load_module", "main"]


@dataclass(frozen=True)
class RootOrder:
    """What the first zygote of a run loads, sent to it when it has started.

    Attributes:
        preparation: its ``sys.path`` and what it imports; a module that cannot be imported ends the zygote.
        scratch: a folder to remove at the end.
    """

    preparation: Preparation
    scratch: str = ""


@dataclass(frozen=True)
class ModuleOrder:
    """Which test module a module zygote loads: its name, the folder to put on ``sys.path``, and its ``sys.argv``."""

    name: str
    import_root: str
    file: str
    environment: dict[str, str]
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """The zygote is ready. ``imported`` are the files of all modules that it holds from below the given folders."""

    imported: tuple[str, ...]


@dataclass(frozen=True)
class NotLoaded:
    """The module could not be imported; ``trace`` is the traceback."""

    trace: str


def main() -> NoReturn:
    """Program of the root zygote: ``python -c ... <descriptor>``. Its first message is a :class:`RootOrder`."""
    command = Channel.from_descriptor(int(sys.argv[1]))
    os.set_inheritable(command.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order, _ = command.receive()
    # What a module prints while it is imported must not end up among the runner's own output.
    os.dup2(2, 1)
    try:
        order.preparation.apply()
    except BaseException:
        command.send(NotLoaded(_trace_of_import()))
        os._exit(1)
    command.send(Loaded(()))
    Zygote(command, "the zygote", order.preparation, order.scratch).serve()


def load_module(order: ModuleOrder, descriptors: Sequence[int]) -> NoReturn:
    """Target of a child of the root zygote: import one test module and serve. Descriptor: the command channel."""
    command = Channel.from_descriptor(descriptors[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(order.environment)
    if order.import_root not in sys.path:
        sys.path.insert(0, order.import_root)
    sys.argv[:] = order.argv
    try:
        importlib.import_module(order.name)
    except BaseException:
        command.send(NotLoaded(_trace_of_import()))
        os._exit(1)
    command.send(Loaded(_files_below((order.import_root, os.path.dirname(os.path.dirname(os.path.dirname(__file__)))))))
    preparation = Preparation(tuple(entry or os.getcwd() for entry in sys.path), (order.name,))
    Zygote(command, f"the zygote of {order.name}", preparation).serve()


def become_zygote(command: Channel, modules: tuple[str, ...], scratch: str) -> NoReturn:
    """Serve as the zygote of ``modules``, all loaded, in a process that was just forked for that purpose."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    compute_on_one_thread()
    Zygote(command, "the zygote of this program", prepare_like_this_process(modules), scratch).serve()


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
    real = {os.path.realpath(file) for file in files if file}
    return tuple(sorted(file for file in real if file.startswith(roots) and not file.startswith(own)))
