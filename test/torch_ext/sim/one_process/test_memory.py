"""Memory is counted for each device, limited, and poisoned on request."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

SIM = torch.get_device_module("sim")


def test_memory_counts_rounded_bytes_and_kernel_results():
    SIM.reset_peak_memory_stats("sim:3")
    before = SIM.memory_allocated("sim:3")
    x = torch.ones(1, device="sim:3")
    assert SIM.memory_allocated("sim:3") == before + 512 == torch.accelerator.memory_allocated(3)
    y = torch.softmax(torch.ones(256, 4, device="sim:3"), -1)  # the input is temporary, the result stays
    assert SIM.memory_allocated("sim:3") == before + 512 + 4096
    assert SIM.max_memory_allocated("sim:3") >= before + 512 + 2 * 4096
    del x, y
    assert SIM.memory_allocated("sim:3") == before
    summary = SIM.memory_summary("sim:3")
    assert "PyTorch CUDA memory summary, device ID 3" in summary and "Oversize allocations" in summary


def test_limit_raises_out_of_memory_and_leaves_the_device_usable():
    _, total = SIM.mem_get_info("sim:2")
    SIM.empty_cache()
    SIM.set_memory_limit(2 << 20, "sim:2")  # CUDA's smallest segment
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory.*sim:2"):
            torch.empty(1 << 20, device="sim:2")
        base = torch.zeros(150_000, device="sim:2")
        with pytest.raises(torch.OutOfMemoryError):
            base.exp().add(base.exp()).add(base.exp())  # a kernel's own result runs out, not a factory
        assert torch.ones(3, device="sim:2").sum().item() == 3
    finally:
        SIM.set_memory_limit(total, "sim:2")


def test_poison_shows_unset_and_freed_memory():
    SIM.set_poison(True)
    try:
        assert torch.empty(100, device="sim").isnan().all().item()
        assert (torch.empty(100, device="sim", dtype=torch.int32) == -1).all().item()
    finally:
        SIM.set_poison(False)


def test_pinned_ranges_are_known_exactly_and_states_are_staged_in_them():
    pinned = torch.empty(100, pin_memory=True)
    assert pinned.is_pinned() and pinned[50:].is_pinned()
    assert not torch.empty(100).is_pinned()
    assert torch.ones(4).pin_memory().to("sim", non_blocking=True).tolist() == [1.0] * 4
    state = {"x": torch.arange(3.0, device="sim")}
    staged = _create_cpu_state_dict(state, pin_memory=True, share_memory=True)
    _copy_state_dict(state, staged)
    assert staged["x"].is_cpu and staged["x"].is_shared() and staged["x"].tolist() == [0, 1, 2]


def test_threads_share_pools_without_losing_a_byte():
    before = SIM.memory_allocated(2)

    def churn(thread):
        for size in range(1, 300):
            held = [torch.empty(size * 100, dtype=torch.uint8, device="sim:2") for _ in range(3)]
            held[1].record_stream(SIM.default_stream(2))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert SIM.memory_allocated(2) == before
    assert SIM.memory_stats(2)["active_bytes.all.current"] == before


_VIEWS = {
    "all": lambda x: x,
    "rows": lambda x: x[1:5],
    "columns": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "conjugated": lambda x: x.conj(),
    "imaginary": lambda x: x.imag,
}


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("view", _VIEWS)
def test_copies_between_views_of_host_and_device_are_those_of_the_host(view, non_blocking):
    there = torch.complex(torch.arange(36.0), -torch.arange(36.0)).view(6, 6)
    for source in (there, there.pin_memory(), there.to(torch.complex128), there[0], there.to("sim")):
        target = "sim" if source.is_cpu else "cpu"
        for other in _VIEWS.values():
            expected, made = torch.zeros_like(there), torch.zeros_like(there).to(target)
            if other(made).shape == _VIEWS[view](there).shape and (source.dim() == 2 or view == "all"):
                taken = _VIEWS[view](source) if source.dim() == 2 else source
                if taken.is_complex() <= other(made).is_complex():
                    other(expected).copy_(taken.cpu())
                    other(made).copy_(taken, non_blocking=non_blocking)
                    SIM.synchronize()
                    assert torch.equal(made.cpu(), expected)
