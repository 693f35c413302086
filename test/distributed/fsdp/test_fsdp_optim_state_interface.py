# Owner(s): ["oncall: distributed"]
"""FSDP1 optimizer state dicts: other keys, other optimizers and strategies, options, missing state.

Upstream has these tests in ``test_fsdp_optim_state.py``.
"""

import sys
import unittest
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import _NamedOptimizer

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPOptimStateTest,
    OptimStateModel,
    OptimStateNestedModel,
    compute_device,
    fsdp_on_device,
    get_devtype,
    state_by_name,
)
from torch_ext.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

STATE_DICT_TYPES = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT]
HOST = torch.device("cpu")


def _save(model: nn.Module, optim: Any, state_dict_type: StateDictType, optim_input: Any = None) -> dict[str, Any]:
    """Return the optimizer state on all ranks."""
    if state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return FSDP.sharded_optim_state_dict(model, optim)
    return FSDP.full_optim_state_dict(model, optim, optim_input, rank0_only=False)


def _load(osd: dict[str, Any], model: nn.Module, state_dict_type: StateDictType, **source: Any) -> dict[str, Any]:
    """Return ``osd`` in the form that the local optimizer loads."""
    if state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return FSDP.flatten_sharded_optim_state_dict(osd, model, **source)
    return FSDP.shard_full_optim_state_dict(osd, model, **source)


def _leave_out_sharded_with_optim_input(state_dict_type: StateDictType, use_optim_input: bool) -> None:
    if use_optim_input and state_dict_type is StateDictType.SHARDED_STATE_DICT:
        raise unittest.SkipTest("sharded optimizer states take no optim_input")


def _step(model: nn.Module, optim: Any) -> None:
    model(model.get_input()).sum().backward()
    optim.step()
    optim.zero_grad()


