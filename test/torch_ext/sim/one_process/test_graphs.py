"""Graphs: capture runs nothing that a program could see, replay writes the same addresses, and CUDA's refusals."""

import contextlib
import gc
import threading

import pytest
import torch

from torch_ext.sim import _native, races

SIM = torch.get_device_module("sim")
FORBIDDEN = "operation not permitted when stream is capturing"


@contextlib.contextmanager
def capture(pool=None):
    """Capture on a stream of its own."""
    graph = torch.accelerator.Graph(pool=pool)
    with SIM.stream(SIM.Stream()), graph:
        yield graph


def test_a_capture_runs_nothing_and_replays_write_the_same_addresses():
    x, total = torch.ones(4, device="sim"), torch.zeros(4, device="sim")
    with capture() as graph:
        y = x * 2
        total.add_(y)
    assert total.tolist() == [0.0] * 4 and y.isnan().all()
    where = y.data_ptr()
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.data_ptr() == where and y.tolist() == [2 * value] * 4
    assert total.tolist() == [12.0] * 4


def test_a_training_step_of_a_whole_network_equals_the_eager_one():
    def train(graphed):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3, bias=False), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(72, 3)
        ).to("sim")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
        x = torch.zeros(2, 1, 8, 8, device="sim")

        def step():
            optimizer.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
            optimizer.step()

        step()
        SIM.synchronize()
        run = step
        if graphed:
            with capture() as graph:
                step()
            run = graph.replay
        for i in range(3):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
            run()
        return model.state_dict()

    # The host's convolution rounds by the alignment of its temporary memory, which is the host's in a replay.
    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


def test_replays_draw_the_numbers_that_eager_calls_would():
    x = torch.ones(64, device="sim")
    SIM.manual_seed(7)
    with capture() as graph:
        y = torch.nn.functional.dropout(x)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(y.cpu())
    SIM.manual_seed(7)
    for numbers in drawn:
        assert torch.equal(numbers, torch.nn.functional.dropout(x).cpu())
    assert not torch.equal(*drawn)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.ones(2).to("sim"),
        lambda x: SIM.current_stream().synchronize(),
        lambda x: SIM.current_stream().query(),
        lambda x: SIM.Stream().synchronize(),
        lambda x: SIM.synchronize(),
    ],
)
def test_host_waits_are_refused_and_invalidate_the_capture(call):
    x = torch.ones(4, device="sim")
    with pytest.raises(torch.AcceleratorError, match="failed due to a previous error during capture"), capture():
        with pytest.raises(torch.AcceleratorError, match=FORBIDDEN):
            call(x)
    assert x.add_(1).tolist() == [2.0] * 4 and not _native.is_current_stream_capturing()


def test_events_join_streams_to_a_capture_that_must_join_back():
    x = torch.ones(4, device="sim")
    for joins in (True, False):
        unjoined = pytest.raises(torch.AcceleratorError, match="capturing stream has unjoined work")
        with contextlib.nullcontext() if joins else unjoined, capture() as graph:
            main, side = SIM.current_stream(), SIM.Stream()
            side.wait_stream(main)
            with SIM.stream(side):
                assert _native.is_current_stream_capturing()
                y = x + 1
            if joins:
                main.wait_stream(side)
                z = y * 2
        if joins:
            graph.replay()
            assert z.tolist() == [4.0] * 4


def test_work_from_outside_cannot_be_waited_for_and_a_captured_event_not_outside():
    outside, inside = SIM.Event(), SIM.Event()
    outside.record()
    with pytest.raises(torch.AcceleratorError, match="previous error during capture"), capture():
        with pytest.raises(torch.AcceleratorError, match="dependency created on uncaptured work in another stream"):
            SIM.current_stream().wait_event(outside)
    with capture():
        torch.ones(1, device="sim").add_(1)
        inside.record()
    for wait in (inside.synchronize, inside.query, lambda: SIM.current_stream().wait_event(inside)):
        with pytest.raises(torch.AcceleratorError, match="event last recorded in a capturing stream"):
            wait()


def test_graphs_share_a_pool_that_lasts_as_long_as_they():
    gc.collect()  # graphs of other tests
    SIM.empty_cache()
    x = torch.ones(1024, device="sim")
    before = SIM.memory_reserved()
    with capture() as one:
        y = x + 1
    with capture(pool=one.pool()) as two:
        z = y * 2
    assert one.pool() == two.pool()
    del y
    SIM.empty_cache()
    one.replay()
    two.replay()
    assert z.tolist() == [4.0] * 1024 and SIM.memory_reserved() > before
    one.reset()
    two.reset()
    del z
    SIM.empty_cache()
    assert SIM.memory_reserved() == before


@pytest.mark.parametrize("ordered", [True, False])
def test_races_within_a_graph_are_found(ordered):
    x = torch.ones(4, device="sim")
    SIM.synchronize()
    races.start()
    try:
        with capture() as graph:
            main, side = SIM.current_stream(), SIM.Stream()
            side.wait_stream(main)
            with SIM.stream(side):
                x.add_(1)
            if ordered:
                main.wait_stream(side)
            x.mul_(2)
            main.wait_stream(side)
        graph.replay()
        graph.replay()
    finally:
        found = races.stop()
    operators = {(race.earlier.operator, race.later.operator) for race in found}
    assert operators == (set() if ordered else {("aten::add", "aten::mul")})


def test_memory_of_a_graph_serves_no_other_tensor_of_its_stream():
    stream, x, graph = SIM.Stream(), torch.ones(4, device="sim"), torch.accelerator.Graph()
    with SIM.stream(stream):
        with graph:
            y = (x * 2) + 1  # the product is freed
        others = [torch.zeros(4, device="sim") for _ in range(8)]
        graph.replay()
        assert y.tolist() == [3.0] * 4 and not any(other.any() for other in others)
        assert y.data_ptr() not in {other.data_ptr() for other in others}
        assert all(abs(y.data_ptr() - other.data_ptr()) > 2**20 for other in others)  # another segment


@pytest.mark.parametrize(
    ("mode", "refused"),
    [("global", {"here", "elsewhere"}), ("thread_local", {"here"}), ("relaxed", set())],
)
def test_a_mode_says_which_threads_may_wait_for_other_streams(mode, refused):
    found = set()

    def wait(place):
        try:
            SIM.Stream().synchronize()
        except torch.AcceleratorError:
            found.add(place)

    for place in ("here", "elsewhere"):
        graph = torch.accelerator.Graph(capture_error_mode=mode)
        with SIM.stream(SIM.Stream()), contextlib.suppress(torch.AcceleratorError), graph:
            torch.ones(1, device="sim").add_(1)
            if place == "here":
                wait(place)
            else:
                thread = threading.Thread(target=wait, args=(place,))
                thread.start()
                thread.join()
    assert found == refused


def test_a_generator_draws_in_a_capture_only_if_it_is_the_default_one():
    x, own = torch.ones(4, device="sim"), torch.Generator("sim")
    with pytest.raises(RuntimeError, match="generator not in capture mode"), capture():
        x.add_(1)
        x.normal_(generator=own)
