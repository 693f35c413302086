"""What a rank still owes when its body is over, and does before it hands in its receipt. Runs in the rank; standard
library only.

Note [Nothing after the receipt]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In one process, unittest's exit code covers everything until the interpreter is gone. A rank is judged by its receipt,
so whatever could still go wrong happens before it: the threads that the body started are joined, and the functions that
it registered with ``atexit`` are called. An exception that escapes from either fails the test, and so does one that
escaped from any thread earlier. What cannot be done early is finalizing module globals, since modules are still in use;
the user is told of those that would have run code.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any

__all__ = ["Debts", "ExitFunctions", "UnfinishedWorkError", "disown_exit_functions", "unfinalized_globals"]

_Hook = Callable[..., Any]


class UnfinishedWorkError(RuntimeError):
    """A body that passed left work behind that failed."""


def disown_exit_functions() -> None:
    """Have nothing called at the end of this process that is registered by now. A zygote does it for all its children,
    who find little left to do: writing to objects that they share with it costs each of them a millisecond.
    """
    atexit._clear()
    finalize: Any = weakref.finalize
    if finalize._registered_with_atexit:
        for inherited in list(finalize._registry):
            inherited.atexit = False
        finalize._registered_with_atexit = False  # the next one is to register again


class ExitFunctions:
    """What a test has registered to be called at the end of its process, by ``atexit`` or ``weakref.finalize``.

    Make it before the test runs: what is registered by then was inherited from a zygote, and is not this process's to
    call.
    """

    def __init__(self) -> None:
        disown_exit_functions()
        self._errors: list[tuple[str, BaseException]] = []

    def call(self) -> list[tuple[str, BaseException]]:
        """Call them, the last first; return what they raised, each with where."""
        hooks = sys.unraisablehook, sys.excepthook
        sys.unraisablehook, sys.excepthook = self._note, self._note_finalizer
        try:
            atexit._run_exitfuncs()
        except BaseException as error:  # a SystemExit, on some releases of Python
            self._errors.append(("a function registered with atexit raised", error))
        finally:
            sys.unraisablehook, sys.excepthook = hooks
        errors, self._errors = self._errors, []
        return errors

    def _note(self, raised: Any) -> None:
        if raised.exc_value is not None:
            self._errors.append(("a function registered with atexit raised", raised.exc_value))

    def _note_finalizer(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        self._errors.append(("a finalizer registered with weakref raised", error))


class Debts:
    """What the body of this rank leaves to be done. Make it before the body runs."""

    def __init__(self) -> None:
        self._exit_functions = ExitFunctions()
        self._errors: list[tuple[str, BaseException]] = []
        self._before = set(threading.enumerate())
        self._hook: _Hook = threading.excepthook
        self._in_hook: set[int] = set()
        self.watch()

    def watch(self) -> None:
        """Note what escapes from threads. A hook that the test itself puts in place answers for them. One that an
        earlier test has left is called too.
        """
        if threading.excepthook != self._note_thread:
            self._hook, threading.excepthook = threading.excepthook, self._note_thread

    def settle(self) -> None:
        """Join threads and call what was registered with ``atexit``. Blocks as long as they do.

        Raises:
            UnfinishedWorkError: an exception escaped from one of them, or from a thread before.
        """
        self._join_threads()
        self._errors += self._exit_functions.call()
        self._finalize()
        self.check()

    def check(self) -> None:
        """Raise what has escaped from a thread so far.

        Raises:
            UnfinishedWorkError: as :meth:`settle`.
        """
        errors, self._errors = self._errors, []
        if errors:
            where, error = errors[0]
            raise UnfinishedWorkError(f"{where}: {type(error).__name__}: {error}") from error

    def _join_threads(self) -> None:
        # What the interpreter calls before it joins threads; a ThreadPoolExecutor ends its idle workers there.
        for function in reversed(getattr(threading, "_threading_atexits", [])):
            function()
        for thread in threading.enumerate():
            if thread not in self._before and not thread.daemon and thread is not threading.current_thread():
                thread.join()

    def _finalize(self) -> None:
        """Call multiprocessing's finalizers, which otherwise print what they raise and go on."""
        registry = util._finalizer_registry  # type: ignore[attr-defined]
        for key in sorted((key for key in registry if key[0] is not None), reverse=True):
            finalizer = registry.get(key)
            try:
                if finalizer is not None and finalizer._pid == os.getpid():
                    finalizer()
            except BaseException as error:
                self._errors.append(("a finalizer of multiprocessing raised", error))

    def _note_thread(self, raised: Any) -> None:
        own = threading.get_ident()
        if own in self._in_hook:  # the test's hook calls the one that it has found, which was this one
            return
        if raised.exc_value is not None and not isinstance(raised.exc_value, SystemExit):
            name = raised.thread.name if raised.thread is not None else "?"
            self._errors.append((f"thread {name!r} ended with an exception", raised.exc_value))
        self._in_hook.add(own)
        try:
            self._hook(raised)
        finally:
            self._in_hook.discard(own)


def unfinalized_globals(module: str) -> list[str]:
    """Return the names of globals of ``module`` that would run code of that module when the interpreter ends."""
    found = sys.modules.get(module)
    values = list(vars(found).items()) if found is not None else []
    return [name for name, value in values if type(value).__module__ == module and hasattr(type(value), "__del__")]