class Towers(nn.Module):
    """Each rank has its own tower outside FSDP; their sum is the input of one within FSDP, as in model parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = fsdp_on_device(OptimStateModel(), use_orig_params=True)
        self.add_module(self._own, nn.Sequential(nn.Linear(8, 8, device=compute_device()), nn.ReLU()))

    @property
    def _own(self) -> str:
        return f"sparse{dist.get_rank()}"

    def forward(self, x):
        sparse = self.get_submodule(self._own)(x)
        dist.all_reduce(sparse.detach())
        return self.dense(sparse)


class TestFSDPOptimStateKeys(FSDPOptimStateTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", STATE_DICT_TYPES)
    @parametrize("use_multiple_param_groups", [False, True])
    def test_rekey_optim_state_dict_to_ids(self, state_dict_type, use_multiple_param_groups):
        self.run_subtests(
            {"use_optim_input": [False, True]},
            self._test_rekey_optim_state_dict_to_ids,
            state_dict_type=state_dict_type,
            use_multiple_param_groups=use_multiple_param_groups,
        )

    def _test_rekey_optim_state_dict_to_ids(self, state_dict_type, use_multiple_param_groups, use_optim_input):
        """Keyed by id, the state of a wrapped model equals that of an unwrapped one."""
        _leave_out_sharded_with_optim_input(state_dict_type, use_optim_input)
        groups = {"use_multiple_param_groups": use_multiple_param_groups}
        model1, optim1, optim_input1 = self._init_nested_model(wrap=True, **groups)
        self._step_model(model1, optim1)
        osd = _save(model1, optim1, state_dict_type, optim_input1 if use_optim_input else None)
        model2, optim2, optim_input2 = self._init_nested_model(wrap=False, **groups)
        self._step_model(model2, optim2)
        source = {"optim_input": optim_input2} if use_optim_input else {"optim": optim2}
        rekeyed = FSDP.rekey_optim_state_dict(osd, OptimStateKeyType.PARAM_ID, model2, **source)
        self._check_same_osd(rekeyed, optim2.state_dict())
        if state_dict_type is StateDictType.FULL_STATE_DICT:
            optim2.load_state_dict(rekeyed)
            self._step_model(model2, optim2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_rekey_optim_state_dict_to_names(self):
        self.run_subtests({"use_optim_input": [False, True]}, self._test_rekey_optim_state_dict_to_names)

    def _test_rekey_optim_state_dict_to_names(self, use_optim_input: bool):
        """Keyed by name, the state of an unwrapped model can be sharded and then equals the wrapped model's."""
        model1, optim1, optim_input1 = self._init_nested_model(wrap=True)
        model2, optim2, optim_input2 = self._init_nested_model(wrap=False)
        for model, optim in ((model1, optim1), (model2, optim2)):
            self._step_model(model, optim)
        source1, source2 = (
            {"optim_input": optim_input} if use_optim_input else {"optim": optim}
            for optim, optim_input in ((optim1, optim_input1), (optim2, optim_input2))
        )
        rekeyed = FSDP.rekey_optim_state_dict(optim2.state_dict(), OptimStateKeyType.PARAM_NAME, model2, **source2)
        self._check_same_state(rekeyed, state_by_name(model2, optim2))
        sharded = FSDP.shard_full_optim_state_dict(rekeyed, model1, **source1)
        self._check_same_osd(sharded, optim1.state_dict())
        optim1.load_state_dict(sharded)
        self._step_model(model1, optim1)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", STATE_DICT_TYPES)
    @parametrize("add_to_fsdp_module", [False, True])
    def test_shard_full_optim_state_dict_unmanaged_params(self, state_dict_type, add_to_fsdp_module):
        self.run_subtests(
            {"use_optim_input": [False, True]},
            self._test_shard_full_optim_state_dict_unmanaged_params,
            state_dict_type=state_dict_type,
            add_to_fsdp_module=add_to_fsdp_module,
        )

    def _test_shard_full_optim_state_dict_unmanaged_params(self, state_dict_type, add_to_fsdp_module, use_optim_input):
        """A parameter without saved state is an error in a flat parameter; elsewhere the caller must add it."""
        _leave_out_sharded_with_optim_input(state_dict_type, use_optim_input)
        model, optim, optim_input = self._init_nested_model(wrap=True)
        self._step_model(model, optim, num_iters=1)
        osd = _save(model, optim, state_dict_type, optim_input if use_optim_input else None)
        model = OptimStateNestedModel().to(compute_device())
        extra = nn.Parameter(torch.randn(5, 5, device=compute_device()))
        (model.block2[2] if add_to_fsdp_module else model).register_parameter("extra", extra)
        params = [*model.wrap().parameters()]
        optim = torch.optim.Adam(params, lr=1e-3)
        source = {"optim_input": params} if use_optim_input else {"optim": optim}
        if add_to_fsdp_module:
            with self.assertRaisesRegex(ValueError, "must have scalar state with the same value and dtype"):
                _load(osd, model, state_dict_type, **source)
            return
        loaded = _load(osd, model, state_dict_type, **source)
        index = next(index for index, param in enumerate(params) if param is extra)
        self.assertNotIn(index, loaded["state"])
        moments = {name: torch.randn(5, 5, device=compute_device()) for name in ("exp_avg", "exp_avg_sq")}
        loaded["state"][index] = {"step": torch.tensor(1.0), **moments}
        (param_group,) = loaded["param_groups"]
        param_group["params"] = sorted({index, *param_group["params"]})
        optim.load_state_dict(loaded)
        self.assertEqual(optim.state[extra]["exp_avg"], moments["exp_avg"])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_optim_input_warning(self):
        """Every function that takes ``optim_input`` warns that it is deprecated."""
        model, optim, optim_input = self._init_nested_model(wrap=True)
        self._step_model(model, optim)
        plain, plain_optim, plain_input = self._init_nested_model(wrap=False)
        self._step_model(plain, plain_optim)
        with self._warns_of_optim_input():
            osd = FSDP.full_optim_state_dict(model, optim, optim_input=optim_input, rank0_only=False)
        for load in (FSDP.shard_full_optim_state_dict, FSDP.scatter_full_optim_state_dict):
            with self._warns_of_optim_input():
                load(osd, model, optim_input=optim_input)
        for state, key_type in (
            (osd, OptimStateKeyType.PARAM_ID),
            (plain_optim.state_dict(), OptimStateKeyType.PARAM_NAME),
        ):
            with self._warns_of_optim_input():
                FSDP.rekey_optim_state_dict(state, key_type, plain, optim_input=plain_input)

    def _warns_of_optim_input(self) -> AbstractContextManager[Any]:
        return self.assertWarnsRegex(FutureWarning, "`optim_input` argument is deprecated")


