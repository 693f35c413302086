"""Draws programs in which one rank is at fault: the oracle for the first line of a report.

A program makes a few collectives on every rank. At a drawn place, a drawn rank misbehaves. The generator put the fault
there, so it knows the rank and the lines that a report may name.
"""

import re
from dataclasses import dataclass

from test.torch_ext.world.programs import first_line, ranks_in_first_line

_COLLECTIVES = {
    "all_reduce": "dist.all_reduce(x{})",
    "broadcast": "dist.broadcast(x, 0{})",
    "all_gather": "dist.all_gather([torch.empty_like(x) for _ in range(size)], x{})",
    "reduce": "dist.reduce(x, 0{})",
    "barrier": "dist.barrier({})",
}
# In these, peers wait for a missing rank in other ways.
_ONLY_GLOO = {
    "monitored_barrier": "dist.monitored_barrier(timeout=timedelta(seconds=9))",
    "scatter": "dist.scatter(x, [x.clone() for _ in range(size)] if self.rank == 0 else None, 0)",
    "new_group": "dist.new_group(list(range(size)))",
}
_KILLS = [f"os.kill(os.getpid(), signal.SIG{name})" for name in ("KILL", "SEGV", "ABRT", "TERM")]
# The guilty rank's act instead of going on. Acts that end in "inside" happen while it waits in a collective.
_ACTS = {
    "raise": ["raise ValueError('drawn')", "self.assertEqual(1, 2)", "helper()"],
    "kill": _KILLS,
    "kill inside": _KILLS[:3],
    "exit": ["sys.exit(3)", "os._exit(3)", "os._exit(0)"],
    "exit thread": ["sys.exit(3)"],
    "exit inside": ["os._exit(3)"],
    "destroy and leave": ["dist.destroy_process_group()"],
    "destroy": ["dist.destroy_process_group()"],
    "sleep": ["time.sleep(1000)", "forever()"],
    "lock": ["lock.acquire()"],
}
# The guilty rank's replacement for one of its collectives.
_SWAPS = ("skip", "other collective", "other shape", "other dtype", "other root", "other group")
_EVERYWHERE = ("raise", "sleep", "lock", "skip", "other collective", "other group")
_PROCESSES = (*_EVERYWHERE, "exit", "kill", "kill inside", "exit inside", "destroy and leave", "destroy")
# gloo compares no calls: it ends a rank that receives more than it expects, and accepts other bytes as they are.
FAULTS = {
    "gloo": _PROCESSES,
    "sim": (*_PROCESSES, "other shape", "other dtype", "other root"),
    "threads": (*_EVERYWHERE, "exit thread", "other root"),
}


# A line that a report may name as the place of the fault ends so.
_MARK = "  # at fault"


@dataclass(frozen=True)
class Program:
    """One test: its name, the act of its guilty rank, and its source."""

    name: str
    kind: str
    fault: str
    size: int
    guilty: int
    text: str

    @property
    def symmetric(self):
        """Whether two ranks differ, either of which may be wrong."""
        return self.size == 2 and self.fault in _SWAPS


def draw(chance, kind, number):
    size, fault = chance.choice([2, 3, 3, 4]), chance.choice(FAULTS[kind])
    guilty, name = chance.randrange(size), f"test_drawn_{number}"
    known = [call for call in _COLLECTIVES if kind != "threads" or call not in ("reduce", "barrier")]
    if fault in _ACTS and kind != "threads":
        known += _ONLY_GLOO if kind == "gloo" else ["new_group"]
    calls = [chance.choice(known) for _ in range(chance.choice([2, 3, 4]))]
    at = chance.randrange(len(calls) + (fault in _ACTS and "inside" not in fault and "destroy" not in fault))
    body = [
        f"size, guilty, lock, x = {size}, self.rank == {guilty}, threading.Lock(), begin(self, {kind!r})",
        *(["other = dist.new_group(list(range(size)))"] if fault == "other group" else []),
    ]
    for place, call in enumerate(calls):
        if place == at and fault in _SWAPS:
            body += _swap(chance, fault, call, known)
            continue
        body += _act(chance, fault) if place == at else []
        is_inside = place == at and (fault.endswith("inside") or fault == "destroy")
        body.append(_call(call) + _MARK * (is_inside or (place >= at and fault == "skip")))
        if kind == "sim" and chance.random() < 0.5:
            body.append("x.sum().item()" + _MARK * (place > at and fault in _SWAPS))
    if at == len(calls):
        body += _act(chance, fault)
    if fault in _SWAPS:
        # The host runs ahead of the device, so without a further collective a rank that left one out would already end.
        body.append(f"x.sum().item(){_MARK}")
    head = [f"class Test{number}({'Threads' if kind == 'threads' else 'Ranks'}):", f"    world_size = {size}"]
    lines = [*head, f"    def {name}(self):", *(f"        {line}" for line in body)]
    return Program(name, kind, fault, size, guilty, "\n".join(lines) + "\n\n\n")


