# Owner(s): ["oncall: distributed"]
"""``FSDP.summon_full_params``: exposing, writing back, freeing and errors.

On the host, two kinds of subtests are skipped, and the test run counts them.
"""

import contextlib
import copy
import itertools
import sys
from typing import Any

import torch
import torch.distributed.fsdp._traversal_utils as traversal_utils
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import TrainingState, clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel.distributed import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    TransformerWithSharedParams,
    get_full_params,
    own_slices,
    refused_while_unsharded,
    skip_parameter_offload,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HOST = torch.device("cpu")

# The layers that NestedWrappedModule does not wrap: the first and the last.
UNMANAGED_NAMES = {
    f"module.{index}.{kind}" for index in (0, 3) for kind in ("weight", "bias")
}

PRECISIONS = [MixedPrecision(param_dtype=torch.float16), None]
OFFLOADS = [CPUOffload(offload_params=False), CPUOffload(offload_params=True)]
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


def leave_out_offload_of_flat_parameter(
    offload_to_cpu: bool, use_orig_params: bool
) -> None:
    # FSDP frees the unsharded storage although it still has views of it, if the "copy"
    # to the host is not a copy.
    if offload_to_cpu and not use_orig_params:
        skip_without_accelerator(
            "summon_full_params(offload_to_cpu=True) with use_orig_params=False "
            "needs memory apart from the host's"
        )


def unshard_once(module: FSDP) -> None:
    with FSDP.summon_full_params(module):
        pass


