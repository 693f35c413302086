"""Programs for a GPU, a function each: where their device's name comes from, and what they do with ``torch.cuda``.

``test_programs.py`` runs all of them in one process of ``TORCH_EXT_SIM=cuda``, which prints how each ended. The oracle
is CUDA's documentation, or the same computation on the host.
"""

import copy
import enum
import importlib
import io
import json
import pickle
import re
import sys
import traceback
import types
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.cuda.comm
import torch.cuda.nccl
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils import collect_env
from torch.utils.data import DataLoader, TensorDataset

# --- where names come from ---

NAME = "".join(("cu", "da"))


class Kind(str, enum.Enum):
    GPU = NAME


def names():
    """Torch's own names of the device are CUDA's, and a name finds it wherever it comes from."""
    held = io.BytesIO()
    torch.save({"weight": torch.ones(2, device=NAME), "device": torch.device(NAME, 0)}, held)
    held.seek(0)
    for name in (
        Kind.GPU.value,
        torch.load(held)["device"].type,
        str(torch.device(NAME, 1)).split(":")[0],
        torch.accelerator.current_accelerator().type,
        torch.cuda.__name__.rpartition(".")[2],
        next(nn.Linear(1, 1).cuda().parameters()).device.type,
    ):
        x = torch.ones(2, device=name)
        assert name == "cuda" and x.is_cuda and x.device.type == name and x.device == torch.device(name, 0)
        assert getattr(torch, name).is_available() and getattr(torch, name) is torch.get_device_module(name)
        assert torch.amp.GradScaler(name).is_enabled() and torch.amp.is_autocast_available(name)
    assert torch.ones(1, device=Kind.GPU).is_cuda and torch.device(Kind.GPU) == torch.device("cuda")
    assert repr(torch.device("cuda", 1)) == "device(type='cuda', index=1)"
    assert repr(torch.ones(1).cuda()) == "tensor([1.], device='cuda:0')"
    assert torch.ones(1, device=1).device == torch.device("cuda:1") and torch.ones(1).to(2).device.index == 2
    assert nn.Linear(1, 1).to(3).weight.device == torch.device("cuda", 3) and torch.device(1).type == NAME


# --- tensors ---


def tensor_methods():
    x = torch.arange(4.0).cuda(1)
    assert x.get_device() == 1 and x.cuda(1) is x and x.cpu().cuda("cuda:1").device == x.device and x.is_cuda
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor([1, 2]).dtype is torch.int64 and x.type(torch.cuda.HalfTensor).dtype is torch.float16
    assert torch.cuda.LongTensor(size=(2, 3)).shape == (2, 3) and torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert torch.cuda.FloatTensor(torch.Size([2])).shape == (2,) and torch.cuda.FloatTensor(x).tolist() == x.tolist()
    assert x.is_pinned() is False and x.cpu().pin_memory().is_pinned() and not x.is_cpu and not x.is_meta
    assert x.cpu().type(torch.cuda.FloatTensor).is_cuda and x.double().type("torch.FloatTensor").device.type == "cpu"
    assert pickle.loads(pickle.dumps(torch.cuda.FloatTensor)) is torch.cuda.FloatTensor
    assert torch.ones(1).cuda(non_blocking=True).is_cuda
    assert nn.Linear(2, 2).cuda(device="cuda:3").weight.device.index == 3


def layouts():
    assert torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda").is_cuda
    assert torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], device="cuda", layout=torch.jagged).is_cuda
    x = torch.eye(3, device="cuda") * 2
    csr = x.to_sparse_csr()
    assert csr.is_cuda and (csr @ x).to_dense().diagonal().tolist() == [4, 4, 4] and csr.crow_indices().is_cuda


def default_device():
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


def save_and_load():
    held = io.BytesIO()
    torch.save(torch.arange(3.0, device="cuda:1"), held)
    assert b"cuda:1" in held.getvalue()
    for where, expected in (
        (None, "cuda:1"),
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        (torch.device("cuda:3"), "cuda:3"),
        ({"cuda:1": "cuda:0"}, "cuda:0"),
        (lambda storage, tag: storage.cuda(2) if tag == "cuda:1" else storage, "cuda:2"),
    ):
        held.seek(0)
        found = torch.load(held, map_location=where)
        assert str(found.device) == expected and found.tolist() == [0, 1, 2], (where, found.device)
    torch.save(torch.ones(1, device="cuda:1"), old := io.BytesIO(), _use_new_zipfile_serialization=False)
    old.seek(0)
    assert torch.load(old).device.index == 1


