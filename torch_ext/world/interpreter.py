"""Children that get a fresh interpreter. Standard library and own layer only.

They serve where forking is unsafe (see Note [Fork safety]), where a variable is read only when a library loads, and on
request: forked ranks share one hash seed, so they never differ in the order of a set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NoReturn

from torch_ext.world import _os
from torch_ext.world.channel import Channel
from torch_ext.world.child import child_main
from torch_ext.world.preparation import load

__all__ = ["PACKAGE_ROOT", "main", "start_interpreter"]

# The checkout may not be installed: a fresh interpreter must find this very package before it is told its path.
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_PROGRAM = (
    f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); "
    "from torch_ext.world.interpreter import main; main(int(sys.argv.pop()), int(sys.argv.pop()))"
)


def start_interpreter(channel: int, environment: Mapping[str, str]) -> int:
    """Start a fresh interpreter that inherits descriptor ``channel`` and waits on it for its preparation; return its
    pid.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    arguments = [sys.executable, *flags, "-c", _PROGRAM, str(channel), str(_os.getpid())]
    os.set_inheritable(channel, True)
    try:
        return os.posix_spawn(sys.executable, arguments, dict(environment))
    finally:
        os.set_inheritable(channel, False)


def main(parent: int, descriptor: int) -> NoReturn:
    """Program of the fresh interpreter: load the preparation that arrives first, then be an ordinary child."""
    channel = Channel.from_descriptor(descriptor)
    os.set_inheritable(descriptor, False)
    preparation, _ = channel.receive()
    load(preparation)
    child_main(channel, parent)
