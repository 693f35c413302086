# Owner(s): ["oncall: distributed"]
"""FSDP trains like DDP, for every test model and option; its hooks; and its behaviour
outside of training.
"""

import functools
import sys
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    _runtime_utils,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    DummyDDP,
    FSDPInitMode,
    FSDPTest,
    MixtureOfExperts,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    TransformerWithSharedParams,
    check_races,
    get_full_params,
    skip_parameter_offload,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
OFFLOADS = [CPUOffload(offload_params=False), CPUOffload(offload_params=True)]
WHEN_TO_MOVE = [DEVICEInitMode.DEVICE_BEFORE, DEVICEInitMode.DEVICE_AFTER]
PREFETCHES = [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]
HALF = MixedPrecision(
    param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16
)
# Long enough to reorder work that streams do not order, and short compared with a test.
DELAY_MS = 10


def leave_out_autocast() -> None:
    skip_without_accelerator(
        "the reference needs autocast as accelerators do it, with losses in full "
        "precision"
    )


class FSDPCoreTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _parity(self, model_class: Any, **kwargs: Any) -> None:
        skip_parameter_offload(kwargs.get("cpu_offload", CPUOffload()))
        offloads = kwargs.get("cpu_offload", CPUOffload()).offload_params
        mode = kwargs.pop("device_init_mode", None) or (
            DEVICEInitMode.DEVICE_NEVER if offloads else DEVICEInitMode.DEVICE_BEFORE
        )
        self._test_fsdp_parity(model_class, FSDPInitMode.RECURSIVE, mode, **kwargs)

    def _parity_of_mixed_precision(self, **kwargs: Any) -> None:
        leave_out_autocast()
        self._parity(NestedWrappedModule, save_model=False, **kwargs)


