# Owner(s): ["oncall: distributed"]
"""FSDP1 state dicts, full, local and sharded: keys, contents, saving, loading.

Combinations that FSDP does not support are skipped: the test run counts them and gives
the reason, and ``test_fsdp_state_dict_details`` tests how FSDP refuses them.
"""

import io
import sys
import unittest
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    init_from_local_shards,
)
from torch.distributed._state_dict_utils import (
    _all_gather_sharded_tensor,
    _gather_state_dict,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import FSDP_PREFIX, clean_tensor_name
from torch.distributed.fsdp._unshard_param_utils import FLAT_PARAM
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
from torch.nn import Module, TransformerDecoderLayer, TransformerEncoderLayer
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    SkipModel,
    TransformerWithSharedParams,
    _assert_module_states,
    _broadcast_state_dict,
    _get_state_dict,
    _zero_model,
    compute_device,
    get_devtype,
    get_full_params,
    skip_parameter_offload,
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

STATE_DICT_MAPPING = {
    f"{prefix}state_dict": kind
    for prefix, kind in (
        ("", StateDictType.FULL_STATE_DICT),
        ("sharded_", StateDictType.SHARDED_STATE_DICT),
        ("local_", StateDictType.LOCAL_STATE_DICT),
    )
}
_SUPPORTED_STATE_DICT_IMPLS = list(STATE_DICT_MAPPING)
_FLATTENED_STATE_DICT_IMPLS = ["local_state_dict"]
_UNFLATTENED_STATE_DICT_IMPLS = [
    impl
    for impl in _SUPPORTED_STATE_DICT_IMPLS
    if impl not in _FLATTENED_STATE_DICT_IMPLS
]

NON_ROOT_FSDP_PREFIX = "non_fsdp_lin"
BUFFER_SHAPE = [5, 5]
INNER_SHAPE, OUTER_SHAPE = [4, 4], [4, 5]

HOST = torch.device("cpu")
HALF = MixedPrecision(
    param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16
)
SINGLE = MixedPrecision(
    param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32
)
OFFLOADS = [CPUOffload(offload_params=True), CPUOffload(offload_params=False)]
LAYER_POLICY = ModuleWrapPolicy({TransformerEncoderLayer, TransformerDecoderLayer})


def _checkpoint_linears(model: Module) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(
            checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
        ),
        check_fn=lambda module: isinstance(module, nn.Linear),
    )


def linear() -> nn.Linear:
    return nn.Linear(10, 10, bias=False, device=compute_device())


def identity(module: Module) -> Module:
    return module


class Model(Module):
    """An inner layer, applied twice, and an outer one. With ``wrap_fsdp`` the inner
    layer is wrapped.

    Shapes: ``(*, 4)`` in, ``(*, 5)`` out.
    """

    def __init__(
        self,
        wrap_fsdp,
        register_buffers=False,
        ignore_inner=False,
        mixed_precision=False,
        process_group=None,
    ):
        super().__init__()
        self.inner = nn.Linear(*INNER_SHAPE)
        self.outer = nn.Linear(*OUTER_SHAPE)
        if register_buffers:
            for layer in (self.inner, self.outer):
                layer.register_buffer("buffer", torch.randn(BUFFER_SHAPE))
                layer.register_buffer(
                    "non_persistent_buffer", torch.randn(BUFFER_SHAPE), persistent=False
                )
        if wrap_fsdp:
            self.inner = FSDP(
                self.inner,
                device_id=compute_device(),
                ignored_modules=[self.inner] if ignore_inner else [],
                mixed_precision=HALF if mixed_precision else None,
                process_group=process_group,
            )

    def forward(self, x):
        return self.outer(self.inner(x) + self.inner(x))


class TestDummyModel(Module):
    """Has a layer and a parameter that are each used under two names. Always the same
    weights.
    """

    __test__ = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.net3 = self.net2
        self.random_parameter = nn.Parameter(torch.randn(10))
        self.shared_parameter = self.random_parameter

    def forward(self, x):
        return self.net3(self.net2(self.net1(x)))

    def get_input(self):
        return torch.rand(8, 8, device=get_devtype())


class FSDPContainer(Module):
    """An unwrapped layer, then two modules that may be wrapped."""

    def __init__(self, fsdp_1: Module, fsdp_2: Module):
        super().__init__()
        self.non_fsdp_lin = linear()
        self.fsdp_1 = fsdp_1
        self.fsdp_2 = fsdp_2

    def forward(self, x):
        return self.fsdp_2(self.fsdp_1(self.non_fsdp_lin(x)))


def partly_managed_model(double_nest: bool, wrap_fsdp: bool = True) -> Module:
    """Return a ``SkipModel`` whose ``linear_skip`` is not managed by FSDP."""
    with enable_wrap(wrapper_cls=FSDP) if wrap_fsdp else nullcontext():
        model = SkipModel(double_nest=double_nest)
        skipped = model.linear_skip
        del model.linear_skip
        wrapped = wrap(model, device_id=compute_device())
        model.linear_skip = skipped
    return wrapped


def skip_offload_of_full_state() -> None:
    """Skip the running subtest where the device uses the host's memory.

    FSDP frees the unsharded storage, which the state dict still views if the "copy" to
    the host is not a copy.
    """
    skip_without_accelerator(
        "a full state dict offloaded to the host needs memory apart from the host's"
    )