def storages():
    storage = torch.arange(4.0).cuda().untyped_storage()
    assert storage.is_cuda and storage.device == torch.device("cuda:0") and storage.get_device() == 0
    assert storage.cpu().device.type == "cpu" and storage.clone().is_cuda
    assert torch.ones(1).untyped_storage().cuda().is_cuda
    storage.resize_(0)
    assert storage.nbytes() == 0 and torch.UntypedStorage(8, device="cuda:1").device.index == 1
    typed = torch.ones(2).cuda().storage()
    assert typed.is_cuda and typed.cpu()[0] == 1.0 and typed.type() == "torch.cuda.FloatStorage"


def foreign_code_is_refused():
    x = torch.ones(2).cuda()
    assert not hasattr(x, "__cuda_array_interface__")
    for export in (x.__dlpack__, lambda: torch.utils.dlpack.to_dlpack(x), lambda: torch.from_dlpack(x)):
        _raises((BufferError, RuntimeError), "simulated", export)
    assert x.__dlpack_device__()[0] == 2  # kDLCUDA


# --- torch.cuda ---


def what_there_is():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 4 == torch.accelerator.device_count()
    assert torch.backends.cuda.is_built() and torch.version.cuda and "CUDA" in collect_env.get_pretty_env_info()
    ran = []
    torch.cuda._lazy_call(lambda: ran.append(1))  # how Megatron and fairscale set the states of their generators
    assert ran
    assert torch.version.hip is None and "simulated" in torch.cuda.get_device_name(1).lower()
    assert torch.cuda.get_device_capability() >= (7, 0) and torch.cuda.is_bf16_supported()
    properties = torch.cuda.get_device_properties("cuda:1")
    assert properties.total_memory > 0 and properties.major >= 7 and properties.multi_processor_count >= 1
    assert torch.cuda.is_tf32_supported() and f"sm_{properties.major}{properties.minor}" in torch.cuda.get_arch_list()
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_stats() and torch.accelerator.get_memory_info()[1] > 0


def setting_devices():
    torch.cuda.set_device("cuda:1")
    try:
        assert torch.ones(1, device="cuda").device.index == 1 == torch.accelerator.current_device_index()
        with torch.cuda.device(2):
            assert torch.cuda.current_device() == 2 and torch.ones(1).cuda().device.index == 2
            with torch.cuda.device_of(torch.ones(1, device="cuda:3")):
                assert torch.cuda.current_device() == 3
        with torch.accelerator.device_index(3), torch.cuda.device(None), torch.cuda.device(-1):
            assert torch.cuda.current_device() == 3
    finally:
        torch.cuda.set_device(torch.device("cuda", 0))
    _raises(torch.AcceleratorError, "invalid device ordinal", lambda: torch.cuda.set_device(63))


def streams_and_events():
    side = torch.cuda.Stream(device="cuda:0", priority=-1)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side and side.cuda_stream != 0
        begin.record()
        y = torch.ones(64, device="cuda") * 2
        end.record(side)
    torch.cuda.current_stream().wait_event(end)
    y.record_stream(torch.cuda.current_stream())
    end.synchronize()
    assert end.query() and begin.elapsed_time(end) >= 0 and y.sum().item() == 128
    assert torch.cuda.default_stream().cuda_stream == 0 and isinstance(side, torch.Stream) and side.query()
    assert torch.cuda.ExternalStream(side.cuda_stream, device=0) == side
    assert side.__cuda_stream__() == (0, side.cuda_stream) and side._as_parameter_.value == side.cuda_stream
    event = torch.cuda.Event(interprocess=True, blocking=True)
    assert event.cuda_event == 0
    event.record(side)
    assert event.cuda_event == event._as_parameter_.value != 0
    _raises(NotImplementedError, "cannot be shared between processes", event.ipc_handle)
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream) and isinstance(begin, torch.cuda.Event)
    torch.cuda.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize("cuda:1")
    assert torch.Stream(NAME).device.type == NAME and torch.Event(NAME).device.type == NAME


def memory():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20 and torch.cuda.max_memory_allocated() >= 4 << 20
    del x
    assert torch.accelerator.memory_allocated() == before == torch.cuda.memory.memory_allocated()
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= 4 << 20 and stats["num_alloc_retries"] == 0 and "num_ooms" in stats
    free, total = torch.cuda.mem_get_info(1)
    assert 0 < free <= total == torch.cuda.get_device_properties(1).total_memory
    assert "CUDA" in torch.cuda.memory_summary()
    torch.cuda.reset_max_memory_allocated()
    torch.cuda.reset_accumulated_memory_stats()


