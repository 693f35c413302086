"""``torch.compile`` with Inductor on ``sim`` generates C++, which computes the same as the eager program."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn import functional

from test.torch_ext.sim.one_process.observed import is_touched, kernels, observe, ranges
from torch_ext.sim import races
from torch_ext.sim.races import RaceError

pytestmark = [
    pytest.mark.processes,  # the compiler
    # Inductor itself loads a module of torch that still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

sim = torch.get_device_module("sim")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with config.patch(fx_graph_cache=False, compile_threads=1):
        yield


def assert_compiled_equals_eager(program, *args):
    compiled, code = run_and_get_code(torch.compile(program, fullgraph=True), *args)
    source = "\n".join(code)
    assert "cpp_pybinding" in source and 'extern "C"' in source, source
    # Generated code rounds to 16 bits once for each kernel, eager code after each operator.
    eps = max(torch.finfo(arg.dtype).eps for arg in args)
    torch.testing.assert_close(compiled, program(*args), rtol=max(1e-5, 2 * eps), atol=max(1e-5, 2 * eps))


def pointwise_and_reductions(x, y):
    wide = functional.gelu(x) * y.sigmoid() + x.exp().clamp(max=3)
    normalized = functional.layer_norm(wide, (x.shape[-1],)) + functional.softmax(wide, -1)
    return [
        normalized, wide.sum(0), wide.mean(-1), wide.var(-1), wide.amax(1), wide.t().argmax(0), wide.cumsum(1),
        (wide > 0.5).any(-1), torch.where(wide > 0, wide, -1.0), wide.to(torch.int32).sum(),
    ]  # fmt: skip


def views_gathers_and_products(x, y):
    rows = torch.arange(x.shape[0] - 1, -1, -1, device=x.device)
    scattered = torch.zeros_like(x).index_add(0, rows % 3, y)
    return [
        torch.cat([x, y * 2], 1)[:, 3:-2], x[rows] + y, scattered + 1, (x @ y.t()).relu(),
        functional.pad(x, (1, 2)) * 3, x.t().contiguous() - 1, functional.embedding(rows, x) * y,
        torch.stack([x, y]).flip(0).reshape(-1, 2) + 1,
    ]  # fmt: skip


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_eager_execution(dtype):
    x, y = (torch.randn(9, 12, device="sim").to(dtype) for _ in range(2))
    assert_compiled_equals_eager(views_gathers_and_products, x, y)
    if dtype.itemsize == 4:
        assert_compiled_equals_eager(pointwise_and_reductions, x, y)


def test_arguments_of_two_devices_are_refused():
    with pytest.raises(Exception, match=r"(?i)device.*(sim:1|cpu)"):
        torch.compile(lambda x, y: x + y, fullgraph=True)(torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1"))


def test_generated_kernels_report_reads_and_writes_on_the_device_of_their_arguments():
    x, y = (torch.randn(9, 12, device="sim:1") for _ in range(2))
    start = x.clone()
    program = torch.compile(lambda x, y: (x.mul_(2), (x * y).sin().sum(0), y.cos()), fullgraph=True)
    _, code = run_and_get_code(program, x, y)
    assert "device='sim:1'" in code[0] and "cpp_pybinding" in code[0]
    result, entries = observe(program, x, y)
    assert any("fused" in entry["name"] for entry in kernels(entries))
    written, read = ranges(entries, written=True), ranges(entries, written=False)
    assert is_touched(y, read) and all(is_touched(one, written) for one in (x, *result))
    assert {entry["device"] for entry in kernels(entries)} == {1} and sim.current_device() == 0
    assert torch.equal(x, start * 4) and {one.device for one in result} == {x.device}


@pytest.mark.parametrize("waits", [False, True], ids=["racy", "twin"])
def test_generated_code_of_the_host_is_checked_for_races(waits):
    x, host, late = torch.ones(256, device="sim"), torch.zeros(256).pin_memory(), torch.zeros(256).pin_memory()
    program = torch.compile(lambda host, late: late.copy_(host * 2 + 1), fullgraph=True)
    program(host, late)
    with pytest.raises(RaceError) if not waits else contextlib.nullcontext() as raised, races.check():
        host.copy_(x, non_blocking=True)
        x.copy_(late, non_blocking=True)
        if waits:
            sim.synchronize()
        program(host, late)
    assert late.tolist() == [3.0] * 256
    if raised is not None:
        operators = [(race.earlier.operator, race.later.operator) for race in raised.value.races]
        assert operators == [("aten::copy_", "generated code")] * 2


def test_shapes_may_be_dynamic():
    compiled = torch.compile(lambda x: (x.sin() * x).sum(-1), dynamic=True, fullgraph=True)
    counters.clear()
    for length in (3, 7, 12):
        x = torch.randn(2, length, device="sim")
        torch.testing.assert_close(compiled(x), (x.sin() * x).sum(-1))
    assert counters["stats"]["unique_graphs"] == 1


def test_random_numbers_come_from_the_generator_of_the_device():
    @torch.compile(fullgraph=True)
    def program(x):
        return functional.dropout(x, 0.5) + torch.rand_like(x)

    x = torch.ones(4000, device="sim:1")
    sim.manual_seed_all(7)
    first, second = program(x), program(x)
    sim.manual_seed_all(7)
    assert torch.equal(program(x), first)
    assert not torch.equal(first, second)
    assert 1.3 < first.mean().item() < 1.7


@pytest.mark.costly
def test_branches_are_compiled_too():
    for value in (torch.ones(5, device="sim:1"), -torch.ones(5, device="sim:1")):
        assert_compiled_equals_eager(
            lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() + 1, (x,)), value
        )


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("autocast", [False, True], ids=["transformer", "convolution_under_autocast"])
def test_training_steps_are_those_of_eager_execution(autocast):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x, tolerance = torch.randn(3, 5, 8), {"rtol": 1e-4, "atol": 1e-5}
    if autocast:
        model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(3, 2))
        x, tolerance = torch.randn(3, 6, 5), {"rtol": 2e-2, "atol": 2e-2}
    eager, compiled = (copy.deepcopy(model).to("sim") for _ in range(2))
    torch._inductor.metrics.reset()
    for _ in range(2):
        losses = []
        for owner, step in ((eager, eager), (compiled, torch.compile(compiled, fullgraph=True))):
            with torch.autocast("sim", torch.bfloat16, enabled=autocast):
                loss = step(x.to("sim")).float().square().mean()
            loss.backward()
            torch.optim.SGD(owner.parameters(), lr=0.1).step()
            owner.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], **tolerance)
    assert torch._inductor.metrics.generated_kernel_count > 0
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), **tolerance)


def test_cached_code_of_another_state_of_the_simulator_is_not_served(tmp_path):
    def hits():
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda x: x.cos() * 3)(torch.ones(3, device="sim"))
        return counters["inductor"]["fxgraph_cache_hit"]

    with config.patch(fx_graph_cache=True), fresh_cache(dir=str(tmp_path)):
        assert [hits(), hits()] == [0, 1]
        with torch.compiler.config.patch(cache_key_tag=""):
            assert hits() == 0


def test_cpp_wrapper_is_refused_with_a_reason():
    with (
        config.patch(cpp_wrapper=True),
        pytest.raises(Exception, match="sim: the wrapper around the kernels is Python"),
    ):
        torch.compile(lambda x: x.cos() * 3)(torch.ones(3, device="sim"))


# Torch's template for the host needs these.
_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="Inductor compiles flex_attention for AVX2 alone"
)


def _attend(query, key, value, bias, **kwargs):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, i, j):
        return i >= j

    def near(score, b, h, i, j):
        return score + bias[h] * (j - i)

    mask = create_block_mask(causal, None, None, query.size(2), key.size(2), device=query.device)
    return torch.compile(flex_attention)(query, key, value, score_mod=near, block_mask=mask, **kwargs)


def _attended(device):
    """Query, key, value and a bias."""
    made = [torch.randn(1, 2, 256, 16) for _ in range(3)]
    return [each.to(device) for each in (*made, torch.tensor([0.1, 0.3]))]


@pytest.mark.costly
@_vectors
def test_flex_attention_is_that_of_the_host():
    inputs = _attended("cpu")
    on_host, (out, code) = _attend(*inputs), run_and_get_code(_attend, *(each.to("sim:1") for each in inputs))
    assert out.device == torch.device("sim:1")
    assert torch.equal(out.cpu(), on_host)
    assert any("flex" in text and "run_generated" in text for text in code)


@_vectors
def test_a_race_with_compiled_flex_attention_is_found():
    query, key, value, bias = _attended("sim")
    with torch.no_grad():
        _attend(query, key, value, bias)  # compiles
        sim.synchronize()
        with (
            pytest.raises(RaceError, match="what cpp_fused_flex_attention_0 reads"),
            races.check(),
            torch.Stream("sim"),
        ):
            value.fill_(2)
            with sim.stream(sim.default_stream()):
                _attend(query, key, value, bias)


@_vectors
def test_flex_attention_for_more_than_the_output_is_refused_with_a_reason():
    query, key, value, bias = _attended("sim")
    with pytest.raises(Exception, match="flex_attention on sim is compiled for its output alone"):
        _attend(query, key, value, bias, return_lse=True)
    with pytest.raises(Exception, match=r"Leave torch\.compile out"):
        _attend(query.requires_grad_(), key, value, bias)
    with torch.no_grad():
        assert _attend(query, key, value, bias).shape == query.shape


def test_host_tensors_are_compiled_as_before():
    x = torch.randn(9, 12)
    assert_compiled_equals_eager(lambda x: [x.sin() + 1, x.var(-1)], x)
