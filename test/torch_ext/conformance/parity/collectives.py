"""Collectives of one rank, whose errors and records need no peer, and of two ranks."""

import json
import os
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_ext.conformance.parity import program, raised

NCCL = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
PYTHON = "torch/distributed/distributed_c10d.py"

def alone(gpu, timeout=timedelta(seconds=60)):
    """Make the only rank of a group."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "16"
    gpu.set_device(0)
    backend = dist.get_default_backend_for_device(gpu.type)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

def of(gpu, *shape, dtype=torch.float32):
    return torch.ones(*shape, device=gpu.type, dtype=dtype)

@program(f"{NCCL}: check_gpu_single_tensor, getNcclReduceOp, getNcclDataType, _allgather_base, _reduce_scatter_base", {
    "not contiguous": "ValueError: Tensors must be contiguous",
    "of the host": "RuntimeError: No backend type associated with device type cpu",
    "bitwise and": "ValueError: Cannot use ReduceOp.BAND with BACKEND",
    "bitwise or": "ValueError: Cannot use ReduceOp.BOR with BACKEND",
    "bitwise xor": "ValueError: Cannot use ReduceOp.BXOR with BACKEND",
    "average of booleans": "TypeError: Cannot use ReduceOp.AVG with boolean inputs",
    "16 bits": "TypeError: Input tensor data type is not supported for BACKEND process group: Short",
    "gathered type": "TypeError: output tensor must have the same type as input tensor",
    "gathered size": "ValueError: output tensor size must be equal to world_size times input tensor size",
    "scattered type": "TypeError: input tensor must be the same type as the output tensor.",
    "scattered size": "ValueError: input tensor must be the same size as output size times world size",
    "maximum of complex": "ValueError: all_reduce does not support RedOpType.MAX on complex tensors",
})
def refused(gpu, what):
    alone(gpu)
    x, op = of(gpu, 2, 2), dist.ReduceOp
    calls = {
        "not contiguous": lambda: dist.all_reduce(of(gpu, 2, 3).t()),
        "of the host": lambda: dist.all_reduce(torch.ones(2)),
        "bitwise and": lambda: dist.all_reduce(of(gpu, 2, dtype=torch.int32), op.BAND),
        "bitwise or": lambda: dist.all_reduce(of(gpu, 2, dtype=torch.int32), op.BOR),
        "bitwise xor": lambda: dist.all_reduce(of(gpu, 2, dtype=torch.int32), op.BXOR),
        "average of booleans": lambda: dist.all_reduce(of(gpu, 2, dtype=torch.bool), op.AVG),
        "16 bits": lambda: dist.all_reduce(of(gpu, 2, dtype=torch.int16)),
        "gathered type": lambda: dist.all_gather_into_tensor(x.double(), x),
        "gathered size": lambda: dist.all_gather_into_tensor(of(gpu, 5), x),
        "scattered type": lambda: dist.reduce_scatter_tensor(x.double(), x),
        "scattered size": lambda: dist.reduce_scatter_tensor(x, of(gpu, 5)),
        "maximum of complex": lambda: dist.all_reduce(of(gpu, 2, dtype=torch.complex64), op.MAX),
    }
    return raised(calls[what])

@program(PYTHON, {
    "twice": "ValueError: trying to initialize the default process group twice!",
    "no tensor": "TypeError: Invalid function argument. Expected parameter `tensor` of type torch.Tensor",
    "types": "ValueError: Invalid usage of tensors with different dtypesFound torch.float64 and  torch.float32",
    "itself": "ValueError: Invalid destination rank: destination rank should not be the same as the rank of the",
    "timeout": "TypeError: Expected timeout argument to be of type datetime.timedelta, got 1",
})
def refused_by_python(gpu, what):
    alone(gpu)
    x = of(gpu, 2)
    calls = {
        "twice": lambda: alone(gpu), "no tensor": lambda: dist.all_reduce([x]),
        "types": lambda: dist.all_gather([of(gpu, 2, dtype=torch.float64)], x), "itself": lambda: dist.send(x, 0),
        "timeout": lambda: dist.new_group(timeout=1),
    }
    return raised(calls[what]).partition("<")[0]

@program(f"{PYTHON}: all_reduce (async_op)", [True, True, True, [1.0]])
def asynchronous(gpu):
    alone(gpu)
    x = of(gpu, 1)
    work = dist.all_reduce(x, async_op=True)
    found = [dist.all_reduce(of(gpu, 1)) is None, work.wait()]
    gpu.synchronize()
    return [*found, work.is_completed(), x.tolist()]

@program(f"{NCCL}: WorkNCCL::synchronize (wait makes the stream wait, not the host)", [False, True])
def wait_of_the_stream(gpu):
    alone(gpu)
    x, after = of(gpu, 1), gpu.Event()
    dist.all_reduce(x)
    gpu.synchronize()
    gpu._sleep(1 << 30)
    dist.all_reduce(x, async_op=True).wait()
    after.record()
    found = [after.query()]
    gpu.synchronize()
    return [*found, after.query()]

@program("torch/csrc/distributed/c10d/Backend.hpp: getSequenceNumberForGroup", [0, 1, 3])
def sequence_numbers(gpu):
    alone(gpu)
    group, found = dist.group.WORLD, []
    for count in (0, 1, 2):
        for _ in range(count):
            dist.all_reduce(of(gpu, 1))
        found.append(group._get_sequence_number_for_group())
    return found

@program("torch/csrc/distributed/c10d/FlightRecorder.hpp: record, update_state", {
    "profiling_name": ["BACKEND:all_reduce", "BACKEND:_all_gather_base", "BACKEND:broadcast"],
    "collective_seq_id": [1, 2, 3], "input_sizes": [[[3]], [[2, 2]], [[1]]], "output_sizes": [[[3]], [[2, 2]], [[1]]],
    "input_dtypes": [["Float"], ["Float"], ["Long"]], "is_p2p": [False, False, False], "p2p_seq_id": [0, 0, 0],
    "state": ["completed"] * 3, "retired": [True] * 3, "timeout_ms": [60000] * 3,
})
def flight_record(gpu, key):
    alone(gpu)
    dist.all_reduce(of(gpu, 3))
    dist.all_gather_into_tensor(of(gpu, 2, 2), of(gpu, 2, 2))
    dist.broadcast(of(gpu, 1, dtype=torch.int64), 0)
    gpu.synchronize()
    native = torch._C._distributed_c10d
    dump = getattr(native, "_dump_nccl_trace_json", None) or native._dump_fr_trace_json
    for _ in range(100):  # a watchdog retires operations some time after their end
        entries = json.loads(dump())["entries"]
        if all(entry["retired"] for entry in entries):
            break
        time.sleep(0.05)
    return [entry[key] for entry in entries]

def of_two_ranks(gpu, body):
    """Return what ``body(rank)`` returns on each of two ranks, which are forks."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in (0, 1):
            pids.append(os.fork())
            if not pids[-1]:
                gpu.set_device(rank)
                backend, store = dist.get_default_backend_for_device(gpu.type), dist.FileStore(f"{folder}/store", 2)
                dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
                with open(f"{folder}/{rank}", "w") as file:
                    json.dump(body(rank), file)
                dist.barrier()
                os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)
        return [json.loads(open(f"{folder}/{rank}").read()) for rank in (0, 1)]

