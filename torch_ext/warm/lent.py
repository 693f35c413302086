"""What a child of a warm zygote does to become the first zygote of a run. Runs in zygotes; imports the standard library
and ``world`` only.

Note [A lent zygote]
~~~~~~~~~~~~~~~~~~~~
A run that starts its own first zygote gives it an environment, a working directory, a umask, limits, cores and a
stderr, and imports into it what stands first on the run's path. The child of a warm zygote takes all of these over, and
refuses where it cannot: where a limit would have to be raised, where the run's folder has a module of its own under a
name that is loaded already, or where torch would have found another device. Others see the run's environment in
``/proc/PID/environ``, if the kernel lets it be replaced. What is left is the server's: priority, control group, hash
seed. numpy and torch draw their random numbers anew, as in a fresh process; Python's own generator does so after every
fork.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torch_ext.world import _os
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.child import redirect
from torch_ext.world.loading import load_and_serve
from torch_ext.world.protocol import DoesNotFit, LentOrder

__all__ = ["main", "own_surroundings"]

_DEVICE = "TORCH_EXT_DEVICE"
# Python itself decides about the first two, and zygotes about the third; nobody does about the last two.
_OWN = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}
_SIMULATOR, _MACHINE = "torch_ext.sim", "torch_ext.warm.machine"


def own_surroundings() -> tuple[int, dict[int, tuple[int, int]], tuple[int, ...], frozenset[int]]:
    """Return this process's umask, limits, cores and ignored signals, as
    :class:`~torch_ext.world.protocol.LentOrder` has them.
    """
    resources = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    limits = {number: resource.getrlimit(number) for number in resources}
    ignored = frozenset(int(number) for number in _inherited() if signal.getsignal(number) is signal.SIG_IGN)
    return _os.umask(), limits, tuple(sorted(os.sched_getaffinity(0))), ignored


def _inherited() -> set[signal.Signals]:
    """The signals that a Python process goes on ignoring if the one that has started it did."""
    return {each for each in signal.valid_signals() if isinstance(each, signal.Signals)} - _OWN


def main(order: LentOrder, descriptors: Sequence[int]) -> None:
    """Target of a child of a warm zygote. See Note [A lent zygote]."""
    channel, stderr, directory = descriptors
    command = Channel.from_descriptor(channel)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if why := _why_not(order):
            command.send(DoesNotFit(why))
            return
        _move_in(order, stderr, directory)
        load_and_serve(command, order.root)
    except ChannelClosedError:  # the run was interrupted
        return


def _why_not(order: LentOrder) -> str:
    return _limit_out_of_reach(order) or _shadowed(order.root.preparation.path[0]) or _other_device(order)


def _limit_out_of_reach(order: LentOrder) -> str:
    try:
        for number, wanted in order.limits.items():
            if resource.getrlimit(number) != wanted:
                resource.setrlimit(number, wanted)
        os.sched_setaffinity(0, order.cores)
    except (OSError, ValueError):
        return "its limits are lower"
    return ""


def _shadowed(folder: str) -> str:
    """Return why the modules of ``folder`` would not be found if they stood first; empty if they would."""
    try:
        there = list(os.scandir(folder))
    except OSError:
        return ""
    for entry in there:
        name = entry.name.partition(".")[0]
        module = sys.modules.get(name)
        if (
            module is None
            or name == "__main__"
            or not (entry.name.endswith((".py", ".so")) or os.path.isfile(f"{entry.path}/__init__.py"))
        ):
            continue
        file = getattr(module, "__file__", None)
        if not file or not Path(file).resolve().is_relative_to(Path(entry.path).resolve()):
            return f"{entry.path} takes the place of a module that it has loaded"
    return ""


def _other_device(order: LentOrder) -> str:
    asked = order.environment.get(_DEVICE)
    machine = sys.modules.get(_MACHINE)
    if not asked and _SIMULATOR in sys.modules and machine is not None and machine.ACCELERATOR:
        return f"tests would run on {machine.ACCELERATOR} here"
    return ""


def _move_in(order: LentOrder, stderr: int, directory: int) -> None:
    os.environ.clear()
    os.environ.update(order.environment)
    _os.stand_for(order.environment)
    os.fchdir(directory)
    os.umask(order.umask)
    for number in _inherited():
        if number in order.ignored:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # What a module prints while it is imported must not mix with the runner's own output.
    redirect(stderr, stderr)
    for descriptor in (stderr, directory):
        os.close(descriptor)
    tempfile.tempdir = None
    time.tzset()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
