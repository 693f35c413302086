"""The half of the runner that starts processes: zygotes for files, class processes for classes."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import selectors
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch_ext.runner.class_runner import ClassRunner
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.interrupts import held
from torch_ext.runner.loop import Loop, Task, Wait, run_alone
from torch_ext.runner.messages import CollectOrder, TestNames
from torch_ext.runner.names import Collected
from torch_ext.runner.options import Options
from torch_ext.runner.places import Machine, ask_for_devices, shared_environment
from torch_ext.runner.results import SetupError, Sink, TestName, Tick
from torch_ext.runner.schedule import Batch, Packed, Plan, Queue, Serial, Slots
from torch_ext.world import _os, frames, provider
from torch_ext.world.channel import ChannelClosedError, channel_pair, close_all
from torch_ext.world.follow import read_stacks
from torch_ext.world.patience import Patience
from torch_ext.world.protocol import STACK_SIGNAL, Dependencies, Devices, ModuleOrder, Preparation
from torch_ext.world.tree import (
    HungImportError,
    LeftWhileLoadingError,
    LoadError,
    ModuleZygote,
    RootZygote,
    ZygoteClient,
    ZygoteDiedError,
)

__all__ = ["RunExecutor", "open_executor"]

# What nearly every distributed test imports.
_PRELOAD = ("torch_ext.testing._internal._distributed.preload",)
# What makes an unmodified upstream file see our harness.
_REWRITING = "torch_ext.cuda_as_sim.ahead"
_BRIDGE, _FILE = "torch_ext.upstream.bridge", "torch_ext.upstream.file"
# How long an import may take unless --timeout says so, and never less than the second number: a short limit for bodies
# says little of an import on a busy machine, which would cost the file all its tests.
_IMPORT_S, _LEAST_IMPORT_S = 120.0, 10.0
# After how many seconds without news another file's import begins beside those that go on, so that some that hang block
# no others.
_NEWS_S = 2.0
# How often those who show the time are told that it passes, in seconds.
_TICK_S = 0.25


class RunExecutor:
    """The zygotes of one run; see :class:`Executor`. They start on first use; :meth:`close` ends them with all their
    children.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.environment = shared_environment(options.environment())
        self._packs = options.packs
        self._stops = False  # a test has failed, and that is enough
        self._limit_s = max(options.timeout_s or _IMPORT_S, _LEAST_IMPORT_S)
        self._root: RootZygote | None = None
        self._zygotes: dict[str, ModuleZygote] = {}
        self._collected: set[str] = set()
        with held():
            try:
                self.scratch = tempfile.mkdtemp(prefix="torch_ext-")
            except OSError as error:
                raise SetupError(f"no folder for short-lived files can be made: {error}; set TMPDIR to one") from error
            atexit.register(self.close)

    def module_of(self, file: TestFile) -> str:
        """Return the name under which the file's tests are found in its zygote."""
        return "__main__" if self._options.script else file.module

    def begin(self, file: TestFile, *, record: bool = False) -> None:
        """Have the file's zygote load in the background; with ``record`` it will tell what its tests depend on.

        Raises:
            ZygoteDiedError: the root of all zygotes is gone.
        """
        if self._options.script or file.name in self._zygotes:
            return
        root = self._root or self._start_root(file)
        argv = (str(file.path),)
        first = (*self._ahead(), _BRIDGE, _FILE) if self._options.upstream else ()
        order = ModuleOrder(file.module, str(file.import_root), str(file.path), self.environment, argv, record, first)
        try:
            root.wait_ready()
        except (LoadError, ZygoteDiedError) as error:
            raise SetupError(_what_to_tell(str(error))) from None
        self._zygotes[file.name] = root.load(order, self._limit_s)

    def _ahead(self) -> tuple[str, ...]:
        return (_REWRITING,) if self._options.cuda_as_sim else ()

    def _start_root(self, file: TestFile) -> RootZygote:
        path = [str(file.import_root), *(entry for entry in sys.path if entry)]
        preload = (*self._ahead(), *_PRELOAD, _BRIDGE) if self._options.upstream else _PRELOAD
        with held():
            self._root = RootZygote(Preparation(tuple(path), preload), self.scratch, self.environment)
        return self._root

    def zygote(self, file: TestFile) -> Task[ZygoteClient]:
        """A task that returns the file's zygote when it has loaded the file.

        Raises:
            LoadError: the file cannot be imported.
            ZygoteDiedError: the process ended while importing it.
        """
        if self._options.script:
            # This process has loaded the file as __main__ and run nothing.
            channel = provider.zygote_for("__main__")
            return ZygoteClient(channel, provider.pid_behind(channel))
        while True:
            self.begin(file)
            zygote = self._zygotes[file.name]  # another task may have replaced it since the last look
            if zygote.channel.poll() or zygote.check():
                zygote.wait_loaded()
                return zygote
            yield Wait((zygote.channel.fileno(),), zygote.look_s)

    def drop(self, file: TestFile, zygote: ZygoteClient | None = None) -> None:
        """Give up the file's zygote; the next use starts another, and another root if that is gone too.

        With ``zygote``, only if it is that one: of two classes that have lost it, the first has got another already.
        """
        if zygote is not None and not self._options.script and self._zygotes.get(file.name) is not zygote:
            return
        if self._options.script:
            provider.forget(provider.zygote_for("__main__"))
            return
        dropped = self._zygotes.pop(file.name, None)
        if dropped is not None:
            dropped.close()
        if self._root is not None and self._root.process.poll() is not None:
            self.close_zygotes()

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """See :class:`Executor`. As many files as there are cores are imported side by side, more while they hang."""
        waiting, at_once = deque(files), os.cpu_count() or 1
        loading: list[TestFile] = []
        while waiting or loading:
            while waiting and len(loading) < at_once:
                loading.append(waiting.popleft())
                with contextlib.suppress(ZygoteDiedError):  # told for each file that it concerns
                    self.begin(loading[-1], record=True)
            ready = self._next_loaded(loading)
            at_once += not ready
            for file in ready:
                loading.remove(file)
                yield run_alone(self._collect(file))
                if self._options.list_only:
                    self.drop(file)

    def _next_loaded(self, loading: Sequence[TestFile]) -> list[TestFile]:
        """Wait for news; return the files whose import has ended in some way."""
        zygotes = {file: self._zygotes.get(file.name) for file in loading}
        if ready := [file for file, zygote in zygotes.items() if zygote is None or zygote.depends is not None]:
            return ready
        with selectors.DefaultSelector() as selector:
            for file, zygote in zygotes.items():
                if zygote is not None:
                    selector.register(zygote, selectors.EVENT_READ, file)
            look_s = min(zygote.look_s for zygote in zygotes.values() if zygote is not None)
            events = selector.select(max(0.0, min(_NEWS_S, look_s - time.monotonic())))
        ended = {key.data for key, _ in events}
        return [file for file, zygote in zygotes.items() if file in ended or (zygote and zygote.check())]

    def _collect(self, file: TestFile) -> Task[Collected]:
        self._collected.add(file.name)
        try:
            zygote = yield from self.zygote(file)
            told = yield from self._names(zygote, self.module_of(file))
        except LoadError as error:
            self.drop(file)
            left = str(error) if isinstance(error, LeftWhileLoadingError) else ""
            return Collected(file, error=str(error), left=left)
        except (ZygoteDiedError, ChannelClosedError) as error:
            self.drop(file)
            return Collected(file, error=f"{error}. Run it by itself to see why: python {file.path}")
        tests = tuple(TestName(file.name, cls, method) for cls, method in told.names)
        depends = (zygote.depends if isinstance(zygote, ModuleZygote) else None) or Dependencies()
        found = (depends.imported, depends.paths, depends.variables, depends.unsure)
        return Collected(file, tests, *found, needs=told.needs, device=told.device)

    def _names(self, zygote: ZygoteClient, module: str) -> Task[TestNames]:
        """Have a child of the zygote tell the names of its tests, which may run the project's code too."""
        ours, theirs = channel_pair()
        stacks, stacks_writer = os.pipe()
        descriptors = [theirs.fileno(), stacks_writer]
        try:
            child = zygote.start("torch_ext.runner.collect:main", CollectOrder(module), descriptors, self.environment)
        except BaseException:
            close_all([stacks])
            raise
        finally:
            theirs.close()
            os.close(stacks_writer)
        patience = Patience(self._limit_s, time.monotonic())
        try:
            while not ours.poll():
                yield Wait((ours,), patience.look_s)
                if not ours.poll() and patience.is_over(time.monotonic(), _os.computed_s(child.pid)):
                    child.send_signal(STACK_SIGNAL)
                    found = frames.trim_stacks(read_stacks({0: stacks})[0]).rstrip()
                    told = f"naming the tests of {module} took longer than its limit of {self._limit_s:g} s"
                    raise HungImportError(f"{found}\n\n{told}; above is where it was" if found else told)
            message: TestNames = ours.receive()[0]
            return message
        finally:
            ours.close()
            child.close()
            os.close(stacks)

    def run(
        self,
        plan: Plan,
        sink: Sink,
        renew: Callable[[Collected], Sequence[Batch]],
    ) -> None:
        """See :class:`Executor`."""
        if not plan.batches:
            return
        machine = self._machine(plan)
        slots = Slots(machine.slots)
        # Whoever asks for an order wants that one.
        in_order = self._options.random_order is not None or self._options.failed_first
        packed = Packed(self._options.jobs or slots.number, in_order=in_order)
        queue = Queue(plan, packed if self._packs else Serial(), slots)
        planned = {file.name: tuple(batches) for file, batches in itertools.groupby(plan, lambda batch: batch.file)}
        loop = Loop(lambda: sink(Tick()), _TICK_S)
        try:
            while not queue.over:
                for file in queue.files_to_open():
                    loop.add(self._open(file, planned[file.name], queue, renew))
                while not self._stops and (batch := queue.start()) is not None:
                    loop.add(self._run_class(batch, queue, machine, sink))
                for file in queue.files_done():
                    self.drop(file)
                if self._stops:
                    return
                if loop:
                    loop.turn()
        finally:
            self._stops = False
            loop.close()

    def _open(
        self,
        file: TestFile,
        batches: Sequence[Batch],
        queue: Queue,
        renew: Callable[[Collected], Sequence[Batch]],
    ) -> Task[None]:
        if file.name not in self._collected:
            batches = renew((yield from self._collect(file)))
        else:
            with contextlib.suppress(LoadError, ZygoteDiedError):  # whoever needs it tells
                yield from self.zygote(file)
        queue.loaded(file, batches)

    def _run_class(self, batch: Batch, queue: Queue, machine: Machine, sink: Sink) -> Task[None]:
        place = machine.place(queue.running[batch], packed=self._packs)
        try:
            goes_on = yield from ClassRunner(self, place, batch, self._options, sink).run()
            self._stops = self._stops or not goes_on
        finally:
            queue.ended(batch)
            place.leave()

    def _machine(self, plan: Plan) -> Machine:
        devices = Devices(0, "")
        if self._packs and self._options.slots is None:
            with contextlib.suppress(ZygoteDiedError):  # told for each file that it concerns
                devices = ask_for_devices(self._any_zygote(plan), self.environment)
        return Machine(self.scratch, self.environment, devices, self._options.slots)

    def _any_zygote(self, plan: Plan) -> ZygoteClient:
        if self._options.script:
            return run_alone(self.zygote(plan.batches[0].file))
        root = self._root or self._start_root(plan.batches[0].file)
        try:
            root.wait_ready()
        except LoadError as error:
            raise SetupError(_what_to_tell(str(error))) from None
        return ZygoteClient(root.channel, root.process.pid)

    def close_zygotes(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()
        self._zygotes = {}
        if self._root is not None:
            self._root.close()
            self._root = None

    def close(self) -> None:
        """End every process of the run and remove its scratch folder. Idempotent."""
        with held():
            self.close_zygotes()
            shutil.rmtree(self.scratch, ignore_errors=True)
            atexit.unregister(self.close)


def _what_to_tell(trace: str) -> str:
    """Return the message of an error of our own, which says it all; of any other error the traceback."""
    last = trace.rstrip().rpartition("\n")[2]
    kind, _, message = last.partition(": ")
    return message if kind.startswith("torch_ext.") else f"the zygote cannot load what it needs\n{trace}"


def open_executor(options: Options) -> RunExecutor:
    """Return what runs tests under ``options``. Each run has its own; close it."""
    return RunExecutor(options)
