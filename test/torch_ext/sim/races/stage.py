"""Streams and tensors for the programs of the zoo, and the two places of the race in each."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from torch_ext.sim import races

SIM = torch.get_device_module("sim")

_MARK = re.compile(r"#.*\b(earlier|later): (\w+)( nowhere)?")


class Stage:
    """Streams and tensors of one program. Whatever is made here is ordered before everything that the program does."""

    def __init__(self) -> None:
        self.device = torch.device("sim", SIM.current_device())
        self.main = SIM.current_stream()
        self.side, self.other = SIM.Stream(), SIM.Stream()

    def tensor(self, *sizes: int, device: str = "") -> torch.Tensor:
        made = torch.ones(sizes or (256,), device=device or self.device)
        SIM.synchronize(made.device)
        return made

    def pinned(self, *sizes: int) -> torch.Tensor:
        return torch.ones(sizes or (256,)).pin_memory()

    @contextlib.contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        with SIM.stream(stream):
            yield

    def within(self, stream: torch.Stream, call: Callable[[], object]) -> None:
        with SIM.stream(stream):
            call()


def in_a_thread(call: Callable[[], object]) -> None:
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
    def name(self) -> str:
        return self.program.__name__


_PAIRS: list[Pair] = []


def pairs_of(*rooms: ModuleType) -> list[Pair]:
    """Return the programs of these modules."""
    names = {room.__name__ for room in rooms}
    return [each for each in _PAIRS if each.program.__module__ in names]


def run(pair: Pair, *, fixed: bool) -> list[dict[str, tuple[str, int | None]]]:
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
    file = inspect.getsourcefile(pair.program)
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


def pair(program: Program) -> Program:
    """Add a program to the zoo.

    Comments mark the two places that race: ``# earlier: add_`` and ``# later: mul``. One that a thread of
    autograd's engine makes has no line, or only lines of torch's hooks: ``# earlier: add nowhere``.
    """
    add(program)
    return program


def add(program: Program, name: str = "", **calls: tuple[str, Callable[..., object] | None]) -> None:
    """Add a program under ``name``. ``calls`` adds to its comments.

    It maps ``earlier`` and ``later`` to the operator and the lambda, of one line, that calls it; None: nowhere.
    """
    program.__name__ = name or program.__name__
    lines, first = inspect.getsourcelines(program)
    expected: dict[str, tuple[str, int | None]] = {}
    for offset, line in enumerate(lines):
        for which, operator, nowhere in _MARK.findall(line):
            expected[which] = (operator, None if nowhere else first + offset)
    for which, (operator, call) in calls.items():
        expected[which] = (operator, call and max(line for *_, line in call.__code__.co_lines() if line))
    if set(expected) != {"earlier", "later"}:
        raise ValueError(f"{program.__name__} marks {sorted(expected)}, expected earlier and later")
    _PAIRS.append(Pair(program, expected))
