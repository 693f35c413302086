"""Virtual time in one process: what it moves, what it leaves alone, and the questions of a trace."""

import json
import time

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from torch_ext.sim import _native
from torch_ext.sim.clock import MODELS, Model, NoModelError, Step

SIM = torch.get_device_module("sim")
clock = SIM.clock


def timed_event(stream=None):
    event = SIM.Event(enable_timing=True)
    event.record(stream)
    return event


def test_elapsed_time_is_that_of_the_model():
    with clock.measure("unit"):
        before = timed_event()
        SIM._sleep(2_000_000)
        torch.ones(3, device="sim")
        after = timed_event()
        assert not after.query()
        after.synchronize()
        assert after.query()
        assert before.elapsed_time(after) == 2.000001


def test_a_sleep_of_a_day_passes_at_once():
    began = time.monotonic()
    with clock.measure("unit") as trace:
        SIM._sleep(86_400 * 10**9)
    assert trace.time == 86_400 * 10**9
    assert time.monotonic() - began < 3600


def test_queries_in_a_loop_reach_the_end():
    with clock.measure("unit") as trace:
        SIM._sleep(10_500)
        event = timed_event()
        asked = 1
        while not event.query():
            asked += 1
    assert (asked, trace.time) == (12, 11_000)


def test_host_pays_for_launches_and_waits_for_reads():
    x = torch.ones(1, device="sim")
    with clock.measure("unit", launch_ns=10) as trace:
        for _ in range(3):
            x.add_(1)
        assert clock.now_ns() == 30
        assert x.item() == 4  # a copy of four bytes, launched at 40
        assert clock.now_ns() == 44
    assert [work.start for work in trace.select("kernel")] == [10, 20, 30]


def test_streams_run_side_by_side_and_copies_share_an_engine():
    one, two = SIM.Stream(), SIM.Stream()
    host, device = torch.ones(100, pin_memory=True), torch.ones(100, device="sim")
    with clock.measure("unit") as trace:
        for stream in (one, two):
            with SIM.stream(stream):
                SIM._sleep(300)
                device.copy_(host, non_blocking=True)
    assert trace.time == 300 + 2 * 400
    assert trace.busy("kernel") == 300
    assert (trace.idle(one), trace.idle(two)) == (400, 400)
    assert trace.critical_path() == [Step("sleep", 300), Step("aten::copy_", 800)]


def test_copies_between_devices_share_no_engine():
    x = torch.ones(100, device="sim:0")
    copies = [torch.ones(100, device="sim:1") for _ in range(2)]
    with clock.measure("unit") as trace:
        for copy in copies:
            with SIM.stream(SIM.Stream(device="sim:0")), SIM.stream(SIM.Stream(device="sim:1")):
                copy.copy_(x, non_blocking=True)
    assert trace.time == x.nbytes


def test_critical_path_follows_events_and_adds_up():
    side = SIM.Stream()
    with clock.measure("unit", launch_ns=5) as trace:
        with SIM.stream(side):
            SIM._sleep(1000)
        SIM._sleep(200)
        SIM.current_stream().wait_stream(side)
        SIM._sleep(30)
        SIM.synchronize()
        SIM._sleep(7)
    assert trace.critical_path() == [Step("host", 5), Step("sleep", 1030), Step("host", 5), Step("sleep", 7)]
    assert sum(step.time for step in trace.critical_path()) == trace.time


def test_values_and_the_clock_outside_are_untouched():
    before = timed_event()
    with clock.measure("unit"):
        assert before.query()
        inside = timed_event()
        SIM._sleep(10**15)
    assert not _native.is_clock_on()
    assert inside.query()
    SIM.current_stream().wait_event(inside)
    inside.synchronize()
    SIM.synchronize()
    assert torch.ones(2, device="sim").sum().item() == 2


def test_an_error_in_the_body_ends_virtual_time():
    with pytest.raises(KeyError), clock.measure("unit") as trace:
        SIM._sleep(100)
        raise KeyError
    assert not _native.is_clock_on()
    assert (trace.time, trace.busy("kernel"), trace.critical_path()) == (100, 100, [Step("sleep", 100)])


def test_roofline_takes_the_longer_of_bytes_and_operations(tmp_path):
    constants = {"memory": 4, "flops.Float": 8, "kernel": 3}
    sourced = {name: {"value": value, "source": "definition"} for name, value in constants.items()}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"about": "", "validated": False, "constants": sourced}))
    a, b = torch.ones(16, 32, device="sim"), torch.ones(32, 64, device="sim")
    with clock.measure(str(path)) as trace:
        a @ b
        a.add_(1)
    matmul, add = (work.end - work.start for work in trace.works if work.kind == "kernel")
    assert matmul == 3 + 2 * 16 * 32 * 64 // 8
    assert add == 3 + 2 * a.nbytes // 4
    with pytest.raises(NoModelError, match=r"no model: mine has no flops\.Double\. "), clock.measure(str(path)):
        a.double() @ b.double()


