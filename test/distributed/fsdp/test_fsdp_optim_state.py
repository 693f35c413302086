# Owner(s): ["oncall: distributed"]
"""FSDP1 optimizer state dicts: full, sharded and flattened, also between world sizes
and wrappings; other keys, other optimizers and strategies, options, missing state.

All ranks train on the same data, so an unwrapped model on each rank is the reference.
States are compared by parameter, so that a state which went to the wrong parameter is
found.
"""

import sys
import unittest
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import _NamedOptimizer

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    TransformerWithSharedParams,
    compute_device,
    get_devtype,
    get_full_params,
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

HOST = torch.device("cpu")
STATE_DICT_TYPES = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT]
FULL = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)
FULL_ON_RANK0 = StateDictSettings(
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(),
    FullOptimStateDictConfig(rank0_only=True),
)
FULL_ON_DEVICE = StateDictSettings(
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(),
    FullOptimStateDictConfig(offload_to_cpu=False),
)
SHARDED = StateDictSettings(
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(),
    ShardedOptimStateDictConfig(),
)


class _OSDCommMethod(Enum):
    """How state saved by one model gets to the ranks of another."""

    BROADCAST_OBJECT_LIST = auto()
    SCATTER_FULL_OSD = auto()
    FLATTEN_SHARDED_OSD = auto()


class _ModelClass(Enum):
    NESTED = auto()
    TRANSFORMER = auto()


def _sharding(
    group: dist.ProcessGroup | None, fsdp_kwargs: dict[str, Any]
) -> Callable[..., FSDP]:
    def fsdp(module: nn.Module, **more: Any) -> FSDP:
        return FSDP(
            module,
            device_id=compute_device(),
            process_group=group,
            **fsdp_kwargs,
            **more,
        )

    return fsdp


class _Bias(nn.Module):
    """Adds a vector. Shapes: ``(*, dim)`` in and out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class _Block(nn.Module):
    """A weight, and two submodules with a bias each. Shapes: ``(*, in_dim)`` to ``(*,
    out_dim)``.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.bias_module0 = _Bias(out_dim)
        self.weight = nn.Parameter(torch.randn(in_dim, out_dim))
        self.bias_module1 = _Bias(out_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Without a nonlinearity in between, both biases would have the same gradient.
        hidden = torch.relu(self.bias_module0(x @ self.weight))
        return self.bias_module1(hidden)


class OptimStateNestedModel(nn.Module):
    """Five blocks, to be wrapped at several depths, and a bias; always the same
    weights. Shapes: ``(8, 5)``.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block0 = _Block(5, 3)
        self.block1 = _Block(3, 7)
        self.bias = nn.Parameter(torch.randn(5))
        self.block2 = nn.Sequential(_Block(7, 9), _Block(9, 9), _Block(9, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.block0, self.block1, self.block2):
            x = torch.relu(block(x))
        return x + self.bias

    def get_input(self, device: torch.device) -> tuple[torch.Tensor]:
        return (torch.randn(8, 5, device=device),)

    def get_loss(self, inp: Any, output: torch.Tensor) -> torch.Tensor:
        # Nonlinear, so that gradients change from step to step.
        return (output * output).mean() + output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def wrap(
        self,
        group: dist.ProcessGroup | None = None,
        ignore_modules: bool = False,
        **fsdp_kwargs: Any,
    ) -> "OptimStateNestedModel":
        """Wrap ``block1``, two blocks of ``block2``, and some of their biases
        separately. The rest stays unwrapped.

        Args:
            group: the process group; the default group if None.
            ignore_modules: have FSDP ignore one bias of the last block.
            fsdp_kwargs: for every FSDP constructor.
        """
        fsdp = _sharding(group, fsdp_kwargs)
        self.block1.bias_module0 = fsdp(self.block1.bias_module0)
        self.block1 = fsdp(self.block1)
        self.block2[1].bias_module0 = fsdp(self.block2[1].bias_module0)
        self.block2[1].bias_module1 = fsdp(self.block2[1].bias_module1)
        self.block2[1] = fsdp(self.block2[1])
        ignored = [self.block2[2].bias_module0] if ignore_modules else None
        self.block2[2] = fsdp(self.block2[2], ignored_modules=ignored)
        return self

    def wrap_alt(
        self, group: dist.ProcessGroup | None = None, **fsdp_kwargs: Any
    ) -> "OptimStateNestedModel":
        """Wrap ``block0``, and one of its biases separately; nothing that :meth:`wrap`
        wraps.
        """
        fsdp = _sharding(group, fsdp_kwargs)
        self.block0.bias_module0 = fsdp(self.block0.bias_module0)
        self.block0 = fsdp(self.block0)
        return self

    def param_groups(self) -> list[dict[str, Any]]:
        """Return two groups that are not in the order of the parameters and lack
        ``bias``.
        """
        rest = [*self.block2.parameters(), *self.block0.parameters()]
        return [
            {"params": [*self.block1.parameters()]},
            {"params": rest, "weight_decay": 0.9},
        ]


class OptimStateModel(nn.Module):
    """Four layers, always with the same weights. Shapes: ``(8, 8)`` in and out.

    Args:
        no_grad: freeze the first layer.
    """

    def __init__(self, no_grad: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).requires_grad_(
            not no_grad
        )
        self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.net3 = nn.Linear(32, 64)
        self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net4(self.net3(self.net2(self.net1(x))))

    def get_input(self) -> torch.Tensor:
        return torch.rand(8, 8, device=get_devtype())


def _gathered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter, unsharded and on the host. Collective if it is
    sharded.
    """
    whole = _gather_state_dict(dict(state))
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in whole.items()
    }


