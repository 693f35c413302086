"""torch.profiler shows the device's work: kernels on their streams and collectives under simccl's names."""

import json

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SIM = torch.get_device_module("sim")
BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


def _of_device(profiler):
    return [event for event in profiler.events() if event.device_type == DeviceType.PrivateUse1]


def test_kernels_are_events_of_the_device_linked_to_their_operators():
    x = torch.ones(64, 64, device="sim:1", requires_grad=True)
    with profile(activities=BOTH) as profiler:
        (x @ x).sum().backward()
    events = _of_device(profiler)
    names = [event.name for event in events]
    assert names.count("aten::mm") == 3 and "aten::sum" in names  # the backward pass runs on its own thread
    assert {event.device_index for event in events} == {1}
    averages = {(each.key, each.device_type): each for each in profiler.key_averages()}
    on_host, on_device = averages["aten::mm", DeviceType.CPU], averages["aten::mm", DeviceType.PrivateUse1]
    assert on_host.self_device_time_total == on_device.self_device_time_total > 0
    assert "Self SIM" in profiler.key_averages().table(sort_by="self_device_time_total")


def test_a_trace_has_a_row_for_each_stream(tmp_path):
    x, y, side = torch.ones(8, device="sim"), torch.ones(8, device="sim"), SIM.Stream()
    with profile(activities=BOTH) as profiler:
        x.fill_(1)
        with SIM.stream(side):
            y.zero_()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["name"]: event["tid"] for event in events if event.get("cat") == "kernel"}
    assert rows == {"aten::fill_": 0, "aten::zero_": side.stream_id}
    named = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert {"stream 0", f"stream {side.stream_id}"} <= named


def test_without_the_device_among_the_activities_nothing_of_it_is_recorded():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(4, device="sim").add_(1)
    assert not _of_device(profiler)
    with profile(activities=BOTH) as profiler:
        torch.ones(4, device="sim")
    assert [event.name for event in _of_device(profiler)] == ["aten::fill_"]


def test_the_profiler_of_autograd_times_operators():
    x = torch.ones(64, 64, device="sim")
    with torch.autograd.profiler.profile(use_device="sim", use_kineto=False) as profiler:
        x @ x
    times = [event.device_time_total for event in profiler.function_events if event.name == "aten::mm"]
    assert times and min(times) > 0