def skip_unsupported_state_dict(
    state_dict_type, rank0_and_offload, use_orig_params=False, cpu_offload=None
) -> None:
    """Skip the running subtest, with the reason, if FSDP does not support the
    combination.
    """
    if rank0_and_offload and state_dict_type != "state_dict":
        raise unittest.SkipTest("rank0_only is an option of full state dicts only")
    if rank0_and_offload:
        skip_offload_of_full_state()
    if use_orig_params and state_dict_type == "local_state_dict":
        raise unittest.SkipTest(
            "a local state dict does not load with use_orig_params=True and a "
            "sharded strategy"
        )
    skip_parameter_offload(cpu_offload)


def train_on_random_batches(
    model: Module, *batch_shape: int, steps: int
) -> list[torch.Tensor]:
    """Train on random batches of ``batch_shape``, the same on all ranks, and return the
    loss of each step.
    """
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(
            torch.rand(*batch_shape, device=compute_device(), requires_grad=True)
        ).sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return losses


class TestFSDPStateDict(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _broadcast_state_dict(self, model, state_dict):
        return _broadcast_state_dict(self.rank, state_dict)

    def _state_compare(
        self,
        model,
        model_new,
        assert_fn,
        state_generator="parameters",
    ):
        base, new = (
            list(getattr(which, state_generator)()) for which in (model, model_new)
        )
        self.assertEqual(len(base), len(new))
        assert_fn(base, new)

    def _compare_models(
        self,
        model,
        model_new,
        assert_fn,
        check_fp16=False,
        check_buffers=True,
    ):
        """Compare all unsharded parameters, and all buffers if there are any."""
        self.assertIn(assert_fn, (self.assertEqual, self.assertNotEqual))
        with FSDP.summon_full_params(model), FSDP.summon_full_params(model_new):
            self._state_compare(model, model_new, assert_fn)
            has_buffers = any(
                True for which in (model, model_new) for _ in which.buffers()
            )
            if check_buffers and has_buffers:
                self._state_compare(
                    model, model_new, assert_fn, state_generator="buffers"
                )
            if check_fp16:
                self.assertEqual(
                    {param.dtype for param in model_new.parameters()}, {torch.float16}
                )

    def _get_simple_nested_model(
        self, *fsdp_args, wrap=True, checkpoint_wrap=False, **fsdp_kwargs
    ):
        if not wrap:
            return nn.Sequential(linear(), linear())
        checkpoint = checkpoint_wrapper if checkpoint_wrap else identity
        inner = FSDP(
            checkpoint(linear()), *fsdp_args, device_id=self.device, **fsdp_kwargs
        )
        return FSDP(
            checkpoint(nn.Sequential(inner, checkpoint(linear()))),
            *fsdp_args,
            device_id=self.device,
            **fsdp_kwargs,
        )

    def _get_simple_model(self, *fsdp_args, checkpoint_wrap=False, **fsdp_kwargs):
        layer = checkpoint_wrapper(linear()) if checkpoint_wrap else linear()
        return FSDP(layer, *fsdp_args, device_id=self.device, **fsdp_kwargs)

    def _get_multibuffer_nested_model(
        self, *fsdp_args, wrap=True, checkpoint_wrap=False, **fsdp_kwargs
    ):
        """Return two layers with a batch norm between them, which stays in full
        precision.
        """
        layers = [linear(), nn.BatchNorm1d(10, device=compute_device()), linear()]
        if not wrap:
            return nn.Sequential(*layers)
        precision = fsdp_kwargs.pop("mixed_precision", None)
        if checkpoint_wrap:
            layers = [checkpoint_wrapper(layer) for layer in layers]
        first = FSDP(
            layers[0],
            *fsdp_args,
            device_id=self.device,
            mixed_precision=precision,
            **fsdp_kwargs,
        )
        norm = FSDP(
            layers[1],
            *fsdp_args,
            device_id=self.device,
            mixed_precision=SINGLE if precision else None,
            **fsdp_kwargs,
        )
        sequence = nn.Sequential(first, norm, layers[2])
        return FSDP(
            checkpoint_wrapper(sequence) if checkpoint_wrap else sequence,
            *fsdp_args,
            device_id=self.device,
            **fsdp_kwargs,
        )

    def _get_non_fsdp_root_module(self, *fsdp_args, wrap=True, **fsdp_kwargs):
        nested = partial(
            self._get_simple_nested_model, *fsdp_args, wrap=wrap, **fsdp_kwargs
        )
        return FSDPContainer(nested(), nested())

    def _get_state_dict_mgr(self, model, state_dict_type, state_dict_rank0_and_offload):
        """Set the type of ``model``'s state dicts. If asked, they go to the host, and
        full ones to rank 0 only.
        """
        configs = {
            "state_dict": partial(
                FullStateDictConfig, rank0_only=state_dict_rank0_and_offload
            ),
            "local_state_dict": LocalStateDictConfig,
            "sharded_state_dict": ShardedStateDictConfig,
        }
        config = configs[state_dict_type](offload_to_cpu=state_dict_rank0_and_offload)
        return FSDP.state_dict_type(model, STATE_DICT_MAPPING[state_dict_type], config)

    def _validate_state_dict_contents(
        self,
        model,
        fsdp_state_dict,
        state_dict_rank0_and_offload,
        ignore_keys=(),
    ):
        """Check that a full state dict for rank 0 is on the host there, and has no
        entries of FSDP on other ranks.
        """
        if not state_dict_rank0_and_offload:
            self.assertNotEqual(fsdp_state_dict, {})
        elif self.rank == 0:
            managed = {
                name: state
                for name, state in fsdp_state_dict.items()
                if name not in set(ignore_keys)
            }
            self.assertNotEqual(managed, {})
            for name, state in managed.items():
                self.assertEqual(
                    state.device,
                    HOST,
                    f"{name} is on {state.device}, expected the host",
                )
        else:
            # A root that is not wrapped has its own parameters on every rank.
            self.assertEqual(
                sorted(fsdp_state_dict),
                [] if isinstance(model, FSDP) else sorted(ignore_keys),
            )

    def _initialize_model(self, wrap_fsdp, wrap_ddp=True, register_buffers=False):
        torch.manual_seed(0)
        model = Model(wrap_fsdp, register_buffers=register_buffers).to(compute_device())
        if wrap_fsdp:
            return FSDP(model, device_id=self.device)
        return DDP(model) if wrap_ddp else model

    @staticmethod
    def _state_dict(model, state_dict_type):
        with FSDP.state_dict_type(model, STATE_DICT_MAPPING[state_dict_type]):
            return model.state_dict()

    @staticmethod
    def _load_state_dict(model, state_dict_type, state_dict):
        with FSDP.state_dict_type(model, STATE_DICT_MAPPING[state_dict_type]):
            return model.load_state_dict(state_dict, strict=True)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _UNFLATTENED_STATE_DICT_IMPLS)
    @parametrize(
        "checkpoint_wrap",
        ["source", "dest", "both", "source_after_wrap", "both_after_wrap"],
    )
    def test_fsdp_state_dict_with_activation_checkpoint(
        self, state_dict_type, checkpoint_wrap
    ):
        self.run_subtests(
            {"rank0_only_and_offload": [False, True]},
            self._test_fsdp_state_dict_with_activation_checkpoint,
            state_dict_type=state_dict_type,
            checkpoint_wrap=checkpoint_wrap,
        )

    def _test_fsdp_state_dict_with_activation_checkpoint(
        self, state_dict_type, checkpoint_wrap, rank0_only_and_offload
    ):
        """Checkpoint wrappers in the source, the destination or both do not change a
        state dict.
        """
        if rank0_only_and_offload and state_dict_type == "state_dict":
            skip_offload_of_full_state()
        for model_call in (self._get_simple_model, self._get_simple_nested_model):
            model = model_call(checkpoint_wrap=checkpoint_wrap in ("source", "both"))
            if checkpoint_wrap in ("source_after_wrap", "both_after_wrap"):
                _checkpoint_linears(model)
            model_new = model_call(checkpoint_wrap=checkpoint_wrap in ("dest", "both"))
            if checkpoint_wrap == "both_after_wrap":
                _checkpoint_linears(model_new)
            with self._get_state_dict_mgr(
                model, state_dict_type, rank0_only_and_offload
            ):
                state_dict = _gather_state_dict(_get_state_dict(model, False, False))
            _zero_model(model_new)
            self._compare_models(model, model_new, self.assertNotEqual)
            if rank0_only_and_offload:
                state_dict = self._broadcast_state_dict(model, state_dict)
            model_new.load_state_dict(state_dict, strict=True)
            self._compare_models(model, model_new, self.assertEqual)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _UNFLATTENED_STATE_DICT_IMPLS)
    def test_state_dict_with_manual_ac_wrapper(self, state_dict_type: str):
        self.run_subtests(
            {"rank0_only_and_offload": [False, True]},
            self._test_state_dict_with_manual_ac_wrapper,
            state_dict_type=state_dict_type,
        )

    def _test_state_dict_with_manual_ac_wrapper(
        self, state_dict_type: str, rank0_only_and_offload: bool
    ):
        """``FSDP(CheckpointWrapper(layer))`` and ``FSDP(layer)`` have equal state dicts
        and load each other's.
        """
        skip_unsupported_state_dict(state_dict_type, rank0_only_and_offload)
        plain = TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.NO_FSDP,
            DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
        )
        models = [deepcopy(plain), deepcopy(plain)]
        for model, checkpoint in zip(
            models, (identity, checkpoint_wrapper), strict=True
        ):
            for layers in (
                model.transformer.encoder.layers,
                model.transformer.decoder.layers,
            ):
                for index, layer in enumerate(layers):
                    layers[index] = FSDP(checkpoint(layer), device_id=self.device)
            model.transformer = FSDP(model.transformer, device_id=self.device)
        state_dicts = []
        for model in models:
            with self._get_state_dict_mgr(
                model, state_dict_type, rank0_only_and_offload
            ):
                state_dicts.append(deepcopy(model.state_dict()))
            if rank0_only_and_offload:
                state_dicts[-1] = self._broadcast_state_dict(model, state_dicts[-1])
            _zero_model(model)
        self.assertEqual(list(state_dicts[0]), list(plain.state_dict()))
        self.assertEqual(list(state_dicts[0]), list(state_dicts[1]))
        # Each loads the other's, because a model may load its own state dict even if
        # its keys are wrong.
        for model, state_dict in zip(models, reversed(state_dicts), strict=True):
            self._load_state_dict(model, state_dict_type, state_dict)
            self._compare_models(model, plain, self.assertEqual)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _SUPPORTED_STATE_DICT_IMPLS)
    def test_state_dict_with_shared_parameters(self, state_dict_type):
        create = partial(
            TransformerWithSharedParams.init,
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            {"auto_wrap_policy": LAYER_POLICY},
        )
        model, model_new = create(), create()
        _zero_model(model_new, zero_buffers=True)
        self._compare_models(model, model_new, self.assertNotEqual)
        self._load_state_dict(
            model_new, state_dict_type, self._state_dict(model, state_dict_type)
        )
        self._compare_models(model, model_new, self.assertEqual)
        with FSDP.summon_full_params(model_new):
            self.assertIs(model_new.output_proj.weight, model_new.embed_tokens.weight)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    def test_state_dict_rank0_offload_save_load_flow(self, use_orig_params: bool):
        """State saved on rank 0 and loaded there before wrapping reaches other ranks by
        ``sync_module_states``.
        """
        skip_offload_of_full_state()
        init = partial(TransformerWithSharedParams.init, self.process_group)
        fsdp_kwargs = {
            "auto_wrap_policy": LAYER_POLICY,
            "use_orig_params": use_orig_params,
        }
        model = init(FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, fsdp_kwargs)
        # A load of zeros would look like no load.
        with FSDP.summon_full_params(model), torch.no_grad():
            for state in (*model.parameters(), *model.buffers()):
                if not state.count_nonzero():
                    state.add_(1)
        with self._get_state_dict_mgr(model, "state_dict", True):
            state_dict = deepcopy(_get_state_dict(model))
        self._validate_state_dict_contents(model, state_dict, True)
        restored = init(FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE)
        _zero_model(restored, zero_buffers=True)
        if self.rank == 0:
            restored.load_state_dict(state_dict, strict=True)
        _assert_module_states(
            restored, process_group=self.process_group, assert_fn=self.assertNotEqual
        )
        restored = FSDP(
            restored,
            device_id=self.device,
            auto_wrap_policy=LAYER_POLICY,
            sync_module_states=True,
        )
        with FSDP.summon_full_params(restored):
            _assert_module_states(
                restored, process_group=self.process_group, assert_fn=self.assertEqual
            )
        self._compare_models(model, restored, self.assertEqual)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _SUPPORTED_STATE_DICT_IMPLS)
    @parametrize("fp16", [True, False])
    def test_basic_save_and_load_state_dict(self, state_dict_type: str, fp16: bool):
        self.run_subtests(
            {
                "cpu_offload": OFFLOADS,
                "state_dict_rank0_and_offload": [True, False],
                "use_orig_params": [True, False],
            },
            self._test_basic_save_and_load_state_dict,
            state_dict_type=state_dict_type,
            fp16=fp16,
        )

    def _test_basic_save_and_load_state_dict(
        self,
        state_dict_type: str,
        cpu_offload: CPUOffload,
        fp16: bool,
        state_dict_rank0_and_offload: bool,
        use_orig_params: bool,
    ):
        """A state dict loads into a model that has gradients, in float32 and in
        float16.
        """
        skip_unsupported_state_dict(
            state_dict_type, state_dict_rank0_and_offload, use_orig_params, cpu_offload
        )
        for create in (
            self._get_non_fsdp_root_module,
            self._get_simple_nested_model,
            self._get_simple_model,
        ):
            model_call = partial(
                create, cpu_offload=cpu_offload, use_orig_params=use_orig_params
            )
            model = model_call()
            with self._get_state_dict_mgr(
                model, state_dict_type, state_dict_rank0_and_offload
            ):
                state_dict = _get_state_dict(model, cpu_offload.offload_params, fp16)
            unmanaged = [name for name in state_dict if NON_ROOT_FSDP_PREFIX in name]
            self._validate_state_dict_contents(
                model, state_dict, state_dict_rank0_and_offload, unmanaged
            )
            expected_dtype = torch.float16 if fp16 else torch.float32
            self.assertLessEqual(
                {state.dtype for state in state_dict.values()}, {expected_dtype}
            )

            model_new = model_call()
            model_new = model_new.half() if fp16 else model_new
            model_new(
                torch.rand(3, 10, device=compute_device(), dtype=expected_dtype)
            ).sum().backward()
            _zero_model(model_new, zero_buffers=True)
            self._compare_models(model, model_new, self.assertNotEqual)
            if state_dict_rank0_and_offload:
                state_dict = self._broadcast_state_dict(model, state_dict)
            self._load_state_dict(model_new, state_dict_type, state_dict)
            self._compare_models(model, model_new, self.assertEqual, check_fp16=fp16)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _SUPPORTED_STATE_DICT_IMPLS)
    @parametrize("mixed_precision", [True, False])
    def test_buffers_save_and_load_state_dict(
        self, state_dict_type: str, mixed_precision: bool
    ):
        self.run_subtests(
            {
                "cpu_offload": OFFLOADS,
                "state_dict_rank0_and_offload": [True, False],
                "use_orig_params": [True, False],
            },
            self._test_buffers_save_and_load_state_dict,
            state_dict_type=state_dict_type,
            mixed_precision=mixed_precision,
        )

    def _test_buffers_save_and_load_state_dict(
        self,
        state_dict_type: str,
        cpu_offload: CPUOffload,
        mixed_precision: bool,
        state_dict_rank0_and_offload: bool,
        use_orig_params: bool,
    ):
        skip_unsupported_state_dict(
            state_dict_type, state_dict_rank0_and_offload, use_orig_params, cpu_offload
        )
        fsdp_kwargs = {
            "cpu_offload": cpu_offload,
            "use_orig_params": use_orig_params,
            "mixed_precision": HALF if mixed_precision else None,
        }
        self._check_batch_norm_survives(
            state_dict_type, state_dict_rank0_and_offload, fsdp_kwargs
        )
        self._check_persistence_of_buffers(
            state_dict_type, state_dict_rank0_and_offload, fsdp_kwargs
        )

    def _check_batch_norm_survives(
        self, state_dict_type, rank0_and_offload, fsdp_kwargs
    ):
        offloads = fsdp_kwargs["cpu_offload"].offload_params
        model, model_new = (
            self._get_multibuffer_nested_model(**fsdp_kwargs) for _ in range(2)
        )
        for buffer in model.buffers():
            buffer.add_(3)
        with self._get_state_dict_mgr(model, state_dict_type, rank0_and_offload):
            state_dict = _get_state_dict(model, offloads, False)
        self._validate_state_dict_contents(model, state_dict, rank0_and_offload)
        if not offloads:
            model_new = model_new.to(compute_device())
        _zero_model(model_new, zero_buffers=True)
        self._compare_models(model, model_new, self.assertNotEqual)
        if rank0_and_offload:
            state_dict = self._broadcast_state_dict(model, state_dict)
        self._load_state_dict(model_new, state_dict_type, state_dict)
        self._compare_models(model, model_new, self.assertEqual)

    def _check_persistence_of_buffers(
        self, state_dict_type, rank0_and_offload, fsdp_kwargs
    ):
        """A persistent buffer is saved in its own type, not the one in which it is
        used. Others are not saved.
        """
        model, model_new = (
            FSDP(
                Model(wrap_fsdp=False, register_buffers=True),
                device_id=self.device,
                **fsdp_kwargs,
            )
            for _ in range(2)
        )
        original = {
            clean_tensor_name(name): buffer.clone()
            for name, buffer in model.named_buffers()
        }
        for which in (model, model_new):
            which(torch.rand(3, 4, device=compute_device()))
        precision = fsdp_kwargs["mixed_precision"]
        used_dtype = precision.buffer_dtype if precision else torch.float32
        self.assertEqual({buffer.dtype for buffer in model.buffers()}, {used_dtype})
        _zero_model(model_new, zero_buffers=True)
        with self._get_state_dict_mgr(model, state_dict_type, rank0_and_offload):
            state_dict = model.state_dict()
        if rank0_and_offload:
            state_dict = self._broadcast_state_dict(model, state_dict)
        self.assertEqual(
            {name for name in state_dict if "buffer" in name},
            {"inner.buffer", "outer.buffer"},
        )
        self._load_state_dict(model_new, state_dict_type, state_dict)
        # A local state dict has the tensors as they are.
        saved_dtype = (
            used_dtype if state_dict_type == "local_state_dict" else torch.float32
        )
        for name in ("inner", "outer"):
            self.assertEqual(state_dict[f"{name}.buffer"].dtype, saved_dtype)
            layer = getattr(model_new, name)
            self.assertEqual(layer.buffer, original[f"{name}.buffer"].to(used_dtype))
            self.assertEqual(
                layer.non_persistent_buffer,
                torch.zeros_like(layer.non_persistent_buffer),
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _SUPPORTED_STATE_DICT_IMPLS)
    @parametrize("mixed_precision", [True, False])
    def test_save_and_load_after_forward_state_dict(
        self, state_dict_type, mixed_precision
    ):
        self.run_subtests(
            {"state_dict_rank0_and_offload": [True, False]},
            self._test_save_and_load_after_forward_state_dict,
            state_dict_type=state_dict_type,
            mixed_precision=mixed_precision,
        )

    def _test_save_and_load_after_forward_state_dict(
        self, state_dict_type, mixed_precision, state_dict_rank0_and_offload
    ):
        """State saved after training has the trained values, in the type of the
        parameters.
        """
        skip_unsupported_state_dict(state_dict_type, state_dict_rank0_and_offload)
        model = self._get_simple_nested_model(
            mixed_precision=HALF if mixed_precision else None
        )
        initial_params = get_full_params(model)
        losses = train_on_random_batches(model, 1, 10, steps=6)
        self.assertEqual(
            {loss.dtype for loss in losses},
            {torch.float16 if mixed_precision else torch.float32},
        )
        trained_params = get_full_params(model)
        self.assertNotEqual(initial_params, trained_params)

        with self._get_state_dict_mgr(
            model, state_dict_type, state_dict_rank0_and_offload
        ):
            # Local shards are the parameters, which are about to be zeroed.
            state_dict = {
                name: _detached(state) for name, state in model.state_dict().items()
            }
        self._validate_state_dict_contents(
            model, state_dict, state_dict_rank0_and_offload
        )
        _zero_model(model)
        self.assertLessEqual(
            {state.dtype for state in state_dict.values()}, {torch.float32}
        )
        if state_dict_rank0_and_offload:
            state_dict = self._broadcast_state_dict(model, state_dict)
        self._load_state_dict(model, state_dict_type, state_dict)
        self.assertEqual(get_full_params(model), trained_params)

    def _dist_train(
        self, wrap_fsdp: bool, state_dict_type: str = "", move_to_cpu: bool = False
    ):
        """Train and return the parameters. With FSDP they are saved and loaded first,
        on the host if asked.
        """
        model = self._initialize_model(wrap_fsdp)
        train_on_random_batches(model, 64, 4, steps=3)
        if not wrap_fsdp:
            return list(model.parameters())
        blank_model = FSDP(Model(True).to(compute_device()), device_id=self.device)
        _zero_model(blank_model)
        state_dict = self._state_dict(model, state_dict_type)
        if move_to_cpu:
            state_dict = {name: state.cpu() for name, state in state_dict.items()}
        self._load_state_dict(blank_model, state_dict_type, state_dict)
        return get_full_params(blank_model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _SUPPORTED_STATE_DICT_IMPLS)
    def test_state_dict_save_load_flow(self, state_dict_type):
        self.run_subtests(
            {"move_to_cpu": [True, False]},
            self._test_state_dict_save_load_flow,
            state_dict_type=state_dict_type,
        )

    def _test_state_dict_save_load_flow(self, state_dict_type, move_to_cpu):
        fsdp_params = self._dist_train(
            wrap_fsdp=True, state_dict_type=state_dict_type, move_to_cpu=move_to_cpu
        )
        self.assertEqual(self._dist_train(wrap_fsdp=False), fsdp_params)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _SUPPORTED_STATE_DICT_IMPLS)
    def test_fsdp_state_dict_keys(self, state_dict_type):
        state_dict = self._state_dict(self._initialize_model(True), state_dict_type)
        local_keys = set(
            self._initialize_model(wrap_fsdp=False, wrap_ddp=False).state_dict()
        )
        flattened_keys = {FLAT_PARAM, f"inner.{FLAT_PARAM}"}
        is_flattened = state_dict_type in _FLATTENED_STATE_DICT_IMPLS
        self.assertEqual(
            set(state_dict), flattened_keys if is_flattened else local_keys
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _UNFLATTENED_STATE_DICT_IMPLS)
    @parametrize("fsdp_root", [True, False])
    def test_state_dict_load_into_local_module(self, state_dict_type, fsdp_root):
        self.run_subtests(
            {"state_dict_rank0_and_offload": [True, False]},
            self._test_state_dict_load_into_local_module,
            state_dict_type=state_dict_type,
            fsdp_root=fsdp_root,
        )

    def _test_state_dict_load_into_local_module(
        self, state_dict_type, state_dict_rank0_and_offload, fsdp_root
    ):
        skip_unsupported_state_dict(state_dict_type, state_dict_rank0_and_offload)
        if fsdp_root:
            model = self._initialize_model(wrap_fsdp=True, register_buffers=True)
            local = self._initialize_model(
                wrap_fsdp=False, wrap_ddp=False, register_buffers=True
            )
        else:
            model, local = (
                self._get_non_fsdp_root_module(),
                self._get_non_fsdp_root_module(wrap=False),
            )
        self.assertFalse(any(isinstance(module, FSDP) for module in local.modules()))
        train_on_random_batches(model, *((64, 4) if fsdp_root else (1, 10)), steps=3)
        with FSDP.summon_full_params(model):
            trained = deepcopy([*model.parameters()])

        with self._get_state_dict_mgr(
            model, state_dict_type, state_dict_rank0_and_offload
        ):
            state_dict = model.state_dict()
        unmanaged = [name for name in state_dict if NON_ROOT_FSDP_PREFIX in name]
        self._validate_state_dict_contents(
            model, state_dict, state_dict_rank0_and_offload, unmanaged
        )
        state_dict = _gather_state_dict(state_dict)
        if state_dict_rank0_and_offload:
            state_dict = self._broadcast_state_dict(model, state_dict)
        _zero_model(local, summon_full=False)
        local.load_state_dict(state_dict, strict=True)
        self.assertEqual(trained, list(local.parameters()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _SUPPORTED_STATE_DICT_IMPLS)
    @parametrize("double_nest", [True])
    def test_state_dict_skip_module(self, state_dict_type, double_nest):
        """A module that is added after wrapping, so that FSDP does not manage it, keeps
        its name in the state dict.
        """
        model, model_new = (
            partly_managed_model(double_nest),
            partly_managed_model(double_nest),
        )
        model(torch.randn(1, 10, device=compute_device())).sum().backward()
        state_dict = self._state_dict(model, state_dict_type)
        local = partly_managed_model(double_nest, wrap_fsdp=False)
        is_flattened = state_dict_type in _FLATTENED_STATE_DICT_IMPLS
        self.assertIn("linear_skip.lin.weight", state_dict)
        if not is_flattened:
            self.assertEqual(set(state_dict), set(local.state_dict()))

        _zero_model(model_new)
        for mine, theirs in zip(
            model.parameters(), model_new.parameters(), strict=True
        ):
            self.assertNotEqual(mine, theirs)
        # deepcopy does not work on a flat parameter.
        self._load_state_dict(
            model_new,
            state_dict_type,
            state_dict if is_flattened else deepcopy(state_dict),
        )
        for mine, theirs in zip(
            model.parameters(), model_new.parameters(), strict=True
        ):
            self.assertEqual(mine, theirs)
        if not is_flattened:
            _zero_model(local, summon_full=False)
            local.load_state_dict(_gather_state_dict(state_dict), strict=True)
            with FSDP.summon_full_params(model):
                self.assertEqual(_by_plain_name(model), dict(local.named_parameters()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_wrong_state_dict_config(self):
        model = FSDP(Model(wrap_fsdp=True), device_id=self.device)
        with (
            self.assertRaisesRegex(RuntimeError, "Expected state_dict_config of type"),
            model.state_dict_type(
                model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig()
            ),
        ):
            self.fail("a local state dict's options were taken for a full one's")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("state_dict_type", _UNFLATTENED_STATE_DICT_IMPLS)
    @parametrize("prefix", [True, False])
    def test_state_dict_with_ignored_modules(self, state_dict_type, prefix):
        self.run_subtests(
            {"ignore_inner": [True, False], "mixed_precision": [True, False]},
            self._test_state_dict_with_ignored_modules,
            state_dict_type=state_dict_type,
            prefix=prefix,
        )

    def _test_state_dict_with_ignored_modules(
        self, state_dict_type, prefix, ignore_inner, mixed_precision
    ):
        """Ignored parameters and buffers are saved without a copy or a cast, every
        time.
        """
        model = Model(
            True,
            register_buffers=True,
            ignore_inner=ignore_inner,
            mixed_precision=mixed_precision,
        )
        model = model.to(compute_device())
        as_they_are = {
            "outer.weight": model.outer.weight,
            "outer.bias": model.outer.bias,
        }
        as_they_are["outer.buffer"] = model.outer.buffer
        if ignore_inner:
            as_they_are |= {
                "inner.weight": model.inner.weight,
                "inner.bias": model.inner.bias,
            }
        # A buffer that is not ignored and has another type is cast back, which makes a
        # copy.
        if ignore_inner or not mixed_precision:
            as_they_are["inner.buffer"] = model.inner.buffer
        fsdp_model = FSDP(
            model,
            device_id=self.device,
            ignored_modules=[model.outer],
            mixed_precision=HALF if mixed_precision else None,
        )
        start = "foo." if prefix else ""

        for _ in range(2):
            with FSDP.state_dict_type(fsdp_model, STATE_DICT_MAPPING[state_dict_type]):
                state_dict = fsdp_model.state_dict(prefix=start)
            for name, state in as_they_are.items():
                self.assertEqual(
                    state_dict[f"{start}{name}"].data_ptr(),
                    state.data_ptr(),
                    f"{name} was copied",
                )
                self.assertEqual(state_dict[f"{start}{name}"].dtype, torch.float32)
        self.assertEqual(state_dict[f"{start}inner.buffer"].dtype, torch.float32)

        plain = Model(wrap_fsdp=False, register_buffers=True).to(compute_device())
        _zero_model(plain, zero_buffers=True)
        gathered = _gather_state_dict(state_dict)
        plain.load_state_dict(
            {name.removeprefix(start): state for name, state in gathered.items()},
            strict=True,
        )
        with FSDP.summon_full_params(fsdp_model):
            self.assertEqual(list(fsdp_model.parameters()), list(plain.parameters()))
        self.assertEqual(plain.outer.buffer, model.outer.buffer)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_dict_type(self):
        with enable_wrap(wrapper_cls=FSDP):
            fsdp = wrap(SkipModel(double_nest=True), device_id=compute_device())
        with FSDP.state_dict_type(fsdp, StateDictType.LOCAL_STATE_DICT):
            inside = {module._state_dict_type for module in FSDP.fsdp_modules(fsdp)}
        after = {module._state_dict_type for module in FSDP.fsdp_modules(fsdp)}
        self.assertEqual(
            (inside, after),
            ({StateDictType.LOCAL_STATE_DICT}, {StateDictType.FULL_STATE_DICT}),
        )
        self.assertGreater(len(FSDP.fsdp_modules(fsdp)), 2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_local_state_dict_with_empty_ranks(self):
        """With one element only rank 0 has a shard. All ranks can still save
        and load.
        """
        pi = 3.1415926

        class Model(Module):
            def __init__(self):
                super().__init__()
                self.my_parameter = nn.Parameter(torch.full((1,), pi))

            def forward(self, x):
                return self.my_parameter

        model = FSDP(Model(), device_id=self.device)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model(None).backward()
            state_dict = deepcopy(model.state_dict())
            self.assertEqual(
                len(state_dict[FLAT_PARAM].local_shards()), 1 if self.rank == 0 else 0
            )
            with torch.no_grad(), FSDP.summon_full_params(model):
                self.assertEqual(model.my_parameter.item(), pi)
                model.my_parameter.fill_(1.75)
            with FSDP.summon_full_params(model):
                self.assertEqual(model.my_parameter.item(), 1.75)
            model.load_state_dict(state_dict)
            with FSDP.summon_full_params(model):
                self.assertEqual(model.my_parameter.item(), pi)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_torch_save_load(self):
        model = Model(wrap_fsdp=True).to(compute_device())
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state_dict = model.state_dict()
        checkpoint = io.BytesIO()
        torch.save(state_dict, checkpoint)
        checkpoint.seek(0)
        loaded = torch.load(checkpoint, weights_only=False)
        self.assertEqual(
            set(loaded), {f"inner.{FLAT_PARAM}", "outer.weight", "outer.bias"}
        )
        for name, state in loaded.items():
            mine, theirs = (
                which.local_shards()[0].tensor
                if isinstance(which, ShardedTensor)
                else which
                for which in (state_dict[name], state)
            )
            self.assertEqual(mine, theirs)
        self.assertIsInstance(loaded[f"inner.{FLAT_PARAM}"], ShardedTensor)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_shared_module_and_shared_parameter(self):
        plain = TestDummyModel().to(compute_device())
        state_dict = self._state_dict(
            FSDP(TestDummyModel(), device_id=self.device), "state_dict"
        )
        for first, second in (
            ("random_parameter", "shared_parameter"),
            ("net2.0.bias", "net3.0.bias"),
            ("net2.0.weight", "net3.0.weight"),
        ):
            self.assertEqual(state_dict[first], state_dict[second])
        self.assertEqual(state_dict, plain.state_dict())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_state_dict_missing_unexpected_keys_cleaned(self):
        model = self._get_simple_nested_model()
        state_dict = model.state_dict()
        removed = next(iter(state_dict))
        del state_dict[removed]
        state_dict["unexpected"] = torch.ones(1)
        missing, unexpected = model.load_state_dict(state_dict, strict=False)
        self.assertEqual((missing, unexpected), ([removed], ["unexpected"]))
        self.assertNotIn(FSDP_PREFIX, removed)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_sharded_load_multi_backend_pg(self):
        self.run_subtests(
            {"load_cpu": [True, False]}, self._test_sharded_load_multi_backend_pg
        )

    def _test_sharded_load_multi_backend_pg(self, load_cpu: bool):
        """A group with backends for the host and the device loads shards from both."""
        own = get_devtype().type
        backends = dict.fromkeys([HOST.type], "gloo") | {own: dist.get_backend()}
        group = dist.new_group(
            backend=",".join(f"{kind}:{backend}" for kind, backend in backends.items())
        )
        model = TransformerWithSharedParams.init(
            group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            {"auto_wrap_policy": LAYER_POLICY, "use_orig_params": True},
        )
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        sharded = model.state_dict()
        before = [param.detach().clone() for param in model.parameters()]
        _zero_model(model, summon_full=False)
        if load_cpu:
            sharded = {name: state.cpu() for name, state in sharded.items()}
        model.load_state_dict(sharded)
        self.assertEqual(before, [param.detach() for param in model.parameters()])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_world_size_one(self):
        """Each rank, in a group of its own, saves and loads without the others."""
        groups = [dist.new_group(ranks=[rank]) for rank in range(self.world_size)]
        model = TransformerWithSharedParams.init(
            groups[self.rank], FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE
        )
        before = get_full_params(model)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state_dict = deepcopy(model.state_dict())
            _zero_model(model)
            model.load_state_dict(state_dict)
        self.assertEqual(before, get_full_params(model))
        dist.barrier()


def _detached(state: torch.Tensor | ShardedTensor) -> torch.Tensor | ShardedTensor:
    """Return a copy of ``state`` with its own storage."""
    if isinstance(state, ShardedTensor):
        for local in state.local_shards():
            local.tensor = local.tensor.clone().detach_()
        return state
    return state.clone()


def _by_plain_name(model: Module) -> dict[str, torch.Tensor]:
    return {clean_tensor_name(name): param for name, param in model.named_parameters()}


class TestFSDPStateDict4GPUs(FSDPTest):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_local_state_dict_reshard(self):
        """Flat parameters of four ranks, resharded to two ranks, give the
        same model.
        """
        model = FSDP(Model(wrap_fsdp=True), device_id=self.device)
        train_on_random_batches(model, 4, 4, steps=1)
        state_dict = TestFSDPStateDict._state_dict(model, "local_state_dict")
        pair = dist.new_group(ranks=[0, 1])
        resharded = {
            name: self._for_two_ranks(state, pair) for name, state in state_dict.items()
        }
        full_of_four = TestFSDPStateDict._state_dict(model, "state_dict")
        if self.rank < 2:
            of_two = FSDP(
                Model(wrap_fsdp=True, process_group=pair),
                device_id=self.device,
                process_group=pair,
            )
            _zero_model(of_two)
            TestFSDPStateDict._load_state_dict(of_two, "local_state_dict", resharded)
            self.assertEqual(
                full_of_four, TestFSDPStateDict._state_dict(of_two, "state_dict")
            )
            self.assertEqual(of_two._handle.world_size, 2)

    def _for_two_ranks(self, state: ShardedTensor, pair: Any) -> ShardedTensor | None:
        # In place, because this is a view of a parameter.
        with torch.no_grad():
            whole = _all_gather_sharded_tensor(state)
        if self.rank >= 2:
            return None
        chunks = whole.chunk(2)
        offset = self.rank * chunks[0].numel()
        own = Shard.from_tensor_and_offsets(chunks[self.rank], [offset], self.rank)
        return init_from_local_shards([own], whole.numel(), process_group=pair)


instantiate_parametrized_tests(TestFSDPStateDict)

if __name__ == "__main__":
    run_tests()
