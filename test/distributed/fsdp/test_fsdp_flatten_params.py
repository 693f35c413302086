# Owner(s): ["oncall: distributed"]
"""The layout of FSDP1's flat parameter: which parameters, at which offsets, with which
padding, on which rank.
"""

import itertools
import sys
from collections.abc import Iterable

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import Chain, FSDPTest
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Transposed(nn.Module):
    """Holds a parameter that is stored by columns."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((3,), 7.0, device=device))
        self.weight = nn.Parameter(torch.arange(6.0, device=device).view(3, 2).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class TestFlattenParams(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _handle(
        self,
        params: Iterable[nn.Parameter],
        module: nn.Module,
        strategy: HandleShardingStrategy = HandleShardingStrategy.FULL_SHARD,
        param_dtype: torch.dtype | None = None,
        use_orig_params: bool = False,
    ) -> FlatParamHandle:
        return FlatParamHandle(
            list(params),
            module,
            self.device,
            strategy,
            offload_params=False,
            mp_param_dtype=param_dtype,
            mp_reduce_dtype=None,
            keep_low_precision_grads=False,
            process_group=self.process_group,
            use_orig_params=use_orig_params,
        )

    def _flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def _tied(self) -> Chain:
        """Return a chain in which ``a`` is also ``c``."""
        model = Chain(device=self.device)
        model.b, model.c = nn.Linear(4, 3, device=self.device), model.a
        with torch.no_grad():
            for index, parameter in enumerate(model.b.parameters()):
                parameter.copy_(
                    torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
                    + index
                )
        return model

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flatten_nothing(self):
        with self.assertRaisesRegex(
            ValueError,
            "Cannot construct a FlatParamHandle with an empty parameter list",
        ):
            self._handle([], nn.Linear(2, 2))
        with self.assertRaisesRegex(
            ValueError, "`params` were not found in `module`'s tree"
        ):
            self._handle(nn.Linear(2, 2).parameters(), nn.Linear(2, 2))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_empty_module(self):
        """A wrapper of a module without parameters has no handle, and runs it."""
        model = FSDP(nn.Sequential(), device_id=self.device)
        self.assertIsNone(model._handle)
        rows = Chain.rows(self.device, 2, 0)
        self.assertEqual(model(rows), rows, "output")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_partial_flattening(self):
        """Parameters that are not given stay parameters; given ones become views, in
        the module's order.
        """
        model, reference = Chain(device=self.device), Chain(device=self.device)
        handle = self._handle([model.c.bias, *model.a.parameters()], model)
        left = [name for name, _ in model.named_parameters()]
        self.assertEqual(left, ["b.weight", "b.bias", "c.weight"], "names left")
        self.assertEqual(
            list(handle.flat_param._fqns),
            ["a.weight", "a.bias", "c.bias"],
            "names flattened",
        )
        expected = self._flat([reference.a.weight, reference.a.bias, reference.c.bias])
        self.assertEqual(
            handle.flat_param.detach(), expected, "flat parameter", atol=0, rtol=0
        )
        self._check_output(model, reference)

    def _check_output(self, model: nn.Module, reference: nn.Module) -> None:
        rows = Chain.rows(self.device, 2, self.rank)
        self.assertEqual(model(rows), reference(rows), "output", atol=0, rtol=0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_numel_without_shared_params(self):
        model = Chain(device=self.device)
        handle = self._handle(model.parameters(), model)
        self.assertEqual(handle.flat_param.numel(), 39, "elements")
        self.assertEqual(
            list(handle.flat_param._numels), [12, 4, 12, 3, 6, 2], "elements of each"
        )
        # Aligned, a flat parameter is also padded to a multiple of the world size.
        layer = nn.Linear(4, 3, device=self.device)
        flat = self._handle(layer.parameters(), layer, use_orig_params=True).flat_param
        self.assertEqual(
            list(flat._numels_with_padding), [12, 3, 1], "elements with padding"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_numel_with_shared_params(self):
        """A shared parameter counts once, under its first name."""
        model = self._tied()
        flat = self._handle(model.parameters(), model).flat_param
        self.assertEqual(flat.numel(), 31, "elements")
        self.assertEqual(
            list(flat._fqns), ["a.weight", "a.bias", "b.weight", "b.bias"], "names"
        )
        shared = [
            (info.module_name, info.param_name, info.prim_module_name)
            for info in flat._shared_param_infos
        ]
        self.assertEqual(
            shared, [("c", "weight", "a"), ("c", "bias", "a")], "shared parameters"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_output_without_shared_params(self):
        self._test_output(Chain)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_output_with_shared_params(self):
        """Both uses read one view, and both gradients meet in it."""
        self._test_output(lambda device: self._tied())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_output_with_strides(self):
        """A parameter that is not stored by rows keeps its strides, and so does its
        gradient's view.
        """
        self._test_output(Transposed, width=2)

    def _test_output(self, build, width=3):
        """Forward and gradients of the views are those of the parameters."""
        for use_orig_params in (False, True):
            model, reference = build(device=self.device), build(device=self.device)
            expected = dict(reference.named_parameters())
            handle = self._handle(
                model.parameters(), model, use_orig_params=use_orig_params
            )
            handle._use_unsharded_views(as_params=use_orig_params)
            rows = Chain.rows(self.device, 2, self.rank)[:, :width]
            outputs = [each(rows) for each in (model, reference)]
            self.assertEqual(*outputs, "output", atol=0, rtol=0)
            views = dict(
                zip(handle.flat_param._fqns, handle._get_unflat_views(), strict=True)
            )
            for name, view in views.items():
                self.assertEqual(
                    view.stride(), expected[name].stride(), f"strides of {name}"
                )
                self.assertEqual(
                    view, expected[name], f"value of {name}", atol=0, rtol=0
                )
            # Original parameters are leaves, whose gradients FSDP itself flattens.
            if not use_orig_params:
                for output in outputs:
                    output.square().sum().backward()
                grads = dict(
                    zip(
                        views,
                        handle._get_unflat_views(handle.flat_param.grad),
                        strict=True,
                    )
                )
                self.assertEqual(
                    grads,
                    {name: param.grad for name, param in expected.items()},
                    "gradients",
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flat_param_shard_metadata_unaligned(self):
        """39 elements, so that the second rank's shard of 20 ends with padding."""
        self._test_shard_metadata(
            {},
            numels=[12, 4, 12, 3, 6, 2],
            shard=[(20, 0), (20, 1)],
            offsets=[
                {"a.weight": (0, 11), "a.bias": (0, 3), "b.weight": (0, 3)},
                {
                    "b.weight": (4, 11),
                    "b.bias": (0, 2),
                    "c.weight": (0, 5),
                    "c.bias": (0, 1),
                },
            ],
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flat_param_shard_metadata_aligned_full_precision(self):
        """Original parameters begin at multiples of 16 bytes: 4 elements."""
        self._test_shard_metadata(
            {"use_orig_params": True},
            numels=[12, 4, 12, 3, 1, 6, 2, 2],
            shard=[(21, 0), (21, 0)],
            offsets=[
                {"a.weight": (0, 11), "a.bias": (0, 3), "b.weight": (0, 4)},
                {
                    "b.weight": (5, 11),
                    "b.bias": (0, 2),
                    "c.weight": (0, 5),
                    "c.bias": (0, 1),
                },
            ],
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flat_param_shard_metadata_aligned_mixed_precision(self):
        """In the type of computation 16 bytes are 8 elements."""
        self._test_shard_metadata(
            {"use_orig_params": True, "param_dtype": torch.bfloat16},
            numels=[12, 4, 4, 4, 12, 4, 3, 5, 6, 2, 2],
            shard=[(29, 0), (29, 0)],
            offsets=[
                {"a.weight": (0, 11), "a.bias": (0, 3), "b.weight": (0, 4)},
                {
                    "b.weight": (5, 11),
                    "b.bias": (0, 2),
                    "c.weight": (0, 5),
                    "c.bias": (0, 1),
                },
            ],
        )

    def _test_shard_metadata(self, options, numels, shard, offsets):
        model = Chain(device=self.device)
        plain = dict(Chain(device=self.device).named_parameters())
        values = {name: each.detach().reshape(-1) for name, each in plain.items()}
        handle = self._handle(model.parameters(), model, **options)
        self.assertEqual(
            list(handle.flat_param._numels_with_padding),
            numels,
            "elements with padding",
        )
        handle.shard()
        flat, metadata = handle.flat_param, handle.shard_metadata()
        self.assertEqual(
            (flat.numel(), flat._shard_numel_padded),
            shard[self.rank],
            "size and padding of the shard",
        )
        found = dict(zip(metadata.param_names, metadata.param_offsets, strict=True))
        self.assertEqual(found, offsets[self.rank], "elements held of each")
        self.assertEqual(
            metadata.param_numels,
            tuple(values[name].numel() for name in found),
            "numels",
        )
        layouts = [(each.shape, each.stride()) for each in map(plain.get, found)]
        self.assertEqual(
            [*zip(metadata.param_shapes, metadata.param_strides, strict=True)],
            layouts,
            "shapes and strides",
        )
        self.assertEqual(metadata.param_contiguities, (True,) * len(layouts))
        held = [info for info in flat._shard_param_infos if info.in_shard]
        for (name, (first, last)), info in zip(found.items(), held, strict=True):
            part = flat.detach()[info.offset_in_shard :][: info.numel_in_shard]
            self.assertEqual(
                part, values[name][first : last + 1], f"shard of {name}", atol=0, rtol=0
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_writeback_orig_params_no_shard(self):
        """New memory for an original parameter is copied into the flat parameter, and
        views it from then on.
        """
        model = nn.Linear(3, 2, bias=False).to(self.device)
        handle = self._handle(
            model.parameters(),
            model,
            strategy=HandleShardingStrategy.NO_SHARD,
            use_orig_params=True,
        )
        handle.shard()
        self.assertFalse(
            handle._writeback_orig_params(),
            "nothing has changed, but something was written back",
        )
        model.weight.data = torch.full((2, 3), 5.0, device=self.device)
        self.assertTrue(handle._writeback_orig_params(), "new memory was not noticed")
        self.assertEqual(
            handle.flat_param.detach()[:6].tolist(), [5.0] * 6, "flat parameter"
        )
        handle.flat_param.detach()[:6].fill_(3)
        handle._use_unsharded_views(as_params=True)
        self.assertEqual(model.weight.detach().unique().tolist(), [3.0], "parameter")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flatten_tensors(self):
        """Each tensor starts at a multiple of the alignment, and the whole has a
        multiple of the world size; without alignment nothing is between. Views of the
        result are the tensors, also if these are not contiguous.
        """
        model = Chain(device=self.device)
        tensors = [each.detach() + 1 for each in model.parameters()]
        tensors[0] = tensors[0].t().contiguous().t()
        for aligned, given in itertools.product((0, 4, 8), (tensors, tensors[:4])):
            handle = self._handle(
                model.parameters(), model, use_orig_params=aligned > 0
            )
            flat = handle.flatten_tensors(given, aligned)
            expected, end = [], 0
            for each in given:
                gap = -end % aligned if aligned else 0
                expected += [None] * gap + each.as_strided(
                    (each.numel(),), (1,)
                ).tolist()
                end += gap + each.numel()
            expected += [None] * (end % 2 if aligned else 0)
            self.assertEqual(flat.numel(), len(expected), f"aligned to {aligned}")
            found = [
                None if at is None else value
                for value, at in zip(flat.tolist(), expected, strict=True)
            ]
            self.assertEqual(found, expected, f"aligned to {aligned}")
            model = Chain(device=self.device)
        handle = self._handle(model.parameters(), model, use_orig_params=True)
        fqns = handle.flat_param._fqns
        for wrong, says in (([], "non-empty `tensors`"), (tensors, "but got -1")):
            with self.assertRaisesRegex(ValueError, says):
                handle.flatten_tensors(wrong, -1)
        self.assertEqual(repr(handle), f"FlatParamHandle(flat_param.fqns={fqns})")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parts_of_ranks(self):
        """A rank's part is its chunk, filled up to the first one's size with zeros."""
        for numel, parts in ((7, 3), (4, 4), (1, 2), (5, 4), (6, 4)):
            whole = torch.arange(1.0, numel + 1)
            size = -(-numel // parts)
            for rank in range(parts):
                own = whole[rank * size : (rank + 1) * size]
                part, added = FlatParamHandle._get_unpadded_shard(whole, rank, parts)
                where = f"part {rank} of {parts} of {numel}"
                self.assertEqual((part, added), (own, size - own.numel()), where)
                padded, added = FlatParamHandle._get_shard(whole, rank, parts)
                zeros = torch.zeros(size - own.numel())
                self.assertEqual(padded, torch.cat([own, zeros]), where)
                self.assertEqual(added, zeros.numel(), where)
                self.assertNotEqual(padded.data_ptr(), whole.data_ptr())
                found = FlatParamHandle._get_sharded_size(whole, rank, parts)
                self.assertEqual(found, torch.Size([size]), where)
        with self.assertRaisesRegex(AssertionError, "Expected 1D tensor shape, got"):
            FlatParamHandle._get_sharded_size(torch.ones(2, 2), 0, 2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_names_in_a_shard(self):
        model = self._tied()
        handle = self._handle(model.parameters(), model)
        # 12 and 4 elements of a, 12 and 3 of b
        shared = [("weight", "c"), ("bias", "c")]
        self.assertEqual([*handle.shared_param_module_names()], shared)
        own = [(kind, layer) for layer in "ab" for kind in ("weight", "bias")]
        self.assertEqual([*handle.param_module_names()], own + shared)
        self.assertEqual(handle._get_modules(), {model.a, model.b})
        handle.shard()
        names = [["a.weight", "a.bias"], ["b.weight", "b.bias"]][self.rank]
        self.assertEqual(handle._fqns_in_shard, names)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parameters_that_cannot_be_flattened(self):
        """Such parameters are refused, with an error that says how they differ."""
        one, flat = (
            torch.ones(2),
            self._handle((holder := nn.Linear(2, 2)).parameters(), holder).flat_param,
        )
        cases = {
            "Cannot flatten integer dtype tensors": [one.int()],
            "uniform dtype but got torch.float32 and torch.float64": [
                one,
                one.double(),
            ],
            "uniform `requires_grad` when `use_orig_params=False`": [
                nn.Parameter(one),
                one,
            ],
            "on the same device but got both": [one, torch.ones(2, device="meta")],
            "Cannot flatten a `FlatParameter`": [flat],
        }
        for message, tensors in cases.items():
            params = [
                tensor
                if isinstance(tensor, nn.Parameter)
                else nn.Parameter(tensor, requires_grad=False)
                for tensor in tensors
            ]
            with self.assertRaisesRegex(ValueError, message):
                self._handle(params, nn.ParameterList(params))


if __name__ == "__main__":
    run_tests()
