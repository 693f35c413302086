"""Which processes of a run may act that are neither its ranks nor the harness. Standard library and own layer only.

Note [Who else may act]
~~~~~~~~~~~~~~~~~~~~~~~
A zygote is the parent of its ranks, and adopts every process below it whose own parent ends. It knows which children it
has forked itself: ranks, spares, the class process, its copies. All others were started by a rank, by the parent half,
or by the file of the test as it was imported; a copy learns from its original which processes those were, since they
stay with the original. The parent half looks at its own children and threads. Where it is no child of a zygote (pytest,
``python test_x.py``), it adopts its orphans itself, so that they can be found.

Processes that have ended or are being killed do not count, nor do two that only clean up: multiprocessing's resource
tracker and torch's shared memory manager. Descendants are read before the zygote's own children: a process whose parent
ends in between is seen in one of the two places.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator

from torch_ext.world import _os
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair
from torch_ext.world.phrases import short_command
from torch_ext.world.protocol import AskOthers, Process

__all__ = ["ask_zygote", "below_ranks", "known", "others_of_parent_half", "still_there", "words_of"]

# The zygote answers in milliseconds unless it imports something.
_ANSWER_S = 1.0
_CLEANS_UP = re.compile(
    r"\S+ (-\S+ )*-c from multiprocessing\.resource_tracker import main;main\(\d+\)|\S*/torch_shm_manager"
)


def ask_zygote(zygote: Channel, ranks: Collection[int]) -> tuple[str, ...]:
    """Ask the zygote behind a command channel who else may act; it is taken to be somebody if it does not answer.

    Args:
        ranks: pids of the ranks of the world.
    """
    ours, theirs = channel_pair()
    try:
        zygote.send(AskOthers(tuple(ranks)), [theirs.fileno()])
        theirs.close()
        if ours.poll(_ANSWER_S):
            found, _ = ours.receive()
            return tuple(str(each) for each in found)
    except (ChannelClosedError, OSError):
        pass
    finally:
        ours.close()
        theirs.close()
    return ("a process that the zygote, which does not answer, may know",)


def others_of_parent_half(ranks: Iterable[int], zygotes: Iterable[int] = ()) -> tuple[str, ...]:
    """Return the children of this process that may act, in words: all but ``zygotes`` and those of ``ranks``."""
    ours = set(zygotes).union(*map(_ancestors, ranks))
    return tuple(words_of(pid for pid in _os.children_of(os.getpid()) if pid not in ours))


def below_ranks(ranks: Iterable[int]) -> Iterator[str]:
    """Yield the processes that ``ranks`` have started, in words."""
    for rank in ranks:
        yield from words_of(_os.children_of(rank))


def known(pids: Iterable[int]) -> tuple[Process, ...]:
    """Return what tells these processes from later ones of the same number."""
    return tuple(Process(pid, start) for pid in _live(pids) if (start := _start_of(pid)))


def still_there(processes: Iterable[Process]) -> Iterator[str]:
    """Yield those of ``processes`` that have not ended, in words."""
    for each in processes:
        if _start_of(each.pid) == each.start:
            yield from words_of([each.pid])


def _live(pids: Iterable[int]) -> Iterator[int]:
    """Yield those that may act, and those below them that do in the place of one that only cleans up."""
    for pid in pids:
        if _has_ended(pid) or _os.is_ending(pid):
            continue
        if _CLEANS_UP.fullmatch(_os.command_line(pid)):
            yield from _live(_os.children_of(pid))
        else:
            yield pid


def _has_ended(pid: int) -> bool:
    try:
        return _os.stat_of(pid)[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _start_of(pid: int) -> str:
    try:
        return _os.stat_of(pid)[19]
    except OSError:
        return ""


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            pid = int(_os.stat_of(pid)[1])
        except OSError:
            break
    return found


def words_of(pids: Iterable[int]) -> Iterator[str]:
    """Yield those of ``pids`` that may act, in words."""
    yield from map(_words, _live(pids))


def _words(pid: int) -> str:
    return f"process {pid} ({short_command(_os.command_line(pid)) or '?'})"
