"""Allocation history: snapshots for torch's visualizer, and the error of a device that has run out."""

import pickle
import re

import pytest
import torch
from torch.cuda import _memory_viz

SIM = torch.get_device_module("sim")
DEVICE = "sim:3"


@pytest.fixture(autouse=True)
def _ends_recording():
    yield
    SIM.memory._record_memory_history(None)


@pytest.fixture
def recording():
    SIM.memory._record_memory_history()


@pytest.fixture
def small_device():
    SIM.empty_cache()
    SIM.set_memory_limit(2 << 20, DEVICE)  # one segment of small requests
    yield
    SIM.set_memory_limit(1 << 34, DEVICE)


def _make(count=1 << 16):
    return torch.ones(count, device=DEVICE)


def _block_at(address):
    blocks = [block for segment in SIM.memory_snapshot() for block in segment["blocks"]]
    (found,) = (block for block in blocks if block["address"] == address)
    return found


def test_blocks_name_their_allocation_while_recording_and_while_they_live():
    kept = _make(100)
    assert _block_at(kept.data_ptr())["frames"] == []
    assert SIM.memory._snapshot()["device_traces"] == [[] for _ in range(SIM.device_count())]
    SIM.memory._record_memory_history()
    tensor = _make(3000)
    block = _block_at(address := tensor.data_ptr())
    assert (block["state"], block["size"], block["requested_size"]) == ("active_allocated", 12288, 12000)
    assert block["frames"][0]["name"] == "_make" and isinstance(block["frames"][0]["line"], int)
    assert block["frames"][0]["filename"].endswith("test_memory_history.py")
    del tensor
    block = _block_at(address)
    assert block["state"] == "inactive" and block["frames"] == []


def test_a_block_that_a_stream_still_uses_awaits_its_end():
    tensor, busy = _make(5000), SIM.Stream(DEVICE)
    address = tensor.data_ptr()
    with SIM.stream(busy):
        SIM._sleep(2_000_000_000)
        tensor.record_stream(busy)
    try:
        del tensor
        assert _block_at(address)["state"] == "active_pending_free"
    finally:
        busy.synchronize()


def test_segments_add_up_to_the_statistics(recording):
    kept = [_make(100), _make(1 << 19)]
    segments = [segment for segment in SIM.memory_snapshot() if segment["device"] == 3]
    assert sum(segment["allocated_size"] for segment in segments) == SIM.memory_allocated(DEVICE)
    assert sum(segment["total_size"] for segment in segments) == SIM.memory_reserved(DEVICE)
    assert {segment["segment_type"] for segment in segments} == {"small", "large"}
    del kept


def test_torchs_visualizer_reads_a_snapshot(recording, tmp_path):
    kept = _make()
    _make()
    SIM.memory._dump_snapshot(str(tmp_path / "dump.pickle"))
    snapshot = pickle.loads((tmp_path / "dump.pickle").read_bytes())
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "256.0KiB" in _memory_viz.trace(snapshot)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    # Other tests may hold memory, too.
    allocated = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    assert allocated >= kept.nbytes
    assert f"total_allocated: {_memory_viz.Bytes(allocated)}" in _memory_viz.segsum(snapshot)
    actions = [event["action"] for event in snapshot["device_traces"][3]]
    assert actions == ["alloc", "alloc", "free_requested", "free_completed"]
    assert snapshot["device_traces"][3][0]["addr"] == kept.data_ptr()


def test_options_say_what_is_kept():
    SIM.memory._record_memory_history("state")
    tensor = _make(10)
    assert _block_at(tensor.data_ptr())["frames"] and not SIM.memory._snapshot()["device_traces"][3]
    SIM.memory._record_memory_history("all", context=None)
    tensor = _make(10)
    assert not _block_at(tensor.data_ptr())["frames"] and SIM.memory._snapshot()["device_traces"][3]
    SIM.memory._record_memory_history(max_entries=3)
    for _ in range(10):
        _make(10)
    assert len(SIM.memory._snapshot()["device_traces"][3]) <= 6  # a free is two
    with pytest.raises(ValueError, match="'state', 'all' or None"):
        SIM.memory._record_memory_history("everything")


def test_out_of_memory_lists_held_memory_by_size(small_device):
    kept = [_make() for _ in range(7)]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        _make(1 << 17)
    assert str(raised.value) == (
        "sim out of memory. Tried to allocate 512.00 KiB. Device sim:3 has a total capacity of 2.00 MiB of which "
        "0 bytes is free, and a new segment takes 2.00 MiB. Of the memory in use 1.75 MiB is allocated by tensors, "
        "and 256.00 KiB is reserved but unallocated.\nAllocated by tensors, most first:\n  1.75 MiB in 7 blocks of "
        "256.00 KiB\n"
        "Free tensors, or raise the capacity with torch.sim.set_memory_limit. To see the lines that allocated it, call "
        "torch.sim.memory._record_memory_history() first."
    )
    del kept


def test_out_of_memory_lists_allocating_lines_where_recorded(small_device, recording):
    kept = [torch.ones(1 << 15, device=DEVICE)]
    for _ in range(6):
        kept.append(_make())
    with pytest.raises(torch.OutOfMemoryError) as raised:
        _make(1 << 17)
    text = str(raised.value)
    first, second = text.index("1.50 MiB in 6 blocks made at\n"), text.index("128.00 KiB in 1 block made at\n")
    assert first < second
    assert re.search(r"6 blocks made at\n    \S*test_memory_history.py:\d+ in _make\n    \S*:\d+ in test_out_of", text)
    assert "_record_memory_history" not in text
    trace = SIM.memory._snapshot()["device_traces"][3]
    assert trace[-1]["action"] == "oom" and trace[-1]["size"] == 1 << 19 and trace[-1]["device_free"] == 0
    del kept


def test_out_of_memory_in_a_device_that_holds_nothing(small_device):
    with pytest.raises(torch.OutOfMemoryError, match=r"0 bytes is reserved but unallocated. Free tensors"):
        _make(1 << 20)
