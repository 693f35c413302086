"""Every message and order that crosses a process of the world, and nothing else. Standard library only.

Note [Zygote protocol]
~~~~~~~~~~~~~~~~~~~~~~
A *client* holds a command channel to a zygote. To get processes, it sends :class:`Start` along with the descriptor of a
fresh channel, the *group channel*, and the descriptors that the children inherit. The children of one request form a
*child group* and share one fate. On the group channel the zygote answers :class:`Started`, and later one
:class:`Ended` per child; the client may send :class:`Signal`. Closing the group channel abandons the group: the zygote
kills and reaps its children. Closing the first command channel ends the zygote with everything it started.

Every child, forked or executed, begins in :func:`~torch_ext.world.child.child_main`: it waits on its own socket for one
:class:`Order` and calls the order's target. A *spare* is a child that was forked before anyone asked; it has done
nothing but wait.

==================  =======================================================================================
from -> to          messages
==================  =======================================================================================
client -> zygote    :class:`Start`, :class:`Copy`, :class:`AddClient`, :class:`AskOthers`;
                    on a group channel :class:`Signal`
zygote -> client    on a group channel :class:`Started`, :class:`Ended`
client -> root      :class:`RootOrder` first, answered by :class:`Loaded` or :class:`NotLoaded`
root -> module      :class:`ModuleOrder` as the payload of an :class:`Order`, answered likewise
zygote -> copy      :class:`CopyOrder` as the payload of an :class:`Order`, answered by :class:`Loaded`
zygote -> child     :class:`Preparation` if it is a fresh interpreter, then one :class:`Order`
parent half -> rank :class:`RankOrder` as the payload of an :class:`Order`; later :class:`Ask`
child -> supervisor :class:`Devices`, where it was asked for them
rank -> parent half :class:`Phase`, :class:`Notice`, :class:`Receipt`, :class:`Collectives`, :class:`Progress`,
                    :class:`Farewell`
==================  =======================================================================================
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = [
    "NO_TICKET",
    "OWNER_VARIABLE",
    "STACK_SIGNAL",
    "AddClient",
    "Ask",
    "AskOthers",
    "Collectives",
    "Copy",
    "CopyOrder",
    "Devices",
    "Ended",
    "Farewell",
    "HiddenFrames",
    "Inherited",
    "LeftBehind",
    "Loaded",
    "ModuleOrder",
    "NotLoaded",
    "Notice",
    "Order",
    "Phase",
    "Preparation",
    "Process",
    "Progress",
    "RankOrder",
    "Receipt",
    "RootOrder",
    "Said",
    "Signal",
    "Start",
    "Started",
    "Ticket",
    "Wait",
]

# Makes a process write the stacks of its threads. Neither torch nor tests use real-time signals.
STACK_SIGNAL = signal.SIGRTMIN + 5


# In the environment of every child of a zygote: its pid. See Note [Leftovers].
OWNER_VARIABLE = "TORCH_EXT_OWNER"


# Between a zygote and its clients


@dataclass(frozen=True)
class Order:
    """What one child does: call ``target`` (``"module:function"``) with ``payload`` and its ``descriptors`` many
    descriptors.
    """

    target: str
    payload: Any
    descriptors: int


@dataclass(frozen=True)
class Start:
    """Ask for a child group. Descriptors: the group channel, then those of each order in turn.

    Attributes:
        orders: one per child.
        environment: the children's environment. The zygote compares it with the one that it was started with.
        interpreter: give every child a fresh interpreter.
        spares: how many children to fork ahead of the next request.
    """

    orders: tuple[Order, ...]
    environment: dict[str, str]
    interpreter: bool = False
    spares: int = 0


@dataclass(frozen=True)
class AddClient:
    """Serve another command channel, whose descriptor comes along. Closing that one does not end the zygote."""


@dataclass(frozen=True)
class AskOthers:
    """Ask which processes may act besides the harness and ``ranks`` (pids); see Note [Who else may act]. Descriptor:
    the channel on which a tuple of their descriptions comes back.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Ask for a zygote like this one, as the only child of a group. Descriptors: the group channel, and the first
    command channel of the copy.

    What a child of the copy does to its zygote reaches no child of another.
    """


@dataclass(frozen=True)
class Started:
    """The children exist.

    Attributes:
        pids: of each, by its own machine.
        why_interpreter: why they could not be forked; empty if they were, or if fresh interpreters were asked for.
        hosts: the host of each, in words for users, where they run on several machines; see Note [Several hosts].
    """

    pids: tuple[int, ...]
    why_interpreter: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftBehind:
    """A process that child ``index`` started and left running. The zygote has ended it."""

    index: int
    pid: int
    command: str


@dataclass(frozen=True)
class Ended:
    """Child ``index`` was reaped.

    Attributes:
        exit_code: negative for a signal, as in multiprocessing.
        time_s: when, by ``time.monotonic``.
        left_behind: comes with the last child of a group, for the whole group, since until then a peer may still use
            a process that another one started.
    """

    index: int
    exit_code: int
    time_s: float
    left_behind: tuple[LeftBehind, ...] = ()


@dataclass(frozen=True)
class Signal:
    """Send signal ``number`` to child ``index`` of the group. Ignored if the child has ended."""

    index: int
    number: int


# How a zygote gets ready


@dataclass(frozen=True)
class Preparation:
    """What a fresh interpreter loads: the search path, modules by name, and the file or module that is ``__main__``.

    See ``child.py`` for what is done with it.
    """

    path: tuple[str, ...]
    modules: tuple[str, ...]
    main_name: str = ""
    main_path: str = ""


@dataclass(frozen=True)
class RootOrder:
    """What the first zygote of a run loads.

    Attributes:
        preparation: its ``sys.path`` and what it imports. A module that cannot be imported ends the zygote.
        scratch: a folder to remove at the end.
    """

    preparation: Preparation
    scratch: str = ""


@dataclass(frozen=True)
class ModuleOrder:
    """Which test module a module zygote loads: its name, the folder to put on ``sys.path``, and its ``sys.argv``.

    The modules ``first`` are imported before it, in ranks that are fresh interpreters too.
    """

    name: str
    import_root: str
    file: str
    environment: dict[str, str]
    argv: tuple[str, ...]
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """A process by its pid and when it started, in the kernel's ticks: pids are used again."""

    pid: int
    start: str