def out_of_memory():
    take = partial(torch.empty, 1 << 50, device="cuda", dtype=torch.uint8)
    _raises(torch.cuda.OutOfMemoryError, "out of memory", take)
    _raises(torch.OutOfMemoryError, "CUDA out of memory", take)
    assert torch.cuda.memory_stats()["num_ooms"] >= 1


def random_numbers():
    torch.manual_seed(3)
    a = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(a, torch.rand(4, device="cuda")) and torch.cuda.initial_seed() == 3
    states = torch.cuda.get_rng_state_all()
    b = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(b, torch.randn(4, device="cuda"))
    generator = torch.Generator(NAME).manual_seed(1)
    c = torch.rand(3, device="cuda", generator=generator)
    assert torch.equal(c, torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)))
    _raises(RuntimeError, "[Gg]enerator", lambda: torch.rand(3, generator=generator))
    with torch.random.fork_rng():
        torch.rand(7, device="cuda")
    assert len(torch.cuda.default_generators) == 4 and torch.cuda.seed() is None and torch.cuda.seed_all() is None


def hints():
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    _raises(ValueError, "Unrecognized", lambda: torch.cuda.memory._set_allocator_settings("unknown:1"))
    with torch.cuda.nvtx.range("c"), torch.autograd.profiler.emit_nvtx():
        torch.ones(1).cuda()
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    torch.cuda.cudart().cudaProfilerStart()
    _raises(NotImplementedError, "driver or runtime", lambda: torch.cuda.cudart().cudaHostRegister)
    torch.cuda.ipc_collect()
    torch.cuda._sleep(1000)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = False
    assert None not in (torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.preferred_linalg_library())
    with torch.backends.cudnn.flags(enabled=False, deterministic=True):
        F.conv2d(torch.ones(1, 1, 3, 3).cuda(), torch.ones(1, 1, 2, 2).cuda())
    torch.cuda.set_sync_debug_mode("error")
    x = torch.ones(4, device="cuda")
    _raises(RuntimeError, "synchronizing", x.sum().item)
    torch.cuda.set_sync_debug_mode("default")


def graphs():
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        assert torch.cuda.is_current_stream_capturing()
        y = x * 3
    graph.replay()
    assert y.tolist() == [3.0] * 4 and not torch.cuda.is_current_stream_capturing()
    _raises(NotImplementedError, "cudaGraph_t", graph.raw_cuda_graph)


def graphed_callables():
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


def names_of_torch_cuda():
    """Every public name means something, because a file imports them one by one; so do some that libraries use."""
    from torch_ext.cuda_as_sim import stand_in, table  # here, because the import replaces torch.cuda

    tried = 0
    for part in ("", *table.SUBMODULES):
        module = importlib.import_module(f"torch.cuda.{part}".rstrip("."))
        listed = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        for name in listed:
            if not isinstance(getattr(module, name, None), types.ModuleType) and name not in stand_in._KEPT_NAMES:
                table.find(name, part)
                tried += 1
    assert tried > 150
    for name in ("_lazy_init", "_lazy_call", "_CudaDeviceProperties", "_is_in_bad_fork", "BFloat16Tensor"):
        getattr(torch.cuda, name)
    assert torch.cuda.nccl.version() >= (2, 10, 0)
    assert torch.cuda._utils._get_device_index("cuda:2") == 2 and torch.cuda._utils._get_device_index(None, True) == 0
    _raises(RuntimeError, "NVML", lambda: torch.cuda.utilization())


def peers():
    parts = torch.cuda.comm.scatter(torch.arange(4.0), [0, 1])
    assert [str(part.device) for part in parts] == ["cuda:0", "cuda:1"]
    assert torch.cuda.comm.gather(parts, destination=-1).tolist() == [0, 1, 2, 3]
    copies = torch.cuda.comm.broadcast(torch.ones(2).cuda(), [0, 1])
    assert torch.cuda.comm.reduce_add(copies, 0).tolist() == [2, 2]
    assert nn.DataParallel(nn.Linear(2, 3).cuda(), device_ids=[0, 1])(torch.ones(4, 2).cuda()).shape == (4, 3)
    x = torch.ones(2, device="cuda:0")
    assert x.to("cuda:1", non_blocking=True).device.index == 1 and torch.cuda.can_device_access_peer(0, 1)


