"""A server of warm zygotes for tests that start many runs, half of whose processor time is the import of torch."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from test.torch_ext.house.source import CHECKOUT
from torch_ext.world import _os

__all__ = ["RUNTIME", "can_tell_whose", "server", "used"]

# In the environment: the folder in which runs look for a server.
RUNTIME = "XDG_RUNTIME_DIR"
# Seconds without any run until it ends, far above what the other tests of a process take.
_IDLE_S = 3600


@functools.cache
def can_tell_whose() -> bool:
    """Whether what a server lends shows the environment of the run, by which tests find what one has left behind: some
    kernels refuse.
    """
    shown = {"SHOWN": "1"}
    pid = os.fork()
    if pid == 0:
        try:
            _os.stand_for(shown)
            os._exit(0 if _os.environment_of(os.getpid()) == shown else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextlib.contextmanager
def server(runtime: Path) -> Iterator[None]:
    """Serve runs on plain cpu that look into ``runtime``, with the checkout as their ``PYTHONPATH``, within the block.

    The server ends with this process, however that ends.
    """
    tests = os.getpid()
    environment = {**os.environ, RUNTIME: str(runtime), "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(
        [sys.executable, "-m", "torch_ext", "serve", "--host", "--idle", str(_IDLE_S)], cwd=CHECKOUT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=lambda: _os.die_with_parent(tests),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert "serving runs on cpu" in first, first + process.stdout.read()
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def used(runtime: Path) -> Iterator[None]:
    """Have runs that are started within the block look into ``runtime``."""
    before = os.environ.get(RUNTIME)
    os.environ[RUNTIME] = str(runtime)
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUNTIME]
        else:
            os.environ[RUNTIME] = before
