# Owner(s): ["oncall: distributed"]
"""Communication hooks of FSDP1: their arguments, the use of their results, and where
they are refused.
"""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._init_utils import _get_default_comm_hook

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    get_full_params,
    skip_parameter_offload,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WHOLE = ShardingStrategy.NO_SHARD
STRATEGIES = [*ShardingStrategy][:3]
HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
COMPRESSED = {
    torch.float16: default_hooks.fp16_compress_hook,
    torch.bfloat16: default_hooks.bf16_compress_hook,
}


class Recorder:
    """A state, and hooks that record it with their arguments and reduce like FSDP."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self.inputs: list[torch.Tensor] = []

    def sharded(self, state: Any, grad: torch.Tensor, output: torch.Tensor) -> None:
        state.sizes.append((grad.numel(), output.numel()))
        state.inputs.append(grad.clone())
        if grad.numel() != output.numel() * dist.get_world_size():
            raise AssertionError(
                f"a hook was given {grad.numel()} elements for shards of "
                f"{output.numel()}"
            )
        dist.reduce_scatter_tensor(output, grad)
        output /= dist.get_world_size()

    def whole(self, state: Any, grad: torch.Tensor) -> None:
        state.sizes.append((grad.numel(),))
        state.inputs.append(grad.clone())
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


class TestCommunicationHooks(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _model(self, sharding_strategy: ShardingStrategy, **fsdp_kwargs: Any) -> FSDP:
        def wrap(module: nn.Module) -> FSDP:
            return FSDP(
                module,
                device_id=self.device,
                sharding_strategy=sharding_strategy,
                **fsdp_kwargs,
            )

        module = Chain(device=self.device)
        module.b = wrap(module.b)  # a and c are the root's own
        return wrap(module)

    def _backward(self, model: nn.Module, rank: int | None, step: int = 0) -> None:
        model(
            Chain.rows(self.device, self.world_size, rank, step)
        ).square().mean().backward()

    def _check_training(self, model: FSDP, **tolerance: float) -> None:
        """Train as without hooks, with gradients that accumulate under ``no_sync`` and
        after it.
        """
        reference = Chain(device=self.device)
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)
        ]
        for step in (0, 2, 4):
            with model.no_sync():
                self._backward(model, self.rank, step)
            self._backward(model, self.rank, step + 1)
            for each in (step, step + 1):
                self._backward(reference, None, each)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        found = get_full_params(model)
        self.assertEqual(
            found,
            list(reference.parameters()),
            "parameters trained with a hook",
            **tolerance,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_default_communication_hook_behavior(self, sharding_strategy):
        """A hook gets each unsharded gradient once for each reduction; its result
        becomes the gradient.
        """
        self.run_subtests(
            {
                "use_orig_params": [False, True],
                "cpu_offload": [CPUOffload(False), CPUOffload(True)],
            },
            self._test_default_communication_hook_behavior,
            sharding_strategy=sharding_strategy,
        )

    def _test_default_communication_hook_behavior(
        self, sharding_strategy: ShardingStrategy, **options: Any
    ) -> None:
        skip_parameter_offload(options["cpu_offload"])
        model, recorder = self._model(sharding_strategy, **options), Recorder()
        whole = sharding_strategy == WHOLE
        model.register_comm_hook(
            recorder, recorder.whole if whole else recorder.sharded
        )
        with model.no_sync():
            self._backward(model, self.rank)
        self.assertEqual(recorder.sizes, [], "calls of the hook under no_sync")
        model.zero_grad()
        self._backward(model, self.rank)
        # Original parameters are aligned to four elements: c.weight has 6 and c.bias 2.
        root, inner = (
            (12 + 4 + 8 + 2, 16) if options["use_orig_params"] else (12 + 4 + 6 + 2, 15)
        )
        even = inner + inner % 2
        expected = (
            [(inner,), (root,)] if whole else [(even, even // 2), (root, root // 2)]
        )
        self.assertEqual(recorder.sizes, expected, "sizes of the inputs of the hook")
        own = Chain(device=self.device)
        self._backward(own, self.rank)
        given = recorder.inputs[0][:12]
        self.assertEqual(
            given,
            own.b.weight.grad.flatten(),
            "gradient of b.weight that the hook was given",
        )
        model.zero_grad()
        if not options["cpu_offload"].offload_params:
            self._check_training(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_default_communication_hook_initialization(self, sharding_strategy):
        """torch's own hooks reduce as FSDP does without one. Every module below the
        root gets hook and state.
        """
        model = self._model(sharding_strategy)
        state = default_hooks.DefaultState(process_group=self.process_group)
        hook = (
            default_hooks.allreduce_hook
            if sharding_strategy == WHOLE
            else default_hooks.reduce_scatter_hook
        )
        self.assertIs(_get_default_comm_hook(sharding_strategy), hook)
        self.assertEqual(
            [each._comm_hook for each in FSDP.fsdp_modules(model)], [None, None]
        )
        self.assertFalse(model._low_precision_hook_enabled())
        model.register_comm_hook(state, hook)
        self.assertFalse(model._low_precision_hook_enabled())
        self.assertEqual(
            [each._comm_hook for each in FSDP.fsdp_modules(model)],
            [hook, hook],
            "hooks of all modules",
        )
        states = [each._comm_hook_state for each in FSDP.fsdp_modules(model)]
        self.assertEqual(states, [state, state], "states of all hooks")
        self._check_training(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("dtype", [*COMPRESSED])
    @parametrize("sharding_strategy", STRATEGIES)
    def test_compressing_hook(self, sharding_strategy, dtype):
        """Gradients travel in half of the bytes, and arrive in the parameters' type,
        divided by the world size.
        """
        skip_without_accelerator("these hooks record a stream, and the host has none")
        model = self._model(sharding_strategy)
        model.register_comm_hook(
            default_hooks.LowPrecisionState(self.process_group), COMPRESSED[dtype]
        )
        self.assertTrue(model._low_precision_hook_enabled())
        sent: list[torch.dtype] = []
        name = "all_reduce" if sharding_strategy == WHOLE else "reduce_scatter_single"
        name = name if hasattr(dist, name) else "reduce_scatter_tensor"
        original = getattr(dist, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            sent.append(args[-1].dtype)
            return original(*args, **kwargs)

        setattr(dist, name, noted)
        try:
            self._backward(model, self.rank)
        finally:
            setattr(dist, name, original)
        self.assertEqual(sent, [dtype, dtype], "types of sent tensors")
        types = {
            param.grad.dtype for param in model.parameters() if param.grad is not None
        }
        self.assertEqual(types, {torch.float32}, "types of gradients")
        model.zero_grad()
        self._check_training(model, rtol=0.05, atol=5e-3)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_predivision(self):
        """Factors before and after the reduction make up the world size, and both are
        applied.
        """
        for sharding_strategy in STRATEGIES:
            for before in (1.0, 2.0, 8.0):
                model = self._model(sharding_strategy)
                state = default_hooks.DefaultState(process_group=self.process_group)
                self.assertEqual(
                    state.gradient_predivide_factor * state.gradient_postdivide_factor,
                    self.world_size,
                )
                state.gradient_predivide_factor = before
                state.gradient_postdivide_factor = 16.0 / before
                hook = (
                    default_hooks.allreduce_hook
                    if sharding_strategy == WHOLE
                    else default_hooks.reduce_scatter_hook
                )
                model.register_comm_hook(state, hook)
                reference = Chain(device=self.device)
                before_step = get_full_params(model)
                self._backward(reference, None)
                self._backward(model, self.rank)
                torch.optim.SGD(model.parameters(), lr=16.0 / self.world_size).step()
                found = [
                    old - new
                    for old, new in zip(
                        before_step, get_full_params(model), strict=True
                    )
                ]
                message = (
                    f"gradients divided by {before} before and {16.0 / before} after "
                    "the reduction"
                )
                self.assertEqual(
                    found, [param.grad for param in reference.parameters()], message
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_registering_hook_non_root(self):
        model = self._model(ShardingStrategy.FULL_SHARD)
        self._backward(model, self.rank)  # the submodule now knows its root
        with self.assertRaisesRegex(
            AssertionError, "^register_comm_hook can only be called on a root instance"
        ):
            model.module.b.register_comm_hook(None, Recorder().sharded)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_registering_hook_submodules(self):
        """There is one hook for a whole model; a submodule that has one already is
        refused, as is a second one.
        """
        model, recorder = self._model(ShardingStrategy.FULL_SHARD), Recorder()
        model.module.b._comm_hook = (
            recorder.sharded
        )  # as if it had been a root when it was registered
        with self.assertRaisesRegex(
            AssertionError, "^A communication hook is already registered"
        ):
            model.register_comm_hook(recorder, recorder.sharded)
        model = self._model(ShardingStrategy.FULL_SHARD)
        with self.assertRaisesRegex(
            ValueError, "^The communication hook must be callable but got 3"
        ):
            model.register_comm_hook(recorder, 3)
        model.register_comm_hook(recorder, recorder.sharded)
        with self.assertRaisesRegex(
            AssertionError, "^A communication hook is already registered"
        ):
            model.register_comm_hook(recorder, recorder.sharded)


class TestCommunicationHooksHybrid(FSDPTest):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_registering_hook_hybrid_strategy(self):
        for sharding_strategy in HYBRID:
            module = Chain(device=self.device)
            model = FSDP(
                module,
                device_id=self.device,
                sharding_strategy=sharding_strategy,
                device_mesh=world_mesh(2, 2),
            )
            with self.assertRaisesRegex(
                AssertionError,
                "^Communication hook is not supported for hybrid strategies",
            ):
                model.register_comm_hook(None, Recorder().sharded)


instantiate_parametrized_tests(TestCommunicationHooks)

if __name__ == "__main__":
    run_tests()
