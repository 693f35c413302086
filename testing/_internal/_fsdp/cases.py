"""Base classes of FSDP and DDP tests."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.compat.c10d import _get_default_group
from torch_ext.compat.testing import FakeStore
from torch_ext.testing._internal._distributed.helpers import _reset_dynamo, run_subtests
from torch_ext.testing._internal._distributed.skips import skip_rank
from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal._fsdp.fsdp1_parity import TrainingMixin
from torch_ext.testing._internal._fsdp.step_log import CollectiveLog
from torch_ext.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
)
from torch_ext.testing._internal.common_utils import FILE_SCHEMA, set_rng_seed
from torch_ext.world import _os
from torch_ext.world.operations import after_body
from torch_ext.world.settings import hosts_of, is_multi_host

__all__ = [
    "DDPTest",
    "FSDPTest",
    "FSDPTestContinuous",
    "FSDPTestMixin",
    "FSDPTestMultiThread",
]


def _skip_without_devices(world_size: int) -> None:
    if device.is_accelerator() and device.device_count() < world_size:
        skip_rank(f"multi-gpu-{world_size}")


def _use_device(rank: int) -> list[int] | None:
    """Make ``rank``'s device current and return ``device_ids`` for ``barrier``."""
    if not device.is_accelerator():
        return None
    index = device.rank_device(rank).index
    torch.accelerator.set_device_index(index)
    return [index]


def _silence_desync_debugging() -> None:
    # The clean-up thread of desync debugging makes short tests fail now and then:
    # https://github.com/pytorch/pytorch/issues/90848
    os.environ["TORCH_NCCL_DESYNC_DEBUG"] = "0"


@contextmanager
def _fresh_dynamo() -> Iterator[None]:
    _reset_dynamo()
    try:
        yield
    finally:
        _reset_dynamo()


class FSDPTestMultiThread(MultiThreadedTestCase):
    """Ranks are threads, which share module globals, the host's random generator and
    the current device. Each test has its own default group.
    """

    run_subtests = run_subtests

    @property
    def world_size(self) -> int:
        return device.default_world_size()

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self) -> None:
        _reset_dynamo()

    def perThreadTearDown(self) -> None:
        _reset_dynamo()


