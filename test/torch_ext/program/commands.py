"""Runs ``torch_ext run`` and torchrun on small programs, and finds processes that they leave behind."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from textwrap import dedent

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.world.faults import MARK, marked_processes
from torch_ext.world import _os

EXAMPLE = CHECKOUT / "examples" / "train.py"

# Far above the duration of any of them, also on a busy machine.
_LIMIT_S = 240.0


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
    """As :func:`start`, then wait for the end. No process may be left."""
    mark = uuid.uuid4().hex
    with start(options, program, *arguments, folder=folder, **{MARK: mark}, **more) as process:
        out, err = process.communicate(timeout=_LIMIT_S)
    assert alive_with(mark) == []
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def serving(*words, limit_s=_LIMIT_S, **more):
    """Run ``torch_ext serve`` for the block, which begins once it serves. It ends with the block, after ``limit_s``
    seconds, or with this process, however this process ends.
    """
    command, tests = [sys.executable, "-m", "torch_ext", "serve", *words], os.getpid()
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=environment(more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: _os.die_with_parent(tests),
    ) as process:  # fmt: skip
        watchdog = threading.Timer(limit_s, process.kill)
        watchdog.daemon = True
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
