"""Draws programs in which one rank is at fault: the oracle for the first line of a report.

A program makes a few collectives on every rank. At a drawn place, a drawn rank misbehaves. The generator put the fault
there, so it knows the rank and the lines that a report may name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from test.torch_ext.world.programs import first_line, ranks_in_first_line
from test.torch_ext.world.suites import PREAMBLE

__all__ = ["FAULTS", "Program", "draw", "judge_report", "source_of"]

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
FAULTS: dict[str, tuple[str, ...]] = {
    "gloo": _PROCESSES,
    "sim": (*_PROCESSES, "other shape", "other dtype", "other root"),
    "threads": (*_EVERYWHERE, "exit thread", "other root"),
}


@dataclass(frozen=True)
class Program:
    """One test.

    Attributes:
        name: of its class and of its method.
        fault: the act of its guilty rank.
        text: its source.
        lines: those of its file that a report may name as the place of the fault.
    """

    name: str
    kind: str
    fault: str
    size: int
    guilty: int
    text: str
    lines: frozenset[int]

    @property
    def symmetric(self) -> bool:
        """Whether two ranks differ, either of which may be wrong."""
        return self.size == 2 and self.fault in _SWAPS


class _Writer:
    def __init__(self, first: int) -> None:
        self.lines: list[str] = []
        self._first = first

    def add(self, text: str, depth: int = 2) -> int:
        self.lines.append("    " * depth + text)
        return self._first + len(self.lines) - 1


def draw(chance: random.Random, kind: str, number: int, first: int) -> Program:  # noqa: C901
    """Return a program whose first line is line ``first`` of its file."""
    size, fault = chance.choice([2, 3, 3, 4]), chance.choice(FAULTS[kind])
    guilty, name = chance.randrange(size), f"drawn_{number}"
    known = [call for call in _COLLECTIVES if kind != "threads" or call not in ("reduce", "barrier")]
    if fault in _ACTS and kind != "threads":
        known += _ONLY_GLOO if kind == "gloo" else ["new_group"]
    calls = [chance.choice(known) for _ in range(chance.choice([2, 3, 4]))]
    at = chance.randrange(len(calls) + (fault in _ACTS and "inside" not in fault and "destroy" not in fault))
    out, lines = _Writer(first), set[int]()
    out.add(f"class Test{number}({'Threads' if kind == 'threads' else 'Ranks'}):", 0)
    out.add(f"world_size = {size}", 1)
    out.add(f"def test_{name}(self):", 1)
    out.add(f"size, guilty, lock, x = {size}, self.rank == {guilty}, threading.Lock(), begin(self, {kind!r})")
    if fault == "other group":
        out.add("other = dist.new_group(list(range(size)))")
    for place, call in enumerate(calls):
        if place == at:
            if fault in _SWAPS:
                lines |= _swap(out, chance, fault, call, known)
                continue
            lines |= _act(out, chance, fault)
        line = _call(out, call)
        if place == at and (fault.endswith("inside") or fault == "destroy"):
            lines.add(line)
        if place >= at and fault == "skip":
            lines.add(line)
        if kind == "sim" and chance.random() < 0.5:
            line = out.add("x.sum().item()")
            if place > at and fault in _SWAPS:
                lines.add(line)
    if at == len(calls):
        lines |= _act(out, chance, fault)
    if fault in _SWAPS:
        # The host runs ahead of the device, so without a further collective a rank that left one out would already end.
        lines.add(out.add("x.sum().item()"))
    return Program(f"test_{name}", kind, fault, size, guilty, "\n".join(out.lines) + "\n\n\n", frozenset(lines))


def _call(out: _Writer, call: str, extra: str = "", depth: int = 2) -> int:
    text = (_COLLECTIVES | _ONLY_GLOO)[call].format(extra)
    return out.add(text.replace("(, ", "("), depth)


def _act(out: _Writer, chance: random.Random, fault: str) -> set[int]:
    act = chance.choice(_ACTS[fault])
    if fault.endswith("inside"):
        out.add("if not guilty:")
        out.add("time.sleep(1.5)", 3)
        out.add("else:")
        function, _, arguments = act.partition("(")
        return {out.add(f"threading.Timer(0.7, {function}, ({arguments.removesuffix(')')},)).start()", 3)}
    out.add("if guilty:")
    if fault == "lock":
        out.add("lock.acquire()", 3)
    line = out.add(act, 3)
    if fault == "destroy and leave":
        out.add("return", 3)
    return {line, *_INSIDE.get(act, ())}


def _swap(out: _Writer, chance: random.Random, fault: str, call: str, known: Sequence[str]) -> set[int]:
    """Write the replacement for one of the guilty rank's collectives."""
    other = chance.choice([each for each in known if each != call])
    if fault in ("other shape", "other dtype") and call in ("barrier", "all_gather"):
        call = "all_reduce"
    if fault == "other root":
        call = chance.choice([each for each in ("broadcast", "reduce") if each in known])
    out.add("if not guilty:")
    lines = {_call(out, call, depth=3)}
    if fault == "skip":
        return lines
    out.add("else:")
    if fault in ("other shape", "other dtype"):
        value = "torch.ones(7, device=x.device)" if fault == "other shape" else "x.double()"
        out.add(f"y = {value}", 3)
        return lines | {out.add(_COLLECTIVES[call].format("").replace("x", "y", 1), 3)}
    if fault == "other root":
        return lines | {out.add(_COLLECTIVES[call].format("").replace("0", "1"), 3)}
    if fault == "other group":
        return lines | {_call(out, call, ", group=other", 3)}
    return lines | {_call(out, other, depth=3)}


_BEGIN = '''

def helper():
    raise KeyError("drawn in a helper")


def begin(test, kind):
    """Join the group of the test; return the tensor that its collectives are about."""
    if kind == "gloo":
        test.join_group()
    if kind == "sim":
        torch.sim.set_device(test.rank)
        store = dist.FileStore(test.file_name, test.world_size)
        dist.init_process_group(store=store, rank=test.rank, world_size=test.world_size)
    return torch.ones(4, device=f"sim:{test.rank}" if kind == "sim" else "cpu")


'''
# The lines at which functions called by a guilty rank fail or wait.
_INSIDE = {
    call: [(PREAMBLE + _BEGIN).partition(statement)[0].count("\n") + 1]
    for call, statement in (("helper()", "    raise KeyError"), ("forever()", "        time.sleep(1)\n"))
}


def source_of(chance: random.Random, kind: str, number: int) -> tuple[str, list[Program]]:
    """Return the text of a file of ``number`` programs of one kind, below the common header; and these programs."""
    programs, text = [], _BEGIN
    for each in range(number):
        programs.append(draw(chance, kind, each, (PREAMBLE + text).count("\n") + 1))
        text += programs[-1].text
    return text, programs


def judge_report(program: Program, report: str) -> str:
    """Return what is wrong with the first line of a report; empty if it names the guilty rank and its line."""
    line = first_line(report)
    named = ranks_in_first_line(report)
    if program.guilty not in named or (len(named) > 1 and not program.symmetric):
        return f"it names {sorted(named)}"
    first = re.search(r"^  rank (\d+) .*<- first$", report, re.MULTILINE)
    if first is None or int(first[1]) not in named:
        return "another rank is marked as the first"
    lines = {int(number) for number in re.findall(r"test_suite\.py:(\d+)", line)}
    return "" if lines & program.lines else f"it names lines {sorted(lines)}, and not one of {sorted(program.lines)}"
