# Owner(s): ["oncall: distributed"]
"""FSDP1's construction and first use: which modules and devices it refuses, where it
moves parameters, which options must agree; optimizers in backward, validation between
steps, and what it logs.
"""

import contextlib
import copy
import dataclasses
import logging
import os
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._debug_utils import (
    _get_sharded_module_tree_with_module_name_to_fqns,
)
from torch.distributed.fsdp._runtime_utils import (
    _register_post_forward_hook,
    _register_pre_forward_hook,
    _register_root_pre_forward_hook,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _apply_optimizer_in_backward

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    CollectiveLog,
    FSDPTest,
    get_full_params,
    skip_parameter_offload,
    skip_without_accelerator,
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

HOST = torch.empty(0).device


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))


class Buffered(nn.Module):
    """A layer with a buffer and a gradient, all on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.weight.grad = torch.full((3, 3), 2.0)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


class Parts(torch.Tensor):
    """Wraps two tensors, as a quantized tensor wraps its values and scales."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> "Parts":
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device
        )

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride) -> "Parts":
        return Parts(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        self, *others = args
        parts = self.first, self.second
        return cls(*(func(each, *others, **(kwargs or {})) for each in parts))


class Reusing(Chain):
    """Runs ``a`` before and after the others. Shapes: ``(N, 3)`` to ``(N, 2)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.a(x)[:, :2]


class MiscTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _fsdp(self, module: nn.Module, **options: Any) -> FSDP:
        return FSDP(module, device_id=self.device, **options)

    def _chain(self, wraps: bool = True, **options: Any) -> FSDP:
        policy = ModuleWrapPolicy({nn.Linear}) if wraps else None
        chain = Chain(device=self.device)
        return self._fsdp(chain, auto_wrap_policy=policy, **options)

    def _rows(self, step: int = 0) -> torch.Tensor:
        return Chain.rows(self.device, self.world_size, self.rank, step)


class TestFSDPMiscMultiProcess(MiscTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_refused_modules(self):
        with self.assertRaisesRegex(ValueError, "scalar parameters. Change 1.scale to"):
            self._fsdp(nn.Sequential(nn.Linear(2, 2), Scalar()))
        for container in (
            nn.ModuleList([nn.Linear(2, 2)]),
            nn.ModuleDict({"a": nn.Linear(2, 2)}),
        ):
            with self.assertWarnsRegex(UserWarning, "do not implement forward: Module"):
                self._fsdp(container)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._fsdp(nn.Sequential(nn.Linear(2, 2)))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fsdp_device_id(self):
        """``device_id`` moves what is on the host, and refuses another device."""
        skip_without_accelerator("all is on the host")
        index = self.device.index
        for device in (self.device, index):
            model = FSDP(Buffered(), device_id=device)
            self.assertEqual(model.compute_device, self.device)
            self.assertEqual(model.shift.device, self.device)
            self.assertEqual(
                [each.device for each in model.parameters()], [self.device]
            )
        with self.assertWarnsRegex(
            UserWarning, f"`device_id` {self.device.type} on rank {self.rank}.*explicit"
        ):
            model = FSDP(Buffered(), device_id=torch.device(self.device.type))
        self.assertEqual(model.compute_device, self.device)
        buffers = self._fsdp(nn.BatchNorm1d(3, affine=False))
        self.assertEqual({each.device for each in buffers.buffers()}, {self.device})
        mixed = nn.Sequential(Buffered(), Buffered().to(self.device))
        with self.assertRaisesRegex(RuntimeError, "both CPU and GPU params.*device_id"):
            FSDP(mixed)
        self.assertEqual(
            FSDP(mixed, device_id=self.device)[0].shift.device, self.device
        )
        if torch.accelerator.device_count() > 1:
            other = torch.device(
                self.device.type, (index + 1) % torch.accelerator.device_count()
            )
            with self.assertRaisesRegex(
                ValueError, f"`device_id` on rank {self.rank}: {self.device} vs {other}"
            ):
                FSDP(Buffered().to(self.device), device_id=other)
            two = nn.Sequential(Buffered().to(self.device), Buffered().to(other))
            for device in (None, self.device):
                with self.assertRaisesRegex(RuntimeError, "only supports single dev"):
                    FSDP(two, device_id=device)
            ignored = FSDP(two, ignored_states=[two[1]])
            self.assertEqual(ignored.compute_device, self.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_module_on_the_host(self):
        """Without ``device_id`` it stays there and warns, cannot be synchronized, and
        cannot run until it is moved.
        """
        skip_without_accelerator("all is on the host")
        with self.assertWarnsRegex(UserWarning, "passed-in `module` is on CPU"):
            model = FSDP(Buffered())
        self.assertEqual({each.device for each in model.parameters()}, {HOST})
        self.assertEqual(model.compute_device, self.device)
        with self.assertRaisesRegex(
            RuntimeError, f"parameters on {HOST}.*to move the module to {self.device}"
        ):
            model(self.rows(3))
        with (
            warnings.catch_warnings(),
            self.assertRaisesRegex(ValueError, "CPU parameters or buffers when `sync"),
        ):
            warnings.simplefilter("ignore")
            FSDP(Buffered(), sync_module_states=True)
        buffers = nn.Sequential(nn.BatchNorm1d(2, affine=False))
        with self.assertRaisesRegex(ValueError, "CPU parameters or buffers when `sync"):
            FSDP(buffers, sync_module_states=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            moved = FSDP(Buffered()).to(self.device)
        moved(self.rows(3)).sum().backward()
        self.assertEqual({each.device for each in moved.parameters()}, {self.device})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_homogeneous_attributes(self):
        """Nested wrappers must agree on some options, and the error names the option
        and both values.
        """
        for option, name in (
            ("use_orig_params", "_use_orig_params"),
            ("limit_all_gathers", "limit_all_gathers"),
        ):
            for value in (False, True):
                inner = self._fsdp(nn.Linear(3, 3), **{option: value})
                outer = self._fsdp(
                    nn.Sequential(inner, nn.Linear(3, 3)), **{option: not value}
                )
                with self.assertRaisesRegex(
                    ValueError, f"one homogeneous value for {name} but.*(True|False), "
                ):
                    outer(self.rows(3))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_root_is_the_outermost(self):
        """A module that has run alone cannot become part of another; methods of the
        root are refused below it.
        """
        inner = self._fsdp(nn.Linear(3, 3))
        inner(self.rows(3))
        outer = self._fsdp(nn.Sequential(inner, nn.Linear(3, 3)))
        with self.assertRaisesRegex(AssertionError, "Non-root FSDP instance's"):
            outer(self.rows(3))
        model = self._chain()
        model(self._rows()).sum().backward()
        with self.assertRaisesRegex(RuntimeError, "on inner FSDP instances"):
            with model.a.no_sync():
                pass
        with self.assertRaisesRegex(RuntimeError, "only be called on the root"):
            model.a.clip_grad_norm_(1.0)
        with self.assertRaisesRegex(AssertionError, "only be called on a root"):
            model.a.register_comm_hook(None, lambda state, grad, out: None)
        self.assertEqual(
            [model.check_is_root(), model.a.check_is_root()], [True, False]
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_of_gradients_are_refused(self):
        model = self._chain(wraps=False)
        loss = model(self._rows()).square().sum()
        with self.assertRaisesRegex(RuntimeError, "gradients of gradients"):
            loss.backward(create_graph=True)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_wrapper_acts_as_its_module(self):
        """Missing attributes and indices are those of the module, which knows that it
        is sharded.
        """
        ignored = nn.Linear(2, 2)
        inside = nn.Sequential(nn.Linear(2, 2), ignored)
        inside.note = "kept"
        for use_orig_params in (False, True):
            model = self._fsdp(
                inside, ignored_modules=[ignored], use_orig_params=use_orig_params
            )
            self.assertIs(model.module, inside)
            self.assertIs(model[1], ignored)
            self.assertEqual(model.note, "kept")
            with self.assertRaisesRegex(AttributeError, "'Sequential'.*'missing'"):
                model.missing  # noqa: B018  # the read is the test
            for each in (inside, inside[0]):
                self.assertTrue(each._is_fsdp_managed_module)
                self.assertIs(each._fsdp_use_orig_params, use_orig_params)
            self.assertFalse(hasattr(ignored, "_is_fsdp_managed_module"))
            inside = nn.Sequential(nn.Linear(2, 2), ignored)
            inside.note = "kept"

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_params(self):
        """A module without parameters passes gradients on, and casts nothing."""
        model = self._fsdp(nn.Sequential(self._fsdp(nn.Tanh()), nn.Tanh()))
        rows = self.rows(3).requires_grad_()
        model(rows).sum().backward()
        expected = rows.detach().clone().requires_grad_()
        torch.tanh(torch.tanh(expected)).sum().backward()
        self.assertEqual(rows.grad, expected.grad)
        self.assertEqual([model._has_params, model._flat_param], [False, None])
        self.assertEqual(list(model.parameters()), [])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("offloads", [False, True])
    def test_fsdp_optimizer_overlap(self, offloads):
        """Optimizers that step in backward train as one that steps after it, and leave
        no gradient.
        """
        skip_parameter_offload(CPUOffload(offloads))
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            options = {
                "use_orig_params": True,
                "sharding_strategy": strategy,
                "cpu_offload": CPUOffload(offloads),
            }
            model, reference = self._chain(**options), self._chain(**options)
            optim = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
            own = {"lr": 0.1, "momentum": 0.9}
            _apply_optimizer_in_backward(
                torch.optim.SGD, model.parameters(), own, register_hook=False
            )
            for step in range(3):
                for each in (model, reference):
                    each(self._rows(step)).square().sum().backward()
                grads = [each.grad for each in model.parameters()]
                self.assertEqual(grads, [None] * len(grads), f"gradients in {step}")
                optim.step()
                optim.zero_grad()
                where = f"parameters after step {step} with {strategy}"
                expected = get_full_params(reference)
                self.assertEqual(get_full_params(model), expected, where)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fsdp_optim_overlap_no_use_orig_params_error(self):
        model = self._chain(wraps=False)
        _apply_optimizer_in_backward(
            torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False
        )
        with self.assertRaisesRegex(
            RuntimeError, "only supported with use_orig_params"
        ):
            model(self._rows())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    def test_validation_between_steps(self, strategy):
        """Forwards without gradients see the trained parameters, and leave training as
        it is, bit by bit. Its collectives are the same, but for all-gathers of what the
        strategy keeps after a forward.
        """
        for use_orig_params, prefetch in ((False, True), (True, True), (True, False)):
            models = [
                self._chain(
                    sharding_strategy=ShardingStrategy[strategy],
                    use_orig_params=use_orig_params,
                    forward_prefetch=prefetch,
                )
                for _ in range(2)
            ]
            optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
            plain = Chain(device=self.device)
            for step in range(3):
                where = f"step {step}, {use_orig_params=}, {prefetch=}"
                models[0].eval()
                with torch.no_grad():
                    for _ in range(2):
                        output = models[0](self._rows(9))
                        self.assertEqual(output, plain(self._rows(9)), where)
                models[0].train()
                calls = []
                for model, optim in zip(models, optims, strict=True):
                    with CollectiveLog() as log:
                        model(self._rows(step)).square().sum().backward()
                    calls.append(log.calls)
                    optim.step()
                    optim.zero_grad()
                if strategy == "SHARD_GRAD_OP":  # the validation's parameters are kept
                    calls[1] = [each for each in calls[1] if each.name != "all-gather"]
                # In the first step, the second model does not know the order of units.
                if step:
                    self.assertEqual(calls[0], calls[1], f"collectives of {where}")
                whole, trained = map(get_full_params, models)
                self.assertEqual(whole, trained, where, atol=0, rtol=0)
                with torch.no_grad():
                    for own, value in zip(plain.parameters(), trained, strict=True):
                        own.copy_(value)


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    first: torch.Tensor
    second: torch.Tensor


# Container -> how to make it of two tensors, and how to read the first of them.
OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda first, second: first, lambda output: output),
    "tuple": (lambda *two: two, lambda output: output[0]),
    "list": (lambda *two: [*two], lambda output: output[0]),
    "dict": (lambda *two: {"first": list(two)}, lambda output: output["first"][0]),
    "named tuple": (Pair, lambda output: output.first),
    "dataclass": (Record, lambda output: output.first),
    "nested": (
        lambda *two: ({"a": Pair(*two)}, 3),
        lambda output: output[0]["a"].first,
    ),
}


class Returning(nn.Module):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.make = nn.Linear(3, 3), make

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x)
        return self.make(x, torch.tanh(x))


class TestFSDPOutputs(MiscTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fsdp_namedtuple(self):
        """Whatever holds the outputs, FSDP keeps its type, and gathers parameters
        before their gradients are computed. The second output is not used.
        """
        for name, (make, read) in OUTPUTS.items():
            reference = Returning(make).to(self.device)
            inner = self._fsdp(Returning(make))
            model = self._fsdp(nn.ModuleDict({"inner": inner}))
            model.module.forward = lambda x, inner=inner: inner(x)
            rows = self.rows(3)
            for _ in range(2):
                output, expected = model(rows), reference(rows)
                self.assertIs(type(output), type(expected), name)
                self.assertEqual(read(output), read(expected), name)
                read(output).square().sum().backward()
                read(expected).square().sum().backward()
            for each in reference.parameters():
                dist.all_reduce(each.grad)
            whole = torch.cat([each.grad.flatten() for each in reference.parameters()])
            grad = torch.empty(2 * 6, device=self.device)
            dist.all_gather_into_tensor(grad, inner._flat_param.grad)
            self.assertEqual(grad, whole / 2, f"gradient of a {name}")


class TestFSDPUnshard(MiscTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("async_op", [False, True])
    def test_unshard_ahead(self, async_op):
        """``_unshard`` gathers a module's parameters before its forward, which then
        gathers nothing, and computes the same; the states of module and handle are
        restored, also after an exception.
        """
        for use_orig_params in (False, True):
            model, other = (self._chain(use_orig_params=use_orig_params) for _ in "12")
            for each in (model, other):
                each(self._rows()).square().sum().backward()
            model._wait_unshard_streams_on_current_stream()
            states = [model.b.training_state, model.b._handle._training_state]
            with CollectiveLog() as ahead:
                waiting = model.b._unshard(async_op)
            self.assertEqual([each.numel for each in ahead.calls], [15 + 1])
            after = [model.b.training_state, model.b._handle._training_state]
            self.assertEqual(after, states, "training states")
            self.assertEqual(waiting is not None, async_op)
            if waiting is not None:
                waiting.wait()
                waiting.wait()
            with CollectiveLog() as log:
                output = model(self._rows(1))
            gathered = [each.numel for each in log.calls]
            last = 10 if use_orig_params else 8  # with elements for alignment
            self.assertEqual(gathered, [16, last], "elements that forward gathers")
            expected = other(self._rows(1))
            self.assertEqual(output, expected, atol=0, rtol=0)
            for each in (output, expected):
                each.square().sum().backward()
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                self.assertEqual(one.grad, two.grad, atol=0, rtol=0)
            with self.assertRaises(KeyError), model.b._use_training_state(None, None):
                raise KeyError
            after = [model.b.training_state, model.b._handle._training_state]
            self.assertEqual(after, states, "training states after an exception")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_waits_for_parameters_that_nobody_waited_for(self):
        """Of this step, and not of the step that was unsharded ahead."""
        torch.manual_seed(0)
        reference = nn.Linear(5, 3, device=self.device)
        model = FSDP(copy.deepcopy(reference), device_id=self.device)
        inputs = torch.randn(2, 5, device=self.device)
        model(inputs).sum().backward()
        expected = reference(inputs)
        outputs = []
        for ahead in (True, False, True):
            if ahead:
                model._unshard(async_op=True)
            outputs.append(model(inputs))
            outputs[-1].sum().backward()
        for output in outputs:
            self.assertEqual(output, expected)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    def test_moving_a_wrapped_module(self, use_orig_params):
        """``double`` before the first step changes the type of computation. Parameters
        stay the same objects, also after a step.
        """
        for late in (False, True):
            model = self._chain(use_orig_params=use_orig_params)
            plain = Chain(device=self.device).double()
            if late:
                model(self._rows()).sum().backward()
                model.zero_grad()
            before = [*model.parameters()]
            self.assertIs(model.double(), model)
            for one, two in zip(before, model.parameters(), strict=True):
                self.assertIs(one, two)
                self.assertEqual(two.dtype, torch.float64)
            if late:  # FSDP has noted the type of computation
                continue
            output = model(self._rows().double())
            self.assertEqual(output, plain(self._rows().double()))
            output.sum().backward()
            for each in get_full_params(model):
                self.assertEqual(each.dtype, torch.float64)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    def test_mixed_precision_of_other_types(self, use_orig_params):
        """Parameters of float64 that compute in float32 keep all their digits when they
        are summoned, saved or updated, and so do gradients' sums.
        """
        plain = Chain(device=self.device).double()
        with torch.no_grad():
            for each in plain.parameters():
                each.add_(1e-12)
        model = self._fsdp(
            copy.deepcopy(plain),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(torch.float32, torch.float64),
            use_orig_params=use_orig_params,
        )
        for step in range(2):
            output = model(self._rows(step))
            self.assertEqual(output.dtype, torch.float32)
            output.square().sum().backward()
        exact = {"atol": 0, "rtol": 0}
        self.assertEqual(get_full_params(model), [*plain.parameters()], **exact)
        self.assertEqual(model.state_dict(), plain.state_dict(), **exact)
        for each in model.parameters():
            self.assertEqual(each.dtype, torch.float64)
            if each.grad is not None:
                self.assertEqual(each.grad.dtype, torch.float64)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hooks_of_the_module(self):
        """A module that has the hooks of its wrapper, registered however often, runs
        without it as with it.
        """
        model, other = (self._fsdp(Chain(device=self.device)) for _ in "12")
        self.assertTrue(model.check_is_root())
        for _ in range(2):
            for register in (
                _register_pre_forward_hook,
                _register_post_forward_hook,
                _register_root_pre_forward_hook,
            ):
                register(model, model.module)
        kept = model._pre_forward_handles, model._post_forward_handles
        self.assertEqual([len(each) for each in kept], [1, 1], "handles of hooks")
        hooks = model.module._forward_pre_hooks, model.module._forward_hooks
        self.assertEqual([len(each) for each in hooks], [2, 1], "hooks of the module")
        for step in range(2):
            calls = []
            for each in (model.module, other):
                with CollectiveLog() as log:
                    each(self._rows(step).to(HOST)).square().sum().backward()
                calls.append(log.calls)
            self.assertEqual(calls[0], calls[1], f"collectives of step {step}")
            self.assertEqual(model._flat_param.grad, other._flat_param.grad)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_tree_for_debugging(self):
        """The tree shows each module with its place and class, and marks those that a
        state shards; their original parameters are listed by that name.
        """
        model = Chain(device=self.device)
        model.b = self._fsdp(model.b)
        for is_known in (False, True):
            if is_known:
                model.b._fully_sharded_module_to_handle[model.b] = model.b._handle
            tree, names = _get_sharded_module_tree_with_module_name_to_fqns(model)
            mark = " FULLY SHARDED" if is_known else ""
            self.assertEqual(
                tree,
                "[Chain]\n    a[Linear]\n"
                f"    b[FullyShardedDataParallel]{mark}\n"
                "        b._fsdp_wrapped_module[Linear]\n    c[Linear]\n",
            )
            expected = {"b[FullyShardedDataParallel]": ["b.weight", "b.bias"]}
            self.assertEqual(names, expected if is_known else {})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_limit_of_all_gathers(self):
        """If asked for, the host waits before an all-gather once two frees are pending,
        which are those of all six all-gathers from the second step on. Otherwise it
        keeps no event.
        """
        for limits, expected in ((True, [3, 6, 6]), (False, [0, 0, 0])):
            model = self._chain(limit_all_gathers=limits)
            self.assertTrue(model.check_is_root())
            queue, waited = model._free_event_queue, []
            self.assertIs(model.b._free_event_queue, queue)
            dequeue = queue.dequeue_if_needed

            def noted(dequeue=dequeue, waited=waited):
                event = dequeue()
                if event is not None:
                    waited.append(event)
                return event

            queue.dequeue_if_needed = noted
            counts = []
            for step in range(3):
                model(self._rows(step)).square().sum().backward()
                counts.append(len(waited))
                waited.clear()
            self.assertEqual(counts, expected, f"waits in each step, {limits=}")
            self.assertLessEqual(len(queue._queue), 9 if limits else 0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_successor_of_a_module_that_runs_twice(self):
        """It is prefetched once, so prefetching gathers no more than its lack."""
        gathered = []
        for prefetches in (False, True):
            model = self._fsdp(
                Reusing(device=self.device),
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                forward_prefetch=prefetches,
            )
            for step in range(2):
                with CollectiveLog() as log:
                    loss = model(self._rows(step)).square().sum()
                loss.backward()
            gathered.append(sorted(each.numel for each in log.calls))
        self.assertEqual(gathered[0], gathered[1], "elements of all-gathers")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_priority_of_streams(self):
        """All-gathers and reductions over shards come before the all-reduces over
        replicas, if their number is limited.
        """
        skip_without_accelerator("the host has no streams")
        alone = [dist.new_group([rank]) for rank in range(2)][self.rank]
        hybrid = {
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            "process_group": (dist.group.WORLD, alone),
        }
        for limits, options, expected in (
            (True, {}, 0),
            (True, hybrid, -1),
            (False, hybrid, 0),
        ):
            model = self._chain(limit_all_gathers=limits, **options)
            self.assertTrue(model.check_is_root())
            streams = (
                model._unshard_stream,
                model._post_backward_stream,
                model._pre_unshard_stream,
            )
            self.assertEqual([each.priority for each in streams], [expected] * 3)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_synchronized_at_the_start(self):
        """``sync_module_states`` gives all ranks the parameters and buffers of rank 0
        of the wrapper's group, once, and only if asked for. So it does with all parts
        of a tensor that wraps tensors.
        """
        skip_without_accelerator("sync_module_states needs an accelerator")
        for syncs in (False, True):
            module = nn.Sequential(Buffered(), nn.Sequential(Buffered()))
            for each in (*module.parameters(), *module.buffers()):
                each.data.fill_(self.rank + 1.0)
            with CollectiveLog() as log:
                inner = self._fsdp(module[1], sync_module_states=syncs)
                module[1] = inner
                model = self._fsdp(module, sync_module_states=syncs)
            sent = [each.numel for each in log.calls if each.name == "broadcast"]
            self.assertEqual(sum(sent), 2 * 15 if syncs else 0, "elements sent")
            expected = 1.0 if syncs else self.rank + 1.0
            for each in model.buffers():
                self.assertEqual(each.unique().tolist(), [expected])
            module = nn.Linear(2, 2).to(self.device)
            parts = [
                torch.full((3,), self.rank + start, device=self.device)
                for start in (1.0, 5.0)
            ]
            module.register_buffer("parts", Parts(*parts))
            self._fsdp(module, sync_module_states=syncs)
            found = [each.tolist() for each in parts]
            self.assertEqual(found, [[expected] * 3, [expected + 4] * 3])
            held = {value for each in get_full_params(model) for value in each.unique()}
            self.assertEqual({*map(float, held)}, {1.0} if syncs else {1.0, 2.0})


class TestFSDPMiscWorldSize1(MiscTest):
    @property
    def world_size(self):
        return 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_world_size_1_sharding_strategy_warning(self):
        for strategy in (
            None,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.FULL_SHARD,
        ):
            named = strategy or ShardingStrategy.FULL_SHARD
            with self.assertWarnsRegex(
                UserWarning, f"`NO_SHARD` instead of {named} si"
            ):
                model = self._fsdp(nn.Linear(2, 2), sharding_strategy=strategy)
            self.assertEqual(model.sharding_strategy, ShardingStrategy.NO_SHARD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._fsdp(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)


class TestFSDPEnvironment(MiscTest):
    """Variables that FSDP reads when it wraps a module."""

    def _set(self, name: str) -> contextlib.AbstractContextManager:
        return mock.patch.dict(os.environ, {name: "1"})

    # Through torch 2.13, a device's collectives refuse the fake group: none runs here.
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fake_collectives_are_announced(self):
        """FSDP warns once of wrong results."""
        for name, what in (
            ("FSDP_USE_FAKE_ALL_GATHER", "all-gather"),
            ("FSDP_USE_FAKE_REDUCE", "reduce-scatter"),
        ):
            with (
                self._set(name),
                self.assertLogs("torch.distributed.fsdp._flat_param") as logs,
            ):
                self._chain()
            self.assertEqual(len(logs.output), 1, "warnings for three wrappers")
            self.assertIn(
                f"Since {name}=1, FSDP will not execute {what}", logs.output[0]
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unsafe_setattr(self):
        """Writing attributes past the checks of modules changes no result."""
        for use_orig_params in (False, True):
            models = [self._chain(use_orig_params=use_orig_params)]
            with self._set("FSDP_USE_UNSAFE_SETATTR"):
                models.append(self._chain(use_orig_params=use_orig_params))
            for step in range(2):
                losses = [model(self._rows(step)).square().sum() for model in models]
                for model, loss in zip(models, losses, strict=True):
                    loss.backward()
                    with torch.no_grad():
                        for each in model.parameters():
                            each -= 0.1 * each.grad if each.grad is not None else 0
                    model.zero_grad()
                whole = [get_full_params(model) for model in models]
                self.assertEqual(whole[1], whole[0], f"step {step}, {use_orig_params=}")
            names = [[name for name, _ in model.named_parameters()] for model in models]
            self.assertEqual(names[1], names[0])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_skip_writeback_check(self):
        """Without the check, a replaced parameter is not used; FSDP warns of that."""
        with (
            self._set("FSDP_SKIP_WRITEBACK_CHECK"),
            self.assertLogs("torch.distributed.fsdp._flat_param") as logs,
        ):
            models = [self._chain(use_orig_params=True)]
        self.assertIn("FSDP will not check for parameter or grad", logs.output[0])
        models.append(self._chain(use_orig_params=True))
        outputs = []
        for model in models:
            model(self._rows())
            for each in model.parameters():
                each.data = torch.zeros_like(each)
            outputs.append(model(self._rows()))
        self.assertNotEqual(outputs[0], torch.zeros_like(outputs[0]))
        self.assertEqual(outputs[1], torch.zeros_like(outputs[1]))


class TestFSDPLogs(MiscTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_debug_level_info(self):
        """At level INFO, each post-backward hook names its parameters, and rank 0 shows
        how long the phases of loading took.
        """
        dist.set_debug_level(dist.DebugLevel.INFO)
        model = self._chain(use_orig_params=True)
        with self.assertLogs("torch.distributed.fsdp", "WARNING") as logs:
            model(self._rows()).sum().backward()
        hooks = [line.rpartition("parameters ")[2] for line in logs.output]
        self.assertEqual(hooks, [f"['{name}.weight', '{name}.bias']" for name in "cba"])
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = model.state_dict()
            if self.rank:
                with self.assertNoLogs("torch.distributed.fsdp._debug_utils", "INFO"):
                    model.load_state_dict(saved)
                return
            with self.assertLogs("torch.distributed.fsdp._debug_utils", "INFO") as logs:
                model.load_state_dict(saved)
        (line,) = logs.output
        self.assertIn("FSDP model load_state_dict profiling:", line)
        for phase in ("all_gather", "H2D", "_enter_unshard", "_exit_unshard"):
            self.assertRegex(line, rf"{phase}[^,}}]*: [0-9.e-]+[,}}]")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_dict_is_logged(self):
        """Saving logs each entry with its type, shape, local shape, type of elements
        and device.
        """
        name = "torch.distributed.fsdp._state_dict_utils"
        logger = logging.getLogger(name)
        sharded = StateDictType.SHARDED_STATE_DICT
        for kind, options, shown in (
            (StateDictType.FULL_STATE_DICT, {}, ["Tensor", (3, 3), (3, 3)]),
            (sharded, {}, ["ShardedTensor", (3, 3), (2 - self.rank, 3)]),
            (
                sharded,
                {"device_mesh": world_mesh(2)},
                ["DTensor", (3, 3), (2 - self.rank, 3)],
            ),
        ):
            model = self._fsdp(nn.Linear(3, 3, bias=False), **options)
            with FSDP.state_dict_type(model, kind), self.assertLogs(logger) as logs:
                model.state_dict()
            lines = [each.getMessage() for each in logs.records]
            self.assertIn("FSDP finished processing state_dict(), prefix=", lines)
            of, whole, local = shown
            last = f"dtype=torch.float32, device={self.device}"
            self.assertRegex(
                lines[-1],
                rf"FQN=weight: type=<class '.*\.{of}'>, "
                rf"shape=.*{whole[0]}, {whole[1]}.*, "
                rf"local_shape=.*\[{local[0]}, {local[1]}\].*, {last}",
            )


instantiate_parametrized_tests(TestFSDPMiscMultiProcess)
instantiate_parametrized_tests(TestFSDPUnshard)

if __name__ == "__main__":
    run_tests()
