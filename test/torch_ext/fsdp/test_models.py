"""The test models train, are deterministic if asked, share the right parameters, and delay at the right moments."""

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import enable_wrap
from torch.distributed.tensor import Replicate, Shard

from torch_ext.testing._internal._fsdp.device import with_compute_device
from torch_ext.testing._internal._fsdp.models import nested as nested_module
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    DummyProcessGroup,
    FSDPInitMode,
    FSDPTest,
    MixtureOfExperts,
    MLPStack,
    ModuleWithDelay,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
    SkipModel,
    TransformerWithSharedParams,
    _assert_module_states,
    get_devtype,
)

FSDP1_MODELS = [
    TransformerWithSharedParams,
    NestedWrappedModule,
    AlwaysWrapNestedWrappedModule,
    NonUniformReqGradNWM,
    MixtureOfExperts,
    NestedWrappedModuleWithDelay,
]


def values(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


class TestFSDP1Models(FSDPTest):
    world_size = 2

    def _init(self, model_class, mode=FSDPInitMode.NO_FSDP, device_mode=DEVICEInitMode.DEVICE_BEFORE, **kwargs):
        return model_class.init(self.process_group, mode, device_mode, **kwargs)

    def _step(self, model, test_model, lr=0.05):
        optim = torch.optim.SGD(model.parameters(), lr=lr)
        inputs = test_model.get_input(get_devtype())
        loss = test_model.get_loss(inputs, model(*inputs))
        test_model.run_backward(loss)
        optim.step()
        optim.zero_grad()
        return loss.detach()

    def test_deterministic_means_equal_constructions(self):
        self.run_subtests(
            {"model_class": FSDP1_MODELS, "deterministic": [True, False]},
            self._test_constructions,
        )

    def _test_constructions(self, model_class, deterministic):
        torch.manual_seed(100 + self.rank)
        first = values(self._init(model_class, deterministic=deterministic))
        second_model = self._init(model_class, deterministic=deterministic)
        (self.assertEqual if deterministic else self.assertNotEqual)(values(second_model), first)
        if deterministic and model_class is not MixtureOfExperts:
            _assert_module_states(second_model, self.process_group, self.assertEqual)

    def test_device_mode_decides_when_the_model_moves(self):
        """Observes the moves themselves, because on the host nothing else shows them."""
        self.run_subtests(
            {"model_class": [TransformerWithSharedParams, NestedWrappedModule], "device_mode": list(DEVICEInitMode)},
            self._test_device_mode,
        )

    def _test_device_mode(self, model_class, device_mode):
        moved = []
        original = nn.Module.to

        def recording_to(module, *args, **kwargs):
            moved.append(any(isinstance(part, FSDP) for part in module.modules()))
            return original(module, *args, **kwargs)

        with mock.patch.object(nn.Module, "to", recording_to):
            self._init(model_class, FSDPInitMode.RECURSIVE, device_mode)
        if device_mode == DEVICEInitMode.DEVICE_NEVER:
            self.assertEqual(moved, [])
        else:
            self.assertEqual(set(moved), {device_mode == DEVICEInitMode.DEVICE_AFTER})

    def test_unknown_mode_is_refused_and_the_caller_keeps_its_fsdp_kwargs(self):
        for model_class in FSDP1_MODELS:
            with self.assertRaisesRegex(ValueError, "Unsupported FSDP init mode: nonrecursive"):
                self._init(model_class, "nonrecursive")
        fsdp_kwargs = {"auto_wrap_policy": None, "use_orig_params": True}
        self._init(TransformerWithSharedParams, FSDPInitMode.RECURSIVE, fsdp_kwargs=fsdp_kwargs)
        self.assertEqual(fsdp_kwargs, {"auto_wrap_policy": None, "use_orig_params": True})

    def test_transformer_wraps_its_layers_shares_one_weight_and_has_buffers(self):
        plain = self._init(TransformerWithSharedParams, deterministic=True)
        self.assertIs(plain.output_proj.weight, plain.embed_tokens.weight)
        sharded = self._init(
            TransformerWithSharedParams,
            FSDPInitMode.RECURSIVE,
            deterministic=True,
            fsdp_kwargs={"use_orig_params": True},
        )
        # Two encoder layers, two decoder layers, the root.
        self.assertEqual(len(FSDP.fsdp_modules(sharded)), 5)
        with FSDP.summon_full_params(sharded):
            self.assertIs(sharded.module.output_proj.weight, sharded.module.embed_tokens.weight)
        with_bn = self._init(TransformerWithSharedParams)
        without = self._init(TransformerWithSharedParams, add_bn=False)
        self.assertIsInstance(with_bn.bn, nn.BatchNorm1d)
        self.assertIsInstance(without.bn, nn.Identity)
        self.assertEqual(dict(without.named_buffers())["vocab_bias"], torch.ones(16, device=get_devtype()))
        self.assertEqual(without.long_buffer, torch.zeros(16, dtype=torch.long, device=get_devtype()))
        self.assertEqual(without.get_ignored_modules(), [without.transformer])
        self.assertTrue(with_bn.training)
        self.assertFalse(self._init(TransformerWithSharedParams, deterministic=True).training)

    def test_transformer_takes_two_groups_for_hybrid_sharding(self):
        own, replicas = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)]
        model = TransformerWithSharedParams.init(
            (own, replicas[self.rank]),
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
            deterministic=True,
        )
        self.assertIs(model.process_group, own)
        self.assertEqual(model.module.world_size, 2)

    def test_inputs_differ_by_rank_and_repeat(self):
        model = self._init(NestedWrappedModule)
        (first,), (again,) = model.get_input(get_devtype()), model.get_input(get_devtype())
        self.assertEqual(again, first)
        gathered = [torch.empty_like(first) for _ in range(2)]
        dist.all_gather(gathered, first)
        self.assertNotEqual(gathered[0], gathered[1])

    def test_always_wrap_wraps_every_module(self):
        model = self._init(AlwaysWrapNestedWrappedModule, FSDPInitMode.RECURSIVE)
        unwrapped = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not name.endswith("_fsdp_wrapped_module")
        ]
        self.assertIsInstance(model, FSDP)
        self.assertEqual(unwrapped, [])
        nested = self._init(NestedWrappedModule, FSDPInitMode.RECURSIVE)
        self.assertNotIsInstance(nested, FSDP)
        self.assertEqual(len(FSDP.fsdp_modules(nested)), 3)

    def test_nonuniform_model_trains_its_last_layer_alone(self):
        for mode in FSDPInitMode:
            model = self._init(NonUniformReqGradNWM, mode, fsdp_kwargs={"use_orig_params": True})
            trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            self.assertEqual(len(trainable), 2)
            for name, kind in zip(trainable, ("weight", "bias"), strict=True):
                self.assertRegex(name, rf"^module\.2\.(_fsdp_wrapped_module\.)?1\.{kind}$")

    def test_experts_differ_by_rank_and_all_else_is_equal(self):
        for mode in FSDPInitMode:
            model = self._init(MixtureOfExperts, mode, deterministic=True)
            self._check_experts(model)
            self._step(model, model)
            self._check_experts(model)
        self.assertEqual(model.module[2].process_group.size(), 1)
        self.assertEqual(model.module[1].process_group.size(), 2)
        self.assertTrue(
            all(hasattr(parameter, "expert") for parameter in self._init(MixtureOfExperts).module[2].parameters())
        )

    def _check_experts(self, model):
        with FSDP.summon_full_params(model):
            expert = values(model.module[2])
            shared = [values(model.module[index]) for index in ((0, 1, 3) if not model.wrap_fsdp else (1,))]
        self.assertEqual(sum(tensor.numel() for tensor in expert), model.num_expert_params)
        gathered = [None, None]
        dist.all_gather_object(gathered, (expert, shared))
        (expert_0, shared_0), (expert_1, shared_1) = gathered
        self.assertNotEqual(expert_0, expert_1)
        self.assertEqual(shared_0, shared_1)

    def test_delays_come_after_the_loss_and_before_each_reduction(self):
        events, reduce_scatter = [], dist.reduce_scatter_single

        def recording_reduce_scatter(*args, **kwargs):
            events.append("reduce")
            return reduce_scatter(*args, **kwargs)

        model = NestedWrappedModuleWithDelay.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            delay_after_loss_ms=7,
            delay_before_reduction_ms=5,
        )
        with (
            mock.patch.object(dist, "reduce_scatter_single", recording_reduce_scatter),
            mock.patch.object(nested_module, "delay", events.append),
        ):
            inputs = model.get_input(get_devtype())
            output = model(*inputs)
            self.assertEqual(events, [])
            loss = model.get_loss(inputs, output)
            self.assertEqual(events, [7])
            model.run_backward(loss)
            # The model's patch is undone before the test's.
            self.assertIs(dist.reduce_scatter_single, recording_reduce_scatter)
        # Three FSDP modules, each delayed and then reduced.
        self.assertEqual(events, [7] + 3 * [5, "reduce"])
        model = ModuleWithDelay.init(
            TransformerWithSharedParams,
            self.process_group,
            FSDPInitMode.NO_FSDP,
            DEVICEInitMode.DEVICE_BEFORE,
            delay_after_loss_ms=0,
            delay_before_reduction_ms=0,
        )
        self.assertIsInstance(model.module, TransformerWithSharedParams)
        self._step(model, model)

    def test_delay_comes_before_the_expert_is_freed(self):
        events = []
        reshard = nested_module.private.runtime_utils._reshard

        def recording_reshard(*args, **kwargs):
            events.append("reshard")
            return reshard(*args, **kwargs)

        for milliseconds, expected in ((9, [9, "reshard"]), (0, ["reshard"])):
            events.clear()
            model = self._init(MixtureOfExperts, FSDPInitMode.RECURSIVE, delay_before_free_ms=milliseconds)
            with (
                mock.patch.object(nested_module.private.runtime_utils, "_reshard", recording_reshard),
                mock.patch.object(nested_module, "delay", events.append),
            ):
                model(*model.get_input(get_devtype()))
            # The shared layer and the expert.
            self.assertEqual(events, 2 * expected)

    def test_skip_model_wraps_the_documented_modules(self):
        for double_nest, expected in ((False, 1), (True, 2)):
            with enable_wrap(wrapper_cls=FSDP, **with_compute_device({})):
                model = SkipModel(double_nest)
            self.assertEqual(len(FSDP.fsdp_modules(model)), expected)
            self.assertNotIsInstance(model.linear_skip, FSDP)
            x = torch.ones(3, 10, device=get_devtype())
            model(x).sum().backward()
            self.assertIsNotNone(model.linear.weight.grad)
        self.assertEqual(FSDP.fsdp_modules(SkipModel(double_nest=True)), [])


