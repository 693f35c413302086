"""Processes of a run that are neither its ranks nor the harness: which of them may act, and which a rank has left
behind. Standard library and own layer only.

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

Note [Leftovers]
~~~~~~~~~~~~~~~~
A zygote is the subreaper of its descendants, so that a process whose parent has ended becomes the zygote's child. Its
owner is the child of the zygote that started it. Every child of a zygote leads a process group of its own, which the
processes that it starts join, so the group tells the owner. A process that has left that group still has the variable
``TORCH_EXT_OWNER`` of the environment that it was started in; one that has neither is charged to the child that ended
last. A process whose owner still lives is let be: the processes of a class serve until the class ends.

Three kinds end by themselves once their clients are gone, and clean up before they do: torch's shared memory manager,
and multiprocessing's resource tracker and fork server. They are nobody's leftovers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator

from torch_ext.world import _os
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair
from torch_ext.world.protocol import OWNER_VARIABLE, AskOthers, LeftBehind, Process
from torch_ext.world.wording import short_command

__all__ = [
    "Leftovers",
    "ask_zygote",
    "below_ranks",
    "ends_by_itself",
    "known",
    "others_of_parent_half",
    "still_there",
    "words_of",
]

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


# What tells such a process from its command line.
_END_BY_THEMSELVES = ("torch_shm_manager", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Torch's manager ends two seconds after its last client, and only then removes its socket.
_PATIENCE_S = 4.0


def ends_by_itself(command: str) -> bool:
    """Whether a process with this command line ends once nobody uses it.

    >>> ends_by_itself("/usr/bin/python3 -c from multiprocessing.resource_tracker import main;main(7)")
    True
    """
    return any(name in command for name in _END_BY_THEMSELVES)


class Leftovers:
    """The processes that this zygote has adopted. See Note [Leftovers]."""

    def __init__(self) -> None:
        self._helpers: set[int] = set()  # adopted, and known to end by themselves

    def end_those_of(self, indices: dict[int, int], living: Collection[int], last: int) -> tuple[LeftBehind, ...]:
        """End what ended children have left behind; return those that were still running.

        Args:
            indices: pid -> index, the children of the group that has ended.
            living: pids of children of this process that still run.
            last: index of the child that ended last.
        """
        found: list[LeftBehind] = []
        self._helpers = {pid for pid in self._helpers if not _os.waitpid(pid, os.WNOHANG)[0]}
        while adopted := [
            pid for pid in _os.children_of(_os.getpid()) if pid not in living and pid not in self._helpers
        ]:
            kept = 0
            for pid in adopted:
                command, owner = _os.command_line(pid), _owner(pid)
                if ends_by_itself(command):
                    self._helpers.add(pid)
                elif owner in living:
                    kept += 1
                else:
                    ended = not command or _os.is_ending(pid)  # a zombie has no command line
                    _os.end_process(pid)
                    _os.waitpid(pid, 0)
                    if not ended:
                        found.append(LeftBehind(indices.get(owner, last), pid, command))
            if kept == len(adopted):
                break
        return tuple(found)


def _owner(pid: int) -> int:
    """Return the pid of the child that has started ``pid``, as far as that can be told; else 0."""
    marked = _os.environment_of(pid).get(OWNER_VARIABLE, "")
    return int(marked) if marked.isdigit() else _os.group_of(pid)


def end_everything(patience_s: float = _PATIENCE_S) -> None:
    """End and reap every child of this process, those that end by themselves after a while of patience."""
    patience_end = _os.monotonic() + patience_s
    while True:
        patient = _os.monotonic() < patience_end
        for pid in _os.children_of(_os.getpid()):
            if not (patient and ends_by_itself(_os.command_line(pid))):
                _os.end_process(pid)
        try:
            if not _os.waitpid(-1, os.WNOHANG if patient else 0)[0]:
                _os.sleep(0.005)
        except ChildProcessError:
            return
