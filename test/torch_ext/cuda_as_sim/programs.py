"""Programs for a GPU, a function each: where their device's name comes from, and what they do with ``torch.cuda``.

``test_programs.py`` runs all of them in one process of ``TORCH_EXT_SIM=cuda``, which prints how each ended. The oracle
is CUDA's documentation, or the same computation on the host.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import copy
import dataclasses
import enum
import io
import json
import os
import pickle
import re
import string
import subprocess
import sys
import tempfile
import traceback
import types
import typing
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.cuda.comm
import torch.cuda.nccl
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# --- where names come from ---

NAME = "".join(("cu", "da"))


class Kind(str, enum.Enum):
    GPU = NAME
    HOST = "cpu"


class Auto(enum.StrEnum if sys.version_info >= (3, 11) else enum.Enum):  # type: ignore[misc]
    cuda = enum.auto() if sys.version_info >= (3, 11) else "cuda"


@dataclasses.dataclass
class Config:
    device: str = NAME
    amp: dict[str, object] = dataclasses.field(default_factory=lambda: {"device_type": NAME, "dtype": torch.bfloat16})


class Named(typing.NamedTuple):
    device: str = NAME
    index: int = 1


def _argv() -> str:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", *[NAME]], type=str)
    return str(parser.parse_args(["--device", NAME]).device)


def _environ() -> str:
    os.environ["PROGRAM_DEVICE"] = NAME
    return os.environ.pop("PROGRAM_DEVICE")


def _ini() -> str:
    parser = configparser.ConfigParser()
    parser.read_string("[run]\ndevice = cu" + "da\n")
    return parser["run"]["device"]


def _checkpoint() -> str:
    held = io.BytesIO()
    torch.save({"weight": torch.ones(2, device=NAME), "device": torch.device(NAME, 0)}, held)
    held.seek(0)
    return str(torch.load(held)["device"].type)


def _matched() -> str:
    match {"device": {"kind": NAME, "index": 1}}:
        case {"device": {"kind": "cpu"}}:
            return "cpu"
        case {"device": {"kind": kind, "index": 1}}:
            return kind
    raise AssertionError


NAMES: dict[str, Callable[[], str]] = {
    "json": lambda: str(json.loads('{"device": "cu\\u0064a"}')["device"]),
    "yaml, a line of it": lambda: dict(line.split(": ") for line in ("device: cuda", "lr: 1"))["device"],
    "a literal": lambda: str(ast.literal_eval("{'device': 'cu' 'da'}")["device"]),
    "ini": _ini,
    "a str Enum": lambda: Kind.GPU.value,
    "a StrEnum's auto": lambda: Auto.cuda.value,
    "a dataclass": lambda: Config().device,
    "a named tuple": lambda: Named().device,
    "a namespace": lambda: str(types.SimpleNamespace(device=NAME).device),
    "the environment": _environ,
    "argparse": _argv,
    "a regular expression": lambda: typing.cast("re.Match[str]", re.search(r"device=(\w+)", "x --device=cuda:1"))[1],
    "a template": lambda: string.Template("$kind").substitute(kind=NAME),
    "bytes": lambda: bytes.fromhex("63756461").decode(),
    "a pickle": lambda: str(pickle.loads(pickle.dumps(Config())).device),
    "a checkpoint": _checkpoint,
    "match": _matched,
    "eval": lambda: str(eval("'cu' + 'da'")),
    "the type of a device": lambda: torch.device(NAME, 1).type,
    "str.split of a device": lambda: str(torch.device(NAME, 1)).split(":")[0],
    "the accelerator": lambda: typing.cast(torch.device, torch.accelerator.current_accelerator()).type,
    "the module's name": lambda: torch.cuda.__name__.rpartition(".")[2],
    "a tensor": lambda: torch.ones(1).cuda().device.type,
    "a parameter": lambda: next(nn.Linear(1, 1).cuda().parameters()).device.type,
    "an argument default": partial(lambda device=NAME: device),
}


def names() -> None:
    """A name from any source names the device that a tensor then has, in every comparison and look-up."""
    for source, find in NAMES.items():
        name = find()
        x = torch.ones(2, device=name)
        module = getattr(torch, name)
        assert name == "cuda" and x.is_cuda and x.device.type == name, source
        assert {name: 1}.get(x.device.type) and str(x.device).startswith(name) and x.device == torch.device(name, 0), (
            source
        )
        assert module.is_available() and module is torch.get_device_module(name), source
        assert torch.amp.GradScaler(name).is_enabled() and torch.amp.is_autocast_available(name), source


def enums_as_devices() -> None:
    assert torch.ones(1, device=Kind.GPU).is_cuda and torch.device(Kind.GPU) == torch.device("cuda")
    assert torch.ones(1).to(Kind.GPU).is_cuda


def indices_as_devices() -> None:
    assert torch.ones(1, device=1).device == torch.device("cuda:1") and torch.ones(1).to(2).device.index == 2
    assert nn.Linear(1, 1).to(3).weight.device == torch.device("cuda", 3) and torch.device(1).type == NAME


def json_of_a_device() -> None:
    assert json.dumps({"device": str(torch.ones(1, device="cuda:1").device)}) == '{"device": "cuda:1"}'
    assert repr(torch.device("cuda", 1)) == "device(type='cuda', index=1)"
    assert repr(torch.ones(1).cuda()) == "tensor([1.], device='cuda:0')"


# --- tensors ---


def tensor_methods() -> None:
    x = torch.arange(4.0).cuda(1)
    assert x.get_device() == 1 and x.cuda(1) is x and x.cpu().cuda("cuda:1").device == x.device and x.is_cuda
    assert x.new_ones(2).device == x.device and torch.empty_like(x).is_cuda and x.new_tensor([1]).is_cuda
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor([1, 2]).dtype is torch.int64 and x.type(torch.cuda.HalfTensor).dtype is torch.float16
    assert torch.cuda.LongTensor(size=(2, 3)).shape == (2, 3) and torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert torch.cuda.FloatTensor(torch.Size([2])).shape == (2,) and torch.cuda.FloatTensor(x).tolist() == x.tolist()
    assert x.is_pinned() is False and x.cpu().pin_memory().is_pinned() and not x.is_cpu and not x.is_meta
    assert x.cpu().type(torch.cuda.FloatTensor).is_cuda and x.double().type("torch.FloatTensor").device.type == "cpu"


def mixed_devices_are_refused() -> None:
    _raises(RuntimeError, "same device", lambda: torch.ones(2).cuda() + torch.ones(2))
    _raises(RuntimeError, "same device", lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1"))
    _raises(TypeError, "cuda:0 device type tensor to numpy", lambda: torch.ones(2).cuda().numpy())
    _raises(RuntimeError, "invalid device ordinal", lambda: torch.ones(2, device="cuda:63"))


def factories() -> None:
    for make in (torch.zeros, torch.empty, torch.rand, torch.randn, torch.ones):
        assert make(2, 3, device="cuda").is_cuda, make
    assert torch.randperm(5, device="cuda").sort().values.tolist() == [0, 1, 2, 3, 4]
    assert torch.tensor([1], device="cuda").is_cuda and torch.full((2,), 3, device="cuda").is_cuda
    assert torch.as_tensor([1.0], device="cuda").is_cuda and torch.linspace(0, 1, 3, device="cuda").is_cuda
    assert torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda").is_cuda
    assert torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], device="cuda", layout=torch.jagged).is_cuda


def default_device() -> None:
    with torch.device(NAME):
        assert torch.ones(1).is_cuda and nn.Linear(1, 1).weight.is_cuda
    torch.set_default_device("cuda:1")
    try:
        assert torch.ones(1).device.index == 1 and torch.get_default_device() == torch.device("cuda:1")
    finally:
        torch.set_default_device(None)
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        assert torch.ones(1).is_cuda
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert not torch.ones(1).is_cuda


def copies() -> None:
    layer = nn.Linear(2, 2).cuda(1)
    twin = copy.deepcopy(layer)
    assert twin.weight.device == layer.weight.device and twin.weight.data_ptr() != layer.weight.data_ptr()
    x = torch.ones(2).cuda()
    assert pickle.loads(pickle.dumps(x)).device == x.device and copy.copy(x).is_cuda
    assert pickle.loads(pickle.dumps(torch.device(NAME, 1))) == torch.device("cuda:1")
    assert pickle.loads(pickle.dumps(torch.cuda.FloatTensor)) is torch.cuda.FloatTensor


def save_and_load() -> None:
    held = io.BytesIO()
    state = {"a": torch.arange(3.0, device="cuda:1"), "b": torch.ones(2), "c": nn.Linear(2, 2).cuda().state_dict()}
    torch.save(state, held)
    assert b"cuda:1" in held.getvalue()
    for where, expected in (
        (None, "cuda:1"),
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:2", "cuda:2"),
        (torch.device("cuda:3"), "cuda:3"),
        ({"cuda:1": "cuda:0"}, "cuda:0"),
        (lambda storage, tag: storage.cuda(2) if tag == "cuda:1" else storage, "cuda:2"),
    ):
        held.seek(0)
        found = torch.load(held, map_location=where)
        assert str(found["a"].device) == expected and found["a"].tolist() == [0, 1, 2], (where, found["a"].device)
    held.seek(0)
    assert torch.load(held, weights_only=True)["a"].device.index == 1
    torch.save(state, old := io.BytesIO(), _use_new_zipfile_serialization=False)
    old.seek(0)
    assert torch.load(old)["a"].device.index == 1
    with tempfile.NamedTemporaryFile() as file:
        torch.save(state, file.name)
        assert torch.load(file.name, mmap=True, map_location="cpu")["a"].tolist() == [0, 1, 2]


def storages() -> None:
    storage = torch.arange(4.0).cuda().untyped_storage()
    assert storage.is_cuda and storage.device == torch.device("cuda:0") and storage.get_device() == 0
    assert storage.cpu().device.type == "cpu" and storage.clone().is_cuda and storage.nbytes() == 16
    assert torch.UntypedStorage(8, device="cuda:1").device.index == 1
    assert torch.zeros(2).untyped_storage().cuda().is_cuda
    typed = torch.ones(2).cuda().storage()
    assert typed.is_cuda and typed.cpu()[0] == 1.0 and typed.type() == "torch.cuda.FloatStorage"


def foreign_code_is_refused() -> None:
    x = torch.ones(2).cuda()
    assert not hasattr(x, "__cuda_array_interface__")
    for export in (x.__dlpack__, lambda: torch.utils.dlpack.to_dlpack(x), lambda: torch.from_dlpack(x)):
        _raises((BufferError, RuntimeError), "simulated", export)
    assert x.__dlpack_device__()[0] == 2  # kDLCUDA


# --- torch.cuda ---


def what_there_is() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 4 == torch.accelerator.device_count()
    assert torch.backends.cuda.is_built() and torch.version.cuda
    ran: list[int] = []
    torch.cuda._lazy_call(lambda: ran.append(1))  # how Megatron and fairscale set the states of their generators
    assert ran
    assert torch.version.hip is None and "simulated" in torch.cuda.get_device_name(1).lower()
    assert torch.cuda.get_device_capability() >= (7, 0) and torch.cuda.is_bf16_supported()
    properties = torch.cuda.get_device_properties("cuda:1")
    assert properties.total_memory > 0 and properties.major >= 7 and properties.multi_processor_count >= 1
    assert isinstance(torch.backends.cuda.matmul.allow_tf32, bool) and isinstance(torch.cuda.get_arch_list(), list)


def setting_devices() -> None:
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device("cuda:1")
    try:
        assert torch.ones(1, device="cuda").device.index == 1 == torch.accelerator.current_device_index()
        with torch.cuda.device(2):
            assert torch.cuda.current_device() == 2 and torch.ones(1).cuda().device.index == 2
            with torch.cuda.device_of(torch.ones(1, device="cuda:3")):
                assert torch.cuda.current_device() == 3
        with torch.device("cuda:2"), torch.cuda.device(torch.device("cuda:2")):
            assert torch.cuda.current_device() == 2
        assert torch.cuda.current_device() == 1
        with torch.accelerator.device_index(3):
            assert torch.cuda.current_device() == 3
    finally:
        torch.cuda.set_device(torch.device("cuda", 0))
    _raises(RuntimeError, "invalid device ordinal", lambda: torch.cuda.set_device(63))


def streams_and_events() -> None:
    side = torch.cuda.Stream(device="cuda:0", priority=-1)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x = torch.ones(64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side and side.cuda_stream != 0
        begin.record()
        y = x * 2
        end.record(side)
    torch.cuda.current_stream().wait_event(end)
    y.record_stream(torch.cuda.current_stream())
    end.synchronize()
    assert end.query() and begin.elapsed_time(end) >= 0 and y.sum().item() == 128
    assert torch.cuda.default_stream().cuda_stream == 0 and isinstance(side, torch.Stream) and side.query()
    assert torch.cuda.ExternalStream(side.cuda_stream, device=0) == side
    assert side.__cuda_stream__() == (0, side.cuda_stream)
    event = torch.cuda.Event(interprocess=True)
    assert event.cuda_event == 0
    event.record(side)
    assert event.cuda_event == event._as_parameter_.value != 0
    _raises(NotImplementedError, "cannot be shared between processes", event.ipc_handle)
    assert side.priority == -1 and torch.cuda.default_stream().priority == torch.cuda.Stream().priority == 0
    assert side._as_parameter_.value == side.cuda_stream
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream) and isinstance(begin, torch.cuda.Event)
    with torch.cuda.StreamContext(side), side:
        assert torch.cuda.current_stream().stream_id == side.stream_id
    torch.cuda.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize("cuda:1")
    assert side.device == torch.device("cuda:0") and isinstance(hash(side), int)
    assert torch.Stream(NAME).device.type == NAME and torch.Event(NAME).device.type == NAME
    with torch.cuda.stream(None):
        pass
    _raises(ValueError, "enable_timing", lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()))


def memory() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20 and torch.cuda.max_memory_allocated() >= 4 << 20
    del x
    assert torch.cuda.memory_allocated() == before and torch.cuda.memory_reserved() >= before
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= 4 << 20 and stats["num_alloc_retries"] == 0 and "num_ooms" in stats
    free, total = torch.cuda.mem_get_info(1)
    assert 0 < free <= total == torch.cuda.get_device_properties(1).total_memory
    assert "CUDA" in torch.cuda.memory_summary() and isinstance(torch.cuda.memory_snapshot(), list)
    torch.cuda.reset_max_memory_allocated()
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.accelerator.memory_allocated() == before == torch.cuda.memory.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.memory._record_memory_history(max_entries=10)
    torch.ones(8, device="cuda")
    assert torch.cuda.memory._snapshot()["segments"] is not None
    torch.cuda.memory._record_memory_history(enabled=None)


def out_of_memory() -> None:
    def take() -> None:
        torch.empty(1 << 50, device="cuda", dtype=torch.uint8)

    _raises(torch.cuda.OutOfMemoryError, "out of memory", take)
    _raises(torch.OutOfMemoryError, "CUDA out of memory", take)
    assert torch.cuda.memory_stats()["num_ooms"] >= 1


def random_numbers() -> None:
    torch.manual_seed(3)
    a = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(a, torch.rand(4, device="cuda")) and torch.cuda.initial_seed() == 3
    torch.cuda.manual_seed_all(5)
    assert torch.equal(torch.rand(4, device="cuda:1"), torch.rand(4, device="cuda:2").to("cuda:1"))
    state = torch.cuda.get_rng_state()
    states = torch.cuda.get_rng_state_all()
    b = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(b, torch.randn(4, device="cuda")) and len(states) == 4 and state.device.type == "cpu"
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(b, torch.randn(4, device="cuda"))
    generator = torch.Generator(NAME).manual_seed(1)
    c = torch.rand(3, device="cuda", generator=generator)
    assert torch.equal(c, torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)))
    _raises(RuntimeError, "[Gg]enerator", lambda: torch.rand(3, generator=generator))
    _raises(RuntimeError, "[Gg]enerator", lambda: torch.rand(3, device="cuda", generator=torch.Generator()))
    with torch.random.fork_rng():
        torch.rand(7, device="cuda")
    assert len(torch.cuda.default_generators) == 4 and torch.cuda.seed() is None and torch.cuda.seed_all() is None
    F.dropout(torch.ones(8, device="cuda"), 0.5)


def hints() -> None:
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.mark("b")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("c"), torch.autograd.profiler.emit_nvtx():
        torch.ones(1).cuda()
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.ipc_collect()
    torch.cuda.init()
    torch.cuda._sleep(1000)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision("highest")
    torch.cuda.set_sync_debug_mode("warn")
    torch.cuda.set_sync_debug_mode("error")
    x = torch.ones(4, device="cuda")
    x[x > 0] = 3.0
    _raises(RuntimeError, "synchronizing", lambda: x.__setitem__(x > 0, x.sum()))
    torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.get_sync_debug_mode() == 0


def graphs() -> None:
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        assert torch.cuda.is_current_stream_capturing()
        y = x * 3
    graph.replay()
    assert y.tolist() == [3.0] * 4 and not torch.cuda.is_current_stream_capturing()
    _raises(NotImplementedError, "cudaGraph_t", graph.raw_cuda_graph)


def graphed_callables() -> None:
    eager = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).cuda()
    sample = torch.randn(3, 4, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (sample,))
    for _ in range(2):
        inputs = [torch.ones(3, 4, device="cuda", requires_grad=True) for _ in range(2)]
        for module, x in zip((eager, graphed), inputs, strict=True):
            module.zero_grad(set_to_none=True)
            module(x).square().sum().backward()
        pairs = zip((inputs[0], *eager.parameters()), (inputs[1], *graphed.parameters()), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one.grad, other.grad)


def measurements_are_refused() -> None:
    _raises(RuntimeError, "NVML", lambda: torch.cuda.utilization())


def lazy_names() -> None:
    """Names of ``torch.cuda`` that libraries look up before anything else."""
    for dotted in (
        "amp.autocast", "amp.GradScaler", "amp.custom_fwd", "amp.custom_bwd", "comm.broadcast", "memory.memory_stats",
        "nccl.version", "nvtx.range", "random.get_rng_state", "streams.Stream", "Stream", "Event", "_lazy_init",
        "_lazy_call",
        "_utils._get_device_index", "device", "get_sync_debug_mode", "graphs.CUDAGraph", "_CudaDeviceProperties",
        "memory.CUDAPluggableAllocator", "is_bf16_supported", "current_stream", "default_stream", "stream",
        "BFloat16Tensor",
        "memory.caching_allocator_alloc", "get_per_process_memory_fraction", "host_memory_stats", "OutOfMemoryError",
        "AcceleratorError", "_is_in_bad_fork", "check_error", "tunable.enable", "sparse.FloatTensor", "MemPool",
    ):  # fmt: skip
        found: object = torch.cuda
        for part in dotted.split("."):
            found = getattr(found, part)
    assert torch.cuda.nccl.version() >= (2, 10, 0)
    assert torch.cuda._utils._get_device_index("cuda:2") == 2 and torch.cuda._utils._get_device_index(None, True) == 0


def accelerator() -> None:
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.current_stream().device.type == NAME
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.set_device_index(1)
    assert torch.cuda.current_device() == 1
    torch.accelerator.set_device_index(0)
    assert torch.accelerator.memory_stats() and torch.accelerator.get_memory_info()[1] > 0


def peers() -> None:
    parts = torch.cuda.comm.scatter(torch.arange(4.0), [0, 1])
    assert [str(part.device) for part in parts] == ["cuda:0", "cuda:1"]
    assert torch.cuda.comm.gather(parts, destination=-1).tolist() == [0, 1, 2, 3]
    copies = torch.cuda.comm.broadcast(torch.ones(2).cuda(), [0, 1])
    assert torch.cuda.comm.reduce_add(copies, 0).tolist() == [2, 2]
    assert nn.DataParallel(nn.Linear(2, 3).cuda(), device_ids=[0, 1])(torch.ones(4, 2).cuda()).shape == (4, 3)
    x = torch.ones(2, device="cuda:0")
    assert x.to("cuda:1", non_blocking=True).device.index == 1 and torch.cuda.can_device_access_peer(0, 1)


# --- training ---


def autocast_types() -> None:
    a, b = torch.ones(2, 2).cuda(), torch.ones(2, 2).cuda()
    with torch.autocast(NAME):
        assert (a @ b).dtype is torch.float16 and a.exp().dtype is torch.float32 and torch.is_autocast_enabled(NAME)
    with torch.autocast(**Config().amp):  # type: ignore[arg-type]
        assert F.linear(a, b).dtype is torch.bfloat16 and torch.get_autocast_dtype(NAME) is torch.bfloat16
    with torch.autocast(NAME, enabled=False):
        assert (a @ b).dtype is torch.float32
    with torch.autocast("cpu"):
        assert (a @ b).dtype is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.amp.autocast():
            assert (a @ b).dtype is torch.float16 and torch.is_autocast_enabled()
    with torch.autocast(NAME, dtype=torch.float16):
        _raises(RuntimeError, "unsafe to autocast", lambda: F.binary_cross_entropy(torch.rand(2).cuda(), a[0]))
    with torch.autocast(NAME):
        assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8).cuda()] * 3).dtype is torch.float16
        assert (
            torch.cat([a.half(), b]).dtype is torch.float32 and nn.LayerNorm(2).cuda()(a.half()).dtype is torch.float32
        )


def custom_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=NAME, cast_inputs=torch.float32)
        def forward(ctx: typing.Any, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is torch.float32 and not torch.is_autocast_enabled(NAME)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type=NAME)
        def backward(ctx: typing.Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, device="cuda", dtype=torch.float16, requires_grad=True)
    with torch.autocast(NAME):
        Double.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


def grad_scaler() -> None:
    for make in (partial(torch.amp.GradScaler, NAME), torch.cuda.amp.GradScaler, torch.amp.GradScaler):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler = make(init_scale=8.0)
        assert scaler.is_enabled()
        layer = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        before = layer.weight.detach().clone()
        scaler.scale(layer(torch.ones(1, 2).cuda()).sum()).backward()
        scaler.unscale_(optimizer)
        assert layer.weight.grad.tolist() == [[1, 1]]
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, layer.weight) and scaler.get_scale() == 8.0
        before = layer.weight.detach().clone()
        layer.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, layer.weight) and scaler.get_scale() == 4.0


def training_as_on_the_host() -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).to(
            device
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device != "cpu")
        inputs, labels = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
        losses = []
        for _ in range(4):
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.testing.assert_close(train("cuda"), train("cpu"), rtol=1e-4, atol=1e-5)


def recurrent_layers() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = kind(3, 4, num_layers=2, batch_first=True)
        x = torch.randn(2, 5, 3)
        expected = layer(x)[0]
        layer.cuda().flatten_parameters()
        torch.testing.assert_close(layer(x.cuda())[0].cpu(), expected, rtol=1e-4, atol=1e-5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]).cuda()
    assert packed.is_cuda and layer(packed)[0].data.is_cuda


def attention_backends() -> None:
    q = torch.randn(1, 2, 4, 8, device="cuda")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        math = F.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), math, rtol=1e-4, atol=1e-5)
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    layer = nn.MultiheadAttention(8, 2, batch_first=True).cuda().eval()
    with torch.no_grad():
        assert layer(q[0], q[0], q[0])[0].is_cuda
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).cuda().eval()
    with torch.no_grad():
        assert encoder(q[0]).is_cuda


def checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda()
    for reentrant in (True, False):
        x.grad = None
        with torch.autocast(NAME):
            checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=True).sum().backward()
        assert x.grad is not None
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        layer(x).sum().backward()


def loaders() -> None:
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    for workers in (0, 2):
        for inputs, labels in DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True):
            assert inputs.is_pinned() and inputs.cuda(non_blocking=True).is_cuda and labels.is_pinned()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert next(iter(DataLoader(data, batch_size=2, pin_memory=True, pin_memory_device=NAME)))[0].is_pinned()


def profiles() -> None:
    kinds = torch.profiler.ProfilerActivity
    assert kinds.CUDA in torch.profiler.supported_activities()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], record_shapes=True, profile_memory=True) as seen:
        with torch.profiler.record_function("mine"):
            (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    events = seen.key_averages()
    assert any(event.device_time_total > 0 for event in events), events.table()
    assert "CUDA" in events.table(sort_by="cuda_time_total")
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        assert json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    with torch.autograd.profiler.profile(use_device=NAME) as old:
        torch.ones(4, device="cuda").sum()
    assert old.key_averages()


def eager_compile() -> None:
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()

        @torch.compile(backend=backend, fullgraph=True)
        def step(x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda and x.device.type == NAME:
                with torch.autocast(NAME):
                    return (x @ x).float() + torch.ones(2, 2, device=x.device)
            return x

        assert step(torch.ones(2, 2).cuda()).tolist() == [[3, 3], [3, 3]]


def compile_of_streams() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        with torch.cuda.device(0):
            y = x + torch.cuda.current_device()
        return y * torch.cuda.device_count()

    assert step(torch.ones(1).cuda()).item() == 4


def scripts() -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2).cuda(), torch.ones(1, 2).cuda())
    held = io.BytesIO()
    torch.jit.save(scripted, held)
    held.seek(0)
    assert next(torch.jit.load(held).parameters()).is_cuda
    held.seek(0)
    assert not next(torch.jit.load(held, map_location="cpu").parameters()).is_cuda
    exported = torch.export.export(nn.Linear(2, 2).cuda(), (torch.ones(1, 2).cuda(),))
    assert exported.module()(torch.ones(1, 2).cuda()).is_cuda


def fake_and_meta() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(2, device="cuda")
        assert x.device == torch.device("cuda:0") and (x + 1).is_cuda
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    assert layer.to_empty(device=NAME).weight.is_cuda


def quantized_and_low_precision() -> None:
    x = torch.randn(4, 4, device="cuda")
    assert x.bfloat16().is_cuda and (x.half() @ x.half()).dtype is torch.float16
    assert x.to(torch.float8_e4m3fn).to(torch.float32).is_cuda
    assert x.to(torch.complex64).abs().is_cuda


# --- processes ---


def _child(queue: typing.Any) -> None:
    try:
        queue.put((torch.ones(2, device=NAME).cuda(1).sum().item(), torch.cuda.device_count()))
    except RuntimeError as error:
        queue.put(str(error))


def spawned_children() -> None:
    for method in ("spawn", "forkserver"):
        context = mp.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=_child, args=(queue,))
        child.start()
        assert queue.get() == (2.0, 4), method
        child.join()
        assert child.exitcode == 0


def forked_children() -> None:
    """CUDA likewise refuses a device in a process forked from one that has used it."""
    torch.ones(1).cuda()
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert "Cannot re-initialize CUDA in forked subprocess" in str(queue.get())
    child.join()


# --- rarer uses of devices ---


def wrong_devices_are_refused() -> None:
    x = torch.ones(2)
    _raises(RuntimeError, "must be cuda device", lambda: x.cuda("cpu"))
    _raises(ValueError, "Expected a cuda device", lambda: torch.cuda.set_device("cpu"))
    _raises(ValueError, "Expected a cuda device", lambda: torch.cuda.synchronize("cpu"))
    _raises(ValueError, "Expected a cuda device", lambda: torch.cuda.memory_allocated("cpu"))
    _raises((RuntimeError, AssertionError), "[Ii]nvalid device", lambda: torch.cuda.get_device_properties(63))
    _raises(TypeError, "numpy", lambda: memoryview(x.cuda().__array__()))


def arguments_of_moves() -> None:
    x = torch.ones(1, 2, 2, 2)
    assert x.cuda(non_blocking=True).is_cuda and x.cuda(device="cuda:1").device.index == 1
    assert x.cuda(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
    assert x.to("cuda", torch.float16).dtype is torch.float16 and x.to(x.cuda(2)).device.index == 2
    assert nn.Linear(2, 2).to("cuda", torch.bfloat16, non_blocking=True).weight.is_cuda
    assert nn.Linear(2, 2).cuda(device=torch.device("cuda:3")).weight.device.index == 3
    with torch.cuda.device(None), torch.cuda.device(-1):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream("cuda:1").device.index == 1
    assert float(torch.ones(1).cuda()) == 1.0 and torch.ones(2).cuda().tolist() == [1, 1] and bool(torch.ones(1).cuda())
    torch.from_numpy(x.numpy()).cuda().cpu().numpy()


def operators_of_programs() -> None:
    @torch.library.custom_op("programs::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return x * 2

    @twice.register_kernel("cpu")
    def _(x: torch.Tensor) -> torch.Tensor:
        return x + x + 1

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    assert twice(torch.ones(1).cuda()).item() == 2 and twice(torch.ones(1)).item() == 3
    library = torch.library.Library("programs", "FRAGMENT")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda x: x * 3, "CUDA")
    library.impl("thrice", lambda x: x * 4, "CPU")
    assert torch.ops.programs.thrice(torch.ones(1).cuda()).item() == 3
    assert torch.compile(twice, backend="aot_eager")(torch.ones(1).cuda()).item() == 2


def scripted_functions() -> None:
    @torch.jit.script
    def move(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return x.cpu()
        return x.cuda() + torch.ones(2, device="cuda") + torch.zeros(2, device=torch.device("cuda:0"))

    assert move(torch.ones(2)).tolist() == [2, 2] and not move(torch.ones(2).cuda()).is_cuda


def transforms() -> None:
    x = torch.randn(3, 2, device="cuda")
    assert torch.func.vmap(lambda row: row * 2)(x).is_cuda
    assert torch.func.grad(lambda y: (y**2).sum())(x).is_cuda
    assert torch.func.vmap(lambda row: row + torch.rand_like(row), randomness="different")(x).is_cuda
    from torch.fx.experimental.proxy_tensor import make_fx

    assert make_fx(lambda y: y + torch.ones(2, device="cuda"))(x)(x).is_cuda


def optimizers() -> None:
    for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW):
        for options in (
            {},
            {"foreach": True},
            {"fused": True},
            {"capturable": True} if kind is not torch.optim.SGD else {},
        ):
            layer = nn.Linear(2, 2).cuda()
            optimizer = kind(layer.parameters(), lr=0.1, **options)
            before = layer.weight.detach().clone()
            layer(torch.ones(1, 2).cuda()).sum().backward()
            optimizer.step()
            assert not torch.equal(before, layer.weight), (kind, options)
            state = copy.deepcopy(optimizer.state_dict())
            kind(layer.parameters(), lr=0.1, **options).load_state_dict(state)


def libraries_of_math() -> None:
    x = torch.eye(3, device="cuda") * 2
    assert torch.linalg.inv(x).diagonal().tolist() == [0.5] * 3 and torch.linalg.cholesky(x).is_cuda
    assert torch.fft.fft(torch.ones(4).cuda()).real.tolist() == [4, 0, 0, 0]
    assert torch.linalg.svd(x).S.is_cuda and torch.linalg.eigh(x).eigenvalues.tolist() == [2, 2, 2]
    assert torch.backends.cuda.preferred_linalg_library() is not None
    csr = x.to_sparse_csr()
    assert csr.is_cuda and (csr @ x).to_dense().diagonal().tolist() == [4, 4, 4] and csr.crow_indices().is_cuda
    assert torch.einsum("ij,jk->ik", x, x).is_cuda and torch.bucketize(x, x[0].sort().values).is_cuda


def threads() -> None:
    """Each thread has its own current device, at first device 0, and its own streams."""
    import threading

    seen = []

    def work() -> None:
        seen.append(torch.cuda.current_device())
        torch.cuda.set_device(2)
        with torch.cuda.stream(torch.cuda.Stream()):
            seen.append(torch.ones(1, device="cuda").device.index)

    with torch.cuda.device(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert torch.cuda.current_device() == 1
    assert seen == [0, 2]


def tensors_through_queues() -> None:
    context = mp.get_context("spawn")
    queue, back = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=_double, args=(queue, back))
    child.start()
    queue.put(torch.arange(3.0, device="cuda:1"))
    found = back.get()
    queue.put(None)
    child.join()
    assert found.tolist() == [0, 2, 4] and found.device.index == 1 and child.exitcode == 0


def _double(queue: typing.Any, back: typing.Any) -> None:
    x = queue.get()
    back.put(x * 2)
    queue.get()


def modules_shared_with_children() -> None:
    layer = nn.Linear(2, 2).cuda()
    layer.share_memory()
    assert layer.weight.is_shared()


def forks_before_the_first_use() -> None:
    """Queries do not count as use of the device: CUDA too works in a child that is forked after them."""
    source = (
        "import os, torch\n"
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 4\n"
        "pid = os.fork()\n"
        "if not pid:\n    os._exit(0 if torch.ones(1).cuda().is_cuda else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def visible_devices() -> None:
    source = (
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '2,1'\nimport torch\n"
        "assert torch.cuda.device_count() == 2 and torch.ones(1, device='cuda:1').device.index == 1\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def workers_may_not_use_devices() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4)), num_workers=1, collate_fn=_to_device)
    _raises(RuntimeError, "re-initialize CUDA in forked subprocess", lambda: list(loader))


def _to_device(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows]).to(NAME)


def inductor() -> None:
    x = torch.randn(4, 8)
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    expected = layer(x)
    layer.cuda()
    torch._dynamo.reset()
    found = torch.compile(layer, mode="reduce-overhead")(x.cuda())  # asks for CUDA graphs
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)

    @torch.compile
    def noisy(y: torch.Tensor) -> torch.Tensor:
        return F.dropout(y, 0.5) + torch.rand(8, device="cuda")

    assert noisy(x.cuda()).is_cuda


def flexible_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn(1, 1, 16, 8, device="cuda")
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device=NAME)
    causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=mask), causal, rtol=1e-4, atol=1e-5)


def subclasses_and_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: typing.Any, types: object, args: typing.Any = (), kwargs: typing.Any = None
        ) -> object:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        (torch.ones(2, device="cuda") * 2).sum().item()
    assert torch.ops.aten.mul.Tensor in seen
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counted:
        torch.ones(2, 2).cuda() @ torch.ones(2, 2).cuda()
    assert counted.get_total_flops() == 16


def benchmarks_and_reports() -> None:
    from torch.utils import benchmark, collect_env

    timer = benchmark.Timer("x + 1", globals={"x": torch.ones(2).cuda()})
    assert timer.timeit(2).mean > 0
    assert "CUDA" in collect_env.get_pretty_env_info()


def cuda_of_backends() -> None:
    assert torch.backends.cuda.preferred_blas_library() is not None
    with torch.backends.cudnn.flags(enabled=False, deterministic=True):
        F.conv2d(torch.ones(1, 1, 3, 3).cuda(), torch.ones(1, 1, 2, 2).cuda())
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.ones(3).cuda().index_add_(0, torch.zeros(1, dtype=torch.long).cuda(), torch.ones(1).cuda())
    torch.use_deterministic_algorithms(False)


def events_between_processes_are_refused() -> None:
    _raises(Exception, ".", lambda: torch.cuda.Event(interprocess=True).ipc_handle())
    assert torch.cuda.Event(blocking=True).query()


def gradients_between_devices() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 1).to("cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return typing.cast(torch.Tensor, self.second(self.first(x.to("cuda:0")).to("cuda:1")))

    model = Split()
    seen = []
    model.first.weight.register_hook(lambda grad: seen.append((grad.device.index, torch.cuda.current_stream(0).device)))
    model(torch.ones(1, 2)).sum().backward()
    assert seen[0][0] == 0 and model.second.weight.grad is not None and model.second.weight.grad.device.index == 1


def attention_of_dtensors() -> None:
    from torch import distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        host = torch.randn(2, 4, 8, 16)
        heads = distribute_tensor(host.cuda(), init_device_mesh("cuda", (1,)), [Shard(1)]).requires_grad_()
        found = typing.cast(typing.Any, F.scaled_dot_product_attention(heads, heads, heads))
        found.sum().backward()
        torch.testing.assert_close(found.full_tensor().cpu(), F.scaled_dot_product_attention(host, host, host))
        assert heads.grad is not None
    finally:
        dist.destroy_process_group()


def records_and_errors_of_nccl() -> None:
    from torch import distributed as dist

    c10d = typing.cast(typing.Any, torch._C._distributed_c10d)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        work = dist.all_reduce(torch.ones(2, device="cuda"), async_op=True)
        assert work is not None and dist.group.WORLD is not None
        work.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            _raises(NotImplementedError, "deprecated", work.is_success)
        backend: typing.Any = dist.group.WORLD._get_backend(torch.device("cuda"))
        assert backend.get_error() == c10d.ErrorType.SUCCESS
        for trace in (pickle.loads(c10d._dump_nccl_trace()), json.loads(c10d._dump_nccl_trace_json())):
            assert trace["entries"][-1]["profiling_name"] == "nccl:all_reduce"
    finally:
        dist.destroy_process_group()


def stream_sanitizer() -> None:
    # Torch's own, which TORCH_CUDA_SANITIZER=1 turns on. It follows the callbacks of torch.cuda._gpu_trace.
    from torch.cuda import _gpu_trace, _sanitizer

    called = []
    for when in ("event_creation", "event_record", "event_wait", "event_synchronization", "event_deletion"):
        getattr(_gpu_trace, f"register_callback_for_{when}")(
            lambda *numbers, when=when: called.append((when, *numbers))
        )
    event, stream = torch.cuda.Event(), torch.cuda.current_stream().cuda_stream
    event.record()
    number = event.cuda_event
    event.wait()
    event.synchronize()
    del event
    on_stream = [("event_record", number, stream), ("event_wait", number, stream)]
    assert called == [
        ("event_creation", number),
        *on_stream,
        *((f"event_{when}", number) for when in ("synchronization", "deletion")),
    ], called

    for when in ("memory_allocation", "memory_deallocation", "stream_creation"):
        getattr(_gpu_trace, f"register_callback_for_{when}")(lambda number, when=when: called.append((when, number)))
    called.clear()
    x = torch.ones(2, device="cuda")
    address = x.data_ptr()
    del x
    side = torch.cuda.Stream()
    memory = [(f"memory_{when}", address) for when in ("allocation", "deallocation")]
    assert called == [*memory, ("stream_creation", side.cuda_stream)], called

    other = torch.ones(1, device="cuda")

    def step(order: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        _sanitizer.cuda_sanitizer.enable()
        try:
            x = torch.ones(256, device="cuda")
            order()
            with torch.cuda.stream(side):
                x.mul_(2)
            torch.cuda.synchronize()
        finally:
            _sanitizer.cuda_sanitizer.disable()

    step(lambda: side.wait_stream(torch.cuda.current_stream()))
    step(torch.cuda.synchronize)
    step(torch.cuda.current_stream().synchronize)
    step(other.nonzero)  # the host waits for the stream
    _raises(_sanitizer.CUDASanitizerErrors, "1 errors", lambda: step(lambda: None))


# --- running ---


def _raises(kind: typing.Any, pattern: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert re.search(pattern, str(error)), f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"nothing raised {kind}")


def programs() -> list[str]:
    """Print the name of each program."""
    found = (value for value in globals().values() if isinstance(value, types.FunctionType))
    ours = (each.__name__ for each in found if each.__module__ == __name__ and each not in (programs, main))
    return [name for name in ours if not name.startswith("_") and name in globals()]


def main() -> None:
    """Run the programs named on the command line, by default all; print how each ended, as JSON."""
    ends = {}
    for name in sys.argv[1:] or programs():
        try:
            globals()[name]()
            ends[name] = ""
        except BaseException:
            ends[name] = traceback.format_exc()
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
