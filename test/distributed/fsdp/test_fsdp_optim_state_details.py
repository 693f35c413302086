# Owner(s): ["oncall: distributed"]
"""Optimizer states of FSDP1, besides the round trips of ``test_fsdp_optim_state``:
states and arguments that are refused, and states of no parameter.
"""

import copy
import itertools
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    skip_known_defect,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

State = dict[str, Any]


def _all_but_one(state: State, name: str, values: tuple[Any, Any]) -> None:
    for number, own in enumerate(state.values()):
        own[name] = values[number == 2]


# Change of a full state of Adam for the six parameters of a Chain -> the error.
REFUSED: dict[str, tuple[Callable[[State], Any], str]] = {
    "another name": (
        lambda state: state["a.weight"].pop("exp_avg"),
        "Differing optimizer state names for the unflattened parameters: .'a.weight'",
    ),
    "a number among tensors": (
        lambda state: state["a.bias"].update(exp_avg=3.0),
        "Differing optimizer state types for state exp_avg",
    ),
    "a scalar tensor among tensors": (
        lambda state: state["a.bias"].update(exp_avg=torch.zeros(())),
        "Differing optimizer state types for state exp_avg",
    ),
    "another type of elements": (
        lambda state: state["b.bias"].update(exp_avg=torch.zeros(3).double()),
        "same dtype but got dtypes .*float64.* for state exp_avg",
    ),
    "another shape": (
        lambda state: state["b.weight"].update(exp_avg=torch.zeros(4, 3)),
        r"does not have same shape as its parameter: .*\[4, 3\]\) .*\[3, 4\]",
    ),
    "another step": (
        lambda state: state["c.bias"].update(step=torch.tensor(7.0)),
        "scalar state with the same value and dtype but got .*7.0.* for state step",
    ),
    "another type of step": (
        lambda state: state["c.bias"].update(step=torch.tensor(1.0).double()),
        "scalar state with the same value and dtype but .*float64.* for state step",
    ),
    "no step": (
        lambda state: state["c.bias"].update(step=None),
        "scalar state with the same value and dtype but got values .*None",
    ),
    "another number": (
        lambda state: _all_but_one(state, "step", (1, 2)),
        "scalar state with the same value .* got values {1, 2} for state step",
    ),
    "no number": (
        lambda state: _all_but_one(state, "step", (1, None)),
        "scalar state with the same value .* got values .*None.* for state step",
    ),
}


