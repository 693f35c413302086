"""Runs tests with swapped code, in the warm zygotes of the runner: once to record what each test reaches, then with one
mutant at a time. Keeps both, so that an interrupted run goes on.

Note [Noticed]
~~~~~~~~~~~~~~
A mutant runs the tests that reach its line, one at a time, to the first failure; first the test with the best chance to
fail in a second, counted over the mutants so far. The limit of a test follows from its duration. A mutant is caught if
a test fails with it that passes :data:`SOUND` times without. Those runs happen at the test's first catch and are kept;
a test that fails one of them is flaky, and catches nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch_ext import cache
from torch_ext.mutate.sources import Mutant, Source
from torch_ext.mutate.swap import Code, Swap
from torch_ext.results import ClassEvent, Needs, SetupError, Status, TestName, TestResult
from torch_ext.runner.class_runner import ClassRunner
from torch_ext.runner.execute import RunExecutor
from torch_ext.runner.loop import Loop, Task
from torch_ext.runner.names import TestFile
from torch_ext.runner.options import RunOptions
from torch_ext.runner.places import Machine
from torch_ext.runner.reporters.text import describe_failure
from torch_ext.runner.schedule import Batch
from torch_ext.runner.zygotes import RunZygotes
from torch_ext.world import _os, wording
from torch_ext.world.protocol import Devices
from torch_ext.world.tree import RootZygote, ZygoteCopy

SOUND = 5  # passes without a mutant that a test needs before what it catches counts
_LIMIT_S, _TIMES = 10.0, 6.0  # a test with a mutant hangs after so many seconds and times its duration
_KEPT = 40_000  # characters of a failure, which names the innermost frame last
_S = TypeVar("_S")
_T = TypeVar("_T")


@dataclass
class Test:
    """A test, and what is known about it without a mutant."""

    __test__ = False

    name: TestName
    file: TestFile
    need: Needs
    digest: str  # of its name, its file and what that imports
    key: str  # of these and the mutated modules
    duration_s: float = 0.0
    status: str = ""  # of its recorded run; empty: there is none
    marks: frozenset[int] = frozenset()  # of the lines that it reaches
    passes: int = 0  # without a mutant
    caught: int = 0
    ran: int = 0

    @property
    def passed(self) -> bool:
        """Whether it always has."""
        return self.status == Status.PASSED.value


@dataclass(frozen=True)
class Outcome:
    """The result of one mutant."""

    id: str
    status: str  # caught, survived, unreached or equivalent
    test: str = ""  # that caught it
    text: str = ""  # the test's failure, or why the mutant is equivalent
    took_s: float = 0.0
    ran: int = 0  # number of tests that ran


def reaching(mutant: Mutant, tests: Iterable[Test]) -> list[Test]:
    """Return the tests that pass and reach the statement of ``mutant``."""
    return [test for test in tests if test.passed and mutant.mark in test.marks]


def digest(*parts: object) -> str:
    """Return a key of ``parts``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def open_kept(environment: Mapping[str, str] | None) -> sqlite3.Connection:
    """Open what is kept for ``environment``, JSON by key; it is in memory alone if the cache cannot be used."""
    place, path = cache.folder(), ":memory:"
    if place is not None and environment is not None and not cache.why_not_trusted(place):
        with contextlib.suppress(OSError):
            cache.make(place / "mutate")
            path = str(place / "mutate" / f"{digest(environment, SOUND, _LIMIT_S, _TIMES)}.sqlite")
    kept = sqlite3.connect(path, isolation_level=None, timeout=60.0)
    kept.execute("create table if not exists kept (key text primary key, line text)")
    return kept


class _Zygotes(RunZygotes):
    """Zygotes below a root that has found the functions of ``modules``."""

    modules: tuple[str, ...] = ()
    _prepared: RootZygote | None = None

    def _ready_root(self, file: TestFile) -> RootZygote:
        root = super()._ready_root(file)
        if root is not self._prepared:
            self._prepared = root
            for problem in root.call("torch_ext.mutate.swap:prepare", self.modules):
                wording.announce(problem)
        return root


class _Swapped:
    """Gives each class a copy of a zygote that has applied ``swap``."""

    def __init__(self, zygotes: RunZygotes, swap: Swap) -> None:
        self._zygotes, self._swap = zygotes, swap

    def copy_of(self, file: TestFile) -> Task[ZygoteCopy]:
        copy = yield from self._zygotes.copy_of(file)
        if problem := copy.call("torch_ext.mutate.swap:apply", self._swap):
            copy.close()
            raise SetupError(f"{file.name}: {problem}")
        return copy


