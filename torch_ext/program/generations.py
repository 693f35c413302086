"""``torch_ext run --restart``: how a program goes on after ranks failed or died. Runs in the supervisor, without torch.

A *generation* is the set of ranks between two losses. Each has a store of its own, and the variables of torchrun's
contract. ``TORCHELASTIC_RESTART_COUNT`` is its number.

==========  ==========================================================================================================
policy      after a loss
==========  ==========================================================================================================
``world``   every process ends, and all ranks start again: torchrun's policy
``rank``    a process starts in the place of each lost one. The survivors go on
``shrink``  the survivors go on alone, with new values of ``RANK`` and ``WORLD_SIZE``
==========  ==========================================================================================================

Processes that go on get the variables of the next generation in their environment while they run. ``LOCAL_RANK`` and
``LOCAL_WORLD_SIZE`` stay as at the start, as the devices do. Then the store of the last generation closes, so that no
process waits there for a peer that will not come.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch_ext.world import wording
from torch_ext.world._os import monotonic
from torch_ext.world.follow import World
from torch_ext.world.outcome import Outcome
from torch_ext.world.settings import launcher_variables
from torch_ext.world.start import RankTask
from torch_ext.world.wording import ranks_phrase

_POLICIES = ("world", "rank", "shrink")
# torch.distributed.launcher.api.LaunchConfig.max_restarts
_MOST = 3
_COUNT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class Policy:
    """What to do after a loss, at most ``most`` times."""

    name: str = ""  # empty: nothing
    most: int = 0


def policy(text: str) -> Policy:
    """Parse ``world``, ``rank`` or ``shrink``, each with ``:N``. Raises ValueError.

    >>> policy("world:1"), policy("shrink")
    (Policy(name='world', most=1), Policy(name='shrink', most=3))
    """
    name, colon, most = text.partition(":")
    if name not in _POLICIES or (colon and not (most.isascii() and most.isdigit() and int(most))):
        raise ValueError(f"got {text!r}, expected one of {', '.join(_POLICIES)}, or with a number, such as world:3")
    return Policy(name, int(most or _MOST))


def problem(found: argparse.Namespace) -> str:
    """Return why the options of a command do not go together; empty if they do."""
    if found.restart.name and found.dry:
        return "--restart: a dry run has no ranks to lose; leave out --dry"
    if found.restart.name not in ("", "world") and (found.clock or found.check_replicas):
        return "--clock and --check-replicas compare ranks from start to end: use --restart world"
    return ""


class Store(Protocol):
    """The rendezvous of one generation."""

    port: int

    def close(self) -> None: ...

    def was_used(self) -> bool: ...


class Generations:
    """The generations of one run of at most ``limit_s`` seconds. ``ranks``: the numbers of the first one's, which are
    on ``hosts`` hosts, among ``size``.
    """

    def __init__(
        self,
        allowed: Policy,
        ranks: Sequence[int],
        size: int,
        hosts: int,
        limit_s: float,
        new_store: Callable[[], Store],
    ) -> None:
        self._policy, self._size, self._hosts, self._new_store = allowed, size, hosts, new_store
        self._ranks = dict(enumerate(ranks))  # by the place of the process in its world
        self._number, self._causes = 0, [""]  # why each generation ended; empty: it has not, or by itself
        self._end_s = monotonic() + limit_s
        self.outlive_losses = allowed.name in ("rank", "shrink")
        self.store = new_store()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    @property
    def left_s(self) -> float:
        """Seconds until the end of the run."""
        return self._end_s - monotonic()

    def variables(self, place: int) -> dict[str, str]:
        """Return the variables of the process at ``place``."""
        found = launcher_variables(self._ranks[place], self._size, self.store.port, self._hosts)
        del found[_COUNT]
        # The count is the last to change in a running process, which may wait for it.
        return {**found, "TORCHELASTIC_MAX_RESTARTS": str(self._policy.most), _COUNT: str(self._number)}

    def members(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes of those that are ranks now, numbered from 0."""
        numbers = {place: number for number, place in enumerate(self._ranks)}
        return [replace(each, rank=numbers[each.rank]) for each in outcomes if each.rank in numbers]

    def end(self, cause: str) -> None:
        """Record why this generation ends."""
        self._causes[-1] = cause

    def starts_again(self) -> bool:
        """Begin a generation of another world, if the last one's end and the policy say so."""
        if self._policy.name != "world" or not self._causes[-1] or not self._may_go_on():
            return False
        self._begin("all ranks start again")
        return True

    def goes_on(self, lost: Sequence[int]) -> bool:
        """Whether the other processes outlive the loss of processes at these places."""
        is_left = len(lost) < len(self._ranks) or self._policy.name == "rank"
        return self.outlive_losses and is_left and self._may_go_on()

    def go_on(self, world: World, lost: Sequence[int], task: Callable[[int], RankTask]) -> None:
        """Begin a generation of the same world, in which the processes at the places ``lost`` have ended."""
        who, before = ranks_phrase([self._ranks[place] for place in lost]), self.store
        if self._policy.name == "rank":
            self._begin(f"{who} start{'s' * (len(lost) == 1)} again")
        else:
            left = [place for place in self._ranks if place not in lost]
            self._ranks = {place: rank for rank, place in enumerate(left)}
            self._size = len(self._ranks)
            self._begin(f"{self._size} of {self._size + len(lost)} ranks go on without {who}")
        for place in lost:
            if place in self._ranks:
                world.restart(place, task(place))
            else:
                world.drop(place)
        for place in self._ranks.keys() - lost:
            values = self.variables(place)
            world.set_variables(place, {name: values[name] for name in values if not name.startswith("LOCAL_")})
        before.close()

    def _may_go_on(self) -> bool:
        return self._number < self._policy.most and self.left_s > 0

    def _begin(self, how: str) -> None:
        """Begin the next generation; ``go_on`` closes the last one's store later."""
        if self._policy.name == "world":
            self.store.close()
        self.store = self._new_store()
        self._number += 1
        wording.announce(f"{self._causes[-1]}; {how}: restart {self._number} of {self._policy.most}")
        self._causes.append("")

    def tell(self) -> None:
        """Print why each generation ended, if there was more than one."""
        for number, cause in enumerate(self._causes if self._number else ()):
            wording.announce(f"generation {number}: {cause or 'ended by itself'}")
