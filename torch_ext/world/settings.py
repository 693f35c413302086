"""The environment variables that the world obeys. Standard library only.

They are read on use, in the process that acts on them, since a test class may set them in ``setUp``.

===============================  ==================================================================================
``TORCH_EXT_START_METHOD``       ``interpreter``: every rank gets a fresh interpreter instead of being forked
``TORCH_EXT_SPARES``             ``0``: fork no ranks ahead of the next test
``TORCH_EXT_THREADS``            intra-op threads per rank; default: the cores, shared by the ranks of a world
``TORCH_EXT_SHOW_OUTPUT``        ``1``: pass the output of ranks through as it comes
``TORCH_EXT_TEARDOWN``           ``full``: destroy process groups in every rank, as upstream does
``TORCH_EXT_TIMEOUT``            seconds that every test may take, in place of the tests' own limits
``TORCH_EXT_HANG_AFTER``         seconds after which a provable hang ends, default 10; ``0``: only time limits end tests
``TORCH_EXT_OWNER``              set, not read, for the processes that a test starts; see Note [Leftovers]
``TORCH_EXT_CUDA_AS_SIM``        files and folders, joined as in ``PATH``, in which CUDA means ``sim``
``TORCH_EXT_WAIT_PAGE``          set, not read, for the device's backend; see Note [The page of waits]
``TORCH_EXT_ADDRESS``            set, not read, in ranks; see Note [An address for each world]
``TORCH_EXT_HOST``               set in ranks of a test on several hosts: the number of theirs; see Note [Several hosts]
``TORCH_EXT_HOST_ADDRESS``       set on a cluster: where other hosts reach this one; see Note [Several hosts]
``TORCH_EXT_TRIAL_FORK``         ``0``: off, see Note [Trial fork]
``TORCH_EXT_READ_AT_LOAD``       more prefixes, joined by commas, or ``0``: off, see Note [Variables read at load]
===============================  ==================================================================================

Tests whose ranks run on several hosts. Standard library only.

Note [Several hosts]
~~~~~~~~~~~~~~~~~~~~
A test class with ``hosts = 2`` has its ranks on two machines: the first half on host 0, the rest on host 1. They share
no memory and no files, so they meet at a TCP store, which the parent half serves, and get the variables that torchrun
sets on several nodes. ``file_name`` names a file of its own on each host.

There is one parent half, on host 0, and one world. Who starts the ranks of the other hosts is not its business: it asks
its zygote for all of them. On a cluster that is a stand-in (``runner/cluster/spread.py``), which starts those of other
hosts there and passes on what they say. Elsewhere it is the ordinary zygote, which starts all of them on this machine.
The hosts are then a pretence, but one that holds: each has a folder for temporary files of its own, and
``TORCH_EXT_HOST`` tells the simulated device with whom a rank may share memory.

How long a test, its ranks and a process that may have hung get. No clock. Standard library and own layer only: the
supervisor knows these limits too.
"""

from __future__ import annotations

import math
import numbers
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch_ext.world import settings

__all__ = [
    "ADDRESS_VARIABLE",
    "INTERFACE_VARIABLES",
    "LIMIT_ATTRIBUTE",
    "MORE_S",
    "NUMBER_VARIABLE",
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "HostFile",
    "Limits",
    "Patience",
    "address",
    "full_teardown",
    "get_timeout",
    "hang_after_s",
    "hosts_of",
    "interface_of",
    "interface_variables",
    "interpreter_wanted",
    "is_spread",
    "launcher_variables",
    "ranks_per_host",
    "read_at_load",
    "seconds_of",
    "show_output",
    "spares_wanted",
    "threads_per_rank",
    "time_limit_s",
    "timeout_of",
    "trial_fork",
]

# Larger worlds are started on demand: spares hold memory until the next test.
_MOST_SPARES = 16
_HANG_AFTER_S = 10.0


def interpreter_wanted() -> bool:
    """Whether every rank gets a fresh interpreter."""
    return os.environ.get("TORCH_EXT_START_METHOD") == "interpreter"


def spares_wanted(world_size: int) -> int:
    """Return how many ranks to fork ahead: as many as the last world had, none for large worlds."""
    return 0 if os.environ.get("TORCH_EXT_SPARES") == "0" or world_size > _MOST_SPARES else world_size


