# Owner(s): ["oncall: distributed"]
"""The processes that write checkpoints while training goes on. Threads stand for them
here, so that their own code is tested, too.
"""

import gc
import os
import sys
import tempfile
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint._experimental import checkpoint_process
from torch.distributed.checkpoint._experimental.checkpoint_writer import (
    CheckpointWriter,
    CheckpointWriterConfig,
)
from torch.distributed.checkpoint._experimental.types import RankInfo
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.utils.distributed import get_free_port

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class InThread(threading.Thread):
    """Has the interface of a process."""

    exitcode, pid = 0, os.getpid()

    def __init__(self, target, args, daemon):
        def copied(arg):  # because the parent closes it
            end = isinstance(arg, Connection)
            return Connection(os.dup(arg.fileno())) if end else arg

        args = tuple(map(copied, args))
        super().__init__(target=target, args=args, daemon=daemon)


def spawn(fn, args, nprocs, join, daemon):
    thread = InThread(fn, (0, *args), daemon)
    thread.start()

    def wait(timeout):
        thread.join(timeout)
        return not thread.is_alive()

    return SimpleNamespace(processes=[thread], join=wait)


class TestAsyncProcessExecutor(TestCase):
    def setUp(self):
        super().setUp()
        context = SimpleNamespace(Pipe=Pipe, Process=InThread)
        for patch in (
            mock.patch.dict(os.environ),
            mock.patch.object(executor.mp, "get_context", return_value=context),
            mock.patch.object(executor, "_init_logger"),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(gc.enable)
        self.addCleanup(gc.unfreeze)
        gc.unfreeze()  # of a fork

    def _info(self, **changes):
        found = {"local_rank": 0, "global_rank": 0, "world_size": 1}
        found |= {"tcp_store_master_addr": "localhost", "use_prefix_store": False}
        found |= {"tcp_store_master_port": get_free_port()}
        found |= {"disable_automatic_gc": False, "disable_manual_gc": False}
        return SimpleNamespace(**found | changes)

    def test_requests_of_a_trainer(self):
        """The process writes each state or answers with the error, then serves the
        next. It has its own group, and collects garbage as configured.
        """
        for prefix, automatic, manual in ((0, 1, 1), (1, 0, 1), (0, 0, 0)):
            info = self._info(
                use_prefix_store=prefix,
                disable_automatic_gc=not automatic,
                disable_manual_gc=not manual,
            )
            if prefix:
                place = info.tcp_store_master_addr, info.tcp_store_master_port
                store = dist.TCPStore(*place, is_master=True, wait_for_workers=False)
            process = executor._AsyncCheckpointProcess(info)
            self.assertTrue(dist.is_initialized(), "group of the process")
            self.assertEqual(os.environ["MASTER_PORT"], f"{info.tcp_store_master_port}")
            with (
                tempfile.TemporaryDirectory() as folder,
                mock.patch.object(executor, "_CHECKPOINT_PROCESS", process),
            ):
                self._save_in(folder)
            self.assertEqual(gc.isenabled(), bool(automatic), "automatic collection")
            frozen = gc.get_freeze_count() > 0
            self.assertEqual(frozen, not automatic and bool(manual), "frozen objects")
            gc.enable()
            gc.unfreeze()
            process.__del__()
            self.assertFalse(process._save_process.is_alive(), "ends as told")
            self.assertFalse(dist.is_initialized(), "leaves its group")
            with self.assertRaisesRegex(RuntimeError, "process is dead. Exit code: 0"):
                process._wait_for_response()
            store = None  # noqa: F841  # ends the server

    def _save(self, state, **options):
        made = executor._ProcessBasedAsyncCheckpointExecutor()
        return made.execute_save(state, **options).result()

    def _save_in(self, folder):
        for step in range(2):
            path, staged = os.path.join(folder, f"{step}"), Future()
            staged.set_result({"nested": {"step": step}})
            saved = self._save(staged, checkpoint_id=path)
            self.assertEqual([*saved.state_dict_metadata], ["nested.step"])
            writer = dcp.FileSystemWriter(path, overwrite=False)
            with self.assertRaisesRegex(CheckpointException, "already exists"):
                self._save({"step": 7}, storage_writer=writer)
            found = {"nested": {"step": None}}
            dcp.load(found, checkpoint_id=path, no_dist=True)
            self.assertEqual(found, {"nested": {"step": step}})
        path, flat = os.path.join(folder, "alone"), {"flatten_state_dict": False}
        more = {"planner": dcp.DefaultSavePlanner(**flat), "use_collectives": False}
        saved = self._save({"nested": {"step": 3}}, checkpoint_id=path, **more)
        self.assertEqual([*saved.state_dict_metadata], ["nested"])
        self.assertIn("__0.metadata", os.listdir(path))


class TestCheckpointProcess(TestCase):
    def _process(self, called, **changes):
        made = {
            "rank_info": RankInfo(global_rank=3, global_world_size=4),
            "config": checkpoint_process.CheckpointProcessConfig(10, 10),
            "subprocess_init_fn": called.append,
            "subprocess_init_args": ("started",),
            "checkpoint_writer_init_fn": CheckpointWriter,
            "checkpoint_writer_init_args": {"config": CheckpointWriterConfig()},
        } | changes
        with mock.patch.object(checkpoint_process.mp, "spawn", spawn):
            process = checkpoint_process.CheckpointProcess(**made)
            process.process_creation_future.exception()
        return process

    def test_checkpoint_write(self):
        """The process writes states, and futures of them, to files of its rank. An
        error ends it.
        """
        called, later = [], Future()
        process = self._process(called)
        self.assertEqual(called, ["started"])
        with tempfile.TemporaryDirectory() as folder:
            later.set_result({"step": torch.ones(2)})
            paths = [os.path.join(folder, name) for name in "ab"]
            for path, state in zip(paths, ({"step": 1}, later), strict=True):
                process.write(state, path).result()
                (name,) = os.listdir(path)
                self.assertEqual(name, "checkpoint_3.pt")
                expected = state if isinstance(state, dict) else state.result()
                self.assertEqual(torch.load(os.path.join(path, name)), expected)
            with self.assertRaisesRegex(RuntimeError, "(FileExists|NotADir).*Error"):
                process.write({}, os.path.join(paths[0], name)).result()
            with self.assertRaisesRegex(RuntimeError, "terminated unexpectedly"):
                process.write({}, paths[0]).result()
        process.close()

    def test_close(self):
        """Closing waits for the running write and for the end of the process."""
        process = self._process([])
        with tempfile.TemporaryDirectory() as folder:
            written = process.write({"step": 1}, folder)
            process.close()
            self.assertTrue(written.done() or written.cancelled())
        (thread,) = process.process.processes
        thread.join(10)
        self.assertFalse(thread.is_alive())


if __name__ == "__main__":
    run_tests()
