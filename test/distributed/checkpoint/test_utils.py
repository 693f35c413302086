# Owner(s): ["oncall: distributed"]
"""Views of files, the ways to say where a checkpoint is, and old names of calls."""

import io
import os
import pickle
import sys
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import _version, logger
from torch.distributed.checkpoint._checkpointer import _Checkpointer
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict_from_keys,
    load_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.checkpoint.utils import _create_file_view

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Shifted(StreamTransformExtension):
    """Adds to each byte, modulo 256."""

    by = 1

    @classmethod
    def registry_name(cls):
        return f"stream.shift_{cls.by}"

    @classmethod
    def from_descriptor(cls, version):
        if version != "1":
            raise ValueError(f"not written yet: {version}")
        return cls()

    def get_descriptor(self):
        return f"{self.registry_name()}/1"

    def transform_to(self, output):
        shifted = mock.Mock(wraps=output)
        shifted.write = lambda data: output.write(self._add(data, self.by))
        shifted.close = output.close
        return shifted

    def transform_from(self, input):
        found = mock.Mock(seekable=lambda: self.by > 1)
        read = io.BytesIO(self._add(input.read(-1), -self.by))
        found.read, found.seek, found.tell = read.read, read.seek, read.tell
        found.readinto, found.readline = read.readinto, read.readline
        return found

    def _add(self, data, by):
        return bytes((each + by) % 256 for each in bytes(data))


class More(Shifted):
    by = 2


class TestReaderView(TestCase):
    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(0, 9),
        st.integers(1, 9),
        st.lists(st.tuples(st.sampled_from("rish"), st.integers(0, 9)), max_size=6),
    )
    def test_part_of_a_file(self, offset, size, steps):
        """A view reads as a file with only these bytes."""
        data = bytes(range(20))
        view = _create_file_view(io.BytesIO(data), offset, size)
        part = io.BytesIO(data[offset : offset + size])
        for step, count in steps:
            if step == "r":
                self.assertEqual(view.read(count), part.read(count))
            elif step == "i":
                into, expected = bytearray(count), bytearray(count)
                self.assertEqual(view.readinto(into), part.readinto(expected))
                self.assertEqual(into, expected)
            elif step == "s":
                view.seek(min(count, size))
                part.seek(min(count, size))
            else:
                view.seek(0, os.SEEK_END if count % 2 else os.SEEK_CUR)
                part.seek(0, os.SEEK_END if count % 2 else os.SEEK_CUR)
            self.assertEqual(view.tell(), part.tell(), f"after {step} {count}")
        self.assertEqual(view.read(), part.read(), "the rest")
        self.assertTrue(view.seekable() and view.readable())


class TestSaveAndLoadAPI(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.state = {
            "a": {"w": torch.arange(3.0), "l": [torch.ones(2), {"x": 3}]},
            "b": torch.arange(4.0).view(2, 2).t(),
            "n": [5, "text"],
        }

    def _empty(self):
        empty = {"w": torch.zeros(3), "l": [torch.zeros(2), {"x": None}]}
        return {"a": empty, "b": torch.zeros(2, 2), "n": None}

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

    def test_streams_are_transformed(self):
        """A reader needs to know each extension of the writer."""
        # Torch 2.13 undoes several in the wrong order, so these commute.
        registry = ExtensionRegistry()
        for order in ((), (Shifted(),), (More(), Shifted())):
            writer = dcp.FileSystemWriter(self.folder, _extensions=order)
            saved = dcp.save(self.state, storage_writer=writer)
            names = [each.get_descriptor() for each in order]
            for place in saved.storage_data.values():
                found = place.transform_descriptors or ()
                self.assertEqual(sorted(found), sorted(names), "names of extensions")
            reader = dcp.FileSystemReader(self.folder, _extension_registry=registry)
            for each in order[:1]:
                with self.assertRaisesRegex(CheckpointException, "Unknown extension"):
                    dcp.load(self._empty(), storage_reader=reader)
                registry.register(type(each))
            found = self._empty()
            dcp.load(found, storage_reader=reader)
            self.assertEqual(found, self.state, f"{order}")
        for wrong, text in (
            ("stream.shift_1/2", "not written yet: 2"),
            ("stream.zstd/2", "Unknown extension version='2'"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                registry.from_descriptor_list([wrong])

    def test_log(self):
        """The log has a start and an end of each call, or its error."""
        events = []
        with mock.patch.object(
            logger._dcp_logger, "debug", lambda event: events.append({**event})
        ):
            dcp.save(self.state, checkpoint_id=self.folder)
        ours = [each for each in events if each["func_name"] == "save"]
        self.assertEqual([each["event"] for each in ours], ["start", "end"])
        self.assertEqual(ours[0]["checkpoint_id"], self.folder)
        self.assertEqual(ours[1]["times_spent"] > 0, True)
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
