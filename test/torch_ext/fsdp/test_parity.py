"""The parity checks accept equal models and fail on each kind of difference."""

import copy
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.two_tensor import TwoTensor

from torch_ext.testing._internal.common_fsdp import (
    MLP,
    DEVICEInitMode,
    DummyDDP,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    NonUniformReqGradNWM,
    check_sharded_parity,
    get_devtype,
    reduce_scatter_with_assert,
)


class TwoTensorLayer(nn.Module):
    """One weight, of a subclass with two inner tensors."""

    def __init__(self, data):
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(data.clone(), data.clone()))


# Changes of a replicated and a sharded model, and the expected message. Comparing only as many parameters or gradients
# as the shorter list has would miss the missing ones.
DIFFERENCES = [
    (r"out_proj\.weight", lambda whole, parts: parts.out_proj.weight.to_local()[0, 0].add_(1)),
    (r"in_proj\.bias\.grad", lambda whole, parts: parts.in_proj.bias.grad.to_local().mul_(2)),
    ("other_proj", lambda whole, parts: parts.add_module("other_proj", parts._modules.pop("out_proj"))),
    ("", lambda whole, parts: setattr(parts.out_proj, "bias", None)),
    ("", lambda whole, parts: setattr(whole.out_proj, "bias", None)),
    ("only the replicated parameter has a gradient", lambda whole, parts: setattr(parts.in_proj.weight, "grad", None)),
    ("only the sharded parameter has a gradient", lambda whole, parts: setattr(whole.in_proj.weight, "grad", None)),
    ("out_proj.bias", lambda whole, parts: setattr(parts.out_proj, "bias", nn.Parameter(whole.out_proj.bias.clone()))),
    ("", lambda whole, parts: setattr(whole.out_proj, "bias", nn.Parameter(torch.zeros(7, device=get_devtype())))),
]


class TestShardedParity(FSDPTest):
    world_size = 2

    def _pair(self):
        """Return a replicated and a sharded model with equal parameters and gradients."""
        torch.manual_seed(0)
        replicated = MLP(5).to(get_devtype())
        sharded = copy.deepcopy(replicated)
        for module in (sharded.in_proj, sharded.out_proj, sharded):
            fully_shard(module)
        torch.manual_seed(1)
        x = torch.randn(3, 5, device=get_devtype())
        for model in (replicated, sharded):
            model(x).square().sum().backward()
        return replicated, sharded

    def _check(self, replicated, sharded, **kwargs):
        check_sharded_parity(self, replicated, sharded, **kwargs)

    def _check_fails(self, replicated, sharded, message=""):
        with self.assertRaisesRegex(AssertionError, message):
            self._check(replicated, sharded)

    def test_equal_models_pass_with_and_without_gradients(self):
        replicated, sharded = self._pair()
        self._check(replicated, sharded)
        for model in (replicated, sharded):
            model.zero_grad(set_to_none=True)
        self._check(replicated, sharded)

    def test_prefixes_are_ignored_on_request(self):
        replicated, sharded = self._pair()
        wrapped = nn.Sequential(nn.ModuleDict({"inner": sharded}))
        self._check_fails(replicated, wrapped, "in_proj")
        self._check(replicated, wrapped, prefixes_to_ignore=("0.", "inner."))

    def test_each_difference_fails(self):
        for message, change in DIFFERENCES:
            replicated, sharded = self._pair()
            with torch.no_grad():
                change(replicated, sharded)
            self._check_fails(replicated, sharded, message)

    def test_every_tensor_inside_a_subclass_is_compared(self):
        replicated, sharded = (TwoTensorLayer(torch.arange(12.0, device=get_devtype()).view(4, 3)) for _ in range(2))
        fully_shard(sharded)
        self._check(replicated, sharded)
        for part in (sharded.weight._local_tensor.a, sharded.weight._local_tensor.b):
            with torch.no_grad():
                part += 1
            self._check_fails(replicated, sharded, "weight: .*not close")
            with torch.no_grad():
                part -= 1
        self._check(replicated, sharded)

    def test_wrong_value_fails_on_the_rank_that_has_it(self):
        replicated, sharded = self._pair()
        if self.rank == 1:
            sharded.out_proj.bias.grad.to_local()[0] += 1
            self._check_fails(replicated, sharded, r"out_proj\.bias\.grad")
        else:
            self._check(replicated, sharded)

    def test_wrong_placement_of_a_gradient_fails(self):
        """With another placement the full gradient is still correct, but an optimizer would use wrong shards."""
        replicated, sharded = self._pair()
        weight = sharded.in_proj.weight
        for placement in (Replicate(), Shard(1)):
            weight.grad = None
            weight._local_tensor.grad = None
            relaid = _with_gradient(weight, replicated.in_proj.weight.grad, placement)
            with mock.patch.object(type(weight), "grad", relaid):
                self._check_fails(replicated, sharded, r"placements of in_proj\.weight\.grad")


