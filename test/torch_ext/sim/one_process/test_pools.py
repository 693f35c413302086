"""Freed memory returns at once to the stream that allocated it; to others once the work that uses it is done."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

SIM = torch.get_device_module("sim")
BYTES = 4 * 3_001  # an odd size, so that no other test's blocks fit
_LONG = 5 * 10**9  # nanoseconds: longer than a test, short enough to synchronize with


def _take(device: int = 0) -> torch.Tensor:
    return torch.empty(BYTES, dtype=torch.uint8, device=f"sim:{device}")


def test_freed_memory_is_the_next_tensor_on_its_stream() -> None:
    first = _take()
    second = _take()
    address = first.data_ptr()
    del first
    assert _take().data_ptr() == address
    del second


def test_memory_of_one_stream_is_not_handed_to_another() -> None:
    side = SIM.Stream()
    kept = _take()
    address = kept.data_ptr()
    del kept
    with SIM.stream(side):
        other = _take()
        assert other.data_ptr() != address
        elsewhere = other.data_ptr()
        del other
        again = _take()
        assert again.data_ptr() == elsewhere
    assert _take().data_ptr() == address


def test_recorded_memory_comes_back_when_the_stream_is_done() -> None:
    side = SIM.Stream(3)
    used = _take(3)
    address = used.data_ptr()
    with SIM.stream(side):
        SIM.sleep(_LONG)
    used.record_stream(side)
    active = SIM.memory_stats(3)["active_bytes.all.current"]
    allocated = SIM.memory_allocated(3)
    del used
    assert SIM.memory_allocated(3) < allocated  # as on a GPU: freed for its owner, not yet for others
    assert SIM.memory_stats(3)["active_bytes.all.current"] == active
    held = [_take(3) for _ in range(4)]
    assert address not in [tensor.data_ptr() for tensor in held]


def test_recorded_memory_of_an_idle_stream_serves_the_next_request() -> None:
    side = SIM.Stream()
    SIM.synchronize(1)
    used = _take(1)
    address = used.data_ptr()
    used.record_stream(torch.Stream(side.device))
    active = SIM.memory_stats(1)["active_bytes.all.current"]
    del used
    assert SIM.memory_stats(1)["active_bytes.all.current"] == active  # as with CUDA: until the next request
    assert _take(1).data_ptr() == address


def test_views_record_the_memory_that_they_look_at() -> None:
    side = SIM.Stream(3)
    with SIM.stream(side):
        SIM.sleep(_LONG)
    used = _take(3)
    address = used.data_ptr()
    used[100:].record_stream(side)
    del used
    assert _take(3).data_ptr() != address


def test_threads_share_pools_without_losing_a_byte() -> None:
    before = SIM.memory_allocated(2)

    def churn(thread: int) -> None:
        for size in range(1, 300):
            held = [torch.empty(size * 100, dtype=torch.uint8, device="sim:2") for _ in range(3)]
            held[1].record_stream(SIM.default_stream(2))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert SIM.memory_allocated(2) == before
    assert SIM.memory_stats(2)["active_bytes.all.current"] == before
