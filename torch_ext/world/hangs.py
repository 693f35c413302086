"""Whether a world hangs, from looks at its ranks some time apart. No I/O, no clock. See Note [Provable hangs]."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch_ext.world.limits import Limits
from torch_ext.world.protocol import Progress
from torch_ext.world.wording import ranks_phrase, without_ranks

__all__ = ["PARENT_HALF", "SILENCE_S", "Finding", "HangWatch", "Measures", "silence_text"]

# Stands for the parent half where ranks stand.
PARENT_HALF = -1
# After so many seconds without progress the user is told why nothing is proven.
SILENCE_S = 60.0
# A rank that computes for this share of the time makes progress.
_COMPUTES = 0.05
# So many looks are made in the time after which a hang is proven.
_LOOKS = 8
_MOST_WORDS = 3


@dataclass(frozen=True)
class Measures:
    """What can be asked about the processes of a world.

    Attributes:
        computed_s: for how many seconds a rank has computed.
        starved_s: for how many seconds the threads of a rank have waited for a core.
        others: which processes and threads may act that are neither ranks nor the parent half's, in words.
    """

    computed_s: Callable[[int], float] = lambda rank: 0.0
    starved_s: Callable[[int], float] = lambda rank: 0.0
    others: Callable[[], Sequence[str]] = tuple


class Finding(Enum):
    HUNG = "no rank can go on, and nobody else can end their waits"
    SILENT = "there is no progress, and no proof either"


class HangWatch:
    """Watches one world.

    A hang is found ``limits.hang_s`` seconds after a look at which every rank was blocked, if that holds at each look
    since, no thread has run meanwhile, and nobody else may act.

    Args:
        limits: how long to wait.
        started_s: when the test began.
        measures: what can be asked about the processes of the ranks.

    Attributes:
        next_s: when to look next.
        reasons: why the last look proves nothing, in words.
    """

    def __init__(self, limits: Limits, started_s: float, measures: Measures) -> None:
        self._limits = limits
        self._every_s = limits.hang_s / _LOOKS if limits.hang_s else float("inf")
        self._deadline_s = started_s + limits.test_s
        self._measures = measures
        self.next_s = started_s + self._every_s
        self.reasons: tuple[str, ...] = ()
        self._asked: dict[int, Progress | None] = {}
        self._before: Mapping[int, Progress | None] = {}
        self._looked_s = started_s
        self._since_s: float | None = None  # all have been blocked at every look since; when the first one was over
        self._progress_s = started_s
        self._moved = False
        self._is_judged = False
        self._told_hang = self._told_silence = False  # while they last
        self._used_s: dict[int, float] = {}

    def forget(self) -> None:
        """Something has happened, which others may be about to notice."""
        self._moved, self._since_s, self._asked, self._before = True, None, {}, {}

    def look(self, ranks: Collection[int], now_s: float) -> bool:
        """Return whether a look at ``ranks`` begins, which each answers by :meth:`observed`: not while one has yet to
        answer the last look.
        """
        if self._moved or self._computes(ranks, now_s - (self.next_s - self._every_s)):
            self._note_progress(now_s)
        self.next_s = now_s + self._every_s
        if not self._is_complete():
            return False
        self._before, self._asked = self._asked, dict.fromkeys((*ranks, PARENT_HALF))
        self._looked_s, self._is_judged = now_s, False
        return True

    def observed(self, rank: int, progress: Progress) -> None:
        """``rank`` has answered."""
        if rank in self._asked:
            self._asked[rank] = progress

    def judge(self, now_s: float) -> Finding | None:
        """Return what the looks so far show, once for as long as it lasts."""
        if not self._asked or self._moved:
            return None
        if not self._is_complete():
            silent = [rank for rank, progress in self._asked.items() if progress is None]
            self.reasons = (f"{_who(silent)}, which cannot answer",)
        elif not self._is_judged:
            self._take_in(now_s)
        if self._since_s is None:
            self._told_hang = False
            if now_s - self._progress_s >= SILENCE_S and not self._told_silence:
                self._told_silence = True
                return Finding.SILENT
        elif self._looked_s - self._since_s >= self._limits.hang_s and not self._told_hang:
            self._told_hang = True
            return Finding.HUNG
        return None

    def _is_complete(self) -> bool:
        return all(progress is not None for progress in self._asked.values())

    def _take_in(self, now_s: float) -> None:
        answers = {rank: progress for rank, progress in self._asked.items() if progress is not None}
        before = {rank: progress for rank, progress in self._before.items() if progress is not None}
        if any(rank in before and before[rank].record != each.record for rank, each in answers.items()):
            self._note_progress(now_s)
        self.reasons = tuple(self._reasons(answers))
        ran = any(rank not in before or before[rank].fingerprint != each.fingerprint for rank, each in answers.items())
        if self.reasons:
            self._since_s = None
        elif ran or self._since_s is None:
            self._since_s, self._told_hang = now_s, False
        self._is_judged = True

    def _reasons(self, answers: Mapping[int, Progress]) -> list[str]:
        endless_s, raises_later_s = (
            min(self._deadline_s, self._looked_s + each)
            for each in (self._limits.endless_s, self._limits.raises_later_s)
        )
        found = []
        for rank, each in answers.items():
            if not each.blocked:
                found += [f"{word} of {_who([rank])}" for word in each.may_act[:_MOST_WORDS]] or [_who([rank])]
            elif each.until_s < endless_s or each.raises_s < raises_later_s:
                left_s = max(0.0, min(each.until_s, each.raises_s) - self._looked_s)
                found.append(f"a wait of {_who([rank])}, which ends by itself in {left_s:.0f} s")
        ranks = [each for rank, each in answers.items() if rank != PARENT_HALF]
        if not found and not all(each.among_ranks for each in ranks):
            found += list(self._measures.others())
        return found

    def _computes(self, ranks: Collection[int], time_s: float) -> bool:
        used_s = {rank: self._measures.computed_s(rank) for rank in ranks}
        more_s = [abs(used_s[rank] - self._used_s[rank]) for rank in ranks if rank in self._used_s]
        self._used_s = used_s
        return any(each > _COMPUTES * time_s for each in more_s)

    def _note_progress(self, now_s: float) -> None:
        self._progress_s, self._moved, self._told_silence = now_s, False, False


def _who(ranks: Sequence[int]) -> str:
    of_world = sorted(rank for rank in ranks if rank != PARENT_HALF)
    words = [ranks_phrase(of_world)] if of_world else []
    return " and ".join(words + ["the parent half"] * (PARENT_HALF in ranks))


def silence_text(reasons: Sequence[str], stacks: Mapping[int, str]) -> str:
    """Return what a user reads of a silence: why it is not proven to be a hang, and where the ranks are."""
    because = "; ".join(reasons[:_MOST_WORDS]) or "a rank"
    more = f"; and {len(reasons) - _MOST_WORDS} more" if len(reasons) > _MOST_WORDS else ""
    lines = [f"no progress for {SILENCE_S:.0f} s; not proven to hang, because these may act: {because}{more}"]
    alike: dict[str, tuple[list[int], str]] = {}
    for rank, text in sorted(stacks.items()):
        alike.setdefault(without_ranks(text), ([], text))[0].append(rank)
    for ranks, text in alike.values():
        shown = text.rstrip() or "(cannot be shown)"
        lines += [f"Stacks of {ranks_phrase(ranks)}:", *(f"    {line}" for line in shown.splitlines())]
    return "\n".join(lines)
