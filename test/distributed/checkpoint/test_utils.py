# Owner(s): ["oncall: distributed"]
"""Views of files, the ways to say where a checkpoint is, options of writers, and old
names of calls.
"""

import copy
import io
import logging
import os
import pickle
import sys
import tempfile
import threading
import types
import zlib
from concurrent import futures
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    _checkpointer,
    _extension,
    _fsspec_filesystem,
    _version,
    filesystem,
    logger,
    state_dict_saver,
)
from torch.distributed.checkpoint._checkpointer import _Checkpointer
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import SerializationFormat
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


class Compressor:
    def __init__(self):
        self.stream = zlib.compressobj()
        self.compress = self.stream.compress

    def flush(self):
        return self.stream.flush(zlib.Z_SYNC_FLUSH)

    def stream_writer(self, output):
        return Compressed(self, output)


class Decompressor:
    def __init__(self):
        self.stream, self.needs_input = zlib.decompressobj(), True

    def decompress(self, data, size):
        found = self.stream.decompress(self.stream.unconsumed_tail + data, size)
        self.needs_input = not self.stream.unconsumed_tail
        return found

    def stream_reader(self, file):
        return io.BytesIO(zlib.decompressobj().decompress(file.read(-1)))


class Compressed(io.RawIOBase):
    def __init__(self, compressor, output):
        self.compressor, self.output = compressor, output

    def write(self, data):
        self.output.write(self.compressor.compress(data))
        return len(memoryview(data))

    def flush(self):
        self.output.write(self.compressor.flush())


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

    def test_options_of_writers(self):
        """Each is as given, alone or with the rest; files are synchronized with the
        disk if asked.
        """
        given = {
            "single_file_per_rank": False, "sync_files": False, "thread_count": 3,
            "per_thread_copy_ahead": 7, "overwrite": False, "_extensions": (Shifted(),),
            "serialization_format": SerializationFormat.SAFETENSORS,
        }  # fmt: skip
        default = {
            "single_file_per_rank": True, "sync_files": True, "thread_count": 1,
            "per_thread_copy_ahead": 10_000_000, "overwrite": True, "_extensions": (),
            "serialization_format": SerializationFormat.TORCH_SAVE,
        }  # fmt: skip
        for made in (dcp.FileSystemWriter, _fsspec_filesystem.FsspecWriter):
            for options in ({}, given, *({name: given[name]} for name in given)):
                writer = made(self.folder, **options)
                found = {name: vars(writer).get(name) for name in given}
                found["_extensions"] = writer.transforms.extensions
                self.assertEqual(found, default | options, f"{made}")
            self.assertFalse(writer.cache_staged_state_dict)
            for index, (syncs, error) in enumerate(
                ((False, None), (True, None), (True, io.UnsupportedOperation))
            ):
                path = os.path.join(self.folder, f"{made.__name__} {index}")
                writer = made(path, sync_files=syncs)
                with (
                    mock.patch.object(os, "fsync", side_effect=error) as fsync,
                    mock.patch.object(os, "sync") as sync,
                ):
                    dcp.save(self.state, storage_writer=writer)
                calls = fsync.call_count, sync.call_count
                expected = (2 * syncs, 2 * (error is not None))
                if made is not dcp.FileSystemWriter and syncs:
                    calls, expected = max(calls), max(expected)
                self.assertEqual(calls, expected, f"{made}")
        caching = dcp.FileSystemWriter(self.folder, cache_staged_state_dict=True)
        self.assertTrue(caching.cache_staged_state_dict)

    def test_parts_of_large_tensors(self):
        """A file has the part alone, and one with a gradient is written too."""
        base = torch.zeros(100_000, requires_grad=True)
        state = {"part": base[:2], "column": base.view(2, -1).t()[:3]}
        for ahead in (0, 10_000_000):
            path = os.path.join(self.folder, f"{ahead}")
            writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=ahead)
            dcp.save(state, storage_writer=writer)
            size = os.path.getsize(os.path.join(path, "__0_0.distcp"))
            self.assertLess(size, 10_000, "bytes of the file")
            found = {name: torch.ones_like(each) for name, each in state.items()}
            dcp.load(found, checkpoint_id=path)
            self.assertEqual(found, state)

    def test_values_are_copied_ahead(self):
        """The small ones first, so many bytes ahead of the use, on a stream that waits
        for the current one and ends first.
        """
        values = [torch.ones(n, requires_grad=True) for n in (5, 1, 3, 2, 4)]
        values[2] = torch.ones(100)[:3]
        resolved, module = [], mock.MagicMock()
        stream = mock.Mock(device_type="none, so all are on the host")
        with mock.patch.object(filesystem, "_get_device_module", return_value=module):
            loader = filesystem._OverlappingCpuLoader(
                lambda index: resolved.append(index) or values[index], stream, 24
            )
        stream.wait_stream.assert_called_once_with(module.current_stream())
        for index, each in enumerate(values):
            loader.add(each.numel(), index)
        for _ in range(2):
            loader.start_loading()
        self.assertEqual(resolved, [1, 3, 2], "copied ahead")
        module.stream.assert_called_with(stream)
        with self.assertRaisesRegex(RuntimeError, "after loading started"):
            loader.add(1, 0)
        with self.assertRaisesRegex(AssertionError, "before all items"):
            loader._finish()
        stream.synchronize.assert_not_called()
        found = []
        for tensor, index in loader.values():
            self.assertTrue(stream.synchronize.called, "waited")
            self.assertFalse(tensor.requires_grad)
            self.assertEqual(tensor, values[index])
            self.assertEqual(tensor.untyped_storage().nbytes(), tensor.nbytes)
            found.append(index)
        self.assertEqual(found, [1, 3, 2, 4, 0])

    def test_files_of_a_rank_have_like_sizes(self):
        """Tensors go to the smallest file, the large ones first; the rest in turn."""
        sizes = {"a": 3, "b": 8, "c": 5, "d": 4}
        state = {name: torch.ones(size) for name, size in sizes.items()}
        items = create_default_local_save_plan({**state, "n": 1, "o": 2}, True).items
        for count, expected in (
            (1, [["a", "b", "c", "d", "n", "o"]]),
            (2, [["n", "b", "a"], ["o", "c", "d"]]),
            (3, [["n", "b"], ["o", "c"], ["d", "a"]]),
        ):
            found = filesystem._split_by_size_and_type(count, [*items])
            names = [[item.index.fqn for item in each] for each in found]
            self.assertEqual(names, expected, f"{count} files")

    def test_file_systems(self):
        """They take paths and texts. Half a file is removed, not one that is read."""
        for index, system in enumerate(
            (filesystem.FileSystem(), _fsspec_filesystem.FileSystem())
        ):
            for kind in (Path, str)[index:]:
                root = kind(os.path.join(self.folder, f"{index} {kind.__name__}"))
                self.assertEqual(f"{system.init_path(root)}", f"{root}")
                new = kind(system.concat_path(system.concat_path(root, "x"), "y"))
                self.assertEqual(f"{new}", os.path.join(root, "x", "y"))
                for _ in range(2):
                    system.mkdir(new)
                one, other = (kind(system.concat_path(new, name)) for name in "mn")
                with system.create_stream(one, "wb") as stream:
                    stream.write(b"text")
                self.assertTrue(system.exists(one))
                self.assertEqual([f"{x}" for x in system.ls(new)], [f"{one}"])
                system.rename(one, other)
                with system.create_stream(other, "rb") as stream:
                    self.assertEqual(stream.read(), b"text")
                self.assertFalse(system.exists(one))
                for path, mode in ((other, "rb"), (one, "wb")):
                    with (
                        self.assertRaises(KeyError),
                        system.create_stream(path, mode),
                    ):
                        raise KeyError
                self.assertTrue(system.exists(other), "a file that is read")
                self.assertEqual(system.exists(one), index == 0, "half a file")
                system.rm_file(other)
                self.assertFalse(system.exists(other))
        path = os.path.join(self.folder, "new", "newer")
        for made, places in (
            (dcp.FileSystemReader, {Path(path): 1, path: 1, f"file://{path}": 0}),
            (dcp.FileSystemWriter, {"/none/x": 1, f"file://{path}": 0}),
            (_fsspec_filesystem.FsspecReader, {Path(path): 0, path: 1, "no://x": 0}),
            (_fsspec_filesystem.FsspecWriter, {Path(path): 0, f"file://{path}": 1}),
        ):
            for place, expected in places.items():
                found = made.validate_checkpoint_id(place)
                self.assertEqual(found, bool(expected), f"{made}, {place}")
        with mock.patch.object(os, "access", return_value=False):
            self.assertFalse(dcp.FileSystemReader.validate_checkpoint_id(path))
        with (
            self.assertRaisesRegex(AssertionError, "fs should not be None"),
            _fsspec_filesystem.FileSystem().create_stream(path, "rb"),
        ):
            pass

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

    def test_compressed_streams(self):
        """Files are compressed by either of two packages, or an error names them."""
        package = types.SimpleNamespace(
            ZstdCompressor=Compressor,
            ZstdDecompressor=Decompressor,
            EndlessZstdDecompressor=Decompressor,
        )
        state, empty = {"w": torch.arange(1e5) // 1000, "n": 3}, ("w", "n")
        for one, other in ((package, None), (None, package)):
            with (
                mock.patch.object(_extension, "zstandard", one),
                mock.patch.object(_extension, "pyzstd", other),
            ):
                writer = dcp.FileSystemWriter(self.folder, _extensions=[ZStandard()])
                dcp.save(state, storage_writer=writer)
                size = os.path.getsize(os.path.join(self.folder, "__0_0.distcp"))
                self.assertLess(size, 40_000, "bytes of the file")
                found = dict.fromkeys(empty) | {"w": torch.zeros(100_000)}
                dcp.load(found, checkpoint_id=self.folder)
                self.assertEqual(found, state)
                self.assertTrue(ZStandard.is_available())
                for version in ("2", ""):
                    with self.assertRaisesRegex(ValueError, "Unknown extension ver"):
                        ZStandard.from_descriptor(version)
        with (
            mock.patch.object(_extension, "zstandard", None),
            mock.patch.object(_extension, "pyzstd", None),
        ):
            self.assertFalse(ZStandard.is_available())
            for call in (ZStandard, lambda: ZStandard.from_descriptor("1.5")):
                with self.assertRaisesRegex(ValueError, "no module .*zstandard.*pyzst"):
                    call()

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