def state_by_name(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer state of each parameter of an unwrapped ``model``,
    by name.
    """
    return {
        name: optim.state[param]
        for name, param in model.named_parameters()
        if param in optim.state
    }


class FSDPOptimStateTest(FSDPTest):
    """Two ranks; methods that build a model with its optimizer, train, and compare
    optimizer states.
    """

    @property
    def world_size(self) -> int:
        return 2

    def _init_nested_model(
        self,
        wrap: bool,
        wrap_alt: bool = False,
        group: dist.ProcessGroup | None = None,
        use_multiple_param_groups: bool = False,
        use_diff_optim_inputs: bool = False,
        fsdp_kwargs: dict[str, Any] | None = None,
    ) -> tuple[OptimStateNestedModel, torch.optim.Optimizer, Any]:
        """Return the model, Adam and its input. If inputs are to differ, odd ranks list
        the parameters in reverse.
        """
        model = OptimStateNestedModel().to(compute_device())
        if wrap:
            model = (model.wrap_alt if wrap_alt else model.wrap)(
                group, **(fsdp_kwargs or {})
            )
        groups = (
            model.param_groups()
            if use_multiple_param_groups
            else [{"params": [*model.parameters()]}]
        )
        if use_diff_optim_inputs and self.rank % 2:
            for param_group in groups:
                param_group["params"].reverse()
        optim_input = groups if use_multiple_param_groups else groups[0]["params"]
        return model, torch.optim.Adam(optim_input, lr=0.01), optim_input

    def _step_model(
        self, model: nn.Module, optim: Any, num_iters: int = 2, seed: int = 0
    ) -> list[float]:
        """Train with the same batches on all ranks and return the losses."""
        torch.manual_seed(seed)
        module = getattr(model, "module", model)
        losses = []
        for _ in range(num_iters):
            optim.zero_grad()
            batch = module.get_input(compute_device())
            loss = module.get_loss(batch, model(*batch))
            module.run_backward(loss)
            optim.step()
            losses.append(loss.item())
        return losses

    def _broadcast_full_osd(
        self, full_osd: dict[str, Any], group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        shared = [full_osd]
        dist.broadcast_object_list(shared, src=0, group=group)
        return shared[0]

    def _check_same_state(
        self, fsdp_osd: Mapping[str, Any], ref_state: Mapping[Any, Any]
    ) -> None:
        """Check that both have the same parameters, at least one, each with the same
        state.
        """
        actual = {param: _gathered(state) for param, state in fsdp_osd["state"].items()}
        expected = {param: _gathered(state) for param, state in ref_state.items()}
        self.assertEqual(set(actual), set(expected))
        self.assertNotEqual(expected, {})
        for param, state in expected.items():
            self.assertEqual(actual[param], state, f"state of {param}")

    def _check_same_param_groups(
        self, fsdp_osd: Mapping[str, Any], ref_osd: Mapping[str, Any], with_params: bool
    ) -> None:
        """Check that both have the same groups in the same order, and the same members
        if ``with_params``.
        """
        left_out = set() if with_params else {"params"}
        actual, expected = (
            [
                {key: value for key, value in group.items() if key not in left_out}
                for group in osd["param_groups"]
            ]
            for osd in (fsdp_osd, ref_osd)
        )
        self.assertEqual(actual, expected)

    def _check_same_osd(
        self, osd: Mapping[str, Any], ref_osd: Mapping[str, Any]
    ) -> None:
        self._check_same_param_groups(osd, ref_osd, with_params=True)
        self._check_same_state(osd, ref_osd["state"])


class LoadingCase(FSDPOptimStateTest):
    """Saves the state of one model and loads it into another."""

    def _init_transformer_model(self, wrap: bool, group: Any = None, **kwargs: Any):
        if any(kwargs.values()):
            raise ValueError(
                f"got {kwargs}, expected none: the root's only flat parameter can be "
                "listed in only one way"
            )
        mode = FSDPInitMode.RECURSIVE if wrap else FSDPInitMode.NO_FSDP
        model = TransformerWithSharedParams.init(
            group or self.process_group,
            mode,
            DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
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
        """Return the group of the even ranks, on these ranks; ``None`` on the others.
        Collective.
        """
        even = range(0, self.world_size, 2)
        group = dist.new_group(ranks=[*even])
        return group if self.rank in even else None

    def _load_by(
        self,
        method: _OSDCommMethod,
        osd: dict[str, Any],
        model,
        optim,
        optim_input,
        use_optim_input,
        group,
    ):
        """Return ``osd`` in the form that the local optimizer of ``model`` loads."""
        source = {"optim_input": optim_input} if use_optim_input else {"optim": optim}
        if method is _OSDCommMethod.FLATTEN_SHARDED_OSD:
            return FSDP.flatten_sharded_optim_state_dict(osd, model, optim=optim)
        if method is _OSDCommMethod.SCATTER_FULL_OSD:
            own = osd if self.rank == 0 else None
            return FSDP.scatter_full_optim_state_dict(own, model, group=group, **source)
        return FSDP.shard_full_optim_state_dict(
            self._broadcast_full_osd(osd, group), model, **source
        )

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
        """State of one model, loaded by another with other ranks, wrapping or order,
        equals the other's own state.

        Both are trained with the same data. The other's own state must also survive
        saving and loading.
        """
        init = partial(
            self._init, model_class, use_multiple_param_groups=use_multiple_param_groups
        )
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
        osd2 = save(
            model2, optim2, *([optim_input2] if use_optim_input else []), group=group
        )
        for osd in (osd1, osd2):
            loaded = self._load_by(
                osd_comm_method,
                osd,
                model2,
                optim2,
                optim_input2,
                use_optim_input,
                group,
            )
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
        if state_dict_settings in (FULL, FULL_ON_RANK0) and fsdp_kwargs == {
            "use_orig_params": True
        }:
            # FSDP of torch 2.13 gathers the states of a flat parameter one after the
            # other into one buffer. If the "copy" to the host is not a copy, each
            # overwrites the previous one.
            skip_without_accelerator(
                "offloading a full state of original parameters needs a device's own "
                "memory"
            )
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
            model_class,
            group=group,
            use_diff_optim_inputs=use_diff_optim_inputs,
            **extra,
            **new_model_kwargs,
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
    def test_optim_state_dict_nested(
        self, state_dict_type: StateDictType, use_multiple_param_groups: bool
    ):
        self.run_subtests(
            {
                "rank0_only": [False, True],
                "use_diff_optim_inputs": [False, True],
                "use_optim_input": [False, True],
            },
            self._test_optim_state_dict_nested,
            state_dict_type=state_dict_type,
            use_multiple_param_groups=use_multiple_param_groups,
        )

    def _test_optim_state_dict_nested(
        self,
        state_dict_type,
        use_multiple_param_groups,
        rank0_only,
        use_diff_optim_inputs,
        use_optim_input,
    ):
        """The state of a wrapped model equals that of an unwrapped one, by name, on all
        ranks or on rank 0.
        """
        is_sharded = state_dict_type is StateDictType.SHARDED_STATE_DICT
        if is_sharded and rank0_only:
            raise unittest.SkipTest(
                "rank0_only is an option of full optimizer states only"
            )
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
            osd = FSDP.full_optim_state_dict(
                model, optim, *source, rank0_only=rank0_only
            )
        if rank0_only and self.rank:
            self.assertEqual(osd, {})
            return
        reference, ref_optim, _ = self._init_nested_model(wrap=False, **kwargs)
        self.assertEqual(losses, self._step_model(reference, ref_optim))
        self._check_same_param_groups(osd, ref_optim.state_dict(), with_params=False)
        self._check_same_state(osd, state_by_name(reference, ref_optim))
        members = [
            name
            for param_group in osd["param_groups"]
            for name in param_group["params"]
        ]
        self.assertEqual(sorted(members), sorted(osd["state"]))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_optim_state_dict_keys(self):
        """Keys are those of the model's full state dict, even with ignored modules and
        checkpoint wrappers.
        """
        model = OptimStateNestedModel().to(compute_device()).wrap(ignore_modules=True)
        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, nn.Sequential)
        )
        self.assertTrue(
            any(
                _CHECKPOINT_WRAPPED_MODULE in name
                for name, _ in model.named_parameters()
            )
        )
        optim = torch.optim.Adam(model.parameters(), lr=1e-3)
        self._step_model(model, optim)
        osd = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            self.assertEqual(set(osd["state"]), set(model.state_dict()))
        self.assertEqual(set(osd["state"]), set(OptimStateNestedModel().state_dict()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_optim_state_dict_nested_invalid(self):
        """An error names the rank whose optimizer lacks a parameter that rank
        0's has.
        """
        model = OptimStateNestedModel().to(compute_device()).wrap()
        params = [*model.parameters()]
        optim = torch.optim.Adam(params if self.rank == 0 else params[:-1], lr=1e-3)
        self._step_model(model, optim)
        with self.assertRaisesRegex(
            RuntimeError, "some ranks are missing some of those states"
        ):
            FSDP.full_optim_state_dict(model, optim)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("wrap_alt", [False, True])
    def test_shard_full_optim_state_dict_nested(self, wrap_alt: bool):
        self._check_full_state_of_nested_model(
            _OSDCommMethod.BROADCAST_OBJECT_LIST, FULL, wrap_alt
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("wrap_alt", [False, True])
    def test_scatter_full_optim_state_dict_nested(self, wrap_alt: bool):
        self._check_full_state_of_nested_model(
            _OSDCommMethod.SCATTER_FULL_OSD, FULL_ON_RANK0, wrap_alt
        )

    def _check_full_state_of_nested_model(self, method, settings, wrap_alt):
        grid = {
            "use_multiple_param_groups": [False, True],
            "use_diff_optim_inputs": [False, True],
        }
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
        self._test_load_optim_state_with_optim_state_dict(
            _ModelClass.NESTED, SHARDED, wrap_alt=True
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_flatten_sharded_optim_state_dict_transformer(self):
        self._test_load_optim_state(
            _ModelClass.TRANSFORMER, _OSDCommMethod.FLATTEN_SHARDED_OSD
        )
        self._test_load_optim_state_with_optim_state_dict(
            _ModelClass.TRANSFORMER, SHARDED
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_use_orig_params(self):
        self.run_subtests(
            {
                "state_dict_settings": [FULL, FULL_ON_RANK0, FULL_ON_DEVICE, SHARDED],
                "wrap_alt": [True, False],
            },
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
        self._test_load_optim_state_with_optim_state_dict(
            model_class, settings, halve_world_size=True, **kwargs
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shard_full_optim_state_dict_nested_halve_world_size(self):
        everything = {
            "use_multiple_param_groups": True,
            "use_diff_optim_inputs": True,
            "wrap_alt": True,
        }
        self._check_halving(
            _ModelClass.NESTED, _OSDCommMethod.BROADCAST_OBJECT_LIST, FULL, **everything
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_scatter_full_optim_state_dict_nested_halve_world_size(self):
        everything = {
            "use_multiple_param_groups": True,
            "use_diff_optim_inputs": True,
            "wrap_alt": True,
        }
        self._check_halving(
            _ModelClass.NESTED,
            _OSDCommMethod.SCATTER_FULL_OSD,
            FULL_ON_RANK0,
            **everything,
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shard_full_optim_state_dict_transformer(self):
        self._check_halving(
            _ModelClass.TRANSFORMER, _OSDCommMethod.BROADCAST_OBJECT_LIST, FULL
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_scatter_full_optim_state_dict_transformer(self):
        self._check_halving(
            _ModelClass.TRANSFORMER, _OSDCommMethod.SCATTER_FULL_OSD, FULL_ON_RANK0
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_use_orig_params_halve_world_size(self):
        self.run_subtests(
            {
                "state_dict_settings": [FULL, FULL_ON_RANK0, FULL_ON_DEVICE],
                "wrap_alt": [True, False],
            },
            self._test_load_optim_state_with_optim_state_dict,
            _ModelClass.NESTED,
            halve_world_size=True,
            fsdp_kwargs={"use_orig_params": True},
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_training_resumes_in_a_smaller_world(self):
        self.run_subtests(
            {"use_orig_params": [False, True]},
            self._test_training_resumes_in_a_smaller_world,
        )

    def _test_training_resumes_in_a_smaller_world(self, use_orig_params: bool):
        """A model that moves with all its state to half of the ranks trains on as if it
        had not moved.
        """
        settings = (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(offload_to_cpu=False),
        )
        fsdp_kwargs = {"use_orig_params": use_orig_params}
        model, optim, _ = self._init_nested_model(wrap=True, fsdp_kwargs=fsdp_kwargs)
        self._step_model(model, optim)
        with FSDP.state_dict_type(model, *settings):
            # Copy the state: it refers to the parameters outside FSDP, which training
            # goes on to change.
            state, osd = (
                deepcopy(model.state_dict()),
                FSDP.optim_state_dict(model, optim),
            )
        # The parameters of a flat parameter share one "step". As separate parameters,
        # each would advance it.
        osd["state"] = {
            name: deepcopy(param_state) for name, param_state in osd["state"].items()
        }
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
            resumed_optim.load_state_dict(
                FSDP.optim_state_dict_to_load(resumed, resumed_optim, osd, group=group)
            )
        self.assertEqual(self._step_model(resumed, resumed_optim, seed=1), losses)
        self.assertEqual(get_full_params(resumed), uninterrupted)


def _save(
    model: nn.Module,
    optim: Any,
    state_dict_type: StateDictType,
    optim_input: Any = None,
) -> dict[str, Any]:
    """Return the optimizer state on all ranks."""
    if state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return FSDP.sharded_optim_state_dict(model, optim)
    return FSDP.full_optim_state_dict(model, optim, optim_input, rank0_only=False)


def _load(
    osd: dict[str, Any], model: nn.Module, state_dict_type: StateDictType, **source: Any
) -> dict[str, Any]:
    """Return ``osd`` in the form that the local optimizer loads."""
    if state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return FSDP.flatten_sharded_optim_state_dict(osd, model, **source)
    return FSDP.shard_full_optim_state_dict(osd, model, **source)


def _leave_out_sharded_with_optim_input(
    state_dict_type: StateDictType, use_optim_input: bool
) -> None:
    if use_optim_input and state_dict_type is StateDictType.SHARDED_STATE_DICT:
        raise unittest.SkipTest("sharded optimizer states take no optim_input")


def _step(model: nn.Module, optim: Any) -> None:
    model(model.get_input()).sum().backward()
    optim.step()
    optim.zero_grad()


class Towers(nn.Module):
    """Each rank has its own tower outside FSDP; their sum is the input of one within
    FSDP, as in model parallelism.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = FSDP(
            OptimStateModel(), device_id=compute_device(), use_orig_params=True
        )
        self.add_module(
            self._own,
            nn.Sequential(nn.Linear(8, 8, device=compute_device()), nn.ReLU()),
        )

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
    def test_rekey_optim_state_dict_to_ids(
        self, state_dict_type, use_multiple_param_groups
    ):
        self.run_subtests(
            {"use_optim_input": [False, True]},
            self._test_rekey_optim_state_dict_to_ids,
            state_dict_type=state_dict_type,
            use_multiple_param_groups=use_multiple_param_groups,
        )

    def _test_rekey_optim_state_dict_to_ids(
        self, state_dict_type, use_multiple_param_groups, use_optim_input
    ):
        """Keyed by id, the state of a wrapped model equals that of an unwrapped one."""
        _leave_out_sharded_with_optim_input(state_dict_type, use_optim_input)
        groups = {"use_multiple_param_groups": use_multiple_param_groups}
        model1, optim1, optim_input1 = self._init_nested_model(wrap=True, **groups)
        self._step_model(model1, optim1)
        osd = _save(
            model1, optim1, state_dict_type, optim_input1 if use_optim_input else None
        )
        model2, optim2, optim_input2 = self._init_nested_model(wrap=False, **groups)
        self._step_model(model2, optim2)
        source = {"optim_input": optim_input2} if use_optim_input else {"optim": optim2}
        rekeyed = FSDP.rekey_optim_state_dict(
            osd, OptimStateKeyType.PARAM_ID, model2, **source
        )
        self._check_same_osd(rekeyed, optim2.state_dict())
        if state_dict_type is StateDictType.FULL_STATE_DICT:
            optim2.load_state_dict(rekeyed)
            self._step_model(model2, optim2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_rekey_optim_state_dict_to_names(self):
        self.run_subtests(
            {"use_optim_input": [False, True]},
            self._test_rekey_optim_state_dict_to_names,
        )

    def _test_rekey_optim_state_dict_to_names(self, use_optim_input: bool):
        """Keyed by name, the state of an unwrapped model can be sharded and then equals
        the wrapped model's.
        """
        model1, optim1, optim_input1 = self._init_nested_model(wrap=True)
        model2, optim2, optim_input2 = self._init_nested_model(wrap=False)
        for model, optim in ((model1, optim1), (model2, optim2)):
            self._step_model(model, optim)
        source1, source2 = (
            {"optim_input": optim_input} if use_optim_input else {"optim": optim}
            for optim, optim_input in ((optim1, optim_input1), (optim2, optim_input2))
        )
        rekeyed = FSDP.rekey_optim_state_dict(
            optim2.state_dict(), OptimStateKeyType.PARAM_NAME, model2, **source2
        )
        self._check_same_state(rekeyed, state_by_name(model2, optim2))
        sharded = FSDP.shard_full_optim_state_dict(rekeyed, model1, **source1)
        self._check_same_osd(sharded, optim1.state_dict())
        optim1.load_state_dict(sharded)
        self._step_model(model1, optim1)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", STATE_DICT_TYPES)
    @parametrize("add_to_fsdp_module", [False, True])
    def test_shard_full_optim_state_dict_unmanaged_params(
        self, state_dict_type, add_to_fsdp_module
    ):
        self.run_subtests(
            {"use_optim_input": [False, True]},
            self._test_shard_full_optim_state_dict_unmanaged_params,
            state_dict_type=state_dict_type,
            add_to_fsdp_module=add_to_fsdp_module,
        )

    def _test_shard_full_optim_state_dict_unmanaged_params(
        self, state_dict_type, add_to_fsdp_module, use_optim_input
    ):
        """A parameter without saved state is an error in a flat parameter; elsewhere
        the caller must add it.
        """
        _leave_out_sharded_with_optim_input(state_dict_type, use_optim_input)
        model, optim, optim_input = self._init_nested_model(wrap=True)
        self._step_model(model, optim, num_iters=1)
        osd = _save(
            model, optim, state_dict_type, optim_input if use_optim_input else None
        )
        model = OptimStateNestedModel().to(compute_device())
        extra = nn.Parameter(torch.randn(5, 5, device=compute_device()))
        (model.block2[2] if add_to_fsdp_module else model).register_parameter(
            "extra", extra
        )
        params = [*model.wrap().parameters()]
        optim = torch.optim.Adam(params, lr=1e-3)
        source = {"optim_input": params} if use_optim_input else {"optim": optim}
        if add_to_fsdp_module:
            with self.assertRaisesRegex(
                ValueError, "must have scalar state with the same value and dtype"
            ):
                _load(osd, model, state_dict_type, **source)
            return
        loaded = _load(osd, model, state_dict_type, **source)
        index = next(index for index, param in enumerate(params) if param is extra)
        self.assertNotIn(index, loaded["state"])
        moments = {
            name: torch.randn(5, 5, device=compute_device())
            for name in ("exp_avg", "exp_avg_sq")
        }
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
            osd = FSDP.full_optim_state_dict(
                model, optim, optim_input=optim_input, rank0_only=False
            )
        for load in (
            FSDP.shard_full_optim_state_dict,
            FSDP.scatter_full_optim_state_dict,
        ):
            with self._warns_of_optim_input():
                load(osd, model, optim_input=optim_input)
        for state, key_type in (
            (osd, OptimStateKeyType.PARAM_ID),
            (plain_optim.state_dict(), OptimStateKeyType.PARAM_NAME),
        ):
            with self._warns_of_optim_input():
                FSDP.rekey_optim_state_dict(
                    state, key_type, plain, optim_input=plain_input
                )

    def _warns_of_optim_input(self) -> AbstractContextManager[Any]:
        return self.assertWarnsRegex(
            FutureWarning, "`optim_input` argument is deprecated"
        )


class TestFSDPOptimStateInterface(FSDPOptimStateTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", STATE_DICT_TYPES)
    def test_save_load_without_0th_param_state(self, state_dict_type: StateDictType):
        """The first parameter, from which optimizers infer the type of "step", may have
        no state.
        """

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.unused, self.lin = (
                    FSDP(nn.Linear(5, 5), device_id=compute_device()),
                    FSDP(nn.Linear(5, 5), device_id=compute_device()),
                )

            def forward(self, x):
                return self.lin(x)

            def get_input(self):
                return torch.randn(2, 5, device=compute_device())

        model = FSDP(Model(), device_id=self.device)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        _step(model, optim)
        before = deepcopy(optim.state_dict())
        self.assertEqual(len(before["state"]), 1)
        loaded = _load(
            _save(model, optim, state_dict_type), model, state_dict_type, optim=optim
        )
        optim.load_state_dict(loaded)
        state = optim.state[next(iter(model.lin.parameters()))]
        self.assertEqual(dict(state), next(iter(before["state"].values())))
        _step(model, optim)
        self.assertEqual(state["step"].item(), 2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_compatible_with_trec(self):
        """An optimizer with named parameters saves and loads like one with numbered
        ones, also if ranks differ.
        """
        models = [Towers(), Towers()]
        plain = torch.optim.Adam(models[0].parameters(), lr=1e-2)
        named = _NamedOptimizer(
            models[1].named_parameters(),
            torch.optim.Adam,
            [{"params": models[1].parameters()}],
            models[1],
            lr=1e-2,
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
        to_load = FSDP.optim_state_dict_to_load(
            models[1], named, osds[1], is_named_optimizer=True
        )
        named.load_state_dict(to_load)
        self._check_same_state(
            FSDP.optim_state_dict(models[1], named), osds[0]["state"]
        )

    def _give_zero_gradients(self, model: nn.Module) -> None:
        """Take one step, which creates the state of every parameter."""
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_optim_state_without_param_groups(self):
        """State can be saved and loaded without parameter groups."""
        model = FSDP(OptimStateModel(), device_id=self.device)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        _step(model, optim)
        original = deepcopy(optim.state_dict())
        without_groups = deepcopy(original)
        groups = without_groups.pop("param_groups")
        osd = deepcopy(
            FSDP.optim_state_dict(model, optim, optim_state_dict=without_groups)
        )
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
        model = FSDP(OptimStateModel(), device_id=self.device)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        osd = FSDP.optim_state_dict(model, optim)
        self.assertEqual(osd["state"], {})
        members = [name for group in osd["param_groups"] for name in group["params"]]
        self.assertEqual(members, list(OptimStateModel().state_dict()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_interface_arguments(self):
        """``optim_state_dict``, ``load_directly``, and what each configuration returns
        on which rank and device.
        """
        model = FSDP(OptimStateModel(), device_id=self.device)
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
            (
                (*full, FullOptimStateDictConfig(offload_to_cpu=False)),
                {(torch.Tensor, own)},
            ),
            (
                (*sharded, ShardedOptimStateDictConfig(offload_to_cpu=False)),
                {(ShardedTensor, own)},
            ),
            (
                (*sharded, ShardedOptimStateDictConfig(offload_to_cpu=True)),
                {(ShardedTensor, HOST.type)},
            ),
            (
                (*full, FullOptimStateDictConfig(rank0_only=True)),
                {(torch.Tensor, HOST.type)},
            ),
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
                    kinds |= {
                        (ShardedTensor, local.tensor.device.type)
                        for local in value.local_shards()
                    }
                elif value.dim():
                    kinds.add((torch.Tensor, value.device.type))
        return kinds

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_dict_with_none_tensor_state(self):
        self.run_subtests(
            {
                "use_orig_params": [False, True],
                "optim_class": [torch.optim.Adam, torch.optim.SGD],
            },
            self._test_state_dict_with_none_tensor_state,
        )

    def _test_state_dict_with_none_tensor_state(
        self, use_orig_params: bool, optim_class: type[torch.optim.Optimizer]
    ):
        """State that is ``None`` or not a tensor is saved and loaded unchanged."""
        model = FSDP(
            OptimStateModel(), device_id=self.device, use_orig_params=use_orig_params
        )
        optim = optim_class(model.parameters(), lr=1e-2)
        _step(model, optim)
        original = deepcopy(optim.state_dict())
        if optim_class is torch.optim.SGD:
            # Without momentum the optimizer has no state.
            original["state"] = {
                index: {} for index in original["param_groups"][0]["params"]
            }
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
        model = FSDP(
            OptimStateModel(),
            device_id=self.device,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=use_orig_params,
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
        """Parameters that are frozen and unfrozen in turn have state after their first
        gradient, and keep it.
        """
        model = FSDP(
            OptimStateModel(no_grad=True), device_id=self.device, use_orig_params=True
        )
        on_device = FullOptimStateDictConfig(offload_to_cpu=False)
        FSDP.set_state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), on_device
        )
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(5):
            model.net1.requires_grad_(step % 2 == 1)
            _step(model, optim)
            original = deepcopy(optim.state_dict())
            osd = FSDP.optim_state_dict(model, optim)
            FSDP.optim_state_dict_to_load(model, optim, osd, load_directly=True)
            self._check_same_state(optim.state_dict(), original["state"])
            self.assertEqual("net1.0.weight" in osd["state"], step > 0)


instantiate_parametrized_tests(TestFSDPOptimState)
instantiate_parametrized_tests(TestFSDPOptimStateKeys)
instantiate_parametrized_tests(TestFSDPOptimStateInterface)

if __name__ == "__main__":
    run_tests()
