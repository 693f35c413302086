# Owner(s): ["oncall: distributed"]
"""The ways to say where a checkpoint is, what calls of a save and a load do, their log,
and old names of calls.
"""

import copy
import logging
import os
import pickle
import sys
import tempfile
import threading
from concurrent import futures
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    _checkpointer,
    _version,
    logger,
    state_dict_saver,
)
from torch.distributed.checkpoint._checkpointer import _Checkpointer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict_from_keys,
    load_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save_state_dict

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Late:
    """Ends writes and reads a moment after they return, or with ``error``."""

    error = None

    def _late(self, run):
        done = torch.futures.Future()

        def finish():
            if self.error is None:
                done.set_result(run().value())
            else:
                done.set_exception(self.error)

        threading.Timer(0.05, finish).start()
        return done

    def write_data(self, *args):
        return self._late(lambda: super(Late, self).write_data(*args))

    def read_data(self, *args):
        return self._late(lambda: super(Late, self).read_data(*args))


class LateWriter(Late, dcp.FileSystemWriter):
    pass


class LateReader(Late, dcp.FileSystemReader):
    pass


class Counter:
    """Has a state, as a model has."""

    def __init__(self, count):
        self.count = torch.tensor([count])

    def state_dict(self):
        return {"count": self.count, "text": "of a counter"}

    def load_state_dict(self, state):
        self.loaded = state


