"""The user's settings: environment variables, time limits, hosts. Standard library only: the supervisor imports it.

``docs/architecture.md`` lists the variables. Each process reads them on use, since a test class may set them in
``setUp``.

Note [Several hosts]
~~~~~~~~~~~~~~~~~~~~
A test class with ``hosts = 2`` has its ranks on two machines, half on each. The machines share no memory and no files,
so ranks meet at a TCP store, which the parent half on host 0 serves, and get the variables that torchrun sets on
several nodes. ``file_name`` names another file on each host.

There is one world. The parent half asks its zygote for all ranks. On a cluster, a proxy for the zygote
(``runner/cluster/hosts.py``) starts the ranks of other hosts there and forwards their messages. Elsewhere the ordinary
zygote starts all ranks on this machine and simulates hosts: each has its own folder for temporary files, and the
simulated device shares memory only among ranks with the same ``TORCH_EXT_HOST``.
"""

from __future__ import annotations

import fcntl
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

# Larger worlds are started on demand: spares hold memory until the next test.
_MAX_SPARES = 16
_HANG_AFTER_S = 10.0


def wants_interpreter() -> bool:
    """Whether every rank gets a fresh interpreter."""
    return os.environ.get("TORCH_EXT_START_METHOD") == "interpreter"


def spare_count(world_size: int) -> int:
    """Return the number of ranks to fork ahead: the last world's size, or 0 after a large world."""
    return 0 if os.environ.get("TORCH_EXT_SPARES") == "0" or world_size > _MAX_SPARES else world_size


def threads_per_rank(world_size: int) -> int:
    """Return the number of intra-op threads of each rank: an equal share of the cores, at least 1."""
    value = os.environ.get("TORCH_EXT_THREADS", "")
    return int(value) if value.isdigit() and int(value) else max(1, len(os.sched_getaffinity(0)) // max(1, world_size))


def show_output() -> bool:
    """Whether to print the output of ranks as it arrives."""
    return os.environ.get("TORCH_EXT_SHOW_OUTPUT") == "1"


def checks_leaks() -> bool:
    """Whether a test fails that leaves something in a rank."""
    return os.environ.get("TORCH_EXT_CHECK_LEAKS") == "1"


def checks_replicas() -> bool:
    """Whether a test fails whose ranks hold different bits in replicas."""
    return os.environ.get("TORCH_EXT_CHECK_REPLICAS") == "1"


def time_limit_s() -> float | None:
    """Return the time limit of ``--timeout``, which replaces every test's own, in seconds; None if it is unset. Raises
    ValueError if it is no finite time above 0.
    """
    value = os.environ.get("TORCH_EXT_TIMEOUT", "")
    if value and not 0 < _number(value) < math.inf:
        raise ValueError(f"TORCH_EXT_TIMEOUT is {value!r}; expected a finite number of seconds above 0")
    return float(value) if value else None


def hang_after_s() -> float:
    """Return the seconds from the last progress to the end of a provable hang; 0: hang detection is off. Raises
    ValueError if ``TORCH_EXT_HANG_AFTER`` is no finite time.
    """
    value = os.environ.get("TORCH_EXT_HANG_AFTER", "")
    if value and not 0 <= _number(value) < math.inf:
        raise ValueError(f"TORCH_EXT_HANG_AFTER is {value!r}; expected a finite number of seconds, or 0: never")
    return float(value) if value else _HANG_AFTER_S


# The terminal of this process and of all that it starts.
TERMINAL = "/dev/tty"


def why_no_terminal() -> str:
    """Return why ``--pdb`` cannot prompt, as a sentence; empty if it can."""
    try:
        os.close(os.open(TERMINAL, os.O_RDWR))
    except OSError as error:
        return f"--pdb needs a terminal: {TERMINAL} cannot be opened ({error.strerror})"
    return ""


def debugged_rank() -> int | None:
    """Return the rank that the user debugs, by ``--pdb``; None if there is none."""
    value = os.environ.get("TORCH_EXT_PDB", "")
    return int(value) if value.isdigit() else None


def fault_plan() -> str:
    """Return the text of the faults that happen in the ranks, by ``--faults``; empty if there are none."""
    return os.environ.get("TORCH_EXT_FAULTS", "")


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


# Time limits

# In seconds; test files add to those by test name.
TIMEOUT_DEFAULT = int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120"))
TIMEOUT_OVERRIDE: dict[str, int] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}

# The attribute of a test method that holds its own limit, in seconds.
LIMIT_ATTRIBUTE = "_timeout_s"


@dataclass(frozen=True)
class Limits:
    """Time limits of a world, in seconds.

    Peers of a rank that has failed or died may fail by themselves within ``grace_s`` and report why; peers that wait
    for a core get a little more. Ranks that still compute ``exit_s`` after the last receipt get more; see
    :class:`ProcessDeadline`.
    """

    test_s: float  # from the start until every rank has ended
    grace_s: float = 1.0  # from the first rank's failure or death until its peers are stopped
    exit_s: float = 15.0  # from the receipt of the last rank until the last process has ended
    hang_s: float = 0.0  # from the last progress until a provable hang is found; 0: hang detection is off
    endless_s: float = float("inf")  # a lock's wait counts as endless if its limit is this far away, or past `test_s`
    raises_later_s: float = float("inf")  # the same for torch's operations, which raise at their limit
    end_hangs: bool = True  # stop the ranks of a hang; False: report the hang and let them go on


