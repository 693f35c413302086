"""What counts as a difference: each fact of a result, an argument after the call, an error."""

import pytest
import torch

from torch_ext.conformance.forks import Status
from torch_ext.conformance.observe import compare, copy_to, observe


def seen(program, *arguments, **how):
    given = copy_to("cpu", arguments)
    return observe(lambda: program(*given), given, "cpu", **how)


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("host", "device", "text"),
    [
        (lambda x: x + 1, lambda x: x + 2, "result 0: Tensor-likes are not close"),
        (lambda x: x + 1, lambda x: (x + 1).double(), "result 0: dtype torch.float64, the host has torch.float32"),
        (lambda x: x + 1, lambda x: (x + 1).t().contiguous().t(), "result 0: strides [1, 2], the host has [3, 1]"),
        (lambda x: x + 1, lambda x: (x + 1)[:1], "result 0: shape (1, 3), the host has (2, 3)"),
        (lambda x: x[0], lambda x: x[0].clone(), "result 0: shares memory with None, the host has 0"),
        (lambda x: (x + 1,) * 2, lambda x: (x + 1, x + 1), "result 1: shares memory with None, the host has 1"),
        (lambda x: x + 1, lambda x: (x + 1).requires_grad_(), "result 0: requires_grad True, the host has False"),
        (lambda x: x + 1, lambda x: (x + 1).to_sparse(), "result 0: layout"),
        (lambda x: x + 1, lambda x: (x + 1).to("meta"), "result 0: device meta, the host has the argument's"),
        (lambda x: x + 1, lambda x: x.add_(0) + 1, ""),
        (lambda x: x + 1, lambda x: x.add_(1).clone(), "argument 0 after the call: Tensor-likes are not close"),
        (lambda x: x.dim(), lambda x: 3, "result 0: value 3, the host has 2"),
        (lambda x: x + 1, lambda x: (x, x), "2 results, the host has 1"),
        (lambda x: x + 1, lambda x: x.view(5), "only the device raises RuntimeError"),
        (lambda x: x.view(5), lambda x: x + 1, "only the host raises RuntimeError"),
        (lambda x: x.view(5), lambda x: x.view(7), "raises shape '[7]' is invalid"),
        (lambda x: x.view(5), lambda x: x[3], "raises IndexError"),
    ],
)
def test_each_fact_can_differ(host, device, text):
    assert compare(seen(host, X), seen(host, X), "cpu") == (Status.AGREES, "")
    status, got = compare(seen(host, X), seen(device, X), "cpu")
    assert (status is Status.DIFFERS) is bool(text) and text in got


def test_a_rounding_agrees_and_is_told():
    status, text = compare(seen(lambda x: x * 3, X), seen(lambda x: x * (3 + 1e-6), X), "cpu")
    assert status is Status.ROUNDS and "Greatest relative difference" in text


def test_elements_of_a_random_result_are_not_compared_and_its_type_is():
    rand, other = seen(torch.rand_like, X), seen(lambda x: torch.rand_like(x) + 1, X)
    assert compare(rand, other, "cpu") == (Status.AGREES, "")
    assert compare(rand, seen(lambda x: torch.rand_like(x).double(), X), "cpu")[0] is Status.DIFFERS


def test_a_device_that_draws_the_hosts_random_numbers_differs():
    rand = seen(torch.rand_like, X)
    assert compare(rand, rand, "sim") == (Status.DIFFERS, "draws from the host's random numbers")
    seeds = seen(lambda x: (torch.manual_seed(3), x + 1)[1], X)
    assert compare(seeds, seeds, "sim") == (Status.AGREES, "")


def test_names_of_devices_in_errors_are_the_same_text():
    def fail(text):
        raise RuntimeError(text)

    host = seen(lambda: fail("found cpu and CPUFloatType at cpu:0"))
    assert compare(host, seen(lambda: fail("found sim and simFloatType at sim:0")), "sim")[0] is Status.AGREES


