"""Runs tests with swapped code, in the warm zygotes of the runner: once to record what each test reaches, then with one
mutant at a time. Keeps both, so that an interrupted run goes on.

Note [Noticed]
~~~~~~~~~~~~~~
A mutant runs the tests that reach its line, one at a time, to the first failure. The test with the best chance to fail
in a second comes first, counted over the mutants so far. A test that hangs ends at a limit that follows from its
duration; hangs that the runner can prove end at once.

A mutant is caught if a test fails with it that passes :data:`SOUND` times without. Those runs happen at the test's
first catch and are kept; a test that fails one of them is flaky, and catches nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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

# Passes without a mutant that a test needs before what it catches counts.
SOUND = 5
# Seconds, and times its own duration, after which a test with a mutant hangs.
_LIMIT_S, _TIMES = 10.0, 6.0
# Characters of a failure that are kept.
_KEPT = 4000
_TICK_S = 0.5
_T = TypeVar("_T")


@dataclass
class Test:
    """A test, and what is known about it without a mutant."""

    __test__ = False

    name: TestName
    file: TestFile
    need: Needs
    digest: str  # of its file and of what that imports
    duration_s: float = 0.0
    status: str = ""  # of its recorded run; empty: there is none
    lines: dict[str, frozenset[int]] = field(default_factory=dict)  # that it reaches, by module
    passes: int = 0  # without a mutant
    caught: int = 0
    ran: int = 0

    @property
    def passed(self) -> bool:
        """Whether it has passed each time."""
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
    return [test for test in tests if test.passed and mutant.line in test.lines.get(mutant.module, ())]


def digest(*parts: object) -> str:
    """Return a key of ``parts``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Kept:
    """What is kept for ``sources`` under ``environment``, as JSON Lines; nothing if the cache cannot be used.

    What a test reaches is kept for its content and that of ``sources``; an outcome for its mutant, whose id holds the
    content of its function, and for the content of the tests that reach it.
    """

    def __init__(self, sources: Sequence[Source], environment: Mapping[str, str] | None, *, fresh: bool) -> None:
        place, self._folder = cache.folder(), Path()
        self._is_used = place is not None and environment is not None and not cache.why_not_trusted(place)
        versions = digest(environment, SOUND, _LIMIT_S, _TIMES)
        self._tests = f"tests-{versions}-{digest([source.bytes for source in sources])}.jsonl"
        self._outcomes = f"outcomes-{versions}.jsonl"
        if place is not None and self._is_used:
            self._folder = place / "mutate"
            for each in self._folder.glob(f"*{versions}*") if fresh else ():
                each.unlink()

    def _lines(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        path = self._folder / name
        for line in path.read_text(encoding="utf-8").splitlines() if self._is_used and path.exists() else ():
            try:
                key, found = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            yield key, found

    def _add(self, name: str, key: str, line: Mapping[str, Any]) -> None:
        if self._is_used:
            cache.make(self._folder)
            with open(self._folder / name, "a", encoding="utf-8") as stream:
                stream.write(json.dumps([key, line]) + "\n")

    def remember(self, tests: Sequence[Test]) -> None:
        """Give ``tests`` what is kept about them."""
        by_key = {f"{test.name.id} {test.digest}": test for test in tests}
        for key, line in self._lines(self._tests):
            if (test := by_key.get(key)) is not None:
                test.lines |= {module: frozenset(lines) for module, lines in line.pop("lines").items()}
                vars(test).update(line)

    def keep_test(self, test: Test, *, lines: bool) -> None:
        """Keep what is known about ``test``, with its lines if they are new."""
        line: dict[str, Any] = {name: getattr(test, name) for name in ("status", "duration_s", "passes")}
        line["lines"] = {module: sorted(each) for module, each in test.lines.items() if each and lines}
        self._add(self._tests, f"{test.name.id} {test.digest}", line)

    def outcomes(self, mutants: Iterable[Mutant], tests: Sequence[Test]) -> dict[str, Outcome]:
        """Return the kept outcomes of ``mutants``, by id."""
        keys = {self._key(mutant, tests) for mutant in mutants}
        return {line["id"]: Outcome(**line) for key, line in self._lines(self._outcomes) if key in keys}

    def keep_outcome(self, mutant: Mutant, tests: Sequence[Test], outcome: Outcome) -> None:
        """Keep one more outcome."""
        self._add(self._outcomes, self._key(mutant, tests), asdict(outcome))

    @staticmethod
    def _key(mutant: Mutant, tests: Sequence[Test]) -> str:
        return digest(mutant.id, sorted((test.name.id, test.digest) for test in reaching(mutant, tests)))


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
    """The runner, for tests with swapped code of ``sources``, ``jobs`` at a time. What it finds goes to ``kept``."""

    def __init__(self, options: RunOptions, sources: Sequence[Source], jobs: int, kept: Kept) -> None:
        super().__init__(options)
        self._sources, self._jobs, self._kept = sources, jobs, kept
        self._zygotes = zygotes = _Zygotes(options, self.environment, self.scratch)
        zygotes.modules = tuple(source.name for source in sources)
        # Jobs limit how many tests run, and simulated devices are unlimited.
        self._machine = Machine(self.scratch, self.environment, Devices(0, ""))

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

    def _each(self, tasks: Iterable[Task[None]], done: deque[_T]) -> Iterator[_T]:
        """Run ``tasks``, as many at a time as there are jobs; yield what they add to ``done``."""
        waiting, loop = iter(tasks), Loop(tick_s=_TICK_S)
        with contextlib.closing(loop):
            while True:
                while len(loop) < self._jobs and (task := next(waiting, None)) is not None:
                    loop.add(task)
                while done:
                    yield done.popleft()
                if not loop:
                    return
                loop.turn()

    def record(self, tests: Sequence[Test]) -> Iterator[Test]:
        """Run each of ``tests`` once without a mutant, note its duration, its status and the lines that it reaches, and
        yield it.
        """
        parts, size, done = list[tuple[str, int, int]](), 0, deque[Test]()
        for source in self._sources:
            parts.append((source.name, size, source.lines + 1))
            size += source.lines + 1
        codes = tuple(code for source in self._sources for code in source.probes())

        def one(test: Test) -> Task[None]:
            marks = Path(self.scratch, f"marks-{id(test)}")
            marks.write_bytes(bytes(size))
            result = yield from self._run_one(test, Swap(codes, str(marks), tuple(parts)))
            found = marks.read_bytes()
            marks.unlink()
            if failed := result.status.counted is Status.FAILED:  # the marks may disturb it, as they do a compiler
                result = yield from self._run_one(test, Swap(()))
            for name, at, length in parts:
                test.lines[name] = frozenset(line for line in range(length) if failed or found[at + line])
            test.duration_s, test.status = result.duration_s, result.status.counted.value
            test.passes = int(test.passed)
            self._kept.keep_test(test, lines=True)
            done.append(test)

        return self._each(map(one, tests), done)

    def mutate(self, mutants: Iterable[tuple[Mutant, tuple[Code, ...]]], tests: Sequence[Test]) -> Iterator[Outcome]:
        """Run the tests that reach each mutant; yield its outcome. See Note [Noticed]."""
        done = deque[Outcome]()

        def one(mutant: Mutant, codes: tuple[Code, ...]) -> Task[None]:
            outcome = yield from self._one_mutant(mutant, Swap(codes), reaching(mutant, tests))
            self._kept.keep_outcome(mutant, tests, outcome)
            done.append(outcome)

        return self._each((one(*pair) for pair in mutants), done)

    def _one_mutant(self, mutant: Mutant, swap: Swap, left: list[Test]) -> Task[Outcome]:
        outcome = Outcome(mutant.id, "survived" if left else "unreached")
        while left:
            test = max(left, key=lambda one: (one.caught + 1) / (one.ran + 8) / max(one.duration_s, 0.05))
            left.remove(test)
            began_s = _os.monotonic()
            result = yield from self._run_one(test, swap)
            test.ran += 1
            outcome = replace(outcome, took_s=outcome.took_s + _os.monotonic() - began_s, ran=outcome.ran + 1)
            if result.status.counted is Status.FAILED and (yield from self._is_sound(test)):
                test.caught += 1
                text = describe_failure(result)[:_KEPT]
                return replace(outcome, status="caught", test=test.name.id, text=text)
        return outcome

    def _is_sound(self, test: Test) -> Task[bool]:
        """Task: return whether ``test`` passes without a mutant."""
        while test.passed and test.passes < SOUND:
            result = yield from self._run_one(test, Swap(()))
            if result.status.counted is not Status.PASSED:
                test.status = Status.FLAKY.value
            test.passes += test.passed
            self._kept.keep_test(test, lines=False)
        return test.passed