def get_timeout(test_id: str) -> int:
    """Return the time limit of a test by its name alone, in seconds; see :func:`timeout_of` for the full rule."""
    return TIMEOUT_OVERRIDE.get(test_id.rpartition(".")[2], TIMEOUT_DEFAULT)


def timeout_of(case: Any) -> float:
    """Return the time limit of the current test of ``case``, a ``unittest.TestCase``, in seconds.

    The first of these that is set wins: ``TORCH_EXT_TIMEOUT`` (``--timeout``); ``@with_timeout`` on the test; the class
    attribute ``timeout`` (seconds or a ``timedelta``); ``TIMEOUT_OVERRIDE`` by the test's name;
    ``DISTRIBUTED_TESTS_DEFAULT_TIMEOUT``; 120 seconds.

    Raises:
        ValueError: the limit is no finite time above 0.
    """
    value = time_limit_s()
    if value is not None:
        return value
    test_id = case.id()
    name = getattr(case, "_testMethodName", test_id.rpartition(".")[2])  # the name itself may have dots
    own = getattr(getattr(type(case), name, None), LIMIT_ATTRIBUTE, None)
    if own is None:
        own = getattr(case, "timeout", None)
        own = None if callable(own) else own
    return seconds_of(get_timeout(test_id) if own is None else own, f"the time limit of {test_id}")


def seconds_of(limit: Any, what: str) -> float:
    """Return ``limit``, a number of seconds or a ``timedelta``, in seconds. ``what`` names the limit in errors.

    Raises:
        ValueError: ``limit`` is neither, or no finite time above 0.

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


# A process hangs if it has computed for less than 0.05 s during the last second. A smaller sum than before means that
# one of several processes has ended, which is progress too.
_LOOK_S, _COMPUTES_S = 1.0, 0.05
# Extra seconds for a process that still computes at its limit, on a busy machine.
EXTRA_S = 30.0


class ProcessDeadline:
    """The time limit of one process.

    Args:
        limit_s: the limit in seconds.
        now_s: the start of the limit.
        extra_s: extra seconds for a process that computes.
        cpu_time_s: the CPU time at the start. If given, give up at the limit when there was no CPU use since; otherwise
            sample twice from then on.

    Attributes:
        look_s: call :meth:`is_over` at this time, by the clock of ``now_s``.

    >>> deadline = ProcessDeadline(limit_s=5, now_s=100)
    >>> deadline.look_s, deadline.is_over(105, cpu_time_s=3.0), deadline.look_s
    (105, False, 106.0)
    >>> deadline.is_over(106, cpu_time_s=3.9), deadline.is_over(107, cpu_time_s=3.9)
    (False, True)
    """

    def __init__(self, limit_s: float, now_s: float, extra_s: float = EXTRA_S, cpu_time_s: float | None = None) -> None:
        self.look_s = now_s + limit_s
        self._end_s = now_s + limit_s + extra_s
        self._cpu_time_s = cpu_time_s

    def is_over(self, now_s: float, cpu_time_s: float) -> bool:
        """Whether the process, with this CPU time in seconds, counts as hung."""
        if now_s < self.look_s:
            return False
        before, self._cpu_time_s = self._cpu_time_s, cpu_time_s
        if now_s >= self._end_s or (before is not None and abs(cpu_time_s - before) < _COMPUTES_S):
            return True
        self.look_s = now_s + _LOOK_S
        return False


# Hosts

NUMBER_VARIABLE = "TORCH_EXT_HOST"
ADDRESS_VARIABLE = "TORCH_EXT_HOST_ADDRESS"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_THIS_MACHINE = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def hosts_of(case: object) -> int:
    """Return ``case.hosts``, the number of hosts for a test case or its class; 1 unless that is an int above 1.

    >>> hosts_of(type("TestA", (), {"hosts": 2})), hosts_of(type("TestB", (), {"hosts": ["a", "b"]}))
    (2, 1)
    """
    value = getattr(case, "hosts", 1)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1


def ranks_per_host(world_size: int, hosts: int) -> int:
    """Return the number of ranks on each of ``hosts`` hosts. Raises ValueError if it is not the same for all."""
    if world_size % hosts:
        raise ValueError(f"got {world_size} ranks for {hosts} hosts, expected a multiple of {hosts}")
    return world_size // hosts


def address() -> str:
    """Return this host's address for other hosts."""
    return os.environ.get(ADDRESS_VARIABLE) or _THIS_MACHINE


def is_multi_host() -> bool:
    """Whether this process is a rank of a test on several hosts."""
    return NUMBER_VARIABLE in os.environ


def launcher_variables(
    rank: int, world_size: int, port: int, hosts: int = 1, at: str = _THIS_MACHINE
) -> dict[str, str]:
    """Return the variables that torchrun's agent sets for a rank when it serves the store at ``at:port``."""
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
    """Return the variables that bind torch's transports to the interface with ``address``, except those already in
    ``environment``.
    """
    name = interface_of(address)
    return {variable: name for variable in INTERFACE_VARIABLES if name and variable not in environment}


def interface_of(address: str) -> str:
    """Return the network interface with ``address``; empty if there is none."""
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
    """The path of a file on host 0. Unpickling it on another host makes an empty file there and returns its path."""

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return _of_this_host, (str(self),)


def _of_this_host(path: str) -> str:
    if os.environ.get(NUMBER_VARIABLE, "0") == "0":
        return path
    tempfile.tempdir = None  # the zygote may have cached its folder; this host's is in TMPDIR
    own = os.path.join(tempfile.gettempdir(), os.path.basename(path))
    with open(own, "a"):
        pass
    return own
