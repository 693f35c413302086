# Owner(s): ["oncall: distributed"]
"""FSDP1 with ``use_orig_params=True``: the view of optimizers and users, and their
changes, which FSDP takes over.

The original parameters are views of the flat one. Users who replace such a view, or its
gradient, between two steps expect FSDP to use the replacement: each parameter of a flat
one is replaced in turn. The reference is an unsharded model on the rows of all ranks.
"""

import copy
import re
import sys
import warnings
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import clean_tensor_name

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    CollectiveLog,
    FSDPTest,
    get_full_params,
    shards_of,
    skip_parameter_offload,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

FULL, KEEPS, WHOLE = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
STRATEGIES = [FULL, KEEPS, WHOLE]
OFFLOADS = [CPUOffload(offload_params=False), CPUOffload(offload_params=True)]
NAMES = [f"{layer}.{kind}" for layer in Chain.LAYERS for kind in ("weight", "bias")]


def plain_name(name: str) -> str:
    """Return the name of a parameter as it is in a ``Chain``."""
    return clean_tensor_name(name).removeprefix("0.")


class OriginalParametersTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _pair(self, **fsdp_kwargs: Any) -> tuple[Chain, FSDP]:
        """Return an unsharded model, and an equal one in one flat parameter, below a
        root that has none.

        The parameters of a root stay unsharded after a forward, until there is a
        backward.
        """
        fsdp_kwargs["use_orig_params"] = True
        inner = FSDP(Chain(device=self.device), device_id=self.device, **fsdp_kwargs)
        return Chain(device=self.device), FSDP(
            nn.Sequential(inner), device_id=self.device, **fsdp_kwargs
        )

    def _rows(self, step: int = 0) -> torch.Tensor:
        return Chain.rows(self.device, self.world_size, self.rank, step)

    def _all_rows(self, step: int = 0) -> torch.Tensor:
        return Chain.rows(self.device, self.world_size, step=step)

    def _backward(self, reference: nn.Module, model: nn.Module, step: int = 0) -> None:
        reference(self._all_rows(step)).square().mean().backward()
        output = model(self._rows(step))
        self.assertTrue(
            output.requires_grad,
            "the output of a module that is trained carries no gradient",
        )
        output.square().mean().backward()

    def _own(
        self, tensors: dict[str, torch.Tensor], model: FSDP
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of each tensor, in the shape in which FSDP exposes
        it.
        """
        if model.sharding_strategy == WHOLE:
            return {name: tensor.detach() for name, tensor in tensors.items()}
        return shards_of(tensors, self.rank, self.world_size)

    def _params(self, model: FSDP) -> dict[str, nn.Parameter]:
        return {plain_name(name): param for name, param in model.named_parameters()}

    def _check_parameters(self, label: str, model: FSDP, reference: Chain) -> None:
        found = dict(zip(NAMES, get_full_params(model), strict=True))
        self.assertEqual(found, dict(reference.named_parameters()), label)


class TestFSDPUseOrigParamsMultipleParamGroups(OriginalParametersTest):
    """Parameters of one flat parameter may be treated differently."""

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        weights = [
            param for name, param in model.named_parameters() if name.endswith("weight")
        ]
        biases = [
            param for name, param in model.named_parameters() if name.endswith("bias")
        ]
        return [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "lr": 0.01},
        ]

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_diff_hyperparams(self):
        self.run_subtests(
            {
                "sharding_strategy": STRATEGIES,
                "cpu_offload": OFFLOADS,
                "set_to_none": [True, False],
            },
            self._test_diff_hyperparams,
        )

    def _test_diff_hyperparams(
        self,
        sharding_strategy: ShardingStrategy,
        cpu_offload: CPUOffload,
        set_to_none: bool,
    ) -> None:
        skip_parameter_offload(cpu_offload)
        reference, model = self._pair(
            sharding_strategy=sharding_strategy, cpu_offload=cpu_offload
        )
        optims = [
            torch.optim.Adam(self._groups(each), lr=0.1, eps=1e-3)
            for each in (reference, model)
        ]
        for step in range(3):
            self._backward(reference, model, step)
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=set_to_none)
        self._check_parameters(
            "parameters after training with two groups", model, reference
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_diff_trainability(self):
        """Each parameter alone is frozen in turn, then each alone is trained, then all
        are again.
        """
        self.run_subtests(
            {"sharding_strategy": STRATEGIES}, self._test_diff_trainability
        )

    def _test_diff_trainability(self, sharding_strategy: ShardingStrategy) -> None:
        reference, model = self._pair(sharding_strategy=sharding_strategy)
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)
        ]
        alone = [{name} for name in NAMES]
        for step, trained in enumerate(
            [*(set(NAMES) - each for each in alone), *alone, set(NAMES)]
        ):
            for each in (reference, model):
                for name, param in each.named_parameters():
                    param.requires_grad_(plain_name(name) in trained)
            self._backward(reference, model, step)
            has_gradient = {
                name
                for name, param in self._params(model).items()
                if param.grad is not None
            }
            held = {
                name
                for name, own in self._own(
                    dict(reference.named_parameters()), model
                ).items()
                if own.numel()
            }
            self.assertEqual(
                has_gradient,
                trained & held,
                f"gradients when {sorted(trained)} are trained",
            )
            for optim in optims:
                optim.step()
                optim.zero_grad()
            self._check_parameters(
                f"parameters after a step that trained {sorted(trained)}",
                model,
                reference,
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_multiple_optimizers(self):
        """Two optimizers take turns; the gradients of the one that waits accumulate."""
        self.run_subtests(
            {"sharding_strategy": STRATEGIES}, self._test_multiple_optimizers
        )

    def _test_multiple_optimizers(self, sharding_strategy: ShardingStrategy) -> None:
        reference, model = self._pair(sharding_strategy=sharding_strategy)
        optims = [
            [torch.optim.SGD(group["params"], lr=0.1) for group in self._groups(each)]
            for each in (reference, model)
        ]
        for step in range(4):
            self._backward(reference, model, step)
            for each in optims:
                each[step % 2].step()
                each[step % 2].zero_grad()
            self._check_parameters(f"parameters after step {step}", model, reference)


class TestFSDPUseOrigParamsUnshardReshard(OriginalParametersTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_summon_between_two_forwards(self):
        """The second forward uses values written in between, though its strategy may
        have kept the old values.
        """
        self.run_subtests(
            {
                "sharding_strategy": STRATEGIES,
                "mixed_precision": [None, MixedPrecision(param_dtype=torch.float64)],
            },
            self._test_summon_between_two_forwards,
        )

    def _test_summon_between_two_forwards(self, **fsdp_kwargs: Any) -> None:
        reference, model = self._pair(**fsdp_kwargs)
        model(self._rows())
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        with torch.no_grad():
            for param in reference.parameters():
                param.mul_(2)
            expected = reference(self._rows())
        found = model(self._rows()).detach()
        self.assertEqual(
            found.to(expected.dtype), expected, "output after parameters were doubled"
        )
        self._check_parameters("parameters after they were doubled", model, reference)


class TestFSDPUseOrigParamsParamAccess(OriginalParametersTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_access_params_after_forward(self):
        """After forward the parameters are shards again, unless the strategy keeps
        them.
        """
        self.run_subtests(
            {"sharding_strategy": STRATEGIES}, self._test_access_params_after_forward
        )

    def _test_access_params_after_forward(
        self, sharding_strategy: ShardingStrategy
    ) -> None:
        reference, model = self._pair(sharding_strategy=sharding_strategy)
        whole = {name: param.detach() for name, param in reference.named_parameters()}
        own = self._own(whole, model)

        def exposed() -> dict[str, torch.Tensor]:
            return {name: param.detach() for name, param in self._params(model).items()}

        self.assertEqual(exposed(), own, "parameters before forward")
        output = model(self._rows())
        self.assertEqual(
            exposed(),
            whole if sharding_strategy == KEEPS else own,
            "parameters after forward",
        )
        output.sum().backward()
        self.assertEqual(exposed(), own, "parameters after backward")


class TestFSDPUseOrigParamsWriteback(OriginalParametersTest):
    """Replaces each parameter or gradient of a flat parameter in turn."""

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("replace", ["parameter", "data"])
    def test_param_writeback(self, replace):
        self.run_subtests(
            {"sharding_strategy": [FULL, WHOLE], "cpu_offload": OFFLOADS},
            self._test_param_writeback,
            replace=replace,
        )

    def _test_param_writeback(
        self, sharding_strategy: ShardingStrategy, cpu_offload: CPUOffload, replace: str
    ) -> None:
        skip_parameter_offload(cpu_offload)
        reference, model = self._pair(
            sharding_strategy=sharding_strategy, cpu_offload=cpu_offload
        )
        if cpu_offload.offload_params:
            # Without a forward the change is lost:
            # docs/findings/offloaded_before_the_first_forward.md.
            model(self._rows())
        for step, name in enumerate([*NAMES, None]):
            changed = [name] if name else NAMES  # in the end, all of them at once
            with torch.no_grad():
                for each in changed:
                    reference.get_parameter(each).copy_(
                        2 * reference.get_parameter(each) + 1
                    )
            values = self._own(dict(reference.named_parameters()), model)
            for each in changed:
                self._replace(model, each, values[each].clone(), replace)
            label = f"after {', '.join(changed)} was replaced"
            self.assertEqual(
                model(self._rows(step)).detach(),
                reference(self._rows(step)).detach(),
                f"output {label}",
            )
            self._check_parameters(f"parameters {label}", model, reference)

    def _replace(self, model: FSDP, name: str, value: torch.Tensor, how: str) -> None:
        layer, _, kind = name.partition(".")
        owner = getattr(model.module[0].module, layer)
        old = getattr(owner, kind)
        if how == "parameter":
            setattr(owner, kind, nn.Parameter(value.to(old.device)))
        else:
            old.data = value.to(old.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_replaced_parameter_is_trained(self):
        """An optimizer that was made after the replacement trains it, each of them in
        turn.
        """
        reference, model = self._pair()
        for step, name in enumerate(NAMES):
            values = self._own(dict(reference.named_parameters()), model)
            self._replace(model, name, values[name].clone(), "parameter")
            optims = [
                torch.optim.SGD(each.parameters(), lr=0.1)
                for each in (reference, model)
            ]
            self._backward(reference, model, step)
            for optim in optims:
                optim.step()
                optim.zero_grad()
            self._check_parameters(
                f"parameters trained after {name} was replaced", model, reference
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("change", ["new", "none", "others_none"])
    def test_grad_writeback(self, change):
        self.run_subtests(
            {"sharding_strategy": [FULL, WHOLE], "backward_again": [False, True]},
            self._test_grad_writeback,
            change=change,
        )

    def _test_grad_writeback(
        self, sharding_strategy: ShardingStrategy, backward_again: bool, change: str
    ) -> None:
        """Gradients are replaced after a backward. A forward follows, or another
        backward, and then a step.
        """
        reference, model = self._pair(sharding_strategy=sharding_strategy)
        # Decay tells a gradient that is zero, which moves a parameter, from none.
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1, weight_decay=0.5)
            for each in (reference, model)
        ]
        for step, name in enumerate(NAMES):
            self._backward(reference, model, step)
            self._change_gradients(reference, model, name, change)
            if backward_again:
                self._backward(reference, model, step + 50)
            else:
                model(self._rows(step))
            for optim in optims:
                optim.step()
                optim.zero_grad()
            label = {
                "new": f"{name} was replaced",
                "none": f"{name} was set to None",
            }.get(change, f"all but {name} were")
            self._check_parameters(
                f"parameters after a step in which the gradient of {label}",
                model,
                reference,
            )

    def _change_gradients(
        self, reference: Chain, model: FSDP, name: str, change: str
    ) -> None:
        whole, own = dict(reference.named_parameters()), self._params(model)
        if change == "new":
            whole[name].grad = whole[name].grad * 3 + 1
            values = self._own(
                {each: param.grad for each, param in whole.items()}, model
            )
            if values[name].numel():
                own[name].grad = values[name].to(own[name].device, copy=True)
            return
        for each in NAMES:
            if (each == name) == (change == "none"):
                whole[each].grad = own[each].grad = None

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_without_a_backward_are_used(self):
        """A user may set gradients when there are none at all. Parameters that get none
        keep none.
        """
        self.run_subtests(
            {"sharding_strategy": [FULL, WHOLE]},
            self._test_gradients_without_a_backward_are_used,
        )

    def _test_gradients_without_a_backward_are_used(
        self, sharding_strategy: ShardingStrategy
    ) -> None:
        for name in NAMES:
            reference, model = self._pair(sharding_strategy=sharding_strategy)
            whole, own = dict(reference.named_parameters()), self._params(model)
            whole[name].grad = torch.arange(
                float(whole[name].numel()), device=self.device
            ).view(whole[name].shape)
            values = self._own(
                {
                    each: param if each != name else param.grad
                    for each, param in whole.items()
                },
                model,
            )
            if values[name].numel():
                own[name].grad = values[name].clone()
            self._backward(reference, model)
            for each in (reference, model):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
            self._check_parameters(
                f"parameters after {name} was given a gradient", model, reference
            )

    def _name_of_own(self) -> str:
        """Return the name of a parameter that this rank holds, so that every rank
        fails, each for its own.
        """
        return NAMES[0] if self.rank == 0 else NAMES[-1]

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_writeback_shape_mismatch(self):
        """A replacement of a shard must have its shape."""
        self.run_subtests(
            {"of_gradient": [False, True]}, self._test_writeback_shape_mismatch
        )

    def _test_writeback_shape_mismatch(self, of_gradient: bool) -> None:
        _, model = self._pair()
        name = self._name_of_own()
        param = self._params(model)[name]
        wrong = torch.zeros(param.numel() + 1, device=self.device)
        if of_gradient:
            # This error is torch's own, because gradients must have the shape of their
            # parameter.
            with self.assertRaisesRegex(
                RuntimeError, "attempting to assign a gradient of size"
            ):
                param.grad = wrong
            return
        self._replace(model, name, wrong, "parameter")
        expected = (
            rf"Cannot writeback when the parameter shape changes\nExpects "
            rf"torch.Size\(\[{param.numel()}\]\)"
        )
        with self.assertRaisesRegex(RuntimeError, expected):
            model(self._rows())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_writeback_between_fwd_and_bwd_for_no_reshard_raises(self):
        """Backward would use the old values, because this strategy keeps them."""
        for how in ("parameter", "data"):
            reference, model = self._pair(sharding_strategy=KEEPS)
            loss = model(self._rows()).sum()
            name = self._name_of_own()
            own = shards_of(
                dict(reference.named_parameters()), self.rank, self.world_size
            )[name]
            self._replace(model, name, own.clone(), how)
            with self.assertRaises((AssertionError, RuntimeError)) as refused:
                loss.backward()
            self.assertIn(
                "changing the parameters between forward and backward",
                str(refused.exception),
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_writeback_is_announced(self):
        """At the debug level INFO, and at no lower one, FSDP warns of each parameter
        and gradient that it takes over, and of gradients that only other ranks have.
        """
        name = self._name_of_own()
        dist.set_debug_level(dist.DebugLevel.OFF)
        _, silent = self._pair()
        own = self._params(silent)[name].detach().clone()
        self._replace(silent, name, own, "parameter")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"\[Rank")
            silent(self._rows())
        dist.set_debug_level(dist.DebugLevel.INFO)
        _, model = self._pair()

        def announced(what: str, shape: Any, device: Any) -> Any:
            flat = model.module[0]._flat_param
            size = torch.Size([self._params(model)[name].numel()])
            return self.assertWarnsRegex(
                UserWarning,
                re.escape(
                    f"[Rank {self.rank}] {what} needs writeback in "
                    f"HandleTrainingState.FORWARD\nexpected shape={size} "
                    f"shape={shape} expected device={flat.device} device={device}"
                ),
            )

        own = self._params(model)[name].detach().clone()
        self._replace(model, name, own, "parameter")
        with announced("Parameter", own.shape, self.device):
            loss = model(self._rows()).sum()
        loss.backward()
        own = self._params(model)[name]
        own.grad = own.grad.clone()
        with announced("Gradient", own.shape, self.device):
            loss = model(self._rows()).sum()
        loss.backward()
        self._params(model)[name].grad = None
        with announced("Gradient", None, None):
            model(self._rows()).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(self._rows()).sum().backward()
            if self.rank:
                model.zero_grad()
            with FSDP.summon_full_params(model, with_grads=True):
                pass
        texts = [str(each.message) for each in caught if "[Rank" in str(each.message)]
        expected = f"[Rank {self.rank}] Only some but not all ranks have a `None`"
        self.assertEqual(len(texts), self.rank, "warnings of a rank")
        for each in texts:
            self.assertIn(expected, each)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_changing_a_shared_parameter_raises(self):
        module = Chain(device=self.device)
        module.c = nn.Linear(4, 3, device=self.device)
        module.c.weight = module.b.weight
        model = FSDP(
            nn.ModuleDict({"b": module.b, "c": module.c}),
            device_id=self.device,
            use_orig_params=True,
        )
        model.module["c"].weight = nn.Parameter(
            model.module["c"].weight.detach().clone()
        )
        with self.assertRaisesRegex(
            NotImplementedError, "Changing shared parameters is not supported yet"
        ):
            with FSDP.summon_full_params(model):
                pass


class TestFSDPUseOrigParamsFQNs(OriginalParametersTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_named_parameters_in_forward(self):
        """Forward sees the names, shapes and values of the unsharded module."""
        reference, model = self._pair()
        seen: dict[str, torch.Tensor] = {}
        chain = model.module[0].module
        chain.a.register_forward_pre_hook(
            lambda *_: seen.update(
                {
                    name: param.detach().clone()
                    for name, param in chain.named_parameters()
                }
            )
        )
        model(self._rows())
        self.assertEqual(
            seen,
            {n: p.detach() for n, p in reference.named_parameters()},
            "parameters in forward",
        )
        self.assertEqual(list(self._params(model)), NAMES)


class TestFSDPUseOrigParamsNoSync(OriginalParametersTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_sync_correctness(self):
        """Under ``no_sync`` each rank sees its own whole gradients, then the shards of
        the sum of all.
        """
        self.run_subtests(
            {"sharding_strategy": STRATEGIES}, self._test_no_sync_correctness
        )

    def _test_no_sync_correctness(self, sharding_strategy: ShardingStrategy) -> None:
        reference, model = self._pair(sharding_strategy=sharding_strategy)

        def gradients(params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
            return {
                name: param.grad.detach().clone()
                for name, param in params.items()
                if param.grad is not None
            }

        with model.no_sync():
            for step in range(2):
                model(self._rows(step)).square().mean().backward()
                reference(self._rows(step)).square().mean().backward()
                found, expected = (
                    gradients(self._params(model)),
                    gradients(dict(reference.named_parameters())),
                )
                self.assertEqual(
                    found, expected, f"gradients of backward {step} under no_sync"
                )
        reference.zero_grad()
        for step in range(2):
            reference(self._all_rows(step)).square().mean().backward()
        self._backward(reference, model, step=2)
        expected = self._own(gradients(dict(reference.named_parameters())), model)
        expected = {name: own for name, own in expected.items() if own.numel()}
        self.assertEqual(
            gradients(self._params(model)), expected, "gradients after a reduction"
        )


class TestFSDPUseOrigParamsInit(OriginalParametersTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_all_may_be_frozen_and_thawed(self):
        """The optimizer moves parameters again that were all frozen for a step."""
        reference, model = self._pair()
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)
        ]
        for step, thawed in enumerate((False, True)):
            for each in (reference, model):
                each.requires_grad_(thawed)
            if thawed:
                self._backward(reference, model, step)
            else:
                # With autograd, FSDP1 (torch 2.13) expects a backward before the thaw.
                with torch.no_grad():
                    model(self._rows(step))
            for optim in optims:
                optim.step()
        held = {name for name, param in self._params(model).items() if param.numel()}
        found = {
            name
            for name, param in self._params(model).items()
            if param.grad is not None
        }
        self.assertEqual(found, held, "gradients after thawing")
        self._check_parameters("parameters after thawing", model, reference)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_a_frozen_unit_reduces_nothing(self):
        """From the next step on, and again once it is thawed."""
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8)).to(self.device)
        options: dict[str, Any] = {"use_orig_params": True, "device_id": self.device}
        units = [FSDP(copy.deepcopy(each), **options) for each in reference]
        model = FSDP(nn.Sequential(*units), **options)
        sizes = [4 * 6 + 6, 6 * 8 + 8]
        for step, trained in enumerate(((0, 1), (0,), (0, 1), (1,), (0, 1))):
            for index in range(2):
                for each in (reference, model.module):
                    each[index].requires_grad_(index in trained)
            inputs = torch.randn(2 * self.world_size, 4, device=self.device)
            own = inputs[2 * self.rank : 2 * self.rank + 2]
            reference(inputs).square().mean().backward()
            with CollectiveLog() as log:
                model(own).square().mean().backward()
            reduced = [
                call.numel for call in log.calls if call.name == "reduce-scatter"
            ]
            expected = [sizes[index] for index in reversed(trained)]
            self.assertEqual(reduced, expected, f"elements reduced in step {step}")
            with FSDP.summon_full_params(model, with_grads=True):
                for one, two in zip(
                    model.parameters(), reference.parameters(), strict=True
                ):
                    self.assertEqual(one.grad, two.grad, f"gradients of step {step}")
            model.zero_grad()
            reference.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_non_uniform_requires_grad(self):
        """A flat parameter can only be frozen as a whole. Only original parameters can
        differ.
        """
        module = Chain(device=self.device)
        module.b.requires_grad_(False)
        with self.assertRaisesRegex(
            ValueError, "Must flatten tensors with uniform `requires_grad` when"
        ):
            FSDP(module, device_id=self.device, use_orig_params=False)
        model = FSDP(
            Chain(device=self.device).requires_grad_(False),
            device_id=self.device,
            use_orig_params=True,
        )
        self.assertEqual(
            [param.requires_grad for param in model.parameters()], 6 * [False]
        )
        module = Chain(device=self.device)
        module.b.requires_grad_(False)
        model = FSDP(module, device_id=self.device, use_orig_params=True)
        trained = {
            name for name, param in self._params(model).items() if param.requires_grad
        }
        self.assertEqual(trained, {name for name in NAMES if not name.startswith("b.")})


for case in (TestFSDPUseOrigParamsWriteback,):
    instantiate_parametrized_tests(case)

if __name__ == "__main__":
    run_tests()
