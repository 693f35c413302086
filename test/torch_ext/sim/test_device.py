"""What torch code sees of a sim device in one process: placement, strictness, streams, random numbers, memory.

Each test would fail if the property in its name broke; the strictness tests are the ones that naive aliasing fails.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_ext.sim  # noqa: F401 - registers the device

SIM = torch.get_device_module("sim")


# --- strict devices ---


_Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
MIXED_CALLS: dict[str, _Call] = {
    "mm with host": lambda device, host, other: torch.mm(device, host),
    "add with host": lambda device, host, other: device + host,
    "host in place": lambda device, host, other: host.add_(device),
    "cat over devices": lambda device, host, other: torch.cat([device, other]),
    "mm over devices": lambda device, host, other: torch.mm(device, other),
    "out on host": lambda device, host, other: torch.mul(device, device, out=torch.empty(3, 3)),
    "out on another device": lambda device, host, other: torch.mul(
        device, device, out=torch.empty(3, 3, device="sim:1")
    ),
    "host module": lambda device, host, other: nn.Linear(3, 3)(device),
    "host convolution": lambda device, host, other: nn.Conv2d(1, 1, 1)(device[None, None]),
    "host batch norm": lambda device, host, other: nn.BatchNorm1d(3)(device),
    "host embedding": lambda device, host, other: nn.Embedding(3, 3)(torch.tensor([0], device="sim")),
    "set_ over devices": lambda device, host, other: torch.empty(0, device="sim:1").set_(device),
    "where": lambda device, host, other: torch.where(device > 0, device, host),
    "index on another device": lambda device, host, other: device[torch.tensor([0], device="sim:1")],
}


@pytest.mark.parametrize("name", MIXED_CALLS)
def test_mixed_devices_in_one_operator_are_an_error(name: str) -> None:
    device, host, other = (torch.ones(3, 3, device=where) for where in ("sim:0", "cpu", "sim:1"))
    with pytest.raises(RuntimeError, match="same device"):
        MIXED_CALLS[name](device, host, other)


def test_zero_dim_host_tensors_and_host_indices_are_accepted() -> None:
    x = torch.arange(6.0, device="sim").view(2, 3)
    assert (x + torch.tensor(1.0)).device == x.device
    assert x[torch.tensor([1])].tolist() == [[3.0, 4.0, 5.0]]
    x[torch.tensor([0])] = 7.0
    assert x[0].tolist() == [7.0, 7.0, 7.0]


def test_numpy_is_refused_and_cpu_copies() -> None:
    x = torch.ones(2, device="sim")
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        x.numpy()
    y = x.cpu()
    y.zero_()
    assert x.tolist() == [1.0, 1.0]


def test_device_index_out_of_range_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=f"sim:{SIM.device_count()}")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        SIM.set_device(SIM.device_count())


def test_missing_operator_names_operator_and_device() -> None:
    with pytest.raises(NotImplementedError, match=r"aten::_cudnn_init_dropout_state.* sim:0"):
        torch.ops.aten._cudnn_init_dropout_state(0.5, True, 1, device="sim")


_SPARSE_CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "aten::_to_sparse": lambda x: x.to_sparse(),
    "aten::_to_sparse_csr": lambda x: x.to_sparse_csr(),
    "aten::_sparse_coo_tensor_with_dims_and_tensors": lambda x: torch.eye(3).to_sparse().to("sim"),
    "aten::empty.memory_format": lambda x: torch.empty(2, 2, layout=torch.sparse_coo, device="sim"),
    "aten::mm": lambda x: torch.mm(torch.eye(3).to_sparse(), x),
    "aten::_embedding_bag_backward": lambda x: (
        nn.functional.embedding_bag(torch.tensor([[1]], device="sim"), x.requires_grad_(), sparse=True).sum().backward()
    ),
}


@pytest.mark.parametrize("operator", _SPARSE_CALLS)
def test_sparse_layouts_are_refused_by_operator_and_device(operator: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"'{operator}' .* sparse layout on the device sim"):
        _SPARSE_CALLS[operator](torch.eye(3, device="sim"))


# --- aliasing ---


def test_in_place_view_and_out_write_the_device_memory() -> None:
    x = torch.zeros(2, 3, device="sim")
    x.t()[0].add_(1)
    assert x.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    out = torch.empty(0, device="sim")
    returned = torch.add(x, 1, out=out)
    assert returned is out and out.shape == (2, 3) and out.device == x.device
    pointer = x.data_ptr()
    torch.nn.functional.relu_(x)
    assert x.data_ptr() == pointer


def test_results_that_share_memory_keep_sharing_it() -> None:
    x = torch.zeros(4, device="sim")
    one, two = x.split(2)
    one.fill_(3)
    assert x.tolist() == [3.0, 3.0, 0.0, 0.0] and two.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_conjugate_and_negative_views_resolve_on_the_device() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], device="sim")
    assert x.conj().resolve_conj().tolist() == [1 - 2j, 3 + 1j]
    assert x.conj().imag.resolve_neg().tolist() == [-2.0, 1.0]
    assert x.conj().cpu().tolist() == [1 - 2j, 3 + 1j]
    assert torch.vdot(x, x).item() == 15


def test_output_that_a_kernel_leaves_lazily_conjugated_is_the_same_number() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 3, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    factors, pivots = torch.linalg.lu_factor(a)
    expected = torch.linalg.lu_solve(factors, pivots, b, left=False, adjoint=True)
    got = torch.linalg.lu_solve(factors.to("sim"), pivots.to("sim"), b.to("sim"), left=False, adjoint=True)
    assert expected.is_conj() and torch.equal(got.cpu(), expected)


def test_empty_tensors_pass_through() -> None:
    x = torch.empty(0, 3, device="sim")
    assert (x @ torch.ones(3, 2, device="sim")).shape == (0, 2)
    assert torch.cat([x, torch.ones(1, 3, device="sim")]).shape == (1, 3)


def test_storage_resize_frees_and_brings_back() -> None:
    x = torch.ones(1000, device="sim")
    before = SIM.memory_allocated()
    x.untyped_storage().resize_(0)
    assert SIM.memory_allocated() == before - 4096
    x.untyped_storage().resize_(4000)
    assert SIM.memory_allocated() == before and x.fill_(2).sum().item() == 2000


def test_data_assignment_moves_a_parameter_between_device_and_host() -> None:
    parameter = nn.Parameter(torch.ones(3, device="sim"))
    parameter.data = parameter.data.cpu()
    assert parameter.device.type == "cpu"
    parameter.data = parameter.data.to("sim:1")
    assert parameter.device == torch.device("sim:1")


# --- streams and events ---


def test_streams_become_current_everywhere_at_once() -> None:
    before = torch.accelerator.current_stream()
    mine = SIM.Stream(priority=-1)
    with SIM.stream(mine):
        assert torch.accelerator.current_stream() == mine == SIM.current_stream()
        with torch.Stream("sim") as inner:
            assert SIM.current_stream() == inner
        assert SIM.current_stream() == mine
    assert torch.accelerator.current_stream() == before == SIM.default_stream()
    with SIM.stream(SIM.Stream("sim:1")):
        assert SIM.current_device() == 1
    assert SIM.current_device() == 0


def test_sleep_delays_the_stream_and_events_carry_the_delay_across() -> None:
    one, two = SIM.Stream(), SIM.Stream()
    event = SIM.Event()
    with SIM.stream(one):
        SIM._sleep(50_000_000)
        event.record()
    assert not one.query() and not event.query() and two.query()
    two.wait_event(event)
    assert not two.query()
    two.synchronize()
    assert event.query() and one.query()


def test_host_reads_wait_for_the_current_stream() -> None:
    x = torch.ones(1, device="sim")
    with SIM.stream(SIM.Stream()) as _:
        for read in (x.item, x.cpu, SIM.synchronize):
            SIM._sleep(20_000_000)
            read()
            assert SIM.current_stream().query()


def test_elapsed_time_is_what_the_stream_was_kept_busy() -> None:
    start, end = SIM.Event(enable_timing=True), torch.Event("sim", enable_timing=True)
    start.record()
    SIM._sleep(10_000_000)
    end.record()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 10.0 and isinstance(start, SIM.Event)
    plain = SIM.Event()
    plain.record()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        plain.elapsed_time(end)


# --- random numbers ---


def test_seed_decides_device_numbers_and_host_seed_does_not() -> None:
    torch.manual_seed(5)
    first = torch.rand(8, device="sim")
    torch.rand(3)
    torch.random.default_generator.manual_seed(99)
    second = torch.rand(8, device="sim")
    SIM.manual_seed(5)
    assert torch.equal(first, torch.rand(8, device="sim")) and torch.equal(second, torch.rand(8, device="sim"))
    assert not torch.equal(first, second)


def test_state_is_seed_and_offset_and_restores_the_sequence() -> None:
    SIM.manual_seed(7)
    torch.rand(5, device="sim")
    state = SIM.get_rng_state()
    assert state.view(torch.int64).tolist() == [7, 8]
    numbers = torch.randn(4, device="sim")
    SIM.set_rng_state(state)
    assert torch.equal(numbers, torch.randn(4, device="sim"))
    with pytest.raises(RuntimeError, match="16 bytes"):
        SIM.set_rng_state(state[:8])


def test_devices_have_their_own_generators_and_reject_foreign_ones() -> None:
    generator = torch.Generator("sim:1").manual_seed(3)
    one = torch.rand(4, device="sim:1", generator=generator)
    assert torch.equal(one, torch.rand(4, device="sim:1", generator=torch.Generator("sim:1").manual_seed(3)))
    for foreign in (torch.Generator(), torch.Generator("sim:0")):
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(4, device="sim:1", generator=foreign)
    SIM.manual_seed_all(1)
    assert torch.equal(torch.rand(4, device="sim:0").cpu(), torch.rand(4, device="sim:2").cpu())


def test_dropout_draws_from_the_device() -> None:
    x = torch.ones(64, device="sim")
    SIM.manual_seed(1)
    first = nn.functional.dropout(x, 0.5)
    torch.random.default_generator.manual_seed(4)
    SIM.manual_seed(1)
    assert torch.equal(first, nn.functional.dropout(x, 0.5)) and set(first.tolist()) == {0.0, 2.0}


# --- memory ---


def test_memory_counts_rounded_bytes_and_kernel_results() -> None:
    SIM.reset_peak_memory_stats("sim:3")
    before = SIM.memory_allocated("sim:3")
    x = torch.ones(1, device="sim:3")
    assert SIM.memory_allocated("sim:3") == before + 512 == torch.accelerator.memory_allocated(3)
    y = torch.softmax(torch.ones(256, 4, device="sim:3"), -1)  # the input is temporary, the result stays
    assert SIM.memory_allocated("sim:3") == before + 512 + 4096
    assert SIM.max_memory_allocated("sim:3") >= before + 512 + 2 * 4096
    del x, y
    assert SIM.memory_allocated("sim:3") == before


def test_limit_raises_out_of_memory_and_leaves_the_device_usable() -> None:
    _, total = SIM.mem_get_info("sim:2")
    SIM.empty_cache()
    SIM.set_memory_limit(1 << 20, "sim:2")
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory.*sim:2"):
            torch.empty(1 << 20, device="sim:2")
        base = torch.zeros(100_000, device="sim:2")
        with pytest.raises(torch.OutOfMemoryError):
            base.exp().add(base.exp()).add(base.exp())  # a kernel's own result runs out, not a factory
        assert torch.ones(3, device="sim:2").sum().item() == 3
    finally:
        SIM.set_memory_limit(total, "sim:2")


def test_poison_shows_unset_and_freed_memory() -> None:
    SIM.set_poison(True)
    try:
        assert torch.empty(100, device="sim").isnan().all().item()
        assert (torch.empty(100, device="sim", dtype=torch.int32) == -1).all().item()
    finally:
        SIM.set_poison(False)


def test_pinned_ranges_are_known_exactly() -> None:
    pinned = torch.empty(100, pin_memory=True)
    assert pinned.is_pinned() and pinned[50:].is_pinned()
    assert not torch.empty(100).is_pinned()
    assert torch.ones(4).pin_memory().to("sim", non_blocking=True).tolist() == [1.0] * 4


# --- serialization ---


def test_save_load_and_map_location() -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device="sim:1")}, buffer)
    for location, expected in ((None, "sim:1"), ("sim:2", "sim:2"), ("cpu", "cpu")):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=location)["x"]
        assert str(loaded.device) == expected and loaded.tolist() == [0.0, 1.0, 2.0]


def test_deepcopy_and_pickle_keep_the_device() -> None:
    module = nn.Linear(2, 2).to("sim:1")
    clone = copy.deepcopy(module)
    assert clone.weight.device == module.weight.device
    with torch.no_grad():
        clone.weight.zero_()
    assert module.weight.abs().sum().item() > 0
    tensor = torch.ones(2, device="sim:1")
    assert pickle.loads(pickle.dumps(tensor)).device == tensor.device


# --- training on the device equals training on the host ---


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.attention = nn.TransformerEncoderLayer(36, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent, self.gated = nn.LSTM(36, 5, batch_first=True), nn.GRU(5, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.convolution(x)).relu().flatten(2)
        hidden, _ = self.recurrent(self.attention(features))
        out, _ = self.gated(hidden)
        return out.square().mean()


def _train(device: str) -> list[float]:
    torch.manual_seed(0)
    net = _Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_step_equals_the_host() -> None:
    # The fused cells associate their sums otherwise than the host's, hence not exact; float32 noise over four steps.
    assert _train("sim") == pytest.approx(_train("cpu"), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_follows_the_policies_and_the_scaler_steps(dtype: torch.dtype) -> None:
    net = nn.Linear(4, 4).to("sim")
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("sim", init_scale=128.0)
    x = torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=dtype):
        y = net(x)
        assert y.dtype == dtype and torch.softmax(y, -1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(torch.sigmoid(y.float()), torch.ones_like(y).float())
        loss = y.float().sum()
    before = net.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(before - net.weight, torch.full_like(before, 0.2), atol=1e-3)  # the gradient is 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("of_input", "of_weight", "of_statistics"),
    [
        (torch.float16, torch.float16, torch.float32),
        (torch.float16, torch.float32, torch.float16),
        (torch.float32, torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
def test_batch_norm_takes_the_mixtures_of_types_that_gpus_take(
    of_input: torch.dtype, of_weight: torch.dtype, of_statistics: torch.dtype, training: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 3, 5), torch.rand(3) + 0.5, torch.rand(3)

    def run(device: str, *types: torch.dtype) -> list[torch.Tensor]:
        leaves = [one.to(device, kind).requires_grad_() for one, kind in zip((x, weight, bias), types, strict=False)]
        mean, variance = torch.zeros(3, device=device, dtype=types[3]), torch.ones(3, device=device, dtype=types[3])
        y = nn.functional.batch_norm(leaves[0], mean, variance, *leaves[1:], training=training)
        return [y, *torch.autograd.grad(y.square().sum(), leaves), mean, variance]

    expected = run("cpu", *[torch.float32] * 4)
    got = run("sim", of_input, of_weight, of_weight, of_statistics)
    wanted = [of_input, of_input, of_weight, of_weight, of_statistics, of_statistics]
    assert [one.dtype for one in got] == wanted
    for one, other in zip(got, expected, strict=True):
        # bfloat16 keeps eight bits; gradients of the weight are sums of twenty products.
        torch.testing.assert_close(one.float().cpu(), other, rtol=3e-2, atol=6e-2)


def test_batch_norm_refuses_the_mixture_that_gpus_refuse() -> None:
    x, half = torch.randn(4, 3, device="sim"), torch.ones(3, device="sim", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        nn.functional.batch_norm(x, None, None, half, half, training=True)


def test_checkpointing_replays_device_random_numbers() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(32, device="sim", requires_grad=True)
    for reentrant in (True, False):
        SIM.manual_seed(3)
        out = checkpoint(lambda t: nn.functional.dropout(t, 0.5) * t, x, use_reentrant=reentrant)
        (grad,) = torch.autograd.grad(out.sum(), x) if not reentrant else (_grad_of(out, x),)
        assert torch.equal(grad, 2 * out.detach())


def _grad_of(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x.grad = None
    out.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_matches_eager(backend: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu().sum()

    x = torch.randn(8, device="sim", requires_grad=True)
    expected = torch.autograd.grad(step(x), x)[0]
    got = torch.autograd.grad(torch.compile(step, backend=backend, fullgraph=True)(x), x)[0]
    assert torch.equal(expected, got) and got.device == x.device


# --- processes ---


def _in_fresh_interpreter(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_import_starts_no_thread_and_initialises_nothing() -> None:
    code = (
        "import os, torch, torch_ext.sim\n"
        "torch.manual_seed(1); torch.sim.device_count(); torch.sim.is_available()\n"
        "print(len(os.listdir('/proc/self/task')), torch.sim.is_initialized(), torch.sim._is_in_bad_fork())"
    )
    done = _in_fresh_interpreter(code, OPENBLAS_NUM_THREADS="1")
    assert done.stdout.split() == ["1", "False", "False"], done.stderr


def test_fork_after_first_use_is_refused_and_before_it_is_fine() -> None:
    code = (
        "import os, sys, torch, torch_ext.sim\n"
        "if sys.argv[1:] == ['used']: torch.ones(1, device='sim')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: torch.ones(1, device='sim')\n"
        "    except RuntimeError as error: print(torch.sim._is_in_bad_fork(), error, flush=True); os._exit(3)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert _in_fresh_interpreter(code).stdout.split() == ["0"]
    used = _in_fresh_interpreter(code.replace("sys.argv[1:] == ['used']", "True"))
    assert "Cannot re-initialize sim in forked subprocess" in used.stdout and used.stdout.split()[-1] == "3"


def test_device_count_is_read_at_first_use_and_checked() -> None:
    code = (
        "import os, torch, torch_ext.sim\n"
        "os.environ['TORCH_EXT_SIM_DEVICES'] = '7'\n"
        "torch.ones(1, device='sim:6'); os.environ['TORCH_EXT_SIM_DEVICES'] = '2'; print(torch.sim.device_count())"
    )
    assert _in_fresh_interpreter(code).stdout.split() == ["7"]
    use = "import torch, torch_ext.sim; torch.ones(1, device='sim')"
    bad = _in_fresh_interpreter(use, TORCH_EXT_SIM_DEVICES="many")
    assert "ValueError: TORCH_EXT_SIM_DEVICES=many" in bad.stderr


def test_devices_can_be_requested_until_the_first_use() -> None:
    ask = (
        "import torch, torch_ext.sim; torch.sim.request_devices(6); torch.sim.request_devices(2)\n"
        "print(torch.sim.device_count())\n"
        "if torch.sim.device_count() == 6: torch.ones(1, device='sim:5')\n"
        "torch.ones(1, device='sim:0'); torch.sim.request_devices(9); print(torch.sim.device_count())"
    )
    assert _in_fresh_interpreter(ask).stdout.split() == ["6", "6"]
    assert _in_fresh_interpreter(ask, TORCH_EXT_SIM_DEVICES="3").stdout.split() == ["3", "3"]
    for count in (0, 65):
        with pytest.raises(ValueError, match=f"from 1 to 64, got {count}"):
            torch.sim.request_devices(count)
