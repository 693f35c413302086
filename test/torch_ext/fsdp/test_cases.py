"""The base classes: what a rank finds when its body starts, what it leaves behind, and how ranks exchange state."""

import os
import random
import sys
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal import common_fsdp
from torch_ext.testing._internal._fsdp import cases, compiled
from torch_ext.testing._internal._fsdp.device import default_world_size, distributed_backend, with_compute_device
from torch_ext.testing._internal.common_distributed import TEST_SKIPS
from torch_ext.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    FSDPTestContinuous,
    FSDPTestMultiThread,
    NestedWrappedModule,
    _assert_module_states,
    _broadcast_state_dict,
    _get_state_dict,
    _zero_model,
    compiled_fsdp_test,
    get_devtype,
    get_full_params,
    rank_device,
    subtest_name,
)

# fully_shard, while no decorator has replaced it.
ORIGINAL_FULLY_SHARD = fully_shard


def draws():
    return torch.rand(3).tolist(), random.random()


class TestProcessRun(FSDPTest):
    def test_group_and_device_are_there_and_all_ranks_draw_alike(self):
        self.assertEqual(dist.get_world_size(), default_world_size())
        self.assertEqual(dist.get_rank(), self.rank)
        self.assertEqual(self.process_group.size(), default_world_size())
        self.assertIn(distributed_backend(), dist.get_backend())
        self.assertEqual(os.environ["TORCH_NCCL_DESYNC_DEBUG"], "0")
        self.assertTrue(self.init_method.startswith("file://") and self.init_method.endswith(self.file_name))
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, draws())
        self.assertEqual(gathered, [gathered[0]] * dist.get_world_size())
        self.assertEqual(torch.empty(1, device=get_devtype()).device, rank_device(self.rank))

    def _steps_of_run(self, run_test=None, **kwargs):
        """Run ``_run`` again, with every step recorded instead of executed."""
        steps = []

        def step(name, effect=None):
            return mock.Mock(side_effect=lambda *args, **kwargs: (steps.append(name), effect and effect())[0])

        with (
            mock.patch.object(dist, "init_process_group", step("join")) as join,
            mock.patch.object(cases, "_use_device", return_value=None),
            mock.patch.object(dist, "barrier", step("barrier")),
            mock.patch.object(cases, "_reset_dynamo", step("reset")),
            mock.patch.object(cases, "set_rng_seed", step("seed")),
            mock.patch.object(type(self), "run_test", step("body", run_test)),
            mock.patch.object(dist, "destroy_process_group", step("leave")),
        ):
            try:
                type(self)._run(3, self._testMethodName, "/the/file", None, **kwargs)
            except SystemExit as ended:
                steps.append(f"exit {ended.code}")
            except unittest.SkipTest as skipped:
                steps.append(f"skip: {skipped}")
        return steps, join

    def test_run_takes_its_steps_in_order(self):
        """Without the barriers, a rank that skips at once could close the store while a slower one joins."""
        steps, join = self._steps_of_run()
        self.assertEqual(steps, ["join", "barrier", "reset", "seed", "body", "reset", "barrier", "leave"])
        self.assertEqual(join.call_args.args, (distributed_backend(),))
        self.assertEqual(
            join.call_args.kwargs,
            {"init_method": "file:///the/file", "world_size": default_world_size(), "rank": 3},
        )
        steps, _ = self._steps_of_run(run_test=lambda: sys.exit(10))
        self.assertEqual(steps, ["join", "barrier", "reset", "seed", "body", "reset", "exit 10"], "it waits for nobody")
        _, join = self._steps_of_run(fake_pg=True)
        self.assertEqual(join.call_args.args, ("fake",))
        self.assertNotIn("init_method", join.call_args.kwargs)

    def test_missing_devices_skip_the_test(self):
        with mock.patch.object(common_fsdp, "DEVICE_TYPE", "meta"), mock.patch.object(common_fsdp, "DEVICE_COUNT", 2):
            with mock.patch.object(type(self), "world_size", 3):
                steps, _ = self._steps_of_run()
            # Upstream has exit codes for up to 8 devices.
            with mock.patch.object(type(self), "world_size", 16):
                steps_of_many, _ = self._steps_of_run()
        self.assertEqual(steps, [f"exit {TEST_SKIPS['multi-gpu-3'].exit_code}"])
        self.assertEqual(steps_of_many, [f"skip: {TEST_SKIPS['multi-gpu-16'].message}"])

    def test_fsdp_options_are_compared(self):
        model = FSDP(nn.Linear(2, 2).to(get_devtype()), forward_prefetch=True, **with_compute_device({}))
        self._check_forward_prefetch(model, True)
        self._check_cpu_offload(model, CPUOffload(offload_params=False))
        self._check_backward_prefetch(model, model.backward_prefetch)
        for check, wrong in (
            (self._check_forward_prefetch, False),
            (self._check_cpu_offload, CPUOffload(offload_params=True)),
            (self._check_backward_prefetch, None),
        ):
            with self.assertRaises(AssertionError):
                check(model, wrong)