def _with_gradient(parameter, whole, placement):
    """Return a property that is ``whole``, distributed with ``placement``, for ``parameter`` only."""
    own = type(parameter).grad
    mesh = parameter.device_mesh
    local = whole if placement.is_replicate() else whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    gradient = DTensor.from_local(local.contiguous(), mesh, [placement], run_check=False)
    return property(lambda self: gradient if self is parameter else own.__get__(self))


class TestDoublySharded(FSDPTest):
    world_size = 4

    def test_parameter_sharded_twice_along_one_dimension_cannot_be_compared(self):
        mesh = init_device_mesh(get_devtype().type, (2, 2))
        whole = nn.Linear(4, 8, bias=False, device=get_devtype())
        sharded = nn.Linear(4, 8, bias=False, device=get_devtype())
        local = torch.zeros(2, 4, device=get_devtype())
        sharded.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0), Shard(0)]))
        with self.assertRaisesRegex(AssertionError, "weight.*full_tensor"):
            check_sharded_parity(self, whole, sharded)


class TestReduceScatterWithAssert(FSDPTest):
    world_size = 2

    def test_output_is_seen_by_position_and_by_keyword(self):
        for keywords in (False, True):
            seen = []
            shard = torch.zeros(2, device=get_devtype())
            whole = torch.ones(4, device=get_devtype())
            call = partial(reduce_scatter_with_assert, self, self._reduce_scatter, seen.append)
            returned = call(output=shard, input=whole) if keywords else call(shard, whole)
            self.assertEqual(returned, "done")
            self.assertIs(seen[0], shard)
            self.assertEqual(shard.tolist(), [2, 2])

    def _reduce_scatter(self, output, input):
        dist.reduce_scatter(output, list(input.chunk(2)))
        return "done"

    def test_failing_assertion_or_a_missing_output_keeps_the_collective_from_running(self):
        def refuse(output):
            raise AssertionError(f"got {output.dtype}")

        with self.assertRaisesRegex(AssertionError, "got torch.float32"):
            reduce_scatter_with_assert(self, self._never, refuse, torch.zeros(1))
        with self.assertRaisesRegex(AssertionError, "without an output"):
            reduce_scatter_with_assert(self, self._never, self._never, input=torch.zeros(1))

    def _never(self, *args, **kwargs):
        raise RuntimeError("never called")