def _call(call, extra=""):
    return (_COLLECTIVES | _ONLY_GLOO)[call].format(extra).replace("(, ", "(")


def _act(chance, fault):
    act = chance.choice(_ACTS[fault])
    if fault.endswith("inside"):
        function, _, arguments = act.partition("(")
        timer = f"threading.Timer(0.7, {function}, ({arguments.removesuffix(')')},)).start()"
        return ["if not guilty:", "    time.sleep(1.5)", "else:", f"    {timer}{_MARK}"]
    lock = ["    lock.acquire()"] if fault == "lock" else []
    leave = ["    return"] if fault == "destroy and leave" else []
    return ["if guilty:", *lock, f"    {act}{_MARK}", *leave]


def _swap(chance, fault, call, known):
    """Return the replacement for one of the guilty rank's collectives."""
    other = chance.choice([each for each in known if each != call])
    if fault in ("other shape", "other dtype") and call in ("barrier", "all_gather"):
        call = "all_reduce"
    if fault == "other root":
        call = chance.choice([each for each in ("broadcast", "reduce") if each in known])
    others = ["if not guilty:", f"    {_call(call)}{_MARK}"]
    if fault == "skip":
        return others
    own = [_call(other)]
    if fault in ("other shape", "other dtype"):
        value = "torch.ones(7, device=x.device)" if fault == "other shape" else "x.double()"
        own = [f"y = {value}", _call(call).replace("x", "y", 1)]
    elif fault == "other root":
        own = [_call(call).replace("0", "1")]
    elif fault == "other group":
        own = [_call(call, ", group=other")]
    return [*others, "else:", *(f"    {line}" for line in own[:-1]), f"    {own[-1]}{_MARK}"]


_BEGIN = f'''

def helper():
    raise KeyError("drawn in a helper"){_MARK}


def forever():
    while True:
        time.sleep(1){_MARK}


def begin(test, kind):
    """Join the group of the test; return the tensor that its collectives are about."""
    if kind == "gloo":
        test.join_group()
    if kind == "sim":
        torch.sim.set_device(test.rank)
        store = dist.FileStore(test.file_name, test.world_size)
        dist.init_process_group(store=store, rank=test.rank, world_size=test.world_size)
    return torch.ones(4, device=f"sim:{{test.rank}}" if kind == "sim" else "cpu")


'''


def source_of(chance, kind, number):
    """Return the text of a file of ``number`` programs of one kind, below the common header; and these programs."""
    programs = [draw(chance, kind, each) for each in range(number)]
    return _BEGIN + "".join(program.text for program in programs), programs


def judge_report(program, report, source):
    """Return what is wrong with the first line of a report; empty if it names the guilty rank and its line.

    ``source``: the lines of the program's file.
    """
    line = first_line(report)
    named = ranks_in_first_line(report)
    if program.guilty not in named or (len(named) > 1 and not program.symmetric):
        return f"it names {sorted(named)}"
    first = re.search(r"^  rank (\d+) .*<- (?:first|too early)$", report, re.MULTILINE)
    if first is None or int(first[1]) not in named:
        return "another rank is marked as the first"
    lines = [source[int(number) - 1] for number in re.findall(r"test_suite\.py:(\d+)", line)]
    wanted = [each for each in (_BEGIN + program.text).splitlines() if each.endswith(_MARK)]
    return "" if set(lines) & set(wanted) else f"it names {lines}, and not one of {wanted}"
