"""The messages and orders between the processes of a world. Standard library only.

Note [Zygote protocol]
~~~~~~~~~~~~~~~~~~~~~~
A *client* holds a command channel to a zygote. To start processes, the client sends :class:`Start` with the descriptor
of a new channel, the *group channel*, and the descriptors that the children inherit. The children of one request form a
*child group*. On the group channel the zygote answers :class:`Started`, and later one :class:`Ended` per child; the
client may send :class:`Signal`. Closing the group channel abandons the group: the zygote kills and reaps its children.
Closing the first command channel ends the zygote with all its children.

Every child, forked or executed, begins in :func:`~torch_ext.world.child.child_main`, which waits on its own socket for
one :class:`Order` and calls the order's target. A *spare* is a child that was forked ahead and waits for its order.

==================  =======================================================================================
from -> to          messages
==================  =======================================================================================
client -> zygote    :class:`Start`, :class:`Copy`, :class:`Call`, :class:`AddClient`, :class:`QueryProcesses`;
                    on a group channel :class:`Signal`
zygote -> client    on a group channel :class:`Started`, :class:`Ended`
client -> root      :class:`WarmOrder` as the payload of an :class:`Order`, if it is no fresh interpreter; then
                    :class:`RootOrder`, answered by :class:`Loaded` or :class:`NotLoaded`
root -> module      :class:`ModuleOrder` as the payload of an :class:`Order`, answered likewise
zygote -> copy      :class:`CopyOrder` as the payload of an :class:`Order`, answered by :class:`Loaded`
zygote -> child     :class:`Preparation` if it is a fresh interpreter, then one :class:`Order`
parent half -> rank :class:`RankOrder` as the payload of an :class:`Order`; later :class:`RankRequest`,
                    :class:`Variables`
child -> supervisor :class:`Devices`, on request
rank -> parent half :class:`Phase`, :class:`Notice`, :class:`Receipt`, :class:`Collectives`, :class:`Progress`
==================  =======================================================================================
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Makes a process write the stacks of its threads. Neither torch nor tests use real-time signals.
STACK_SIGNAL = signal.SIGRTMIN + 5


# Holds the pid of a rank or class process, for the processes that it starts. See Note [Leftovers].
OWNER_VARIABLE = "TORCH_EXT_OWNER"


# Between a zygote and its clients


@dataclass(frozen=True)
class Order:
    """One child's task: call ``target`` (``"module:function"``) with ``payload`` and this number of descriptors."""

    target: str
    payload: Any
    descriptors: int


@dataclass(frozen=True)
class Start:
    """Ask for a child group. Descriptors: the group channel, then those of each order in turn."""

    orders: tuple[Order, ...]  # one per child
    environment: dict[str, str]  # of the children; the zygote compares it with the one that the zygote started with
    interpreter: bool = False  # give every child a fresh interpreter
    spares: int = 0  # number of children to fork ahead for the next request


@dataclass(frozen=True)
class AddClient:
    """Serve another command channel, given as the descriptor. Closing it does not end the zygote."""


@dataclass(frozen=True)
class QueryProcesses:
    """Ask for the processes that may act besides the harness and ``ranks`` (pids); see Note [Who else may act].
    Descriptor: the channel for the answer, a tuple of descriptions.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Ask for a copy of this zygote, as the only child of a group, to isolate its children from those of other copies.
    Descriptors: the group channel, the copy's first command channel, and a pipe for stacks, which it leaves unused.
    """


@dataclass(frozen=True)
class Call:
    """Call ``target(payload)`` in the zygote itself, which then forks children that have its effects. Descriptor: the
    channel for the answer, the value that it returns.
    """

    target: str
    payload: Any


@dataclass(frozen=True)
class Started:
    """The children exist."""

    pids: tuple[int, ...]  # one per child, each on the child's machine
    why_interpreter: str  # why the zygote could not fork; empty if it could, or if fresh interpreters were requested
    hosts: tuple[str, ...] = ()  # one per child, in words, if there are several; see Note [Several hosts]


@dataclass(frozen=True)
class LeftBehind:
    """A process that child ``index`` started and left running, and that the zygote has killed."""

    index: int
    command: str


@dataclass(frozen=True)
class Ended:
    """Child ``index`` was reaped at ``time_s`` (``time.monotonic``). A negative exit code is a signal."""

    index: int
    exit_code: int
    time_s: float
    left_behind: tuple[LeftBehind, ...] = ()  # by the whole group, with its last child: peers may use each other's


@dataclass(frozen=True)
class Signal:
    """Send signal ``number`` to child ``index`` of the group. Ignored if the child has ended."""

    index: int
    number: int


# Preparing a zygote


@dataclass(frozen=True)
class Preparation:
    """The search path and modules that a fresh interpreter loads, and the file or module that is ``__main__``."""

    path: tuple[str, ...]
    modules: tuple[str, ...]
    main_name: str = ""
    main_path: str = ""


@dataclass(frozen=True)
class RootOrder:
    """The preparation of a run's first zygote, which removes the folder ``scratch`` when it ends."""

    preparation: Preparation
    scratch: str = ""


@dataclass(frozen=True)
class WarmOrder:
    """Become a run's first zygote, as a child of a zygote that another process keeps warm, with all that a process of
    the run would inherit.
    """

    environment: dict[str, str]
    directory: str
    umask: int


