# Owner(s): ["oncall: distributed"]
"""Options of writers, file systems, and streams that extensions transform."""

import io
import os
import sys
import tempfile
import types
import zlib
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    _extension,
    _fsspec_filesystem,
    filesystem,
)
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import SerializationFormat

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


class TestFSSpec(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.state = {"w": torch.arange(3.0), "n": [5, "text"]}

    def _empty(self):
        return {"w": torch.zeros(3), "n": None}

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


if __name__ == "__main__":
    run_tests()
