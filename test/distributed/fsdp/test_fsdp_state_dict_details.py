# Owner(s): ["oncall: distributed"]
"""FSDP1 state dicts, besides the round trips of ``test_fsdp_state_dict``: more
guarantees, and errors.
"""

import sys
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._unshard_param_utils import FLAT_PARAM

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    _zero_model,
    compute_device,
    get_full_params,
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


def linear() -> nn.Linear:
    return nn.Linear(10, 10, bias=False, device=compute_device())


def nested(**fsdp_kwargs: Any) -> FSDP:
    inner = FSDP(linear(), device_id=compute_device(), **fsdp_kwargs)
    return FSDP(
        nn.Sequential(inner, linear()), device_id=compute_device(), **fsdp_kwargs
    )


def save(model: FSDP, state_dict_type: StateDictType) -> dict[str, Any]:
    with FSDP.state_dict_type(model, state_dict_type):
        return model.state_dict()


def load(
    model: FSDP, state_dict_type: StateDictType, state_dict: dict[str, Any]
) -> None:
    with FSDP.state_dict_type(model, state_dict_type):
        model.load_state_dict(state_dict)


class TestFSDPStateDictDetails(FSDPTest):
    """Guarantees besides the round trips."""

    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_offload_to_cpu_of_shards(self):
        """Shards go to the host on every rank and load from there.

        The shards of a local state dict cannot be offloaded: their parameter requires
        grad, which ``ShardedTensor.cpu`` of torch 2.13 takes for a mismatch.
        """
        model, model_new = nested(), nested()
        config = ShardedStateDictConfig(offload_to_cpu=True)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
            state_dict = model.state_dict()
        devices = {
            local.tensor.device
            for state in state_dict.values()
            for local in state.local_shards()
        }
        self.assertEqual(devices, {torch.device("cpu")})
        _zero_model(model_new)
        load(model_new, StateDictType.SHARDED_STATE_DICT, state_dict)
        self.assertEqual(get_full_params(model_new), get_full_params(model))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_nested_state_dict_types(self):
        """A context sets the type of a module and of all below it, and restores the
        previous type, not a default.
        """
        full = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
        sharded = ShardedStateDictConfig(offload_to_cpu=True)
        optim = FullOptimStateDictConfig(rank0_only=True)
        model = FSDP(
            nn.Sequential(
                FSDP(nn.Linear(2, 2), device_id=self.device), nn.Linear(2, 2)
            ),
            device_id=self.device,
        )
        modules = {"the root": model, "the module below": model.module[0]}

        def settings() -> dict[str, list[object]]:
            found = {}
            for name, module in modules.items():
                now = FSDP.get_state_dict_type(module)
                found[name] = [
                    now.state_dict_type,
                    now.state_dict_config,
                    now.optim_state_dict_config,
                ]
            return found

        default = settings()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full, optim):
            expected = {
                name: [StateDictType.FULL_STATE_DICT, full, optim] for name in modules
            }
            self.assertEqual(settings(), expected, "settings in a context")
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, sharded):
                inner = [
                    StateDictType.SHARDED_STATE_DICT,
                    sharded,
                    ShardedOptimStateDictConfig(),
                ]
                inner = dict.fromkeys(modules, inner)
                self.assertEqual(settings(), inner, "settings in a context within")
                with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                    self.assertNotEqual(settings(), inner)
                self.assertEqual(
                    settings(), inner, "settings restored by the innermost context"
                )
            self.assertEqual(
                settings(), expected, "settings restored by the context within"
            )
        self.assertEqual(settings(), default, "settings restored by the context")

        with FSDP.state_dict_type(model.module[0], StateDictType.SHARDED_STATE_DICT):
            with self.assertRaisesRegex(
                AssertionError,
                "All FSDP modules must have the same state dict settings",
            ):
                FSDP.get_state_dict_type(model)
            with self.assertRaisesRegex(
                AssertionError, "All FSDP modules should have the same state_dict_type"
            ):
                FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        FSDP.set_state_dict_type(
            model.module[0], *default["the module below"]
        )  # the refused call had set the root's
        with self.assertRaisesRegex(
            RuntimeError, "Expected state_dict_config of type .*ShardedStateDictConfig"
        ):
            FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, full)
        with self.assertRaisesRegex(
            RuntimeError, "Expected optim_state_dict_config of type .*ShardedOptim"
        ):
            FSDP.set_state_dict_type(
                model, StateDictType.SHARDED_STATE_DICT, sharded, optim
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize(
        "state_dict_type",
        [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT],
    )
    def test_forward_after_load_uses_the_loaded_state(self, state_dict_type):
        self.run_subtests(
            {
                "strategy": [
                    ShardingStrategy.FULL_SHARD,
                    ShardingStrategy.SHARD_GRAD_OP,
                    ShardingStrategy.NO_SHARD,
                ],
                "use_orig_params": [True, False],
            },
            self._test_forward_after_load_uses_the_loaded_state,
            state_dict_type=state_dict_type,
        )

    def _test_forward_after_load_uses_the_loaded_state(
        self, state_dict_type, strategy, use_orig_params
    ):
        """Some strategies keep the unsharded parameter after forward; loading must
        invalidate it.
        """
        create = partial(
            nested, sharding_strategy=strategy, use_orig_params=use_orig_params
        )
        model, model_new = create(), create()
        batch = torch.rand(2, 10, device=compute_device())
        with torch.no_grad():
            self.assertNotEqual(model(batch), model_new(batch))
            load(model_new, state_dict_type, save(model, state_dict_type))
            self.assertEqual(model(batch), model_new(batch))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_dict_does_not_change_with_the_model(self):
        """A full state dict is a copy, so more training does not change it."""
        model = nested()
        state_dict = save(model, StateDictType.FULL_STATE_DICT)
        before = deepcopy(state_dict)
        model(torch.rand(1, 10, device=compute_device())).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        self.assertEqual(before, state_dict)
        self.assertNotEqual(before, save(model, StateDictType.FULL_STATE_DICT))


class TestFSDPStateDictRefusals(FSDPTest):
    """How FSDP handles the combinations that the round trips skip."""

    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("config", [LocalStateDictConfig, ShardedStateDictConfig])
    def test_rank0_only_is_no_option_of_shards(self, config):
        with self.assertRaisesRegex(TypeError, "rank0_only"):
            config(offload_to_cpu=True, rank0_only=True)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_local_state_dict_with_orig_params_does_not_load(self):
        model = FSDP(linear(), device_id=self.device, use_orig_params=True)
        state_dict = save(model, StateDictType.LOCAL_STATE_DICT)
        with self.assertRaisesRegex(
            RuntimeError, f'Unexpected key\\(s\\) in state_dict: "{FLAT_PARAM}"'
        ):
            load(model, StateDictType.LOCAL_STATE_DICT, state_dict)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_local_state_dict_of_no_shard_is_a_full_one(self):
        model = FSDP(
            linear(), device_id=self.device, sharding_strategy=ShardingStrategy.NO_SHARD
        )
        with self.assertWarnsRegex(UserWarning, "full_state_dict will be returned"):
            state_dict = save(model, StateDictType.LOCAL_STATE_DICT)
        self.assertEqual(state_dict, save(model, StateDictType.FULL_STATE_DICT))
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            before = FSDP.get_state_dict_type(model)
            model.load_state_dict(model.state_dict())
            self.assertEqual(FSDP.get_state_dict_type(model), before)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_local_state_dict_of_another_model(self):
        """No flat parameter, a plain tensor for it, or a larger shard are refused. A
        later state that fits is loaded, and a wrapper without parameters needs none.
        """

        def wrapped(rows: int) -> FSDP:
            return FSDP(nn.Linear(1, rows, bias=False), device_id=self.device)

        local, model = StateDictType.LOCAL_STATE_DICT, wrapped(9)
        cases: list[tuple[Any, type[Exception], str]] = [
            ({}, AssertionError, "No `FlatParameter` in `state_dict`"),
            (
                {FLAT_PARAM: torch.zeros(5)},
                AssertionError,
                "Tensors in local_state_dict should be ShardedTensor",
            ),
        ]
        # The model's shards have five elements, the second's last one is padding.
        if self.rank:
            size = "Local shard size = 5 and the tensor in the state_dict is "
            cases.append((save(wrapped(10), local), AssertionError, f"{size}5"))
            cases.append((save(wrapped(12), local), AssertionError, f"{size}6"))
        else:
            save(wrapped(10), local)
            size = rf"size mismatch for \S*{FLAT_PARAM}"
            cases.append((save(wrapped(12), local), RuntimeError, size))
        for state, error, says in cases:
            with self.assertRaisesRegex(error, says):
                load(model, local, dict(state))
        other = wrapped(9)
        for each in (model, wrapped(9)):
            load(each, local, save(other, local))
            self.assertEqual(get_full_params(each), get_full_params(other))
        for kind in (local, StateDictType.SHARDED_STATE_DICT):
            load(FSDP(nn.Tanh(), device_id=self.device), kind, {})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("over_a_mesh", [False, True])
    def test_shards_with_other_names(self, over_a_mesh):
        """A missing name is logged. It and unexpected ones are errors by their plain
        names, or returned, and the parameters with both names are loaded.
        """
        options: dict[str, Any] = {"device_id": self.device}
        if over_a_mesh:
            options["device_mesh"] = world_mesh(2)
        sharded = StateDictType.SHARDED_STATE_DICT
        model, other = (
            FSDP(Chain(device=self.device, seed=seed).double(), **options)
            for seed in (0, 1)
        )
        whole, before = get_full_params(model), get_full_params(other)
        state = save(model, sharded)
        state["more"] = state.pop("b.weight")
        for strict in (True, False):
            with (
                FSDP.state_dict_type(other, sharded),
                self.assertLogs(
                    "torch.distributed.fsdp._state_dict_utils", "WARNING"
                ) as logs,
            ):
                if strict:
                    with self.assertRaisesRegex(
                        RuntimeError,
                        r'Missing key.*: "b\.weight"[^$]*Unexpected key.*: "more"',
                    ):
                        other.load_state_dict(dict(state))
                else:
                    found = other.load_state_dict(dict(state), strict=False)
                    self.assertEqual([*found], [["b.weight"], ["more"]])
            (text,) = logs.output
            self.assertRegex(text, r"Did not find param with FQN \S*b\.weight, skip")
            names = [
                f"{layer}.{kind}" for layer in "abc" for kind in ("weight", "bias")
            ]
            expected = [
                old if name == "b.weight" else new
                for name, old, new in zip(names, before, whole, strict=True)
            ]
            self.assertEqual(get_full_params(other), expected, f"{strict=}")


instantiate_parametrized_tests(TestFSDPStateDictDetails)
instantiate_parametrized_tests(TestFSDPStateDictRefusals)

if __name__ == "__main__":
    run_tests()
