"""Words that several reports use. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ranks_phrase"]


def ranks_phrase(ranks: Sequence[int]) -> str:
    """Name some ranks in words.

    >>> ranks_phrase([2])
    'rank 2'
    >>> ranks_phrase([0, 1, 2, 3, 6])
    'ranks 0-3, 6'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "ranks " + ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" if len(run) > 2 else f"{run[0]}, {run[1]}"
        for run in runs
    )
