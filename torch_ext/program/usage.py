"""The device and the peers that a rank has used, and the words for a job that has used neither.

Loads torch only if the program has.

Note [Silent fakes]
~~~~~~~~~~~~~~~~~~~
A program that chooses its device from a fixed list of vendors finds no GPU and computes on the host; one that makes a
process group only on a GPU makes none. Either way N ranks each train alone, and all of them exit with code 0. So a job
that passed on ``sim`` reports which devices and groups its ranks have used.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_ext.program import autoload
from torch_ext.world import operations
from torch_ext.world.wording import ranks_phrase

__all__ = ["Facts", "groups_made", "report_at_end", "uses_of_device", "what_was_never_used"]


@dataclass(frozen=True)
class Facts:
    """A rank's report at the end of its program.

    Attributes:
        exit_code: of the program.
        groups: the number of process groups that the rank made.
        uses: the number of uses of a simulated device, see :func:`uses_of_device`.
    """

    exit_code: int
    groups: int
    uses: int


# Dtypes of object collectives in flight records: the pickled bytes, and their lengths.
_TYPES_OF_OBJECTS = frozenset({"Byte", "Long"})
_SIDES = ("input_dtypes", "output_dtypes")


def groups_made() -> int:
    """Return the number of process groups that this process has made since it loaded the simulator."""
    collectives = sys.modules.get("torch_ext.sim._collectives")
    return collectives.groups_made() if collectives is not None else 0


def uses_of_device() -> int:
    """Return the number of uses of a simulated device by this process: allocations, and collectives of tensors.

    A process that moved nothing but objects between ranks has used its device as often as it moved one.
    """
    sim: Any = sys.modules.get("torch_ext.sim._module")
    if sim is None:
        return 0
    uses = int(sys.modules["torch_ext.sim._native"].operations_launched_on_devices())
    if sim.is_initialized():
        stats = (sim.memory_stats(index) for index in range(sim.device_count()))
        uses += sum(int(each.get("allocation.all.allocated", 0)) for each in stats)
    return uses or _objects_alone()


def _objects_alone() -> int:
    """Return the number of objects moved between ranks; 0 if other tensors of the host moved, too."""
    moved: int = sys.modules["torch_ext.sim._collectives"].objects_moved()
    entries = json.loads(operations.own_record() or "{}").get("entries", []) if moved else []
    types = {kind for entry in entries for side in _SIDES for kind in entry.get(side, [])}
    return moved if types <= _TYPES_OF_OBJECTS else 0


def what_was_never_used(facts: Sequence[Facts | None], *, met: bool = False, cuda_as_sim: bool = False) -> list[str]:
    """Return a sentence for each thing that ranks have not used; none for a single rank.

    Args:
        facts: of each rank; None for a rank that ended without a report, which counts as use.
        met: the ranks used the job's store, as RPC does without a group.
        cuda_as_sim: CUDA meant the simulated accelerator; leave out the hint of ``--cuda-as-sim``.

    >>> what_was_never_used([Facts(0, 1, 9), Facts(0, 1, 0)])[0]
    'no tensor ever lay on the simulated device of rank 1: it computed on the host. If the program chooses a device by \
the name "cuda", run it with --cuda-as-sim.'
    """
    told = {rank: each for rank, each in enumerate(facts) if each is not None}
    if len(facts) < 2:
        return []
    sentences = []
    alone = [rank for rank, each in told.items() if not each.groups]
    if alone and not met:
        if len(alone) == len(facts):
            sentences.append(f"none of the {len(facts)} ranks made a process group: each ran by itself.")
        else:
            sentences.append(f"{ranks_phrase(alone)} made no process group, and so took no part in the job.")
    host = [rank for rank, each in told.items() if not each.uses]
    if host:
        where = "any simulated device" if len(host) == len(facts) else f"the simulated device of {ranks_phrase(host)}"
        it = "it" if len(host) == 1 else "all" if len(host) == len(facts) else "they"
        hint = "" if cuda_as_sim else ' If the program chooses a device by the name "cuda", run it with --cuda-as-sim.'
        sentences.append(f"no tensor ever lay on {where}: {it} computed on the host.{hint}")
    return sentences


def report_at_end(owner: int, *, cuda_as_sim: bool) -> None:
    """Print what this worker of torchrun has not used; with ``TORCH_EXT_SIM_STRICT=1``, end the process with code 1.

    Does nothing in another process than ``owner``. See Note [Silent fakes].
    """
    if os.getpid() != owner:
        return
    told = Facts(0, groups_made(), uses_of_device())
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    strict = autoload.is_strict()
    facts = [told if number == rank else None for number in range(size)]
    unused = what_was_never_used(facts, cuda_as_sim=cuda_as_sim)
    for sentence in unused:
        print(f"torch_ext: {'error' if strict else 'warning'}: {sentence}", file=sys.stderr, flush=True)
    if unused and strict:
        sys.stdout.flush()
        os._exit(1)  # an exit function has no other way to change the exit code
