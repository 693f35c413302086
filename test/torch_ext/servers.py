"""Keeps torch loaded for the commands that tests run.

Note [Commands of one server]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A command that loads torch itself costs three seconds of a core, and its test a fraction of that. So from the second
command of a file of tests on, ``torch_ext serve`` starts the processes, one server for each device, until the last test
of the file: a process that outlives its test might end a wait in a later one, and no hang would be proven. Commands
that need variables read at start load torch themselves, and so do all with ``--long``.
"""

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter

from test.torch_ext import tiers
from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.world.faults import MARK, marked_processes
from torch_ext.world import _os, warm

# Far above the duration of any command, also on a busy machine.
LIMIT_S = 240.0

_asked = Counter[str]()  # by the option of the server
_servers: dict[str, "WarmServer"] = {}


def environment(more):
    """Return the variables of a program: this process's, without those of the simulator, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_EXT_SIM", "OMP_"))}
    return {**kept, "PYTHONPATH": str(CHECKOUT), **more}


class WarmServer:
    """``torch_ext serve``, with a separate folder for its socket."""

    def __init__(self, option):
        self._held, self._mark = contextlib.ExitStack(), uuid.uuid4().hex
        self.runtime = self._held.enter_context(tempfile.TemporaryDirectory(prefix="runtime-"))
        self.variables = _read_at_start(environment({}))
        variables = {MARK: self._mark, "XDG_RUNTIME_DIR": self.runtime}
        self._process = self._held.enter_context(serving(*option.split(), limit_s=None, **variables))
        atexit.register(self.close)

    def close(self):
        """End the server. Idempotent."""
        self._held.close()

    def is_alive(self):
        return self._process.poll() is None and bool(_os.children_of(self._process.pid))

    def is_idle(self):
        """Whether no process that a command has had forked is left."""
        zygotes = _os.children_of(self._process.pid)
        return marked_processes(self._mark).keys() <= {self._process.pid, *zygotes}


def server_for(option, variables):
    """Return the server with ``option`` (empty: none) for a command with these variables; None if the command has to
    load torch itself. See Note [Commands of one server].
    """
    _asked[option] += 1
    if tiers.is_long or _asked[option] == 1:
        return None
    if option in _servers and not _servers[option].is_alive():
        _servers.pop(option).close()
    if option not in _servers:
        _servers[option] = WarmServer(option)
    return _servers[option] if _servers[option].variables == _read_at_start(variables) else None


def end_servers():
    """End the servers of :func:`server_for`, as a file of tests ends."""
    _asked.clear()
    while _servers:
        _servers.popitem()[1].close()


def _read_at_start(variables):
    return {k: v for k, v in variables.items() if k == "PYTHONPATH" or warm.is_read_at_start(k)}


@contextlib.contextmanager
def serving(*words, limit_s=LIMIT_S, **more):
    """Run ``torch_ext serve`` for the block, which begins once it serves. It ends with the block, after ``limit_s``
    seconds unless that is None, or with this process, however this process ends.
    """
    command, tests = [sys.executable, "-m", "torch_ext", "serve", *words], os.getpid()
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=environment(more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: _os.die_with_parent(tests),
    ) as process:  # fmt: skip
        watchdog = threading.Timer(limit_s or 0.0, process.kill)
        watchdog.daemon = True
        if limit_s is not None:
            watchdog.start()
        try:
            first = process.stdout.readline()
            assert f"serving runs on {'cpu' if '--host' in words else ''}" in first, first
            yield process
        finally:  # before Popen waits for it without a limit
            process.terminate()
            process.wait()
            watchdog.cancel()


def eventually(holds):
    """Whether ``holds()`` becomes true within a generous limit."""
    end_s = time.monotonic() + LIMIT_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.05)
    return holds()
