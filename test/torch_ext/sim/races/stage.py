"""Streams and tensors for the programs of the zoo, and the two places of the race in each."""

import functools
import inspect
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_ext.sim import races
from torch_ext.sim._name import NAME

SIM = torch.get_device_module(NAME)

_MARK = re.compile(r"#.*\b(earlier|later): (\w+)( nowhere)?")


class Stage:
    """Streams and tensors of one program. Everything created here is ordered before all steps of the program."""

    def __init__(self):
        self.device = torch.device(NAME, SIM.current_device())
        self.main = SIM.current_stream()
        self.side, self.other = SIM.Stream(), SIM.Stream()

    def tensor(self, *sizes, device=""):
        made = torch.ones(sizes or (256,), device=device or self.device)
        SIM.synchronize(made.device)
        return made

    def pinned(self, *sizes):
        return torch.ones(sizes or (256,)).pin_memory()

    on = staticmethod(SIM.stream)

    def join(self, fixed):
        """Let the main stream wait for the side stream, in the twin."""
        if fixed:
            self.main.wait_stream(self.side)

    def within(self, stream, call):
        with SIM.stream(stream):
            call()


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


Program = Callable[[Stage, bool], None]


@dataclass(frozen=True)
class Pair:
    """A program with a race and its twin without one, which the argument ``fixed`` chooses.

    Attributes:
        expected: for ``earlier`` and ``later``, the operator and the line, as comments of the program mark them.
    """

    program: Program
    expected: dict[str, tuple[str, int | None]]

    @property
    def name(self):
        return self.program.__name__


_PAIRS = []


def pairs_of(*rooms):
    """Return the programs of these modules."""
    names = {room.__name__ for room in rooms}
    return [each for each in _PAIRS if each.program.__module__ in names]


def run(pair, *, fixed):
    """Run a program, and return for each race that is reported the two operators and lines, as ``expected`` has them.

    Raises:
        AssertionError: a race is reported at a place that is not the program's.
    """
    stage = Stage()
    races.start()
    try:
        pair.program(stage, fixed)
    finally:
        found = races.stop()
    file = inspect.getsourcefile(inspect.unwrap(pair.program))
    places = []
    for race in found:
        sides = {"earlier": race.earlier, "later": race.later}
        users = {which: side.place for which, side in sides.items() if side.place and not side.place.is_library}
        assert all(place.file == file for place in users.values()), races.render(found)
        places.append(
            {
                which: (side.operator.removeprefix("aten::"), users[which].line if which in users else None)
                for which, side in sides.items()
            }
        )
    return places


def rows(table, *accesses):
    """Make a decorator that adds a program for each row of ``table``: the decorated one, given the row's values too.

    ``accesses`` names which of ``earlier`` and ``later`` the first values of a row are, in place of a comment: the
    operator, and the one-line lambda that calls it. With None instead of a lambda, the access has no line.
    """

    def make(form):
        for name, row in table.items():
            values = row if isinstance(row, tuple) else (row,)
            calls = dict(zip(accesses, values, strict=False))
            given = [*(call for _, call in calls.values() if call), *values[len(calls) :]]
            program = functools.wraps(form)(functools.partial(_called, form, given))
            program.__name__ = name
            pair(program, **calls)
        return form

    return make


def _called(form, given, on, fixed):
    form(on, fixed, *given)


def pair(program, **calls):
    """Add a program to the zoo.

    Comments mark the two places that race: ``# earlier: add_`` and ``# later: mul``. An access made by a thread of
    autograd's engine has no line, or only lines of torch's hooks: ``# earlier: add nowhere``. ``calls`` replace
    comments: see :func:`rows`.
    """
    lines, first = inspect.getsourcelines(program)
    expected = {}
    for offset, line in enumerate(lines):
        for which, operator, nowhere in _MARK.findall(line):
            expected[which] = (operator, None if nowhere else first + offset)
    for which, (operator, call) in calls.items():
        expected[which] = (operator, call and max(line for *_, line in call.__code__.co_lines() if line))
    if set(expected) != {"earlier", "later"}:
        raise ValueError(f"{program.__name__} marks {sorted(expected)}, expected earlier and later")
    _PAIRS.append(Pair(program, expected))
    return program
