"""Runs a function in several ranks of a process group, on worlds of :mod:`torch_ext.world`.

Pytest forks the ranks' zygote after collection (see conftest.py), before a test uses a device: children of a process
that has used one cannot use it.
"""

import contextlib
import inspect
import os
import select
import signal
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torch_ext.sim  # noqa: F401 - registers the device, also in a fresh zygote
from torch_ext.world import provider, settings
from torch_ext.world import rank as world_rank
from torch_ext.world.follow import start_world
from torch_ext.world.protocol import Phase, RankStatus, Receipt
from torch_ext.world.settings import Limits
from torch_ext.world.start import RankTask
from torch_ext.world.verdict import Judgement, WorldReport, judge, render

DEADLINE_S = 120.0
# Torch's warning in ranks that call its coalesced collectives by their older names.
COALESCED_WARNING = r"`torch\.distributed\.[\w.]+_coalesced` (is|will be) deprecated"
GROUP_TIMEOUT = timedelta(seconds=30)
SHORT = timedelta(seconds=1)  # the time limit of a group whose test times out


def world_of(world_size, **options):
    """Make a test of ``body(rank, world_size, *args)``, which ranks run: see :func:`run`."""

    def make(body):
        def test(**parameters):
            run(world_size, body, *parameters.values(), **options)

        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        signature = inspect.signature(body)
        of_test = list(signature.parameters.values())[2:]
        test.__signature__ = signature.replace(parameters=of_test)
        test.body = body
        return test

    return make


def run(world_size, body, *args, killed=None, by=signal.SIGKILL, **options):
    """Call ``body(rank, world_size, *args)`` in ``world_size`` ranks of a process group, and wait for them.

    The signal ``by`` must end the rank ``killed``; every other rank must pass. ``options`` go to
    ``init_process_group``, but for ``bound``, which binds the group to the devices of its ranks.

    Raises:
        AssertionError: a rank ended otherwise or not before the deadline. The message says how each ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        of_body = (body.__module__, body.__name__)
        tasks = [RankTask(_in_group, (rank, world_size, folder, of_body, args, options)) for rank in range(world_size)]
        zygote = provider.zygote_for(body.__module__)
        with start_world(zygote, tasks, spares=settings.spare_count(world_size)) as world:
            death = None if killed is None else -by
            outcomes = world.wait(Limits(test_s=DEADLINE_S), expected_exit=death)
            _check(outcomes, killed, death, time.monotonic() - world.started_s)


def _check(outcomes, killed, death, took_s):
    verdict = judge(outcomes, death)
    report = render(WorldReport(tuple(outcomes), verdict, took_s))
    assert verdict.judgement is Judgement.PASSED, report
    died = [outcome.rank for outcome in outcomes if death is not None and outcome.exit_code == death]
    assert died == ([] if killed is None else [killed]), report


def full(value=1.0, numel=3):
    return torch.full((numel,), value, device="sim")


def store():
    return c10d._get_default_store()


def wait_for_end_of(pid):
    with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pid)) as process:  # it may have been reaped
        select.select([process], [], [])


def leave():
    """End this rank with success and without leaving its group, which is broken or already gone."""
    rank = world_rank.current()
    rank.report(Receipt(RankStatus.PASSED, time.monotonic()))
    rank.try_send(Phase.EXITING)
    os._exit(0)


def _in_group(rank, world_size, folder, of_body, args, options):
    body = getattr(sys.modules[of_body[0]], of_body[1])
    # Warnings that our own code causes are errors in ranks too. Torch's own name modules of torch.
    warnings.filterwarnings("error", module=r"(test\.)?torch_ext\.")
    sim = torch.get_device_module("sim")
    sim.set_device(rank % sim.device_count())
    if options.pop("bound", False):
        options["device_id"] = torch.device("sim", rank)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group(
        **{"rank": rank, "world_size": world_size, "store": store, "timeout": GROUP_TIMEOUT, **options}
    )
    # If a rank leaves while another still connects to it, the other's initialization fails.
    c10d._get_default_store().set(f"process of {rank}", str(os.getpid()))
    store.set(f"initialized {rank}", "")
    store.wait([f"initialized {peer}" for peer in range(world_size)], GROUP_TIMEOUT)
    getattr(body, "body", body)(rank, world_size, *args)
    dist.destroy_process_group()