@program("NCCL User Guide, Collective Operations", {
    "all_reduce": [[3.0], [3.0]], "maximum": [[2.0], [2.0]], "average": [[1.5], [1.5]], "broadcast": [[1.0], [1.0]],
    "all_gather": [[1.0, 2.0]] * 2, "reduce_scatter": [[2.0], [4.0]], "all_to_all": [[0.0, 10.0], [0.0, 11.0]],
    "reduce": [[3.0], [2.0]], "send": [[1.0], [1.0]],
}, devices=2)
def result(gpu, name):
    def body(rank):
        device = torch.device(gpu.type, rank)
        x, two = torch.tensor([rank + 1.0], device=device), torch.zeros(2, device=device)
        numbers, tens = torch.tensor([1.0, 2.0], device=device), torch.tensor([10.0, 11.0], device=device) * rank
        calls = {
            "all_reduce": lambda: dist.all_reduce(x), "maximum": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
            "average": lambda: dist.all_reduce(x, dist.ReduceOp.AVG), "broadcast": lambda: dist.broadcast(x, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(two, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, numbers), "reduce": lambda: dist.reduce(x, 0),
            "all_to_all": lambda: dist.all_to_all_single(two, tens),
            "send": lambda: dist.recv(x, 0) if rank else dist.send(x, 1),
        }
        calls[name]()
        return (two if name in ("all_gather", "all_to_all") else x).tolist()

    return of_two_ranks(gpu, body)
