# Owner(s): ["oncall: distributed"]
"""How batches are cut into microbatches, and their outputs joined."""

import operator
import sys
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.pipelining import microbatch
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _Replicate,
    _split_block_mask,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)
from torch.nn.attention.flex_attention import create_block_mask

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

ROWS, COLUMNS = TensorChunkSpec(0), TensorChunkSpec(1)


class MicrobatchFormTests(TestCase):
    def test_specs(self):
        self.assertEqual(str(COLUMNS), "TensorChunkSpec(1)")
        self.assertEqual(repr(COLUMNS), f"{microbatch.__name__}.TensorChunkSpec(1)")
        found = TensorChunkSpec.from_tuple((0, (1, 2)))
        self.assertEqual(str(found), str((ROWS, (COLUMNS, TensorChunkSpec(2)))))
        found = TensorChunkSpec.from_dict({"a": 1, "b": {"c": 0}})
        self.assertEqual(str(found), str({"a": COLUMNS, "b": {"c": ROWS}}))

    def test_fewer_pieces_than_asked(self):
        """The least number of rows decides, in arguments and keywords alike."""
        x, y = torch.arange(12.0).view(6, 2), torch.arange(2.0)
        args, kwargs = split_args_kwargs_into_chunks((x, "text"), {"y": y, "n": 3}, 3)
        self.assertEqual(args, [(x[:3], "text"), (x[3:], "text")])
        self.assertEqual(kwargs, [{"y": y[:1], "n": 3}, {"y": y[1:], "n": 3}])
        args, kwargs = split_args_kwargs_into_chunks((y,), {"x": x}, 3)
        self.assertEqual(
            (args, kwargs), ([(y[:1],), (y[1:],)], [{"x": x[:3]}, {"x": x[3:]}])
        )
        args, kwargs = split_args_kwargs_into_chunks((), None, 3)
        self.assertEqual((args, kwargs), ([()] * 3, [{}] * 3))
        for spec in (_Replicate, _Replicate()):
            args, kwargs = split_args_kwargs_into_chunks(
                (x, [x]), {"x": x}, 2, (spec, [COLUMNS]), {"x": spec}
            )
            expected = [(x, [column]) for column in x.chunk(2, 1)]
            self.assertEqual((args, kwargs), (expected, [{"x": x}] * 2))

    def test_pieces_of_a_leaf_keep_their_gradients(self):
        x = torch.arange(6.0, requires_grad=True)
        pieces = _split_tensor(x, ROWS, 2)
        (pieces[0] * pieces[1]).sum().backward()
        self.assertEqual(pieces[0].grad, pieces[1].detach())
        self.assertEqual(x.grad, torch.cat((x[3:], x[:3])).detach())
        for each in _split_tensor(x * 2, ROWS, 2):
            self.assertFalse(each.retains_grad)

    def test_masks_in_place_of_pieces(self):
        """To debug, microbatches are whole batches with zeros."""
        x = torch.arange(1.0, 13).view(4, 3)
        for spec, dim in ((ROWS, 0), (COLUMNS, 1)):
            with mock.patch.object(microbatch, "_debug_mask_minibatches", True):
                masked = _split_tensor(x, spec, 3)
                joined = merge_chunks([[each] for each in masked], [spec])
                with self.assertRaisesRegex(AssertionError, "Expected shape"):
                    merge_chunks([[x], [x[:1]]], [spec])
            pieces = x.tensor_split(3, dim)
            self.assertEqual(joined, [x])
            self.assertEqual(sum(masked), x)
            for one, other in zip(masked, pieces, strict=True):
                self.assertEqual(one.shape, x.shape)
                self.assertEqual(one.count_nonzero(), other.count_nonzero())
                self.assertEqual(one.sum(), other.sum())

    def test_masks_of_attention(self):
        """Each microbatch has its rows of a mask; a mask of one row is for all."""

        def before(batch, head, query, key):
            return query + batch >= key

        def made(rows):
            return create_block_mask(
                before, rows, 1, 8, 8, torch.get_default_device(), BLOCK_SIZE=2
            )

        mask, x = made(5), torch.arange(5.0)
        args, kwargs = split_args_kwargs_into_chunks((x, mask), {"mask": mask}, 2)
        zero = torch.zeros((), dtype=torch.int)
        for index, (each, first) in enumerate(zip(args, (0, 3), strict=True)):
            rows = x.tensor_split(2)[index]
            self.assertEqual(each[0], rows)
            for found in (each[1], kwargs[index]["mask"]):
                last = first + len(rows)
                self.assertEqual(found.to_dense(), mask.to_dense()[first:last])
                self.assertEqual(found.BLOCK_SIZE, mask.BLOCK_SIZE)
                self.assertEqual(found.seq_lengths, mask.seq_lengths)
                for key in range(8):
                    self.assertEqual(
                        bool(found.mask_mod(zero + 1, zero, zero + 1, zero + key)),
                        key <= first + 2,
                    )
        one = made(1)
        args, kwargs = split_args_kwargs_into_chunks((one,), {"x": x}, 4)
        self.assertTrue(all(each is one for (each,) in args))
        self.assertEqual((len(args), len(kwargs)), (4, 4))
        self.assertEqual(len(split_args_kwargs_into_chunks((mask,), None, 7)[0]), 5)
        mask.full_kv_num_blocks = mask.full_kv_indices = None
        for each in _split_block_mask(mask, 5):
            self.assertEqual(
                (each.full_kv_num_blocks, each.full_kv_indices), (None, None)
            )
        with self.assertRaisesRegex(AssertionError, "fewer batch size than"):
            _split_block_mask(mask, 6)
        with self.assertRaisesRegex(AssertionError, "only supports split_dim=0"):
            split_args_kwargs_into_chunks((mask,), None, 2, (COLUMNS,))
        with self.assertRaisesRegex(
            AssertionError, "Expected TensorChunkSpec, got .*int"
        ):
            split_args_kwargs_into_chunks((mask,), None, 2, (1,))

    def test_outputs_are_joined_as_asked(self):
        x, reduced = torch.arange(12.0).view(4, 3), torch.tensor(2.0)
        largest = _CustomReducer(torch.tensor(-1.0), torch.maximum)
        chunks = [
            {"out": [piece, "text"], "loss": index * reduced, "best": piece.max()}
            for index, piece in enumerate(x.tensor_split(3))
        ]
        spec = {"out": [ROWS, _Replicate()], "loss": sum_reducer, "best": largest}
        joined = merge_chunks(chunks, spec)
        expected = {"out": [x, "text"], "loss": 3 * reduced, "best": x.max()}
        self.assertEqual(joined, expected)
        subtract = _CustomReducer(10, operator.sub)
        self.assertEqual(merge_chunks([1, 2, 3], subtract), 4, "in order")
        self.assertEqual(
            merge_chunks([(x, x[0])] * 2, None), (x.repeat(2, 1), x[0].repeat(2))
        )
        with self.assertRaisesRegex(AssertionError, "Expected text, got other"):
            merge_chunks(["text", "text", "other"], _Replicate())
        with self.assertRaisesRegex(ValueError, "did not match chunk spec"):
            merge_chunks([(x,), (x, x)], (ROWS,))

    def test_specs_that_do_not_fit_are_refused(self):
        x = torch.ones(2, 3)
        for args, spec, kind, text in (
            (
                ("text",),
                (ROWS,),
                ValueError,
                "Unsupported chunk spec: TensorChunkSpec.0. and value: text",
            ),
            ((x,), (0,), AssertionError, "Expected TensorChunkSpec, got .*int"),
            ((x, x), (ROWS,), AssertionError, r"keys\(\) = \[0, 1\] .* = \[0\]"),
        ):
            with self.assertRaisesRegex(kind, text):
                split_args_kwargs_into_chunks(args, None, 2, spec)
        with self.assertRaisesRegex(AssertionError, "Tensor size 2 is smaller"):
            _split_tensor(x, ROWS, 3)
        self.assertEqual(len(_split_tensor(x, COLUMNS, 3)), 3)


if __name__ == "__main__":
    run_tests()