class UnshardsItsWrapper(nn.Module):
    """Gets its own FSDP wrapper as input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, wrapper):
        unshard_once(wrapper)


class TestUnshardParamsBase(FSDPTest):
    """Methods of the cases with and without sharding."""

    @property
    def world_size(self):
        return 2

    def _fsdp(self, module: nn.Module, **fsdp_kwargs: Any) -> FSDP:
        return FSDP(module, device_id=self.device, **fsdp_kwargs)

    def _linear(self, features_in: int, features_out: int) -> nn.Linear:
        return nn.Linear(features_in, features_out, bias=False, device=self.device)

    def _two_level_model(self, **fsdp_kwargs: Any) -> FSDP:
        """Return a root with a parameter of 15 elements that contains an FSDP module
        with one of 25.
        """
        inner = self._fsdp(self._linear(5, 5), **fsdp_kwargs)
        return self._fsdp(nn.Sequential(inner, self._linear(5, 3)), **fsdp_kwargs)

    def _test_unshard_params_writeback(
        self,
        writeback: bool,
        check_outer: bool,
        cpu_offload: CPUOffload,
        **fsdp_kwargs: Any,
    ):
        skip_parameter_offload(cpu_offload)
        model = self._two_level_model(cpu_offload=cpu_offload, **fsdp_kwargs)
        uses_sharded_strategy = model.sharding_strategy != ShardingStrategy.NO_SHARD
        # The root's own parameter comes last with use_orig_params, and first as a flat
        # parameter.
        outer, inner = (
            next(iter(model.parameters())),
            next(iter(model.module[0].parameters())),
        )
        if fsdp_kwargs["use_orig_params"]:
            outer = model.module[1].weight
        param = outer if check_outer else inner
        self.assertIsNot(outer, inner)
        with torch.no_grad():
            param.fill_(self.rank + 2)

        with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
            for full_param in model.parameters():
                full_param.zero_()

        # Without sharding the full parameter is the parameter itself, unless it was
        # copied from the host.
        persists = writeback or (
            not uses_sharded_strategy and not cpu_offload.offload_params
        )
        values = self._without_padding(param)
        self.assertEqual(
            values, torch.full_like(values, 0 if persists else self.rank + 2)
        )
        self.assertGreater(values.numel(), 0)
        if cpu_offload.offload_params:
            for local_param in model.parameters():
                self.assertEqual(local_param.device, HOST)

    def _without_padding(self, param: FlatParameter | nn.Parameter) -> torch.Tensor:
        padding = param._shard_numel_padded if isinstance(param, FlatParameter) else 0
        return param.detach()[: len(param) - padding]

    def _get_test_unshard_params_writeback_config(self) -> dict[str, list[Any]]:
        return {
            "writeback": [True, False],
            "check_outer": [True, False],
            "mixed_precision": PRECISIONS,
            "cpu_offload": OFFLOADS,
            "use_orig_params": [True, False],
        }

    def _test_unshard_params_param_data(
        self,
        rank0_only: bool,
        offload_to_cpu: bool,
        cpu_offload: CPUOffload,
        mixed_precision: MixedPrecision | None,
        use_orig_params: bool,
    ):
        skip_parameter_offload(cpu_offload)
        leave_out_offload_of_flat_parameter(offload_to_cpu, use_orig_params)
        local_model = self._nested(FSDPInitMode.NO_FSDP)
        fsdp_model = self._nested(
            FSDPInitMode.RECURSIVE,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            use_orig_params=use_orig_params,
        )
        # The root is not wrapped, so each of its FSDP submodules is an FSDP root.
        self.assertNotIsInstance(fsdp_model, FSDP)
        with FSDP.summon_full_params(
            fsdp_model,
            rank0_only=rank0_only,
            writeback=not rank0_only,
            offload_to_cpu=offload_to_cpu,
        ):
            if rank0_only and self.rank != 0:
                self._check_resharded(fsdp_model)
            else:
                self._check_exposed(local_model, fsdp_model, offload_to_cpu)
        self.assertGreater(
            sum(
                bool(state._is_root)
                for state in traversal_utils._get_fsdp_states(fsdp_model)
            ),
            1,
        )

    def _nested(self, fsdp_init_mode: FSDPInitMode, **fsdp_kwargs: Any) -> nn.Module:
        return NestedWrappedModule.init(
            self.process_group,
            fsdp_init_mode,
            DEVICEInitMode.DEVICE_BEFORE,
            fsdp_kwargs=fsdp_kwargs,
            deterministic=True,
        )

    def _check_exposed(
        self, local_model: nn.Module, fsdp_model: nn.Module, offload_to_cpu: bool
    ):
        for (local_name, local_param), (fsdp_name, fsdp_param) in itertools.zip_longest(
            local_model.named_parameters(),
            fsdp_model.named_parameters(),
            fillvalue=("missing", None),
        ):
            name = clean_tensor_name(fsdp_name)
            self.assertEqual(name, local_name)
            self.assertIsInstance(fsdp_param, nn.Parameter)
            offloaded = offload_to_cpu and name not in UNMANAGED_NAMES
            self.assertEqual(
                fsdp_param.device, HOST if offloaded else local_param.device
            )
            # Full precision, even if FSDP computes in a lower one.
            self.assertEqual(fsdp_param.dtype, local_param.dtype)
            self.assertEqual(fsdp_param.shape, local_param.shape)
            # If moving to the host is not a copy, FSDP has freed what it exposes, and
            # reading it would crash.
            if not offloaded or fsdp_param.untyped_storage().size():
                self.assertEqual(fsdp_param, local_param, exact_device=False)

    def _check_resharded(self, fsdp_model: nn.Module):
        handles = traversal_utils._get_fsdp_handles(fsdp_model)
        self.assertGreater(len(handles), 0)
        for handle in handles:
            flat_param = handle.flat_param
            local_size = (
                flat_param._sharded_size
                if handle.uses_sharded_strategy
                else flat_param._unpadded_unsharded_size
            )
            self.assertEqual(flat_param.shape, local_size)

    def _get_test_unshard_params_param_data_config(self) -> dict[str, list[Any]]:
        return {
            "rank0_only": [False, True],
            "offload_to_cpu": [False, True],
            "cpu_offload": OFFLOADS,
            "mixed_precision": PRECISIONS,
            "use_orig_params": [True, False],
        }

    def _check_writeback(self) -> None:
        self.run_subtests(
            self._get_test_unshard_params_writeback_config(),
            self._test_unshard_params_writeback,
        )

    def _check_param_data(self, **instead: list[Any]) -> None:
        config = self._get_test_unshard_params_param_data_config() | instead
        self.run_subtests(config, self._test_unshard_params_param_data)


class TestUnshardParams(TestUnshardParamsBase):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_params_writeback(self):
        """``writeback`` decides whether changes persist after the context."""
        self._check_writeback()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_params_param_data(self):
        """Below a root that is not wrapped, all parameters are exposed in full with
        their data.
        """
        self._check_param_data()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_singleton_param_writeback(self):
        """A parameter of one element is written back on the rank that has it. Padding
        on other ranks is unchanged.
        """
        model = self._fsdp(self._linear(1, 1))
        flat_param = model._handle.flat_param
        self.assertEqual(flat_param.numel(), 1)
        with torch.no_grad():
            flat_param[0] = self.rank + 2  # rank 1 writes to padding
        with FSDP.summon_full_params(model, writeback=True):
            self.assertEqual(flat_param.numel(), 1)
            with torch.no_grad():
                flat_param.zero_()
        # Correctness does not need the padding's value; that it is unchanged shows that
        # nothing was written.
        self.assertEqual(flat_param[0], 0 if self.rank == 0 else self.rank + 2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_params_respects_reshard(self):
        """Parameters that FSDP keeps unsharded between forward and backward stay
        unsharded; freed ones stay freed.

        Mixed precision is the exception: the context unshards in full precision, so a
        low-precision parameter that was kept would be stale, and is freed.
        """
        self.run_subtests(
            {
                "rank0_only": [False, True],
                "offload_to_cpu": [False, True],
                "mixed_precision": PRECISIONS,
                "use_orig_params": [False, True],
            },
            self._test_unshard_params_respects_reshard,
        )

    def _test_unshard_params_respects_reshard(
        self,
        rank0_only: bool,
        offload_to_cpu: bool,
        mixed_precision: MixedPrecision | None,
        use_orig_params: bool,
    ):
        """NOTE: This method depends on FSDP internals."""
        leave_out_offload_of_flat_parameter(offload_to_cpu, use_orig_params)
        model = self._two_level_model(
            mixed_precision=mixed_precision, use_orig_params=use_orig_params
        )
        outer, inner = model._handle.flat_param, model.module[0]._handle.flat_param
        unsharded_numel = outer.numel() * self.world_size

        def check_unsharded(expected_outer: int) -> None:
            self.assertEqual(self._unsharded_storage_numel(outer), expected_outer)
            self.assertEqual(self._unsharded_storage_numel(inner), 0)

        def unshard_and_reshard() -> None:
            # Where the device is the host, what is copied back is a parameter, not a
            # copy of one on the device. With autograd, FSDP's buffer would then be a
            # result of it.
            with (
                torch.no_grad() if self.device == HOST else contextlib.nullcontext(),
                FSDP.summon_full_params(
                    model,
                    rank0_only=rank0_only,
                    writeback=not rank0_only,
                    offload_to_cpu=offload_to_cpu,
                ),
            ):
                pass

        def forward() -> torch.Tensor:
            return model(torch.zeros(5, device=self.device))

        # By default the root stays unsharded after forward, other modules do not; after
        # backward none does.
        output = forward()
        check_unsharded(unsharded_numel)
        output.sum().backward()
        check_unsharded(0)

        output = forward()
        unshard_and_reshard()
        check_unsharded(0 if mixed_precision else unsharded_numel)
        output.sum().backward()
        unshard_and_reshard()
        check_unsharded(0)

    def _unsharded_storage_numel(self, flat_param: FlatParameter) -> int:
        unsharded = flat_param._full_param_padded
        return unsharded.untyped_storage().size() // unsharded.element_size()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_params_recurse(self):
        """``recurse`` decides whether FSDP modules below the given one are unsharded
        too.
        """
        self.run_subtests(
            {
                "recurse": [False, True],
                "unshard_outer": [False, True],
                "mixed_precision": PRECISIONS,
                "use_orig_params": [False, True],
            },
            self._test_unshard_params_recurse,
        )

    def _test_unshard_params_recurse(
        self,
        recurse: bool,
        unshard_outer: bool,
        mixed_precision: MixedPrecision | None,
        use_orig_params: bool,
    ):
        """NOTE: This method depends on FSDP internals."""
        model = self._two_level_model(
            mixed_precision=mixed_precision, use_orig_params=use_orig_params
        )
        outer, inner = model._handle.flat_param, model.module[0]._handle.flat_param

        def shard_numel(numel: int) -> int:
            return -(-numel // self.world_size)

        def full_numel(numel: int) -> int:
            # With use_orig_params the flat parameter includes the padding that makes it
            # divisible by the world size.
            return shard_numel(numel) * self.world_size if use_orig_params else numel

        self.assertEqual(inner.numel(), shard_numel(25))
        self.assertEqual(outer.numel(), shard_numel(15))
        with FSDP.summon_full_params(
            model if unshard_outer else model.module[0], recurse=recurse
        ):
            self.assertEqual(
                outer.numel(), full_numel(15) if unshard_outer else shard_numel(15)
            )
            self.assertEqual(
                inner.numel(),
                full_numel(25) if recurse or not unshard_outer else shard_numel(25),
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_named_parameters_and_buffers(self):
        """Under a wrapped root, names and values are the same as without FSDP."""
        self.run_subtests(
            {"prefix": ["", "test_prefix"], "recurse": [False, True]},
            self._test_named_parameters_and_buffers,
        )

    def _test_named_parameters_and_buffers(self, prefix: str, recurse: bool):
        model = self._nested(FSDPInitMode.NO_FSDP)
        # A root outside FSDP would leave FSDP's own prefixes in the names.
        fsdp_model = self._fsdp(
            self._nested(FSDPInitMode.NO_FSDP), process_group=self.process_group
        )
        for owner in (model, fsdp_model):
            owner.register_buffer("buffer", torch.ones(1, device=self.device))
        with FSDP.summon_full_params(fsdp_model):
            for call in ("named_parameters", "named_buffers"):
                expected, actual = (
                    list(getattr(owner, call)(prefix=prefix, recurse=recurse))
                    for owner in (model, fsdp_model)
                )
                self.assertEqual(
                    [name for name, _ in actual], [name for name, _ in expected]
                )
                self.assertEqual(
                    [tensor for _, tensor in actual], [tensor for _, tensor in expected]
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_grads_core(self):
        """``with_grads=True`` exposes the gradients that DDP computes, and writes
        changes to them back.
        """
        self.run_subtests(
            {
                "sharding_strategy": STRATEGIES,
                "use_orig_params": [True],
                "offload_to_cpu": [False, True],
                "writeback": [False, True],
            },
            self._test_with_grads_core,
        )

    def _test_with_grads_core(
        self,
        sharding_strategy: ShardingStrategy,
        use_orig_params: bool,
        offload_to_cpu: bool,
        writeback: bool,
    ):
        fsdp_model = self._transformer(
            FSDPInitMode.RECURSIVE,
            use_orig_params=use_orig_params,
            sharding_strategy=sharding_strategy,
        )

        def full_params(**kwargs: Any):
            return FSDP.summon_full_params(fsdp_model, with_grads=True, **kwargs)

        if offload_to_cpu:
            with self.assertRaisesRegex(NotImplementedError, "is not supported"):
                with full_params(writeback=writeback, offload_to_cpu=True):
                    pass
            return

        ddp_model = DDP(self._transformer(FSDPInitMode.NO_FSDP))
        optims = [
            torch.optim.SGD(model.parameters(), lr=0.1)
            for model in (ddp_model, fsdp_model)
        ]
        for _ in range(2):
            for model in (ddp_model, fsdp_model):
                self._backward(model)
            with full_params(writeback=writeback):
                self._check_params_and_grads(ddp_model, fsdp_model)
                for param in fsdp_model.parameters():
                    param.grad.mul_(3)
            # Without sharding the exposed gradient is the gradient itself.
            if writeback or sharding_strategy == ShardingStrategy.NO_SHARD:
                for param in ddp_model.parameters():
                    param.grad.mul_(3)
            with full_params(writeback=False):
                self._check_params_and_grads(ddp_model, fsdp_model)
            for optim in optims:
                optim.step()
                optim.zero_grad()
            self.assertEqual(get_full_params(fsdp_model), list(ddp_model.parameters()))

    def _transformer(
        self, fsdp_init_mode: FSDPInitMode, **fsdp_kwargs: Any
    ) -> nn.Module:
        return TransformerWithSharedParams.init(
            self.process_group,
            fsdp_init_mode,
            DEVICEInitMode.DEVICE_BEFORE,
            fsdp_kwargs=fsdp_kwargs,
            deterministic=True,
        )

    def _backward(self, model: nn.Module):
        source, target = model.module.get_input(self.device)
        # Ranks have different data, so that a gradient that was not reduced differs.
        output = model((source + self.rank) % 23, target)
        model.module.get_loss((source, target), output).backward()

    def _check_params_and_grads(self, ddp_model: nn.Module, fsdp_model: nn.Module):
        expected = {
            name: (param.detach(), param.grad)
            for name, param in ddp_model.module.named_parameters()
        }
        actual = {
            clean_tensor_name(name): (param.detach(), param.grad)
            for name, param in fsdp_model.named_parameters()
        }
        self.assertEqual(list(actual), list(expected))
        for name, (param, grad) in expected.items():
            self.assertIsNotNone(grad, name)
            self.assertIsNotNone(actual[name][1], name)
            self.assertEqual(actual[name], (param, grad))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_grads_have_the_type_of_their_parameters(self):
        torch.manual_seed(0)
        reference = nn.Linear(5, 3, dtype=torch.float64, device=self.device)
        options: dict[str, Any] = {"use_orig_params": True, "device_id": self.device}
        model = FSDP(copy.deepcopy(reference), **options)
        inputs = torch.randn(2, 5, dtype=torch.float64, device=self.device)
        for each in (reference, model):
            each(inputs).square().mean().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for one, two in zip(
                model.parameters(), reference.parameters(), strict=True
            ):
                self.assertEqual(one.grad, two.grad)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_grads_none_grads(self):
        """Before any backward, ``with_grads=True`` shows no gradient anywhere."""
        self.run_subtests(
            {"sharding_strategy": STRATEGIES}, self._test_with_grads_none_grads
        )

    def _test_with_grads_none_grads(self, sharding_strategy: ShardingStrategy):
        fsdp_model = self._transformer(
            FSDPInitMode.RECURSIVE,
            use_orig_params=True,
            sharding_strategy=sharding_strategy,
        )
        handles = [
            module._handle for module in FSDP.fsdp_modules(fsdp_model) if module._handle
        ]
        self.assertGreater(len(handles), 1)
        for handle in handles:
            self.assertIsNone(handle.flat_param.grad)
        with FSDP.summon_full_params(fsdp_model, with_grads=True):
            for param in fsdp_model.parameters():
                self.assertIsNone(param.grad)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_grads_on_some_ranks(self):
        """Gradients that only one rank has are shown to all, with zeros for the others,
        and stay that rank's own.
        """
        self.run_subtests(
            {"holder": [0, 1], "writeback": [False, True]},
            self._test_with_grads_on_some_ranks,
        )

    def _test_with_grads_on_some_ranks(self, holder: int, writeback: bool):
        model = self._fsdp(Chain(device=self.device), use_orig_params=True)
        model(Chain.rows(self.device, self.world_size, self.rank)).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            all_of_them = {
                clean_tensor_name(name): param.grad.clone()
                for name, param in model.named_parameters()
            }
        for name, param in model.named_parameters():
            shape = None if param.grad is None else param.grad.shape
            expected = param.shape if param.numel() else None
            self.assertEqual(
                shape, expected, f"shape of the gradient of {name} after the context"
            )
        held = own_slices(
            {name: grad.numel() for name, grad in all_of_them.items()},
            holder,
            self.world_size,
        )
        for param in model.parameters():
            if self.rank != holder:
                param.grad = None
        with FSDP.summon_full_params(model, with_grads=True, writeback=writeback):
            for name, param in model.named_parameters():
                part = held[clean_tensor_name(name)]
                expected = torch.zeros(param.numel(), device=self.device)
                expected[part] = all_of_them[clean_tensor_name(name)].reshape(-1)[part]
                self.assertIsNotNone(
                    param.grad,
                    f"no gradient of {name} on this rank, though rank {holder} has one",
                )
                found = param.grad.reshape(-1).clone()
                self.assertEqual(
                    found, expected, f"gradient of {name} that rank {holder} has"
                )
                param.grad.mul_(2)
        factor = 2 if writeback else 1
        for name, param in model.named_parameters():
            own = all_of_them[clean_tensor_name(name)].reshape(-1)[
                held[clean_tensor_name(name)]
            ]
            expected = factor * own if self.rank == holder and own.numel() else None
            self.assertEqual(
                param.grad, expected, f"gradient of {name} after the context"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_grads_on_rank_0(self):
        """With ``rank0_only`` the other ranks keep their shards of parameters and of
        gradients. So does each rank after the context, also after an exception.
        """
        model = self._fsdp(Chain(device=self.device), use_orig_params=True)
        model(Chain.rows(self.device, self.world_size, self.rank)).sum().backward()

        def now() -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
            return {
                clean_tensor_name(name): (
                    param.detach().clone(),
                    None if param.grad is None else param.grad.clone(),
                )
                for name, param in model.named_parameters()
            }

        shards = now()
        with FSDP.summon_full_params(model, with_grads=True):
            whole = now()
        options = {"with_grads": True, "rank0_only": True, "writeback": False}
        for _ in range(2):
            with (
                self.assertRaises(KeyError),
                FSDP.summon_full_params(model, **options),
            ):
                self.assertEqual(now(), shards if self.rank else whole, "in context")
                raise KeyError
            self.assertEqual(now(), shards, "after the context")
            self.assertIs(model.training_state, TrainingState.IDLE)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_nested_contexts(self):
        """Contexts of a root alone and of its submodule nest in any order, and each
        writes back its own.
        """
        self.run_subtests(
            {
                "root_first": [False, True],
                "offload_to_cpu": [False, True],
                "use_orig_params": [False, True],
                "cpu_offload": OFFLOADS,
            },
            self._test_nested_contexts,
        )

    def _test_nested_contexts(
        self,
        root_first: bool,
        offload_to_cpu: bool,
        use_orig_params: bool,
        cpu_offload: CPUOffload,
    ):
        skip_parameter_offload(cpu_offload)
        if offload_to_cpu:
            skip_without_accelerator(
                "writing back from the host needs memory apart from the host's"
            )
        inner = self._fsdp(
            self._linear(5, 5), use_orig_params=use_orig_params, cpu_offload=cpu_offload
        )
        model = self._fsdp(
            nn.Sequential(inner, self._linear(5, 3)),
            use_orig_params=use_orig_params,
            cpu_offload=cpu_offload,
        )
        unshard_once(model)  # the first use decides which module is the root
        outer_first = [model, inner] if root_first else [inner, model]
        written = {}
        with contextlib.ExitStack() as stack:
            for number, module in enumerate(outer_first):
                stack.enter_context(
                    FSDP.summon_full_params(
                        module,
                        recurse=False,
                        writeback=True,
                        offload_to_cpu=offload_to_cpu,
                    )
                )
                own = model.module[1] if module is model else inner.module
                numel = own.weight.numel()
                written[module] = (
                    torch.arange(numel, dtype=torch.float32).view(own.weight.shape)
                    + 100 * number
                )
                with torch.no_grad():
                    own.weight.copy_(written[module])
            with self.assertRaisesRegex(
                AssertionError, "when already unsharding parameters"
            ):
                unshard_once(inner)
        found = {"inner": inner.module, "outer": model.module[1]}
        with FSDP.summon_full_params(model):
            found = {
                name: module.weight.detach().clone().cpu()
                for name, module in found.items()
            }
        self.assertEqual(
            found,
            {"inner": written[inner], "outer": written[model]},
            "parameters written in nested contexts",
        )
        self.assertLess(
            sum(param.numel() for param in inner.parameters()),
            25,
            "the inner module is not sharded again",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_submodule(self):
        """A submodule can be unsharded alone: it then has its own parameters, and its
        sibling still a flat one.
        """
        pairs = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]
        model = self._fsdp(
            nn.Sequential(*pairs).to(self.device),
            auto_wrap_policy=ModuleWrapPolicy((nn.Sequential,)),
        )
        unsharded, sibling = model.module
        with FSDP.summon_full_params(unsharded):
            names = [name for name, _ in unsharded.named_parameters()]
            self.assertEqual(
                [clean_tensor_name(name) for name in names],
                ["0.weight", "0.bias", "1.weight", "1.bias"],
            )
            self.assertFalse(any(FLAT_PARAM in name for name in names))
            self.assertEqual(
                [param.shape for param in unsharded.parameters()], 2 * [(16, 16), (16,)]
            )
            self.assertTrue(
                all(FLAT_PARAM in name for name, _ in sibling.named_parameters())
            )


class TestUnshardParamsNoShard(TestUnshardParamsBase):
    @property
    def world_size(self) -> int:
        return 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_unshard_params_writeback_no_shard(self):
        """``writeback`` without sharding."""
        self._check_writeback()

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_unshard_params_param_data_no_shard(self):
        """All parameters are exposed without sharding. FSDP refuses to offload then, so
        that is not tried.
        """
        self._check_param_data(offload_to_cpu=[False])


class TestUnshardParamsErrors(TestUnshardParamsBase):
    def _refused_while_running(self):
        return self.assertRaisesRegex(
            AssertionError, "Cannot manually unshard parameters during forward/backward"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_params_from_forward_raises(self):
        """A module may not unshard its own FSDP wrapper during the wrapper's
        forward.
        """
        wrapper = self._fsdp(UnshardsItsWrapper().to(self.device))
        with self._refused_while_running():
            wrapper(wrapper)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_params_from_backward_raises(self):
        """A hook may not unshard an FSDP module during the module's backward."""
        wrapper = self._fsdp(self._linear(2, 1))
        output = wrapper(torch.ones(2, device=self.device))
        output.register_hook(lambda grad: unshard_once(wrapper))
        with self._refused_while_running():
            output.backward()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_backward_of_unsharded_params_raises(self):
        """A backward in the context is refused, and rank 0 prints which module."""
        wrapper = self._fsdp(self._linear(2, 1))
        output = wrapper(torch.ones(2, device=self.device))
        with refused_while_unsharded(self, wrapper, "_pre_backward_hook"):
            output.backward()

    def _check_refused(
        self, message: str, sharding_strategy: ShardingStrategy, **kwargs: Any
    ):
        model = self._nested(
            FSDPInitMode.RECURSIVE, sharding_strategy=sharding_strategy
        )
        with self.assertRaisesRegex(NotImplementedError, message):
            with FSDP.summon_full_params(model, **kwargs):
                pass

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_rank0_only_with_writeback_raises(self):
        """Rank 0 cannot write back the shards of other ranks."""
        self._check_refused(
            "rank0_only=True is not supported",
            ShardingStrategy.FULL_SHARD,
            rank0_only=True,
            writeback=True,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_offload_to_cpu_no_shard_raises(self):
        """A parameter that is not sharded is in use on the device and cannot be
        offloaded.
        """
        for rank0_only in (False, True):
            self._check_refused(
                "NO_SHARD is not supported",
                ShardingStrategy.NO_SHARD,
                offload_to_cpu=True,
                rank0_only=rank0_only,
                writeback=not rank0_only,
            )


if __name__ == "__main__":
    run_tests()
