"""Words about a job of several ranks that has passed without having used what makes it one. Pure functions.

Note [Silent fakes]
~~~~~~~~~~~~~~~~~~~
A program that chooses its device from a fixed list of vendors finds no GPU and computes on the host; one that makes a
process group only on a GPU makes none. Either way N ranks each train alone, and all of them exit with code 0. Nothing
has failed, and nothing of what was asked for has happened. So a job that passed on ``sim`` is asked what it has used.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_ext.program.spec import Facts
from torch_ext.world.wording import ranks_phrase

__all__ = ["what_was_never_used"]


def what_was_never_used(facts: Sequence[Facts | None], *, met: bool = False, cuda_as_sim: bool = False) -> list[str]:
    """Return a sentence for each thing that ranks have not used; none for a single rank.

    Args:
        facts: of each rank; None where it ended without telling, which is held against nobody.
        met: the ranks have met in the job's store, as those of RPC do without a group.
        cuda_as_sim: CUDA meant the simulated accelerator already.

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
