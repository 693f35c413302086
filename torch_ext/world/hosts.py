"""Tests whose ranks run on several hosts. Standard library only.

Note [Several hosts]
~~~~~~~~~~~~~~~~~~~~
A test class with ``hosts = 2`` has its ranks on two machines: the first half on host 0, the rest on host 1. They share
no memory and no files, so they meet at a TCP store, which the parent half serves, and get the variables that torchrun
sets on several nodes. ``file_name`` names a file of its own on each host.

There is one parent half, on host 0, and one world. Who starts the ranks of the other hosts is not its business: it asks
its zygote for all of them. On a cluster that is a stand-in (``runner/cluster/hosts.py``), which starts those of other
hosts there and passes on what they say. Elsewhere it is the ordinary zygote, which starts all of them on this machine.
The hosts are then a pretence, but one that holds: each has a folder for temporary files of its own, and
``TORCH_EXT_HOST`` tells the simulated device with whom a rank may share memory.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping

__all__ = [
    "ADDRESS_VARIABLE",
    "INTERFACE_VARIABLES",
    "NUMBER_VARIABLE",
    "HostFile",
    "address",
    "hosts_of",
    "interface_of",
    "interface_variables",
    "is_spread",
    "launcher_variables",
    "ranks_per_host",
]

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
