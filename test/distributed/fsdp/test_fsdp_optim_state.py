# Owner(s): ["oncall: distributed"]
"""FSDP1 optimizer state dicts: full, sharded and flattened, also between world sizes and wrappings.

``test_fsdp_optim_state_interface.py`` has the rest of upstream's file: other keys, optimizers and options.
"""

import sys
import unittest
from copy import deepcopy
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPOptimStateTest,
    OptimStateNestedModel,
    TransformerWithSharedParams,
    compute_device,
    get_full_params,
    skip_offload_of_orig_params,
    state_by_name,
)
from torch_ext.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

STATE_DICT_TYPES = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT]
FULL = StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
FULL_ON_RANK0 = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
)
FULL_ON_DEVICE = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
)
SHARDED = StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


class _OSDCommMethod(Enum):
    """How state saved by one model gets to the ranks of another."""

    BROADCAST_OBJECT_LIST = auto()
    SCATTER_FULL_OSD = auto()
    FLATTEN_SHARDED_OSD = auto()


class _ModelClass(Enum):
    NESTED = auto()
    TRANSFORMER = auto()


class LoadingCase(FSDPOptimStateTest):
    """Saves the state of one model and loads it into another."""

    def _init_transformer_model(self, wrap: bool, group: Any = None, **kwargs: Any):
        if any(kwargs.values()):
            raise ValueError(
                f"got {kwargs}, expected none: the root's only flat parameter can be listed in only one way"
            )
        mode = FSDPInitMode.RECURSIVE if wrap else FSDPInitMode.NO_FSDP
        model = TransformerWithSharedParams.init(
            group or self.process_group, mode, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
        )
        optim_input = [*model.parameters()]
        return model, torch.optim.Adam(optim_input, lr=0.01), optim_input

    def _init(self, model_class: _ModelClass, **kwargs: Any):
        initializers = {
            _ModelClass.NESTED: self._init_nested_model,
            _ModelClass.TRANSFORMER: self._init_transformer_model,
        }
        return initializers[model_class](wrap=True, **kwargs)

    def _half_group(self) -> dist.ProcessGroup | None:
        """Return the group of the even ranks, on these ranks; ``None`` on the others. Collective."""
        even = range(0, self.world_size, 2)
        group = dist.new_group(ranks=[*even])
        return group if self.rank in even else None

    def _load_by(self, method: _OSDCommMethod, osd: dict[str, Any], model, optim, optim_input, use_optim_input, group):
        """Return ``osd`` in the form that the local optimizer of ``model`` loads."""
        source = {"optim_input": optim_input} if use_optim_input else {"optim": optim}
        if method is _OSDCommMethod.FLATTEN_SHARDED_OSD:
            return FSDP.flatten_sharded_optim_state_dict(osd, model, optim=optim)
        if method is _OSDCommMethod.SCATTER_FULL_OSD:
            own = osd if self.rank == 0 else None
            return FSDP.scatter_full_optim_state_dict(own, model, group=group, **source)
        return FSDP.shard_full_optim_state_dict(self._broadcast_full_osd(osd, group), model, **source)

    def _test_load_optim_state(
        self,
        model_class: _ModelClass,
        osd_comm_method: _OSDCommMethod,
        halve_world_size: bool = False,
        use_optim_input: bool = False,
        use_multiple_param_groups: bool = False,
        use_diff_optim_inputs: bool = False,
        **new_model_kwargs: Any,
    ):
        """State of one model, loaded by another with other ranks, wrapping or order, equals the other's own state.

        Both are trained with the same data. The other's own state must also survive saving and loading.
        """
        init = partial(self._init, model_class, use_multiple_param_groups=use_multiple_param_groups)
        save = (
            FSDP.sharded_optim_state_dict
            if osd_comm_method is _OSDCommMethod.FLATTEN_SHARDED_OSD
            else FSDP.full_optim_state_dict
        )
        model1, optim1, optim_input1 = init()
        self._step_model(model1, optim1)
        osd1 = save(model1, optim1, *([optim_input1] if use_optim_input else []))
        group = self._half_group() if halve_world_size else self.process_group
        if group is None:
            return
        model2, optim2, optim_input2 = init(
            group=group, use_diff_optim_inputs=use_diff_optim_inputs, **new_model_kwargs
        )
        self._step_model(model2, optim2)
        osd2 = save(model2, optim2, *([optim_input2] if use_optim_input else []), group=group)
        for osd in (osd1, osd2):
            loaded = self._load_by(osd_comm_method, osd, model2, optim2, optim_input2, use_optim_input, group)
            self._check_same_osd(loaded, optim2.state_dict())
        optim2.load_state_dict(loaded)
        self._step_model(model2, optim2, num_iters=1)

    def _test_load_optim_state_with_optim_state_dict(
        self,
        model_class: _ModelClass,
        state_dict_settings: StateDictSettings,
        halve_world_size: bool = False,
        use_multiple_param_groups: bool = False,
        use_diff_optim_inputs: bool = False,
        fsdp_kwargs: dict[str, Any] | None = None,
        **new_model_kwargs: Any,
    ):
        """The same with ``optim_state_dict`` and ``optim_state_dict_to_load``."""
        if state_dict_settings in (FULL, FULL_ON_RANK0) and fsdp_kwargs == {"use_orig_params": True}:
            skip_offload_of_orig_params()
        settings = (
            state_dict_settings.state_dict_type,
            state_dict_settings.state_dict_config,
            state_dict_settings.optim_state_dict_config,
        )
        extra = {"use_multiple_param_groups": use_multiple_param_groups}
        extra |= {"fsdp_kwargs": fsdp_kwargs} if fsdp_kwargs else {}
        model1, optim1, _ = self._init(model_class, **extra)
        FSDP.set_state_dict_type(model1, *settings)
        self._step_model(model1, optim1)
        osd1 = FSDP.optim_state_dict(model1, optim1)
        group = self._half_group() if halve_world_size else self.process_group
        if group is None:
            return
        model2, optim2, _ = self._init(
            model_class, group=group, use_diff_optim_inputs=use_diff_optim_inputs, **extra, **new_model_kwargs
        )
        FSDP.set_state_dict_type(model2, *settings)
        self._step_model(model2, optim2)
        osd2 = FSDP.optim_state_dict(model2, optim2, group=group)
        for osd in (osd1, osd2):
            loaded = FSDP.optim_state_dict_to_load(model2, optim2, osd, group=group)
            self._check_same_osd(loaded, optim2.state_dict())
        optim2.load_state_dict(loaded)
        self._step_model(model2, optim2, num_iters=1)


