"""Errors: their types and texts, where the host and a device, or two devices, meet, and what a device lacks."""

import torch
from torch.nn import functional

from torch_ext.conformance.parity import program, raised

ITERATOR = "aten/src/ATen/TensorIterator.cpp: TensorIteratorBase::compute_types"
TWO = "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, "
ERROR = "AcceleratorError: DEVICE error: "
# What checks an argument's device names the kernel's wrapper, which has the dispatch key in its name.
CHECKED = "aten/src/ATen/core/adaption.cpp: common_device_check_failure"

@program(f"{ITERATOR} (the common device is the first that is not the host's)",
         dict.fromkeys(("add", "lt", "atan2", "the host first", "a number of the device"), f"{TWO}DEVICE:0 and cpu!"))
def host_and_device(gpu, name):
    here, there = torch.ones(2), torch.ones(2, device=gpu.type)
    of_host = {"the host first": there, "a number of the device": there[0]}
    return raised(lambda: here + of_host[name] if name in of_host else getattr(torch, name)(there, here))

@program(ITERATOR, f"{TWO}DEVICE:0 and DEVICE:1!", devices=2)
def two_devices(gpu):
    return raised(lambda: torch.ones(2, device=f"{gpu.type}:0") + torch.ones(2, device=f"{gpu.type}:1"))

@program(
    "aten/src/ATen/TensorIterator.cpp: compute_types (a number of the host fits every device)", [[2.0, 2.0], "DEVICE:0"]
)
def number_of_the_host(gpu):
    made = torch.ones(2, device=gpu.type) + torch.tensor(1.0)
    return [made.tolist(), str(made.device)]

@program(CHECKED, {"mm": "mat2", "bmm": "mat2", "dot": "tensor", "addmm": "mat2"})
def argument_of_the_host(gpu, name):
    *first, last = {"mm": [(2, 2)] * 2, "bmm": [(1, 2, 2)] * 2, "dot": [(2,)] * 2, "addmm": [(2, 2)] * 3}[name]
    there = [torch.ones(each, device=gpu.type) for each in first]
    text = raised(lambda: getattr(torch, name)(*there, torch.ones(last)))
    return text.partition("on the same device, but got ")[2].partition(" is on cpu, different from other tensors on")[0]

@program("aten/src/ATen/native/TensorAdvancedIndexing.cpp, IndexingUtils.h: checkIndexTensorTypes, index",
         "RuntimeError: indices should be either on cpu or on the same device as the indexed tensor (cpu)")
def index_of_the_device(gpu):
    return raised(lambda: torch.ones(2)[torch.tensor([1], device=gpu.type)])

@program("aten/src/ATen/native/cuda/IndexKernel.cu (CUDA_KERNEL_ASSERT); CUDA Programming Guide, Assertion",
         dict.fromkeys(("index", "embedding", "nll_loss", "gather", "multinomial"), f"{ERROR}device-side assert"))
def index_out_of_range(gpu, name):
    values, wrong = torch.ones(2, 2, device=gpu.type), torch.tensor([5, 5], device=gpu.type)
    calls = {
        "index": lambda: values[wrong], "embedding": lambda: functional.embedding(wrong, values),
        "nll_loss": lambda: functional.nll_loss(values, wrong), "gather": lambda: values.gather(1, wrong.view(2, 1)),
        "multinomial": lambda: torch.multinomial(values[0] - 2, 1),
    }
    return raised(lambda: [calls[name](), gpu.synchronize()])

@program("c10/cuda/CUDAException.cpp: c10_cuda_check_implementation; CUDA Runtime API: cudaErrorInvalidDevice", {
    **dict.fromkeys(("empty", "to", "set_device", "device"), f"{ERROR}invalid device ordinal"),
    "get_device_properties": "AssertionError: Invalid device id",
})
def device_that_does_not_exist(gpu, where):
    calls = {
        "empty": lambda: torch.empty(1, device=f"{gpu.type}:99"), "to": lambda: torch.ones(1).to(f"{gpu.type}:99"),
        "set_device": lambda: gpu.set_device(99), "device": lambda: gpu.device(99).__enter__(),
        "get_device_properties": lambda: gpu.get_device_properties(99),
    }
    return raised(calls[where])