class TestFSDPOptimStateDetails(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _trained(
        self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any
    ) -> tuple[FSDP, torch.optim.Optimizer]:
        model = FSDP(Chain(device=self.device), device_id=self.device, **options)
        more = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        optim = optimizer(model.parameters(), lr=0.1, **more)
        rows = Chain.rows(self.device, self.world_size, self.rank)
        model(rows).square().sum().backward()
        optim.step()
        return model, optim

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_states_that_do_not_fit_one_flat_parameter(self):
        model, optim = self._trained()
        saved = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        for name, (change, says) in REFUSED.items():
            changed = copy.deepcopy(saved)
            change(changed["state"])
            with self.assertRaisesRegex(ValueError, says, msg=name):
                FSDP.optim_state_dict_to_load(model, optim, changed)
        with self.assertRaisesRegex(ValueError, 'must have the keys "state"'):
            FSDP.optim_state_dict_to_load(model, optim, {"param_groups": []})
        numbers = copy.deepcopy(saved)
        for own in numbers["state"].values():
            own["step"] = 5
        loaded = FSDP.optim_state_dict_to_load(model, optim, numbers)
        self.assertEqual([each["step"] for each in loaded["state"].values()], [5])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_missing_states_are_zeros(self):
        """A parameter without a state has zeros in its part of the flat one; a state
        that no parameter has is None.
        """
        model, optim = self._trained(torch.optim.SGD)
        saved = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        expected = copy.deepcopy(saved)
        del saved["state"]["b.weight"]
        expected["state"]["b.weight"]["momentum_buffer"].zero_()
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, saved))
        found = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        self.assertEqual(found, expected)
        for own in saved["state"].values():
            own["momentum_buffer"] = None
        loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
        self.assertEqual(loaded["state"], {0: {"momentum_buffer": None}})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_refused_arguments(self):
        model, optim = self._trained()
        (flat,) = model.parameters()
        for optim_input, error, says in (
            (3, TypeError, "should be an iterable of Tensors or dicts, but got 3"),
            ([], ValueError, "should not be empty"),
            ([flat, {"params": []}], TypeError, "should be an iterable of Tensors or"),
            ([{"lr": 1.0}], AssertionError, 'should map "params" to a list'),
        ):
            with self.assertRaisesRegex(error, says):
                FSDP.full_optim_state_dict(model, optim, optim_input)
        saved = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        names, ids = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
        self.assertIs(FSDP.rekey_optim_state_dict(saved, names, model), saved)
        mixed = {"state": {"a": {}, 3: {}}, "param_groups": []}
        for kind in (names, ids):
            with self.assertRaisesRegex(ValueError, "Invalid parameter keys.*'a', 3"):
                FSDP.rekey_optim_state_dict(mixed, kind, model, optim=optim)
        with self.assertRaisesRegex(AssertionError, "PARAM_NAME or PARAM_ID, got"):
            FSDP.rekey_optim_state_dict(saved, "names", model, optim=optim)
        numbered = optim.state_dict()
        self.assertIs(
            FSDP.rekey_optim_state_dict(numbered, ids, model, optim=optim), numbered
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_optimizer_of_some_parameters(self):
        """An optimizer that lacks a trained parameter of a wrapper is refused, by the
        name of the parameter; one that lacks a frozen parameter is not.
        """
        model, _ = self._trained(use_orig_params=True)
        some = [each for name, each in model.named_parameters() if "b.bias" not in name]
        optim = torch.optim.SGD(some, lr=0.1, momentum=0.9)
        rows = Chain.rows(self.device, self.world_size, self.rank)
        model(rows).sum().backward()
        optim.step()
        with self.assertRaisesRegex(
            RuntimeError, r"b.bias is not in the optimizer state.*\['a.bias', 'a.wei"
        ):
            FSDP.optim_state_dict(model, optim)
        model.module.b.bias.requires_grad_(False)
        found = FSDP.optim_state_dict(model, optim)["state"]
        expected = {f"{layer}.{kind}" for layer in "abc" for kind in ("weight", "bias")}
        self.assertEqual({*found}, expected - {"b.bias"})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_of_no_parameter(self):
        """A state under a name that no parameter has is saved and loaded as it is; the
        saving warns.
        """
        for use_orig_params in (False, True):
            model, optim = self._trained(use_orig_params=use_orig_params)
            own = {"seed": torch.tensor([1, 2]), "count": 3}
            state = optim.state_dict()
            state["state"]["sampler"] = own
            with self.assertWarnsRegex(
                UserWarning, "Found a optim state, sampler, that"
            ):
                saved = FSDP.optim_state_dict(model, optim, state)
            self.assertEqual(saved["state"]["sampler"], own)
            loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
            self.assertEqual(loaded["state"]["sampler"], own)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_scalar_of_no_parameter_from_rank_0(self):
        """It reaches all ranks with the states that rank 0 has loaded. A tensor with
        dimensions does not, through torch 2.13: rank 0 alone broadcasts it.
        """
        model, optim = self._trained(use_orig_params=True)
        FSDP.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True),
            FullOptimStateDictConfig(rank0_only=True),
        )
        saved = FSDP.optim_state_dict(model, optim)
        seed = torch.tensor(12)
        if self.rank == 0:
            saved["state"]["seed"] = seed
        loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
        self.assertEqual(loaded["state"]["seed"].cpu(), seed)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_states_of_any_trained_parameters(self):
        """Whichever of the original parameters are frozen, and so leave gaps in the
        gathered states, those of the rest are as in unsharded training.
        """
        skip_known_defect("optimizer_state_on_the_host")
        torch.manual_seed(0)
        wide = torch.nn.Linear(3, 9).to(self.device)  # its weight is not in one shard
        cases = [(wide, (0,)), (wide, (1,))]
        for number in (1, 2, 5):
            chain = Chain(device=self.device)
            cases += [
                (chain, each) for each in itertools.combinations(range(6), number)
            ]
        for module, frozen in cases:
            plain, sharded = copy.deepcopy(module), copy.deepcopy(module)
            for each in (plain, sharded):
                parameters = [*each.parameters()]
                for index in frozen:
                    parameters[index].requires_grad_(False)
            model = FSDP(sharded, device_id=self.device, use_orig_params=True)
            optims = []
            for each, rank in ((plain, None), (model, self.rank)):
                optims.append(torch.optim.Adam(each.parameters(), lr=0.1))
                each(Chain.rows(self.device, 2, rank)).square().mean().backward()
                optims[-1].step()
            self.assertEqual(
                FSDP.optim_state_dict(model, optims[1])["state"],
                {
                    name: optims[0].state[each]
                    for name, each in plain.named_parameters()
                    if each.requires_grad
                },
                f"{frozen=}",
                exact_device=False,
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_states_that_differ_among_ranks(self):
        """FSDP refuses such a state of one parameter on all ranks, and shows what
        differs.
        """
        skip_known_defect("optimizer_state_on_the_host")
        double, single = torch.float64, torch.float32
        for change, says in (
            (
                lambda own: own.update(step=own["step"] + self.rank),
                r"Rank 1 has different values for step: 2\.0\. Other ranks: 1\.0",
            ),
            (
                lambda own: own.update(count=self.rank + 4),
                "Rank 1 has different values for count: 5. Other ranks: 4",
            ),
            (
                lambda own: own.update(
                    exp_avg=own["exp_avg"].to(double if self.rank else single)
                ),
                f"got {single} != {double}",
            ),
            (
                lambda own: self.rank and own.pop("exp_avg"),
                r"empty_ranks to be empty or equal.*\{1\} vs set",
            ),
        ):
            model, optim = self._trained(use_orig_params=True)
            change(optim.state[model.module.b.weight])  # each rank has a part
            with self.assertRaisesRegex(AssertionError, says):
                FSDP.optim_state_dict(model, optim)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_states_that_a_rank_lacks(self):
        """All ranks refuse to save, and name the rank and the parameters."""
        names = [("a.weight", "a.bias", "c.weight", "c.bias"), ("b.weight", "b.bias")]
        for lacks in ([0], [1], [0, 1]):
            chain = Chain(device=self.device)
            chain.b = FSDP(chain.b, device_id=self.device)
            model = FSDP(chain, device_id=self.device)
            optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(Chain.rows(self.device, 2, self.rank)).sum().backward()
            optim.step()
            flat = model._flat_param, chain.b._flat_param
            for index in lacks if self.rank else ():
                del optim.state[flat[index]]
            text = (
                "least the optimizer states needed by rank 0's optimizer but some "
                "ranks are missing some of those states\nRank 1 is missing states for "
                f"the parameters: {[names[index] for index in lacks]}"
            )
            with self.assertRaisesRegex(RuntimeError, re.escape(text) + "$"):
                FSDP.optim_state_dict(model, optim)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_empty_states(self):
        """An empty state of a flat parameter is refused. For an original parameter of
        a named optimizer, the optimizer's own state stays; without one there is a
        warning.
        """
        model, optim = self._trained(torch.optim.SGD)
        saved = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        for name in saved["state"]:
            saved["state"][name] = {}
        with self.assertRaisesRegex(RuntimeError, "The state of .*a.weight.* is empty"):
            FSDP.optim_state_dict_to_load(model, optim, copy.deepcopy(saved))
        model, optim = self._trained(torch.optim.SGD, use_orig_params=True)
        new = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for each, has_states in ((optim, True), (new, False)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loaded = FSDP.optim_state_dict_to_load(
                    model, each, copy.deepcopy(saved), is_named_optimizer=True
                )
            own = {
                name: each.state[one]
                for name, one in model.named_parameters()
                if one in each.state
            }
            self.assertEqual(loaded["state"], own, f"{has_states=}")
            self.assertEqual(has_states, bool(own))
            texts = [str(one.message) for one in caught]
            texts = [text for text in texts if "is not on rank" in text]
            self.assertEqual(len(texts), 6 - len(own), "warnings, one a parameter")
            for text in texts:
                self.assertRegex(
                    text, rf"optim_state\[.*\] is not on rank{self.rank}\."
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_wrappers_of_flat_and_original_parameters(self):
        inner = FSDP(torch.nn.Linear(2, 2), device_id=self.device, use_orig_params=True)
        model = FSDP(
            torch.nn.Sequential(inner, torch.nn.Linear(2, 2)), device_id=self.device
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for call in (
            lambda: FSDP.optim_state_dict(model, optim),
            lambda: FSDP.optim_state_dict_to_load(model, optim, {"state": {}}),
        ):
            with self.assertRaisesRegex(
                AssertionError, "Not all FSDP modules have the same _use_orig_params"
            ):
                call()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_older_functions_name_their_successors(self):
        """Their warnings, and those of ``optim_input``, point to the caller."""
        model, optim = self._trained()
        whole = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        shards = FSDP.sharded_optim_state_dict(model, optim)
        given = [*model.parameters()]
        save, load = "``FullyShardedDataParallel.optim_state_dict``", "_to_load``"
        for old, successor, call in (
            ("full_", save, lambda: FSDP.full_optim_state_dict(model, optim)),
            ("sharded_", save, lambda: FSDP.sharded_optim_state_dict(model, optim)),
            (
                "shard_full_",
                load,
                lambda: FSDP.shard_full_optim_state_dict(whole, model, optim=optim),
            ),
            (
                "flatten_sharded_",
                load,
                lambda: FSDP.flatten_sharded_optim_state_dict(shards, model, optim),
            ),
            (
                "scatter_full_",
                load,
                lambda: FSDP.scatter_full_optim_state_dict(
                    whole if self.rank == 0 else None, model, optim=optim
                ),
            ),
            ("", "", lambda: FSDP.full_optim_state_dict(model, optim, given)),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            own = [
                each
                for each in caught
                if each.category is FutureWarning and "optim" in str(each.message)
            ]
            text, where = str(own[0].message), f"warning of {old}optim_state_dict"
            if old:
                self.assertEqual(len(own), 1, where)
                self.assertIn(f"Parallel.{old}optim_state_dict``is being depr", text)
                self.assertIn(successor, text.partition("replaced by")[2], where)
            else:
                own = [
                    each for each in own if "`optim_input` argum" in str(each.message)
                ]
                self.assertEqual(len(own), 1, where)
            self.assertEqual(own[0].filename, __file__, where)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_local_states_and_meshes(self):
        model, optim = self._trained(device_mesh=world_mesh(2))
        local = StateDictType.LOCAL_STATE_DICT
        with self.assertRaisesRegex(
            RuntimeError, "not compatible with LOCAL_STATE_DICT"
        ):
            with FSDP.state_dict_type(model, local):
                FSDP.optim_state_dict(model, optim)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_states_stay_on_the_device_if_asked(self):
        """On one rank or all, for flat and original parameters, sharded or not."""
        skip_known_defect("optimizer_state_on_the_host")
        for use_orig_params in (False, True):
            for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
                model, optim = self._trained(
                    use_orig_params=use_orig_params, sharding_strategy=strategy
                )
                whole = FSDP.optim_state_dict(model, optim)["state"]
                for rank0_only in (False, True):
                    FSDP.set_state_dict_type(
                        model,
                        StateDictType.FULL_STATE_DICT,
                        FullStateDictConfig(),
                        FullOptimStateDictConfig(
                            offload_to_cpu=False, rank0_only=rank0_only
                        ),
                    )
                    found = FSDP.optim_state_dict(model, optim)
                    where = f"{use_orig_params=}, {strategy=}, {rank0_only=}"
                    if rank0_only and self.rank:
                        self.assertEqual(found, {}, where)
                        continue
                    devices = {
                        each["exp_avg"].device for each in found["state"].values()
                    }
                    self.assertEqual(devices, {self.device}, where)
                    moved = {
                        name: {key: value.cpu() for key, value in each.items()}
                        for name, each in found["state"].items()
                    }
                    self.assertEqual(moved, whole, where, exact_device=False)


if __name__ == "__main__":
    run_tests()
