"""Helpers for test bodies, tested without ranks: a mock records barriers in place of a process group."""

import contextlib
import os
import socket
import sys
import types
import unittest
from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.testing._internal._distributed.helpers import plainly_equal, reserved_port
from torch_ext.testing._internal._distributed.methods import RanksTestCase
from torch_ext.testing._internal.common_distributed import (
    MultiThreadedTestCase,
    captured_output,
    create_tcp_store,
    init_multigpu_helper,
    run_subtests,
    with_dist_debug_levels,
)
from torch_ext.testing._internal.common_utils import TestCase, get_cycles_per_ms

LEVEL = "TORCH_DISTRIBUTED_DEBUG"


@pytest.fixture
def events(monkeypatch):
    """Events in order, including barriers."""
    found = []
    monkeypatch.setattr(c10d, "barrier", lambda: found.append("barrier"))
    return found


def test_every_combination_runs_in_order_with_a_barrier_after_each(events):
    grid = {"a": [1, 2], "b": ["x", "y"]}
    run_subtests(unittest.TestCase(), grid, lambda *args, **kwargs: events.append((args, kwargs)), "always", fixed=True)
    combinations = [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert events == [
        event for a, b in combinations for event in ((("always",), {"fixed": True, "a": a, "b": b}), "barrier")
    ]


def test_a_grid_without_axes_runs_once_and_an_axis_without_values_is_an_error(events):
    run_subtests(unittest.TestCase(), {}, lambda: events.append("ran"))
    with pytest.raises(ValueError, match="there is no subtest to run: 'a' has no values"):
        run_subtests(unittest.TestCase(), {"a": []}, lambda a: events.append("ran"))
    assert events == ["ran", "barrier"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions carry notes since Python 3.11")
def test_a_failure_names_its_combination_and_ends_the_grid(events):
    def fail(a, b):
        events.append(a)
        if a == 2:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        run_subtests(unittest.TestCase(), {"a": [1, 2, 3], "b": ["x"]}, fail)
    assert raised.value.__notes__ == ["in the subtest with a=2, b='x'"]
    assert events == [1, "barrier", 2]


def test_each_combination_compiles_anew(events, monkeypatch):
    dynamo = types.SimpleNamespace(reset=lambda: events.append("reset"))
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
    run_subtests(unittest.TestCase(), {"a": [1, 2]}, lambda a: events.append(a))
    assert events == ["reset", 1, "reset", "barrier", "reset", 2, "reset", "barrier"]
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    run_subtests(unittest.TestCase(), {"a": [1]}, lambda a: events.append(a))
    assert "torch._dynamo" not in sys.modules


@pytest.fixture(params=[None, "INFO"], ids=["unset", "INFO"])
def level_before(request):
    """The debug level before a test. The fixture restores it, whatever level the code under test sets."""
    kept, wanted = os.environ.get(LEVEL), request.param
    put_level(wanted)
    yield wanted
    put_level(kept)


def put_level(level):
    if level is None:
        os.environ.pop(LEVEL, None)
    else:
        os.environ[LEVEL] = level
    c10d.set_debug_level_from_env()


@pytest.mark.parametrize("raises", [False, True])
def test_test_runs_once_at_each_level_which_is_then_restored(level_before, events, raises):
    @with_dist_debug_levels(["DETAIL", "OFF", "INFO"])
    def test(value):
        events.append((os.environ[LEVEL], c10d.get_debug_level().name))
        return sys.exit(value) if raises else value

    levels = [("DETAIL", "DETAIL"), ("OFF", "OFF"), ("INFO", "INFO")]
    if raises:
        with pytest.raises(SystemExit):
            test(value=3)
        assert events == levels[:1]
    else:
        assert test(value=3) == 3
        assert events == [event for level in levels for event in (level, "barrier")]
    assert os.environ.get(LEVEL) == level_before
    assert c10d.get_debug_level().name == (level_before or "OFF")


def test_a_store_is_reached_through_its_own_port_and_has_the_given_timeout():
    store = create_tcp_store(world_size=2, wait_for_workers=False, timeout=timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    client = c10d.TCPStore("localhost", store.port, 2, is_master=False, timeout=timedelta(seconds=30))
    client.set("from", "client")
    assert store.get("from") == b"client"
    other = create_tcp_store()
    assert other.port != store.port and other.check(["from"]) is False


@pytest.mark.parametrize(
    ("devices", "world_size", "expected"),
    [
        (0, 2, {0: [], 1: []}),
        (2, 2, {0: [0], 1: [1]}),
        (4, 2, {0: [0], 1: [1]}),
        (2, 4, {0: [], 1: [], 2: [], 3: []}),
        (1, 1, {0: [0]}),
    ],
)
def test_init_multigpu_helper(monkeypatch, devices, world_size, expected):
    monkeypatch.setattr(accelerator, "is_accelerator", lambda: devices > 0)
    monkeypatch.setattr(accelerator, "device_count", lambda: devices or 1)
    assert init_multigpu_helper(world_size, "gloo") == expected


@pytest.mark.parametrize("raises", [False, True])
def test_output_is_captured_separately_and_then_released(capsys, raises):
    with contextlib.suppress(ValueError), captured_output() as (out, err):
        print("inside")
        print("wrong", file=sys.stderr)
        if raises:
            raise ValueError
    print("outside")
    assert (out.getvalue(), err.getvalue()) == ("inside\n", "wrong\n")
    assert capsys.readouterr() == ("outside\n", "")


@pytest.fixture
def fresh_cycles():
    get_cycles_per_ms.cache_clear()
    yield
    get_cycles_per_ms.cache_clear()


def test_error_for_a_device_without_sleep_names_an_alternative(fresh_cycles, monkeypatch):
    monkeypatch.setattr(accelerator, "_chosen", "cpu")
    with pytest.raises(RuntimeError, match=r"^cpu has no _sleep; sleep on the host instead$"):
        get_cycles_per_ms()


def test_cycles_are_measured_once_by_the_devices_own_events(fresh_cycles, monkeypatch):
    took_ms = iter([50.0, 40.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 2.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self): ...

        def synchronize(self): ...

        def elapsed_time(self, end):
            return next(took_ms)

    slept = []
    module = types.SimpleNamespace(Event=Event, Stream=object, _sleep=slept.append)
    monkeypatch.setattr(accelerator, "_chosen", "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert get_cycles_per_ms() == slept[0] / 2.0
    measured = len(slept)
    get_cycles_per_ms()
    assert len(slept) == measured


@pytest.mark.processes
def test_lowered_recursion_limit_does_not_reach_later_tests():
    before = sys.getrecursionlimit()

    class Lowers(MultiThreadedTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_threads()

        def runTest(self):
            sys.setrecursionlimit(before - 100)

    Lowers().run(result := unittest.TestResult())
    assert result.wasSuccessful(), result.errors or result.failures
    assert sys.getrecursionlimit() == before


def test_reserved_port_is_given_to_no_other_process():
    with reserved_port() as port:
        taken = [socket.socket() for _ in range(2000)]
        try:
            for each in taken:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("127.0.0.1", 0))
            assert port not in {each.getsockname()[1] for each in taken}
        finally:
            for each in taken:
                each.close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


def test_a_store_binds_a_reserved_port():
    with reserved_port() as port:
        store = c10d.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
        client = c10d.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60), wait_for_workers=False)
        store.set("key", "value")
        assert client.get("key") == b"value"


def _samples():
    """Return values of many kinds, most of which differ from others in one respect alone."""
    dtypes = sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str)
    values = [0, 1, True, False, 1.0, float("nan"), "1", "", None, [1], (1,), {"a": 1}, 1 + 0j, b"1", torch.float32]
    for dtype in dict.fromkeys(dtypes):
        for tensor in ([1, 0], [1, 1], [[1, 0]], []):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # no tensor has this dtype
                values.append(torch.tensor(tensor, dtype=torch.float32).to(dtype))
    row = torch.tensor([1.0, float("nan")])
    values += [row, row.clone(), -row, torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0])]
    ones = torch.tensor([1.0, 0.0])
    values += [
        [ones],
        [ones.clone()],
        torch.nn.Parameter(ones),
        torch.nn.Parameter(-ones),
        torch.nn.Parameter(ones.clone(), requires_grad=False),
    ]
    values += [ones.to("meta"), torch.empty(2, device="meta"), ones.to_sparse(), torch.tensor([1.0, 0.0]).to_sparse()]
    values += [torch.ones(2, 2).t(), torch.tensor([[1.0, 1.0], [1.0, 1.0]]), ones[:1].expand(2), torch.ones(2)]
    values += [torch.tensor([1 + 1j, 0]).conj(), torch.tensor([1 - 1j, 0]), torch.tensor([1 + 1j, 0])]
    return values


