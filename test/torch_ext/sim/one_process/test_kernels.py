"""Every kernel of the device passes through one entry, which knows the memory it reads and writes (csrc/kernel.h)."""

import pytest
import torch
import torch.distributed.fsdp._fully_shard
from torch import Tensor
from torch.utils._pytree import tree_leaves

from test.torch_ext.sim.one_process.every_kernel import (
    ASKED_ABOUT,
    CALLS,
    COLLECTIVES,
    HAND_WRITTEN,
    HOST_READS,
    NO_HOST_READS,
    WITHOUT_ELEMENTS,
    make,
)
from test.torch_ext.sim.one_process.observed import is_touched, kernels, kinds, observe, ranges

SIM = torch.get_device_module("sim")


def _assert_accounted(entries, args, result):
    """Assert that the inputs were read or written, and that the outputs were written."""
    written, read = ranges(entries, written=True), ranges(entries, written=False)
    for tensor in tree_leaves(args):
        if isinstance(tensor, Tensor):
            assert is_touched(tensor, written + read), f"an argument of {tuple(tensor.shape)} was not accounted for"
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor):
            assert is_touched(tensor, written), f"a result of {tuple(tensor.shape)} was not accounted for"


def _registered(*namespaces):
    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    return {name for name in names if name.partition("::")[0] in namespaces}


def test_every_kernel_registered_for_the_device_is_called_below():
    assert _registered("aten", "fsdp") == HAND_WRITTEN.keys() | WITHOUT_ELEMENTS.keys()
    assert _registered("c10d") == COLLECTIVES.keys() | {"c10d::recv_any_source_"}  # which NCCL lacks


# Torch 2.15 warns of both.
@pytest.mark.filterwarnings("ignore:Sparse [A-Z]* tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_kernels_account_for_what_they_read_and_write(name):
    program, args = CALLS[name]()
    result, entries = observe(program, *args)
    assert kernels(entries)
    asked_about = ASKED_ABOUT.get(name)
    _assert_accounted(entries, [arg for i, arg in enumerate(args) if i != asked_about], result)


@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_views_factories_and_questions_touch_no_elements(name):
    program, args = WITHOUT_ELEMENTS[name]()
    _, entries = observe(program, *args)
    assert not kernels(entries)


def test_autocast_and_backward_account_for_casts_and_gradients():
    x, weight = make(4, 4), make(4, 4).requires_grad_()

    def program():
        with torch.autocast("sim", torch.bfloat16):
            y = x @ weight
        y.float().sum().backward()
        return y

    y, entries = observe(program)
    assert y.dtype == torch.bfloat16
    _assert_accounted(entries, (x, weight), (y, weight.grad))


def test_growing_a_tensor_moves_its_elements():
    x = make(4)
    old = (x.data_ptr(), x.data_ptr() + 16)
    _, entries = observe(lambda: x.resize_(1000))
    assert ranges(entries, written=False) == [old]
    assert ranges(entries, written=True) == [(x.data_ptr(), x.data_ptr() + 16)]


@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_reported(name):
    x, stream = make(4), SIM.Stream()
    with SIM.stream(stream):
        _, entries = observe(HOST_READS[name], x)
    assert stream.stream_id in [entry["stream"] for entry in entries if entry["kind"] == "host_knows_stream"]


@pytest.mark.parametrize("name", NO_HOST_READS)
def test_non_blocking_calls_report_no_host_read(name):
    _, entries = observe(NO_HOST_READS[name], make(4))
    assert kernels(entries) and not any("host_knows" in kind for kind in kinds(entries))


def test_stream_ordering_is_reported_in_order():
    one, two, event = SIM.Stream(), SIM.Stream(), SIM.Event()

    def program():
        two.wait_event(event)  # never recorded: no edge
        event.record(one)
        two.wait_event(event)
        event.query()
        event.synchronize()
        two.wait_stream(one)
        one.query()
        one.synchronize()
        SIM.synchronize()
        event.record(one)  # another moment
        two.wait_event(event)

    _, entries = observe(program)
    assert kinds(entries) == [
        "recorded", "stream_waits", "host_knows_moment", "host_knows_moment", "recorded", "stream_waits",
        "host_knows_stream", "host_knows_stream", "host_knows_device", "recorded", "stream_waits",
    ]  # fmt: skip
    moments = [entry["moment"] for entry in entries if entry["moment"]]
    assert [moment - moments[0] for moment in moments] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [entry["stream"] for entry in entries if entry["kind"] == "stream_waits"] == [two.stream_id] * 3


def test_autograd_orders_streams_of_forward_and_backward():
    x, side = make(4).requires_grad_(), SIM.Stream()

    def program():
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


_BUFFERS = {
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
def test_buffers_on_another_device_are_refused(what, elsewhere):
    name, position = _BUFFERS[what]
    program, args = HAND_WRITTEN[name]()
    moved = [*args[:position], args[position].to(elsewhere), *args[position + 1 :]]
    with pytest.raises(RuntimeError, match=r"same device, but got .*\(when checking arg"):
        program(*moved)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_a_learning_rate_may_stay_on_the_host(shape):
    """FusedAdamKernel.cu reads it by item(), whatever its shape."""
    weight, gradient, first, second, step = [make(3)], [torch.ones(3, device="sim")], [make(3)], [make(3)], [make()]
    rest = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}

    def update():
        torch._fused_adam_(weight, gradient, first, second, [], step, lr=torch.full(shape, 0.1), **rest)

    if shape == (2,):
        with pytest.raises(RuntimeError):
            update()
    else:
        before = weight[0].clone()
        update()
        assert not torch.equal(weight[0], before)


# --- collectives ---


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_account_for_what_they_read_and_write(name, group):
    x, y = make(4), make(4)
    _, entries = observe(COLLECTIVES[name], group, x, y)
    assert "launched" in kinds(entries)
    _assert_accounted(entries, (x, y), y)