class TestSaveAndLoadAPI(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.state = {
            "a": {"w": torch.arange(3.0), "l": [torch.ones(2), {"x": 3}]},
            "b": torch.arange(4.0).view(2, 2).t(),
            "h": torch.ones(3, dtype=torch.bfloat16),
            "n": [5, "text"],
        }

    def _empty(self):
        empty = {"w": torch.zeros(3), "l": [torch.zeros(2), {"x": None}]}
        half = torch.zeros(3, dtype=torch.bfloat16)
        return {"a": empty, "b": torch.zeros(2, 2), "h": half, "n": None}

    def test_places(self):
        """A place is a text, a path or an address; a save replaces what is there."""
        places = [os.path.join(self.folder, "new", name) for name in "123"]
        for place in (places[0], Path(places[1]), f"file://{places[2]}", places[0]):
            dcp.save(self.state, checkpoint_id=place)
            found = self._empty()
            dcp.load(found, checkpoint_id=place)
            self.assertEqual(found, self.state, f"{place}")
            reader = dcp.FileSystemReader(f"{place}".removeprefix("file://"))
            meta = reader.read_metadata().storage_meta
            found = f"{meta.checkpoint_id}", meta.load_id
            self.assertEqual(found, (f"{place}", reader.load_id), "origin")
        for place, text in (
            (None, "must be specified"),
            ("no://where", "Cannot detect"),
        ):
            with self.assertRaisesRegex(RuntimeError, text):
                dcp.save(self.state, checkpoint_id=place)
        self.assertEqual(sorted(os.listdir(places[0])), [".metadata", "__0_0.distcp"])

    def test_new_place_of_a_writer(self):
        """An address replaces a writer's and a reader's own. A save has an id, which a
        new address changes; so does a load, which forgets what was read.
        """
        paths = [os.path.join(self.folder, name) for name in "ab"]
        writer, reader = (
            made(paths[0]) for made in (dcp.FileSystemWriter, dcp.FileSystemReader)
        )
        saves, loads = [], [reader.load_id]
        for path in (None, None, *paths):
            to, of = ({"checkpoint_id": path},) * 2 if path else ({}, {})
            saved = dcp.save(self.state, storage_writer=writer, **to)
            saves.append(saved.storage_meta.save_id)
            self.assertEqual(saved.version, "1.0.0")
            self.assertIn(".metadata", os.listdir(path or paths[0]))
            found = self._empty()
            dcp.load(found, storage_reader=reader, **of)
            self.assertEqual(found, self.state)
            loads.append(reader.load_id)
            same = f"{writer.checkpoint_id}", f"{reader.checkpoint_id}"
            self.assertEqual(same, (path or paths[0],) * 2)
        self.assertEqual(len({*saves}), 3, "ids of saves")
        self.assertEqual(len({*loads}), 3, "ids of loads")
        self.assertEqual(len(reader.storage_data), len(saved.storage_data))
        reader.reset()
        self.assertEqual(reader.storage_data, {})
        self.assertEqual(f"{reader.path}", paths[1])
        for each in (FutureWarning, UserWarning):
            with self.assertWarns(each):
                save_state_dict(self.state, writer, no_dist=True)
        self.assertNotIn(writer.save_id, saves)
        with self.assertWarns(FutureWarning):
            load_state_dict(self._empty(), reader, no_dist=True)
        self.assertNotIn(reader.load_id, loads)

    def test_objects_with_a_state(self):
        """Their state is saved, and loaded into them."""
        for index, save in enumerate((dcp.save, dcp.async_save)):
            path = os.path.join(self.folder, f"{index}")
            saved = save({"c": Counter(3), "n": 5}, checkpoint_id=path)
            saved = saved.result() if index else saved
            names = ["c.count", "c.text", "n"]
            self.assertEqual(sorted(saved.state_dict_metadata), names)
            into = {"c": Counter(0), "n": None}
            counter = into["c"]
            dcp.load(into, checkpoint_id=path)
            self.assertIs(into["c"], counter)
            expected = {"count": torch.tensor([3]), "text": "of a counter"}
            self.assertEqual((counter.loaded, into["n"]), (expected, 5))
            self.assertIs(counter.loaded["count"], counter.count, "read in place")
        into = {"c": Counter(0), "n": None, "z": 5}
        with (
            mock.patch.object(
                into["c"],
                "state_dict",
                lambda: into.pop("z") and {"count": torch.ones(1)},
            ),
            mock.patch.object(into["c"], "load_state_dict", lambda _: into.pop("n")),
        ):
            dcp.load(into, checkpoint_id=path)
        self.assertEqual([*into], ["c"], "removed by the object meanwhile")

    def test_planners_without_a_result(self):
        """A planner that returns nothing for a rank, or of the whole, is refused."""

        class Save(dcp.DefaultSavePlanner):
            def create_global_plan(self, plans):
                return super().create_global_plan(plans)[0], None

        class Load(dcp.DefaultLoadPlanner):
            def create_global_plan(self, plans):
                return [None] * len(plans)

        dcp.save(self.state, checkpoint_id=self.folder)
        for call, planner, text in (
            (dcp.save, Save(), "global_metadata is None"),
            (dcp.load, Load(), "central_plan is None"),
        ):
            with self.assertRaisesRegex(CheckpointException, text):
                call(self.state, checkpoint_id=self.folder, planner=planner)

    def test_calls_wait_for_writes_and_reads(self):
        """Those of a storage that goes on in the background, and raise their error."""
        writer, reader = LateWriter(self.folder), LateReader(self.folder)
        saved = dcp.save(self.state, storage_writer=writer)
        self.assertEqual(len(saved.storage_data), len(saved.state_dict_metadata))
        found = self._empty()
        dcp.load(found, storage_reader=reader)
        self.assertEqual(found, self.state)
        for each, call, name in (
            (writer, dcp.save, "storage_writer"),
            (reader, dcp.load, "storage_reader"),
        ):
            each.error = OSError("late")
            with self.assertRaisesRegex(CheckpointException, "late"):
                call(self._empty(), **{name: each})

    def test_existing_checkpoint(self):
        """A save warns that it replaces one, or refuses to."""
        for options in ({}, {"use_collectives": False}):
            path = os.path.join(self.folder, f"{len(options)}")
            dcp.save(self.state, checkpoint_id=path, no_dist=True, **options)
            with self.assertWarnsRegex(UserWarning, "Detected an existing checkpoint"):
                dcp.save(self.state, checkpoint_id=path, no_dist=True, **options)
            writer = dcp.FileSystemWriter(path, overwrite=False)
            with self.assertRaisesRegex(
                (CheckpointException, RuntimeError), "already exists and self.overwrite"
            ):
                dcp.save(self.state, storage_writer=writer, no_dist=True, **options)

    def test_options_of_calls(self):
        """A checkpointer passes all that it was given, and an asynchronous save too."""
        reader, group, planners = dcp.FileSystemReader(self.folder), object(), (1, 2)
        writer = dcp.FileSystemWriter(self.folder)
        made = _Checkpointer(
            writer, reader, process_group=group, coordinator_rank=2, no_dist=True,
            load_planner=planners[0], save_planner=planners[1],
        )  # fmt: skip
        # Torch 2.13's ``save`` does not accept the rank of a coordinator.
        with mock.patch.object(_checkpointer.saver, "save") as save:
            self.assertIs(made.save(self.state), save.return_value)
        options = {"process_group": group, "planner": planners[1]}
        save.assert_called_once_with(
            self.state, writer, coordinator_rank=2, no_dist=True, **options
        )
        with (
            mock.patch.object(_checkpointer.saver, "async_save") as save,
            self.assertRaisesRegex(AssertionError, "should be a Future"),
        ):
            made.async_save(self.state)
        save.assert_called_once_with(self.state, storage_writer=writer, **options)
        with mock.patch.object(_checkpointer.loader, "load") as load:
            made.load(self.state)
        options["planner"] = planners[0]
        load.assert_called_once_with(self.state, storage_reader=reader, **options)
        options |= {"checkpoint_id": "a", "storage_writer": writer, "no_dist": True}
        options["use_collectives"] = False
        for kind in state_dict_saver.AsyncCheckpointerType:
            name = f"_{kind.value.title()}BasedAsyncCheckpointExecutor"
            with mock.patch.object(state_dict_saver, name) as made:
                found = dcp.async_save(
                    self.state, async_checkpointer_type=kind, **options
                )
            self.assertIs(found, made.return_value.execute_save.return_value)
            call = made.return_value.execute_save.call_args
            self.assertEqual(call.args, (self.state,), "a copy")
            self.assertIsNot(call.args[0]["a"]["w"], self.state["a"]["w"])
            self.assertEqual({*call.kwargs}, {*options})
            for key, value in call.kwargs.items():
                self.assertIs(value, options[key], key)

    def test_stager_of_a_save(self):
        """A save closes the stager that it made once it ends or fails, waits for a
        stager that asks for it, and says when one in the background is done.
        """
        options = state_dict_saver.StagingOptions(*[False] * 4)
        for error in (None, KeyError("of the stager")):
            closed = threading.Event()
            with mock.patch.object(state_dict_saver, "DefaultStager") as made:
                stager = made.return_value
                stager.stage.side_effect = error or copy.deepcopy
                stager.close.side_effect = closed.set
                if error:
                    with self.assertRaisesRegex(KeyError, "of the stager"):
                        dcp.async_save(self.state, checkpoint_id=self.folder)
                else:
                    dcp.async_save(self.state, checkpoint_id=self.folder).result()
            made.assert_called_once_with(options)
            self.assertTrue(closed.wait(30), "closed")
            stager.close.assert_called_once_with()
            self.assertEqual(stager.synchronize_staging.call_count, int(not error))
        for waits in (False, True):
            stager = mock.Mock(should_synchronize_after_execute=waits)
            stager.stage.side_effect = copy.deepcopy
            to = {"checkpoint_id": self.folder, "async_stager": stager}
            dcp.async_save(self.state, **to).result()
            self.assertEqual(stager.synchronize_staging.call_count, int(waits))
            stager.close.assert_not_called()
        for error in (None, KeyError("late")):
            staged = futures.Future()
            stager.stage.side_effect = [staged]
            response = dcp.async_save(self.state, **to)
            parts = response.staging_completion, response.upload_completion
            self.assertFalse(any(each.done() for each in parts))
            if error:
                staged.set_exception(error)
                for each in parts:
                    with self.assertRaisesRegex(KeyError, "late"):
                        each.result()
            else:
                staged.set_result(self.state)
                self.assertIsNone(parts[0].result())
                names = parts[1].result().state_dict_metadata
                self.assertEqual(len(names), 6)

    def test_old_calls(self):
        """Deprecated calls work as their successors, with a warning."""
        writer = dcp.FileSystemWriter(os.path.join(self.folder, "a"))
        reader = dcp.FileSystemReader(writer.path)
        checkpointer, found = _Checkpointer(writer, reader), self._empty()
        checkpointer.async_save(self.state).result()
        checkpointer.load(found)
        self.assertEqual(found, self.state, "checkpointer")
        for save, load in (
            (dcp.save, dcp.load),
            (
                lambda *args: save_state_dict(*args, no_dist=True),
                lambda *args: load_state_dict(*args, no_dist=True),
            ),
        ):
            self.state["a"]["w"] += 1
            found = self._empty()
            text = "argument order of save|`save` instead"
            with self.assertWarnsRegex((UserWarning, FutureWarning), text):
                save(self.state, writer)
            with self.assertWarnsRegex((UserWarning, FutureWarning), "load"):
                load(found, reader)
            self.assertEqual(found, self.state, "old order")
        for call, name, each in (
            (dcp.save, "storage_writer", writer),
            (dcp.load, "storage_reader", reader),
        ):
            with self.assertRaisesRegex(AssertionError, f"{name} in kwargs"):
                call(self.state, each, **{name: each})

    def test_parts_by_name(self):
        """A load by name gets all that is below the names, and nothing else."""
        nested = self.state["a"]
        dcp.save(self.state, checkpoint_id=self.folder)
        for names, expected in (
            (None, self.state),
            ("a", {"a": nested}),
            ("a.l", {"a": {"l": nested["l"]}}),
            ({"a.w", "n"}, {"a": {"w": nested["w"]}, "n": self.state["n"]}),
            ({"a.l"}, {"a": {"l": nested["l"]}}),
            ({"b", "none"}, {"b": self.state["b"]}),
        ):
            found = _load_state_dict_from_keys(names, checkpoint_id=self.folder)
            self.assertEqual(found, expected, f"{names}")

    def test_without_nesting(self):
        """Planners may take values as they are, at once or in the background, and see
        each tensor that was read.
        """
        read, options = [], {"flatten_state_dict": False}
        options["flatten_sharded_tensors"] = False

        class Noting(dcp.DefaultLoadPlanner):
            def commit_tensor(self, read_item, tensor):
                read.append(read_item.dest_index.fqn)

        state = {"w": self.state["b"], "d": {"x": [1, torch.ones(2)]}}
        for index, save in enumerate((dcp.save, dcp.async_save)):
            path, planner = os.path.join(self.folder, f"{index}"), Noting(**options)
            more = {"planner": dcp.DefaultSavePlanner(**options)}
            more |= {"use_collectives": False, "no_dist": True}
            writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
            saved = save(state, storage_writer=writer, **more)
            saved = saved.result() if index else saved
            self.assertEqual(sorted(saved.state_dict_metadata), ["d", "w"])
            files = ["__0.metadata", "__0_0.distcp", "__0_1.distcp"]
            self.assertEqual(sorted(os.listdir(path)), files)
            found = {"w": torch.zeros(2, 2), "d": None}
            reader = dcp.FileSystemReader(path)
            with mock.patch.object(reader, "read_metadata") as read_metadata:
                read_metadata.return_value = saved
                dcp.load(found, storage_reader=reader, planner=planner)
            self.assertEqual(found, state)
        self.assertEqual(read, ["w"] * 2, "tensors read")

    def test_properties_are_pickled(self):
        formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
        for each in formats:
            saved = TensorProperties(torch.half, torch.strided, True, each, True)
            self.assertEqual(pickle.loads(pickle.dumps(saved)), saved, f"{each}")
        with self.assertRaisesRegex(RuntimeError, "Invalid torch.memory_format"):
            pickle.dumps(TensorProperties(memory_format=torch.channels_last_3d))

    def test_with_compatibility(self):
        """Torch 2.3 kept dictionaries without tensors whole; they still load."""
        # Of each kind: kept whole, or not.
        self.state |= {"d": {"e": {"f": 1}, "g": [2, [3]]}, "h": [{"i": 4}, {"j": [5]}]}
        self.state |= {"k": {"t": torch.ones(1), "u": {"v": 6}}, "o": [[torch.ones(3)]]}
        with mock.patch.object(_version, "_derived_version", "2_3"):
            dcp.save(self.state, checkpoint_id=self.folder)
        names = dcp.FileSystemReader(self.folder).read_metadata().state_dict_metadata
        old = ["a.l.0", "a.l.1", "a.w", "b", "d", "h", "k.t", "k.u", "n", "o.0.0"]
        self.assertEqual(sorted(names), old)
        found = self._empty() | {
            "d": {"e": {"f": 0}, "g": 0},
            "h": [{"i": 0}, {"j": 0}],
        }
        found |= {"k": {"t": torch.zeros(1), "u": {"v": 0}}, "o": [[torch.zeros(3)]]}
        dcp.load(found, checkpoint_id=self.folder)
        self.assertEqual(found, self.state)
        self.assertIsNone(_version._derived_version)

    def test_log(self):
        """The log has a start and an end of each call and its steps, or its error."""
        events, place = [], os.path.join(self.folder, "new")
        with mock.patch.object(
            logger._dcp_logger, "debug", lambda event: events.append({**event})
        ):
            dcp.save(
                self.state,
                checkpoint_id=self.folder,
                storage_writer=dcp.FileSystemWriter(place),
                planner=dcp.DefaultSavePlanner(),
            )
        ours = [each for each in events if each["func_name"] == "save"]
        self.assertEqual([each["event"] for each in ours], ["start", "end"])
        self.assertEqual(ours[0]["uuid"], ours[1]["uuid"])
        found = {name: ours[0][name] for name in ("storage_writer", "planner")}
        expected = {"storage_writer": "FileSystemWriter"}
        self.assertEqual(found, expected | {"planner": "DefaultSavePlanner"})
        self.assertEqual(ours[0]["checkpoint_id"], self.folder)
        self.assertEqual(ours[1]["times_spent"] > 0, True)
        self.assertGreaterEqual(ours[1]["time"] - ours[0]["time"], 0)
        steps = {each["func_name"]: each for each in events}
        for name in ("local_step", "global_step", "write_data", "finish_checkpoint"):
            self.assertEqual(steps[name]["event"], "end", name)
            self.assertEqual(steps[name]["checkpoint_id"], self.folder, name)
            self.assertFalse(steps[name]["log_exceptions"], name)
        self.assertTrue(steps["save"]["log_exceptions"])
        self.assertIn("_stateful_to_state_dict.a", steps)
        self.assertEqual(len({each["uuid"] for each in events}), len(events) // 2)
        own = logging.Logger("own")
        with mock.patch.object(logger, "logger", own):
            logger._init_logger(3)
        (handler,) = own.handlers
        self.assertEqual((own.level, handler.level), (logging.INFO,) * 2)
        record = logging.LogRecord("own", logging.INFO, "", 0, "text", (), None)
        self.assertRegex(handler.format(record), r"^\[3\] .* - own - INFO - text$")
        events.clear()
        with (
            mock.patch.object(logger._dcp_logger, "error", events.append),
            self.assertRaises(CheckpointException),
        ):
            reader = dcp.FileSystemReader(os.path.join(self.folder, "none"))
            dcp.load(
                self.state, storage_reader=reader, planner=dcp.DefaultLoadPlanner()
            )
        found = {name: events[-1][name] for name in ("func_name", "event", "planner")}
        expected = {"func_name": "load", "event": "exception"}
        self.assertEqual(found, expected | {"planner": "DefaultLoadPlanner"})
        self.assertEqual(events[-1]["checkpoint_id"], f"{reader.path}")
        self.assertEqual(events[-1]["storage_reader"], "FileSystemReader")
        self.assertIn("No such file", events[-1]["error"])


if __name__ == "__main__":
    run_tests()
