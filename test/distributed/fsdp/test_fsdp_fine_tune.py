# Owner(s): ["oncall: distributed"]
"""FSDP1 with frozen modules in various places: backward frees modules when their part
is over, and trains the rest.

A frozen module has no gradient to reduce, so FSDP learns only from the gradients of its
inputs that its backward is over.
"""

import contextlib
import copy
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
    _runtime_utils,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    get_full_params,
    skip_parameter_offload,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

DEPTH, WIDTH = 4, 3


def is_frozen(index: int) -> bool:
    """Every other layer is frozen, the first one included."""
    return index % 2 == 0


def unsharded(model: nn.Sequential) -> list[int]:
    """Return which layers have their parameters unsharded."""
    sizes = [
        layer._handle.flat_param._full_param_padded.untyped_storage().size()
        for layer in model
    ]
    return [index for index, size in enumerate(sizes) if size]


class TwoInputs(nn.Module):
    """Passes two tensors through one layer, the second under a keyword and in
    a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, *, more: list[torch.Tensor], first: int
    ) -> torch.Tensor:
        """Compute with input ``first`` before the other, so that its gradient comes
        after the other's.
        """
        inputs = (x, more[0])
        return self.layer(inputs[first]) + self.layer(inputs[1 - first]).tanh()


class Passing(nn.Linear):
    """Only the gradient of the input passes through backward, as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x).detach()