@pytest.mark.parametrize(
    "tensor",
    [X.t(), X[:, ::2], X.expand(4, 2, 3), X[1:], torch.ones(2, dtype=torch.complex64).conj(), torch.empty(0, 3),
     torch.tensor(1.0), torch.ones(2, dtype=torch.complex64).conj().imag],
    ids=["transposed", "gaps", "expanded", "offset", "conjugate", "empty", "scalar", "negative"],
)  # fmt: skip
def test_a_copy_has_the_strides_and_bits_of_the_tensor(tensor):
    copied = copy_to("cpu", tensor)
    assert torch.equal(copied, tensor) and copied.stride() == tensor.stride()
    assert (copied.is_conj(), copied.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert copied.data_ptr() != tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize(
    ("device", "status", "text"),
    [
        (lambda x: (x + 1).double(), Status.AGREES, ""),
        (lambda x: (x + 2).double(), Status.DIFFERS, "result 0: Tensor-likes are not close"),
        (lambda x: (x + 1).half(), Status.DIFFERS, "result 0: dtype torch.float16, the host has torch.float32"),
        (lambda x: (x + 1).requires_grad_(), Status.DIFFERS, "result 0: requires_grad True"),
        (lambda x: x.view(7), Status.DIFFERS, "only the device raises RuntimeError"),
    ],
)
def test_a_result_has_the_type_of_the_host_or_of_metas_kernel_and_the_hosts_elements(device, status, text):
    found = compare(seen(lambda x: x + 1, X), seen(device, X), "cpu", meta=seen(lambda x: (x + 1).double(), X))
    assert found[0] is status and text in found[1]


def test_a_result_without_elements_has_the_shape_of_the_host_or_of_metas_kernel():
    host, device, other = (seen(lambda x, shape=shape: x.new_empty(shape), X) for shape in ((0, 4), (0, 2), (0, 3)))
    assert compare(host, device, "cpu")[0] is Status.DIFFERS
    assert compare(host, device, "cpu", meta=device) == (Status.AGREES, "")
    assert compare(host, device, "cpu", meta=other)[0] is Status.DIFFERS


def test_an_error_is_the_hosts_or_that_of_metas_kernel_unless_meta_has_no_kernel():
    def fail(kind, text):
        raise kind(text)

    host, device = seen(lambda x: fail(IndexError, "of the host"), X), seen(lambda x: fail(IndexError, "of all"), X)
    none = seen(lambda x: fail(NotImplementedError, "of all"), X)
    assert compare(host, device, "cpu", meta=device) == (Status.AGREES, "")
    assert compare(host, none, "cpu", meta=none)[0] is Status.DIFFERS
    assert compare(seen(lambda x: x, X), device, "cpu", meta=device) == (Status.AGREES, "")
    assert compare(host, device, "cpu", meta=seen(lambda x: x, X))[0] is Status.DIFFERS


@pytest.mark.parametrize(("error", "status"), [(0.01, Status.ROUNDS), (-0.02, Status.ROUNDS), (0.03, Status.DIFFERS)])
def test_a_result_is_a_rounding_if_it_is_as_near_to_the_exact_one_as_the_hosts(error, status):
    exact, host = seen(lambda x: x.sum().double(), X), seen(lambda x: x.sum() + 0.02, X)
    device = seen(lambda x: x.sum() + error, X)
    assert compare(host, device, "cpu")[0] is Status.DIFFERS
    assert compare(host, device, "cpu", exact=exact)[0] is status
    assert compare(host, seen(lambda x: x.sum() * float("nan"), X), "cpu", exact=exact)[0] is Status.DIFFERS


@pytest.mark.parametrize(
    ("host", "device"),
    [
        (lambda x: x + 1j, lambda x: x + 2j),
        (lambda x: x.long() + 2**60, lambda x: x.long() + 2**60 + 1),
        (lambda x: x[:0], lambda x: x[:1]),
    ],
)
def test_results_of_one_type_are_no_roundings_of_each_other(host, device):
    assert (
        compare(seen(host, X), seen(device, X), "cpu", meta=seen(device, X), exact=seen(host, X))[0] is Status.DIFFERS
    )