@dataclass(frozen=True)
class ModuleOrder:
    """The test module that a module zygote loads."""

    name: str
    import_root: str  # for `sys.path`
    environment: dict[str, str]
    argv: tuple[str, ...]
    first: tuple[str, ...] = ()  # modules to import before it, also in fresh interpreters


@dataclass(frozen=True)
class Process:
    """A process, identified by its pid and its start time in the kernel's ticks, since the kernel reuses pids."""

    pid: int
    start: str


@dataclass(frozen=True)
class CopyOrder:
    """The order of a zygote's copy. The fields are those of :class:`~torch_ext.world.zygote.Zygote`."""

    description: str
    preparation: Preparation
    original: int
    others: tuple[Process, ...]


@dataclass(frozen=True)
class Devices:
    """The devices that the ranks of a machine share; 0 and empty if there is no limit."""

    number: int
    variable: str  # the environment variable that restricts the visible ones


@dataclass(frozen=True)
class Loaded:
    """The zygote is ready. Holds the files of its modules below the project's folders."""

    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotLoaded:
    """The module could not be imported."""

    trace: str  # the traceback
    left: str = ""  # a message for users, if the module skipped itself or ended the program


# Between a parent half and its ranks


@dataclass(frozen=True)
class Wait:
    """The wait of one thread."""

    description: str  # the operation and the line of the test, such as "barrier() in test_a (test_x.py:12)"
    peers: tuple[int, ...] = ()  # ranks that the call names
    everyone: bool = False  # needs all ranks, as the creation of a process group does
    transport: bool = False  # an operation of a process group, a store or RPC
    over: bool = False  # the body is over, and the harness waits for the other ranks


@dataclass(frozen=True)
class Ticket:
    """Identifies one run of one test by the test's id and the number of the run on the same ranks, from 0. A receipt
    counts only with the ticket of the current run.
    """

    test: str = ""
    attempt: int = 0


NO_TICKET = Ticket()


@dataclass(frozen=True)
class RankOrder:
    """The order of a rank."""

    rank: int
    name: str
    ticket: Ticket  # of the first test
    task: bytes  # pickled (function, args, kwargs); the rank unpickles it after applying the other fields
    environment: dict[str, str]
    directory: str
    umask: int
    argv: tuple[str, ...]
    threads: int  # number of intra-op threads; 0 leaves torch's number alone
    has_page: bool = False  # the rank inherits a page of waits; see Note [The page of waits]
    address: str = ""  # the world's, if any; see Note [An address for each world]


class RankRequest(Enum):
    """A request of the parent half to a running rank."""

    RELEASE = "you may end"
    COLLECTIVES = "send your last collectives"
    PROGRESS = "report your waits"
    STACKS = "write the stacks of your threads"


@dataclass(frozen=True)
class Variables:
    """Variables for the environment of a running rank, whose peers have changed."""

    values: dict[str, str]


class Phase(Enum):
    """A stage of a rank, sent when the rank reaches it."""

    RUNNING = "has loaded the modules of its task, and runs it"
    PROMPTING = "the user's debugger waits for a command"
    SETTLING = "the body is over; its threads and exit functions are finishing"
    EXITING = "the harness ends the process; if it ends with code 0 and did not say this, other code has ended it"


@dataclass(frozen=True)
class Notice:
    """A message for the user, whether the test passes or fails."""

    text: str


@dataclass(frozen=True)
class Collectives:
    """A rank's last collectives from torch's flight recorder, in JSON; empty if there are none."""

    json: str


@dataclass(frozen=True)
class Progress:
    """Whether a rank can go on, and its waits. See Note [Provable hangs]."""

    blocked: bool  # no thread of the rank can go on by itself before `until_s` and `raises_s`
    until_s: float  # earliest time limit of a lock, by `time.monotonic`; infinite if there is none
    fingerprint: str  # changes if any thread runs
    waits: tuple[Wait, ...] = ()  # of the threads with Python code
    record: str = ""  # changes whenever a collective begins or ends
    may_act: tuple[str, ...] = ()  # threads that can go on, in words
    among_ranks: bool = False  # waits for peers in memory that only ranks share, and handles no signal
    raises_s: float = float("inf")  # earliest time limit of torch's operations, which raise then


class RankStatus(Enum):
    """The statement of a receipt."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Part:
    """A part of a test that failed or, in a skipped test, skipped."""

    sub_test: str  # in words, such as `(x=1)`; empty: the test itself and its cleanups
    expectable: bool  # an expected failure may fail like this


@dataclass(frozen=True)
class Receipt:
    """A rank's statement about its body. :class:`~torch_ext.world.rank.Rank` sets ``ticket`` and ``pid``."""

    status: RankStatus
    time_s: float  # of the statement, by `time.monotonic`, which all processes of a machine share
    reason: str = ""  # of a skip, or the first line of a failure ("ValueError: no")
    trace: str = ""  # the traceback of a failure, without the harness's own frames
    transport: bool = False  # a process group, a store or RPC raised the failure, not the test's own code
    waits: tuple[Wait, ...] = ()  # the operation that failed, if known
    place: str = ""  # the user's line that failed, such as "test_a.py:31", if known
    parts: tuple[Part, ...] = ()  # the parts that failed or, for a skip, skipped, in order; empty if unknown
    ticket: Ticket = NO_TICKET
    pid: int = 0
    facts: Any = None  # what the rank of a program reports besides

    @property
    def is_expected(self) -> bool:
        """Whether the body failed, and an expected failure may fail like this."""
        return self.status is RankStatus.FAILED and bool(self.parts) and all(part.expectable for part in self.parts)
