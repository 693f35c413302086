"""Every public name of ``torch.cuda`` exists, or is refused with the reason; names that act have the right effect."""

import warnings

import pytest
import torch
import torch.cuda.memory
import torch.cuda.random
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from test.torch_ext.sim.one_process.every_kernel import HOST_READS, NO_HOST_READS
from torch_ext.sim import _absent

SIM = torch.get_device_module("sim")
_MODULES = {"": torch.cuda, "memory": torch.cuda.memory, "random": torch.cuda.random}


@pytest.mark.parametrize("which", _MODULES)
def test_every_public_name_of_cuda_exists_or_is_refused_with_a_reason(which):
    names = [name for name in _MODULES[which].__all__ if not name.startswith("_")]
    module = getattr(SIM, which) if which else SIM
    assert [name for name in names if not hasattr(module, name) and name not in _absent.REASONS] == []
    assert not [name for name in _absent.REASONS if hasattr(SIM, name)]
    assert SIM.streams.Stream is SIM.Stream and SIM.memory.memory_allocated is SIM.memory_allocated


def test_devices_reach_each_other_and_not_themselves():
    assert SIM.can_device_access_peer(0, "sim:1") and not SIM.can_device_access_peer(1, 1)
    with pytest.raises(AssertionError, match="Invalid device id 63"):
        SIM.can_device_access_peer(0, 63)


def test_memory_fraction_limits_allocations():
    SIM.set_memory_limit(4 << 20, "sim:2")  # two segments
    try:
        SIM.empty_cache()
        SIM.set_per_process_memory_fraction(0.5, "sim:2")
        assert SIM.get_per_process_memory_fraction("sim:2") == 0.5
        assert SIM.mem_get_info("sim:2")[1] == 4 << 20
        kept = [torch.empty(1 << 20, dtype=torch.uint8, device="sim:2") for _ in range(2)]
        with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 4.00 MiB .* 2.00 MiB allowed"):
            torch.empty(1, dtype=torch.uint8, device="sim:2")
        SIM.set_per_process_memory_fraction(1.0, "sim:2")
        kept.append(torch.empty(1, dtype=torch.uint8, device="sim:2"))
    finally:
        SIM.set_per_process_memory_fraction(1.0, "sim:2")
        SIM.set_memory_limit(1 << 34, "sim:2")
    for wrong, error in ((1, TypeError), (1.5, ValueError), (-0.1, ValueError)):
        with pytest.raises(error, match="raction"):
            SIM.set_per_process_memory_fraction(wrong)


@pytest.fixture
def sync_debug():
    yield SIM.set_sync_debug_mode
    SIM.set_sync_debug_mode("default")


@pytest.mark.parametrize("read", [*HOST_READS.values(), lambda x: SIM.current_stream().synchronize()])
def test_calls_that_block_the_host_warn_or_raise(read, sync_debug):
    x = torch.ones(4, device="sim")
    sync_debug("warn")
    assert SIM.get_sync_debug_mode() == 1
    with pytest.warns(UserWarning, match="called a synchronizing sim operation"):
        read(x)
    sync_debug("error")
    with pytest.raises(RuntimeError, match="called a synchronizing sim operation: "):
        read(x)
    sync_debug(0)
    read(x)


@pytest.mark.parametrize("call", [*NO_HOST_READS.values(), lambda x: SIM.synchronize()])
def test_calls_that_do_not_block_the_host_do_not_raise(call, sync_debug):
    x = torch.ones(4, device="sim")
    sync_debug("error")
    for wrong in ("loud", 3, -1):
        with pytest.raises(ValueError, match="debug_mode"):
            sync_debug(wrong)
    call(x)


def test_pinned_memory_is_counted():
    before = SIM.host_memory_stats()["active_bytes.current"]
    pinned = torch.empty(100, pin_memory=True)
    assert SIM.host_memory_stats()["active_bytes.current"] == before + pinned.nbytes
    SIM.reset_peak_host_memory_stats()
    assert SIM.host_memory_stats_as_nested_dict()["active_bytes"]["peak"] == before + pinned.nbytes
    assert SIM.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == SIM.memory_allocated()


@pytest.mark.parametrize(
    "hook", [default_hooks.bf16_compress_hook, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)]
)
def test_ddps_bfloat16_hooks_compress(group, hook):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False, device="sim"))
    model.register_comm_hook(dist.group.WORLD, hook)
    exact = 1 + 2**-10  # has more bits than bfloat16
    model(torch.full((1, 1), exact, device="sim")).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.dtype == torch.float32
    assert gradient.item() == torch.tensor(exact).bfloat16().float().item() != exact


def test_ddp_still_checks_the_signature_of_a_bfloat16_hook(group):
    def bf16_compress_hook(state: object, bucket: int) -> None: ...

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, device="sim"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="bucket annotation should be"):
            model.register_comm_hook(None, bf16_compress_hook)


def test_safetensors_load_to_the_device(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"weight": torch.arange(4.0).to("sim:1")}, tmp_path / "some.safetensors")
    for name, device in {"sim": "sim:0", "sim:1": "sim:1", "cpu": "cpu"}.items():
        assert str(safetensors.load_file(tmp_path / "some.safetensors", device=name)["weight"].device) == device
        with safetensors.safe_open(tmp_path / "some.safetensors", framework="pt", device=name) as opened:
            assert opened.get_tensor("weight").to("cpu").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_names_are_refused_with_a_reason():
    for module in (SIM, SIM.memory):
        with pytest.raises(AttributeError, match=r"torch\.sim has no 'CUDAPluggableAllocator': memory comes from the"):
            _ = module.CUDAPluggableAllocator
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = module.nonsense
    with pytest.raises(AttributeError, match=r"torch\.accelerator\.Graph"):
        _ = SIM.graph