# --- training ---


def autocast_types():
    a, b = torch.ones(2, 2, device="cuda", requires_grad=True), torch.ones(2, 2).cuda()
    with torch.autocast(NAME):
        shares = [a.exp(), (a @ b).softmax(1), (a @ b).log_softmax(1)]
        assert {share.dtype for share in shares} == {torch.float32} and torch.is_autocast_enabled(NAME)
        torch.autograd.grad(sum(shares).sum(), a)
        assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8).cuda()] * 3).dtype is torch.float16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.amp.autocast():
            assert (a @ b).dtype is torch.float16 and torch.is_autocast_enabled()


def grad_scaler():
    for make in (partial(torch.amp.GradScaler, NAME), torch.cuda.amp.GradScaler, torch.amp.GradScaler):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler = make(init_scale=8.0)
        layer = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for factor, is_skipped in ((1.0, False), (float("inf"), True)):
            before = layer.weight.detach().clone()
            optimizer.zero_grad()
            scaler.scale(layer(torch.ones(1, 2).cuda()).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, layer.weight) is is_skipped
        assert scaler.get_scale() == 4.0


def training_as_on_the_host():
    def train(device):
        torch.manual_seed(0)
        layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device != "cpu")
        inputs, labels = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
        losses = []
        for _ in range(4):
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.testing.assert_close(train("cuda"), train("cpu"), rtol=1e-4, atol=1e-5)
    # Torch queries cuDNN's own kernel for this loss on CUDA alone.
    scores, targets = torch.randn(5, 2, 4, device="cuda").log_softmax(2), torch.ones(2, 3, dtype=torch.long).cuda()
    assert F.ctc_loss(scores, targets, (5, 5), (3, 3)).is_cuda
    inputs = [torch.arange(6.0).view(2, 3).half().to(where).requires_grad_() for where in ("cuda", "cpu")]
    for x in inputs:  # torch leaves these conversions to CUDA's kernels
        (x.softmax(1, torch.float32) - x.log_softmax(1, torch.float32)).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad.cpu(), inputs[1].grad)


def attention_backends():
    q = torch.randn(1, 2, 4, 8, device="cuda", requires_grad=True)
    fused = F.scaled_dot_product_attention(q, q, q)
    assert "Fused" in type(fused.grad_fn).__name__, fused.grad_fn
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        math = F.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(fused, math, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(output.square().sum(), q)[0] for output in (fused, math)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):  # of half precision alone
        _raises(RuntimeError, "No (available kernel|viable backend)", lambda: F.scaled_dot_product_attention(q, q, q))
    with torch.no_grad():
        assert nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).cuda().eval()(q[0]).is_cuda


def checkpointing():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    for reentrant in (True, False):
        x.grad = None
        out = checkpoint(lambda t: F.dropout(t, 0.5) * t, x, use_reentrant=reentrant)
        out.sum().backward()
        assert torch.equal(x.grad, 2 * out.detach())
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        x.square().sum().backward()


def loaders():
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    for workers in (0, 2):
        for inputs, labels in DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True):
            assert inputs.is_pinned() and inputs.cuda(non_blocking=True).is_cuda and labels.is_pinned()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert next(iter(DataLoader(data, batch_size=2, pin_memory=True, pin_memory_device=NAME)))[0].is_pinned()


def profiles():
    kinds = torch.profiler.ProfilerActivity
    assert kinds.CUDA in torch.profiler.supported_activities()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], record_shapes=True, profile_memory=True) as seen:
        (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    events = seen.key_averages()
    assert any(event.device_time_total > 0 for event in events), events.table()
    assert "CUDA" in events.table(sort_by="cuda_time_total")
    with torch.autograd.profiler.profile(use_device=NAME) as old:
        torch.ones(4, device="cuda").sum()
    assert old.key_averages()


def eager_compile():
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()

        @torch.compile(backend=backend, fullgraph=True)
        def step(x):
            if x.is_cuda and x.device.type == NAME:
                with torch.autocast(NAME):
                    return (x @ x).float() + torch.ones(2, 2, device=x.device)
            return x

        assert step(torch.ones(2, 2).cuda()).tolist() == [[3, 3], [3, 3]]

    @torch.compile(backend="eager")
    def count(x):
        torch.cuda.synchronize()
        with torch.cuda.device(0):
            return (x + torch.cuda.current_device()) * torch.cuda.device_count()

    assert count(torch.ones(1).cuda()).item() == 4
    current = torch._dynamo.disable(lambda: torch.cuda.current_stream(), recursive=False)  # it breaks the graph
    assert torch.compile(lambda x: current() and x, backend="eager")(torch.ones(1).cuda()).is_cuda


def scripts():
    held = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2).cuda(), torch.ones(1, 2).cuda()), held)
    for where, is_cuda in ((None, True), ("cpu", False)):
        held.seek(0)
        assert next(torch.jit.load(held, map_location=where).parameters()).is_cuda is is_cuda
    exported = torch.export.export(nn.Linear(2, 2).cuda(), (torch.ones(1, 2).cuda(),))
    assert exported.module()(torch.ones(1, 2).cuda()).is_cuda

    @torch.jit.script
    def move(x):
        there = x.cuda() + torch.ones(2, device="cuda") + torch.zeros(2, device=torch.device("cuda:0"))
        return x.cpu() if x.is_cuda else there

    assert move(torch.ones(2)).tolist() == [2, 2] and not move(torch.ones(2).cuda()).is_cuda