class Runs(RunExecutor):
    """The runner, for tests with swapped code of ``sources``, ``jobs`` at a time. Results go to ``kept``."""

    def __init__(self, options: RunOptions, sources: Sequence[Source], jobs: int, kept: sqlite3.Connection) -> None:
        super().__init__(options)
        self._sources, self._jobs, self._kept = sources, jobs, kept
        self._zygotes = zygotes = _Zygotes(options, self.environment, self.scratch)
        zygotes.modules = tuple(source.name for source in sources)
        # Jobs limit how many tests run, and simulated devices are unlimited.
        self._machine = Machine(self.scratch, self.environment, Devices(0, ""))

    def _get(self, key: str) -> Any:
        found = self._kept.execute("select line from kept where key = ?", (key,)).fetchone()
        return json.loads(found[0]) if found else None

    def _add(self, key: str, line: Any) -> None:
        self._kept.execute("replace into kept values (?, ?)", (key, json.dumps(line)))

    def _keep(self, test: Test) -> None:
        self._add(test.key, [test.status, test.duration_s, test.passes, sorted(test.marks)])

    def _run_one(self, test: Test, swap: Swap) -> Task[TestResult]:
        """Task: run ``test`` in processes that have applied ``swap``."""
        limit_s = _LIMIT_S + _TIMES * test.duration_s if test.status else self._options.timeout_s
        events, options = list[ClassEvent](), replace(self._options, timeout_s=limit_s, failfast=True)
        with self._machine.place((), packed=True) as place:
            # With CI set, property tests draw the same examples in every run.
            more = {"CI": "true", **({"TORCH_EXT_TIMEOUT": str(limit_s)} if limit_s else {})}
            place = place._replace(environment={**place.environment, **more})
            batch = Batch(test.file, test.name.cls, (test.name,), test.need)
            zygotes: RunZygotes = _Swapped(self._zygotes, swap)  # type: ignore[assignment]  # all that is asked of it
            yield from ClassRunner(zygotes, place, batch, options, events.append).run()
        results = [event for event in events if isinstance(event, TestResult)]
        return next((each for each in results if each.status.counted is Status.FAILED), results[0])

    def _each(self, items: Iterable[_S], work: Callable[[_S], Task[_T]]) -> Iterator[_T]:
        """Run ``work`` on ``items``, as many at a time as there are jobs; yield the results."""
        waiting, loop, done = iter(items), Loop(), deque[_T]()

        def one(item: _S) -> Task[None]:
            done.append((yield from work(item)))

        with contextlib.closing(loop):
            while True:
                while len(loop) < self._jobs and (item := next(waiting, None)) is not None:
                    loop.add(one(item))
                while done:
                    yield done.popleft()
                if not loop:
                    return
                loop.turn()

    def record(self, tests: Sequence[Test]) -> Iterator[Test]:
        """Run each of ``tests`` once without a mutant, unless that is kept; note its duration, its status and the lines
        that it reaches, and yield it.
        """
        size = sum(source.lines + 1 for source in self._sources)
        codes = tuple(code for source in self._sources for code in source.probes())

        def one(test: Test) -> Task[Test]:
            if known := self._get(test.key):
                test.status, test.duration_s, test.passes, reached = known
                test.marks = frozenset(reached)
                return test
            marks = Path(self.scratch, f"marks-{id(test)}")
            marks.write_bytes(bytes(size))
            result = yield from self._run_one(test, Swap(codes, str(marks)))
            found = marks.read_bytes()
            marks.unlink()
            if failed := result.status.counted is Status.FAILED:  # the marks may disturb it, as they do a compiler
                result = yield from self._run_one(test, Swap(()))
            test.marks = frozenset(line for line in range(size) if failed or found[line])
            test.duration_s, test.status = result.duration_s, result.status.counted.value
            test.passes = int(test.passed)
            if result.status.counted is not Status.FAILED:  # it may be the machine's fault
                self._keep(test)
            return test

        return self._each(tests, one)

    def mutate(self, mutants: Mapping[tuple[Code, ...], Mutant], tests: Sequence[Test]) -> Iterator[Outcome]:
        """Run the tests that reach each mutant, given by its code; yield its outcome. See Note [Noticed]."""

        def key(mutant: Mutant) -> str:
            return digest(mutant.id, sorted(test.digest for test in reaching(mutant, tests)))

        def one(pair: tuple[tuple[Code, ...], Mutant]) -> Task[Outcome]:
            codes, mutant = pair
            if known := self._get(key(mutant)):
                outcome = Outcome(**known)
            else:
                outcome = yield from self._one_mutant(mutant.id, Swap(codes), reaching(mutant, tests))
                self._add(key(mutant), asdict(outcome))  # a test may have proved flaky
            for test in tests:
                test.caught += test.name.id == outcome.test
            return outcome

        return self._each(mutants.items(), one)

    def _one_mutant(self, mutant: str, swap: Swap, left: list[Test]) -> Task[Outcome]:
        outcome = Outcome(mutant, "survived" if left else "unreached")
        # So that new tests run alone on what has survived the others.
        kept = {test.name.id: self._get(digest(mutant, test.digest)) for test in left}

        def rank(one: Test) -> tuple[bool, float]:
            return kept[one.name.id] is not None, (one.caught + 1) / (one.ran + 8) / max(one.duration_s, 0.05)

        while left:
            test = max(left, key=rank)
            left.remove(test)
            if (line := kept[test.name.id]) is None:
                began_s = _os.monotonic()
                result = yield from self._run_one(test, swap)
                failed, took_s = result.status.counted is Status.FAILED, _os.monotonic() - began_s
                line = [failed, describe_failure(result)[:_KEPT] if failed else "", took_s]
                self._add(digest(mutant, test.digest), line)
            failed, text, took_s = line
            test.ran += 1
            outcome = replace(outcome, took_s=outcome.took_s + took_s, ran=outcome.ran + 1)
            if failed and (yield from self._is_sound(test)):
                return replace(outcome, status="caught", test=test.name.id, text=text)
        return outcome

    def _is_sound(self, test: Test) -> Task[bool]:
        while test.passed and test.passes < SOUND:
            result = yield from self._run_one(test, Swap(()))
            if result.status.counted is not Status.PASSED:
                test.status = Status.FLAKY.value
            test.passes += test.passed
            self._keep(test)
        return test.passed