@dataclass(frozen=True)
class CopyOrder:
    """What the copy of a zygote is to be.

    Attributes:
        description: what it is called in messages.
        preparation: what fresh interpreters load.
        original: the zygote that it is a copy of.
        others: processes of that one which it has not forked itself.
    """

    description: str
    preparation: Preparation
    original: int = 0
    others: tuple[Process, ...] = ()


@dataclass(frozen=True)
class HiddenFrames:
    """Frames of the harness that a report leaves out; see ``frames.py``.

    Attributes:
        file: regular expression that matches the end of the file's path.
        functions: these are left out of stacks and tracebacks; none: the whole file, of tracebacks only.
        outwards: in stacks, the frames that called them are left out too.
        thread: in stacks, the whole thread is left out.
    """

    file: str
    functions: tuple[str, ...] = ()
    outwards: bool = False
    thread: bool = False


@dataclass(frozen=True)
class Devices:
    """How many devices the ranks of a machine must share, and the environment variable that narrows them down.

    0 and an empty string where they need not.
    """

    number: int
    variable: str


@dataclass(frozen=True)
class Loaded:
    """The zygote is ready.

    Attributes:
        imported: files of all modules that it holds from below the project's folders.
        hidden_frames: what the layers that it has loaded leave out of reports.
    """

    imported: tuple[str, ...] = ()
    hidden_frames: tuple[HiddenFrames, ...] = ()


@dataclass(frozen=True)
class NotLoaded:
    """The module could not be imported; ``trace`` is the traceback.

    ``left`` says, in words for users, that the module asked not to be run while it was imported; else it is empty.
    """

    trace: str
    left: str = ""


# Between a parent half and its ranks


@dataclass(frozen=True)
class Wait:
    """What one thread waits for.

    Attributes:
        words: the operation and the line of the test, such as ``"barrier() in test_a (test_x.py:12)"``.
        peers: ranks that it names as those it waits for.
        everyone: whether it waits for all ranks, as the creation of a process group does.
        transport: whether it is an operation of a process group, a store or RPC.
        over: whether the body is over, and the harness waits for the other ranks.
    """

    words: str
    peers: tuple[int, ...] = ()
    everyone: bool = False
    transport: bool = False
    over: bool = False


@dataclass(frozen=True)
class Inherited:
    """Stands for connection ``index`` among a task's arguments, which are pickled before the connection exists."""

    index: int


