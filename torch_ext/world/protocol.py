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
client -> zygote    :class:`Start`, :class:`Copy`, :class:`AddClient`; on a group channel :class:`Signal`
zygote -> client    on a group channel :class:`Started`, :class:`Ended`
client -> root      :class:`RootOrder` first, answered by :class:`Loaded` or :class:`NotLoaded`
zygote -> lent root :class:`LentOrder` as the payload of an :class:`Order`, answered likewise or by :class:`DoesNotFit`
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
    "Collectives",
    "Copy",
    "CopyOrder",
    "Dependencies",
    "Devices",
    "DoesNotFit",
    "Ended",
    "Farewell",
    "HiddenFrames",
    "Inherited",
    "LeftBehind",
    "LentOrder",
    "Loaded",
    "ModuleOrder",
    "NotLoaded",
    "Notice",
    "Order",
    "Phase",
    "Preparation",
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

# Makes a process write the stacks of its threads. Neither torch nor tests use real-time signals; macOS has none.
STACK_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGUSR2", 0)


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
        outlive: closing the group channel leaves the children be. They end by themselves when they are not needed.
        ahead: modules that the zygote imports before it forks; see Note [Imports at first use].
    """

    orders: tuple[Order, ...]
    environment: dict[str, str]
    interpreter: bool = False
    spares: int = 0
    outlive: bool = False
    ahead: tuple[str, ...] = ()


@dataclass(frozen=True)
class AddClient:
    """Serve another command channel, whose descriptor comes along. Closing that one does not end the zygote."""


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

    See ``preparation.py`` for what is done with it.
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
class LentOrder:
    """What a child becomes that is to be the first zygote of a run, as if the run had started it. Descriptors: its
    command channel, its stderr, and its working directory.

    Attributes:
        root: what it loads.
        environment: the run's.
        umask: likewise.
        limits: the soft and the hard limit of each resource, by the number that :mod:`resource` knows it by.
        cores: the cores that the run may use.
        ignored: the signals that the run ignores, as under nohup.
    """

    root: RootOrder
    environment: dict[str, str]
    umask: int
    limits: dict[int, tuple[int, int]]
    cores: tuple[int, ...]
    ignored: frozenset[int]


@dataclass(frozen=True)
class DoesNotFit:
    """The child cannot be what the run would have started; ``why`` is the end of a sentence about it, for users."""

    why: str


@dataclass(frozen=True)
class ModuleOrder:
    """Which test module a module zygote loads: its name, the folder to put on ``sys.path``, and its ``sys.argv``.

    With ``record`` it tells all that the names of the module's tests depend on, not just the files that are imported.
    The modules ``first`` are imported before it, in ranks that are fresh interpreters too.
    """

    name: str
    import_root: str
    file: str
    environment: dict[str, str]
    argv: tuple[str, ...]
    record: bool = False
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class CopyOrder:
    """What the copy of a zygote is to be.

    Attributes:
        description: what it is called in messages.
        preparation: what fresh interpreters load.
        gathered: its heap lies in huge pages already.
    """

    description: str
    preparation: Preparation
    gathered: bool


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
class Dependencies:
    """What the names of a module's tests depend on.

    Attributes:
        imported: files of all modules that the zygote holds from below the project's folders.
        paths: other files that were read, and folders that were listed, while it was imported.
        variables: environment variables that were asked for meanwhile.
        unsure: what else it did, of which nobody can tell later whether it would go as it went; empty if nothing.
    """

    imported: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    unsure: str = ""


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
        depends: what the names of the tests that it has loaded depend on.
        hidden_frames: what the layers that it has loaded leave out of reports.
    """

    depends: Dependencies = Dependencies()
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
        enders: the processes that alone can end it, if it is a wait for processes and not for ranks.
    """

    words: str
    peers: tuple[int, ...] = ()
    everyone: bool = False
    transport: bool = False
    over: bool = False
    enders: tuple[int, ...] = ()


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
    ABORTING = "is ending by SIGABRT"


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
    """What a rank waits for. See Note [Provable hangs].

    Attributes:
        blocked: whether no thread of the rank can go on by itself before ``until_s``.
        until_s: when the first time limit of what it waits for ends, by ``time.monotonic``; infinite if there is none.
        fingerprint: differs from an earlier one if any thread has run meanwhile.
        waits: what each thread with Python code waits for, in words.
        enders: processes that can end one of its waits; it is blocked only as long as all of these are.
        reachable: whether others than ranks may end one of its waits, by a key of a store or by a signal.
    """

    blocked: bool
    until_s: float
    fingerprint: str
    waits: tuple[Wait, ...] = ()
    enders: tuple[int, ...] = ()
    reachable: bool = False


class Said(Enum):
    """What a receipt says."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


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
    ticket: Ticket = NO_TICKET
    pid: int = 0
    began_s: float = 0.0
    met_s: tuple[float, float] = (0.0, 0.0)