class TestFSDPFineTune(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _layers(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        for index, layer in enumerate(layers):
            layer.requires_grad_(not is_frozen(index))
        return layers.to(self.device)

    def _sharded(self, layers: nn.Sequential, **fsdp_kwargs: Any) -> FSDP:
        for index, layer in enumerate(layers):
            layers[index] = FSDP(layer, device_id=self.device, **fsdp_kwargs)
        return FSDP(layers, device_id=self.device, **fsdp_kwargs)

    def _rows(self, **kwargs: Any) -> torch.Tensor:
        return Chain.rows(self.device, self.world_size, self.rank, **kwargs)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_backward_reshard_hooks(self):
        """When a layer's backward is over, it is sharded again, whether or not it is
        frozen.
        """
        self.run_subtests(
            {
                "sharding_strategy": [
                    ShardingStrategy.FULL_SHARD,
                    ShardingStrategy.SHARD_GRAD_OP,
                ],
                "use_orig_params": [False, True],
                "inp_requires_grad": [False, True],
            },
            self._test_backward_reshard_hooks,
        )

    def _test_backward_reshard_hooks(
        self, inp_requires_grad: bool, **fsdp_kwargs: Any
    ) -> None:
        model = self._sharded(self._layers(), backward_prefetch=None, **fsdp_kwargs)
        left: dict[int, list[int]] = {}

        def note(index: int) -> Any:
            def hook(*_: Any) -> None:
                left.setdefault(index, unsharded(model.module))

            return hook

        def note_gradient_of_output(index: int) -> Any:
            # This gradient exists once the backward of all later layers is over.
            def hook(_module: Any, _input: Any, output: torch.Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(note(index))

            return hook

        for index, layer in enumerate(model.module):
            layer.register_forward_hook(note_gradient_of_output(index))
        calls: list[Any] = []
        original = _runtime_utils._post_backward_reshard

        def counted(state: Any, handle: Any, *unused: Any) -> None:
            calls.append([layer._handle for layer in model.module].index(handle))
            original(state, handle, *unused)

        rows = self._rows().requires_grad_(inp_requires_grad)
        if inp_requires_grad:
            rows.register_hook(note(-1))
        with mock.patch.object(_runtime_utils, "_post_backward_reshard", counted):
            model(rows).sum().backward()
        # Without a gradient of its input, only the end of backward shows that the first
        # layer is done.
        expected = [3, 2, 1, 0] if inp_requires_grad else [3, 2, 1]
        if not inp_requires_grad:
            calls = [each for each in calls if each != 0]
        self.assertEqual(calls, expected, "layers in the order of their resharding")
        # A layer that forward kept unsharded, and backward did not use, stays so until
        # its next use.
        keeps = (
            fsdp_kwargs["sharding_strategy"] == ShardingStrategy.SHARD_GRAD_OP
            and not fsdp_kwargs["use_orig_params"]
        )
        kept = keeps and not inp_requires_grad
        self.assertEqual(
            unsharded(model.module),
            [0] if kept else [],
            "layers still unsharded after backward",
        )
        late = {
            at: [each for each in those if each > at + 1] for at, those in left.items()
        }
        self.assertEqual(
            late,
            {at: [] for at in left},
            "layers still unsharded when two layers have passed",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_reshard_waits_for_all_inputs(self):
        """A frozen module is resharded once, when the gradients of all its inputs
        exist, in any form of input.
        """
        self.run_subtests({"first": [0, 1]}, self._test_reshard_waits_for_all_inputs)

    def _test_reshard_waits_for_all_inputs(self, first: int) -> None:
        frozen = FSDP(TwoInputs().requires_grad_(False), device_id=self.device)
        model = FSDP(nn.ModuleList([frozen]), device_id=self.device)
        with FSDP.summon_full_params(model):
            reference = TwoInputs().to(self.device)
            reference.load_state_dict(
                {
                    name: p.detach().clone()
                    for name, p in frozen.module.named_parameters()
                }
            )
        gradients: list[list[torch.Tensor]] = []
        calls: list[int] = []
        original, computed = _runtime_utils._post_backward_reshard, set()

        def noted(*args: Any) -> None:
            calls.append(1)
            if computed != {0, 1}:
                raise AssertionError(
                    "the frozen module was resharded when it had gradients of "
                    f"inputs {computed} alone"
                )
            original(*args)

        with mock.patch.object(_runtime_utils, "_post_backward_reshard", noted):
            for module in (frozen, reference):
                inputs = [self._rows(step=step).requires_grad_() for step in range(2)]
                for index, each in enumerate(inputs):
                    each.register_hook(lambda _, index=index: computed.add(index))
                module(inputs[0], more=[inputs[1]], first=first).sum().backward()
                gradients.append([each.grad for each in inputs])
        self.assertEqual(*gradients, "gradients of the inputs")
        self.assertEqual(
            len(calls), 1, "times that the frozen module was resharded by its hook"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_layer_without_gradients(self):
        """A layer whose parameters take no part in backward is sharded again at its
        end. Under ``no_sync`` the strategy decides, as it does for trained layers.
        """
        self.run_subtests(
            {
                "sharding_strategy": [
                    ShardingStrategy.FULL_SHARD,
                    ShardingStrategy.SHARD_GRAD_OP,
                ],
                "use_orig_params": [False, True],
                "accumulates": [False, True],
            },
            self._test_layer_without_gradients,
        )

    def _test_layer_without_gradients(
        self, accumulates: bool, sharding_strategy: ShardingStrategy, **options: Any
    ) -> None:
        keeps = sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
        torch.manual_seed(0)
        reference = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Passing(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        ).to(self.device)
        model = self._sharded(
            copy.deepcopy(reference), sharding_strategy=sharding_strategy, **options
        )
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)
        ]
        for step in range(4):
            syncs = not accumulates or step % 2 == 1
            with contextlib.nullcontext() if syncs else model.no_sync():
                model(self._rows(step=step)).square().mean().backward()
            reference(
                Chain.rows(self.device, self.world_size, step=step)
            ).square().mean().backward()
            self.assertEqual(
                unsharded(model.module),
                [0, 1, 2] if keeps and not syncs else [],
                f"layers still unsharded after step {step}",
            )
            if syncs:
                for each in model.module[1].parameters():
                    self.assertIsNone(each.grad)
                for optim in optims:
                    optim.step()
                    optim.zero_grad()
        self.assertEqual(get_full_params(model), [*reference.parameters()])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hooks_multi_traversal(self):
        """A frozen layer that runs twice in a forward trains like the reference."""
        self.run_subtests(
            {
                "use_orig_params": [False, True],
                "backward_prefetch": [*BackwardPrefetch],
            },
            self._test_hooks_multi_traversal,
        )

    def _test_hooks_multi_traversal(self, **fsdp_kwargs: Any) -> None:
        reference, model = self._layers(), self._sharded(self._layers(), **fsdp_kwargs)
        for module, rank in ((reference, None), (model, self.rank)):
            optim = torch.optim.SGD(
                [param for param in module.parameters() if param.requires_grad], lr=0.1
            )
            for step in range(3):
                module(
                    module(Chain.rows(self.device, self.world_size, rank, step))
                ).square().mean().backward()
                optim.step()
                optim.zero_grad()
        self.assertEqual(
            get_full_params(model),
            list(reference.parameters()),
            "parameters after training",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_with_ddp(self):
        """The reference is unsharded, on the rows of all ranks, as DDP's
        gradients are.
        """
        self.run_subtests(
            {
                "sharding_strategy": [*ShardingStrategy][:3],
                "use_orig_params": [False, True],
                "cpu_offload": [CPUOffload(False), CPUOffload(True)],
            },
            self._test_parity,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_with_non_frozen_fsdp(self):
        """In reduced precision, frozen modules compute like ones whose gradients are
        thrown away.
        """
        self.run_subtests(
            {"use_orig_params": [False, True], "offload_params": [False, True]},
            self._test_parity_in_low_precision,
        )

    def _train(self, module: nn.Module, rank: int | None) -> None:
        trained = [param for param in module.parameters() if param.requires_grad]
        optim = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        for step in range(3):
            module(
                Chain.rows(self.device, self.world_size, rank, step)
            ).square().mean().backward()
            optim.step()
            optim.zero_grad()

    def _test_parity(self, **fsdp_kwargs: Any) -> None:
        skip_parameter_offload(fsdp_kwargs["cpu_offload"])
        reference, model = self._layers(), self._sharded(self._layers(), **fsdp_kwargs)
        before = [param.detach().clone() for param in reference.parameters()]
        self._train(reference, None)
        self._train(model, self.rank)
        with FSDP.summon_full_params(model):
            exposed = {
                name: param.requires_grad
                for name, param in model.module.named_parameters()
            }
        expected = [
            not is_frozen(index) for index in range(DEPTH) for _ in ("weight", "bias")
        ]
        self.assertEqual(
            list(exposed.values()), expected, "requires_grad of exposed parameters"
        )
        found = get_full_params(model)
        self.assertEqual(
            found, list(reference.parameters()), "parameters after training"
        )
        frozen = [index for index, trained in enumerate(expected) if not trained]
        self.assertEqual(
            [found[at].detach() for at in frozen],
            [before[at] for at in frozen],
            "frozen parameters after training",
        )

    def _test_parity_in_low_precision(
        self, use_orig_params: bool, offload_params: bool
    ) -> None:
        skip_parameter_offload(offload := CPUOffload(offload_params))
        precision = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        options = {
            "mixed_precision": precision,
            "cpu_offload": offload,
            "use_orig_params": use_orig_params,
        }
        models = [
            self._sharded(layers, **options)
            for layers in (self._layers(), self._layers().requires_grad_())
        ]
        for model in models:
            optim = torch.optim.SGD(
                [p for index in (1, 3) for p in model.module[index].parameters()],
                lr=0.1,
            )
            for step in range(3):
                model(self._rows(step=step)).square().mean().backward()
                optim.step()
                model.zero_grad()
        self.assertEqual(
            *([p.detach() for p in get_full_params(m)] for m in models),
            "parameters after training",
        )


if __name__ == "__main__":
    run_tests()
