"""``torch_ext demo``: why one would want this, in ten seconds.

FSDP2 trains on four simulated devices, as it should. Then the same program has lost one line, a wait between two
streams: it prints plausible losses, and the check says which wait is missing, and where.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch_ext.program.supervise import main as run

__all__ = ["main"]

_PROGRAM = Path(__file__).with_name("demo_training.py")
_OPTIONS = ("-n", "4", "--output", "rank0", "--races", "error")


def main(arguments: Sequence[str]) -> int:
    """Run both; return 0 if the first passed and the race of the second was found."""
    if arguments:
        print(f"error: demo takes no arguments, but got: {' '.join(arguments)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="torch_ext-demo-") as folder:
        shutil.copy(_PROGRAM, folder)  # the report tells a user's program from files of ours
        return _both(folder)


def _both(folder: str) -> int:
    whole = _show(folder, "FSDP2 on four devices; batches are copied on a stream of their own:", "with-wait")
    if whole:
        return whole
    broken = _show(folder, "The same, without the line that makes the computation wait for the copy:", "without-wait")
    print(f"\nThe program is {_PROGRAM}. Now yours: python -m torch_ext run -n 4 --races error train.py")
    return 0 if broken == 1 else 1


def _show(folder: str, what: str, variant: str) -> int:
    print(f"\n{what}\n  python -m torch_ext run {' '.join(_OPTIONS)} {_PROGRAM.name} {variant}\n", flush=True)
    child = os.fork()  # a run owns its process: signals, environment, what it has said once
    if not child:
        os.chdir(folder)
        os._exit(run([*_OPTIONS, _PROGRAM.name, variant]) & 0xFF)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
