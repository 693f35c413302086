"""Public names: upstream's are defined here, all others resolve to torch's, and compat finds what it promises."""

import importlib
import inspect

import pytest
import torch
from torch.testing._internal import common_utils as upstream_utils

from test.torch_ext.house.source import module_name, python_files
from torch_ext.testing._internal import common_distributed, common_utils

DISTRIBUTED = [
    "MultiProcessTestCase", "MultiThreadedTestCase", "MultiProcContinuousTest", "DistributedTestBase",
    "spawn_threads_and_init_comms", "run_subtests", "TEST_SKIPS", "TestSkip", "skip_if_lt_x_gpu", "skip_if_no_gpu",
    "skip_if_rocm_multiprocess", "requires_gloo", "requires_nccl", "requires_world_size",
    "requires_accelerator_dist_backend", "at_least_x_gpu", "init_multigpu_helper", "create_tcp_store",
    "with_dist_debug_levels", "captured_output", "get_timeout", "ACCELERATOR_DIST_BACKENDS", "DEFAULT_WORLD_SIZE",
    "TIMEOUT_DEFAULT", "TIMEOUT_OVERRIDE",
]  # fmt: skip
UTILS = ["run_tests", "parametrize", "instantiate_parametrized_tests", "subtest", "TestCase", "FILE_SCHEMA",
         "get_cycles_per_ms", "find_free_port", "set_rng_seed"]  # fmt: skip

AREAS = [module_name(path) for path in python_files("torch_ext/compat") if not path.name.startswith("_")]
assert len(AREAS) > 4


@pytest.mark.parametrize(("module", "names"), [(common_distributed, DISTRIBUTED), (common_utils, UTILS)])
def test_upstream_names_are_defined_here_and_exported(module, names):
    assert sorted(set(names) - vars(module).keys() & set(getattr(module, "__all__", names))) == []


def test_classes_are_ours_and_other_names_are_torchs():
    from torch.testing._internal import common_distributed as upstream

    for name in ("MultiProcessTestCase", "MultiThreadedTestCase", "MultiProcContinuousTest", "DistributedTestBase"):
        assert getattr(common_distributed, name) is not getattr(upstream, name)
    for name in ("simple_sparse_reduce_tests", "verify_ddp_error_logged", "skip_but_pass_in_sandcastle_if"):
        assert name not in vars(common_distributed)
        assert getattr(common_distributed, name) is getattr(upstream, name)
    assert common_utils.IS_LINUX is upstream_utils.IS_LINUX


# Internals of upstream's harness, which ours does another way.
_ENGINE = {
    "Event", "_event_listener", "_get_timedout_process_traceback", "_start_processes", "_worker_loop",
    "_check_and_set_tcp_init", "_check_and_unset_tcp_init",
}  # fmt: skip
# Signatures that accept more than upstream's, name arguments that upstream takes as *args, or belong to the harness.
_OTHER_SIGNATURES = {
    "NonUniformReqGradNWM.__init__", "MultiThreadedTestCase._check_return_codes", "MultiThreadedTestCase._join_threads",
    "ModuleWithDelay.forward", "get_cycles_per_ms", "initialize_pg", "FSDPTestMultiThread.run_subtests",
    "FSDPTestMixin.run_subtests", "wait_until_node_failure",
}  # fmt: skip


def parameters(function):
    return [
        (each.name, each.kind, each.default is each.empty) for each in inspect.signature(function).parameters.values()
    ]


def differences(ours, theirs, prefix=""):
    """Yield each function or class of upstream's module or class that ours lacks or that takes other parameters."""
    for name, value in vars(theirs).items():
        full = prefix + name
        if (name.startswith("__") and name != "__init__") or not callable(getattr(theirs, name)):
            continue
        if getattr(ours, name, None) is value or (not prefix and getattr(value, "__module__", "") != theirs.__name__):
            continue  # the same object, or imported
        if not hasattr(ours, name):
            yield full
        elif inspect.isclass(value):
            yield from differences(getattr(ours, name), value, f"{full}.")
        elif parameters(getattr(ours, name)) != parameters(getattr(theirs, name)):
            yield full


@pytest.mark.parametrize(
    "module",
    [
        "common_distributed", "common_fsdp", "common_utils", "dist_utils", "hypothesis_utils",
        "distributed.ddp_under_dist_autograd_test", "distributed.rpc_utils", "distributed.rpc.rpc_agent_test_fixture",
        "distributed.rpc.faulty_rpc_agent_test_fixture", "distributed.rpc.tensorpipe_rpc_agent_test_fixture",
    ],
)  # fmt: skip
def test_helpers_have_upstreams_names_and_signatures(module):
    ours, theirs = (importlib.import_module(f"{root}testing._internal.{module}") for root in ("torch_ext.", "torch."))
    found = {name for name in differences(ours, theirs) if name.rpartition(".")[2] not in _ENGINE}
    assert found <= _OTHER_SIGNATURES


def test_a_missing_name_and_another_signature_are_differences():
    class Theirs:
        def same(self, a, b=1): ...
        def other(self, a): ...
        def gone(self): ...

    class Ours:
        @classmethod
        def other(cls, a=1): ...
        def same(self, a, b=2): ...

    assert set(differences(Ours, Theirs, "C.")) == {"C.other", "C.gone"}


def places_of(area):
    """Return the places that an area passes to ``lazy_names``."""
    return vars(importlib.import_module(area))["__getattr__"].places


@pytest.mark.parametrize("area", AREAS)
def test_every_name_of_compat_is_in_the_installed_torch(area):
    module = importlib.import_module(area)
    missing = []
    for name in places_of(area):
        try:
            getattr(module, name)
        except ImportError as error:
            missing.append(str(error))
    assert missing == [], f"torch {torch.__version__} has moved private names"


@pytest.mark.parametrize("area", AREAS)
def test_every_place_of_compat_is_a_name_of_a_module_of_torch(area):
    places = places_of(area).values()
    assert all(place.startswith("torch") and place.count(":") == 1 for known in places for place in known)
