"""Calls that CUDA refuses and the host accepts: integer matrices, and kernels that are not deterministic."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

IMAGE, VOLUME = (1, 2, 6, 6), (1, 2, 6, 6, 6)
_ones = partial(torch.ones, dtype=torch.long, device="sim")
_zeros = partial(torch.zeros, device="sim")

# By the kernel that CUDA's message names: a program on a tensor of ones, and the tensor's shape.
NONDETERMINISTIC = {
    "_bincount_cuda": (lambda x: torch.bincount(x.detach().long(), weights=x), (6,)),
    "_histc_cuda with floating point input": (lambda x: torch.histc(x), (6,)),
    "adaptive_avg_pool2d_backward_cuda": (lambda x: F.adaptive_avg_pool2d(x, 3).sum().backward(), IMAGE),
    "adaptive_avg_pool3d_backward_cuda": (lambda x: F.adaptive_avg_pool3d(x, 3).sum().backward(), VOLUME),
    "adaptive_max_pool2d_backward_cuda": (lambda x: F.adaptive_max_pool2d(x, 3).sum().backward(), IMAGE),
    "avg_pool3d_backward_cuda": (lambda x: F.avg_pool3d(x, 2).sum().backward(), VOLUME),
    "ctc_loss_backward_gpu": (lambda x: F.ctc_loss(x.log_softmax(2), _ones(1, 2), [6], [2]).backward(), (6, 1, 4)),
    "embedding_bag_backward_cuda_max": (
        lambda x: F.embedding_bag(_ones(1, 2), x, mode="max").sum().backward(),
        (4, 3),
    ),
    "fractional_max_pool2d_backward_cuda": (lambda x: F.fractional_max_pool2d(x, 2, 3).sum().backward(), IMAGE),
    "fractional_max_pool3d_backward_cuda": (lambda x: F.fractional_max_pool3d(x, 2, 3).sum().backward(), VOLUME),
    "grid_sampler_2d_backward_cuda": (
        lambda x: F.grid_sample(x, _zeros(1, 3, 3, 2), align_corners=False).sum().backward(),
        IMAGE,
    ),
    "grid_sampler_3d_backward_cuda": (
        lambda x: F.grid_sample(x, _zeros(1, 3, 3, 3, 3), align_corners=False).sum().backward(),
        VOLUME,
    ),
    "median CUDA with indices output": (lambda x: x.median(0), (6,)),
    "nll_loss2d_forward_out_cuda_template": (lambda x: F.nll_loss(x, _ones(1, 6, 6)), IMAGE),
    "put_": (lambda x: x.detach().clone().put_(x.long(), x, accumulate=True), (6,)),
    "scatter_reduce_cuda_kernel": (lambda x: x.detach().scatter(0, x.long(), x, reduce="multiply"), (6,)),
    "scatter_reduce_cuda_prod_": (lambda x: x.scatter_reduce(0, x.long(), x, "prod"), (6,)),
    "reflection_pad1d_backward_out_cuda": (lambda x: F.pad(x, (1, 1), "reflect").sum().backward(), (1, 2, 6)),
    "reflection_pad2d_backward_cuda": (lambda x: F.pad(x, (1,) * 4, "reflect").sum().backward(), IMAGE),
    "reflection_pad3d_backward_out_cuda": (lambda x: F.pad(x, (1,) * 6, "reflect").sum().backward(), VOLUME),
    "upsample_linear1d_backward_out_cuda": (lambda x: F.interpolate(x, 9, mode="linear").sum().backward(), (1, 2, 6)),
    # interpolate() computes these by other operators under use_deterministic_algorithms, the first since 2.15.
    "upsample_bicubic2d_backward_out_cuda": (
        lambda x: torch.ops.aten.upsample_bicubic2d(x, [9, 9], False).sum().backward(),
        IMAGE,
    ),
    "upsample_bilinear2d_backward_out_cuda": (
        lambda x: torch.ops.aten.upsample_bilinear2d(x, [9, 9], False).sum().backward(),
        IMAGE,
    ),
    "upsample_trilinear3d_backward_out_cuda": (
        lambda x: torch.ops.aten.upsample_trilinear3d(x, [9, 9, 9], False).sum().backward(),
        VOLUME,
    ),
}

# Programs with the same operators whose CUDA kernels are deterministic.
DETERMINISTIC = {
    "bincount without weights": lambda x: torch.bincount(x.detach().long()),
    "cumsum": lambda x: x.cumsum(0),
    "median without indices": lambda x: x.median(),
    "scatter": lambda x: x.scatter(0, x.long(), x),
    "scatter_reduce with a sum": lambda x: x.scatter_reduce(0, x.long(), x, "sum"),
    "kthvalue": lambda x: x.kthvalue(1),
    "replication_pad": lambda x: F.pad(x.view(1, 2, 3), (1, 1), "replicate").sum().backward(),
    "embedding_bag of sums": lambda x: F.embedding_bag(_ones(1, 2), x.view(3, 2), mode="sum").sum().backward(),
    "nll_loss without a reduction": lambda x: F.nll_loss(x.view(1, 6, 1, 1), _zeros(1, 1, 1).long(), reduction="none"),
    "scatter_add": lambda x: x.detach().scatter_add_(0, _zeros(6).long(), x.detach() + 1),
}


def test_fresh_memory_is_filled_with_what_no_program_expects(_deterministic):
    largest = {torch.uint8: 255, torch.int16: 2**15 - 1, torch.int64: 2**63 - 1, torch.uint64: 2**64 - 1}
    for dtype, value in largest.items():
        assert torch.empty(3, dtype=dtype, device="sim").tolist() == [value] * 3
    assert torch.empty(2, dtype=torch.bool, device="sim").all()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        assert torch.empty_strided((2, 3), (3, 1), dtype=dtype, device="sim").to(torch.complex64).isnan().all()
    grown = torch.zeros(2, device="sim").resize_(5)
    assert grown.isnan().tolist() == [False, False, True, True, True]
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        fresh = torch.zeros(1 << 20, device="sim")
        del fresh
        assert not torch.empty(1 << 20, device="sim").isnan().any()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


# Element types by what CUDA's message names; others than those of products are in test_ops.py.
OF_INTEGERS = {
    '"slow_conv2d_cuda"': (lambda x: F.conv2d(x[0], x[0]), (1, 1, 1, 2, 2)),
    '"slow_conv2d_cuda" ': (lambda x: F.conv1d(x[0, 0], x[0, 0]), (1, 1, 1, 2, 2)),
    '"slow_conv_dilated<>"': (lambda x: F.conv2d(x[0], x[0, :, :, :1, :1], dilation=2), (1, 1, 1, 2, 2)),
    '"slow_conv_dilated<>" ': (lambda x: F.conv3d(x, x), (1, 1, 1, 2, 2)),
    '"slow_conv_transpose2d_out_cuda"': (lambda x: F.conv_transpose2d(x[0], x[0]), (1, 1, 1, 2, 2)),
    '"slow_conv_transpose3d_out_cuda"': (lambda x: F.conv_transpose3d(x, x), (1, 1, 1, 2, 2)),
    '"addmm_cuda"': (lambda x: x @ x, (2, 2)),
    '"addmm_cuda" ': (lambda x: x.addmm_(x.clone(), x.clone()), (2, 2)),
    '"baddbmm_cuda"': (lambda x: torch.einsum("bij,bjk->bik", x[None], x[None]), (2, 2)),
    '"addmv_impl_cuda"': (lambda x: torch.addmv(x[0], x, x[0]), (2, 2)),
    '"dot"': (lambda x: torch.dot(x[0], x[0]), (2, 2)),
}


@pytest.fixture
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", NONDETERMINISTIC)
def test_kernel_without_a_deterministic_form_is_refused(kernel, _deterministic):
    program, shape = NONDETERMINISTIC[kernel]
    with pytest.raises(RuntimeError) as caught:
        program(torch.ones(shape, device="sim", requires_grad=True))
    assert str(caught.value).startswith(f"{kernel} does not have a deterministic implementation")
    torch.use_deterministic_algorithms(False)
    program(torch.ones(shape, device="sim", requires_grad=True))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_form_of_such_an_operator_runs(name, _deterministic):
    DETERMINISTIC[name](torch.ones(6, device="sim", requires_grad=True))


# Products of float8 matrices, (rows, columns) of both; the second one lies by columns.
OF_FLOAT8 = {
    "Expected trailing dimension of mat1 to be divisible by 16": ((16, 24), (24, 32), torch.float8_e4m3fn),
    "mat2 shape (16x24) must be divisible by 16": ((16, 16), (16, 24), torch.float8_e4m3fn),
    "Multiplication of two Float8_e5m2 matrices": ((16, 16), (16, 16), torch.float8_e5m2),
    "Only multiplication of row-major and column-major": ((16, 16), (16, 16), torch.float8_e4m3fn),
    "": ((3, 16), (16, 32), torch.float8_e4m3fn),
}


@pytest.mark.parametrize("refusal", OF_FLOAT8)
def test_product_of_float8_is_refused_as_by_cublas(refusal):
    (rows, inner), (_, columns), dtype = OF_FLOAT8[refusal]
    one = torch.ones(rows, inner, device="sim").to(dtype)
    other = torch.ones(columns, inner, device="sim").to(dtype).t()
    if refusal.startswith("Only"):
        other = other.contiguous()
    scale = torch.ones((), device="sim")

    def product():
        return torch._scaled_mm(one, other, scale, scale, out_dtype=torch.bfloat16)

    if refusal:
        with pytest.raises((RuntimeError, ValueError), match=re.escape(refusal)):
            product()
    else:
        assert torch.equal(product().cpu(), torch.full((rows, columns), float(inner), dtype=torch.bfloat16))


@pytest.mark.parametrize("kernel", OF_INTEGERS)
def test_product_or_convolution_of_integers_is_refused(kernel):
    program, shape = OF_INTEGERS[kernel]
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        with pytest.raises(NotImplementedError, match=f"{kernel.strip()} not implemented for"):
            program(torch.ones(shape, dtype=dtype, device="sim"))
    program(torch.ones(shape, dtype=torch.bfloat16, device="sim"))
    assert (_ones(2, 0) @ _ones(0, 2)).sum() == 0


def test_scatter_of_booleans_is_refused_with_a_product():
    x, index = torch.ones(2, dtype=torch.bool, device="sim"), torch.zeros(2, dtype=torch.long, device="sim")
    with pytest.raises(NotImplementedError, match="cuda_scatter_gather_base_kernel_func"):
        x.scatter(0, index, x, reduce="multiply")
    x.scatter(0, index, x)
    x.scatter_reduce(0, index, x, "sum")


class _Refusing(Tensor):
    """A wrapper subclass that refuses every operator but those of a conversion, as torchao's do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner):
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op not in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            raise NotImplementedError(f"{cls.__name__} has no {op}")
        return cls(op(args[0].inner, **(kwargs or {})))


def test_module_of_wrapper_subclasses_moves_to_the_device():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(_Refusing(torch.ones(2)))
    assert module.to("sim").weight.device.type == "sim"
