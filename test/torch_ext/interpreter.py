"""Runs Python in a separate process, as a user of this checkout does."""

import os
import subprocess
import sys

from test.torch_ext.house.source import CHECKOUT

RUN_TEST = str(CHECKOUT / "run_test.py")


def python(
    *words,
    folder=CHECKOUT,
    stdout=subprocess.PIPE,
    preexec_fn=None,
    timeout_s=600.0,  # far above nearly all durations, also on a busy machine
    **variables,
):
    """Run ``python WORDS`` in ``folder``, where it finds this checkout, and return how it ended and its output.

    ``variables`` are set in its environment; a variable with value None is removed.
    """
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **variables}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=preexec_fn,
        text=True,
        timeout=timeout_s,
    )