@dataclass(frozen=True)
class Ticket:
    """Names one run of one test. A receipt must carry the ticket of the run that is being judged.

    Attributes:
        test: the test's id.
        attempt: counts the runs that the same ranks have been given, from 0.
    """

    test: str = ""
    attempt: int = 0


NO_TICKET = Ticket()


@dataclass(frozen=True)
class RankOrder:
    """Everything that a rank is told when it starts.

    Attributes:
        ticket: of the first test that it runs.
        task: pickled ``(function, args, kwargs)``, unpickled in the rank once the rest is applied.
        threads: number of intra-op threads; 0 leaves torch's number alone.
        has_page: whether it inherits a page of waits; see Note [The page of waits].
        address: of the world on the loopback interface, whose reservation it inherits; see Note [An address for each
            world]. Empty if the world has none of its own.
    """

    rank: int
    name: str
    ticket: Ticket
    task: bytes
    environment: dict[str, str]
    directory: str
    umask: int
    argv: tuple[str, ...]
    threads: int
    has_page: bool = False
    address: str = ""


class Ask(Enum):
    """What the parent half asks of a running rank."""

    RELEASE = "you may end"
    COLLECTIVES = "send your last collectives"
    PROGRESS = "tell what you wait for"
    STACKS = "write the stacks of your threads"


class Phase(Enum):
    """How far a rank is; sent when it gets there."""

    RUNNING = "has loaded what its task needs, and runs it"
    SETTLING = "the body is over, and what it left to be done is being done"


@dataclass(frozen=True)
class Farewell:
    """The last message of a rank that ends as the harness ends it, sent right before the process is gone.

    A process that ends with code 0 and without it has been ended by something else.
    """


@dataclass(frozen=True)
class Notice:
    """Something that the user should be told, whether or not the test passes."""

    text: str


@dataclass(frozen=True)
class Collectives:
    """A rank's last collectives as torch's flight recorder tells them, in JSON; empty if there are none."""

    json: str


@dataclass(frozen=True)
class Progress:
    """Whether a rank can go on, and what it waits for. See Note [Provable hangs].

    Attributes:
        blocked: whether no thread of the rank can go on by itself before ``until_s`` and ``raises_s``.
        until_s: when the first time limit of a lock ends, by ``time.monotonic``; infinite if there is none.
        raises_s: the same for an operation of torch's, which raises then.
        fingerprint: differs from an earlier one if any thread has run meanwhile.
        waits: what each thread with Python code waits for, in words.
        record: changes whenever a collective begins or ends.
        may_act: what can go on, in words.
        among_ranks: whether it waits for peers in memory that ranks alone share, and no signal is handled.
    """

    blocked: bool
    until_s: float
    fingerprint: str
    waits: tuple[Wait, ...] = ()
    record: str = ""
    may_act: tuple[str, ...] = ()
    among_ranks: bool = False
    raises_s: float = float("inf")


class Said(Enum):
    """What a receipt says."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Part:
    """A part of a test that failed, or of a skipped test one that skipped.

    Attributes:
        sub_test: the sub-test in words, such as ``(x=1)``; empty for the test itself and its cleanups.
        expectable: it failed as a test that is expected to fail may.
    """

    sub_test: str
    expectable: bool


@dataclass(frozen=True)
class Receipt:
    """A rank's statement about its body.

    Attributes:
        said: how the body ended.
        time_s: when, by ``time.monotonic``, which all processes of a machine share.
        reason: the reason of a skip, or the first line of what a failure says (``"ValueError: no"``).
        trace: the traceback of a failure, without the harness's own frames.
        transport: whether the failure was raised by what connects the ranks (a process group, a store, RPC), not by the
            test's own code.
        waits: what it waited for when it failed, if the failure tells.
        place: the line of the user's code from which the failure came, such as ``"test_a.py:31"``, if it is known.
        parts: the parts of the test that failed, in order; of a skip, those that skipped. Empty if nobody knows any.
        ticket: which run of which test it is about; set by the rank.
        pid: the process that hands it in; set by the rank.
        began_s: when the body began; set by the rank.
        met_s: when the rank began and finished to make its first process group, 0 if it made none; set by the rank.
    """

    said: Said
    time_s: float
    reason: str = ""
    trace: str = ""
    transport: bool = False
    waits: tuple[Wait, ...] = ()
    place: str = ""
    parts: tuple[Part, ...] = ()
    ticket: Ticket = NO_TICKET
    pid: int = 0
    began_s: float = 0.0
    met_s: tuple[float, float] = (0.0, 0.0)
