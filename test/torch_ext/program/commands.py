"""Runs ``torch_ext run`` and torchrun on small programs, and finds processes that they leave behind.

Note [Programs of one server]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A program that loads torch itself costs three seconds of a core, and its test a fraction of that. So :func:`run` lets
``torch_ext serve`` start the ranks, with one server for each device, until the last test of a file: a process that
outlives its test might end a wait in a later one, and no hang would be proven. Programs that need variables read at
start load torch themselves, as do those of :func:`start`, and all with ``--long``.
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
from textwrap import dedent

from test.torch_ext import tiers
from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.world.faults import MARK, marked_processes
from torch_ext.world import _os, warm

EXAMPLE = CHECKOUT / "examples" / "train.py"

# Far above the duration of any of them, also on a busy machine.
_LIMIT_S = 240.0

# The option of ``torch_ext serve`` by the option of a command that it serves.
_SERVERS = {"--device cpu": ("--host",), "--cuda-as-sim": ("--cuda-as-sim",), "": ()}

_servers: dict[str, "_WarmServer"] = {}


def environment(more):
    """Return the variables of a program: this process's, without those of the simulator, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_EXT_SIM", "OMP_"))}
    return {**kept, "PYTHONPATH": str(CHECKOUT), **more}


def start(options, program, *arguments, folder, **more):
    """Start ``torch_ext run`` on the text ``program``, in the file ``program.py`` of ``folder``."""
    (folder / "program.py").write_text(dedent(program), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "torch_ext", "run", *options.split(), "program.py", *arguments],
        cwd=folder,
        env=environment(more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(options, program, *arguments, folder, **more):
    """As :func:`start`, then wait for the end. No process may be left. See Note [Programs of one server]."""
    mark, server = uuid.uuid4().hex, _server_for(options, more)
    runtime = {"XDG_RUNTIME_DIR": server.runtime} if server else {}
    with start(options, program, *arguments, folder=folder, **{MARK: mark}, **runtime, **more) as process:
        out, err = process.communicate(timeout=_LIMIT_S)
    assert alive_with(mark) == []
    assert server is None or "`torch_ext serve` is not used" not in err, err
    assert server is None or eventually(server.is_idle), "processes of the program are left"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _WarmServer:
    """``torch_ext serve``, with a separate folder for its socket."""

    def __init__(self, words):
        self._held, self._mark = contextlib.ExitStack(), uuid.uuid4().hex
        self.runtime = self._held.enter_context(tempfile.TemporaryDirectory(prefix="runtime-"))
        self.variables = _read_at_start(environment({}))
        variables = {MARK: self._mark, "XDG_RUNTIME_DIR": self.runtime}
        self._process = self._held.enter_context(serving(*words, limit_s=None, **variables))
        atexit.register(self.close)

    def close(self):
        """End the server. Idempotent."""
        self._held.close()

    def is_alive(self):
        return self._process.poll() is None and bool(_os.children_of(self._process.pid))

    def is_idle(self):
        """Whether no rank, and no process that a rank has forked, is left."""
        zygotes = _os.children_of(self._process.pid)
        return marked_processes(self._mark).keys() <= {self._process.pid, *zygotes}


def _server_for(options, more):
    """Return the server for a command with these options and variables; None if it has to load torch itself."""
    if tiers.is_long or "XDG_RUNTIME_DIR" in more:
        return None
    device = next(option for option in _SERVERS if option in options)
    if device in _servers and not _servers[device].is_alive():
        _servers.pop(device).close()
    if device not in _servers:
        _servers[device] = _WarmServer(_SERVERS[device])
    is_fit = _servers[device].variables == _read_at_start(environment(more))
    return _servers[device] if is_fit else None


def end_servers():
    """End the servers that :func:`run` has started."""
    while _servers:
        _servers.popitem()[1].close()


def _read_at_start(variables):
    return {k: v for k, v in variables.items() if k == "PYTHONPATH" or warm.is_read_at_start(k)}


@contextlib.contextmanager
def serving(*words, limit_s=_LIMIT_S, **more):
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
    end_s = time.monotonic() + _LIMIT_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.05)
    return holds()


def alive_with(mark):
    """Return the command lines of processes that were started with ``mark`` in their environment."""
    return [command for command in marked_processes(mark).values() if command]  # an ending process has no command line


def torchrun(*words, folder, **more):
    """Run torch's own torchrun, with our entry point installed beside what there is."""
    return launched("torch.distributed.run", *words, folder=folder, **more)


def launched(launcher, *words, folder, **more):
    """Run the module ``launcher``, with our entry point installed beside what there is."""
    variables = environment({**with_entry_point(folder), **more})
    command = [sys.executable, "-m", launcher, *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_LIMIT_S)


def with_entry_point(folder):
    """Install our entry point in ``folder``; return what a process needs in its environment to find it."""
    installed = folder / "installed"
    information = installed / "entry_of_torch_ext-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: entry_of_torch_ext\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\nours = torch_ext.program.autoload:load\n")
    return {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{installed}"}
