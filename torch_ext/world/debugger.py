"""A debugger in one rank, at the user's terminal (``--pdb``). Standard library and own layer only.

Note [The terminal]
~~~~~~~~~~~~~~~~~~~
A rank leads a process group of its own, in the background of the terminal that started the run. Its stdin is empty, and
its output goes to the harness. While its debugger prompts, the group is in the foreground and descriptors 0 to 2 are
the terminal; afterwards all is as before. ``pdb.Pdb.interaction`` is where ``breakpoint()``, ``pdb.set_trace()``, ipdb
and ``torch.distributed.breakpoint()`` prompt. Until the rank goes on, the parent half judges nothing: no limit ends,
and no hang is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch_ext.world import settings, wording
from torch_ext.world.protocol import Phase

_is_debugged = False


def prepare(rank: int, notify: Callable[[Phase], None]) -> None:
    """Prepare this process, rank ``rank``: for prompts if the user has asked for it, else to refuse or pass
    ``breakpoint()``. ``notify`` is called with each phase that a prompt begins or ends.
    """
    chosen = settings.debugged_rank()
    if chosen == rank:
        _prompt_at_terminal(notify)
    elif sys.breakpointhook is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _refuse(rank) if chosen is None else _pass


def examine(error: BaseException) -> None:
    """Prompt where ``error`` was raised, if the user debugs this rank and has not left the debugger by it."""
    if not _is_debugged or error.__traceback__ is None:
        return
    import bdb
    import pdb

    if not isinstance(error, (bdb.BdbQuit, KeyboardInterrupt)):
        with _terminal():
            print(f"{wording.read_error(error)[1]}\nThe debugger is where this was raised; c goes on with the failure.")
        pdb.post_mortem(error.__traceback__)


def _refuse(rank: int) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"breakpoint() needs a terminal, and a rank has one only with --pdb, here --pdb {rank}")

    return refuse


def _pass(*_: Any, **__: Any) -> None:
    """The user debugs another rank."""


def _prompt_at_terminal(notify: Callable[[Phase], None]) -> None:
    """See Note [The terminal]."""
    global _is_debugged
    import pdb

    interact = pdb.Pdb.interaction

    def interaction(self: pdb.Pdb, *arguments: Any, **keywords: Any) -> None:
        notify(Phase.PROMPTING)
        try:
            with _terminal():
                interact(self, *arguments, **keywords)
        finally:
            notify(Phase.RUNNING)

    _is_debugged = True
    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Context: descriptors 0 to 2 are the terminal, and this process group is in its foreground."""
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.open(settings.TERMINAL, os.O_RDWR)
    kept = [os.dup(number) for number in range(3)]
    stop = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # no shell could continue this process
    before = os.tcgetpgrp(terminal)
    _take(terminal, os.getpgrp())
    for number in range(3):
        os.dup2(terminal, number)
    stdin, sys.stdin = sys.stdin, open(0, closefd=False)  # noqa: SIM115  # the old one may have read the end of its file
    try:
        yield
    finally:
        sys.stdin = stdin
        sys.stdout.flush()
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _take(terminal, before)
        signal.signal(signal.SIGTSTP, stop)
        os.close(terminal)


def _take(terminal: int, group: int) -> None:
    """Put process group ``group`` in the foreground. The kernel would stop a process of the background that does so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        os.tcsetpgrp(terminal, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
