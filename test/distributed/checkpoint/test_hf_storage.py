# Owner(s): ["oncall: distributed"]
"""Hugging Face's format, for which a few lines here stand for ``safetensors``: shards
make whole tensors, quantized weights are read in parts, and an index tells where each
is.
"""

import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
import types
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint import _consolidate_hf_safetensors as consolidate
from torch.distributed.checkpoint._hf_utils import _get_safetensors_file_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
TYPES |= {"F8_E4M3": torch.float8_e4m3fn}
CODES = {dtype: code for code, dtype in TYPES.items()}


def save(tensors, metadata=None):
    """Return a file as specified: a length, a header in JSON, and the data."""
    header, data = {"__metadata__": metadata or {}}, b""
    for name, each in tensors.items():
        bits = bytes(each.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {"dtype": CODES[each.dtype], "shape": [*each.shape]}
        header[name]["data_offsets"] = [len(data), len(data) + len(bits)]
        data += bits
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def safetensors_of(name, offsets, part):
    """Return a file of one shard."""
    info = json.dumps({name: {"saved_offsets": offsets}})
    return save({name: part}, {"DCP_SHARDING_INFO": info})


def saved_in(path):
    """Return the tensors of a file, and its metadata."""
    with open(path, "rb") as file:
        header, _ = _get_safetensors_file_metadata(file)
        data, metadata = bytearray(file.read()), header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        bits = torch.tensor([*data[start:end]], dtype=torch.uint8)
        found[name] = bits.view(TYPES[entry["dtype"]]).view(entry["shape"])
    if len(data) != max(entry["data_offsets"][1] for entry in header.values()):
        raise ValueError(f"{path} has {len(data)} bytes of data, its header others")
    return found, metadata


class Part:
    """A tensor of a file that is not read yet."""

    def __init__(self, tensor):
        self.tensor = tensor

    def get_shape(self):
        return [*self.tensor.shape]

    def get_dtype(self):
        return CODES[self.tensor.dtype]

    def __getitem__(self, slices):
        return self.tensor[slices]


@contextlib.contextmanager
def safe_open(filename, framework, device=None):
    found, metadata = saved_in(filename)
    yield mock.Mock(
        keys=found.keys,
        metadata=lambda: metadata,
        get_slice=lambda name: Part(found[name]),
        get_tensor=found.__getitem__,
    )


def with_safetensors(test):
    """Give ``test`` a package ``safetensors``, of which it needs the format alone."""
    package = types.ModuleType("safetensors")
    package.safe_open, package.torch = safe_open, types.ModuleType("safetensors.torch")
    package.torch.save, package.torch._getdtype = save, TYPES.__getitem__
    modules = {"safetensors": package, "safetensors.torch": package.torch}
    return mock.patch.dict(sys.modules, modules)(test)


class Opened(dict):
    """What an open file of tensors is asked."""

    get_slice = get_tensor = dict.__getitem__


class TestHFStorage(TestCase):
    def test_shards_make_whole_tensors(self):
        """Cut in any dimensions, each shard in a file; two files come out."""
        shapes = (5,), (4, 6), (3, 4, 2), (2, 3, 2, 2), (1, 1)
        wholes = {f"{shape}": torch.randn(shape) for shape in shapes}
        outputs_of = {name: f"out_{i % 2}" for i, name in enumerate(wholes)}
        cuts = (0,), (1,), (0, 1), (2,), (1, 2), (0, 1, 2), (3,), (0, 3)
        for dims, threads in zip(cuts, itertools.cycle((1, 3)), strict=False):
            shards = []
            for name, whole in wholes.items():
                pieces = [([0] * whole.ndim, whole)]
                for dim in (each for each in dims if each < whole.ndim):
                    middle = whole.shape[dim] // 2
                    pieces = [
                        ([*at[:dim], start, *at[dim + 1 :]], part)
                        for at, piece in pieces
                        for start, part in zip(
                            (0, middle), piece.tensor_split((middle,), dim), strict=True
                        )
                        if part.numel()
                    ]
                shards += [(name, *each) for each in pieces]
            with tempfile.TemporaryDirectory() as folder:
                found, index = self._joined(folder, wholes, shards, outputs_of, threads)
            self.assertEqual(found, wholes, f"cut in {dims}")
            total = sum(4 * each.numel() for each in wholes.values())
            expected = {"metadata": {"total_size": total}, "weight_map": outputs_of}
            self.assertEqual(index, expected)

    def _joined(self, folder, wholes, shards, outputs_of, threads):
        inputs, outputs, found = {}, {}, {}
        for number, one in enumerate(shards):
            path = os.path.join(folder, f"in_{number}")
            with open(path, "w+b") as file:
                file.write(safetensors_of(*one))
                file.seek(0)
                header, size = _get_safetensors_file_metadata(file)
            inputs[path] = consolidate._InputFileData(size, header)
        for name, whole in wholes.items():
            made = outputs.setdefault(
                os.path.join(folder, outputs_of[name]), consolidate._OutputFileData()
            )
            made.fqn_data[name] = consolidate._FqnData(0, [*whole.shape], 4, "F32")
        consolidate._write_metadata(outputs)
        pool = consolidate.concurrent.futures.ThreadPoolExecutor
        with mock.patch.object(
            consolidate.concurrent.futures, "ThreadPoolExecutor", side_effect=pool
        ) as pools:
            consolidate._write_data(inputs, outputs, threads)
        sizes = [call.kwargs["max_workers"] for call in pools.call_args_list]
        self.assertEqual(sizes, [2] if threads > 1 else [], "threads for two files")
        consolidate._write_overall_metadata_file(folder, outputs)
        for path in outputs:
            tensors, metadata = saved_in(path)
            self.assertEqual(metadata, {})
            found |= tensors
        with open(os.path.join(folder, "model.safetensors.index.json")) as file:
            return found, json.load(file)

    def test_quantized_weights_are_read_in_parts(self):
        """Blocks times their scale; values of four bits, two in a byte."""
        torch.manual_seed(0)
        weight = torch.randint(-8, 8, (5, 7)).to(torch.float8_e4m3fn)
        scale, rest = torch.randn(3, 4), torch.randn(4, 4)
        blocks = torch.randint(0, 256, (2, 3, 4, 2), dtype=torch.uint8)
        scales = torch.randint(120, 134, (2, 3, 4), dtype=torch.uint8)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat((values, -values))
        pairs = values[torch.stack((blocks % 16, blocks // 16), -1).long()].flatten(-2)
        wholes = {
            "a.weight": weight.float()
            * scale.repeat_interleave(2, 0)[:5].repeat_interleave(2, 1)[:, :7],
            "b_blocks": (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2),
            "c.weight": rest,
        }
        file = Opened({"a.weight": weight, "a.weight_scale_inv": scale})
        file |= {"c.weight": rest, "b_blocks": blocks, "b_scales": scales}
        reader = QuantizedHuggingFaceStorageReader("", block_size=2)
        reader._build_weight_scale_mapping(dict.fromkeys(file, "file"))
        reader._tensor_full_shapes = {name: each.shape for name, each in wholes.items()}
        reader._tensor_full_shapes["b_blocks_quantized"] = blocks.shape
        for name, whole in wholes.items():
            ranges = [
                [(0, size), (size // 2, size - size // 2), (1, max(size - 2, 1))]
                for size in whole.shape
            ]
            for part in itertools.product(*ranges):
                starts, lengths = map(torch.Size, zip(*part, strict=True))
                index, zeros = MetadataIndex(name), torch.Size([0] * whole.ndim)
                places = index, zeros, index, starts, lengths
                request = ReadItem(LoadItemType.TENSOR, *places)
                planner = DefaultLoadPlanner()
                planner.set_up_planner({name: torch.empty(lengths)}, Metadata({}))
                reader._process_read_request(file, request, planner)
                expected = whole[tuple(slice(at, at + size) for at, size in part)]
                self.assertEqual(planner.state_dict[name], expected, f"{name}, {part}")
        made, reader.target_dtype = QuantizedHuggingFaceStorageReader, torch.bfloat16
        self.assertEqual(
            (made("").target_dtype, made("").block_size), (torch.float, 128)
        )
        for name, whole in wholes.items():
            planner.set_up_planner({name: torch.empty(whole.shape)}, Metadata({}))
            request = ReadItem(LoadItemType.TENSOR, *self._whole(whole, name))
            reader._process_read_request(file, request, planner)
            expected = whole if name == "c.weight" else whole.bfloat16().float()
            self.assertEqual(planner.state_dict[name], expected, rtol=0, atol=0)
        request = ReadItem(LoadItemType.TENSOR, *self._whole(weight, "a.weight"))
        for wrong, text in (
            ("_weight_map", "not found in weight_map"),
            ("_tensor_full_shapes", "Could not find full tensor"),
        ):
            with (
                mock.patch.object(reader, wrong, {}),
                self.assertRaisesRegex(ValueError, text),
            ):
                reader._process_read_request(file, request, planner)
        name, request = "c.weight", ReadItem(LoadItemType.TENSOR, *self._whole(rest))
        planner.set_up_planner({name: torch.empty(1, 1)}, Metadata({}))
        planner.transform_tensor = lambda _, tensor: tensor
        with self.assertRaisesRegex(AssertionError, "mismatch sizes"):
            reader._process_read_request(file, request, planner)

    def _whole(self, tensor, name="c.weight"):
        index, zeros = MetadataIndex(name), torch.Size([0] * tensor.ndim)
        return index, zeros, index, zeros, tensor.shape

    @with_safetensors
    def test_quantized_checkpoint(self):
        """A load finds the scale of a weight in its file or in another."""
        torch.manual_seed(0)
        weight = torch.randint(-8, 8, (5, 7)).to(torch.float8_e4m3fn)
        scale = torch.randn(3, 4)
        wide = scale.repeat_interleave(2, 0)[:5].repeat_interleave(2, 1)[:, :7]
        files = {"one": {"a.weight": weight, "b.weight": weight, "c": wide}}
        files["one"]["b.weight_scale_inv"] = 2 * scale
        files["two"] = {"a.weight_scale_inv": scale, "d.weight_scale_inv": scale}
        expected = {"a.weight": weight.float() * wide, "c": wide}
        expected["b.weight"] = 2 * expected["a.weight"]
        places = {
            name: f"{f}.safetensors" for f, each in files.items() for name in each
        }
        with tempfile.TemporaryDirectory() as folder:
            for name, each in files.items():
                with open(os.path.join(folder, f"{name}.safetensors"), "wb") as file:
                    file.write(save(each))
            index = os.path.join(folder, "model.safetensors.index.json")
            with open(index, "w") as file:
                json.dump({"weight_map": places}, file)
            for threads in (1, 2):
                reader = QuantizedHuggingFaceStorageReader(
                    folder, threads, torch.float64, 2
                )
                options = reader.thread_count, reader.target_dtype, reader.block_size
                self.assertEqual(options, (threads, torch.float64, 2))
                found = {
                    name: torch.zeros_like(each) for name, each in expected.items()
                }
                dcp.load(found, storage_reader=reader, no_dist=True)
                self.assertEqual(found, expected)


class TestConsolidation(FSDPTest):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @with_safetensors
    def test_ranks_of_a_group_share_the_files(self):
        """File ``i`` of the result is of rank ``i - 1`` of the group, modulo its size.
        All are there when the call returns on any rank.
        """
        # Torch 2.13 gathers on rank 0 of the world, which must be in the group.
        group, shared = dist.new_group((0, 3), backend="cpu:gloo"), self.shared_folder()
        folders = os.path.join(shared, "parts"), os.path.join(shared, "whole")
        if self.rank not in (0, 3):
            return  # and waits in the barrier of the world
        wholes = {f"w{i}": torch.arange(6.0) + i for i in (1, 2, 3)}
        results = {f"w{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
        if self.rank == 3:
            for folder in folders:
                os.mkdir(folder)
            for part in (0, 1):
                for name, whole in wholes.items():
                    data = safetensors_of(name, [3 * part], whole[3 * part :][:3])
                    path = os.path.join(folders[0], f"{name}_{part}.safetensors")
                    with open(path, "wb") as file:
                        file.write(data)
        dist.barrier(group)
        written, write = [], consolidate._write_data

        def note(inputs, outputs, threads):
            self.assertEqual(threads, 2)
            written.extend(os.path.basename(path) for path in outputs)
            if self.rank == 0:
                time.sleep(0.3)  # so that rank 3 is done first
            write(inputs, outputs, threads)

        with mock.patch.object(consolidate, "_write_data", note):
            consolidate.consolidate_safetensors_files_on_every_rank(
                *folders, {f"w{i}": i for i in (1, 2, 3)}, 2, process_group=group
            )
        index = dist.get_rank(group)
        own = [results[f"w{i}"] for i in (1, 2, 3) if i % 2 == index]
        self.assertEqual(sorted(written), own)
        for name, whole in wholes.items():
            found, _ = saved_in(os.path.join(folders[1], results[name]))
            self.assertEqual(found, {name: whole})
        with open(os.path.join(folders[1], "model.safetensors.index.json")) as file:
            self.assertEqual(json.load(file)["weight_map"], results)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @with_safetensors
    def test_shards_of_ranks(self):
        """Ranks write their shards, each file of the plan in parts, and rank 0 may join
        them. A read gets any other shards, of joined files too, on threads or not.
        """
        mesh, folder = world_mesh(4), self.shared_folder()
        torch.manual_seed(0)
        wholes = {"rows": torch.randn(6, 3), "columns": torch.randn(2, 5)}
        # Torch 2.13 cannot join integers: it asks ``torch.finfo`` for their size.
        wholes |= {"half": torch.randn(7).bfloat16(), "same": torch.randn(3)}
        wholes = {name: each.to(self.device) for name, each in wholes.items()}
        places = {"rows": (Shard(0), Shard(1)), "columns": (Shard(1), Replicate())}
        places |= {"half": (Shard(0), Replicate()), "same": (Replicate(), Shard(0))}

        def states(index):
            return {
                name: distribute_tensor(whole, mesh, [places[name][index]])
                for name, whole in wholes.items()
            }

        for plan in (None, {"rows": 1, "columns": 2, "half": 2, "same": 1}):
            numbers = plan or dict.fromkeys(wholes, 1)
            count = max(numbers.values())
            joined = {
                name: f"model-0000{number}-of-0000{count}.safetensors"
                for name, number in numbers.items()
            }
            for joins in (False, True):
                path = os.path.join(folder, f"{count} {joins}")
                writer = HuggingFaceStorageWriter(
                    path, plan, 1 + joins, True, joins, 1 + joins
                )
                threads = writer.thread_count, writer.thread_count_consolidation
                self.assertEqual(threads, (1 + joins,) * 2)
                with mock.patch.object(
                    consolidate, "_write_data", side_effect=consolidate._write_data
                ) as write:
                    dcp.save(states(0), storage_writer=writer)
                threads = [call.args[2] for call in write.call_args_list]
                self.assertEqual(threads, [2] if joins and not self.rank else [])
                dist.barrier()
                parts = os.path.join(path, "sharded") if joins else path
                names = sorted(os.listdir(parts))
                for name in names:
                    pattern = rf"^shard-0000[1-4]-model-0000\d-of-0000{count}"
                    self.assertRegex(name, pattern)
                    self.assertLessEqual(
                        {*saved_in(os.path.join(parts, name))[0]},
                        {each for each in wholes if joined[each] in name},
                    )
                for place in (parts, path)[: 1 + joins]:
                    reader = HuggingFaceStorageReader(place, thread_count=1 + joins)
                    self.assertEqual(reader.thread_count, 1 + joins)
                    found = states(1)
                    for each in found.values():
                        each.to_local().zero_()
                    dcp.load(found, storage_reader=reader)
                    for name, each in found.items():
                        self.assertEqual(each.full_tensor(), wholes[name], name)
                if joins:
                    with open(os.path.join(path, "model.safetensors.index.json")) as it:
                        self.assertEqual(json.load(it)["weight_map"], joined)
        with self.assertRaisesRegex(CheckpointException, "mismatch sizes|Size mism"):
            dcp.load({"rows": torch.zeros(7, 3)}, storage_reader=reader)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @with_safetensors
    def test_whole_state_of_one_rank(self):
        """One rank writes whole tensors, with an index of their files."""
        path = os.path.join(self.shared_folder(), f"{self.rank}")
        state = {"a": torch.randn(3, 2), "b": torch.arange(4), "c": torch.ones(1)}
        writer = HuggingFaceStorageWriter(path, {"a": 3, "b": 1, "c": 3})
        dcp.save(state, storage_writer=writer, no_dist=True)
        files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 3)]
        index = "model.safetensors.index.json"
        self.assertEqual(sorted(os.listdir(path)), [*files, index])
        with open(os.path.join(path, index)) as file:
            found = json.load(file)
        expected = {"a": files[1], "b": files[0], "c": files[1]}
        self.assertEqual(found["weight_map"], expected)
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        reader = HuggingFaceStorageReader(path)
        metadata = reader.read_metadata()
        self.assertEqual(metadata.state_dict_metadata["b"].size, (4,))
        self.assertEqual(metadata.storage_meta.load_id, reader.load_id)
        for key, place in metadata.storage_data.items():
            each = state[key.fqn]
            saved = metadata.state_dict_metadata[key.fqn].properties.dtype
            self.assertEqual((place.dtype, saved), (each.dtype,) * 2)
            self.assertEqual(place.shape, each.shape)
        size = sum(each.nbytes for each in state.values())
        self.assertEqual(found["metadata"], {"total_size": size})
        dcp.load(into, storage_reader=reader, no_dist=True)
        self.assertEqual(into, state)


if __name__ == "__main__":
    run_tests()
