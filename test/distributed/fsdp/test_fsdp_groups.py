# Owner(s): ["oncall: distributed"]
"""FSDP1 in the two halves of the world at once: each trains, clips, scales, saves and
loads alone, as one unsharded model on the rows of its ranks.

A collective over the world would mix the halves, which have other rows.
"""

import copy
import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    skip_known_defect,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HOST = torch.empty(0).device

EXACT = {"atol": 0, "rtol": 0}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


class Network(nn.Module):
    """Units ``a``, ``b`` and ``c`` below a root with ``head``. ``free`` is not FSDP's:
    its gradient does not depend on the rows. Two ranks share none of them evenly.
    """

    def __init__(self, device: torch.device, wrap=lambda module: module) -> None:
        super().__init__()
        self.chain = Chain(wrap, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.head = nn.Linear(2, 3).to(device)
        self.free = nn.Linear(3, 1, bias=False).to(device)
        nn.init.constant_(self.free.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.chain(x))).square().mean() + self.free(
            torch.ones(3, device=x.device)
        )


class HalvesTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _start(self, orig: bool, strategy: ShardingStrategy = None, **options) -> None:
        """Set the rank's half, its group, and a model of each kind with optimizers."""
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.half, self.own = divmod(self.rank, 2)
        self.group = halves[self.half]
        self.options = {
            "process_group": self.group,
            "device_id": self.device,
            "use_orig_params": orig,
            "sharding_strategy": strategy,
            **options,
        }
        self.plain = Network(self.device)
        self.plain_optim = self._optim(self.plain)
        self.model, self.optim = self._sharded()

    def _sharded(self) -> tuple[FSDP, torch.optim.Optimizer]:
        network = Network(self.device, lambda module: FSDP(module, **self.options))
        model = FSDP(network, ignored_modules=[network.free], **self.options)
        return model, self._optim(model)

    def _optim(self, model: nn.Module) -> torch.optim.Adam:
        """Return an optimizer with two groups, the second first in the model."""
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, each in model.named_parameters():
            groups["chain" in name].append(each)
        return torch.optim.Adam(
            [{"params": groups[False], "lr": 0.02}, {"params": groups[True]}], lr=0.01
        )

    def _rows(self, step: int, rank: int | None) -> torch.Tensor:
        return Chain.rows(self.device, 2, rank, 10 * self.half + step)

    def _train(self, steps: range) -> None:
        for step in steps:
            for model, optim, rank in (
                (self.plain, self.plain_optim, None),
                (self.model, self.optim, self.own),
            ):
                optim.zero_grad()
                model(self._rows(step, rank)).sum().backward()
                optim.step()

    def _whole(self, model: FSDP) -> dict[str, torch.Tensor]:
        with FSDP.summon_full_params(model, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): each.detach().clone()
                for name, each in model.named_parameters()
            }

    def _check_parameters(self, where: str) -> None:
        self.assertEqual(
            self._whole(self.model), dict(self.plain.named_parameters()), where, **CLOSE
        )

    def _optim_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return what the reference's optimizer knows of each parameter, by name."""
        return {
            name: {key: each.cpu() for key, each in self.plain_optim.state[own].items()}
            for name, own in self.plain.named_parameters()
        }