class TestNotes(FSDPTest):
    """The parent half prints skipped subtests even if the test passes."""

    world_size = 2

    def _join_processes(self, fn):
        with mock.patch("sys.stderr") as stderr:
            super()._join_processes(fn)
        printed = "".join(call.args[0] for call in stderr.write.call_args_list)
        self.assertEqual(printed, "torch_ext: " + self.id() + ": 1 of 2 subtests skipped: 1 x for a reason\n")

    def test_left_out(self):
        self.run_subtests({"value": [1, 2]}, self._test_left_out)

    def _test_left_out(self, value):
        if value == 1:
            self.skipTest("for a reason")


class TestContinuousRun(FSDPTestContinuous):
    world_size = 2

    def _check_group(self):
        self.assertEqual(self.process_group.size(), 2)
        self.assertEqual(dist.get_rank(), self.rank)
        gathered = [None] * 2
        dist.all_gather_object(gathered, draws())
        self.assertEqual(gathered[0], gathered[1])
        # A barrier and a seed come before each test, so all draw the same numbers.
        return gathered[0]

    def test_a_first(self):
        type(self).first_draws = self._check_group()

    def test_b_second(self):
        self.assertEqual(self._check_group(), type(self).first_draws)

    def test_barriers_around_the_body(self):
        """The barrier at the end of this test must not match a collective of the next one."""
        calls = []
        with mock.patch.object(dist, "barrier", lambda *args, **kwargs: calls.append("barrier")):
            with mock.patch.object(type(self), "test_a_first", lambda case: calls.append("body")):
                type(self)._run_test_given_id("TestContinuousRun.test_a_first")
        self.assertEqual(calls, ["barrier", "body", "barrier"])

    def test_parity_works_in_long_lived_ranks(self):
        self._test_fsdp_parity(NestedWrappedModule, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE)


class TestThreads(FSDPTestMultiThread):
    def test_subtests_run_in_threads(self):
        seen = []
        self.run_subtests({"value": [1, 2]}, lambda value: seen.append(value))
        self.assertEqual(seen, [1, 2])


