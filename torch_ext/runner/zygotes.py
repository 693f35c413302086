"""The zygotes of a run: one for each file, and a copy of it for each class that runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

from torch_ext.personality import SIM
from torch_ext.results import SetupError
from torch_ext.runner.interrupts import held
from torch_ext.runner.loop import Task, arrives
from torch_ext.runner.names import TestFile
from torch_ext.runner.options import RunOptions
from torch_ext.world import provider
from torch_ext.world.channel import ChannelClosedError
from torch_ext.world.child import first_uses, has_driver
from torch_ext.world.protocol import Devices, ModuleOrder, Preparation
from torch_ext.world.tree import LoadError, ModuleZygote, RootZygote, ZygoteClient, ZygoteCopy, ZygoteDiedError
from torch_ext.world.warm import connect, search_path, socket_name
from torch_ext.world.wording import own_message

_COUNT_DEVICES = "torch_ext.testing._internal._distributed.machine:main"
# Imported by nearly every distributed test.
_PRELOAD = ("torch_ext.testing._internal._distributed.preload",)
# Makes the simulated device look like CUDA's to an unmodified upstream file.
_STAND_IN = "torch_ext.cuda_as_sim.stand_in"
# Seconds that an import may take without --timeout, and at least with it: a limit for short tests may be too short.
_IMPORT_S, _MIN_IMPORT_S = 120.0, 10.0


class RunZygotes:
    """Starts zygotes on first use; :meth:`close` ends them with all their children. Called on the main thread. The root
    removes the folder ``scratch`` if this process is gone.
    """

    def __init__(self, options: RunOptions, environment: Mapping[str, str], scratch: str) -> None:
        self._options = options
        self._environment = dict(environment)
        self._scratch = scratch
        self.limit_s = max(options.timeout_s or _IMPORT_S, _MIN_IMPORT_S)  # time limit of an import
        self._ahead = (_STAND_IN,) if options.cuda_as_sim else ()
        self._root: RootZygote | None = None
        self._warm = contextlib.ExitStack()  # of the connection to `torch_ext serve`
        self._of_files: dict[str, ModuleZygote] = {}

    def _ready_root(self, file: TestFile) -> RootZygote:
        try:
            if self._root is None:
                path = (str(file.import_root), *filter(None, sys.path))
                # In the root rather than in each file's zygote: most files of a run need these modules.
                preload = (*self._ahead, *_PRELOAD, *self._options.harness[:1], *first_uses(str(file.path)))
                with held():
                    self._root = self._new_root(Preparation(path, preload))
            self._root.wait_ready()
        except (LoadError, ZygoteDiedError) as error:
            trace = str(error)
            raise SetupError(own_message(trace) or f"the zygote cannot load its modules\n{trace}") from None
        return self._root

    def _new_root(self, preparation: Preparation) -> RootZygote:
        self._warm.close()
        with contextlib.suppress(ZygoteDiedError):
            if warm := self._find_warm():
                return RootZygote(preparation, self._scratch, self._environment, warm)
        return RootZygote(preparation, self._scratch, self._environment)

    def _find_warm(self) -> ZygoteClient | None:
        """Return the zygote of a `torch_ext serve` that has loaded what this run's first zygote would."""
        device = self._environment.get("TORCH_EXT_DEVICE", "")
        # Without --device, the first zygote prefers a real device. A debugger prompts at the terminal of its process.
        undecided = not device and not self._options.cuda_as_sim and has_driver()
        if undecided or self._options.pdb is not None:
            return None
        return connect(socket_name(device in ("", SIM), search_path(), self._environment), self._warm)

    def count_devices(self, file: TestFile) -> Devices:
        """Have a child of the zygote of ``file``, or of its root, count the devices that ranks must share; none if the
        child fails.
        """
        zygote = provider.zygote_for("__main__") if self._options.script else self._ready_root(file)
        with contextlib.closing(zygote.start(_COUNT_DEVICES, None, self._environment)) as child:
            with contextlib.suppress(ChannelClosedError):
                message: Devices = child.channel.receive()[0]
                return message
        return Devices(0, "")

    def of_file(self, file: TestFile) -> Task[ZygoteClient]:
        """Task: return the file's zygote after it has loaded the file.

        Raises:
            LoadError: the import failed.
            ZygoteDiedError: the process ended during the import.
        """
        if self._options.script:
            return provider.zygote_for("__main__")  # it has loaded the file, and has run nothing
        zygote = None
        while zygote is None or zygote is not self._of_files.get(file.name):  # another task may have dropped it
            if (zygote := self._of_files.get(file.name)) is None:
                first, argv = (*self._ahead, *self._options.harness), (str(file.path),)
                order = ModuleOrder(file.module, str(file.import_root), self._environment, argv, first)
                zygote = self._of_files[file.name] = ModuleZygote(self._ready_root(file), order)
            if not (yield from arrives(zygote, self.limit_s, zygote.pid)):
                zygote.end_hung(self.limit_s)
        try:
            zygote.wait_loaded()
        except ZygoteDiedError:
            self.forget(file, zygote)
            raise
        return zygote

    def copy_of(self, file: TestFile) -> Task[ZygoteCopy]:
        """Task: return a copy of the file's zygote for one class; the caller closes it. See Note [Neighbours].

        Raises as :meth:`of_file`.
        """
        try:
            return (yield from self._copy_of(file))
        except ZygoteDiedError:  # the file has another zygote now
            return (yield from self._copy_of(file))

    def _copy_of(self, file: TestFile) -> Task[ZygoteCopy]:
        original, copy = (yield from self.of_file(file)), None
        try:
            copy = ZygoteCopy(original)
            while not (yield from arrives(copy.channel, self.limit_s, original.pid)):
                original.kill()
            copy.wait_loaded()
        except BaseException as error:
            if copy is not None:
                copy.close()
            if isinstance(error, ZygoteDiedError):
                self.forget(file, original)
            raise
        return copy

    def forget(self, file: TestFile, zygote: ZygoteClient | None = None) -> None:
        """End the file's zygote; the next use starts another. With ``zygote``, only if that is still the file's, since
        another class may have replaced it. If the root is gone too, the next use starts another root.
        """
        if self._options.script:
            provider.forget(provider.zygote_for("__main__"))
        elif (known := self._of_files.get(file.name)) and zygote in (None, known):
            self._of_files.pop(file.name).close()
        if self._root is not None and self._root.has_ended:
            self.close()

    def close(self) -> None:
        """End all zygotes. Idempotent."""
        for zygote in self._of_files.values():
            zygote.close()
        self._of_files = {}
        if self._root is not None:
            self._root.close()
            self._root = None
        self._warm.close()
