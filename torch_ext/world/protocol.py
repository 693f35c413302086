"""The messages and orders between the processes of a world. Standard library only.

Note [Zygote protocol]
~~~~~~~~~~~~~~~~~~~~~~
A *client* holds a command channel to a zygote. To get processes, it sends :class:`Start` with the descriptor of a new
channel, the *group channel*, and the descriptors that the children inherit. The children of one request form a *child
group*. On the group channel the zygote answers :class:`Started`, and later one :class:`Ended` per child; the client may
send :class:`Signal`. Closing the group channel abandons the group: the zygote kills and reaps its children. Closing the
first command channel ends the zygote with all its children.

Every child, forked or executed, begins in :func:`~torch_ext.world.child.child_main`: it waits on its own socket for one
:class:`Order` and calls the order's target. A *spare* is a child that was forked ahead and waits for its order.

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
child -> supervisor :class:`Devices`, on request
rank -> parent half :class:`Phase`, :class:`Notice`, :class:`Receipt`, :class:`Collectives`, :class:`Progress`,
                    :class:`Farewell`
==================  =======================================================================================
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Makes a process write the stacks of its threads. Neither torch nor tests use real-time signals.
STACK_SIGNAL = signal.SIGRTMIN + 5


# In the environment of every child of a zygote: its pid. See Note [Leftovers].
OWNER_VARIABLE = "TORCH_EXT_OWNER"


# Between a zygote and its clients


@dataclass(frozen=True)
class Order:
    """One child's task: to call ``target`` (``"module:function"``) with ``payload`` and so many ``descriptors``."""

    target: str
    payload: Any
    descriptors: int


@dataclass(frozen=True)
class Start:
    """Ask for a child group. Descriptors: the group channel, then those of each order in turn."""

    orders: tuple[Order, ...]  # one per child
    environment: dict[str, str]  # of the children. The zygote compares it with its own at its start
    interpreter: bool = False  # give every child a fresh interpreter
    spares: int = 0  # number of children to fork ahead for the next request


@dataclass(frozen=True)
class AddClient:
    """Serve another command channel, the descriptor. Closing that one does not end the zygote."""


@dataclass(frozen=True)
class AskOthers:
    """Ask for the processes that may act besides the harness and ``ranks`` (pids); see Note [Who else may act].
    Descriptor: the channel for the answer, a tuple of descriptions.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Ask for a zygote like this one, as the only child of a group: its children cannot harm those of others.
    Descriptors: the group channel, and the first command channel of the copy.
    """


@dataclass(frozen=True)
class Started:
    """The children exist."""

    pids: tuple[int, ...]  # of each, by its own machine
    why_interpreter: str  # why they could not be forked; empty if they were, or on request of fresh interpreters
    hosts: tuple[str, ...] = ()  # of each, in words for users, where they run on several; see Note [Several hosts]


@dataclass(frozen=True)
class LeftBehind:
    """A process that child ``index`` started and left running. The zygote has ended it."""

    index: int
    pid: int
    command: str


@dataclass(frozen=True)
class Ended:
    """Child ``index`` was reaped, at ``time_s`` (``time.monotonic``). A negative exit code is a signal.

    ``left_behind`` is that of the whole group, with its last child: until then a peer may use a process of another.
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
    """For a fresh interpreter to load: the search path, modules, and the file or module that is ``__main__``."""

    path: tuple[str, ...]
    modules: tuple[str, ...]
    main_name: str = ""
    main_path: str = ""


@dataclass(frozen=True)
class RootOrder:
    """For the first zygote of a run to load. It removes the folder ``scratch`` at its end."""

    preparation: Preparation
    scratch: str = ""


@dataclass(frozen=True)
class ModuleOrder:
    """The test module that a module zygote loads: its name, the folder for ``sys.path``, its ``sys.argv``, and modules
    to import ``first``, also in fresh interpreters.
    """

    name: str
    import_root: str
    file: str
    environment: dict[str, str]
    argv: tuple[str, ...]
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """A process by its pid and its start in the kernel's ticks: pids are used again."""

    pid: int
    start: str


@dataclass(frozen=True)
class CopyOrder:
    """The copy of zygote ``original`` (a pid): a description for messages, the preparation of its fresh interpreters,
    and the processes that the original has adopted.
    """

    description: str
    preparation: Preparation
    original: int = 0
    others: tuple[Process, ...] = ()


@dataclass(frozen=True)
class HiddenFrames:
    """Frames of the harness that a report leaves out; :func:`~torch_ext.world.wording.hide` says which."""

    file: str
    functions: tuple[str, ...] = ()
    outwards: bool = False
    thread: bool = False


