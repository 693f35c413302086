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
from torch.distributed.checkpoint._experimental import (
    barriers,
    builder,
    checkpoint_process,
    checkpoint_reader,
    config,
    staging,
)
from torch.distributed.checkpoint._experimental.checkpoint_writer import (
    CheckpointWriter,
    CheckpointWriterConfig,
    WriterHook,
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
        found = {"local_rank": 3, "global_rank": 0, "world_size": 1}
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
            names = "MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "RANK", "WORLD_SIZE"
            found = [os.environ[name] for name in names]
            port = f"{info.tcp_store_master_port}"
            self.assertEqual(found, [port, "localhost", "3", "0", "1"])
            self.assertEqual(os.environ["TORCHELASTIC_USE_AGENT_STORE"], "False")
            executor._init_logger.assert_called_with(0)
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
            with self.assertRaisesRegex(RuntimeError, "Timed out after 0.01s"):
                process._wait_for_response(timeout=0.01)
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
        path = os.path.join(folder, "without a group")
        with mock.patch.object(dist, "gather_object", side_effect=AssertionError):
            self._save({"step": 4}, checkpoint_id=path, no_dist=True)
        self.assertIn(".metadata", os.listdir(path))

    def test_process_that_fails(self):
        """Its error, its end and an answer that is none come out of the save, and its
        group is left.
        """
        info, made = self._info(), executor._AsyncCheckpointProcess
        for error in (ValueError("no group"), KeyboardInterrupt("stopped")):
            # Torch 2.13 loses the error of a process that ends before it is asked.
            with (
                mock.patch.object(InThread, "is_alive", return_value=True),
                mock.patch.object(dist, "init_process_group", side_effect=error),
                self.assertRaisesRegex(type(error), f"{error}"),
            ):
                made(info)
        with (
            mock.patch.object(made, "_wait_for_response", return_value="none"),
            self.assertRaisesRegex(AssertionError, "Expected INIT_COMPLETE"),
        ):
            made(self._info())
        gc.collect()  # ends that process
        process = made(self._info())
        with (
            mock.patch.object(made, "_execute_save", return_value=3),
            self.assertRaisesRegex(AssertionError, "Expected Metadata .* got .*int"),
        ):
            process.save({})
        with mock.patch.object(threading, "excepthook") as hook:
            process._send("no request")
            with self.assertRaisesRegex(RuntimeError, "process is dead. Exit code: 0"):
                process._wait_for_response()
            process._save_process.join()
        (found,) = hook.call_args.args
        self.assertIn("Expected _AsyncCheckpointRequest", f"{found.exc_value}")
        self.assertFalse(dist.is_initialized(), "leaves its group")

    def test_process_that_does_not_end(self):
        """It is asked to end, and ended if it does not, or cannot be asked."""
        ask = executor._CheckpointSaveProcessControlOpts.TERMINATE
        for alive, sent, ended in (
            ((False, False), None, False),
            ((True, False), None, False),
            ((True, True), None, True),
            ((True, True), OSError("closed"), True),
        ):
            process = executor._AsyncCheckpointProcess.__new__(
                executor._AsyncCheckpointProcess
            )
            process._save_process, process._process_pipe = mock.Mock(), mock.Mock()
            process._save_process.is_alive.side_effect = [*alive, False]
            process._process_pipe.send.side_effect = sent
            if sent:
                with self.assertRaisesRegex(OSError, "closed"):
                    process.__del__()
            else:
                process.__del__()
            calls = process._process_pipe.send.call_args_list
            self.assertEqual([call.args[0] for call in calls], [ask] * alive[0])
            process._save_process.is_alive.side_effect = [False]
            waits = [call.kwargs for call in process._save_process.join.call_args_list]
            self.assertEqual(waits, [{"timeout": 5}] * (alive[0] and not sent))
            calls = process._save_process.terminate.call_count
            self.assertEqual(calls, int(ended), f"{alive}, {sent}")

    def test_first_save_starts_the_process(self):
        """Of the ranks of the group, and later ones use it."""
        group = SimpleNamespace()
        with (
            mock.patch.object(executor, "_CHECKPOINT_PROCESS", None),
            mock.patch.object(executor, "_ProcessGroupInitInfo") as info,
            mock.patch.object(executor, "_AsyncCheckpointProcess") as made,
        ):
            for _ in range(2):
                found = self._save({"step": 1}, process_group=group)
                self.assertIs(found, made.return_value.save.return_value)
        info.assert_called_once_with(group)
        made.assert_called_once_with(pg_init_info=info.return_value)


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

    def test_process_that_does_not_start(self):
        """A write raises the error of the start, or that it took too long."""
        called, event = [], threading.Event()
        # The same is true of this process.
        lost = "|unexpectedly"
        limits = checkpoint_process.CheckpointProcessConfig(0.05, 10)
        own = {"rank_info": RankInfo(1, 2), "config": CheckpointWriterConfig()}
        for changes, error, text in (
            ({"config": limits, "subprocess_init_fn": event.wait,
              "subprocess_init_args": ()}, TimeoutError, "Timed out after 0.05s"),
            ({"subprocess_init_fn": lambda *_: 1 / 0}, RuntimeError, f"zero{lost}"),
            ({"checkpoint_writer_init_args": {}}, RuntimeError, f"'config'{lost}"),
            ({"checkpoint_writer_init_args": own}, None, ""),
        ):  # fmt: skip
            process = self._process(called, **changes)
            with tempfile.TemporaryDirectory() as folder:
                if error:
                    with self.assertRaisesRegex(error, text):
                        process.write({}, folder).result()
                else:
                    process.write({}, folder).result()
                    self.assertEqual(os.listdir(folder), ["checkpoint_1.pt"])
            event.set()
            process.close()
        self.assertEqual(os.environ["MKL_SERVICE_FORCE_INTEL"], "GNU")
        with self.assertRaisesRegex(AssertionError, "only one checkpointer"):
            process._subprocess(1, RankInfo(0, 1), None, None, (), None, {})

    def test_process_that_does_not_end(self):
        """Closing asks the process to end, kills one that does not end in time, and
        raises its failure. One that ended already cannot be asked.
        """
        failure = KeyError("its failure")
        for ended, kills, gone in ((1, 0, 0), (0, 1, 0), (failure, 0, 0), (1, 0, 1)):
            process = self._process([])
            (thread,) = process.process.processes
            if gone:
                process._send("none", {})
                with self.assertRaisesRegex(RuntimeError, "Unknown request type: none"):
                    process._recv()
                thread.join(10)
            process.process = mock.Mock(processes=[mock.Mock()])
            process.process.join.side_effect = [ended]
            if ended is failure:
                with self.assertRaisesRegex(KeyError, "its failure"):
                    process.close()
            else:
                process.close()
            process.process.join.assert_called_once_with(timeout=10)
            self.assertEqual(process.process.processes[0].kill.call_count, kills)
            thread.join(10)
            self.assertFalse(thread.is_alive(), "was asked to end")

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


class Steps(WriterHook):
    """Notes what a writer does, and what it is told."""

    def __init__(self, steps, folder):
        self.steps, self.folder = steps, folder

    def pre_commit(self, path, **kwargs):
        self.steps += ["before", kwargs, *os.listdir(path)]

    def post_commit(self, path, **kwargs):
        self.steps += ["after", kwargs]


class TestBuilders(TestCase):
    def test_synchronous(self):
        """A writer waits at its barrier between the steps of the hook. A load moves
        what it reads, all or parts, and tells what is missing.
        """
        steps, made = [], None

        class Noting(barriers.Barrier):
            barrier_type = "noting"

            def __init__(self, name):
                self.name = name

            def execute_barrier(self):
                steps.append(self.name)

        with (
            mock.patch.dict(barriers.BARRIER_REGISTRY),
            tempfile.TemporaryDirectory() as folder,
        ):
            barriers.register_barrier(Noting)
            options = {"barrier_config": barriers.BarrierConfig("noting", {"name": 7})}
            made = builder.make_sync_checkpointer(
                config.CheckpointerConfig(**options),
                RankInfo(2, 3),
                Steps(steps, folder),
            )
            path = os.path.join(folder, "new")
            state = {"w": torch.arange(3.0), "d": {"x": 1}}
            self.assertIsNone(made.save(path, state, step=5))
            told = {"step": 5}
            expected = ["before", told, "checkpoint_2.pt", 7, "after", told]
            self.assertEqual(steps, expected)
            self._check_loads(made, path, state)
            plain = builder.make_sync_checkpointer()
            plain.save(path, state)
            names = ["checkpoint_0.pt", "checkpoint_2.pt"]
            self.assertEqual(sorted(os.listdir(path)), names, "rank without a group")
            with mock.patch.object(made._writer, "close") as close:
                made.close()
            close.assert_called_once_with()
        with self.assertRaisesRegex(AssertionError, "initialized process group"):
            barriers.create_barrier_from_config(barriers.BarrierConfig("dist_barrier"))

    def _check_loads(self, made, path, state):
        for part in (None, {"w": None}, {"w": torch.zeros(3), "d": None}):
            found = made.load(path, part)
            self.assertEqual(found, {name: state[name] for name in part or state})
            self.assertEqual(found is part, part is not None)
        for part in (None, {"w": None}):
            found = made.load(path, part, default_map_location="meta")
            self.assertTrue(found["w"].is_meta, "place of what is read")
        part = {"d": {"x": 0, "y": 0}, "z": 0}
        self.assertEqual(made.load(path, part)["d"], {"x": 1, "y": 0})
        with self.assertRaisesRegex(RuntimeError, r"missing keys: \['d.y', 'z'\]"):
            made.load(path, part, strict=True)
        made.load(path, {"d": None}, strict=True)
        with self.assertRaisesRegex(FileNotFoundError, "checkpoint_"):
            made.load(f"{path}/none")

    def test_parts_of_files(self):
        """A part has any of the names, and lists of any length. Its tensors have the
        type, size and place that the file has; any number of names may be missing.
        """
        made = builder.make_sync_checkpointer()
        base = torch.arange(6.0)
        state = {"a": base[2:4], "b": base, "l": [base[1:3], 5, {"x": 1}], "n": "text"}
        with tempfile.TemporaryDirectory() as folder:
            made.save(folder, state)
            for part in (
                {"l": []},
                {"l": [None]},
                {"l": [torch.zeros(2), None, {"x": 0}]},
                dict.fromkeys("abln"),
            ):
                found = made.load(folder, part)
                self.assertEqual(found, {name: state[name] for name in part})
            for count in (1, 10, 11):
                part = {f"{index}": index for index in range(count)}
                text = f"Missing {count} keys.*" + ("1 more" if count == 11 else "")
                with self.assertLogs(checkpoint_reader.logger, "WARNING") as logs:
                    found = made.load(folder, dict(part))
                self.assertRegex(logs.output[0], text)
                self.assertEqual(found, part)
                with self.assertRaisesRegex(RuntimeError, "missing keys"):
                    made.load(folder, part, strict=True)
            for part, text in (
                ({"a": torch.zeros(3)}, r"size=torch.Size\(\[3\]\) .* for key a"),
                ({"a": torch.zeros(2).half()}, "dtype=torch.float16 does not match"),
                ({"a": [1]}, "value a is set to .*list.*source value is .*Tensor"),
                ({"l": {"x": 1}}, "value l is set to .*dict.*source value is .*list"),
                ({"l": [None, 5, 3]}, r"value l\[2\] is set to .*int"),
            ):
                with self.assertRaisesRegex(RuntimeError, text):
                    made.load(folder, part)

    def test_asynchronous(self):
        """The parts of an asynchronous checkpointer have its options, and it raises the
        error of the write before.
        """
        called, options = [], staging.CheckpointStagerConfig(False, False, True, False)
        limits = checkpoint_process.CheckpointProcessConfig(20, 30)
        settings = {"staging_config": options, "process_config": limits}

        def start(rank_info, **kwargs):
            called.append(kwargs)
            return CheckpointWriter(CheckpointWriterConfig(), rank_info)

        with (
            mock.patch.object(checkpoint_process.mp, "spawn", spawn),
            tempfile.TemporaryDirectory() as folder,
        ):
            made = builder.make_async_checkpointer(
                config.CheckpointerConfig(**settings),
                RankInfo(2, 3),
                called.append,
                ("started",),
                start,
                {"more": 5},
            )
            state = {"w": torch.arange(3.0), "d": {"x": 1}}
            path = os.path.join(folder, "new")
            staged, written = made.save(path, state)
            self.assertIsNone(staged.result())
            state["w"] += 1
            self.assertIsNone(written.result())
            state["w"] -= 1
            self.assertEqual(called, ["started", {"more": 5}])
            self.assertEqual(os.listdir(path), ["checkpoint_2.pt"])
            self._check_loads(made, path, state)
            process = made._checkpoint_process
            self.assertIs(process._config, limits)
            failed = Future()
            failed.set_exception(KeyError("of the stager"))
            with mock.patch.object(
                made._checkpoint_stager, "stage", return_value=failed
            ):
                for each in made.save(path, state):
                    with self.assertRaisesRegex(KeyError, "of the stager"):
                        each.result()
            with self.assertRaisesRegex(KeyError, "of the stager"):
                made.save(path, state)
            with mock.patch.object(made._checkpoint_stager, "close") as close:
                made.close()
            close.assert_called_once_with()
            self.assertFalse(process.process.processes[0].is_alive())
            plain = builder.make_async_checkpointer(
                config.CheckpointerConfig(**settings)
            )
            plain.save(path, state)[1].result()
            self.assertIn("checkpoint_0.pt", os.listdir(path))
            plain.close()


if __name__ == "__main__":
    run_tests()
