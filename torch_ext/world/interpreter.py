"""Children that get a fresh interpreter: how one is started, and how it becomes like a forked one. Standard library
only.

They serve where forking is unsafe (see Note [Fork safety]), where a variable must be read when a library loads, and on
request, since forked ranks share one hash seed and so never differ in the order of a set.
"""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["Preparation", "compute_on_one_thread", "main", "prepare_like_this_process", "start_interpreter"]

_PROGRAM = "import sys; from torch_ext.world.interpreter import main; main(int(sys.argv.pop()), int(sys.argv.pop()))"


@dataclass(frozen=True)
class Preparation:
    """What a fresh interpreter loads: the search path, the modules by name, and the file or module that was
    ``__main__``.
    """

    path: tuple[str, ...]
    modules: tuple[str, ...]
    main_name: str = ""
    main_path: str = ""

    def apply(self) -> None:
        """Load it all into this process."""
        sys.path[:] = self.path
        for name in self.modules:
            importlib.import_module(name)
            compute_on_one_thread()
        if self.main_name:
            multiprocessing.spawn.prepare({"init_main_from_name": self.main_name})
        if self.main_path:
            multiprocessing.spawn.prepare({"init_main_from_path": self.main_path})


def compute_on_one_thread() -> None:
    """Keep what a test module computes while it is imported from starting a pool of threads. See Note [Fork safety]."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def prepare_like_this_process(modules: tuple[str, ...]) -> Preparation:
    """Return what makes a fresh interpreter resolve ``modules`` and ``__main__`` to the files that they are here."""
    found = multiprocessing.spawn.get_preparation_data("rank") if "__main__" in modules else {}
    return Preparation(
        path=tuple(entry or os.getcwd() for entry in sys.path),
        modules=tuple(name for name in modules if name != "__main__"),
        main_name=found.get("init_main_from_name", ""),
        main_path=found.get("init_main_from_path", ""),
    )


def start_interpreter(channel: int, environment: Mapping[str, str]) -> int:
    """Start a fresh interpreter that inherits descriptor ``channel`` and waits on it for its preparation; return its
    pid.
    """
    # The clone may not be installed: the child must find this very package before it is told its path.
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    program = f"import sys; sys.path.insert(0, {package_root!r}); {_PROGRAM}"
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    arguments = [sys.executable, *flags, "-c", program, str(channel), str(os.getpid())]
    os.set_inheritable(channel, True)
    try:
        return os.posix_spawn(sys.executable, arguments, dict(environment))
    finally:
        os.set_inheritable(channel, False)


def main(parent: int, descriptor: int) -> NoReturn:
    """Entry of the fresh interpreter: get ready, then be an ordinary child of the zygote."""
    from torch_ext.world.wire import Channel
    from torch_ext.world.zygote import child_main

    channel = Channel.from_descriptor(descriptor)
    os.set_inheritable(descriptor, False)
    preparation, _ = channel.receive()
    preparation.apply()
    child_main(channel, parent)
