"""The half of the runner that starts processes: zygotes for files, class processes for classes."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from torch_ext.runner.class_runner import ClassRunner
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.messages import CollectOrder, TestNames
from torch_ext.runner.names import Collected
from torch_ext.runner.options import Options
from torch_ext.runner.results import SetupError, TestName, TestResult
from torch_ext.runner.schedule import Plan
from torch_ext.world import provider
from torch_ext.world.channel import ChannelClosedError, channel_pair
from torch_ext.world.protocol import ModuleOrder, Preparation
from torch_ext.world.tree import LoadError, ModuleZygote, RootZygote, ZygoteClient, ZygoteDiedError

__all__ = ["RunExecutor", "open_executor"]

# What nearly every distributed test imports.
_PRELOAD = ("torch_ext.testing._internal._distributed.preload",)
# What makes an unmodified upstream file see our harness.
_BRIDGE = "torch_ext.upstream.bridge"


class RunExecutor:
    """The zygotes of one run; see ``cli.Executor``. They start on first use; :meth:`close` ends them with all their
    children.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.environment = _environment(options)
        self.scratch = tempfile.mkdtemp(prefix="torch_ext-")
        self._root: RootZygote | None = None
        self._zygotes: dict[str, ModuleZygote] = {}
        atexit.register(self.close)

    def module_of(self, file: TestFile) -> str:
        """Return the name under which the file's tests are found in its zygote."""
        return "__main__" if self._options.script else file.module

    def begin(self, file: TestFile) -> None:
        """Have the file's zygote load in the background."""
        if self._options.script or file.name in self._zygotes:
            return
        if self._root is None:
            path = [str(file.import_root), *(entry for entry in sys.path if entry)]
            preload = (*_PRELOAD, _BRIDGE) if self._options.upstream else _PRELOAD
            self._root = RootZygote(Preparation(tuple(path), preload), self.scratch, self.environment)
        argv = (str(file.path),)
        order = ModuleOrder(file.module, str(file.import_root), str(file.path), self.environment, argv)
        try:
            self._zygotes[file.name] = self._root.load(order)
        except LoadError as error:
            raise SetupError(_what_to_tell(str(error))) from None

    def zygote(self, file: TestFile) -> ZygoteClient:
        """Return the file's zygote when it has loaded the file.

        Raises:
            LoadError: the file cannot be imported.
            ZygoteDiedError: the process ended while importing it.
        """
        if self._options.script:
            # This process has loaded the file as __main__ and run nothing.
            return ZygoteClient(provider.zygote_for("__main__"))
        self.begin(file)
        zygote = self._zygotes[file.name]
        zygote.wait_loaded()
        return zygote

    def drop(self, file: TestFile) -> None:
        """Give up the file's zygote; the next use starts another, and another root if that is gone too."""
        if self._options.script:
            provider.forget(provider.zygote_for("__main__"))
            return
        zygote = self._zygotes.pop(file.name, None)
        if zygote is not None:
            zygote.close()
        if self._root is not None and self._root.process.poll() is not None:
            self.close_zygotes()

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """See ``cli.Executor``."""
        ahead = max(1, (os.cpu_count() or 1))
        for number, file in enumerate(files):
            for each in files[number : number + ahead]:
                self.begin(each)
            yield self._collect(file)
            if self._options.list_only:
                self.drop(file)

    def _collect(self, file: TestFile) -> Collected:
        try:
            zygote = self.zygote(file)
            names = _names(zygote, self.module_of(file), self.environment)
        except LoadError as error:
            self.drop(file)
            return Collected(file, error=str(error))
        except (ZygoteDiedError, ChannelClosedError) as error:
            self.drop(file)
            return Collected(file, error=f"{error}. Run it by itself to see why: python {file.path}")
        imported = zygote.imported if isinstance(zygote, ModuleZygote) else ()
        tests = tuple(TestName(file.name, cls, method) for cls, method in names)
        return Collected(file, tests, imported or ())

    def run(self, plan: Plan, sink: Callable[[TestResult], None]) -> None:
        """See ``cli.Executor``."""
        try:
            batches = list(plan)
            for number, batch in enumerate(batches):
                for later in batches[number : number + 2]:
                    self.begin(later.file)
                if not ClassRunner(self, batch, self._options, sink).run():
                    return
                if number + 1 == len(batches) or batches[number + 1].file != batch.file:
                    self.drop(batch.file)
        finally:
            self.close()

    def close_zygotes(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()
        self._zygotes = {}
        if self._root is not None:
            self._root.close()
            self._root = None

    def close(self) -> None:
        """End every process of the run and remove its scratch folder. Idempotent."""
        self.close_zygotes()
        shutil.rmtree(self.scratch, ignore_errors=True)
        atexit.unregister(self.close)


def _what_to_tell(trace: str) -> str:
    """Return the message of an error of our own, which says it all; of any other error the traceback."""
    last = trace.rstrip().rpartition("\n")[2]
    kind, _, message = last.partition(": ")
    return message if kind.startswith("torch_ext.") else f"the zygote cannot load what it needs\n{trace}"


def _names(zygote: ZygoteClient, module: str, environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    ours, theirs = channel_pair()
    child = zygote.start("torch_ext.runner.collect:main", CollectOrder(module), [theirs.fileno()], environment)
    theirs.close()
    try:
        message: TestNames = ours.receive()[0]
        return message.names
    finally:
        ours.close()
        child.close()


def _environment(options: Options) -> dict[str, str]:
    """Return the environment of every process of the run: the user's, with what the command line adds."""
    environment = dict(os.environ)
    if options.device:
        environment["TORCH_EXT_DEVICE"] = options.device
    if options.timeout_s is not None:
        environment["TORCH_EXT_TIMEOUT"] = str(options.timeout_s)
    if options.start_method != "fork":
        environment["TORCH_EXT_START_METHOD"] = options.start_method
    if options.show_output:
        environment["TORCH_EXT_SHOW_OUTPUT"] = "1"
    return environment


def open_executor(options: Options) -> RunExecutor:
    """Return what runs tests under ``options``. Each run has its own; close it."""
    return RunExecutor(options)