@dataclass(frozen=True)
class Devices:
    """The number of devices that the ranks of a machine share, and the environment variable that narrows them down; 0
    and empty if there is no limit.
    """

    number: int
    variable: str


@dataclass(frozen=True)
class Loaded:
    """The zygote is ready: the files of its modules below the project's folders, and what its layers have hidden."""

    imported: tuple[str, ...] = ()
    hidden_frames: tuple[HiddenFrames, ...] = ()


@dataclass(frozen=True)
class NotLoaded:
    """The module could not be imported; ``trace`` is the traceback. ``left`` says in words for users that the module
    skipped itself or ended the program; else it is empty.
    """

    trace: str
    left: str = ""


# Between a parent half and its ranks


@dataclass(frozen=True)
class Wait:
    """The wait of one thread."""

    words: str  # the operation and the line of the test, such as "barrier() in test_a (test_x.py:12)"
    peers: tuple[int, ...] = ()  # ranks that it names
    everyone: bool = False  # whether it needs all ranks, as the creation of a process group does
    transport: bool = False  # whether it is an operation of a process group, a store or RPC
    over: bool = False  # whether the body is over, and the harness waits for the other ranks


@dataclass(frozen=True)
class Inherited:
    """Placeholder of connection ``index`` in a task's arguments, which are pickled before the connection exists."""

    index: int


@dataclass(frozen=True)
class Ticket:
    """Names one run of one test by the test's id and the number of the run on the same ranks, from 0. A receipt must
    carry the ticket of the run that is being judged.
    """

    test: str = ""
    attempt: int = 0


NO_TICKET = Ticket()


@dataclass(frozen=True)
class RankOrder:
    """The order of a rank."""

    rank: int
    name: str
    ticket: Ticket  # of its first test
    task: bytes  # pickled (function, args, kwargs), unpickled in the rank once the rest is applied
    environment: dict[str, str]
    directory: str
    umask: int
    argv: tuple[str, ...]
    threads: int  # number of intra-op threads; 0 leaves torch's number alone
    has_page: bool = False  # whether it inherits a page of waits; see Note [The page of waits]
    address: str = ""  # of the world; empty without one. See Note [An address for each world]


class Ask(Enum):
    """A request of the parent half to a running rank."""

    RELEASE = "you may end"
    COLLECTIVES = "send your last collectives"
    PROGRESS = "tell what you wait for"
    STACKS = "write the stacks of your threads"


class Phase(Enum):
    """The progress of a rank, sent when it gets there."""

    RUNNING = "has loaded the modules of its task, and runs it"
    SETTLING = "the body is over; its threads and exit functions are finishing"


@dataclass(frozen=True)
class Farewell:
    """The last message of a rank that the harness's own code ends. A process that ends with code 0 and without it was
    ended by other code.
    """


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
    until_s: float  # end of the first time limit of a lock, by `time.monotonic`; infinite if there is none
    fingerprint: str  # differs from an earlier one if any thread has run meanwhile
    waits: tuple[Wait, ...] = ()  # of the threads with Python code
    record: str = ""  # changes whenever a collective begins or ends
    may_act: tuple[str, ...] = ()  # threads that can go on, in words
    among_ranks: bool = False  # it waits for peers in memory that ranks alone share, and no signal is handled
    raises_s: float = float("inf")  # as `until_s`, for an operation of torch's, which raises then


class Said(Enum):
    """The statement of a receipt."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Part:
    """A part of a test that failed, or of a skipped test one that skipped: the sub-test in words, such as ``(x=1)``
    (empty: the test itself and its cleanups), and whether it failed as a test that is expected to fail may.
    """

    sub_test: str
    expectable: bool


@dataclass(frozen=True)
class Receipt:
    """A rank's statement about its body. The rank itself sets ``ticket`` and what follows."""

    said: Said
    time_s: float  # when, by `time.monotonic`, which all processes of a machine share
    reason: str = ""  # of a skip, or the first line of a failure ("ValueError: no")
    trace: str = ""  # the traceback of a failure, without the harness's own frames
    transport: bool = False  # a process group, a store or RPC raised the failure, not the test's own code
    waits: tuple[Wait, ...] = ()  # the operation that failed, if known
    place: str = ""  # the user's line that failed, such as "test_a.py:31", if known
    parts: tuple[Part, ...] = ()  # those that failed, in order; of a skip, those that skipped. Empty if unknown
    ticket: Ticket = NO_TICKET
    pid: int = 0

    @property
    def is_expected(self) -> bool:
        """Whether the body failed, and only as a test that is expected to fail may."""
        return self.said is Said.FAILED and bool(self.parts) and all(part.expectable for part in self.parts)
