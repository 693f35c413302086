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
"""

from __future__ import annotations

import os

__all__ = [
    "full_teardown",
    "hang_after_s",
    "interpreter_wanted",
    "read_at_load",
    "show_output",
    "spares_wanted",
    "threads_per_rank",
    "time_limit_s",
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