class TestParityWithDDP(FSDPCoreTest):
    """Compares losses and, in full precision, parameters after some steps. Other
    options have FSDP's defaults.
    """

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sharding_strategy", STRATEGIES)
    @parametrize(
        "model_class",
        [
            NestedWrappedModule,
            AlwaysWrapNestedWrappedModule,
            TransformerWithSharedParams,
        ],
    )
    def test_offload_and_original_parameters(self, model_class, sharding_strategy):
        self.run_subtests(
            {"cpu_offload": OFFLOADS, "use_orig_params": [False, True]},
            self._parity,
            model_class=model_class,
            sharding_strategy=sharding_strategy,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("model_class", [NestedWrappedModule, TransformerWithSharedParams])
    def test_prefetch(self, model_class):
        self.run_subtests(
            {
                "backward_prefetch": PREFETCHES,
                "forward_prefetch": [False, True],
                "save_model": [False],
            },
            self._parity,
            model_class=model_class,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_single_iteration_and_moving_after_wrapping(self):
        self.run_subtests(
            {
                "num_iters": [1],
                "device_init_mode": WHEN_TO_MOVE,
                "save_model": [True, False],
            },
            self._parity,
            model_class=NestedWrappedModule,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_moving_offloaded_parameters_is_refused(self):
        """The first forward raises, before anything is gathered."""
        skip_parameter_offload(offload := CPUOffload(offload_params=True))
        model = FSDP(nn.Linear(4, 4), device_id=self.device, cpu_offload=offload)
        model.to(self.device)
        with self.assertRaisesRegex(
            RuntimeError, "CPU offloading enabled has parameters on"
        ):
            model(torch.ones(2, 4, device=self.device))
        self.assertEqual(
            model._flat_param.numel(),
            10,
            "a shard of 20 elements was gathered all the same",
        )
        self._parity(
            NestedWrappedModule,
            cpu_offload=offload,
            device_init_mode=DEVICEInitMode.DEVICE_AFTER,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_delays(self):
        """Late losses and late reductions change nothing. On ``sim`` the streams are
        checked for every missing wait.
        """
        self.run_subtests(
            {
                "delay_after_loss_ms": [0, DELAY_MS],
                "delay_before_reduction_ms": [0, DELAY_MS],
                "cpu_offload": OFFLOADS,
            },
            self._test_delays,
        )

    def _test_delays(
        self,
        delay_after_loss_ms: int,
        delay_before_reduction_ms: int,
        cpu_offload: CPUOffload,
    ) -> None:
        delays = {
            "delay_after_loss_ms": delay_after_loss_ms,
            "delay_before_reduction_ms": delay_before_reduction_ms,
        }
        with check_races():
            self._parity(
                NestedWrappedModuleWithDelay,
                init_kwargs=delays,
                cpu_offload=cpu_offload,
                save_model=False,
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_mixture_of_experts(self):
        """Experts differ by rank and are not reduced across ranks, so the reference
        must not average them either.
        """
        self.run_subtests(
            {
                "cpu_offload": OFFLOADS,
                "init_kwargs": [{}, {"delay_before_free_ms": DELAY_MS}],
                "sharding_strategy": STRATEGIES[:2],
            },
            self._parity,
            model_class=MixtureOfExperts,
            # The model itself reduces the gradients of shared layers.
            ref_init_fn=DummyDDP,
            save_model=False,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_mixed_precision(self, sharding_strategy):
        self.run_subtests(
            {
                "mixed_precision": [
                    MixedPrecision(
                        param_dtype=torch.float16, reduce_dtype=torch.float16
                    ),
                    MixedPrecision(param_dtype=torch.bfloat16),
                ],
                "enable_sharded_grad_scaler": [False, True],
                "cpu_offload": OFFLOADS,
            },
            self._parity_of_mixed_precision,
            sharding_strategy=sharding_strategy,
            use_orig_params=True,
        )


class TestParityWithEmptyShards(FSDPCoreTest):
    """Some parameters have fewer elements than there are ranks, so some ranks hold an
    empty shard.
    """

    @property
    def world_size(self) -> int:
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_sharded_grad_scaler(self):
        self.run_subtests(
            {
                "use_orig_params": [False, True],
                "enable_sharded_grad_scaler": [True],
                "cpu_offload": OFFLOADS,
            },
            self._parity_of_mixed_precision,
            mixed_precision=MixedPrecision(param_dtype=torch.float16),
        )
        tiny = self._tiny(use_orig_params=True)
        self.assertEqual(
            sum(param.numel() for param in tiny.parameters()),
            1 if self.rank == 0 else 0,
        )

    def _tiny(self, **fsdp_kwargs: Any) -> FSDP:
        """Return a model whose weight has one element, which rank 0 holds."""
        linear = nn.Linear(1, 1, bias=False, device=self.device)
        return FSDP(linear, device_id=self.device, **fsdp_kwargs)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_sharded_grad_scaler_acts_as_one(self):
        self.run_subtests(
            {"use_orig_params": [False, True]},
            self._test_sharded_grad_scaler_acts_as_one,
        )

    def _test_sharded_grad_scaler_acts_as_one(self, use_orig_params):
        """The optimizer steps with unscaled gradients. If one rank overflows, the
        scaler of every rank backs off.
        """
        model = self._tiny(use_orig_params=use_orig_params)
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler(device=self.device.type, init_scale=1024.0)
        for value, step, scale_after in (
            (2.0, 2.0, 1024.0),
            (float("inf"), 0.0, 512.0),
        ):
            (before,) = get_full_params(model)
            scaler.scale(
                model(torch.full((1, 1), value, device=self.device)).sum()
            ).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            (after,) = get_full_params(model)
            self.assertEqual(before - after, torch.full_like(before, step))
            self.assertEqual(scaler.get_scale(), scale_after)


class TestParamInit(FSDPCoreTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_param_change_after_init(self):
        """The next forward uses values that are written to parameters after
        wrapping.
        """

        def output(scale: float) -> torch.Tensor:
            model = TransformerWithSharedParams.init(
                self.process_group,
                FSDPInitMode.RECURSIVE,
                DEVICEInitMode.DEVICE_BEFORE,
                deterministic=True,
            )
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(scale)
            with torch.no_grad():
                return model(*model.module.get_input(self.device))

        self.assertNotEqual(output(1.0), output(2.0))
        self.assertEqual(output(2.0), output(2.0))


class TestHooks(FSDPCoreTest):
    def _nested(
        self, mode: DEVICEInitMode = DEVICEInitMode.DEVICE_BEFORE, **fsdp_kwargs: Any
    ) -> FSDP:
        model = NestedWrappedModule.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            mode,
            fsdp_kwargs,
            deterministic=True,
        )
        return FSDP(model, self.process_group, device_id=self.device, **fsdp_kwargs)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    def test_post_backward_runs_once_for_each_handle_in_a_backward(
        self, use_orig_params
    ):
        model = self._nested(use_orig_params=use_orig_params)
        handles = [
            module._handle
            for module in FSDP.fsdp_modules(model)
            if module._handle is not None
        ]
        seen: list[FlatParamHandle] = []
        original = _runtime_utils._post_backward_hook

        def counted(state: Any, handle: FlatParamHandle, *args: Any) -> Any:
            seen.append(handle)
            return original(state, handle, *args)

        with mock.patch.object(_runtime_utils, "_post_backward_hook", counted):
            for _ in range(2):
                seen.clear()
                inputs = model.module.get_input(self.device)
                model.module.get_loss(inputs, model(*inputs)).backward()
                self.assertEqual(len(seen), len(handles))
                self.assertEqual(
                    {id(handle) for handle in seen}, {id(handle) for handle in handles}
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("saved_as", [None, *StateDictType])
    def test_output_has_one_hook_before_backward(self, saved_as):
        """The output's hook stays after backward. Training, saving and loading before
        that neither add nor remove hooks.
        """
        model = self._nested()
        if saved_as is not None:
            self._train_for_several_steps(model, 2, autocast=False)
            with FSDP.state_dict_type(model, saved_as):
                model.load_state_dict(model.state_dict())
        for _ in range(2):
            inputs = model.module.get_input(self.device)
            output = model(*inputs)
            self.assertEqual(
                len(output._backward_hooks or ()),
                1,
                "hooks of the output after forward",
            )
            model.module.get_loss(inputs, output).backward()
            self.assertEqual(
                len(output._backward_hooks or ()),
                1,
                "hooks of the output after backward",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("device_init_mode", WHEN_TO_MOVE)
    @parametrize("mixed_precision", [None, HALF])
    def test_forward_registers_hooks_of_every_module(
        self, device_init_mode, mixed_precision
    ):
        """Each module registers one pre-backward hook and one post-backward hook."""
        model = self._nested(device_init_mode, mixed_precision=mixed_precision)
        modules = {id(module) for module in FSDP.fsdp_modules(model)}
        handles = {id(module._handle) for module in FSDP.fsdp_modules(model)}
        with (
            self._spied("_register_pre_backward_hooks") as before,
            self._spied("_register_post_backward_hook") as after,
        ):
            model(*model.module.get_input(self.device))
        self.assertEqual(
            sorted(id(call.args[0]) for call in before.call_args_list), sorted(modules)
        )
        self.assertEqual(
            sorted(id(call.args[1]) for call in after.call_args_list), sorted(handles)
        )

    def _spied(self, name: str) -> Any:
        """Patch a function of FSDP with one that records its calls and passes
        them on.
        """
        return mock.patch.object(
            _runtime_utils, name, side_effect=getattr(_runtime_utils, name)
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_backward_hooks_under_no_grad(self):
        model = self._nested()
        with torch.no_grad():
            output = model(*model.module.get_input(self.device))
        self.assertFalse(output.requires_grad)
        for module in FSDP.fsdp_modules(model):
            self.assertFalse(hasattr(module._flat_param, "_post_backward_hook_state"))
            self.assertIsNone(module._flat_param.grad)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sharding_strategy", STRATEGIES[:2])
    def test_forward_hands_the_parameters_back(self, sharding_strategy):
        """Forward leaves nothing unsharded without autograd, and with autograd only
        what the strategy keeps.
        """
        model = self._nested(sharding_strategy=sharding_strategy)
        inputs = model.module.get_input(self.device)

        def unsharded() -> list[bool]:
            flats = [
                module._flat_param
                for module in FSDP.fsdp_modules(model)
                if module._handle is not None
            ]
            return [
                flat._full_param_padded.untyped_storage().size() > 0 for flat in flats
            ]

        with torch.no_grad():
            model(*inputs)
        # The root keeps its parameters, which backward, if it comes, needs first.
        self.assertEqual(
            any(unsharded()[1:]), sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
        )
        model.module.get_loss(inputs, model(*inputs)).backward()
        self.assertFalse(any(unsharded()))


class TestNoGrad(FSDPCoreTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("mixed_precision", [None, HALF])
    @parametrize("use_orig_params", [False, True])
    def test_output_without_gradients_is_that_with(
        self, mixed_precision, use_orig_params
    ):
        model = TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            {"mixed_precision": mixed_precision, "use_orig_params": use_orig_params},
            deterministic=True,
        )
        inputs = model.module.get_input(self.device)
        optim = torch.optim.SGD(model.parameters(), lr=1e-2)
        before = get_full_params(model)
        model.module.get_loss(inputs, model(*inputs)).backward()
        optim.step()
        self.assertNotEqual(get_full_params(model), before)
        with torch.no_grad():
            without = model(*inputs)
        self.assertEqual(model(*inputs), without)


class TestAutograd(FSDPCoreTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_modules_compute_with_views_of_the_flat_parameter(self):
        """A parameter would accumulate its own gradient; a view passes it to the flat
        parameter.
        """
        model = nn.Sequential(*(nn.Linear(3, 3, device=self.device) for _ in range(3)))
        kinds: list[bool] = []
        for layer in model:
            layer.register_forward_pre_hook(
                lambda module, _: kinds.append(isinstance(module.weight, nn.Parameter))
            )
        wrapped = FSDP(
            model,
            device_id=self.device,
            auto_wrap_policy=functools.partial(
                lambda module, recurse, **_: recurse or isinstance(module, nn.Linear)
            ),
        )
        output = wrapped(torch.ones(2, 3, device=self.device))
        self.assertEqual(kinds, [False] * 3)
        output.sum().backward()
        for param in wrapped.parameters():
            self.assertEqual(param.grad.shape, param.shape)


for case in (TestParityWithDDP, TestHooks, TestNoGrad):
    instantiate_parametrized_tests(case)

if __name__ == "__main__":
    run_tests()