@pytest.mark.parametrize(
    ("name", "value"), [("link", -1), ("link", 0), ("kernel", float("inf")), ("node", 0.5), ("node", -8)]
)
def test_models_have_possible_numbers(tmp_path, name, value):
    constants = {name: {"value": value, "source": "definition"}}
    (tmp_path / "mine.json").write_text(json.dumps({"about": "", "validated": False, "constants": constants}))
    with pytest.raises(ValueError, match=f"got {name} = .*expected rates above 0"):
        Model.load(str(tmp_path / "mine.json"))


def test_unknown_constants_are_named(tmp_path):
    (tmp_path / "mine.json").write_text(
        '{"about": "", "validated": false, "constants": {"lnik": {"value": 1, "source": "definition"}}}'
    )
    with pytest.raises(ValueError, match=r"mine\.json: got lnik, expected collective, .*, to_host or flops\.TYPE\."):
        Model.load(str(tmp_path / "mine.json"))


@pytest.mark.parametrize("launch_ns", [-1, float("inf"), float("nan")])
def test_launches_take_time_or_none(launch_ns):
    with pytest.raises(ValueError, match=rf"Got launch_ns={launch_ns}, expected a number of nanoseconds from 0 on\."):
        with clock.measure(launch_ns=launch_ns):
            pass
    assert not _native.is_clock_on()


def test_questions_about_what_does_not_exist_name_what_does():
    x, side = torch.ones(4, device="sim"), SIM.Stream()
    with clock.measure("unit") as trace:
        x.add_(1)
    for question in (trace.exposed, trace.busy, trace.sent, trace.select, lambda name: trace.overlap("kernel", name)):
        for name in ("allgather", "aten::ad", "add", ""):
            with pytest.raises(
                ValueError, match=rf"Got '{name}', which .* This trace has aten::add, collective, copy, "
            ):
                question(name)
        assert not question("all_gather") and not question("aten::mm") and not question("transfer")
    assert trace.busy("aten::add_") == trace.busy("aten::add") == 1
    assert (trace.idle(side), trace.idle(SIM.current_stream()), trace.idle((0, 0))) == (1, 0, 0)
    for stream in ((0, 77), torch.Stream("cpu")):
        with pytest.raises(ValueError, match=r"Got the stream .* This trace has \(0, 0\)\."):
            trace.idle(stream)


def test_models_name_the_source_of_each_constant(tmp_path):
    for name in MODELS:
        for constant in Model.load(name).constants.values():
            assert constant["source"] == "definition" or (constant["source"].startswith("http") and constant["quote"])
    with pytest.raises(ValueError, match=r"Got the model 'h200', expected one of .*unit or the path of a JSON file\."):
        Model.load("h200")
    (tmp_path / "mine.json").write_text('{"about": "", "validated": false, "constants": {"link": {"value": 1}}}')
    with pytest.raises(ValueError, match="link without a source"):
        Model.load(str(tmp_path / "mine.json"))
    for text in ("", "[]", '{"about": ""}', '{"about": "", "validated": false, "constants": {"link": 3}}'):
        (tmp_path / "mine.json").write_text(text)
        with pytest.raises(ValueError, match=r"mine\.json is no cost model: "):
            Model.load(str(tmp_path / "mine.json"))


def test_profiler_shows_device_times_of_the_model():
    with (
        clock.measure("unit"),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiler,
    ):
        SIM._sleep(5_000_000)
        torch.ones(100_000, device="sim").cpu()
    events = profiler.events() or []
    on_device = [event for event in events if event.device_type != DeviceType.CPU]
    times = {event.name: round(event.time_range.elapsed_us(), 3) for event in on_device}
    assert times == {"aten::fill_": 0.001, "aten::copy_": 400.0}


def test_replayed_graphs_launch_no_kernels():
    x, stream, graph = torch.ones(4, device="sim"), SIM.Stream(), torch.accelerator.Graph()
    with SIM.stream(stream):
        graph.capture_begin()
        x.add_(1)
        x.add_(1)
        graph.capture_end()
    with clock.measure("unit", launch_ns=10) as trace:
        graph.replay()
    assert [(work.name, work.start) for work in trace.select("kernel")] == [("aten::add", 0), ("aten::add", 1)]


def test_a_second_clock_is_refused():
    with clock.measure("unit") as outer:
        SIM._sleep(100)
        with clock.measure() as inner:
            SIM._sleep(5)
        for other in ({"model": "h100-sxm"}, {"launch_ns": 3}):
            with pytest.raises(ValueError, match="runs under 'unit' already"), clock.measure(**other):
                pass
        SIM._sleep(7)
    assert (inner.begin, inner.time, outer.time, len(inner.works)) == (100, 5, 112, 2)
