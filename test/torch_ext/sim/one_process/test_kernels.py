"""Every kernel of the device passes through one entry, which knows what it reads and writes (csrc/kernel.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard
from torch import Tensor
from torch.utils._pytree import tree_leaves

import torch_ext.sim  # noqa: F401 - registers the device
from test.torch_ext.sim.one_process.observed import Entry, is_touched, kernels, kinds, observe, ranges

SIM: Any = torch.get_device_module("sim")
ATEN, C10D, FSDP = torch.ops.aten, torch.ops.c10d, torch.ops.fsdp


def _x(*sizes: int, dtype: torch.dtype = torch.float32, device: str = "sim") -> Tensor:
    return torch.ones(sizes, dtype=dtype).to(device)


# How to call each operator that the device, or torch for the device, has a kernel of its own for.
_HAND_WRITTEN: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "aten::_copy_from": lambda: (ATEN._copy_from, (_x(3), _x(3))),
    "aten::_copy_from_and_resize": lambda: (ATEN._copy_from_and_resize, (_x(3), _x(3))),
    "aten::_efficientzerotensor": lambda: (lambda: ATEN._efficientzerotensor([3], device="sim"), ()),
    "aten::_local_scalar_dense": lambda: (ATEN._local_scalar_dense, (_x(1),)),
    "aten::_scaled_dot_product_fused_attention_overrideable": lambda: (
        ATEN._scaled_dot_product_fused_attention_overrideable,
        tuple(_x(1, 1, 4, 8) for _ in range(3)),
    ),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": lambda: (_attention_backward, _attention()),
    "aten::_thnn_fused_gru_cell": lambda: (ATEN._thnn_fused_gru_cell, (_x(2, 6), _x(2, 6), _x(2, 2), _x(6), _x(6))),
    "aten::_thnn_fused_gru_cell_backward": lambda: (
        ATEN._thnn_fused_gru_cell_backward,
        (_x(2, 2), _x(2, 10), True),
    ),
    "aten::_thnn_fused_lstm_cell": lambda: (ATEN._thnn_fused_lstm_cell, (_x(2, 8), _x(2, 8), _x(2, 2), _x(8), _x(8))),
    "aten::_thnn_fused_lstm_cell_backward_impl": lambda: (
        ATEN._thnn_fused_lstm_cell_backward_impl,
        (*(_x(2, 2) for _ in range(4)), _x(2, 8), True),
    ),
    "aten::addr": lambda: (ATEN.addr, (_x(2, 3), _x(2), _x(3))),
    "aten::batch_norm_backward_elemt": lambda: (
        ATEN.batch_norm_backward_elemt,
        (_x(4, 3), _x(4, 3), *(_x(3) for _ in range(5)), _x(1, dtype=torch.int32)),
    ),
    "aten::batch_norm_backward_reduce": lambda: (
        ATEN.batch_norm_backward_reduce,
        (_x(4, 3), _x(4, 3), _x(3), _x(3), _x(3), True, True, True),
    ),
    "aten::batch_norm_elemt": lambda: (ATEN.batch_norm_elemt, (_x(4, 3), *(_x(3) for _ in range(4)), 1e-5)),
    "aten::batch_norm_elemt.out": lambda: (
        lambda *args: ATEN.batch_norm_elemt.out(*args[:-1], out=args[-1]),
        (_x(4, 3), *(_x(3) for _ in range(4)), 1e-5, _x(4, 3)),
    ),
    "aten::batch_norm_gather_stats": lambda: (
        ATEN.batch_norm_gather_stats,
        (_x(4, 3), _x(2, 3), _x(2, 3), _x(3), _x(3), 0.1, 1e-5, 4),
    ),
    "aten::batch_norm_gather_stats_with_counts": lambda: (
        ATEN.batch_norm_gather_stats_with_counts,
        (_x(4, 3), _x(2, 3), _x(2, 3), _x(3), _x(3), 0.1, 1e-5, _x(2)),
    ),
    "aten::batch_norm_stats": lambda: (ATEN.batch_norm_stats, (_x(4, 3), 1e-5)),
    "aten::convolution_backward_overrideable": lambda: (
        ATEN.convolution_backward_overrideable,
        (_x(1, 1, 2, 2), _x(1, 1, 3, 3), _x(1, 1, 2, 2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3),
    ),
    "aten::convolution_overrideable": lambda: (
        ATEN.convolution_overrideable,
        (_x(1, 1, 3, 3), _x(1, 1, 2, 2), _x(1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ),
    "aten::mish_backward": lambda: (ATEN.mish_backward, (_x(3), _x(3))),
    "aten::native_batch_norm": lambda: (
        ATEN.native_batch_norm,
        (_x(4, 3), *(_x(3) for _ in range(4)), True, 0.1, 1e-5),
    ),
    "aten::native_batch_norm_backward": lambda: (
        ATEN.native_batch_norm_backward,
        (_x(4, 3), _x(4, 3), *(_x(3) for _ in range(5)), True, 1e-5, [True] * 3),
    ),
    "aten::native_dropout": lambda: (ATEN.native_dropout, (_x(5), 0.5, True)),
    "aten::native_group_norm": lambda: (ATEN.native_group_norm, (_x(2, 4, 3), _x(4), _x(4), 2, 4, 3, 2, 1e-5)),
    "aten::native_layer_norm": lambda: (ATEN.native_layer_norm, (_x(2, 4), [4], _x(4), _x(4), 1e-5)),
    "aten::silu_backward": lambda: (ATEN.silu_backward, (_x(3), _x(3))),
    "fsdp::all_gather_copy_in": lambda: (FSDP.all_gather_copy_in, ([_x(3)], _x(6), [3], 3, 0)),
    "fsdp::chunk_cat": lambda: (lambda given, out: FSDP.chunk_cat([given], 0, 2, out=out), (_x(4), _x(2, 2))),
    "fsdp::split_with_sizes_copy": lambda: (
        lambda given, *out: FSDP.split_with_sizes_copy(given, [1, 2], 0, out=list(out)),
        (_x(3), _x(1), _x(2)),
    ),
}

# Kernels that touch no elements: they make memory or views of it, or answer questions about sizes.
_WITHOUT_ELEMENTS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "aten::_fused_sdp_choice": lambda: (ATEN._fused_sdp_choice, tuple(_x(1, 1, 4, 8) for _ in range(3))),
    "aten::_has_compatible_shallow_copy_type": lambda: (ATEN._has_compatible_shallow_copy_type, (_x(3), _x(3))),
    "aten::_reshape_alias": lambda: (ATEN._reshape_alias, (_x(4), [2, 2], [2, 1])),
    "aten::as_strided": lambda: (ATEN.as_strided, (_x(4), [2], [2])),
    "aten::empty.memory_format": lambda: (lambda: torch.empty(3, device="sim"), ()),
    "aten::empty_strided": lambda: (lambda: torch.empty_strided((3,), (1,), device="sim"), ()),
    "aten::record_stream": lambda: (ATEN.record_stream, (_x(3), SIM.current_stream())),
    "aten::resize_": lambda: (lambda x: x.resize_(2), (_x(3),)),
    "aten::set_": lambda: (lambda x: x.set_(), (_x(3),)),
    "aten::set_.source_Storage": lambda: (lambda x, y: x.set_(y.untyped_storage()), (_x(3), _x(3))),
    "aten::set_.source_Storage_storage_offset": lambda: (
        lambda x, y: x.set_(y.untyped_storage(), 0, (2,), (1,)),
        (_x(3), _x(3)),
    ),
    "aten::set_.source_Tensor": lambda: (lambda x, y: x.set_(y), (_x(3), _x(3))),
    "aten::unfold": lambda: (ATEN.unfold, (_x(4), 0, 2, 2)),
    "aten::view": lambda: (ATEN.view, (_x(4), [2, 2])),
    "aten::view_as_complex": lambda: (ATEN.view_as_complex, (_x(2, 2),)),
    "aten::view_as_real": lambda: (ATEN.view_as_real, (_x(2, dtype=torch.complex64),)),
}


def _attention() -> tuple[Any, ...]:
    inputs = [_x(1, 1, 4, 8).requires_grad_() for _ in range(3)]
    output, logsumexp, *_ = ATEN._scaled_dot_product_fused_attention_overrideable(*(one.detach() for one in inputs))
    return (*(one.detach() for one in inputs), output, logsumexp)


def _attention_backward(query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor) -> Any:
    none = torch.empty(0, dtype=torch.long, device="sim")
    return ATEN._scaled_dot_product_fused_attention_overrideable_backward(
        torch.ones_like(output), query, key, value, None, [True, True, True, False], output, logsumexp,
        none, none, 4, 4, 0.0, False, none, none,
    )  # fmt: skip


# Arguments of which a kernel wants to know the sizes or the type alone.
_ASKED_ABOUT = {
    "aten::batch_norm_backward_reduce": 4,
    "aten::batch_norm_gather_stats": 0,
    "aten::batch_norm_gather_stats_with_counts": 0,
}


def _assert_accounted(entries: list[Entry], args: Any, result: Any) -> None:
    """Assert that what went in was read or written, and that what came out was written."""
    written, read = ranges(entries, written=True), ranges(entries, written=False)
    for tensor in tree_leaves(args):
        if isinstance(tensor, Tensor):
            assert is_touched(tensor, written + read), f"an argument of {tuple(tensor.shape)} was not accounted for"
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor):
            assert is_touched(tensor, written), f"a result of {tuple(tensor.shape)} was not accounted for"


def _registered(*namespaces: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    return {name for name in names if name.partition("::")[0] in namespaces}


def test_every_kernel_registered_for_the_device_is_called_below() -> None:
    assert _registered("aten", "fsdp") == _HAND_WRITTEN.keys() | _WITHOUT_ELEMENTS.keys()
    assert _registered("c10d") == _COLLECTIVES.keys()


@pytest.mark.parametrize("name", _HAND_WRITTEN)
def test_kernels_account_for_what_they_read_and_write(name: str) -> None:
    program, args = _HAND_WRITTEN[name]()
    result, entries = observe(program, *args)
    assert kernels(entries)
    asked_about = _ASKED_ABOUT.get(name)
    _assert_accounted(entries, [arg for i, arg in enumerate(args) if i != asked_about], result)


@pytest.mark.parametrize("name", _WITHOUT_ELEMENTS)
def test_views_factories_and_questions_touch_no_elements(name: str) -> None:
    program, args = _WITHOUT_ELEMENTS[name]()
    _, entries = observe(program, *args)
    assert not kernels(entries)


_PROGRAMS: dict[str, Callable[..., Any]] = {
    "in place": lambda x, y: x.add_(y),
    "out": lambda x, y: torch.add(x, y, out=torch.empty(0, device="sim")),
    "foreach": lambda x, y: torch._foreach_add([x, y], 1.0),
    "foreach in place": lambda x, y: torch._foreach_mul_([x, y], 2.0),
    "foreach copy": lambda x, y: torch._foreach_copy_([x], [y]),
    "foreach norm": lambda x, y: torch._foreach_norm([x, y]),
    "fused optimizer": lambda x, y: torch._fused_sgd_(
        [x], [y], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=True,
    ),
    "lists": lambda x, y: torch.cat([x, y]),
    "optional lists": lambda x, y: x[(y > 0).nonzero()[:, 0]],
    "random numbers": lambda x, y: (x.normal_(), torch.rand_like(y), y.bernoulli_(0.5)),
    "to the host": lambda x, y: (x.cpu(), y.to("cpu")),
    "from the host": lambda x, y: (x.copy_(torch.ones(4, 4)), y.copy_(torch.zeros(4, 4))),
    "across devices": lambda x, y: (x.to("sim:1"), y.to("sim:1")),
    "another type": lambda x, y: (x.double(), y.half()),
    "contiguous": lambda x, y: (x.t().contiguous(), y.t().clone()),
    "data-dependent size": lambda x, y: (x.nonzero(), torch.masked_select(x, y > 0)),
    "conjugate": lambda x, y: (torch.complex(x, y).conj().resolve_conj(),),
}  # fmt: skip


@pytest.mark.parametrize("name", _PROGRAMS)
def test_operators_of_every_form_account_for_what_they_read_and_write(name: str) -> None:
    x, y = _x(4, 4), _x(4, 4)
    result, entries = observe(_PROGRAMS[name], x, y)
    _assert_accounted(entries, (x, y), result)


def test_autocast_and_backward_account_for_casts_and_gradients() -> None:
    x, weight = _x(4, 4), _x(4, 4).requires_grad_()

    def program() -> Tensor:
        with torch.autocast("sim", torch.bfloat16):
            y = x @ weight
        y.float().sum().backward()
        return y

    y, entries = observe(program)
    assert y.dtype == torch.bfloat16
    _assert_accounted(entries, (x, weight), (y, weight.grad))


def test_kernels_name_the_stream_that_is_current() -> None:
    x, stream = _x(4), SIM.Stream()
    with SIM.stream(stream):
        _, entries = observe(lambda: x + 1)
    assert [entry["stream"] for entry in kernels(entries)] == [stream.stream_id]
    _, entries = observe(lambda: x + 1)
    assert [entry["stream"] for entry in kernels(entries)] == [0]


def test_ranges_are_those_of_the_elements() -> None:
    x = torch.zeros(8, 8).to("sim")
    _, entries = observe(lambda: x[1:3, 2:4].add_(1))
    first = x.data_ptr()
    assert ranges(entries, written=True) == [(first + 4 * (8 + 2), first + 4 * (2 * 8 + 3 + 1))]
    _, entries = observe(lambda: x[3:3].add_(1))
    assert not ranges(entries, written=True)


def test_growing_a_tensor_moves_its_elements() -> None:
    x = _x(4)
    old = (x.data_ptr(), x.data_ptr() + 16)
    _, entries = observe(lambda: x.resize_(1000))
    assert ranges(entries, written=False) == [old]
    assert ranges(entries, written=True) == [(x.data_ptr(), x.data_ptr() + 16)]


_HOST_READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "cpu": lambda x: x.cpu(),
    "copy to the host": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "print": lambda x: repr(x),
}


@pytest.mark.parametrize("name", _HOST_READS)
def test_reads_of_the_host_are_told(name: str) -> None:
    x, stream = _x(4), SIM.Stream()
    with SIM.stream(stream):
        _, entries = observe(_HOST_READS[name], x)
    assert stream.stream_id in [entry["stream"] for entry in entries if entry["kind"] == "host_knows_stream"]


def test_copies_that_do_not_block_tell_the_host_nothing() -> None:
    x, there = _x(4), torch.empty(4, pin_memory=True)
    for program in (lambda: there.copy_(x, non_blocking=True), lambda: x.copy_(there), lambda: x + 1):
        _, entries = observe(program)
        assert kernels(entries) and not any("host_knows" in kind for kind in kinds(entries))


def _moments(entries: list[Entry]) -> list[int]:
    """Return which moment each entry is about, counted from the first one."""
    numbers = [entry["moment"] for entry in entries if entry["moment"]]
    return [number - numbers[0] for number in numbers]


def test_what_orders_streams_is_told_in_order() -> None:
    one, two, event = SIM.Stream(), SIM.Stream(), SIM.Event()

    def program() -> None:
        two.wait_event(event)  # never recorded: no edge
        event.record(one)
        two.wait_event(event)
        event.query()
        event.synchronize()
        two.wait_stream(one)
        one.query()
        one.synchronize()
        SIM.synchronize()

    _, entries = observe(program)
    assert kinds(entries) == [
        "recorded", "stream_waits", "host_knows_moment", "host_knows_moment", "recorded", "stream_waits",
        "host_knows_stream", "host_knows_stream", "host_knows_device",
    ]  # fmt: skip
    assert _moments(entries) == [0, 0, 0, 0, 1, 1]
    assert [entry["stream"] for entry in entries if entry["kind"] == "stream_waits"] == [two.stream_id] * 2


def test_an_event_recorded_again_is_another_moment() -> None:
    one, two, event = SIM.Stream(), SIM.Stream(), SIM.Event()

    def program() -> None:
        for _ in range(2):
            event.record(one)
            two.wait_event(event)

    _, entries = observe(program)
    assert _moments(entries) == [0, 0, 1, 1]


def test_a_copy_across_devices_orders_both_streams() -> None:
    x = _x(4)
    _, entries = observe(lambda: x.to("sim:1"))
    order = [(entry["kind"], entry["device"]) for entry in entries if entry["kind"] in ("kernel", "stream_waits")]
    assert order == [("stream_waits", 0), ("kernel", 0), ("stream_waits", 1)]


def test_the_life_of_memory_is_told() -> None:
    def program() -> int:
        x = torch.empty(100, device="sim")
        address = x.data_ptr()
        x.record_stream(SIM.Stream())
        x.untyped_storage().resize_(0)
        return address

    address, entries = observe(program)
    assert [entry["kind"] for entry in entries if entry["address"] == address] == ["allocated", "used_on", "freed"]


def test_autograd_orders_streams_of_forward_and_backward() -> None:
    x, side = _x(4).requires_grad_(), SIM.Stream()

    def program() -> None:
        side.wait_stream(SIM.current_stream())
        with SIM.stream(side):
            y = x * 2
        SIM.current_stream().wait_stream(side)
        (y * 3).sum().backward()

    _, entries = observe(program)
    waits = [entry["stream"] for entry in entries if entry["kind"] == "stream_waits"]
    assert waits.count(side.stream_id) >= 2  # the program's own, and the engine's for the node of `x * 2`
    assert len({entry["stream"] for entry in kernels(entries)}) == 2


# --- what is on two devices is refused, buffers included ---


_BUFFERS: dict[str, tuple[str, int]] = {
    "running mean": ("aten::native_batch_norm_backward", 3),
    "running variance": ("aten::native_batch_norm_backward", 4),
    "saved mean": ("aten::native_batch_norm_backward", 5),
    "saved deviation": ("aten::native_batch_norm_backward", 6),
    "running mean of ranks": ("aten::batch_norm_gather_stats_with_counts", 3),
    "weight of the synchronised form": ("aten::batch_norm_backward_elemt", 4),
    "bias of a recurrent cell": ("aten::_thnn_fused_lstm_cell", 4),
    "workspace of a recurrent cell": ("aten::_thnn_fused_gru_cell_backward", 1),
    "statistics of attention": ("aten::_scaled_dot_product_fused_attention_overrideable_backward", 4),
}


@pytest.mark.parametrize("elsewhere", ["cpu", "sim:1"])
@pytest.mark.parametrize("what", _BUFFERS)
def test_buffers_on_another_device_are_refused(what: str, elsewhere: str) -> None:
    name, position = _BUFFERS[what]
    program, args = _HAND_WRITTEN[name]()
    moved = [*args[:position], args[position].to(elsewhere), *args[position + 1 :]]
    with pytest.raises(RuntimeError, match=r"same device, but found at least two devices, .*\(when checking arg"):
        program(*moved)


# --- collectives ---


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    dist.init_process_group("simccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _on_sim() -> dist.BarrierOptions:
    options = dist.BarrierOptions()
    options.device = torch.device("sim", 0)
    return options


_COLLECTIVES: dict[str, Callable[[Any, Tensor, Tensor], object]] = {
    "c10d::_allgather_base_": lambda group, x, y: group._allgather_base(y, x),
    "c10d::_reduce_scatter_base_": lambda group, x, y: group._reduce_scatter_base(y, x),
    "c10d::allgather_": lambda group, x, y: dist.all_gather([y], x),
    "c10d::allgather_coalesced_": lambda group, x, y: group.allgather_coalesced([[y]], [x]),
    "c10d::allgather_into_tensor_coalesced_": lambda group, x, y: group.allgather_into_tensor_coalesced([y], [x]),
    "c10d::allreduce_": lambda group, x, y: (dist.all_reduce(x), dist.all_reduce(y)),
    "c10d::allreduce_coalesced_": lambda group, x, y: group.allreduce_coalesced([x, y]),
    "c10d::alltoall_": lambda group, x, y: dist.all_to_all([y], [x]),
    "c10d::alltoall_base_": lambda group, x, y: dist.all_to_all_single(y, x),
    "c10d::barrier": lambda group, x, y: (group.barrier(_on_sim()).wait(), y.copy_(x)),
    "c10d::broadcast_": lambda group, x, y: (dist.broadcast(x, 0), y.copy_(x)),
    "c10d::gather_": lambda group, x, y: dist.gather(x, [y], 0),
    "c10d::recv_": lambda group, x, y: (dist.isend(x, 0), dist.recv(y, 0)),
    "c10d::recv_any_source_": lambda group, x, y: (dist.isend(x, 0), group.recv_anysource([y], 0).wait()),
    "c10d::reduce_": lambda group, x, y: (dist.reduce(x, 0), dist.reduce(y, 0)),
    "c10d::reduce_scatter_": lambda group, x, y: dist.reduce_scatter(y, [x]),
    "c10d::reduce_scatter_tensor_coalesced_": lambda group, x, y: group.reduce_scatter_tensor_coalesced([y], [x]),
    "c10d::scatter_": lambda group, x, y: dist.scatter(y, [x], 0),
    "c10d::send": lambda group, x, y: (dist.isend(x, 0), dist.recv(y, 0)),
}


@pytest.mark.parametrize("name", _COLLECTIVES)
def test_collectives_account_for_what_they_read_and_write(name: str, group: Any) -> None:
    x, y = _x(4), _x(4)
    _, entries = observe(_COLLECTIVES[name], group, x, y)
    assert "launched" in kinds(entries)
    _assert_accounted(entries, (x, y), y)
