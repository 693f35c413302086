# Owner(s): ["oncall: distributed"]
"""Hugging Face's format, as far as it works without ``safetensors``: shards make whole
tensors, quantized weights are read in parts, and an index tells where each is.
"""

import itertools
import json
import os
import sys
import tempfile

import torch
from torch import distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import _consolidate_hf_safetensors as consolidate
from torch.distributed.checkpoint._hf_utils import _get_safetensors_file_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader,
)

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def safetensors_of(name, offsets, part):
    """Return a file of one shard, as the format is specified: a length, a header in
    JSON, and the data.
    """
    data = part.contiguous().numpy().tobytes()
    saved = {name: {"saved_offsets": offsets}}
    entry = {"dtype": "F32", "shape": [*part.shape], "data_offsets": [0, len(data)]}
    info = {"DCP_SHARDING_INFO": json.dumps(saved)}
    text = json.dumps({name: entry, "__metadata__": info}).encode()
    return len(text).to_bytes(8, "little") + text + data


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
        consolidate._write_data(inputs, outputs, threads)
        consolidate._write_overall_metadata_file(folder, outputs)
        for path in outputs:
            with open(path, "rb") as file:
                header, _ = _get_safetensors_file_metadata(file)
                data = torch.frombuffer(bytearray(file.read()), dtype=torch.float32)
            last = max(each["data_offsets"][1] for each in header.values())
            self.assertEqual(4 * data.numel(), last)
            for name, each in header.items():
                start, end = (place // 4 for place in each["data_offsets"])
                found[name] = data[start:end].view(each["shape"])
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
        planner.set_up_planner({name: torch.empty(1, 1)}, Metadata({}))
        planner.transform_tensor = lambda _, tensor: tensor
        with self.assertRaisesRegex(AssertionError, "mismatch sizes"):
            reader._process_read_request(file, request, planner)


if __name__ == "__main__":
    run_tests()
