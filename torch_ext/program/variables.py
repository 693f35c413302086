"""The variables by which a process of anybody's runs on the simulated accelerator. The standard library only.

==========================  =======================================================================================
``TORCH_EXT_SIM``           ``1``: what imports torch runs on the simulated accelerator; ``cuda``: and CUDA means it
``TORCH_EXT_SIM_PACKAGES``  packages, joined by commas, in which CUDA means it besides the program
``TORCH_EXT_SIM_STRICT``    ``1``: a worker that never used its device or its peers ends with code 1
``TORCH_EXT_SIM_WORKER``    set for the processes that a worker starts
==========================  =======================================================================================
"""

from __future__ import annotations

import os

__all__ = ["ON", "ON_AS_CUDA", "SIM", "ask", "hide", "is_strict", "mark_worker", "packages", "wanted", "worker_above"]

SIM = "TORCH_EXT_SIM"
# Its values.
ON, ON_AS_CUDA = "1", "cuda"
_OFF = ("", "0")
_PACKAGES, _STRICT, _WORKER = "TORCH_EXT_SIM_PACKAGES", "TORCH_EXT_SIM_STRICT", "TORCH_EXT_SIM_WORKER"
# What the simulator does as soon as it is loaded.
_RACES = "TORCH_EXT_RACES"


def wanted() -> str:
    """Return ``1``, ``cuda`` or an empty string.

    Raises:
        ValueError: the variable has another value.
    """
    asked = os.environ.get("TORCH_EXT_SIM", "")
    if asked not in (*_OFF, ON, ON_AS_CUDA):
        raise ValueError(f"{SIM}={asked}: expected 1, or cuda to have CUDA mean the simulated accelerator.")
    return "" if asked in _OFF else asked


def packages() -> tuple[str, ...]:
    """Return the packages in which CUDA means the simulated accelerator too."""
    return tuple(name for name in os.environ.get("TORCH_EXT_SIM_PACKAGES", "").split(",") if name)


def is_strict() -> bool:
    """Whether a worker fails that has used neither its device nor its peers."""
    return os.environ.get("TORCH_EXT_SIM_STRICT") == "1"


def worker_above() -> bool:
    """Whether a worker of a job has started this process."""
    return bool(os.environ.get("TORCH_EXT_SIM_WORKER"))


def mark_worker() -> None:
    """Have the processes that this one starts know that they are no workers themselves."""
    os.environ[_WORKER] = str(os.getpid())


def hide() -> None:
    """Remove from this process's environment what the ranks that it starts do by themselves."""
    for name in (SIM, _RACES, _PACKAGES, _STRICT):
        os.environ.pop(name, None)


def ask(value: str, of: tuple[str, ...]) -> None:
    """Ask the processes that this one starts for ``value``, and for the packages ``of``."""
    os.environ[SIM] = value
    if of:
        os.environ[_PACKAGES] = ",".join(of)
