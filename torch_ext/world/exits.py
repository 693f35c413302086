"""The end of a rank: stacks of a rank that ends itself, and threads and exit functions of its body. Runs in the rank;
standard library only.

Note [Nothing after the receipt]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In one process, unittest's exit code covers everything until the interpreter is gone. The receipt decides about a rank,
so before submitting it, the rank joins its threads and calls the functions that the body registered with ``atexit``. An
exception that escapes from either, or has escaped from any thread, fails the test. Module globals are still in use
then, and a rank cannot finalize them: a message names the globals with a finalizer.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from torch_ext.world import _os

# Deadly signals that faulthandler does not handle, and those that it does.
_SILENT, _HANDLED = (
    {signal.Signals[f"SIG{name}"] for name in names.split()}
    for names in ("KILL TERM INT HUP QUIT ALRM USR1 USR2 PIPE", "SEGV ABRT BUS FPE ILL")
)


def write_stacks_before(descriptor: int) -> Callable[[], None]:
    """Make :func:`os._exit`, and :func:`os.kill` of this process, write its stacks to ``descriptor`` first; return the
    undo function.
    """
    leave, kill, own = os._exit, os.kill, os.getpid()

    def _exit(status: int) -> Any:
        if os.getpid() == own:
            _write_stacks(descriptor)
        leave(status)

    def kill_after_writing(pid: int, signal_number: int, /) -> None:
        if pid == own == os.getpid() and signal_number in _SILENT | _HANDLED:
            ends = signal_number == signal.SIGKILL or signal.getsignal(signal_number) is signal.SIG_DFL
            if ends and signal_number in _SILENT:
                _write_stacks(descriptor)
            elif ends and signal_number not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
                # The kernel may deliver a signal for the process to any thread, and faulthandler crashes in the frames
                # of a thread that runs meanwhile. The calling thread holds the GIL.
                return signal.pthread_kill(threading.get_ident(), signal_number)
        kill(pid, signal_number)

    def undo() -> None:
        os._exit, os.kill = leave, kill

    for function, original in ((_exit, leave), (kill_after_writing, kill)):
        function.__module__, function.__qualname__ = "os", original.__name__  # RPC pickles functions by name
    os._exit, os.kill = _exit, kill_after_writing
    return undo


def write_text(descriptor: int, text: str) -> None:
    """Write as much as fits without blocking: the reader may be waiting for this process to end."""
    with contextlib.suppress(OSError):
        os.set_blocking(descriptor, False)
        os.write(descriptor, text.encode(errors="replace"))


def _write_stacks(descriptor: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.set_blocking(descriptor, False)
        faulthandler.dump_traceback(descriptor, all_threads=True)


_Hook = Callable[..., Any]
_threading: Any = threading  # with its private names

_INTERPRETERS_HOOKS = threading.__excepthook__, sys.__unraisablehook__
# The beginning of Python's report of an exception in a thread that _thread has started.
_IN_BARE_THREAD = "Exception ignored in thread started by"


class UnfinishedWorkError(RuntimeError):
    """A thread or an exit function of a body that passed has failed."""


def disown_exit_functions() -> None:
    """Drop all exit functions registered so far. A zygote calls it before it forks: in each child, writing to objects
    shared with the zygote would cost a millisecond.
    """
    atexit._clear()
    finalize: Any = weakref.finalize
    if finalize._registered_with_atexit:
        for inherited in list(finalize._registry):
            inherited.atexit = False
        finalize._registered_with_atexit = False  # the next finalizer registers the exit function again


def call_exit_functions() -> list[tuple[str, BaseException]]:
    """Call the functions registered with ``atexit`` or ``weakref.finalize`` since :func:`disown_exit_functions`, last
    in, first out; return their exceptions, each with its origin in words.
    """
    errors: list[tuple[str, BaseException]] = []

    def note(error: BaseException | None, how: str = "function registered with atexit") -> None:
        if error is not None:
            errors.append((f"a {how} raised", error))

    hooks = sys.unraisablehook, sys.excepthook
    sys.unraisablehook = lambda raised: note(raised.exc_value)
    sys.excepthook = lambda kind, error, trace, /: note(error, "finalizer registered with weakref")
    try:
        atexit._run_exitfuncs()
    except BaseException as error:  # a SystemExit, on some releases of Python
        note(error)
    finally:
        sys.unraisablehook, sys.excepthook = hooks
    return errors


class ThreadErrors:
    """Calls ``note(thread, text, error)`` for each exception that ends a thread, until :meth:`end`. ``thread`` is None
    for a thread of :mod:`_thread`, whose exception Python reports as unraisable. Ignores exceptions that a test's own
    hook handles, but not those of the interpreter's hook if a test has restored it.
    """

    def __init__(self, note: Callable[[threading.Thread | None, str, BaseException], None]) -> None:
        self._note = note
        self._hooks: tuple[_Hook, _Hook] = threading.excepthook, sys.unraisablehook
        self._make_hook = _threading._make_invoke_excepthook
        _threading._make_invoke_excepthook = self._make
        self._in_hook: set[int] = set()
        self.watch()

    def watch(self) -> None:
        """Install our hooks over those that an earlier test has left, and call the earlier ones too."""
        if threading.excepthook != self._on_thread:
            self._hooks, threading.excepthook = (threading.excepthook, self._hooks[1]), self._on_thread
        if sys.unraisablehook != self._on_unraisable:
            self._hooks, sys.unraisablehook = (self._hooks[0], sys.unraisablehook), self._on_unraisable
        setattr(sys, "__unraisablehook__", self._on_unraisable)  # noqa: B010 - a test may put it back

    def end(self) -> None:
        """Restore the hooks, except those that a test has replaced."""
        _threading._make_invoke_excepthook = self._make_hook
        if threading.excepthook == self._on_thread:
            threading.excepthook = self._hooks[0]
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._hooks[1]
        setattr(sys, "__unraisablehook__", _INTERPRETERS_HOOKS[1])  # noqa: B010

    def _make(self) -> Callable[[threading.Thread], None]:
        """Return the function that a new thread calls if its ``run()`` raises; it calls the hook."""
        invoke = self._make_hook()

        def report_and_invoke(thread: threading.Thread) -> None:
            error = sys.exc_info()[1]
            if error is not None and threading.excepthook is _INTERPRETERS_HOOKS[0]:
                self._report(thread, f"thread {thread.name!r} ended with an exception", error)
            invoke(thread)

        return report_and_invoke

    def _report(self, thread: threading.Thread | None, text: str, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._note(thread, text, error)

    def _on_thread(self, raised: Any) -> None:
        name = raised.thread.name if raised.thread is not None else "?"
        self._pass_on(raised, self._hooks[0], raised.thread, f"thread {name!r}")

    def _on_unraisable(self, raised: Any) -> None:
        function = getattr(raised.object, "__name__", raised.object)
        in_bare_thread = str(raised.err_msg).startswith(_IN_BARE_THREAD)
        self._pass_on(raised, self._hooks[1], None, f"a thread of {function}()" if in_bare_thread else "")

    def _pass_on(self, raised: Any, hook: _Hook, thread: threading.Thread | None, who: str) -> None:
        own = threading.get_ident()
        if own in self._in_hook:  # recursion: the test's hook calls the previous hook, ours
            return
        if who:
            self._report(thread, f"{who} ended with an exception", raised.exc_value)
        self._in_hook.add(own)
        try:
            hook(raised)
        finally:
            self._in_hook.discard(own)


class UnfinishedWork:
    """Threads, exit functions and finalizers of this rank's body. Construct before the body runs."""

    def __init__(self) -> None:
        disown_exit_functions()  # the zygote's
        self._errors: list[tuple[str, BaseException]] = []
        self._late: list[tuple[str, BaseException]] = []
        self._before = set(threading.enumerate())
        self._tests: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
        self._test = ""
        self._threads = ThreadErrors(self._note_thread)

    def watch(self, test: str) -> None:
        """Record exceptions of threads while ``test`` runs, even under hooks that an earlier test has left."""
        for thread in threading.enumerate():
            if thread not in self._before:
                self._tests.setdefault(thread, self._test)
        # A thread may have failed after the last test's report.
        self._late += [(f"after {self._test}, {where}", error) for where, error in self._errors]
        self._errors, self._test = [], test
        self._threads.watch()

    def _note_thread(self, thread: threading.Thread | None, text: str, error: BaseException) -> None:
        if thread is not None and thread in self._tests:  # an earlier test's thread: not a failure of the current test
            self._late.append((f"after {self._tests[thread]}, {text}", error))
        else:
            self._errors.append((text, error))

    def finish(self) -> None:
        """Join threads, then call exit functions and finalizers. Blocks while any of them blocks. Raises
        UnfinishedWorkError if an exception escaped from one of them, or from an earlier thread.
        """
        # The interpreter calls this at its end: idle workers of a ThreadPoolExecutor end, and threads that join the
        # main thread go on.
        threading._shutdown()  # type: ignore[attr-defined]
        self._errors += call_exit_functions()
        self._finalize()
        self._errors += self._late
        self.check()

    def check(self) -> None:
        """Raise UnfinishedWorkError if an exception has escaped from a thread."""
        errors, self._errors = self._errors, []
        if errors:
            where, error = errors[0]
            raise UnfinishedWorkError(f"{where}: {type(error).__name__}: {error}") from error

    def _finalize(self) -> None:
        """Call multiprocessing's finalizers, whose exceptions multiprocessing would only print."""
        registry = util._finalizer_registry  # type: ignore[attr-defined]
        for key in sorted((key for key in registry if key[0] is not None), reverse=True):
            finalizer = registry.get(key)
            try:
                if finalizer is not None and finalizer._pid == _os.getpid():
                    finalizer()
            except BaseException as error:
                self._errors.append(("a finalizer of multiprocessing raised", error))