@pytest.mark.filterwarnings("ignore:.*ComplexHalf|.*quantized")
def test_values_are_plainly_equal_only_where_torch_finds_them_equal():
    """For each pair of some 100 values; the judge is the test case of torch."""
    judge, values, agreed = TestCase(), _samples(), 0
    for x in values:
        for y in values:
            if plainly_equal(x, y):
                judge.assertEqual(x, y)
                agreed += 1
    assert agreed >= 50  # so the quick way is taken


@pytest.mark.parametrize(
    ("x", "y"),
    [(1, True), (1, 1.0), (torch.ones(1), torch.ones(1, dtype=torch.float64)), (torch.ones(1), torch.ones(1, 1))],
    ids=["bool", "float", "dtype", "shape"],
)
def test_a_case_of_ranks_compares_as_torch_does(x, y):
    class Case(RanksTestCase):
        def _prepare(self):
            """Start no zygote."""

    ours, theirs = Case(), TestCase()
    messages = []
    for case in (ours, theirs):
        try:
            case.assertEqual(x, y, "where")
            messages.append(None)
        except AssertionError as error:
            messages.append(str(error))
    assert messages[0] == messages[1]
    ours.assertEqual(torch.ones(2), torch.ones(2))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        ours.assertEqual(torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match="rtol"):
        ours.assertEqual(torch.ones(2), torch.ones(2), rtol=1.0)  # torch wants both tolerances
