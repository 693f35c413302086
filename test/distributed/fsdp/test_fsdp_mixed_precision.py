# Owner(s): ["oncall: distributed"]
"""Mixed precision of FSDP1: the type of each tensor at each moment, and correct
training in these types.

A wrong type raises no error; training is only slower or less accurate. So the tests
check every type where it is used: in forward, in collectives, in the optimizer, in
state dicts.
"""

import contextlib
import copy
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    TransformerWithSharedParams,
    get_devtype,
    get_full_params,
    patch_reduce_scatter,
    skip_parameter_offload,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HALF, BRAIN, SINGLE, DOUBLE = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)

ALL_HALF = MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF)
ALL_DIFFERENT = MixedPrecision(
    param_dtype=HALF, reduce_dtype=SINGLE, buffer_dtype=BRAIN
)
PRECISIONS = [
    subtest(ALL_HALF, name="all_half"),
    subtest(MixedPrecision(reduce_dtype=HALF), name="reduce_only"),
    subtest(MixedPrecision(buffer_dtype=HALF), name="buffers_only"),
    subtest(
        MixedPrecision(param_dtype=HALF, buffer_dtype=HALF),
        name="parameters_and_buffers",
    ),
    subtest(MixedPrecision(), name="none"),
    subtest(ALL_DIFFERENT, name="all_different"),
]
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
OFFLOADS = [CPUOffload(offload_params=False), CPUOffload(offload_params=True)]
FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"

# Neither the parameters' type nor one that a precision above casts to.
BUFFER_DTYPE = DOUBLE


class Probe(nn.Module):
    """A linear layer that accepts an input of any type and records the types that its
    forward sees.
    """

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.register_buffer("buffer", torch.randn(1, 2, dtype=BUFFER_DTYPE))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {
            "input": x.dtype,
            "parameter": self.linear.weight.dtype,
            "buffer": self.buffer.dtype,
        }
        return self.linear(x.to(self.linear.weight.dtype))


