"""Copies and pinned memory: which calls wait, and what the allocator of the host does."""

import torch

from torch_ext.conformance.parity import program

SOURCE = "aten/src/ATen/core/CachingHostAllocator.h"
RULES = "CUDA Runtime API, API synchronization behavior"
LONG = 1 << 30  # cycles

def over_after(gpu, copy):
    """Return whether the work before and after ``copy`` is over when it returns."""
    before, after = gpu.Event(), gpu.Event()
    gpu._sleep(LONG)
    before.record()
    copy()
    after.record()
    return [before.query(), after.query()]

# The manual leaves open whether the host waits for a copy from pageable memory to the device.
@program(f"{RULES}: Memcpy, Asynchronous; aten/src/ATen/native/cuda/Copy.cpp: copy_kernel_cuda", {
    "pinned to device": [False, False], "device to pinned": [False, False], "device to device": [False, False],
    "device to pageable": [True, True],
})
def copy_that_need_not_wait(gpu, between):
    make = {"pinned": lambda: torch.ones(8).pin_memory(), "pageable": lambda: torch.ones(8),
            "device": lambda: torch.ones(8, device=gpu.type)}
    source, target = (make[kind]() for kind in between.split(" to "))
    gpu.synchronize()
    return over_after(gpu, lambda: target.copy_(source, non_blocking=True))

@program("aten/src/ATen/native/cuda/Copy.cpp: copy_kernel_cuda (waits unless non_blocking)", {
    "pinned to device": True, "device to pinned": True, "device to pageable": True, "pageable to device": True,
    "device to device": False,
})
def copy_that_waits(gpu, between):
    make = {"pinned": lambda: torch.ones(8).pin_memory(), "pageable": lambda: torch.ones(8),
            "device": lambda: torch.ones(8, device=gpu.type)}
    source, target = (make[kind]() for kind in between.split(" to "))
    gpu.synchronize()
    return over_after(gpu, lambda: target.copy_(source))[0]

@program("torch/csrc/autograd/python_variable.cpp (these read the value)", dict.fromkeys(
    ("item", "cpu", "tolist", "bool", "nonzero", "equal", "masked_select", "unique"), True))
def call_that_waits(gpu, name):
    value = torch.ones(8, device=gpu.type)
    calls = {
        "item": value.sum().item, "cpu": value.cpu, "tolist": value.tolist, "bool": lambda: bool(value.sum()),
        "nonzero": value.nonzero, "equal": lambda: torch.equal(value, value.clone()),
        "masked_select": lambda: value[value > 0], "unique": value.unique,
    }
    gpu.synchronize()
    return over_after(gpu, calls[name])[0]

@program("CUDA Programming Guide, Asynchronous Concurrent Execution (launches return at once)", dict.fromkeys(
    ("add", "mm", "fill", "sum", "zeros", "clone", "empty", "free"), False))
def call_that_does_not_wait(gpu, name):
    value = torch.ones(8, 8, device=gpu.type)
    calls = {
        "add": lambda: value + 1, "mm": lambda: value @ value, "fill": lambda: value.fill_(2.0), "sum": value.sum,
        "zeros": lambda: torch.zeros(4, device=gpu.type), "clone": value.clone,
        "empty": lambda: gpu.bytes(4), "free": lambda: gpu.bytes(4).untyped_storage().resize_(0),
    }
    value @ value, value.sum()  # loads libraries, which waits
    gpu.synchronize()
    return over_after(gpu, calls[name])[0]

@program(
    "torch/csrc/autograd; aten/src/ATen/native/Memory.cpp: is_pinned, _pin_memory", [True, True, False, False, True]
)
def pinned(gpu):
    made = torch.ones(4).pin_memory()
    return [made.is_pinned(), made[1:].is_pinned(), made.clone().is_pinned(), torch.ones(4).is_pinned(),
            torch.empty(4, pin_memory=True).is_pinned()]

@program(f"{SOURCE}: allocate (PowerOf2Ceil)", {1: 1, 3: 4, 4: 4, 1000: 1024, 1025: 2048, 4097: 8192})
def bytes_of_pinned_memory(gpu, size):
    _held = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return gpu.host_memory_stats()["allocated_bytes.current"]

@program(f"{SOURCE}: get_free_block (a freed block of that size)", [True, 1])
def reuse_of_pinned_memory(gpu):
    where = torch.empty(1000, dtype=torch.uint8, pin_memory=True).data_ptr()
    again = torch.empty(1024, dtype=torch.uint8, pin_memory=True).data_ptr()
    return [where == again, gpu.host_memory_stats()["num_host_alloc"]]

@program(f"{SOURCE}: free (waits for the streams that copy)", [False, True])
def pinned_memory_in_use(gpu):
    source, target = torch.ones(256).pin_memory(), torch.zeros(256, device=gpu.type)
    where = source.data_ptr()
    gpu._sleep(LONG)
    target.copy_(source, non_blocking=True)
    del source
    other = torch.empty(256, pin_memory=True)
    found = [other.data_ptr() == where]
    gpu.synchronize()
    return [*found, torch.empty(256, pin_memory=True).data_ptr() == where]

