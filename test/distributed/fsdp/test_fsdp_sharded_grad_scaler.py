# Owner(s): ["oncall: distributed"]
"""``ShardedGradScaler``: every rank scales alike, whichever of them overflows, with one
optimizer or several.
"""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

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

INFINITE = float("inf")


class TestShardGradScaler(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _scaler(self, **options: Any) -> ShardedGradScaler:
        return ShardedGradScaler(
            device=self.device.type, **{"init_scale": 8.0, **options}
        )

    def _model(self, **fsdp_kwargs: Any) -> FSDP:
        return FSDP(Chain(device=self.device), device_id=self.device, **fsdp_kwargs)

    def _step(
        self,
        scaler: ShardedGradScaler,
        model: FSDP,
        optims: list[Any],
        overflow: Any = None,
    ) -> None:
        """Step each optimizer. ``overflow`` gives a rank, and the optimizer that gets
        an infinite gradient there.
        """
        loss = (
            model(Chain.rows(self.device, self.world_size, self.rank)).square().mean()
        )
        scaler.scale(loss).backward()
        if overflow is not None and overflow[0] == self.rank:
            held = [
                p
                for group in optims[overflow[1]].param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            held[-1].grad.view(-1)[-1] = INFINITE
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_grad_scaling(self):
        """``scale`` scales tensors, and lists and tuples of them at any depth, and
        keeps their types.
        """
        scaler = self._scaler(init_scale=2.0)
        one = torch.ones(2, device=self.device)
        half = one.to(torch.float16)
        self.assertEqual(scaler.scale(half), 2 * half, "a scaled tensor")
        found = scaler.scale([one, (half, [3 * one])])
        self.assertEqual(found, [2 * one, (2 * half, [6 * one])], "a scaled list")
        self.assertEqual(
            [type(found), type(found[1]), type(found[1][1])], [list, tuple, list]
        )
        with self.assertRaisesRegex(
            ValueError, "must be a Tensor or an iterable of Tensors"
        ):
            scaler.scale([one, 3])
        off = self._scaler(enabled=False)
        self.assertIs(off.scale(one), one)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_growth(self):
        """The scale grows after as many good steps in a row as the interval says. A bad
        one starts the count anew.
        """
        self.run_subtests(
            {
                "use_orig_params": [False, True],
                "cpu_offload": [CPUOffload(False), CPUOffload(True)],
            },
            self._test_growth,
        )

    def _test_growth(self, **fsdp_kwargs: Any) -> None:
        skip_parameter_offload(fsdp_kwargs["cpu_offload"])
        model = self._model(**fsdp_kwargs)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = self._scaler(growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
        # Each rank overflows once; in between are one good step, then two, then four.
        bad: list[Any] = [None, (0, 0), None, None, (1, 0), None, None, None, None]
        scales, moved = [], []
        for overflow in bad:
            before = get_full_params(model)
            self._step(scaler, model, [optim], overflow)
            scales.append(scaler.get_scale())
            after = get_full_params(model)
            moved.append(
                any(
                    not torch.equal(old, new)
                    for old, new in zip(before, after, strict=True)
                )
            )
        self.assertEqual(
            scales,
            [8.0, 2.0, 2.0, 8.0, 2.0, 2.0, 8.0, 8.0, 32.0],
            "scales after each step",
        )
        self.assertEqual(
            moved, [overflow is None for overflow in bad], "steps that moved parameters"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inf_gradients_skip_optim_step(self):
        """Of two optimizers, the one whose gradients overflow on any rank does not
        step; the scale is one for both.
        """
        for use_orig_params in (False, True):
            for overflow in ((0, 0), (1, 0), (0, 1), (1, 1)):
                self._test_two_optimizers(use_orig_params, overflow)

    def _test_two_optimizers(
        self, use_orig_params: bool, overflow: tuple[int, int]
    ) -> None:
        module = Chain(
            lambda layer: FSDP(
                layer, device_id=self.device, use_orig_params=use_orig_params
            ),
            self.device,
        )
        model = FSDP(module, device_id=self.device, use_orig_params=use_orig_params)
        parts = [nn.ModuleList([module.a, module.b]), nn.ModuleList([module.c])]
        optims = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
        scaler = self._scaler(growth_interval=1)
        names = ["a", "a", "b", "b", "c", "c"]

        def moved(overflow: Any) -> set[str]:
            before = get_full_params(model)
            self._step(scaler, model, optims, overflow)
            pairs = zip(names, before, get_full_params(model), strict=True)
            return {name for name, old, new in pairs if not torch.equal(old, new)}

        situation = f"when optimizer {overflow[1]} overflows on rank {overflow[0]}"
        self.assertEqual(
            moved(overflow),
            {"c"} if overflow[1] == 0 else {"a", "b"},
            f"layers that moved {situation}",
        )
        self.assertEqual(scaler.get_scale(), 4.0, f"scale {situation}")
        # The next step forgets an overflow that was found.
        self.assertEqual(
            moved(None), {"a", "b", "c"}, f"layers that moved after a step {situation}"
        )
        self.assertEqual(scaler.get_scale(), 8.0, f"scale after a step {situation}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_new_scale(self):
        """``update`` accepts a new scale, as a number or as a tensor that may change
        afterwards.
        """
        model = self._model()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = self._scaler()
        self._step(scaler, model, [optim])
        scaler.update(3.0)
        self.assertEqual(scaler.get_scale(), 3.0, "scale that was given as a number")
        scale = torch.tensor(5.0, device=self.device)
        scaler.update(scale)
        scale.fill_(7.0)
        self.assertEqual(scaler.get_scale(), 5.0, "scale that was given as a tensor")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unscaling_twice_raises(self):
        model = self._model()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = self._scaler()
        scaler.scale(model(Chain.rows(self.device, 2, self.rank)).sum()).backward()
        gradient = next(
            param.grad.clone() for param in model.parameters() if param.grad is not None
        )
        scaler.unscale_(optim)
        self.assertEqual(
            next(p.grad for p in model.parameters() if p.grad is not None),
            gradient / 8,
            "unscaled gradient",
        )
        with self.assertRaisesRegex(
            RuntimeError,
            "has already been called on this optimizer since the last update",
        ):
            scaler.unscale_(optim)
        scaler.step(optim)
        with self.assertRaisesRegex(
            RuntimeError, r"unscale_\(\) is being called after step\(\)"
        ):
            scaler.unscale_(optim)


class TestShardedGradScalerParityWithDDP(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_sharded_grad_scaler_found_inf(self):
        """A rank whose gradients are all finite learns of an overflow before
        it steps.
        """
        model = FSDP(
            nn.Linear(4, 4, device=self.device),
            device_id=self.device,
            use_orig_params=True,
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler(device=self.device.type, init_scale=2.0)
        for culprit in (0, 1):
            scaler.scale(model(torch.ones(2, 4, device=self.device)).sum()).backward()
            if self.rank == culprit:
                model.module.weight.grad[0] = INFINITE
            scaler.unscale_(optim)
            found = scaler._per_optimizer_states[id(optim)]["found_inf_per_device"]
            self.assertEqual(
                [f.item() > 0 for f in found.values()],
                [True],
                f"overflows known when rank {culprit} has one",
            )
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()


class TestShardedGradScalerDetails(FSDPTest):
    """Gradients that FSDP need not have made, and arguments."""

    @property
    def world_size(self):
        return 2

    def _scaler(self, **options: Any) -> ShardedGradScaler:
        scaler = ShardedGradScaler(self.device.type, 8.0, **options)
        self.assertEqual(scaler.scale(torch.ones(1, device=self.device)).item(), 8.0)
        return scaler

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        """Return gradients of one value, 16, at their first element; sparse ones have
        it in two halves.
        """
        dense = torch.tensor([16.0, 0.0, 0.0])
        sparse = torch.sparse_coo_tensor([[0, 0]], [8.0, 8.0], (3,))
        return {
            "float32": dense.to(self.device),
            "float64": dense.to(self.device, torch.float64),
            "float16": dense.to(self.device, torch.float16),
            "none": None,
            "on the host": dense,
            "sparse": sparse,
            "sparse float16": sparse.to(torch.float16),
        }

    def _optim(
        self, gradients: dict[str, torch.Tensor | None]
    ) -> tuple[dict[str, torch.Tensor], torch.optim.SGD]:
        parameters = {}
        for name, grad in gradients.items():
            parameters[name] = each = torch.zeros(3, device=self.device)
            if grad is not None:
                each = torch.zeros(3, dtype=grad.dtype, device=grad.device)
                each.requires_grad_().grad = grad.clone()
            parameters[name] = each
        return parameters, torch.optim.SGD(parameters.values(), lr=1.0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_of_every_kind(self):
        """Each type, device and layout is unscaled, and an overflow in any of them, on
        any rank, skips the step on all ranks.
        """
        for infinite in (None, *self._gradients()):
            gradients = self._gradients()
            if infinite == "none":
                continue
            if infinite and self.rank == 1:
                if gradients[infinite].is_sparse:  # finite each, but not their sum
                    grad = gradients[infinite].type(torch.float16)
                    grad._values().fill_(40000.0)
                    whole = grad.type(torch.float32).coalesce()
                    gradients[infinite] = (
                        grad if "16" in infinite else whole * float("inf")
                    )
                else:
                    gradients[infinite][2] = float("inf")
            parameters, optim = self._optim(gradients)
            scaler = self._scaler(growth_interval=1)
            scaler.step(optim)
            scaler.update()
            for name, each in parameters.items():
                moved = 0.0 if infinite or name == "none" else -2.0
                where = f"{name}, where {infinite} overflows"
                self.assertEqual(each.tolist(), [moved, 0.0, 0.0], where)
            self.assertEqual(scaler.get_scale(), 4.0 if infinite else 16.0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_growth_on_the_host(self):
        """A scale that a loss on the host has made grows after three good steps, and
        shrinks after an overflow on any rank, which starts the count anew.
        """
        scaler = ShardedGradScaler(
            self.device.type,
            8.0,
            growth_factor=4.0,
            backoff_factor=0.25,
            growth_interval=3,
        )
        loss = torch.ones(1)
        self.assertEqual(scaler.scale(loss).item(), 8.0)
        scales = []
        for step in range(11):
            grad = self._gradients()["on the host"]
            if step in (2, 9) and self.rank == step % 2:
                grad[0] = float("inf")
            _, optim = self._optim({"on the host": grad})
            scaler.step(optim)
            scaler.update()
            scales.append(scaler.get_scale())
            self.assertEqual(scaler.scale(loss).item(), scales[-1])
        self.assertEqual(scales, [8.0, 8.0] + [2.0] * 3 + [8.0] * 3 + [32.0, 8.0, 8.0])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_defaults_and_a_disabled_scaler(self):
        scaler = ShardedGradScaler(self.device.type)
        self.assertTrue(scaler.is_enabled())
        self.assertEqual(
            [
                scaler.get_scale(),
                scaler.get_growth_factor(),
                scaler.get_backoff_factor(),
                scaler.get_growth_interval(),
            ],
            [65536.0, 2.0, 0.5, 2000],
        )
        off = ShardedGradScaler(self.device.type, enabled=False)
        parameters, optim = self._optim({"own": torch.full((3,), 2.0)})
        off.unscale_(optim)
        off.update(5.0)
        off.step(optim)
        off.update()
        self.assertEqual(parameters["own"].tolist(), [-2.0] * 3)
        self.assertEqual(off.get_scale(), 1.0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_refusals(self):
        _, optim = self._optim({"none": None})
        with self.assertRaisesRegex(AssertionError, "_scale is None"):
            ShardedGradScaler(self.device.type).update()
        with self.assertRaisesRegex(AssertionError, "_scale is None"):
            ShardedGradScaler(self.device.type).unscale_(optim)
        scaler = self._scaler()
        with self.assertRaisesRegex(AssertionError, "No inf checks were recorded"):
            scaler.update()
        one = torch.ones(1, device=self.device)
        for wrong in (
            torch.ones(2, device=self.device),
            one.clone().requires_grad_(),
            torch.ones(1, device="meta"),
        ):
            with self.assertRaisesRegex(AssertionError, "a float or a 1-element"):
                scaler.update(wrong)
        meta = torch.ones(1, device="meta")
        for outputs in (meta, [meta], [one, meta]):
            with self.assertRaisesRegex(AssertionError, "Expected supported device, g"):
                scaler.scale(outputs)
        scaled = scaler.scale(each for each in (one, 2 * one))
        self.assertEqual([next(scaled), next(scaled)], [8 * one, 16 * one])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_other_group(self):
        """An overflow concerns the ranks of the scaler's group."""
        groups = [dist.new_group([rank]) for rank in range(2)]
        scaler = self._scaler(process_group=groups[self.rank], growth_interval=1)
        grad = torch.full((3,), float("inf") if self.rank else 8.0, device=self.device)
        parameters, optim = self._optim({"own": grad})
        scaler.step(optim)
        scaler.update()
        self.assertEqual(scaler.get_scale(), [16.0, 4.0][self.rank])
        self.assertEqual(parameters["own"].tolist(), [[-1.0] * 3, [0.0] * 3][self.rank])


if __name__ == "__main__":
    run_tests()