# --- processes ---


def _child(queue):
    try:
        queue.put((torch.ones(2, device=NAME).cuda(1).sum().item(), torch.cuda.device_count()))
    except RuntimeError as error:
        queue.put(str(error))


def spawned_children():
    for method in ("spawn", "forkserver"):
        context = mp.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=_child, args=(queue,))
        child.start()
        assert queue.get() == (2.0, 4), method
        child.join()
        assert child.exitcode == 0


def forked_children():
    """CUDA likewise refuses a device in a process forked from one that has used it."""
    refusal = "Cannot re-initialize CUDA in forked subprocess"
    for call in (torch.ones(1).cuda().cpu().cuda, torch.cuda.current_device, torch.cuda.get_rng_state):
        child = mp.get_context("fork").Process(target=_raises, args=(RuntimeError, refusal, call))
        child.start()
        child.join()
        assert child.exitcode == 0, call


# --- rarer uses of devices ---


def wrong_devices_are_refused():
    x = torch.ones(2)
    _raises(RuntimeError, "same device", lambda: x.cuda() + x)
    _raises(TypeError, "cuda:0 device type tensor to numpy", lambda: x.cuda().numpy())
    _raises(RuntimeError, "same device", lambda: x.cuda().index_put_((torch.tensor([0, 1]),), x))
    _raises(RuntimeError, "must be cuda device", lambda: x.cuda("cpu"))
    for call in (torch.cuda.set_device, torch.cuda.get_device_capability, torch.cuda.get_device_properties):
        _raises(ValueError, "Expected a cuda device", partial(call, "cpu"))
        _raises((torch.AcceleratorError, AssertionError), "[Ii]nvalid device", partial(call, 63))


def operators_of_programs():
    library = torch.library.Library("programs", "FRAGMENT")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda x: x * 3, "CUDA")
    library.impl("thrice", lambda x: x * 4, "CPU")
    assert torch.ops.programs.thrice(torch.ones(1).cuda()).item() == 3
    assert torch.histc(torch.arange(9).cuda(), 4, 0, 8).tolist() == [2, 2, 2, 3]  # tokens of experts


