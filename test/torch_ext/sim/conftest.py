"""Loads the simulator once for these tests, or skips them where it cannot be built for lack of a compiler.

They may run on several cores: ``-n auto``.
"""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from test.torch_ext import parallel
from torch_ext.world import provider

collect_ignore_glob = []

try:
    import torch_ext.sim  # noqa: F401 - registers the device
except RuntimeError as error:
    if type(error).__name__ != "MissingCompilerError":
        raise
    warnings.warn(f"the tests of the simulator are left out: {error}", stacklevel=1)
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def group():
    """A default group of this process only."""
    torch.get_device_module("sim").set_device(0)
    dist.init_process_group("simccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=["shared", "gloo"])
def transport(request, monkeypatch):
    """The transport of groups created from now on, in ranks too."""
    monkeypatch.setenv("TORCH_EXT_SIM_TRANSPORT", request.param)
    return request.param


def _module_with_ranks(item):
    return item.module if isinstance(item, pytest.Function) and hasattr(item.module, "ranks") else None


def pytest_configure(config):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items):
    for item in items:
        # Every warning is an error. A test that makes torch raise one says which.
        if Path(__file__).parent in item.path.parents:  # the hook gets the items of every folder
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)


def pytest_collection_finish(session):
    """Fork the ranks' zygote now, when it has every test module and before a test uses a device in this process."""
    for name in sorted({module.__name__ for module in map(_module_with_ranks, session.items) if module}):
        provider.prepare(name, parallel.THREADS)
