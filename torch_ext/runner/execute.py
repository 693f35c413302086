"""The half of the runner that starts processes: imports files, and runs their classes side by side."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence

from torch_ext import machine_memory
from torch_ext.results import SetupError, Sink, TestName, Tick
from torch_ext.runner.class_runner import ClassRunner
from torch_ext.runner.interrupts import held
from torch_ext.runner.loop import Loop, Task, arrives
from torch_ext.runner.messages import TestNames
from torch_ext.runner.names import Collected, TestFile
from torch_ext.runner.options import RunOptions
from torch_ext.runner.places import Machine
from torch_ext.runner.schedule import Batch, Plan, Queue, cores, longest_first
from torch_ext.runner.steps import Executor
from torch_ext.runner.zygotes import RunZygotes
from torch_ext.world.channel import ChannelClosedError
from torch_ext.world.protocol import Devices
from torch_ext.world.tree import (
    HungImportError,
    LeftWhileLoadingError,
    LoadError,
    ModuleZygote,
    ZygoteClient,
    ZygoteDiedError,
)

_TICK_S = 0.25


class RunExecutor:
    """Collects and runs tests; see :class:`Executor`."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        machine_memory.share()  # before any process starts, so that all share one page
        self.environment = options.environment()
        self._stops = False  # failfast: a test has failed
        with held():
            try:
                self.scratch = tempfile.mkdtemp(prefix="torch_ext-")
            except OSError as error:
                raise SetupError(f"cannot make a temporary folder: {error}; set TMPDIR to a usable one") from error
            self._zygotes = RunZygotes(options, self.environment, self.scratch)
            atexit.register(self.close)

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """See :class:`Executor`. Imports one file per core concurrently."""
        waiting, found, loop = deque(files), list[Collected](), Loop()
        try:
            while waiting or loop:
                while waiting and len(loop) < cores():
                    loop.add(self._collect(waiting.popleft(), found))
                if loop and not found:
                    loop.turn()
                yield from found
                found.clear()
        finally:
            loop.close()

    def _collect(self, file: TestFile, found: list[Collected]) -> Task[None]:
        """Task: import ``file`` and add its tests to ``found``."""
        try:
            zygote = yield from self._zygotes.of_file(file)
            named = yield from self._names(zygote, file.module)
        except LoadError as error:
            left = str(error) if isinstance(error, LeftWhileLoadingError) else ""
            collected = Collected(file, error=str(error), left=left)
        except (ZygoteDiedError, ChannelClosedError) as error:
            collected = Collected(file, error=f"{error}. Run the file alone to see why: python {file.path}")
        else:
            tests = tuple(TestName(file.name, cls, method) for cls, method in named.names)
            imported = (zygote.imported if isinstance(zygote, ModuleZygote) else None) or ()
            collected = Collected(file, tests, imported, needs=named.needs, device=named.device)
        if collected.error or self._options.list_only:
            self._zygotes.forget(file)
        found.append(collected)

    def _names(self, zygote: ZygoteClient, module: str) -> Task[TestNames]:
        """Task: have a child of the zygote name its tests; naming may run the project's code too."""
        target = "torch_ext.runner.class_process:collect"
        with contextlib.closing(zygote.start(target, module, self.environment)) as child:
            if (yield from arrives(child.channel, self._zygotes.limit_s, child.pid)):
                message: TestNames = child.channel.receive()[0]
                return message
            found = child.stacks().rstrip()
            text = f"naming the tests of {module} took longer than its limit of {self._zygotes.limit_s:g} s"
            raise HungImportError(f"{found}\n\n{text}; its stacks are above" if found else text)

    def run(self, plan: Plan, sink: Sink) -> None:
        """See :class:`Executor`."""
        packs = self._options.packs and len(plan.batches) > 1
        devices = Devices(0, "")
        if packs and self._options.slots is None:
            with contextlib.suppress(ZygoteDiedError):  # each affected file reports it
                devices = self._zygotes.count_devices(plan.batches[0].file)
        machine = Machine(self.scratch, self.environment, devices, self._options.slots)
        at_once = (self._options.jobs or machine.slots) if packs else 1
        queue = Queue(longest_first(plan) if packs else plan, machine.slots, at_once)
        loop = Loop(lambda: sink(Tick()), _TICK_S)
        try:
            while not queue.over:
                while not self._stops and (batch := queue.start()) is not None:
                    loop.add(self._run_class(batch, queue, machine, sink, packs))
                if self._stops:
                    return
                if loop:
                    loop.turn()
        finally:
            self._stops = False
            loop.close()

    def _run_class(self, batch: Batch, queue: Queue, machine: Machine, sink: Sink, packs: bool) -> Task[None]:
        try:
            with machine.place(queue.running[batch], packed=packs and not batch.need.alone) as place:
                continues = yield from ClassRunner(self._zygotes, place, batch, self._options, sink).run()
                self._stops = self._stops or not continues
        finally:
            if queue.ended(batch):
                self._zygotes.forget(batch.file)

    def close(self) -> None:
        """End every process of the run and remove its scratch folder. Idempotent."""
        with held():
            self._zygotes.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
            atexit.unregister(self.close)


def open_executor(options: RunOptions) -> Executor:
    """Return an executor for one run under ``options``. The caller closes it."""
    here = RunExecutor(options)
    if not options.cluster:
        return here
    cluster = importlib.import_module("torch_ext.runner.cluster.executor")
    remote: Executor = cluster.ClusterExecutor(options, here)  # if that fails, `here` closes at exit
    return remote