class TestHalves(HalvesTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    @parametrize("orig", [False, True])
    def test_training(self, strategy, orig):
        """Order checks, clipping by two norms, scaling, an overflow in one half, and
        gradients in a summoned model.
        """
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        self._start(orig, ShardingStrategy[strategy])
        plain_scaler, scaler = (
            ShardedGradScaler(
                self.device.type, 8.0, growth_interval=1, process_group=self.group
            )
            for _ in range(2)
        )
        for step, norm in enumerate((2.0, float("inf"), 1.0, 2.0)):
            where = f"in step {step}"
            self.optim.zero_grad()
            self.plain_optim.zero_grad()
            loss = self.plain(self._rows(step, None))
            plain_scaler.scale(loss).sum().backward()
            own = self.model(self._rows(step, self.own))
            scaler.scale(own).sum().backward()
            dist.all_reduce(own := own.detach(), group=self.group)
            self.assertEqual(own / 2, loss, f"loss {where}", **CLOSE)
            if orig:
                self._check_gradients(where)
            if step == 2 and self.half == 0:  # overflows in a shard of the last rank
                self._overflow()
            for each, optim in ((plain_scaler, self.plain_optim), (scaler, self.optim)):
                each.unscale_(optim)
            if step != 2:
                expected = nn.utils.clip_grad_norm_(
                    self.plain.parameters(), 0.1, norm_type=norm
                )
                found = self.model.clip_grad_norm_(0.1, norm_type=norm)
                self.assertEqual(found, expected, f"norm {where}", **CLOSE)
            for each, optim in ((plain_scaler, self.plain_optim), (scaler, self.optim)):
                each.step(optim)
                each.update()
            self.assertEqual(scaler.get_scale(), plain_scaler.get_scale(), where)
            self._check_parameters(f"parameters after {where}")

    def _check_gradients(self, where: str) -> None:
        with FSDP.summon_full_params(self.model, with_grads=True):
            for (name, one), two in zip(
                self.plain.named_parameters(), self.model.parameters(), strict=True
            ):
                what = f"gradient of {name} {where}"
                self.assertEqual(two.grad, one.grad, what, **CLOSE)

    def _overflow(self) -> None:
        self.plain.head.weight.grad.fill_(float("inf"))
        for each in self.model.parameters() if self.own == 1 else ():
            if each.grad is not None:
                each.grad.fill_(float("inf"))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
    @parametrize("orig", [False, True])
    def test_model_states(self, strategy, orig):
        self._start(orig, ShardingStrategy[strategy])
        self._train(range(2))
        before = self._whole(self.model)
        self._check_parameters("parameters after two steps")
        full, shards = FullStateDictConfig, ShardedStateDictConfig
        # The host cannot offload to itself.
        offloads = self.device != HOST
        kinds: dict[str, Any] = {"full": (StateDictType.FULL_STATE_DICT, full())}
        if strategy == "FULL_SHARD":
            kinds |= {
                "full on the host": (StateDictType.FULL_STATE_DICT, full(offloads)),
                "full of rank 0": (
                    StateDictType.FULL_STATE_DICT,
                    full(offloads, rank0_only=True),
                ),
                "shards": (StateDictType.SHARDED_STATE_DICT, shards()),
                "shards on the host": (
                    StateDictType.SHARDED_STATE_DICT,
                    shards(offloads),
                ),
            }
        for kind, (type_, config) in kinds.items():
            with FSDP.state_dict_type(self.model, type_, config):
                saved = self.model.state_dict()
            if kind == "full of rank 0" and self.own:
                self.assertEqual([*saved], ["free.weight"], kind)
                continue
            self.assertEqual({*saved}, {*before}, f"names in {kind}")
            host = HOST if "host" in kind else self.device
            for name, whole in before.items():
                found = saved[name]
                if "shards" in kind and name != "free.weight":
                    self._check_shard(found, whole, f"{name} of {kind}")
                    continue
                self.assertEqual(found.cpu(), whole.cpu(), name, **EXACT)
                if kind == "full of rank 0":
                    continue
                if name != "free.weight":
                    self.assertEqual(found.device, host, f"device of {name}")
                self.assertFalse(found.requires_grad, name)
            if kind == "full of rank 0":
                continue
            # Later training does not change what was saved, but for what is not FSDP's.
            saved["free.weight"] = saved["free.weight"].clone()
            self._train(range(2, 3))
            with FSDP.state_dict_type(self.model, type_, config):
                self.model.load_state_dict(saved)
            self.assertEqual(self._whole(self.model), before, kind, **EXACT)
            self.plain.load_state_dict(before)

    def _check_shard(self, found, whole: torch.Tensor, where: str) -> None:
        size = -(-whole.shape[0] // 2)
        self.assertEqual(found.size(), whole.shape, f"size of {where}")
        shards = {
            each.placement.rank(): (each.shard_offsets[0], each.shard_sizes[0])
            for each in found.metadata().shards_metadata
        }
        first = 2 * self.half
        rows = whole.shape[0]
        expected = {first: (0, size)}
        if size < rows:
            expected[first + 1] = (size, rows - size)
        self.assertEqual(shards, expected, f"shards of {where}")
        self.assertEqual(found.metadata().tensor_properties.dtype, whole.dtype)
        self.assertFalse(found.metadata().tensor_properties.requires_grad)
        own = [each.tensor.cpu() for each in found.local_shards()]
        chunks = [*whole.cpu().chunk(2)][self.own : self.own + 1]
        self.assertEqual(own, chunks, f"own shard of {where}", **EXACT)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
    @parametrize("orig", [False, True])
    def test_optimizer_states(self, strategy, orig):
        """Through torch 2.13 rank 0 of the world sends the names of flat parameters,
        and the states of a rank that loads for all, so that needs its group.
        """
        if orig and strategy == "FULL_SHARD":
            skip_known_defect("optimizer_state_on_the_host")
        self._start(orig, ShardingStrategy[strategy])
        self._train(range(2))
        if not orig and self.half:
            return
        # Through torch 2.13 the saved states are the optimizer's own, on the device.
        self.alias = orig and strategy == "NO_SHARD"
        expected, held = self._optim_states(), copy.deepcopy(self.optim.state_dict())
        full, shards = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
        kinds = {
            "full": (full, FullStateDictConfig(), FullOptimStateDictConfig()),
            "full of rank 0": (
                full,
                FullStateDictConfig(rank0_only=True),
                FullOptimStateDictConfig(rank0_only=True),
            ),
        }
        if strategy == "FULL_SHARD":
            kinds["shards"] = (
                shards,
                ShardedStateDictConfig(),
                ShardedOptimStateDictConfig(),
            )
        if self.half:
            del kinds["full of rank 0"]
        for kind, (type_, config, optim_config) in kinds.items():
            model, optim = self._sharded()
            FSDP.set_state_dict_type(self.model, type_, config, optim_config)
            FSDP.set_state_dict_type(model, type_, config, optim_config)
            saved = FSDP.optim_state_dict(self.model, self.optim, group=self.group)
            self.assertEqual(self.optim.state_dict(), held, f"saved {kind}", **EXACT)
            if kind == "full of rank 0" and self.own:
                self.assertEqual(saved, {}, kind)
            else:
                self._check_optim(saved, expected, kind)
            kept = copy.deepcopy(saved) if kind != "shards" else None
            loaded = FSDP.optim_state_dict_to_load(
                model, optim, saved, group=self.group
            )
            if kept is not None:
                self.assertEqual(saved, kept, f"{kind}, which was loaded", **EXACT)
            self._check_loaded(loaded, held, kind, optim)
        self._check_older_names(expected, held)

    def _check_loaded(self, loaded, held, kind: str, optim) -> None:
        self.assertEqual({*loaded["state"]}, {*held["state"]}, kind)
        optim.load_state_dict(loaded)
        self.assertEqual(optim.state_dict(), held, f"loaded {kind}", **EXACT)

    def _check_optim(self, saved, expected, kind: str) -> None:
        self.assertEqual({*saved["state"]}, {*expected}, f"names in {kind}")
        for name, states in expected.items():
            for key, state in states.items():
                where = f"{key} of {name} in {kind}"
                found = saved["state"][name][key]
                if kind == "shards" and state.dim() and name != "free.weight":
                    own = [each.tensor.cpu() for each in found.local_shards()]
                    chunks = [*state.chunk(2)][self.own : self.own + 1]
                    self.assertEqual(own, chunks, where, **CLOSE)
                else:
                    if not self.alias:
                        self.assertEqual(found.device, HOST, where)
                    self.assertEqual(found.cpu(), state, where, **CLOSE)
        names = [
            [name for name in expected if ("chain" in name) is inner]
            for inner in (False, True)
        ]
        self.assertEqual([each["params"] for each in saved["param_groups"]], names)
        self.assertEqual([each["lr"] for each in saved["param_groups"]], [0.02, 0.01])

    def _check_older_names(self, expected, held) -> None:
        """The functions that ``optim_state_dict`` replaces do the same."""
        model, optim, group = self.model, self.optim, self.group
        whole = FSDP.full_optim_state_dict(model, optim, rank0_only=False, group=group)
        self._check_optim(whole, expected, "full_optim_state_dict")
        first = FSDP.full_optim_state_dict(model, optim, group=group)
        self.assertEqual(first, {} if self.own else whole, "of rank 0", **EXACT)
        loads = {
            "shard_full_optim_state_dict": FSDP.shard_full_optim_state_dict(
                whole, model, optim=optim
            )
        }
        if not self.half:
            loads["scatter_full_optim_state_dict"] = FSDP.scatter_full_optim_state_dict(
                None if self.own else whole, model, optim=optim, group=group
            )
        if self.options["sharding_strategy"] is ShardingStrategy.FULL_SHARD:
            shards = FSDP.sharded_optim_state_dict(model, optim, group=group)
            self._check_optim(shards, expected, "shards")
            loads["flatten_sharded_optim_state_dict"] = (
                FSDP.flatten_sharded_optim_state_dict(shards, model, optim)
            )
        for kind, loaded in loads.items():
            self._check_loaded(loaded, held, kind, self._sharded()[1])


instantiate_parametrized_tests(TestHalves)

if __name__ == "__main__":
    run_tests()
