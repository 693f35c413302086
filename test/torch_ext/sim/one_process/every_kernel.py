"""How to call every kernel of the device: those written by hand, operators of every form, and collectives."""

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard

import torch_ext.sim  # noqa: F401 - registers the device

SIM = torch.get_device_module("sim")
ATEN, FSDP = torch.ops.aten, torch.ops.fsdp


def make(*sizes, dtype=torch.float32, device="sim"):
    return torch.ones(sizes, dtype=dtype).to(device)


def _complex(*sizes):
    return make(*sizes, dtype=torch.complex64)


def _into(op, name="out"):
    return lambda *args: op(*args[:-1], **{name: args[-1]})


def several(count, *sizes):
    return [make(*sizes) for _ in range(count)]


# Arguments of each operator for which the device, or torch for the device, registers a kernel.
ARGUMENTS = {
    "aten::_fused_rms_norm": lambda: (make(4, 3), [3], make(3), None),
    "aten::_fused_rms_norm_backward": lambda: (*several(2, 4, 3), [3], make(4, 1), make(3), [True, True]),
    "aten::_copy_from": lambda: (make(3), make(3)),
    "aten::_copy_from_and_resize": lambda: (make(3), make(3)),
    "aten::_fft_c2c": lambda: (_complex(4), [0], 0, True),
    "aten::_fft_c2r": lambda: (_complex(3), [0], 0, 4),
    "aten::_fft_r2c": lambda: (make(4), [0], 0, True),
    "aten::_local_scalar_dense": lambda: (make(1),),
    "aten::_scaled_dot_product_flash_attention": lambda: (*several(3, 1, 1, 4, 8),),
    "aten::_scaled_dot_product_fused_attention_overrideable": lambda: (*several(3, 1, 1, 4, 8),),
    "aten::multi_margin_loss": lambda: (make(2, 3), make(2, dtype=torch.int64)),
    "aten::multi_margin_loss_backward": lambda: (make(), make(2, 3), make(2, dtype=torch.int64), 1, 1),
    "aten::_thnn_fused_gru_cell": lambda: (make(2, 6), make(2, 6), make(2, 2), make(6), make(6)),
    "aten::_thnn_fused_gru_cell_backward": lambda: (make(2, 2), make(2, 10), True),
    "aten::_thnn_fused_lstm_cell": lambda: (make(2, 8), make(2, 8), make(2, 2), make(8), make(8)),
    "aten::_thnn_fused_lstm_cell_backward_impl": lambda: (*several(4, 2, 2), make(2, 8), True),
    "aten::addr": lambda: (make(2, 3), make(2), make(3)),
    "aten::conj_physical_": lambda: (_complex(3),),
    "aten::batch_norm_backward_elemt": lambda: (*several(2, 4, 3), *several(5, 3), make(1, dtype=torch.int32)),
    "aten::batch_norm_backward_reduce": lambda: (*several(2, 4, 3), *several(3, 3), True, True, True),
    "aten::batch_norm_elemt": lambda: (make(4, 3), *several(4, 3), 1e-5),
    "aten::batch_norm_gather_stats": lambda: (make(4, 3), *several(2, 2, 3), *several(2, 3), 0.1, 1e-5, 4),
    "aten::batch_norm_gather_stats_with_counts": lambda: (
        make(4, 3), *several(2, 2, 3), *several(2, 3), 0.1, 1e-5, make(2),
    ),
    "aten::batch_norm_stats": lambda: (make(4, 3), 1e-5),
    "aten::convolution_backward_overrideable": lambda: (
        make(1, 1, 2, 2), make(1, 1, 3, 3), make(1, 1, 2, 2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3,
    ),
    "aten::convolution_overrideable": lambda: (
        make(1, 1, 3, 3), make(1, 1, 2, 2), make(1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
    ),
    "aten::histc": lambda: (make(4, dtype=torch.int32), 4, 0, 4),
    "aten::mish_backward": lambda: (make(3), make(3)),
    "aten::mse_loss": lambda: (make(4), make(4)),
    "aten::native_batch_norm": lambda: (make(4, 3), *several(4, 3), True, 0.1, 1e-5),
    "aten::native_batch_norm_backward": lambda: (*several(2, 4, 3), *several(5, 3), True, 1e-5, [True] * 3),
    "aten::native_dropout": lambda: (make(5), 0.5, True),
    "aten::native_group_norm": lambda: (make(2, 4, 3), make(4), make(4), 2, 4, 3, 2, 1e-5),
    "aten::_embedding_bag": lambda: (
        make(4, 3), make(5, dtype=torch.int64), torch.tensor([0, 2], device="sim"), False, 0, False, make(5),
    ),
    "aten::_embedding_bag_forward_only": lambda: (
        make(4, 3), make(5, dtype=torch.int64), torch.tensor([0, 2], device="sim"), False, 0, False, make(5),
    ),
    "aten::_native_batch_norm_legit": lambda: (make(4, 3), *several(4, 3), True, 0.1, 1e-5),
    "aten::native_layer_norm": lambda: (make(2, 4), [4], make(4), make(4), 1e-5),
    "aten::native_layer_norm_backward": lambda: (
        *several(2, 2, 4), [4], *several(2, 2, 1), *several(2, 4), [True] * 3,
    ),
    "aten::silu_backward": lambda: (make(3), make(3)),
    "aten::smooth_l1_loss": lambda: (make(4), make(4)),
    "fsdp::all_gather_copy_in": lambda: ([make(3)], make(6), [3], 3, 0),
}  # fmt: skip

# Kernels whose result needs another form, or which take the result of another call.
_FORMED = {
    "aten::_linalg_check_errors": lambda: (
        lambda info: ATEN._linalg_check_errors(info, "inv", is_matrix=True),
        (make(dtype=torch.int32) - 1,),
    ),
    "aten::_efficientzerotensor": lambda: (lambda: ATEN._efficientzerotensor([3], device="sim"), ()),
    "aten::_scaled_dot_product_flash_attention_backward": lambda: (
        _flash_backward,
        _attention(ATEN._scaled_dot_product_flash_attention),
    ),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": lambda: (
        _attention_backward,
        _attention(ATEN._scaled_dot_product_fused_attention_overrideable),
    ),
    "aten::_nested_from_padded": lambda: (_nested_from_padded, (make(2, 3, 4),)),
    "aten::_nested_tensor_from_mask": lambda: (_nested_from_mask, (make(2, 3, 4),)),
    "aten::_to_sparse": lambda: (lambda x: _parts(ATEN._to_sparse(x)), (make(2, 2),)),
    "aten::_to_sparse.sparse_dim": lambda: (lambda x: _parts(ATEN._to_sparse(x, 1)), (make(2, 2),)),
    "aten::_to_sparse_bsc": lambda: (lambda x: _parts(ATEN._to_sparse_bsc(x, [1, 1])), (make(2, 2),)),
    "aten::_to_sparse_bsr": lambda: (lambda x: _parts(ATEN._to_sparse_bsr(x, [1, 1])), (make(2, 2),)),
    "aten::_to_sparse_csc": lambda: (lambda x: _parts(ATEN._to_sparse_csc(x)), (make(2, 2),)),
    "aten::_to_sparse_csr": lambda: (lambda x: _parts(ATEN._to_sparse_csr(x)), (make(2, 2),)),
    "aten::_embedding_bag_backward": lambda: (_of_bag, (make(1, 3),)),
    "aten::batch_norm_elemt.out": lambda: (
        _into(ATEN.batch_norm_elemt.out),
        (make(4, 3), *several(4, 3), 1e-5, make(4, 3)),
    ),
    "aten::sparse_mask": lambda: (
        lambda dense, mask: _parts(ATEN.sparse_mask(dense, mask.to_sparse())),
        (make(2, 2), make(2, 2)),
    ),
    "aten::addr_": lambda: (ATEN.addr_, (make(2, 3), make(2), make(3))),
    "aten::addr.out": lambda: (_into(ATEN.addr.out), (make(2, 3), make(2), make(3), make(2, 3))),
    "aten::_fft_c2c.out": lambda: (_into(ATEN._fft_c2c.out), (_complex(4), [0], 0, True, _complex(4))),
    "aten::_fft_c2r.out": lambda: (_into(ATEN._fft_c2r.out), (_complex(3), [0], 0, 4, make(4))),
    "aten::_fft_r2c.out": lambda: (_into(ATEN._fft_r2c.out), (make(4), [0], 0, True, _complex(3))),
    "aten::multi_margin_loss.out": lambda: (
        _into(ATEN.multi_margin_loss.out),
        (make(2, 3), make(2, dtype=torch.int64), 1, 1, None, 1, make()),
    ),
    "aten::multi_margin_loss_backward.grad_input": lambda: (
        _into(ATEN.multi_margin_loss_backward.grad_input, "grad_input"),
        (make(), make(2, 3), make(2, dtype=torch.int64), 1, 1, None, 1, make(2, 3)),
    ),
    "aten::mode.values": lambda: (
        lambda x, values, indices: ATEN.mode.values(x, values=values, indices=indices),
        (make(3, 2), make(3), make(3, dtype=torch.int64)),
    ),
    "fsdp::chunk_cat": lambda: (lambda given, out: FSDP.chunk_cat([given], 0, 2, out=out), (make(4), make(2, 2))),
    "fsdp::split_with_sizes_copy": lambda: (
        lambda given, *out: FSDP.split_with_sizes_copy(given, [1, 2], 0, out=list(out)),
        (make(3), make(1), make(2)),
    ),
}


def _direct(name):
    namespace, _, operator = name.partition("::")
    return lambda: (getattr(getattr(torch.ops, namespace), operator), ARGUMENTS[name]())


HAND_WRITTEN = {**{name: _direct(name) for name in ARGUMENTS}, **_FORMED}

# Kernels that touch no elements: they make memory or views of it, or answer questions about sizes.
WITHOUT_ELEMENTS = {
    "aten::_fused_sdp_choice": lambda: (ATEN._fused_sdp_choice, tuple(make(1, 1, 4, 8) for _ in range(3))),
    "aten::_has_compatible_shallow_copy_type": lambda: (ATEN._has_compatible_shallow_copy_type, (make(3), make(3))),
    "aten::_nested_view_from_buffer": lambda: (_nested_view, (make(4),)),
    "aten::_reshape_alias": lambda: (ATEN._reshape_alias, (make(4), [2, 2], [2, 1])),
    "aten::as_strided": lambda: (ATEN.as_strided, (make(4), [2], [2])),
    "aten::empty.memory_format": lambda: (lambda: torch.empty(3, device="sim"), ()),
    "aten::empty_strided": lambda: (lambda: torch.empty_strided((3,), (1,), device="sim"), ()),
    "aten::record_stream": lambda: (ATEN.record_stream, (make(3), SIM.current_stream())),
    "aten::resize_": lambda: (lambda x: x.resize_(2), (make(3),)),
    "aten::set_": lambda: (lambda x: x.set_(), (make(3),)),
    "aten::set_.source_Storage": lambda: (lambda x, y: x.set_(y.untyped_storage()), (make(3), make(3))),
    "aten::set_.source_Storage_storage_offset": lambda: (
        lambda x, y: x.set_(y.untyped_storage(), 0, (2,), (1,)),
        (make(3), make(3)),
    ),
    "aten::set_.source_Tensor": lambda: (lambda x, y: x.set_(y), (make(3), make(3))),
    "aten::unfold": lambda: (ATEN.unfold, (make(4), 0, 2, 2)),
    "aten::view": lambda: (ATEN.view, (make(4), [2, 2])),
    "aten::view_as_complex": lambda: (ATEN.view_as_complex, (make(2, 2),)),
    "aten::view_as_real": lambda: (ATEN.view_as_real, (make(2, dtype=torch.complex64),)),
}


def _parts(sparse):
    if sparse.layout == torch.sparse_coo:
        return [sparse._indices(), sparse._values()]
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [sparse.crow_indices(), sparse.col_indices(), sparse.values()]
    return [sparse.ccol_indices(), sparse.row_indices(), sparse.values()]


def _of_bag(grad):
    rows, first, bags, size = (torch.tensor(each, device="sim") for each in ([0, 1], [0], [0, 0], [2]))
    return ATEN._embedding_bag_backward(grad, rows, first, bags, size, first.new_empty(0), 4, False, 0, False, None)


def _nested_from_padded(padded):
    return list(ATEN._nested_from_padded(padded, torch.tensor([[2, 4], [3, 4]])).unbind())


def _nested_from_mask(padded):
    return list(ATEN._nested_tensor_from_mask(padded, torch.ones(2, 3, dtype=torch.bool, device="sim")).unbind())


def _nested_view(buffer):
    sizes, strides, offsets = torch.tensor([[2], [2]]), torch.tensor([[1], [1]]), torch.tensor([0, 2])
    return ATEN._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _attention(forward):
    inputs = several(3, 1, 1, 4, 8)
    output, logsumexp, *_ = forward(*inputs)
    return (*inputs, output, logsumexp)


def _attention_backward(query, key, value, output, logsumexp):
    none = torch.empty(0, dtype=torch.long, device="sim")
    return ATEN._scaled_dot_product_fused_attention_overrideable_backward(
        torch.ones_like(output), query, key, value, None, [True, True, True, False], output, logsumexp,
        none, none, 4, 4, 0.0, False, none, none,
    )  # fmt: skip


def _flash_backward(query, key, value, output, logsumexp):
    none = torch.empty(0, dtype=torch.long, device="sim")
    return ATEN._scaled_dot_product_flash_attention_backward(
        torch.ones_like(output), query, key, value, output, logsumexp, none, none, 4, 4, 0.0, False, none, none
    )


# Arguments of which a kernel reads only the sizes or the type.
ASKED_ABOUT = {
    "aten::batch_norm_backward_reduce": 4,
    "aten::batch_norm_gather_stats": 0,
    "aten::batch_norm_gather_stats_with_counts": 0,
}


# Operators of every form, on two tensors.
PROGRAMS = {
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


def _on_two(program):
    return lambda: (program, (make(4, 4), make(4, 4)))


# Kernels and operators alike.
CALLS = {**HAND_WRITTEN, **{name: _on_two(program) for name, program in PROGRAMS.items()}}


# Programs on four numbers: the host waits for the end of the first kind, and not of the second.
HOST_READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "cpu": lambda x: x.cpu(),
    "copy to the host": lambda x: torch.empty(4).copy_(x),
    "copy from the host": lambda x: x.copy_(torch.ones(4)),
    "copy from the host into a column": lambda x: x.view(2, 2)[:, 0].copy_(torch.ones(2)),
    "indices of the host": lambda x: x[[0, 1]],
    "mask as index": lambda x: x[x > 0],
    "mask of what is written": lambda x: x.index_put_((x > 0,), x.clone()),
    "number of the host that is written": lambda x: x.index_put_((x.long() * 0,), torch.tensor(3.0)),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "print": lambda x: repr(x),
    "bounds of a histogram": lambda x: torch.histc(x, 2),
    "value that is filled in": lambda x: x.masked_fill(x > 0, x.sum()),
    "value that is filled in by index": lambda x: x.index_fill(0, x.long(), x.sum()),
    "check of probabilities": lambda x: torch.multinomial(x, 2),
    "check of deviations": lambda x: torch.normal(x, x),
    "check of an order": lambda x: torch.searchsorted(x, x, sorter=x.long()),
    "check of lengths": lambda x: torch.segment_reduce(x, "sum", lengths=make(2, dtype=torch.long) * 2),
    "rows with a maximum norm": lambda x: torch.nn.functional.embedding(x.long(), x.view(2, 2), max_norm=1.0),
    "least squares": lambda x: torch.linalg.lstsq(x.view(2, 2), x.view(2, 2)),
    "matrix_exp": lambda x: torch.matrix_exp(x.view(2, 2)),
}
NO_HOST_READS = {
    "copy to the host": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "copy from the host": lambda x: x.copy_(torch.ones(4, pin_memory=True), non_blocking=True),
    "add": lambda x: x + 1,
    "integers as index": lambda x: x[x.long()],
    "integers as index of what is written": lambda x: x.index_put_((x.long(),), x.clone()),
    "mask of what is filled": lambda x: x.index_put_((x > 0,), x.sum()),
    "histogram between bounds": lambda x: torch.histc(x, 2, 0, 1),
    "number that is filled in": lambda x: x.masked_fill(x > 0, 3.0),
    "probabilities drawn again": lambda x: torch.multinomial(x, 2, replacement=True),
    "one deviation": lambda x: torch.normal(x, 1.0),
    "places in a sorted tensor": lambda x: torch.searchsorted(x, x),
    "repeat_interleave to a size": lambda x: torch.repeat_interleave(x.long(), output_size=4),
}


def _on_sim():
    options = dist.BarrierOptions()
    options.device = torch.device("sim", 0)
    return options


# Each collective, on a group, an input and an output.
COLLECTIVES = {
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
    "c10d::reduce_": lambda group, x, y: (dist.reduce(x, 0), dist.reduce(y, 0)),
    "c10d::reduce_scatter_": lambda group, x, y: dist.reduce_scatter(y, [x]),
    "c10d::reduce_scatter_tensor_coalesced_": lambda group, x, y: group.reduce_scatter_tensor_coalesced([y], [x]),
    "c10d::scatter_": lambda group, x, y: dist.scatter(y, [x], 0),
    "c10d::send": lambda group, x, y: (dist.isend(x, 0), dist.recv(y, 0)),
}
if hasattr(dist, "gather_into_tensor"):  # torch 2.15
    COLLECTIVES["c10d::gather_into_tensor_"] = lambda group, x, y: dist.gather_into_tensor(x, y, 0)