class TestFSDPOptimState(LoadingCase):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", STATE_DICT_TYPES)
    @parametrize("use_multiple_param_groups", [False, True])
    def test_optim_state_dict_nested(self, state_dict_type: StateDictType, use_multiple_param_groups: bool):
        self.run_subtests(
            {"rank0_only": [False, True], "use_diff_optim_inputs": [False, True], "use_optim_input": [False, True]},
            self._test_optim_state_dict_nested,
            state_dict_type=state_dict_type,
            use_multiple_param_groups=use_multiple_param_groups,
        )

    def _test_optim_state_dict_nested(
        self, state_dict_type, use_multiple_param_groups, rank0_only, use_diff_optim_inputs, use_optim_input
    ):
        """The state of a wrapped model equals that of an unwrapped one, by name, on all ranks or on rank 0."""
        is_sharded = state_dict_type is StateDictType.SHARDED_STATE_DICT
        if is_sharded and rank0_only:
            raise unittest.SkipTest("rank0_only is an option of full optimizer states only")
        if is_sharded and use_optim_input:
            raise unittest.SkipTest("sharded optimizer states take no optim_input")
        kwargs = {
            "use_multiple_param_groups": use_multiple_param_groups,
            "use_diff_optim_inputs": use_diff_optim_inputs,
        }
        model, optim, optim_input = self._init_nested_model(wrap=True, **kwargs)
        losses = self._step_model(model, optim)
        if is_sharded:
            osd = FSDP.sharded_optim_state_dict(model, optim)
        else:
            source = [optim_input] if use_optim_input else []
            osd = FSDP.full_optim_state_dict(model, optim, *source, rank0_only=rank0_only)
        if rank0_only and self.rank:
            self.assertEqual(osd, {})
            return
        reference, ref_optim, _ = self._init_nested_model(wrap=False, **kwargs)
        self.assertEqual(losses, self._step_model(reference, ref_optim))
        self._check_same_param_groups(osd, ref_optim.state_dict(), with_params=False)
        self._check_same_state(osd, state_by_name(reference, ref_optim))
        members = [name for param_group in osd["param_groups"] for name in param_group["params"]]
        self.assertEqual(sorted(members), sorted(osd["state"]))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_optim_state_dict_keys(self):
        """Keys are those of the model's full state dict, even with ignored modules and checkpoint wrappers."""
        model = OptimStateNestedModel().to(compute_device()).wrap(ignore_modules=True)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Sequential))
        self.assertTrue(any(_CHECKPOINT_WRAPPED_MODULE in name for name, _ in model.named_parameters()))
        optim = torch.optim.Adam(model.parameters(), lr=1e-3)
        self._step_model(model, optim)
        osd = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            self.assertEqual(set(osd["state"]), set(model.state_dict()))
        self.assertEqual(set(osd["state"]), set(OptimStateNestedModel().state_dict()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_optim_state_dict_nested_invalid(self):
        """An error names the rank whose optimizer lacks a parameter that rank 0's has."""
        model = OptimStateNestedModel().to(compute_device()).wrap()
        params = [*model.parameters()]
        optim = torch.optim.Adam(params if self.rank == 0 else params[:-1], lr=1e-3)
        self._step_model(model, optim)
        with self.assertRaisesRegex(RuntimeError, "some ranks are missing some of those states"):
            FSDP.full_optim_state_dict(model, optim)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("wrap_alt", [False, True])
    def test_shard_full_optim_state_dict_nested(self, wrap_alt: bool):
        self._check_full_state_of_nested_model(_OSDCommMethod.BROADCAST_OBJECT_LIST, FULL, wrap_alt)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("wrap_alt", [False, True])
    def test_scatter_full_optim_state_dict_nested(self, wrap_alt: bool):
        self._check_full_state_of_nested_model(_OSDCommMethod.SCATTER_FULL_OSD, FULL_ON_RANK0, wrap_alt)

    def _check_full_state_of_nested_model(self, method, settings, wrap_alt):
        grid = {"use_multiple_param_groups": [False, True], "use_diff_optim_inputs": [False, True]}
        self.run_subtests(
            {**grid, "use_optim_input": [False, True]},
            self._test_load_optim_state,
            _ModelClass.NESTED,
            method,
            wrap_alt=wrap_alt,
        )
        self.run_subtests(
            {"use_diff_optim_inputs": [False, True]},
            self._test_load_optim_state_with_optim_state_dict,
            _ModelClass.NESTED,
            settings,
            wrap_alt=wrap_alt,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flatten_sharded_optim_state_dict_nested(self):
        method = _OSDCommMethod.FLATTEN_SHARDED_OSD
        self._test_load_optim_state(_ModelClass.NESTED, method, wrap_alt=True)
        self._test_load_optim_state_with_optim_state_dict(_ModelClass.NESTED, SHARDED, wrap_alt=True)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flatten_sharded_optim_state_dict_transformer(self):
        self._test_load_optim_state(_ModelClass.TRANSFORMER, _OSDCommMethod.FLATTEN_SHARDED_OSD)
        self._test_load_optim_state_with_optim_state_dict(_ModelClass.TRANSFORMER, SHARDED)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_use_orig_params(self):
        self.run_subtests(
            {"state_dict_settings": [FULL, FULL_ON_RANK0, FULL_ON_DEVICE, SHARDED], "wrap_alt": [True, False]},
            self._test_load_optim_state_with_optim_state_dict,
            _ModelClass.NESTED,
            fsdp_kwargs={"use_orig_params": True},
        )


class TestFSDPOptimStateResharding(LoadingCase):
    """State is saved by four ranks and loaded by two."""

    @property
    def world_size(self):
        return 4

    def _check_halving(self, model_class, method, settings, **kwargs):
        self.run_subtests(
            {"use_optim_input": [False, True]},
            self._test_load_optim_state,
            model_class,
            method,
            halve_world_size=True,
            **kwargs,
        )
        self._test_load_optim_state_with_optim_state_dict(model_class, settings, halve_world_size=True, **kwargs)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shard_full_optim_state_dict_nested_halve_world_size(self):
        everything = {"use_multiple_param_groups": True, "use_diff_optim_inputs": True, "wrap_alt": True}
        self._check_halving(_ModelClass.NESTED, _OSDCommMethod.BROADCAST_OBJECT_LIST, FULL, **everything)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_scatter_full_optim_state_dict_nested_halve_world_size(self):
        everything = {"use_multiple_param_groups": True, "use_diff_optim_inputs": True, "wrap_alt": True}
        self._check_halving(_ModelClass.NESTED, _OSDCommMethod.SCATTER_FULL_OSD, FULL_ON_RANK0, **everything)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shard_full_optim_state_dict_transformer(self):
        self._check_halving(_ModelClass.TRANSFORMER, _OSDCommMethod.BROADCAST_OBJECT_LIST, FULL)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_scatter_full_optim_state_dict_transformer(self):
        self._check_halving(_ModelClass.TRANSFORMER, _OSDCommMethod.SCATTER_FULL_OSD, FULL_ON_RANK0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_use_orig_params_halve_world_size(self):
        self.run_subtests(
            {"state_dict_settings": [FULL, FULL_ON_RANK0, FULL_ON_DEVICE], "wrap_alt": [True, False]},
            self._test_load_optim_state_with_optim_state_dict,
            _ModelClass.NESTED,
            halve_world_size=True,
            fsdp_kwargs={"use_orig_params": True},
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_training_resumes_in_a_smaller_world(self):
        self.run_subtests({"use_orig_params": [False, True]}, self._test_training_resumes_in_a_smaller_world)

    def _test_training_resumes_in_a_smaller_world(self, use_orig_params: bool):
        """A model that moves with all its state to half of the ranks trains on as if it had not moved."""
        settings = (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(offload_to_cpu=False),
        )
        fsdp_kwargs = {"use_orig_params": use_orig_params}
        model, optim, _ = self._init_nested_model(wrap=True, fsdp_kwargs=fsdp_kwargs)
        self._step_model(model, optim)
        with FSDP.state_dict_type(model, *settings):
            # It refers to the parameters outside FSDP, which training goes on to change.
            state, osd = deepcopy(model.state_dict()), FSDP.optim_state_dict(model, optim)
        # The parameters of a flat parameter share one "step". As separate parameters, each would advance it.
        osd["state"] = {name: deepcopy(param_state) for name, param_state in osd["state"].items()}
        losses = self._step_model(model, optim, seed=1)
        uninterrupted = get_full_params(model)
        group = self._half_group()
        if group is None:
            return
        resumed, resumed_optim, _ = self._init_nested_model(
            wrap=True, wrap_alt=True, group=group, fsdp_kwargs=fsdp_kwargs
        )
        resumed.load_state_dict(state)
        with FSDP.state_dict_type(resumed, *settings):
            resumed_optim.load_state_dict(FSDP.optim_state_dict_to_load(resumed, resumed_optim, osd, group=group))
        self.assertEqual(self._step_model(resumed, resumed_optim, seed=1), losses)
        self.assertEqual(get_full_params(resumed), uninterrupted)


instantiate_parametrized_tests(TestFSDPOptimState)

if __name__ == "__main__":
    run_tests()