class TestState(FSDPTest):
    world_size = 2

    def _module(self, offset=0.0):
        module = nn.BatchNorm1d(3).to(get_devtype())
        with torch.no_grad():
            module.weight.copy_(torch.arange(3.0) + 1 + offset)
        return module

    def test_equal_states_pass_and_a_difference_on_any_rank_fails_on_all(self):
        _assert_module_states(self._module(), self.process_group, self.assertEqual)
        with self.assertRaises(AssertionError):
            _assert_module_states(self._module(offset=self.rank), self.process_group, self.assertEqual)
        different = self._module()
        different.running_mean += self.rank
        with self.assertRaises(AssertionError):
            _assert_module_states(different, self.process_group, self.assertEqual)

    def test_other_names_or_counts_fail_although_values_agree(self):
        module = nn.Sequential(nn.Linear(1, 1)) if self.rank else nn.ModuleDict({"zero": nn.Linear(1, 1)})
        with self.assertRaisesRegex(AssertionError, r"rank 1 .*missing \['zero.bias'.*unexpected \['0.bias'"):
            _assert_module_states(module, self.process_group, lambda expected, actual: None)

    def test_zeroing_reaches_every_shard_or_the_local_one_and_buffers_on_request(self):
        model = FSDP(self._module(), **with_compute_device({}))
        _zero_model(model)
        self.assertEqual(torch.cat([tensor.flatten() for tensor in get_full_params(model)]).count_nonzero(), 0)
        self.assertEqual(model.module.running_var, torch.ones(3))
        _zero_model(model, zero_buffers=True)
        self.assertEqual(model.module.running_var, torch.zeros(3))
        module = self._module()
        with mock.patch.object(FSDP, "summon_full_params", side_effect=RuntimeError("summoned")):
            _zero_model(module, summon_full=False)
        self.assertEqual(module.weight.detach(), torch.zeros(3))

    def test_full_parameters_are_copies_and_of_one_level_on_request(self):
        model = FSDP(nn.Sequential(nn.Linear(3, 3)).to(get_devtype()), **with_compute_device({}))
        params = get_full_params(model)
        self.assertEqual([param.shape for param in params], [(3, 3), (3,)])
        with torch.no_grad():
            params[0].zero_()
        self.assertNotEqual(get_full_params(model)[0], params[0])
        inner = FSDP(nn.Linear(5, 5, bias=False), **with_compute_device({}))
        model = FSDP(nn.Sequential(inner, nn.Linear(5, 3, bias=False)).to(get_devtype()), **with_compute_device({}))
        sizes = sorted(param.numel() for param in get_full_params(model, recurse=False))
        self.assertEqual(sizes, [13, 15])

    def test_broadcast_gives_every_rank_the_state_of_rank_0_on_its_device(self):
        own = {"weight": torch.full((2,), float(self.rank)), "moved": torch.ones(1, device=get_devtype())}
        received = _broadcast_state_dict(self.rank, own)
        self.assertEqual(received["weight"], torch.zeros(2, device=get_devtype()))
        self.assertEqual({tensor.device.type for tensor in received.values()}, {get_devtype().type})

    def test_state_dict_in_half_precision_and_on_the_device(self):
        self.assertEqual(_get_state_dict(nn.Linear(1, 1))["weight"].dtype, torch.float32)
        half = _get_state_dict(nn.Linear(1, 1), half=True)
        self.assertEqual({tensor.dtype for tensor in half.values()}, {torch.float16})
        with mock.patch.object(nn.Module, "to", side_effect=RuntimeError("moved")):
            _get_state_dict(nn.Linear(1, 1), cpu_offload=True)
            with self.assertRaisesRegex(RuntimeError, "moved"):
                _get_state_dict(nn.Linear(1, 1))


class StopBodyError(Exception):
    pass


class TestCompiled(FSDPTestMultiThread):
    world_size = 1

    def test_globals_and_settings_are_back_after_a_raise(self):
        import torch._inductor.config as settings

        @compiled_fsdp_test()
        def test():
            if fully_shard is not ORIGINAL_FULLY_SHARD:
                self.assertEqual(settings.compile_threads, 1)
                raise StopBodyError

        with mock.patch.object(settings, "compile_threads", settings.compile_threads + 1) as threads:
            with self.assertRaises(StopBodyError):
                test()
            self.assertEqual(settings.compile_threads, threads)
        self.assertIs(fully_shard, ORIGINAL_FULLY_SHARD)

    def test_body_that_shards_in_another_way_runs_twice(self):
        """As upstream's tests of ``replicate`` do."""
        runs = []
        module = {"runs": runs}
        exec("def body(): runs.append(1)", module)
        compiled_fsdp_test()(module["body"])()
        self.assertEqual(runs, [1, 1])
        self.assertNotIn("fully_shard", module)


@pytest.mark.parametrize(
    ("accelerator", "gpu", "triton", "scheduling", "backend"),
    [
        (True, True, True, None, "inductor"),
        (True, True, False, None, "aot_eager"),
        (True, False, True, None, "aot_eager"),
        (True, False, False, object(), "inductor"),
        (False, True, False, None, "inductor"),
    ],
)
def test_only_what_inductor_does_not_serve_does_without_it(accelerator, gpu, triton, scheduling, backend):
    with (
        mock.patch.object(compiled.device, "is_accelerator", lambda: accelerator),
        mock.patch.object(compiled.private, "has_triton", lambda: triton, create=True),
        mock.patch.object(compiled.private, "is_gpu", lambda kind: gpu, create=True),
        mock.patch.object(compiled.private, "get_scheduling_for_device", lambda kind: scheduling, create=True),
    ):
        assert compiled.compile_backend() == backend


def test_alias_of_the_decorator_is_not_collected():
    assert compiled.test_compiled_fsdp.__test__ is False


def test_subtest_name_joins_mapped_names():
    assert subtest_name({"True": "offload", "1": "one"}, True, None, 1) == "offload_none_one"
    with pytest.raises(KeyError):
        subtest_name({}, True)