@program("torch/csrc/utils/tensor_numpy.cpp: tensor_to_numpy",
         "TypeError: can't convert DEVICE:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
         "memory first.")
def to_numpy(gpu):
    return raised(torch.ones(1, device=gpu.type).numpy)

@program("aten/src/ATen/native/Memory.cpp: _pin_memory", "only dense CPU tensors can be pinned")
def pins_memory_of_the_device(gpu):
    text = raised(torch.ones(1, device=gpu.type).pin_memory)
    return "only dense CPU tensors can be pinned" if text.endswith("only dense CPU tensors can be pinned") else text

@program("aten/src/ATen/native/cuda/Blas.cpp (AT_DISPATCH of floating-point types)", {
    "mm": "\"addmm_cuda\" not implemented for 'Long'", "bmm": "\"baddbmm_cuda\" not implemented for 'Long'",
    "mv": "\"addmv_impl_cuda\" not implemented for 'Long'", "dot": "\"dot\" not implemented for 'Long'",
})
def product_of_integers(gpu, name):
    shapes = {"mm": [(2, 2)] * 2, "bmm": [(1, 2, 2)] * 2, "mv": [(2, 2), (2,)], "dot": [(2,)] * 2}
    made = [torch.ones(each, dtype=torch.int64, device=gpu.type) for each in shapes[name]]
    return raised(lambda: getattr(torch, name)(*made)).partition(": ")[2]

@program("aten/src/ATen/native/cuda/SummaryOps.cu: _histc_cuda; aten/src/ATen/Context.cpp: alertNotDeterministic", {
    "histc": "_histc_cuda with floating point input", "put_": "put_", "bincount": "_bincount_cuda",
})
def nondeterministic(gpu, name):
    torch.use_deterministic_algorithms(True)
    values, index = torch.ones(2, device=gpu.type), torch.tensor([0, 1], device=gpu.type)
    calls = {
        "histc": lambda: torch.histc(values), "put_": lambda: values.put_(index, values, accumulate=True),
        "bincount": lambda: torch.bincount(index, values),
    }
    text = raised(calls[name])
    return text.removeprefix("RuntimeError: ").partition(" does not have a deterministic implementation")[0]

@program("aten/src/ATen/native/cuda/DistributionTemplates.h, ATen/core/Generator.h: check_generator",
         "RuntimeError: Expected a 'DEVICE' device type for generator but found 'cpu'")
def generator_of_the_host(gpu):
    return raised(lambda: torch.ones(2, device=gpu.type).normal_(generator=torch.Generator()))

@program("torch/csrc/autograd/engine.cpp: validate_outputs", True)
def gradient_of_another_device(gpu):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_, value):
            return value * 1

        @staticmethod
        def backward(_, gradient):
            return gradient.cpu()

    text = raised(Wrong.apply(torch.ones(2, device=gpu.type, requires_grad=True)).sum().backward)
    return "returned an invalid gradient at index 0 - expected device " in text and text.endswith("but got cpu")

@program("aten/src/ATen/native/cuda/linalg; torch/_refs: linalg errors are raised by the host", {
    "solve": "torch.linalg.solve: The solver failed because the input matrix is singular.",
    "cholesky": "linalg.cholesky: The factorization could not be completed because the input is not positive-definite "
                "(the leading minor of order 1 is not positive-definite).",
    "inv": "linalg.inv: The diagonal element 1 is zero, the inversion could not be completed because the input matrix "
           "is singular.",
})
def singular_matrix(gpu, name):
    zeros, more = torch.zeros(2, 2, device=gpu.type), (torch.ones(2, device=gpu.type),) if name == "solve" else ()
    return raised(lambda: getattr(torch.linalg, name)(zeros, *more)).partition(": ")[2]