class TestFSDPOptimStateInterface(FSDPOptimStateTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", STATE_DICT_TYPES)
    def test_save_load_without_0th_param_state(self, state_dict_type: StateDictType):
        """The first parameter, from which optimizers infer the type of "step", may have no state."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.unused, self.lin = fsdp_on_device(nn.Linear(5, 5)), fsdp_on_device(nn.Linear(5, 5))

            def forward(self, x):
                return self.lin(x)

            def get_input(self):
                return torch.randn(2, 5, device=compute_device())

        model = fsdp_on_device(Model())
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        _step(model, optim)
        before = deepcopy(optim.state_dict())
        self.assertEqual(len(before["state"]), 1)
        loaded = _load(_save(model, optim, state_dict_type), model, state_dict_type, optim=optim)
        optim.load_state_dict(loaded)
        state = optim.state[next(iter(model.lin.parameters()))]
        self.assertEqual(dict(state), next(iter(before["state"].values())))
        _step(model, optim)
        self.assertEqual(state["step"].item(), 2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_compatible_with_trec(self):
        """An optimizer with named parameters saves and loads like one with numbered ones, also if ranks differ."""
        models = [Towers(), Towers()]
        plain = torch.optim.Adam(models[0].parameters(), lr=1e-2)
        named = _NamedOptimizer(
            models[1].named_parameters(), torch.optim.Adam, [{"params": models[1].parameters()}], models[1], lr=1e-2
        )
        batch = torch.rand(5, 8, device=compute_device())
        osds = []
        for model, optim in zip(models, (plain, named), strict=True):
            self._give_zero_gradients(model)
            optim.step()
            model(batch).sum().backward()
            optim.step()
            osds.append(deepcopy(FSDP.optim_state_dict(model, optim)))
        self._check_same_param_groups(*osds, with_params=False)
        self._check_same_state(osds[1], osds[0]["state"])
        self.assertIn(f"sparse{self.rank}.0.weight", osds[1]["state"])

        for _ in range(3):
            models[1](batch).sum().backward()
            named.step()
        to_load = FSDP.optim_state_dict_to_load(models[1], named, osds[1], is_named_optimizer=True)
        named.load_state_dict(to_load)
        self._check_same_state(FSDP.optim_state_dict(models[1], named), osds[0]["state"])

    def _give_zero_gradients(self, model: nn.Module) -> None:
        """Take one step, which creates the state of every parameter."""
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_optim_state_without_param_groups(self):
        """State can be saved and loaded without parameter groups."""
        model = fsdp_on_device(OptimStateModel())
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        _step(model, optim)
        original = deepcopy(optim.state_dict())
        without_groups = deepcopy(original)
        groups = without_groups.pop("param_groups")
        osd = deepcopy(FSDP.optim_state_dict(model, optim, optim_state_dict=without_groups))
        self.assertNotIn("param_groups", osd)
        _step(model, optim)
        self.assertNotEqual(original, optim.state_dict())
        to_load = FSDP.optim_state_dict_to_load(model, optim, osd)
        to_load["param_groups"] = groups
        optim.load_state_dict(to_load)
        self.assertEqual(original, optim.state_dict())
        self._check_same_state(FSDP.optim_state_dict(model, optim), osd["state"])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_empty_optimizer_state(self):
        model = fsdp_on_device(OptimStateModel())
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        osd = FSDP.optim_state_dict(model, optim)
        self.assertEqual(osd["state"], {})
        members = [name for group in osd["param_groups"] for name in group["params"]]
        self.assertEqual(members, list(OptimStateModel().state_dict()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_interface_arguments(self):
        """``optim_state_dict``, ``load_directly``, and what each configuration returns on which rank and device."""
        model = fsdp_on_device(OptimStateModel())
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        _step(model, optim)
        original = deepcopy(optim.state_dict())
        osd = FSDP.optim_state_dict(model, optim, optim_state_dict=original)
        self._check_same_state(osd, FSDP.optim_state_dict(model, optim)["state"])
        _step(model, optim)
        FSDP.optim_state_dict_to_load(model, optim, osd, load_directly=True)
        self._check_same_state(optim.state_dict(), original["state"])

        self.assertEqual(self._kinds(osd), {(torch.Tensor, HOST.type)})
        full = (StateDictType.FULL_STATE_DICT, FullStateDictConfig())
        sharded = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
        own = get_devtype().type
        for config, kinds in (
            ((*full, FullOptimStateDictConfig(offload_to_cpu=False)), {(torch.Tensor, own)}),
            ((*sharded, ShardedOptimStateDictConfig(offload_to_cpu=False)), {(ShardedTensor, own)}),
            ((*sharded, ShardedOptimStateDictConfig(offload_to_cpu=True)), {(ShardedTensor, HOST.type)}),
            ((*full, FullOptimStateDictConfig(rank0_only=True)), {(torch.Tensor, HOST.type)}),
        ):
            with FSDP.state_dict_type(model, *config):
                osd = FSDP.optim_state_dict(model, optim, optim_state_dict=original)
            if getattr(config[-1], "rank0_only", False) and self.rank:
                self.assertEqual(osd, {})
            else:
                self.assertEqual(self._kinds(osd), kinds, str(config))

    def _kinds(self, osd: dict[str, Any]) -> set[tuple[type, str]]:
        """Return the classes and the devices of the states that have dimensions."""
        kinds = set()
        for state in osd["state"].values():
            for value in state.values():
                if isinstance(value, ShardedTensor):
                    kinds |= {(ShardedTensor, local.tensor.device.type) for local in value.local_shards()}
                elif value.dim():
                    kinds.add((torch.Tensor, value.device.type))
        return kinds

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_dict_with_none_tensor_state(self):
        self.run_subtests(
            {"use_orig_params": [False, True], "optim_class": [torch.optim.Adam, torch.optim.SGD]},
            self._test_state_dict_with_none_tensor_state,
        )

    def _test_state_dict_with_none_tensor_state(self, use_orig_params: bool, optim_class: type[torch.optim.Optimizer]):
        """State that is ``None`` or not a tensor is saved and loaded unchanged."""
        model = fsdp_on_device(OptimStateModel(), use_orig_params=use_orig_params)
        optim = optim_class(model.parameters(), lr=1e-2)
        _step(model, optim)
        original = deepcopy(optim.state_dict())
        if optim_class is torch.optim.SGD:
            # Without momentum the optimizer has no state.
            original["state"] = {index: {} for index in original["param_groups"][0]["params"]}
        for state in original["state"].values():
            state |= {"number": 2.74, "nothing": None}
        osd = FSDP.optim_state_dict(model, optim, optim_state_dict=original)
        self.assertEqual(set(osd["state"]), set(OptimStateModel().state_dict()))
        to_load = FSDP.optim_state_dict_to_load(model, optim, osd)
        self.assertNotEqual(to_load["state"], {})
        for state in (*osd["state"].values(), *to_load["state"].values()):
            self.assertEqual((state["number"], state["nothing"]), (2.74, None))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_no_shard(self):
        self.run_subtests({"use_orig_params": [False, True]}, self._test_with_no_shard)

    def _test_with_no_shard(self, use_orig_params: bool):
        model = fsdp_on_device(
            OptimStateModel(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=use_orig_params
        )
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        _step(model, optim)
        original = deepcopy(optim.state_dict())
        osd = deepcopy(FSDP.optim_state_dict(model, optim))
        _step(model, optim)
        self.assertNotEqual(original, optim.state_dict())
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, osd))
        self.assertEqual(original, optim.state_dict())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_grad(self):
        """Parameters that are frozen and unfrozen in turn have state after their first gradient, and keep it."""
        model = fsdp_on_device(OptimStateModel(no_grad=True), use_orig_params=True)
        on_device = FullOptimStateDictConfig(offload_to_cpu=False)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), on_device)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(5):
            model.net1.requires_grad_(step % 2 == 1)
            _step(model, optim)
            original = deepcopy(optim.state_dict())
            osd = FSDP.optim_state_dict(model, optim)
            FSDP.optim_state_dict_to_load(model, optim, osd, load_directly=True)
            self._check_same_state(optim.state_dict(), original["state"])
            self.assertEqual("net1.0.weight" in osd["state"], step > 0)


instantiate_parametrized_tests(TestFSDPOptimStateKeys)
instantiate_parametrized_tests(TestFSDPOptimStateInterface)

if __name__ == "__main__":
    run_tests()
