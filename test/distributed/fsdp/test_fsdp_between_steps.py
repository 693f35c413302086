# Owner(s): ["oncall: distributed"]
"""FSDP1 between steps: a step, and anything that only reads the model, leaves FSDP as
idle as it was, and the next step equals the step of an untouched model, bit by bit.
"""

import copy
import enum
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import Chain, CollectiveLog, FSDPTest
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HOST = torch.empty(0).device

PLAIN = (bool, int, float, str, type(None), enum.Enum, torch.dtype, torch.device)
# What the first step notes for later ones, and what a step replaces.
NOTED = {
    "_iter",
    "_pre_forward_order_index",
    "handles_pre_forward_order",
    "_unsharded_flat_param_for_skipped_views",
    "_exec_order_data",
    "_tensors",
    "_zero_scalar",
}


class Network(nn.Module):
    """Units of uneven sizes below a root that has a parameter and a buffer as well."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], device) -> None:
        super().__init__()
        self.chain = Chain(wrap, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.head = nn.Linear(2, 3).to(device)
        self.register_buffer("scale", torch.full((3,), 0.5, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.chain(x)) * self.scale


def described(value: Any) -> Any:
    """Return ``value`` without elements of tensors: their layout and their memory."""
    if isinstance(value, torch.Tensor):
        size = value.untyped_storage().size()
        kind = type(value).__name__, value.dtype, value.device, value.requires_grad
        return (*kind, tuple(value.shape), value.stride(), size, value.is_leaf)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple, deque, set)):
        return type(value).__name__, [described(each) for each in value]
    if isinstance(value, dict):
        return [*map(described, value.values())]
    return type(value).__name__


def facts(model: FSDP) -> Iterator[tuple[str, Any]]:
    """Yield all that FSDP knows of ``model``, by name."""
    owners: dict[str, Any] = {}
    for number, unit in enumerate(FSDP.fsdp_modules(model)):
        own = dict(vars(unit))
        for name in ("_modules", "_parameters", "_buffers"):
            own.pop(name)
        owners |= {
            f"unit {number}": own,
            f"handle {number}": vars(unit._handle),
            f"flat {number}": vars(unit._flat_param),
            f"order {number}": vars(unit._exec_order_data),
        }
    for owner, values in owners.items():
        for name, value in values.items():
            if name not in NOTED:
                yield f"{name} of {owner}", described(value)
    for name, module in model.named_modules():
        for kind, value in vars(module).items():
            if kind.endswith("hooks"):
                yield f"{kind} of {name}", len(value)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        yield name, described(each)
        yield f"gradient of {name}", described(each.grad)
        yield f"hooks of {name}", len(each._backward_hooks or ())


class TestBetweenSteps(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _model(self, **options: Any) -> tuple[FSDP, torch.optim.Adam]:
        def wrap(module: nn.Module) -> FSDP:
            return FSDP(module, device_id=self.device, **options)

        model = wrap(Network(wrap, self.device))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def _step(self, model: nn.Module, step: int) -> torch.Tensor:
        rows = Chain.rows(self.device, self.world_size, self.rank, step)
        loss = model(rows).square().mean()
        loss.backward()
        return loss.detach()

    def _check_same_step(self, models, step: int, where: str) -> None:
        """Check that both models do the same in ``step``, and leave no gradients."""
        found = []
        for model, optim in models:
            with CollectiveLog() as log:
                loss = self._step(model, step)
            own = {
                name: each.grad.clone()
                for name, each in model.named_parameters()
                if each.grad is not None
            }
            optim.step()
            whole = [each.detach().clone() for each in model.parameters()]
            found.append((log.calls, loss, own, whole))
            optim.zero_grad()
        if "forward" in where:  # the root is still unsharded
            found = [each[1:] for each in found]
        names = ("collectives", "loss", "gradients", "parameters")[-len(found[0]) :]
        for name, touched, other in zip(names, *found, strict=True):
            self.assertEqual(touched, other, f"{name} {where}", atol=0, rtol=0)

    def _check_idle(self, before: dict[str, Any], model: FSDP, where: str) -> None:
        after = dict(facts(model))
        changed = [
            f"{name}: {before.get(name, False)} -> {after.get(name, False)}"
            for name in {**before, **after}
            if before.get(name, False) != after.get(name, False)
        ]
        if changed:
            self.fail(f"FSDP differs {where}:\n" + "\n".join(changed))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    @parametrize("use_orig_params", [False, True])
    def test_idle(self, strategy, use_orig_params):
        # Half precision meets each value of the two options, with prefetching.
        half = use_orig_params is (strategy != "SHARD_GRAD_OP")
        options = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": use_orig_params,
            "forward_prefetch": half,
            "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)
            if half
            else None,
        }
        models = [self._model(**options) for _ in range(2)]
        for each, _ in models:
            with FSDP.summon_full_params(each):  # which initializes
                pass
        model = models[0][0]
        fresh = dict(facts(model))
        self._check_same_step(models, 0, "of the first step")
        self._check_idle(fresh, model, "after the first step")
        step = 1
        for name, touch in self._touches(*models[0], half):
            where = f"after {name}"
            touch()
            if "forward" not in name:  # whose order and root's parameters last
                self._check_idle(fresh, model, where)
            if name.startswith(("summoning", "saving", "loading")):
                continue  # one step follows all of a kind
            self._check_same_step(models, step, where)
            self._check_idle(fresh, model, f"after the step {where}")
            step += 1

    def _touches(self, model: FSDP, optim, half: bool):
        """Yield what may be done between steps, by name."""
        sharded = model.sharding_strategy is not ShardingStrategy.NO_SHARD
        # The host cannot offload to itself.
        offloads = sharded and self.device != HOST
        yield from self._trainings(model, optim, sharded, half)
        for recurse in (True, False):
            for options in (
                {"writeback": False},
                {"writeback": True},
                {"writeback": False, "rank0_only": True},
                {"writeback": False, "rank0_only": True, "offload_to_cpu": offloads},
                {"with_grads": model._use_orig_params},
            ):
                summon = partial(self._summon, model, recurse, **options)
                yield f"summoning, {options}, {recurse=}", summon
        yield "apply", lambda: model.module.chain.a.apply(lambda module: None)
        yield from self._savings(model, optim, sharded, offloads)
        yield "all of these", lambda: None

    def _trainings(self, model: FSDP, optim, sharded: bool, half: bool):
        rows = Chain.rows(self.device, self.world_size, self.rank)

        def evaluate() -> None:
            model.eval()
            with torch.no_grad():
                first, second = model(rows), model(rows)
            self.assertEqual(first, second, "outputs of evaluations", atol=0, rtol=0)
            model.train()

        def forward_alone() -> None:
            model(rows)  # without backward
            self._step(model, 50)
            optim.zero_grad()

        def unreduced() -> None:
            with model.no_sync():
                self._step(model, 50)
            self._step(model, 51)
            optim.zero_grad()

        def two_backwards() -> None:
            loss = model(rows).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optim.zero_grad()

        def clip() -> None:
            self._step(model, 50)
            model.clip_grad_norm_(1.0)
            optim.zero_grad()

        yield "forwards of evaluation", evaluate
        yield "clipping", clip
        if sharded:
            yield "a forward without backward", forward_alone
        elif not half:  # else FSDP frees the parameters after the first backward
            yield "two backwards", two_backwards
        if (
            model.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP
            or not model._use_orig_params
        ):
            yield "a step without reduction", unreduced

    def _savings(self, model: FSDP, optim, sharded: bool, offloads: bool):
        orig, full = model._use_orig_params, StateDictType.FULL_STATE_DICT
        for kind, config, optim_config in (
            (full, FullStateDictConfig(), FullOptimStateDictConfig()),
            (
                full,
                FullStateDictConfig(offload_to_cpu=offloads, rank0_only=True),
                FullOptimStateDictConfig(rank0_only=True),
            ),
            (
                StateDictType.SHARDED_STATE_DICT,
                ShardedStateDictConfig(),
                ShardedOptimStateDictConfig(),
            ),
            (StateDictType.LOCAL_STATE_DICT, None, None),
        ):
            if not sharded and kind is not full:
                continue
            under = partial(FSDP.state_dict_type, model, kind, config, optim_config)

            def save(under=under) -> None:
                with under():
                    model.state_dict()

            def save_and_load(under=under) -> None:
                with under():
                    model.load_state_dict(copy.deepcopy(model.state_dict()))

            def optimizer(under=under) -> None:
                with under():
                    saved = FSDP.optim_state_dict(model, optim)
                    optim.load_state_dict(
                        FSDP.optim_state_dict_to_load(model, optim, saved)
                    )

            yield f"saving, {config}", save
            local = kind is StateDictType.LOCAL_STATE_DICT
            if not getattr(config, "rank0_only", False) and not (local and orig):
                yield f"loading, {config}", save_and_load
            # See docs/findings/optimizer_state_on_the_host.md
            if not local and (offloads or not sharded or not orig):
                yield f"saving and loading the optimizer, {optim_config}", optimizer

    def _summon(self, model: FSDP, recurse: bool, **options: Any) -> None:
        plain = Network(lambda module: module, self.device)
        sizes = {name: each.shape for name, each in plain.named_parameters()}
        # Through torch 2.13 autograd notes the copy to the host, forever.
        unnoted = torch.no_grad() if options.get("offload_to_cpu") else nullcontext()
        with unnoted, FSDP.summon_full_params(model, recurse=recurse, **options):
            if options.get("rank0_only") and self.rank:
                return
            for name, each in model.named_parameters():
                name = name.replace("_fsdp_wrapped_module.", "")
                if not recurse and "chain" in name:
                    continue
                self.assertEqual(each.shape, sizes[name], f"shape of {name}")
                self.assertIs(type(each), nn.Parameter)
                self.assertTrue(each.is_leaf and each.requires_grad, name)
                self.assertTrue(each.is_contiguous(), name)
                place = HOST if options.get("offload_to_cpu") else self.device
                self.assertEqual(each.device, place, f"device of {name}")


instantiate_parametrized_tests(TestBetweenSteps)

if __name__ == "__main__":
    run_tests()