def transforms_in_half():
    """Fourier transforms in half precision are those in float, rounded, for the sizes that cuFFT accepts."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    x, y = torch.randn(4, 8).half(), torch.randn(4, 6).half()
    for transform in (torch.fft.fft, torch.fft.rfft2, lambda z: torch.fft.irfft(torch.fft.rfft(z)), torch.fft.ihfft):
        found, wanted = transform(x.cuda()), transform(x.float())
        assert found.dtype == (torch.complex32 if wanted.is_complex() else torch.float16), found.dtype
        assert torch.allclose(found.cpu().to(wanted.dtype), wanted, rtol=2e-3, atol=2e-3), (found, wanted)
        out = torch.empty(0, dtype=found.dtype, device="cuda")
        if transform in (torch.fft.fft, torch.fft.rfft2):
            assert transform(x.cuda(), out=out) is out
            assert torch.equal(torch.view_as_real(out), torch.view_as_real(found))
        _raises(RuntimeError, "powers of two when computing in half precision.* 6", lambda t=transform: t(y.cuda()))


def tensors_through_queues():
    assert nn.Linear(2, 2).cuda().share_memory().weight.is_shared()
    context = mp.get_context("spawn")
    queue, back = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=_double, args=(queue, back))
    child.start()
    queue.put(torch.arange(3.0, device="cuda:1"))
    found = back.get()
    queue.put(None)
    child.join()
    assert found.tolist() == [0, 2, 4] and found.device.index == 1 and child.exitcode == 0


def _double(queue, back):
    x = queue.get()
    back.put(x * 2)
    queue.get()


def inductor():
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    model, x = copy.deepcopy(plain).cuda(1), torch.randn(4, 8)
    compiled = torch.compile(model, mode="reduce-overhead")  # asks for CUDA graphs
    found, expected = compiled(x.cuda(1)).softmax(-1), plain(x).softmax(-1)
    assert found.device == torch.device("cuda:1")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    for loss in (found.pow(2).sum(), expected.pow(2).sum()):
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)

    @torch.compile
    def noisy(y):
        return F.dropout(y, 0.5) + torch.rand(8, device="cuda")

    assert noisy(x.cuda()).is_cuda


def gradients_between_devices():
    first, second = nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 1).to("cuda:1")
    seen = []
    first.weight.register_hook(lambda grad: seen.append(grad.device.index))
    second(first(torch.ones(1, 2).to("cuda:0")).to("cuda:1")).sum().backward()
    assert seen == [0] and second.weight.grad is not None and second.weight.grad.device.index == 1


def attention_of_dtensors():
    from torch import distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        host = torch.randn(2, 4, 8, 16)
        heads = distribute_tensor(host.cuda(), init_device_mesh("cuda", (1,)), [Shard(1)]).requires_grad_()
        found = F.scaled_dot_product_attention(heads, heads, heads)
        found.sum().backward()
        torch.testing.assert_close(found.full_tensor().cpu(), F.scaled_dot_product_attention(host, host, host))
        assert heads.grad is not None
    finally:
        dist.destroy_process_group()


def records_and_errors_of_nccl():
    from torch import distributed as dist

    c10d = torch._C._distributed_c10d
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (work := dist.all_reduce(torch.ones(2, device="cuda"), async_op=True)).wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            _raises(NotImplementedError, "deprecated", work.is_success)
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        dist.distributed_c10d._set_pg_timeout(backend.options._timeout)
        assert backend.get_error() == c10d.ErrorType.SUCCESS
        dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
        assert backend.options._timeout == dist.constants.default_pg_nccl_timeout
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9))
        assert backend.options._timeout == timedelta(seconds=9)
        for trace in (pickle.loads(c10d._dump_nccl_trace()), json.loads(c10d._dump_nccl_trace_json())):
            assert trace["entries"][-1]["profiling_name"] == "nccl:all_reduce"
    finally:
        dist.destroy_process_group()
    _raises(dist.DistBackendError, "was destroyed", lambda: backend.allreduce([torch.ones(1).cuda()]))


def stream_sanitizer():
    # Torch's own, which TORCH_CUDA_SANITIZER=1 turns on. It follows the callbacks of torch.cuda._gpu_trace.
    from torch.cuda import _gpu_trace, _sanitizer

    called = []
    events = ("event_creation", "event_record", "event_wait", "event_synchronization", "event_deletion")
    for when in (*events, "memory_allocation", "memory_deallocation", "stream_creation"):
        record = partial(lambda when, *numbers: called.append((when, *numbers)), when)
        getattr(_gpu_trace, f"register_callback_for_{when}")(record)
    event, stream = torch.cuda.Event(), torch.cuda.current_stream().cuda_stream
    event.record()
    number = event.cuda_event
    event.wait()
    event.synchronize()
    del event
    x = torch.ones(2, device="cuda")
    address = x.data_ptr()
    del x
    side = torch.cuda.Stream()
    of_event = {"event_record": (number, stream), "event_wait": (number, stream)}
    assert called == [
        *((when, *of_event.get(when, (number,))) for when in events),
        ("memory_allocation", address),
        ("memory_deallocation", address),
        ("stream_creation", side.cuda_stream),
    ], called

    other = torch.ones(1, device="cuda")

    def step(order):
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


def _raises(kind, pattern, call):
    try:
        call()
    except kind as error:
        assert re.search(pattern, str(error)), f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"nothing raised {kind}")


def programs():
    """Print the name of each program."""
    found = (value for value in globals().values() if isinstance(value, types.FunctionType))
    ours = (each.__name__ for each in found if each.__module__ == __name__ and each not in (programs, main))
    return [name for name in ours if not name.startswith("_") and name in globals()]


def main():
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
