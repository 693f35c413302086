"""A kernel never reads or writes outside the storages of its tensors, however those lost their memory."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from test.torch_ext.sim.one_process.every_kernel import ASKED_ABOUT, CALLS, COLLECTIVES, WITHOUT_ELEMENTS, make
from torch_ext.sim import _native

SIM = torch.get_device_module("sim")
ILLEGAL = "an illegal memory access was encountered"
# If a kernel, or the program, reads a part of the tensor first, torch refuses the view.
GONE = rf"{ILLEGAL}|out of bounds for storage of size"
# The part of an argument that such a kernel uses still fits into half of the argument.
_FITS = {("fsdp::all_gather_copy_in", 1, "_halve")}


def _free(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def _halve(tensor):
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() // 2)
    return tensor


def test_use_after_free_names_operator_argument_shape_device_and_place():
    weight = make(2, 3, device="sim:1")
    _free(weight)
    with pytest.raises(torch.AcceleratorError) as raised:
        torch.mm(weight, make(3, 2, device="sim:1"))
    text = str(raised.value)
    assert re.search(
        rf"sim error: {ILLEGAL}: aten::mm uses argument 'self', float32 \[2, 3\] on sim:1, "
        r"which reaches byte 24 of a storage of 0 bytes, freed by resize_\(0\) at\n    \S*test_bounds.py:\d+ in _free\n"
        r"    \S*test_bounds.py:\d+ in test_use_after_free",
        text,
    ), text
    assert len(text.splitlines()) < 20


def test_views_past_a_shrunk_storage_are_refused_and_others_are_not():
    whole = torch.arange(8.0).to("sim")
    front, back, columns = whole[:4], whole[4:], whole.view(2, 4).t()
    whole.untyped_storage().resize_(16)
    assert front.tolist() == [0.0, 1.0, 2.0, 3.0]
    for lost in (whole, back, columns):
        with pytest.raises(torch.AcceleratorError, match=r"of a storage of 16 bytes, made smaller by resize_ at"):
            lost + 1
    whole.untyped_storage().resize_(32)
    assert (whole * 0 + 1)[:4].tolist() == [1.0] * 4


def test_memory_given_back_or_set_anew_may_be_used_again():
    x = _free(make(4))
    x.untyped_storage().resize_(16)
    assert x.fill_(2).sum().item() == 8
    _free(x)
    assert x.resize_(8).fill_(1).sum().item() == 8  # as in FSDP, and in resize_ of the tensor
    _free(x)
    x.data = make(4)
    assert x.sum().item() == 4
    _free(x)
    assert x.set_(make(3)).sum().item() == 3


@pytest.mark.parametrize("break_it", [_free, _halve])
@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_refuses_freed_memory(name, break_it):
    _, args = CALLS[name]()
    for position in range(len(args)):
        program, args = CALLS[name]()
        for tensor in tree_leaves(args[position]):
            if not isinstance(tensor, Tensor) or position == ASKED_ABOUT.get(name):
                continue
            break_it(tensor)
            if (name, position, break_it.__name__) in _FITS:
                program(*args)
                continue
            with pytest.raises(RuntimeError, match=GONE) as raised:
                program(*args)
            assert break_it.__name__ in str(raised.value)


@pytest.mark.parametrize("name", ["aten::view", "aten::_reshape_alias", "aten::record_stream"])
def test_metadata_of_a_freed_tensor_is_readable(name):
    program, args = WITHOUT_ELEMENTS[name]()
    _free(args[0])
    program(*args)
    x = _free(make(4))
    assert x.is_set_to(x) and x.detach().shape == (4,) and torch.zeros_like(x).sum().item() == 0
    assert x.untyped_storage().nbytes() == 0


def test_views_past_a_storage_are_refused_when_they_are_made():
    x = _halve(make(4))
    for view in (lambda: x.as_strided((4,), (1,)), lambda: x[1:]):
        with pytest.raises(
            RuntimeError, match=r"out of bounds for storage of size 8(.|\n)*made smaller(.|\n)*in _halve"
        ):
            view()


def test_out_arguments_are_checked():
    x = make(4)
    with pytest.raises(torch.AcceleratorError, match="argument 'out'"):
        torch.add(x, x, out=_free(make(4)))
    assert torch.add(x, x, out=torch.empty(0, device="sim")).sum().item() == 8


def test_copies_check_source_and_destination():
    host = _halve(torch.ones(4))
    for program in (
        lambda: make(4).copy_(host),
        lambda: torch.ones(4).copy_(_free(make(4))),
        lambda: _free(make(4)).copy_(torch.ones(4), non_blocking=True),
        lambda: make(4).copy_(_free(make(4, device="sim:1"))),
    ):
        with pytest.raises(torch.AcceleratorError, match=ILLEGAL):
            program()


def test_generated_kernels_are_checked():
    called = []
    for given in ((_free(make(4)), make(4)), (make(4), _halve(make(4)))):
        with pytest.raises(torch.AcceleratorError, match="cpp_fused_add_0 uses float32"):
            _native.run_generated(lambda *args: called.append(args), "cpp_fused_add_0", "rwn", *given, 4)
    assert not called


def test_backward_says_where_a_saved_tensor_was_freed():
    x = make(4).requires_grad_()
    saved = make(4)
    loss = (x * saved).sum()
    _free(saved)
    with pytest.raises(torch.AcceleratorError, match=r"aten::mul uses(.|\n)*in _free"):
        loss.backward()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_refuse_freed_memory(name, group):
    for broken in (0, 1):
        tensors = [make(4), make(4)]
        _free(tensors[broken])
        with pytest.raises(torch.AcceleratorError, match=ILLEGAL):
            COLLECTIVES[name](group, *tensors)


def test_pending_operation_never_writes_memory_returned_to_the_host():
    size, device = 1 << 20, "sim:3"
    store = dist.HashStore()

    def join(rank):
        return _native.ProcessGroupSimCCL(store, rank, [0, 1], timedelta(seconds=100), any_device=True)

    with ThreadPoolExecutor(2) as pool:
        receiver, sender = pool.map(join, (0, 1))
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = 1, True
    SIM.empty_cache()
    before = SIM.memory_reserved(device)
    target = torch.zeros(size, device=device)
    work = receiver.broadcast([target], options)
    _free(target)
    SIM.empty_cache()
    segment = 20 << 20  # of CUDA's allocator for requests between 1 and 10 MiB
    assert SIM.memory_reserved(device) == before + segment and SIM.memory_allocated(device) <= before
    source = torch.ones(size, device=device)
    sender.broadcast([source], options).wait()
    work.wait()
    SIM.synchronize(device)
    del source, target, work
    SIM.empty_cache()
    assert SIM.memory_reserved(device) == before


def test_error_for_a_resharded_parameter_names_fsdp(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, kept = nn.Sequential(nn.Linear(4, 4)).to("sim"), list[Tensor]()
    model[0].register_forward_hook(lambda layer, *_: kept.append(layer.weight.detach()))
    # The root keeps its parameters after forward; the inner module does not.
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("sim", (1,)))
    model(make(2, 4))
    with pytest.raises(torch.AcceleratorError, match=r"aten::add uses(.|\n)*_fully_shard"):
        kept[0] + 1