@contextlib.contextmanager
def noted_reductions() -> Iterator[list[torch.dtype]]:
    """Yield a list that collects the types of the output and input of each
    reduce-scatter, in order.
    """
    types: list[torch.dtype] = []
    reduce_scatter = dist.reduce_scatter_single

    def noting(
        output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        types.extend((output.dtype, input.dtype))
        return reduce_scatter(output, input, *args, **kwargs)

    with patch_reduce_scatter(noting):
        yield types


class MixedPrecisionTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _fsdp(
        self,
        module: nn.Module,
        precision: MixedPrecision | None = None,
        **fsdp_kwargs: Any,
    ) -> FSDP:
        return FSDP(
            module.to(self.device),
            device_id=self.device,
            mixed_precision=precision,
            **fsdp_kwargs,
        )

    def _nested(
        self, param_dtype: torch.dtype, precision: MixedPrecision, **fsdp_kwargs: Any
    ) -> FSDP:
        torch.manual_seed(0)
        inner, outer = Probe().to(self.device), Probe().to(self.device)
        inner.linear.to(param_dtype)
        outer.linear.to(param_dtype)
        options = {
            "device_id": self.device,
            "mixed_precision": precision,
            **fsdp_kwargs,
        }
        return FSDP(nn.Sequential(FSDP(inner, **options), outer), **options)

    def _rows(self, dtype: torch.dtype = SINGLE, width: int = 10) -> torch.Tensor:
        return torch.randn(3, width, device=self.device, dtype=dtype)

    def _probes(self, model: FSDP) -> list[Probe]:
        return [module for module in model.modules() if isinstance(module, Probe)]


class TypesOfTraining(MixedPrecisionTest):
    """Checks types over a few training steps. Subclasses set the world size."""

    def _check_low_precision_shards(
        self, model: FSDP, precision: MixedPrecision
    ) -> None:
        """Low-precision copies of the shards are freed after use, and not made if
        nothing is cast.
        """
        for module in FSDP.fsdp_modules(model):
            if precision.param_dtype is None:
                self.assertFalse(hasattr(module._flat_param, "_mp_shard"))
            else:
                held = module._flat_param._mp_shard.untyped_storage().size()
                self.assertEqual(held, 0, "bytes held by a shard in low precision")

    def _check_buffers(self, model: FSDP, precision: MixedPrecision) -> None:
        expected = precision.buffer_dtype or BUFFER_DTYPE
        self.assertEqual([buffer.dtype for buffer in model.buffers()], [expected] * 2)

    def _check_forward(
        self, model: FSDP, precision: MixedPrecision, full: torch.dtype
    ) -> None:
        compute = precision.param_dtype or full
        expected = {
            "input": compute,
            "parameter": compute,
            "buffer": precision.buffer_dtype or BUFFER_DTYPE,
        }
        self.assertEqual([probe.seen for probe in self._probes(model)], [expected] * 2)
        self._check_buffers(model, precision)
        if any(
            module._handle.uses_sharded_strategy for module in FSDP.fsdp_modules(model)
        ):
            self._check_low_precision_shards(model, precision)

    def _check_at_rest(
        self, model: FSDP, precision: MixedPrecision, full: torch.dtype
    ) -> None:
        """The optimizer and state dicts see full precision. Buffers stay cast until
        they are saved.
        """
        self._check_low_precision_shards(model, precision)
        gradients = [
            param.grad for param in model.parameters() if param.grad is not None
        ]
        self.assertTrue(gradients)
        for tensor in (*model.parameters(), *gradients):
            self.assertEqual(tensor.dtype, full)
        with FSDP.summon_full_params(model):
            self._check_low_precision_shards(model, precision)
            self.assertEqual({param.dtype for param in model.parameters()}, {full})
        for name, tensor in model.state_dict().items():
            self.assertEqual(
                tensor.dtype, BUFFER_DTYPE if name.endswith("buffer") else full, name
            )
        self._check_buffers(model, precision)

    def _test_types(
        self,
        precision: MixedPrecision,
        full: torch.dtype,
        cpu_offload: CPUOffload,
        scales: bool = False,
        **fsdp_kwargs: Any,
    ) -> None:
        skip_parameter_offload(cpu_offload)
        model = self._nested(full, precision, cpu_offload=cpu_offload, **fsdp_kwargs)
        optim = torch.optim.Adam(model.parameters())
        scaler = ShardedGradScaler(
            device=get_devtype().type, enabled=scales, init_scale=4.0
        )
        with noted_reductions() as reduced:
            for _ in range(2):
                optim.zero_grad()
                loss = scaler.scale(model(self._rows(full)).sum())
                self.assertEqual(loss.dtype, precision.param_dtype or full)
                self._check_forward(model, precision, full)
                loss.backward()
                self._check_at_rest(model, precision, full)
                scaler.step(optim)
                scaler.update()
        if self.world_size > 1:
            expected = precision.reduce_dtype or precision.param_dtype or full
            self.assertEqual(
                reduced,
                [expected] * 8,
                "types of reductions and results",
            )
        moments = [
            state[name]
            for state in optim.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        self.assertEqual({moment.dtype for moment in moments}, {full})


class TestFSDPMixedPrecisionSharded(TypesOfTraining):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("precision", PRECISIONS)
    def test_mixed_precision_e2e(self, precision):
        self.run_subtests(
            {
                "full": [SINGLE, DOUBLE],
                "cpu_offload": OFFLOADS,
                "sharding_strategy": STRATEGIES,
            },
            self._test_types,
            precision=precision,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("precision", PRECISIONS)
    def test_mixed_precision_with_scaler_and_original_parameters(self, precision):
        self.run_subtests(
            {
                "full": [SINGLE],
                "cpu_offload": OFFLOADS,
                "use_orig_params": [False, True],
                "scales": [True],
            },
            self._test_types,
            precision=precision,
        )


class TestFSDPMixedPrecisionUnsharded(TypesOfTraining):
    """One rank: nothing to shard, but still something to cast."""

    @property
    def world_size(self) -> int:
        return 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    @parametrize("precision", PRECISIONS)
    def test_mixed_precision_e2e(self, precision):
        self.run_subtests(
            {
                "full": [SINGLE, DOUBLE],
                "cpu_offload": OFFLOADS,
                "sharding_strategy": STRATEGIES[:1],
            },
            self._test_types,
            precision=precision,
        )


class TestFSDPMixedPrecisionNumerics(MixedPrecisionTest):
    def _reference_step(
        self, module: nn.Module, rows: torch.Tensor, precision: MixedPrecision
    ) -> None:
        """Set the mean gradients of ``module``: computed in one type, summed in
        another, stored in float32.
        """
        low = copy.deepcopy(module).to(precision.param_dtype or SINGLE)
        low(rows).square().sum().backward()
        for param, low_param in zip(module.parameters(), low.parameters(), strict=True):
            grad = (
                low_param.grad.to(precision.reduce_dtype or low_param.dtype)
                / self.world_size
            )
            dist.all_reduce(grad)
            param.grad = grad.to(param.dtype)

    def _test_parity(self, precision: MixedPrecision, **fsdp_kwargs: Any) -> None:
        torch.manual_seed(0)
        reference = nn.Sequential(Probe(), Probe()).to(self.device)
        model = self._fsdp(
            copy.deepcopy(reference),
            precision,
            auto_wrap_policy=ModuleWrapPolicy({Probe}),
            **fsdp_kwargs,
        )
        before = get_full_params(model)
        optims = [
            torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9)
            for each in (reference, model)
        ]
        for step in range(3):
            torch.manual_seed(10 * step + self.rank)
            rows = self._rows()
            for optim in optims:
                optim.zero_grad()
            self._reference_step(reference, rows, precision)
            model(rows).square().sum().backward()
            for optim in optims:
                optim.step()
        after = get_full_params(model)
        self.assertNotEqual(after, before)
        # A sum of two addends is rounded once, in either order, so the results must be
        # equal.
        self.assertEqual(after, list(reference.parameters()), atol=0, rtol=0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("param_dtype", [HALF, BRAIN, None])
    def test_training_is_that_of_a_copy_in_low_precision(self, param_dtype):
        self.run_subtests(
            {
                "precision": [
                    MixedPrecision(param_dtype, reduce_dtype)
                    for reduce_dtype in (BRAIN, SINGLE, None)
                ],
                "sharding_strategy": STRATEGIES,
                "use_orig_params": [False, True],
            },
            self._test_parity,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_scaler_saves_gradients_that_half_precision_loses(self):
        """A gradient of 2**-26 is zero in float16, and exact if the loss is scaled by
        2**16.
        """

        def gradient(scales: bool) -> torch.Tensor:
            torch.manual_seed(0)
            model = self._fsdp(nn.Linear(4, 4, bias=False), ALL_HALF)
            optim = torch.optim.SGD(model.parameters(), lr=1.0)
            scaler = ShardedGradScaler(
                device=get_devtype().type, enabled=scales, init_scale=2.0**16
            )
            rows = torch.full((1, 4), 2.0**-13, device=self.device)
            scaler.scale(model(rows).float().sum() * 2.0**-13).backward()
            scaler.unscale_(optim)
            return next(model.parameters()).grad

        self.assertEqual(gradient(False), torch.zeros(8, device=self.device))
        self.assertEqual(
            gradient(True),
            torch.full((8,), 2.0**-26, device=self.device),
            atol=0,
            rtol=0,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_accumulate_in_full_precision(self):
        """2048 + 1 is 2049 in float32, but 2048 in float16."""
        model = self._fsdp(nn.Linear(1, 2, bias=False), ALL_HALF)
        for value in (2048.0, 1.0):
            model(torch.full((1, 1), value, device=self.device)).sum().backward()
        self.assertEqual(
            next(model.parameters()).grad,
            torch.full((1,), 2049.0, device=self.device),
            atol=0,
            rtol=0,
        )


class TestFSDPMixedPrecisionInputs(MixedPrecisionTest):
    def _seen(self, root: MixedPrecision | None, child: MixedPrecision | None) -> str:
        model = nn.ModuleDict({"plain": Probe(), "child": Probe()})
        model["child"] = self._fsdp(model["child"], child)
        first, second = self._probes(model)
        chain = nn.Sequential(*model.values())
        self._fsdp(chain, root)(self._rows()).sum().backward()
        return "; ".join(
            f"{kind} {first.seen[kind]} then {second.seen[kind]}"
            for kind in ("input", "parameter")
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_root_and_child_cast_inputs_as_configured(self):
        """Two options say whether the root casts its inputs, one whether a child does.
        By default only the root casts.

        A plain module within the root belongs to the root. The child's input is the
        plain module's output, in the type in which the root computes.
        """
        table = []
        for cast_root, cast in itertools.product([True, False], repeat=2):
            root = MixedPrecision(
                HALF, cast_root_forward_inputs=cast_root, cast_forward_inputs=cast
            )
            for child_cast in (True, False):
                child = MixedPrecision(BRAIN, cast_forward_inputs=child_cast)
                table.append(
                    f"root's {cast_root:d} own {cast:d} child's {child_cast:d}: "
                    f"{self._seen(root, child)}"
                )
        table.append(f"root only: {self._seen(MixedPrecision(HALF), None)}")
        table.append(f"child only: {self._seen(None, MixedPrecision(HALF))}")
        self.assertExpectedInline(
            "\n".join(table).replace("torch.", ""),
            """\
root's 1 own 1 child's 1: input float16 then bfloat16; parameter float16 then bfloat16
root's 1 own 1 child's 0: input float16 then float16; parameter float16 then bfloat16
root's 1 own 0 child's 1: input float16 then bfloat16; parameter float16 then bfloat16
root's 1 own 0 child's 0: input float16 then float16; parameter float16 then bfloat16
root's 0 own 1 child's 1: input float16 then bfloat16; parameter float16 then bfloat16
root's 0 own 1 child's 0: input float16 then float16; parameter float16 then bfloat16
root's 0 own 0 child's 1: input float32 then bfloat16; parameter float16 then bfloat16
root's 0 own 0 child's 0: input float32 then float16; parameter float16 then bfloat16
root only: input float16 then float16; parameter float16 then float32
child only: input float32 then float32; parameter float32 then float16""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_keyword_inputs_are_cast_like_others(self):
        """So are tensors in lists and dictionaries. Whatever is no floating-point
        tensor arrives as it was.
        """

        class Keywords(nn.Linear):
            def forward(self, x, *, scale, parts, index, name):
                seen.append(
                    [each.dtype for each in (x, scale, *parts["all"], index)] + [name]
                )
                return super().forward(x) * scale + sum(parts["all"])

        class Caller(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                index = torch.zeros(1, dtype=torch.int64, device=x.device)
                more = {"parts": {"all": [x, x]}, "index": index, "name": "a"}
                return self.inner(x, scale=x, **more)

        for cast in (True, False):
            seen: list[list[Any]] = []
            precision = MixedPrecision(BRAIN, cast_forward_inputs=cast)
            inner = self._fsdp(Keywords(10, 10), precision)
            found = BRAIN if cast else SINGLE
            with contextlib.nullcontext() if cast else self.assertRaises(RuntimeError):
                self._fsdp(Caller(inner))(self._rows()).sum().backward()
            self.assertEqual(seen, [[found] * 4 + [torch.int64, "a"]], f"{cast=}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_input_gradient_has_the_type_of_the_input(self):
        model = self._fsdp(nn.Linear(10, 10), ALL_HALF)
        rows = self._rows().requires_grad_()
        model(rows).sum().backward()
        self.assertEqual(rows.grad.dtype, SINGLE)
        self.assertGreater(rows.grad.abs().sum().item(), 0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_embedding_indices_are_not_cast(self):
        self.run_subtests(
            {
                "precision": [
                    ALL_HALF,
                    MixedPrecision(reduce_dtype=HALF),
                    MixedPrecision(HALF, SINGLE, HALF),
                ]
            },
            self._test_embedding,
        )

    def _test_embedding(self, precision: MixedPrecision) -> None:
        transformer = TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.NO_FSDP,
            DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
        )
        seen: list[torch.dtype] = []
        transformer.embed_tokens.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].dtype)
        )
        model = self._fsdp(transformer, precision)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        before = get_full_params(model)
        inputs = transformer.get_input(self.device)
        loss = transformer.get_loss(inputs, model(*inputs))
        self.assertEqual(loss.dtype, precision.param_dtype or SINGLE)
        loss.backward()
        optim.step()
        self.assertEqual(seen, [torch.int64] * 2)
        self.assertEqual(transformer.long_buffer.dtype, torch.int64)
        self.assertNotEqual(get_full_params(model), before)


class Normalized(nn.Module):
    """A norm between linear layers, which records the types of its input and output."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8, bias=False)
        self.norm = norm
        self.last = nn.Linear(8, 4, bias=False)
        self.seen: list[torch.dtype] = []
        norm.register_forward_hook(
            lambda module, args, output: self.seen.extend(
                (args[0].dtype, module.weight.dtype, output.dtype)
            )
        )
        self.last.register_forward_pre_hook(
            lambda _, args: self.seen.append(args[0].dtype)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


class TestFSDPMixedPrecisionModules(MixedPrecisionTest):
    def _check_norm_in_full_precision(self, model: FSDP) -> None:
        self.assertEqual(
            [
                name
                for name, module in model.named_modules()
                if isinstance(module, FSDP)
            ],
            ["", "_fsdp_wrapped_module.norm"],
        )
        self.assertEqual(model.norm.mixed_precision.param_dtype, None)
        self.assertEqual(model.mixed_precision.param_dtype, HALF)
        before = get_full_params(model)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        model(self._rows(width=2)).square().sum().backward()
        optim.step()
        self.assertEqual(model.module.seen, [SINGLE, SINGLE, SINGLE, HALF])
        for old, new in zip(before, get_full_params(model), strict=True):
            self.assertNotEqual(old, new)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("convert_sync_bn", [False, True])
    def test_batch_norm_stays_in_full_precision(self, convert_sync_bn):
        if convert_sync_bn:
            skip_without_accelerator("SyncBatchNorm computes on accelerators only")
        norm = nn.BatchNorm1d(8)
        if convert_sync_bn:
            norm = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
        with self.assertWarnsRegex(
            UserWarning, r"BatchNorm[\s\S]*will be wrapped as separate FSDP"
        ):
            model = self._fsdp(
                Normalized(norm),
                ALL_HALF,
                auto_wrap_policy=lambda *args, **kwargs: False,
            )
        self._check_norm_in_full_precision(model)
        self.assertEqual(model.norm.running_mean.dtype, SINGLE)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_classes_stay_in_full_precision(self):
        precision = MixedPrecision(
            HALF, HALF, HALF, _module_classes_to_ignore=(nn.LayerNorm,)
        )
        with self.assertWarnsRegex(UserWarning, "LayerNorm"):
            model = self._fsdp(
                Normalized(nn.LayerNorm(8)),
                precision,
                auto_wrap_policy=lambda *args, **kwargs: False,
            )
        self._check_norm_in_full_precision(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_batch_norm_is_cast_if_no_class_is_ignored(self):
        precision = MixedPrecision(HALF, HALF, HALF, _module_classes_to_ignore=())
        model = self._fsdp(
            Normalized(nn.BatchNorm1d(8)),
            precision,
            auto_wrap_policy=lambda *args, **kwargs: False,
        )
        self.assertNotIsInstance(model.norm, FSDP)
        model(self._rows(width=2))
        self.assertEqual(model.module.seen, [HALF] * 4)
        self.assertEqual(
            (model.norm.running_mean.dtype, model.norm.num_batches_tracked.dtype),
            (HALF, torch.int64),
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_modules_of_unlike_precision_under_one_root(self):
        types = [HALF, BRAIN, SINGLE]
        layers = [
            self._fsdp(Probe(), MixedPrecision(dtype, cast_forward_inputs=True))
            for dtype in types
        ]
        model = self._fsdp(nn.Sequential(*layers))
        with noted_reductions() as reduced:
            model(self._rows()).sum().backward()
        self.assertEqual(
            reduced, [dtype for dtype in reversed(types) for _ in ("output", "input")]
        )
        for probe, dtype in zip(self._probes(model), types, strict=True):
            self.assertEqual(
                probe.seen, {"input": dtype, "parameter": dtype, "buffer": BUFFER_DTYPE}
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_buffers_follow_the_innermost_wrapper(self):
        inner = self._fsdp(Probe(), MixedPrecision(buffer_dtype=BRAIN))
        model = self._fsdp(
            nn.Sequential(inner, Probe()), MixedPrecision(buffer_dtype=HALF)
        )
        model(self._rows())
        self.assertEqual(
            [probe.seen["buffer"] for probe in self._probes(model)], [BRAIN, HALF]
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_buffers_of_ignored_modules_are_not_cast(self):
        ignored = Probe().to(self.device)
        model = self._fsdp(
            nn.Sequential(Probe(), ignored), ALL_HALF, ignored_modules=[ignored]
        )
        model(self._rows())
        self.assertEqual(
            [probe.seen["buffer"] for probe in self._probes(model)],
            [HALF, BUFFER_DTYPE],
        )
        self.assertEqual(
            [probe.seen["parameter"] for probe in self._probes(model)], [HALF, SINGLE]
        )


class TestFSDPMixedPrecisionGradients(MixedPrecisionTest):
    def _test_kept(
        self,
        precision: MixedPrecision,
        expected: torch.dtype,
        options: dict[str, Any],
    ) -> None:
        skip_parameter_offload(options.get("cpu_offload", CPUOffload()))
        model = self._nested(SINGLE, precision, **options)
        for _ in range(2):
            model(self._rows()).sum().backward()
            with_gradient = [
                param for param in model.parameters() if param.grad is not None
            ]
            gradients = [param.grad for param in with_gradient]
            self.assertTrue(gradients)
            self.assertEqual({grad.dtype for grad in gradients}, {expected})
            self.assertEqual(
                [grad.device for grad in gradients],
                [param.device for param in with_gradient],
            )
            model.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("keep", [True, False])
    def test_keep_low_precision_grads(self, keep):
        # The only combination with offloading that works. In others FSDP assigns a host
        # parameter a gradient of another type than its own, which autograd refuses.
        offloaded = {
            "use_orig_params": True,
            "cpu_offload": CPUOffload(offload_params=True),
        }
        on_device = [
            {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
            for use_orig_params, strategy in itertools.product(
                [False, True], STRATEGIES
            )
        ]
        self.run_subtests(
            {"options": [*on_device, offloaded]},
            self._test_kept,
            precision=MixedPrecision(HALF, HALF, keep_low_precision_grads=keep),
            expected=HALF if keep else SINGLE,
        )


class TestFSDPMixedPrecisionEval(MixedPrecisionTest):
    def _test_eval(self, full_in_eval: bool, use_orig_params: bool) -> None:
        with mock.patch.dict(
            os.environ, {FULL_PRECISION_IN_EVAL: str(int(full_in_eval))}
        ):
            model = self._nested(SINGLE, ALL_HALF, use_orig_params=use_orig_params)
        rows = self._rows()
        whole = [param.detach().clone() for param in get_full_params(model)]

        for training in (True, False, True):
            model.train(training)
            output = model(rows)
            compute = SINGLE if full_in_eval and not training else HALF
            buffers = BUFFER_DTYPE if full_in_eval and not training else HALF
            expected = {"input": compute, "parameter": compute, "buffer": buffers}
            self.assertEqual(
                [probe.seen for probe in self._probes(model)], [expected] * 2
            )
            self.assertEqual(output.dtype, compute)
            if compute == SINGLE:
                self._check_output(model, rows, output)
            output.sum().backward()
            self.assertEqual(
                {
                    param.grad.dtype
                    for param in model.parameters()
                    if param.grad is not None
                },
                {SINGLE},
            )
            model.zero_grad()
        self.assertEqual(get_full_params(model), whole)

    def _check_output(
        self, model: FSDP, rows: torch.Tensor, output: torch.Tensor
    ) -> None:
        with FSDP.summon_full_params(model):
            weights = [
                probe.linear.weight.detach().clone() for probe in self._probes(model)
            ]
        self.assertEqual(output, rows @ weights[0].T @ weights[1].T)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("full_in_eval", [True, False])
    def test_full_precision_in_eval(self, full_in_eval):
        """With the option set, evaluation uses full precision; training after it does
        not.
        """
        self.run_subtests(
            {"use_orig_params": [False, True]},
            self._test_eval,
            full_in_eval=full_in_eval,
        )


for case in (
    TestFSDPMixedPrecisionSharded,
    TestFSDPMixedPrecisionUnsharded,
    TestFSDPMixedPrecisionNumerics,
    TestFSDPMixedPrecisionModules,
    TestFSDPMixedPrecisionGradients,
    TestFSDPMixedPrecisionEval,
):
    instantiate_parametrized_tests(case)

if __name__ == "__main__":
    run_tests()
