"""Streams and events: what is over, what waits for what, what is current, and errors."""

import threading

import torch

from torch_ext.conformance.parity import program, raised

LONG = 1 << 30  # cycles
STREAM, EVENT = "c10/cuda/CUDAStream.cpp", "c10/cuda/CUDAEvent.h"
RUNTIME = "CUDA Runtime API, Event Management: cudaEventQuery"

def asleep(gpu, stream=None):
    """Return a stream that is busy for a while."""
    stream = stream or gpu.Stream()
    with gpu.stream(stream):
        gpu._sleep(LONG)
    return stream

@program("CUDA Runtime API, Stream Management: cudaStreamQuery", [True, False, True])
def query_of_a_stream(gpu):
    side = gpu.Stream()
    found = [side.query(), asleep(gpu, side).query()]
    side.synchronize()
    return [*found, side.query()]

@program(f"{EVENT}: query (an event that was never recorded is over); {RUNTIME}", [True, False, True])
def query_of_an_event(gpu):
    event = gpu.Event()
    found = [event.query()]
    event.record(asleep(gpu))
    found.append(event.query())
    event.synchronize()
    return [*found, event.query()]

@program("CUDA Runtime API, Event Management: cudaEventRecord (captures the work so far)", [False, False, True])
def event_before_later_work(gpu):
    side, early, late = gpu.Stream(), gpu.Event(), gpu.Event()
    early.record(side)
    late.record(asleep(gpu, side))
    found = [side.query(), late.query()]
    return [*found, early.query()]

@program("CUDA Runtime API, Event Management: cudaEventRecord (may be called again, and replaces the state)",
         [False, True, False])
def event_recorded_again(gpu):
    event, found = gpu.Event(), []
    event.record(asleep(gpu))
    found.append(event.query())
    event.record(gpu.Stream())
    found.append(event.query())
    event.record(asleep(gpu))
    return [*found, event.query()]

@program(f"{EVENT}: elapsed_time", {
    "no timing": "ValueError: Both events must be created with argument 'enable_timing=True'.",
    "one has no timing": "ValueError: Both events must be created with argument 'enable_timing=True'.",
    "not recorded": "ValueError: Both events must be recorded before calculating elapsed time.",
    "not over": "RuntimeError: Both events must be completed before calculating elapsed time.",
    "fine": "raises nothing",
})
def elapsed_time(gpu, case):
    first, second = (
        gpu.Event(enable_timing=case != "no timing"),
        gpu.Event(enable_timing=not case.endswith("no timing")),
    )
    if case != "not recorded":
        first.record()
        second.record(asleep(gpu) if case == "not over" else None)
    if case == "fine":
        second.synchronize()
    return raised(lambda: first.elapsed_time(second))

@program("CUDA Runtime API, Event Management: cudaEventElapsedTime (signed)", [0.0, True, True])
def elapsed_time_by_order(gpu):
    first, second = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
    first.record()
    gpu._sleep(1 << 20)
    second.record()
    second.synchronize()
    return [first.elapsed_time(first), first.elapsed_time(second) > 0, second.elapsed_time(first) < 0]

@program("CUDA Runtime API, Stream Management: cudaStreamWaitEvent", [True, False, False, True])
def waits_for_an_event(gpu):
    side, event = gpu.Stream(), gpu.Event()
    found = [side.query()]
    event.record(asleep(gpu))
    side.wait_event(event)
    found += [side.query(), event.query()]
    side.synchronize()
    return [*found, event.query()]

@program("CUDA Runtime API, Stream Management: cudaStreamWaitEvent (no effect without a record)", True)
def waits_for_an_unrecorded_event(gpu):
    side = gpu.Stream()
    asleep(gpu)
    side.wait_event(gpu.Event())
    return side.query()

@program("CUDA Runtime API, Stream Management: cudaStreamWaitEvent (of the record before the call)", [False, True])
def wait_is_for_the_record_before_it(gpu):
    side, event = gpu.Stream(), gpu.Event()
    event.record(gpu.Stream())
    side.wait_event(event)
    event.record(asleep(gpu))
    return [event.query(), side.query()]

@program("CUDA Runtime API, Device Management: cudaDeviceSynchronize", [True, True, True])
def synchronized_device(gpu):
    sides = [asleep(gpu), asleep(gpu), asleep(gpu, gpu.current_stream())]
    gpu.synchronize()
    return [side.query() for side in sides]

@program("CUDA Runtime API, Stream Management: cudaStreamSynchronize (of one stream)", [True, False])
def synchronized_stream(gpu):
    other, side = asleep(gpu), gpu.Stream()
    side.synchronize()
    return [side.query(), other.query()]

@program(
    f"{STREAM}: getStreamFromPool (kStreamsPerPool = 32, round robin)",
    {31: [31, False], 32: [32, False], 33: [32, True]},
)
def streams_of_the_pool(gpu, count):
    made = [gpu.Stream() for _ in range(count)]
    return [len({stream.stream_id for stream in made}), made[0] == made[-1]]

@program(f"{STREAM}: getStreamFromPool (priorities)", {0: 0, 1: 0, -1: -1})
def priority_of_a_stream(gpu, priority):
    return gpu.Stream(priority=priority).priority

@program(f"{STREAM}: getDefaultCUDAStream, getCurrentCUDAStream", [True, True, 0])
def default_stream(gpu):
    default = gpu.default_stream()
    return [gpu.current_stream() == default, torch.accelerator.current_stream() == default, default.stream_id]

@program("torch/cuda/__init__.py: StreamContext.__exit__", [True, True])
def current_stream_after_an_error(gpu):
    try:
        with gpu.stream(gpu.Stream()):
            inside = gpu.current_stream() != gpu.default_stream()
            raise LookupError
    except LookupError:
        return [inside, gpu.current_stream() == gpu.default_stream()]

@program(f"{STREAM}: current_streams is thread_local", [True, True])
def current_stream_of_a_thread(gpu):
    found = []
    with gpu.stream(gpu.Stream()):
        thread = threading.Thread(target=lambda: found.append(gpu.current_stream() == gpu.default_stream()))
        thread.start()
        thread.join()
        return [*found, gpu.current_stream() != gpu.default_stream()]

@program("c10/core/impl/InlineStreamGuard.h: a stream's device becomes current", [1, 0, 1], devices=2)
def device_of_the_current_stream(gpu):
    side = gpu.Stream(device=1)
    with gpu.stream(side):
        inside = gpu.current_device()
    return [inside, gpu.current_device(), side.device_index]

@program("c10/cuda/CUDAFunctions.cpp: current_device (cudaGetDevice is of the thread)", [0, 1], devices=2)
def device_of_a_thread(gpu):
    found = []
    with gpu.device(1):
        thread = threading.Thread(target=lambda: found.append(gpu.current_device()))
        thread.start()
        thread.join()
        return [*found, gpu.current_device()]

@program(f"{EVENT}: record (the event's device is the first stream's)",
         "RuntimeError: Event device 0 does not match recording stream's device 1.", devices=2)
def event_of_another_device(gpu):
    event = gpu.Event()
    event.record(gpu.current_stream(0))
    return raised(lambda: event.record(gpu.current_stream(1)))