# How tensor parallelism shards the parameters of an MLP.
LAYOUT = {"in_proj.weight": Shard(0), "out_proj.weight": Shard(1), "out_proj.bias": Replicate()}


class TestMLPStackParallelized(FSDPTest):
    world_size = 4

    def test_parallelize_shards_over_both_meshes_and_trains_like_one_process(self):
        """With sequence parallelism, which the suites do not use."""
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        # In float64, so that the order of summation matters far less than any tolerance.
        reference, model = (MLPStack(8, with_seq_parallel=True).to(get_devtype()).double() for _ in "ab")
        model.load_state_dict(reference.state_dict())
        self.assertIs(model.parallelize(mesh["tp"], mesh["dp"], False, reshard_after_forward=True), model)
        # FSDP's own dimension comes first.
        placements = [dict(model[1].named_parameters())[name].placements[1] for name in LAYOUT]
        self.assertEqual(placements, [*LAYOUT.values()])

        torch.manual_seed(1)  # one batch, the same for every rank
        x = torch.randn(2, 4, 8, device=get_devtype(), dtype=torch.double)
        expected, output = reference(x), model(x).full_tensor()
        self.assertEqual(output, expected)
        expected.square().sum().backward()
        output.square().sum().backward()
        for (name, whole), (_, part) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
            self.assertEqual(part.grad.full_tensor(), whole.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_mlp_widths_bias_and_buffer():
    mlp = MLP(6, dim_multiplier=3, bias=False, with_buffer=True)
    assert mlp.in_proj.weight.shape == (18, 6) and mlp.out_proj.weight.shape == (6, 18)
    assert mlp.in_proj.bias is None
    assert MLP(6).buffer is None and MLP(6).in_proj.weight.shape == (24, 6)
    x = torch.randn(2, 6)
    with_buffer = mlp(x)
    buffer = mlp.buffer.clone()
    mlp.buffer.zero_()
    torch.testing.assert_close(with_buffer, mlp(x) + buffer)
    mlp.reset_parameters()
    assert mlp.buffer.count_nonzero() == 6


def test_mlp_stack_is_uneven_and_has_a_norm_only_for_sequences():
    hidden = [mlp.in_proj.out_features for mlp in MLPStack(8)]
    assert hidden == [24, 32, 24]
    norm = MLPStack(8, with_seq_parallel=True)[3]
    assert isinstance(norm, nn.LayerNorm) and norm.bias is None


def test_dummy_process_group_is_done_at_once_and_leaves_tensors_alone():
    group, tensor = DummyProcessGroup(rank=2, size=5), torch.ones(2)
    work = group.allreduce([tensor])
    assert (group.rank(), group.size()) == (2, 5)
    assert work.wait(timedelta(seconds=1)) and work.is_completed() and work.get_future().wait() == 1
    assert tensor.tolist() == [1, 1]