def threads_per_rank(world_size: int) -> int:
    """Return how many intra-op threads each rank gets: an equal share of the cores, at least 1."""
    asked = os.environ.get("TORCH_EXT_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, world_size))


def show_output() -> bool:
    """Whether the output of ranks is passed through as it comes."""
    return os.environ.get("TORCH_EXT_SHOW_OUTPUT") == "1"


def full_teardown() -> bool:
    """Whether every rank destroys its process groups."""
    return os.environ.get("TORCH_EXT_TEARDOWN") == "full"


def time_limit_s() -> float | None:
    """Return the limit that ``--timeout`` puts in the place of every test's own, in seconds; None if there is none.

    Raises:
        ValueError: it is no finite time above 0.
    """
    asked = os.environ.get("TORCH_EXT_TIMEOUT", "")
    if asked and not 0 < _seconds(asked, 0.0) < float("inf"):
        raise ValueError(f"TORCH_EXT_TIMEOUT is {asked!r}; expected a finite number of seconds above 0")
    return float(asked) if asked else None


def hang_after_s() -> float:
    """Return within how many seconds of the last progress a provable hang is to end; 0: it is not looked for."""
    return _seconds(os.environ.get("TORCH_EXT_HANG_AFTER", ""), _HANG_AFTER_S)


def trial_fork() -> bool:
    """Whether a process that runs other threads may be forked once to see if they end."""
    return os.environ.get("TORCH_EXT_TRIAL_FORK") != "0"


def read_at_load(known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the prefixes of variables that libraries read when they load: ``known`` ones and what the user adds."""
    asked = os.environ.get("TORCH_EXT_READ_AT_LOAD", "")
    if asked == "0":
        return ()
    return (*known, *(prefix for prefix in asked.split(",") if prefix))


def _seconds(asked: str, default: float) -> float:
    try:
        return max(0.0, float(asked)) if asked else default
    except ValueError:
        return default


NUMBER_VARIABLE = "TORCH_EXT_HOST"
ADDRESS_VARIABLE = "TORCH_EXT_HOST_ADDRESS"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_THIS_MACHINE = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux


def hosts_of(case: object) -> int:
    """Return on how many hosts a test case, or its class, wants its ranks; 1 unless it says so with a number.

    >>> hosts_of(type("TestA", (), {"hosts": 2})), hosts_of(type("TestB", (), {"hosts": ["a", "b"]}))
    (2, 1)
    """
    asked = getattr(case, "hosts", 1)
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 1 else 1


def ranks_per_host(world_size: int, hosts: int) -> int:
    """Return how many of ``world_size`` ranks each of ``hosts`` hosts has.

    Raises:
        ValueError: they cannot be divided.
    """
    if world_size % hosts:
        raise ValueError(f"got {world_size} ranks for {hosts} hosts, expected as many on each: a multiple of {hosts}")
    return world_size // hosts


def address() -> str:
    """Return where other hosts reach this one."""
    return os.environ.get(ADDRESS_VARIABLE) or _THIS_MACHINE


def is_spread() -> bool:
    """Whether this process is a rank of a test on several hosts."""
    return NUMBER_VARIABLE in os.environ


def launcher_variables(
    rank: int, world_size: int, port: int, hosts: int = 1, at: str = _THIS_MACHINE
) -> dict[str, str]:
    """Return what torchrun's agent sets for a rank, where the agent serves the store at ``port`` of address ``at``."""
    share = ranks_per_host(world_size, hosts)
    return {
        **dict.fromkeys(("RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size)),
        "LOCAL_RANK": str(rank % share),
        "LOCAL_WORLD_SIZE": str(share),
        "GROUP_RANK": str(rank // share),
        "GROUP_WORLD_SIZE": str(hosts),
        "ROLE_NAME": "default",
        "MASTER_ADDR": at,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def interface_variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what makes torch's transports use the interface that has ``address``, if one has it, unless
    ``environment`` says what they use.
    """
    name = interface_of(address)
    return {variable: name for variable in INTERFACE_VARIABLES if name and variable not in environment}


def interface_of(address: str) -> str:
    """Return the network interface that has ``address``; an empty string if none is known to have it."""
    import fcntl  # there is none on Windows, where this file is loaded as well

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
        own = socket.inet_ntoa(found[20:24])
        if own == address or (own == _THIS_MACHINE and address.startswith("127.")):
            return name
    return ""


class HostFile(str):
    """The path of a file on host 0. Unpickled in a rank on another host, it is an empty file of that host's."""

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return _of_this_host, (str(self),)


def _of_this_host(path: str) -> str:
    if os.environ.get(NUMBER_VARIABLE, "0") == "0":
        return path
    tempfile.tempdir = None  # the zygote may have asked for it, and TMPDIR is that of the host
    own = os.path.join(tempfile.gettempdir(), os.path.basename(path))
    with open(own, "a"):
        pass
    return own


# In seconds.
TIMEOUT_DEFAULT = int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120"))
# By test name, in seconds. Test files add to it.
TIMEOUT_OVERRIDE: dict[str, int] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}

# Where a test method carries its own limit, in seconds.
LIMIT_ATTRIBUTE = "_timeout_s"


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds.

    Attributes:
        test_s: from the start until every rank has ended.
        grace_s: from the first rank's failure or death until its peers are stopped; they may fail by themselves and
            tell how. Those that wait for a core get a little more.
        exit_s: from the receipt of the last rank until the last process has ended. Ranks that still compute then get
            more; see :class:`~torch_ext.world.settings.Patience`.
        hang_s: from the last progress until a provable hang is found; 0: it is not looked for.
        endless_s: a wait for a lock counts as endless if its own limit is at least so far away. By default it must lie
            past ``test_s``; where a test may take for ever, no limit would.
        raises_later_s: the same for an operation of torch's, which raises at its limit.
        end_hangs: a hang ends its ranks. Otherwise it is reported, and they go on.
    """

    test_s: float
    grace_s: float = 1.0
    exit_s: float = 15.0
    hang_s: float = 0.0
    endless_s: float = float("inf")
    raises_later_s: float = float("inf")
    end_hangs: bool = True


def get_timeout(test_id: str) -> int:
    """Return the seconds that the test with this id may take by its name alone; :func:`timeout_of` has the whole
    rule.
    """
    return TIMEOUT_OVERRIDE.get(test_id.rpartition(".")[2], TIMEOUT_DEFAULT)


def timeout_of(case: Any) -> float:
    """Return the seconds that the current test of ``case``, a test case of unittest's, may take.

    The first of these that is set wins: ``TORCH_EXT_TIMEOUT`` (``--timeout``); ``@with_timeout`` on the test; the class
    attribute ``timeout`` (seconds or a ``timedelta``); ``TIMEOUT_OVERRIDE`` by the test's name;
    ``DISTRIBUTED_TESTS_DEFAULT_TIMEOUT``; 120 seconds.

    Raises:
        ValueError: it is no finite time above 0.
    """
    asked = settings.time_limit_s()
    if asked is not None:
        return asked
    test_id = case.id()
    name = getattr(case, "_testMethodName", test_id.rpartition(".")[2])  # which may have dots
    own = getattr(getattr(type(case), name, None), LIMIT_ATTRIBUTE, None)
    if own is None:
        own = getattr(case, "timeout", None)
        own = None if callable(own) else own
    return seconds_of(get_timeout(test_id) if own is None else own, f"the time limit of {test_id}")


def seconds_of(limit: Any, what: str) -> float:
    """Return a time limit in seconds.

    Args:
        limit: a number of seconds, or a ``timedelta``.
        what: which limit it is, in words.

    Raises:
        ValueError: it is neither, or no finite time above 0.

    >>> seconds_of(timedelta(minutes=1), "the limit"), seconds_of(2, "the limit")
    (60.0, 2.0)
    >>> seconds_of(float("nan"), "the limit of TestA")
    Traceback (most recent call last):
    ValueError: the limit of TestA is nan; expected a finite number of seconds above 0, or a timedelta
    """
    number = limit.total_seconds() if isinstance(limit, timedelta) else limit
    if isinstance(number, bool) or not isinstance(number, numbers.Real) or not 0 < float(number) < math.inf:
        raise ValueError(f"{what} is {limit!r}; expected a finite number of seconds above 0, or a timedelta")
    return float(number)


# A process that has computed for less than a twentieth of a second in the last one is taken to hang. If the sum has
# become smaller, one of several processes has ended, which is progress too.
_LOOK_S, _COMPUTES_S = 1.0, 0.05
# What computes at its limit, on a machine that has much else to do, gets this much more, in seconds.
MORE_S = 30.0


class Patience:
    """The limit of one process.

    Args:
        limit_s: how long it may take.
        now_s: when it began.
        more_s: how much longer, if it computes.
        computed_s: for how long it had computed when it began. If that is given, what has not computed since is over
            at its limit; else it is looked at twice from then on.

    Attributes:
        look_s: when to ask :meth:`is_over`, on the clock of the constructor's ``now_s``.

    >>> patience = Patience(limit_s=5, now_s=100)
    >>> patience.look_s, patience.is_over(105, computed_s=3.0), patience.look_s
    (105, False, 106.0)
    >>> patience.is_over(106, computed_s=3.9), patience.is_over(107, computed_s=3.9)
    (False, True)
    """

    def __init__(self, limit_s: float, now_s: float, more_s: float = MORE_S, computed_s: float | None = None) -> None:
        self.look_s = now_s + limit_s
        self._end_s = now_s + limit_s + more_s
        self._computed_s = computed_s

    def is_over(self, now_s: float, computed_s: float) -> bool:
        """Whether the process counts as hung, which has computed for ``computed_s`` seconds in all."""
        if now_s < self.look_s:
            return False
        before, self._computed_s = self._computed_s, computed_s
        if now_s >= self._end_s or (before is not None and abs(computed_s - before) < _COMPUTES_S):
            return True
        self.look_s = now_s + _LOOK_S
        return False