class FSDPTestMixin(TrainingMixin):
    """Methods of FSDP test cases whose ranks are processes."""

    run_subtests = run_subtests

    if TYPE_CHECKING:
        rank: int
        file_name: str
        init_method: Any
        run_test: Callable[[str, Any], None]

    @property
    def world_size(self) -> int:
        return device.default_world_size()

    @classmethod
    def _run(
        cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any
    ) -> None:
        """Run ``test_name`` as ``rank``: join the group, take the rank's device, seed,
        run, leave the group. With ``fake_pg=True`` the group does not communicate.
        Barriers keep a rank that skips from closing the store while others still join.
        """
        self: Any = cls(test_name)
        self.rank, self.file_name = rank, file_name
        _skip_without_devices(int(self.world_size) // hosts_of(self))
        self._join_group(fake=kwargs.get("fake_pg", False))
        device_ids = _use_device(rank)
        dist.barrier(device_ids=device_ids)
        with _fresh_dynamo():
            set_rng_seed()
            self.run_test(test_name, pipe)
        after_body(dist.barrier, device_ids=device_ids)
        dist.destroy_process_group()

    def _join_group(self, *, fake: bool) -> None:
        backend, where = device.distributed_backend(), {"init_method": self.init_method}
        if fake:
            backend, where = "fake", {"store": FakeStore()}
        size = int(self.world_size)
        try:
            dist.init_process_group(backend, world_size=size, rank=self.rank, **where)
        except RuntimeError as error:
            # torch says so if it was built without the backend
            if "recompile" in str(error):
                skip_rank("backend_unavailable")
            raise

    @property
    def device(self) -> torch.device:
        """The device of this rank. Ranks share devices if there are too few."""
        return device.rank_device(self.rank)

    def rows(self, width: int, step: int = 0, count: int = 3) -> torch.Tensor:
        """Return random ``(count, width)`` rows of this rank and ``step``."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(count, width, generator=generator).to(self.device)

    def allocated_bytes(self) -> int:
        """Return the bytes in use on this rank's device when nothing frees more, zero
        on the host.
        """
        if not device.is_accelerator():
            return 0
        # The autograd engine's thread of the device may drop its last node, and tensors
        # with it, after ``backward()`` has returned. The thread serves nodes of low
        # sequence numbers last, and a new thread starts at zero.
        empty, outputs = torch.empty(0, device=self.device, requires_grad=True), []
        maker = threading.Thread(target=lambda: outputs.append(empty.view(0)))
        maker.start()
        maker.join()
        torch.autograd.grad(outputs[0], empty, empty.detach())
        gc.collect()
        torch.accelerator.synchronize()
        _wait_until_threads_rest()
        return torch.accelerator.memory_allocated()


def _wait_until_threads_rest(limit_s: float = 1.0) -> None:
    """Return when no other thread of this process runs or waits for a core or the GIL,
    or after ``limit_s``: some may never rest, as NCCL's.
    """
    end_s, looks = _os.monotonic() + limit_s, 0
    while looks < 3 and _os.monotonic() < end_s:
        _os.sleep(0.001)  # without the GIL, which one may wait for
        others = _os.threads_of() - {threading.get_native_id()}
        runs = any(_os.field_of(each, 0) == "R" for each in others)
        looks = 0 if runs else looks + 1


class FSDPTest(FSDPTestMixin, MultiProcessTestCase):  # type: ignore[misc]  # upstream renames an argument of _run
    """Ranks are processes, fresh for each test, which have joined the default group."""

    def setUp(self) -> None:
        super().setUp()
        _silence_desync_debugging()
        self._spawn_processes()

    @property
    def process_group(self) -> dist.ProcessGroup:
        return _get_default_group()

    @property
    def destroy_pg_upon_exit(self) -> bool:
        # _run passes a barrier first
        return False

    @property
    def init_method(self) -> str:
        return "env://" if is_multi_host() else f"{FILE_SCHEMA}{self.file_name}"

    def shared_folder(self) -> str:
        """Return an empty folder of the run, the same on all ranks. Collective."""
        folder = [""]
        if self.rank == 0:
            folder = [tempfile.mkdtemp(dir=os.path.dirname(self.file_name))]
        dist.broadcast_object_list(folder)
        return folder[0]


class FSDPTestContinuous(FSDPTestMixin, MultiProcContinuousTest):
    """Ranks are processes that serve all tests of the class. Every test starts and ends
    with a barrier, so that no collective of one test matches one of the next.
    """

    @classmethod
    def backend_str(cls) -> str:
        return device.distributed_backend()

    @classmethod
    def device_type(cls) -> str:
        return device.device_type()

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        cls.rdvz_file = rdvz_file
        _silence_desync_debugging()
        _skip_without_devices(world_size // hosts_of(cls))
        _use_device(rank)
        super()._init_pg(rank, world_size, rdvz_file)

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        dist.barrier()
        with _fresh_dynamo():
            super()._run_test_given_id(test_id, **kwargs)
        after_body(dist.barrier)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return type(self).pg


class DDPTest(FSDPTest):
    """Compares DDP on two ranks with gradients that the test averages by hand."""

    world_size = 2

    def net(self) -> nn.Sequential:
        """Return two linear layers, 4 to 6 to 3, the same on every rank."""
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
        return nn.Sequential(*layers).to(self.device)

    def backward(self, model: nn.Module, step: int = 0) -> None:
        model(self.rows(4, step)).square().sum().backward()

    def counts(self, body: Callable[[], object]) -> tuple[int, int]:
        """Return how many all-reduces and broadcasts of floating-point tensors ``body``
        calls, without DDP's integers, by which ranks agree on buckets.
        """
        with CollectiveLog() as log:
            body()
        names = [call.name for call in log.calls if call.dtype.is_floating_point]
        return names.count("all-reduce"), names.count("broadcast")

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def averaged(self, reference: nn.Module) -> dict[str, torch.Tensor]:
        """Return ``reference``'s gradients, averaged over ranks. Collective."""
        averages = {}
        for name, gradient in self.gradients(reference).items():
            if gradient is not None:
                averages[name] = average = gradient.clone()
                dist.all_reduce(average)
                average.div_(self.world_size)
        return averages

    def check_gradients(
        self, ddp: DDP, expected: Mapping[str, torch.Tensor], label: str
    ) -> None:
        """Check bit by bit that ``ddp`` has the gradients ``expected``."""
        for name, gradient in expected.items():
            found, what = ddp.module.get_parameter(name).grad, f"gradient of {name}"
            self.assertEqual(found, gradient, f"{label}: {what}", atol=0, rtol=0)
