"""Graphs: capture, replay, and what a capture refuses."""

import torch

from torch_ext.conformance.parity import program, raised

SOURCE = "aten/src/ATen/cuda/CUDAGraph.cpp"
MANUAL = "CUDA Runtime API, Stream Management: cudaStreamBeginCapture"
CAPTURING = "AcceleratorError: DEVICE error: operation not permitted when stream is capturing"

def captured(gpu, work, stream=None):
    """Return a graph of ``work``."""
    graph = torch.accelerator.Graph()
    with gpu.stream(stream or gpu.Stream()):
        graph.capture_begin()
        work()
        graph.capture_end()
    return graph

@program(f"{SOURCE}: replay, pool, capture_begin, capture_end", {
    "replay": "RuntimeError: Called CUDAGraph::replay without a preceding successful capture.",
    "pool": "RuntimeError: Called CUDAGraph::pool() without a preceding successful capture.",
    "default stream": "RuntimeError: CUDA graphs must be captured on a non-default stream. (However, after capture, "
                      "it's ok to replay them on the default stream.)",
    "twice": "RuntimeError: This CUDAGraph instance already owns a captured graph. To capture a new graph, "
             "create a new instance.",
    "other stream": "RuntimeError: Capture must end on the same stream it began on.",
})
def wrong_use(gpu, what):
    graph, value = torch.accelerator.Graph(), torch.ones(1, device=gpu.type)
    if what == "twice":
        graph = captured(gpu, lambda: value.add_(1))
        with gpu.stream(gpu.Stream()):
            return raised(graph.capture_begin)
    if what == "other stream":
        with gpu.stream(gpu.Stream()):
            graph.capture_begin()
            value.add_(1)
        with gpu.stream(gpu.Stream()):
            return raised(graph.capture_end)
    return raised({"default stream": graph.capture_begin}.get(what) or getattr(graph, what))

@program(f"{MANUAL} (work is recorded, not done); {SOURCE}: replay", [0.0, 1.0, 3.0])
def work_of_a_graph(gpu):
    value = torch.zeros(1, device=gpu.type)
    graph = captured(gpu, lambda: value.add_(1))
    found = [value.item()]
    graph.replay()
    found.append(value.item())
    graph.replay(), graph.replay()
    return [*found, value.item()]

@program("CUDA Programming Guide, CUDA Graphs (a graph keeps addresses, not values)", [[2.0], [10.0]])
def replay_reads_its_inputs(gpu):
    given, made = torch.ones(1, device=gpu.type), []
    graph = captured(gpu, lambda: made.append(given * 2))
    graph.replay()
    found = [made[0].tolist()]
    given.fill_(5.0)
    graph.replay()
    return [*found, made[0].tolist()]

@program(f"{MANUAL} (calls that wait are not permitted); cudaErrorStreamCaptureUnsupported", {
    "item": CAPTURING, "synchronize": CAPTURING, "cpu": CAPTURING, "query": CAPTURING, "nonzero": CAPTURING,
})
def refused_in_a_capture(gpu, what):
    value, graph, side = torch.ones(1, device=gpu.type), torch.accelerator.Graph(), gpu.Stream()
    calls = {"item": value.item, "synchronize": gpu.synchronize, "cpu": value.cpu, "query": side.query,
             "nonzero": value.nonzero}
    gpu.synchronize()
    with gpu.stream(side):
        graph.capture_begin()
        return raised(calls[what])

@program("torch/cuda/graphs.py: is_current_stream_capturing", [False, True, False])
def is_capturing(gpu):
    found, value = [gpu.is_current_stream_capturing()], torch.ones(1, device=gpu.type)
    captured(gpu, lambda: [value.add_(1), found.append(gpu.is_current_stream_capturing())])
    return [*found, gpu.is_current_stream_capturing()]

@program("c10/cuda/CUDACachingAllocator.cpp: beginAllocateToPool (a pool of its own; reset returns it)", [True, 1, 0])
def memory_of_a_graph(gpu):
    value = torch.ones(1, device=gpu.type)
    graph = captured(gpu, lambda: value * 2)
    private = [each for each in gpu.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0)]
    found = [tuple(private[0]["segment_pool_id"]) == tuple(graph.pool()), len(private)]
    graph.reset()
    gpu.empty_cache()
    return [*found, sum(tuple(each["segment_pool_id"]) != (0, 0) for each in gpu.memory_snapshot())]

@program(
    "aten/src/ATen/cuda/CUDAGeneratorImpl.cpp: Note [CUDA Graph-safe RNG states] (each replay advances)", [True, 8]
)
def random_numbers_of_a_graph(gpu):
    made, value = [], torch.ones(1, device=gpu.type)
    gpu.manual_seed(0)
    graph = captured(gpu, lambda: made.append(torch.rand(4, device=gpu.type) * value))
    graph.replay()
    first = made[0].clone()
    graph.replay()
    offset = int.from_bytes(bytes(gpu.get_rng_state().tolist()[8:]), "little")
    return [not torch.equal(first, made[0]), offset]

@program(
    f"{MANUAL}: cudaErrorStreamCaptureUnjoined", "AcceleratorError: DEVICE error: capturing stream has unjoined work"
)
def unjoined_work(gpu):
    value, graph, main, side = torch.ones(1, device=gpu.type), torch.accelerator.Graph(), gpu.Stream(), gpu.Stream()
    with gpu.stream(main):
        graph.capture_begin()
        side.wait_stream(main)
        with gpu.stream(side):
            value.add_(1)
        return raised(graph.capture_end)

@program(f"{MANUAL} (streams that wait for a captured event join)", [1.0, 3.0])
def joined_work(gpu):
    value, main, side = torch.ones(1, device=gpu.type), gpu.Stream(), gpu.Stream()

    def work():
        side.wait_stream(main)
        with gpu.stream(side):
            value.add_(2)
        main.wait_stream(side)

    graph = captured(gpu, work, main)
    found = [value.item()]
    graph.replay()
    return [*found, value.item()]

@program("CUDA Programming Guide, CUDA Graphs: cudaErrorCapturedEvent",
         "AcceleratorError: DEVICE error: operation not permitted on an event last recorded in a capturing stream")
def query_of_a_captured_event(gpu):
    value, event, graph = torch.ones(1, device=gpu.type), gpu.Event(), torch.accelerator.Graph()
    with gpu.stream(gpu.Stream()):
        graph.capture_begin()
        value.add_(1)
        event.record()
        return raised(event.query)

@program("c10/cuda/CUDACachingAllocator.cpp: Note [Interaction with CUDA graph capture] (freed memory is reused)", 1)
def memory_freed_in_a_capture(gpu):
    value = torch.ones(128, device=gpu.type)

    def work():
        for _ in range(4):
            value * 2

    graph = captured(gpu, work)
    segments = [each for each in gpu.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(graph.pool())]
    return len(segments)