class TestFSDPParity(FSDPTest):
    world_size = 2

    def _parity(self, model_class=NestedWrappedModule, device_mode=DEVICEInitMode.DEVICE_BEFORE, **kwargs):
        self._test_fsdp_parity(model_class, FSDPInitMode.RECURSIVE, device_mode, **kwargs)

    def test_options_reach_fsdp(self):
        """Each option is an argument of FSDP's constructor; if one were dropped, FSDP would have its default."""
        built = []
        original = FSDP.__init__

        def recording_init(module, *args, **kwargs):
            built.append(kwargs)
            original(module, *args, **kwargs)

        with mock.patch.object(FSDP, "__init__", recording_init):
            self._parity(use_orig_params=True, forward_prefetch=True, limit_all_gathers=False)
        self.assertGreater(len(built), 1)
        for kwargs in built:
            self.assertEqual(
                {name: kwargs[name] for name in ("use_orig_params", "forward_prefetch", "limit_all_gathers")},
                {"use_orig_params": True, "forward_prefetch": True, "limit_all_gathers": False},
            )

    def test_frozen_parameters_train_with_a_scaler_and_models_in_pure_half_precision(self):
        self._parity(NonUniformReqGradNWM, use_orig_params=True, enable_sharded_grad_scaler=True, save_model=False)
        # One step, because after a float16 reduction rounding differs by more than the tolerance for losses.
        self._parity(use_pure_fp16=True, save_model=False, num_iters=1)

    def test_mode_without_fsdp_is_refused_and_a_constructor_that_raises_is_named(self):
        with self.assertRaisesRegex(ValueError, "NO_FSDP"):
            self._test_fsdp_parity(NestedWrappedModule, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE)
        with self.assertRaisesRegex(ValueError, r"NestedWrappedModule\.init .*no_such_option"):
            self._parity(no_such_option=1)

    # Tests of failures.

    def _parity_fails(self, message, **kwargs):
        with self.assertRaisesRegex(AssertionError, message):
            self._parity(**kwargs)

    def test_gradients_that_are_not_reduced_and_a_state_that_is_not_loaded_fail(self):
        self._parity_fails("Scalars are not close|did not match", ref_init_fn=DummyDDP, num_iters=1)
        with mock.patch.object(FSDP, "load_state_dict"):
            self._parity_fails("Scalars are not close|did not match")

    def test_last_step_counts(self):
        """The last loss is computed before the last step, so only the parameters show that step."""
        original = torch.optim.SGD.step

        def lazy_step(optimizer, *args, **kwargs):
            if any(isinstance(parameter, FlatOrShard) for parameter in optimizer.param_groups[0]["params"]):
                return None
            return original(optimizer, *args, **kwargs)

        FlatOrShard = torch.distributed.fsdp._flat_param.FlatParameter
        with mock.patch.object(torch.optim.SGD, "step", lazy_step):
            self._parity_fails("did not match", num_iters=1)

    def test_model_that_stays_busy_or_leaves_the_host_fails(self):
        with mock.patch.object(FSDP, "_assert_state", side_effect=AssertionError("busy")):
            self._parity_fails("busy")
        with self.assertRaises(AssertionError):
            self._check_on_host(nn.Linear(1, 1, device="meta"))
        self._check_on_host(nn.Linear(1, 1))


class TestTraining(FSDPTest):
    world_size = 1

    def _nested(self):
        return DDP(
            NestedWrappedModule.init(
                self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
            )
        )

    def test_steps_equal_sgd_with_momentum(self):
        model, reference = self._nested(), self._nested().module
        loss = self._train_for_several_steps(model, 3, autocast=False, lr=0.02)
        optim = torch.optim.SGD(reference.parameters(), lr=0.02, momentum=0.9)
        for _ in range(3):
            optim.zero_grad()
            expected = reference(*reference.get_input(get_devtype())).sum()
            expected.backward()
            optim.step()
        self.assertEqual(loss, expected)
        self.assertFalse(loss.requires_grad)
        self.assertEqual(list(model.parameters()), list(reference.parameters()))

    def test_scaled_loss_trains_like_an_unscaled_one(self):
        model, reference = self._nested(), self._nested()
        plain = self._train_for_several_steps(reference, 2, autocast=False)
        scaled = self._train_for_several_steps(
            model,
            2,
            autocast=False,
            enable_sharded_grad_scaler=True,
            sharded_grad_scaler_kwargs={"init_scale": 4.0},
        )
        self.assertEqual(scaled, 4 * plain)
        self.assertEqual(list(model.parameters()), list(reference.parameters()))

    def test_no_step_and_a_loss_of_another_type_are_errors(self):
        with self.assertRaisesRegex(ValueError, "num_steps=0"):
            self._train_for_several_steps(self._nested(), 0, autocast=False)
        model = self._nested()
        with mock.patch.object(NestedWrappedModule, "get_loss", lambda self, input, output: output.sum().double()):
            with self.assertRaisesRegex(AssertionError, "float64"):
                self._train_for_several_steps(model, 1, autocast=False)
