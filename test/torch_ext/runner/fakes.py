"""Fakes for the half of the runner that starts processes, and a suite for them to run."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_ext.results import Began, Over, Remark, Status, TestName, TestResult
from torch_ext.runner.cli import main, main_for_file
from torch_ext.runner.names import Collected, TestFile
from torch_ext.runner.options import RunOptions
from torch_ext.runner.schedule import Plan


class FakeCollector:
    """Answers from a table of file name to ``Class.method``, and records which files were asked for."""

    def __init__(self, layout, errors: Mapping[str, str] = {}, imported=()):
        self.layout = layout
        self.errors = errors
        self.imported = tuple(imported)
        self.asked: list[str] = []
        self.on_collect: Callable[[], object] = lambda: None

    def collect(self, files):
        for file in reversed(files):
            self.asked.append(file.name)
            self.on_collect()
            tests = tuple(TestName(file.name, *name.split(".")) for name in self.layout.get(file.name, ()))
            error = self.errors.get(file.name, "" if file.name in self.layout else "it is not in the table")
            yield Collected(file, tests, () if error else (str(file.path), *self.imported), error=error)


class FakeExecutor:
    """Stands for the module ``torch_ext.runner.execute`` and for the executor that it opens.

    Passes every test but those in ``endings``; a test that ends in None is never reported.
    """

    def __init__(self, collector, endings: Mapping[str, TestResult | None] = {}):
        self.fake_collector = collector
        self.endings = endings
        self.plans: list[Plan] = []
        self.options: list[RunOptions] = []
        self.ran: list[str] = []
        self.interrupt_at = ""
        self.open = 0

    def open_executor(self, options):
        self.options.append(options)
        self.open += 1
        return self

    def collect(self, files):
        return self.fake_collector.collect(files)

    def close(self):
        self.open = max(0, self.open - 1)

    def run(self, plan, sink):
        self.plans.append(plan)
        for batch in plan:
            name = TestName(batch.file.name, batch.cls)
            sink(Began(name))
            goes_on = self._run_all(batch.tests, self.options[-1], sink)
            sink(Over(name))
            if not goes_on:
                return

    def _run_all(self, tests, options, sink):
        for test in tests:
            sink(Began(test))
            self.ran.append(test.id)
            if test.id == self.interrupt_at:
                raise KeyboardInterrupt
            result = self.endings.get(test.id, TestResult(test, Status.PASSED, 0.25))
            if result is not None:
                sink(result)
            if result is not None and options.failfast and result.status is Status.FAILED:
                return False
        return True


class Terminal(io.StringIO):
    def isatty(self):
        return True


def file(name):
    """A test file that does not exist."""
    return TestFile(f"{name}.py", Path("/root") / f"{name}.py", name.replace("/", "."), Path("/root"))


def named(*ids):
    return [TestName(*each.split("::")) for each in ids]


def ending(test, status=Status.FAILED, duration_s=0.1):
    return TestResult(TestName(*test.split("::")), status, duration_s, (Remark("boom"),))


@dataclass(frozen=True)
class Done:
    """The exit code of the command, and its output."""

    code: int
    out: str
    err: str


class Cli:
    """The command, over an executor that starts no process. Each call clears the record of the previous one."""

    def __init__(self, executor, capsys):
        self.executor = executor
        self._capsys = capsys

    def __call__(self, *arguments):
        return self.main("--root", "suites", *arguments)

    def main(self, *arguments):
        return self._ended(lambda: main(list(arguments)))

    def of_file(self, file, *arguments):
        return self._ended(lambda: main_for_file(file, list(arguments)))

    def _ended(self, call):
        self.executor.ran, self.executor.fake_collector.asked = [], []
        self._capsys.readouterr()
        try:
            code = call()
        except SystemExit as ended:
            code = int(str(ended.code))
        return Done(code, *self._capsys.readouterr())

    @property
    def ran(self):
        return self.executor.ran

    @property
    def asked(self):
        """The files of which the collector was asked for the tests, sorted."""
        return sorted(self.executor.fake_collector.asked)


def write_suite(root, layout):
    """Create the files of ``layout`` below ``root``. Nothing imports them, so they hold only a comment."""
    for name in layout:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n", encoding="utf-8")
    return root
