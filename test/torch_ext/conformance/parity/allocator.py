"""The caching allocator: sizes, segments, splits, statistics, and memory that several streams use."""

import torch

from torch_ext.conformance.parity import program, raised

SOURCE = "c10/cuda/CUDACachingAllocator.cpp"
K, M = 1 << 10, 1 << 20
LONG = 1 << 30  # cycles

def stat(gpu, *names):
    found = gpu.memory_stats()
    return [found[name] for name in names]

def setting(text):
    torch._C._accelerator_setAllocatorSettings(text)

@program(f"{SOURCE}: round_size, should_split", {
    0: 0, 1: 512, 511: 512, 512: 512, 513: 1024, 1023: 1024, 1024: 1024, 1025: 1536, M - 1: M, M: M, M + 1: M + 512,
    2 * M: 2 * M, 9 * M: 9 * M, 10 * M - 512: 10 * M - 512, 10 * M - 511: 10 * M, 10 * M: 10 * M,
    10 * M + 1: 10 * M + 512, 11 * M - 512: 11 * M - 512, 11 * M - 511: 12 * M, 11 * M: 12 * M, 11 * M + 1: 12 * M,
    12 * M: 12 * M, 20 * M: 20 * M, 20 * M + 1: 20 * M + 512, 31 * M: 32 * M, 33 * M - 512: 33 * M - 512,
})
def allocated_bytes_of_a_request(gpu, size):
    _held = gpu.bytes(size)
    return gpu.memory_allocated()

@program(f"{SOURCE}: get_allocation_size", {
    0: 0, 1: 2 * M, M: 2 * M, M + 1: 20 * M, 10 * M - 512: 20 * M, 10 * M - 511: 10 * M, 10 * M: 10 * M,
    10 * M + 1: 12 * M, 12 * M: 12 * M, 12 * M + 1: 14 * M, 33 * M: 34 * M, 100 * M + 5: 102 * M,
})
def reserved_bytes_of_a_request(gpu, size):
    _held = gpu.bytes(size)
    return gpu.memory_reserved()

@program(f"{SOURCE}: alloc_found_block (inactive_split counts what a split leaves)", {
    1: [1, 2 * M - 512], M: [1, M], 2 * M: [1, 18 * M], 10 * M: [0, 0], 11 * M: [0, 0], 11 * M - 512: [1, M + 512],
})
def rest_of_a_split(gpu, size):
    _held = gpu.bytes(size)
    return stat(gpu, "inactive_split.all.current", "inactive_split_bytes.all.current")

@program(f"{SOURCE}: alloc_found_block (requested_bytes)", {1: [1, 512], 1000: [1000, 1024], 11 * M: [11 * M, 12 * M]})
def requested_bytes(gpu, size):
    _held = gpu.bytes(size)
    return stat(gpu, "requested_bytes.all.current", "allocated_bytes.all.current")

@program(f"{SOURCE}: get_allocation_size (2 MiB serve small requests)", {1: 1, 2: 1, 3: 2, 4: 2, 5: 3})
def segments_of_requests_of_1_mib(gpu, count):
    _held = [gpu.bytes(M) for _ in range(count)]
    return stat(gpu, "segment.small_pool.current")[0]

@program(f"{SOURCE}: get_allocation_size (20 MiB serve large requests)", {1: 1, 2: 1, 3: 1, 4: 2})
def segments_of_requests_of_6_mib(gpu, count):
    _held = [gpu.bytes(6 * M) for _ in range(count)]
    return stat(gpu, "segment.large_pool.current")[0]

@program(f"{SOURCE}: get_free_block (lower_bound: the smallest block that fits)", {2: 4, 3: 4, 4: 4, 5: 6, 6: 6})
def best_fit(gpu, wanted):
    made = {size: [gpu.bytes(size * K), gpu.bytes(K)] for size in (6, 4, 8)}  # the second keeps them apart
    at = {pair[0].data_ptr(): size for size, pair in made.items()}
    for pair in made.values():
        del pair[0]
    return at.get(gpu.bytes(wanted * K).data_ptr())

@program(f"{SOURCE}: get_free_block (a cached block serves the same size)", [True, 1])
def reuse_on_one_stream(gpu):
    where = gpu.bytes(M).data_ptr()
    return [gpu.bytes(M).data_ptr() == where, *stat(gpu, "num_device_alloc")]

@program(f"{SOURCE}: BlockComparatorSize (blocks of another stream serve no request)", [False, 2])
def no_reuse_on_another_stream(gpu):
    where = gpu.bytes(M).data_ptr()
    with gpu.stream(gpu.Stream()):
        return [gpu.bytes(M).data_ptr() == where, *stat(gpu, "segment.all.current")]

@program(f"{SOURCE}: try_merge_blocks", {
    "": 1, "first": 2, "middle": 2, "last": 1, "first, middle": 2, "middle, last": 1, "first, last": 2,
    "first, middle, last": 0,
})
def idle_parts_after_frees(gpu, freed):
    held = {name: gpu.bytes(512 * K) for name in ("first", "middle", "last")}
    for name in filter(None, freed.split(", ")):
        del held[name]
    return stat(gpu, "inactive_split.all.current")[0]

@program(f"{SOURCE}: release_blocks (keeps split segments)", {"all": [0, 2], "one": [2 * M, 1]})
def emptied_cache(gpu, freed):
    held = [gpu.bytes(K), gpu.bytes(30 * M)]
    del held[0 if freed == "all" else 1 :]
    gpu.empty_cache()
    return stat(gpu, "reserved_bytes.all.current", "num_device_free")

@program(f"{SOURCE}: increase_stat, reset_peak_stat", [3 * M, M, M, 22 * M])
def peaks(gpu):
    held = [gpu.bytes(M), gpu.bytes(2 * M)]
    before = gpu.max_memory_allocated()
    del held[1]
    gpu.reset_peak_memory_stats()
    return [before, gpu.max_memory_allocated(), gpu.memory_allocated(), gpu.max_memory_reserved()]

@program("c10/core/CachingDeviceAllocator.h: DeviceStats", sorted([
    "active", "active_bytes", "allocated_bytes", "allocation", "inactive_split", "inactive_split_bytes",
    "max_split_size", "num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms", "num_sync_all_streams",
    "oversize_allocations", "oversize_segments", "requested_bytes", "reserved_bytes", "segment",
]))
def names_of_statistics(gpu):
    gpu.bytes(1)
    return sorted({name.partition(".")[0] for name in gpu.memory_stats()})

def limited(gpu, nbytes):
    gpu.set_per_process_memory_fraction((nbytes + 1) / gpu.mem_get_info()[1])

@program(f"{SOURCE}: malloc (OutOfMemoryError), format_size", {
    30 * M: "30.00 MiB", 3 << 30: "3.00 GiB", 100 * M + 1: "102.00 MiB", 4 << 40: "4096.00 GiB",
})
def text_of_no_memory(gpu, size):
    limited(gpu, 20 * M)
    return raised(lambda: gpu.bytes(size)).partition("Tried to allocate ")[2].partition(". ")[0]

@program(f"{SOURCE}: malloc; torch/csrc/Exceptions.cpp: THPException_init",
         ["OutOfMemoryError: DEVICE out of memory.", ["OutOfMemoryError", "RuntimeError", "Exception"]])
def type_of_no_memory(gpu):
    limited(gpu, 20 * M)
    bases = [each.__name__ for each in torch.OutOfMemoryError.__mro__[:3]]
    return [raised(lambda: gpu.bytes(64 * M)).partition(" Tried")[0], bases]

@program(f"{SOURCE}: malloc (one_exa_bytes)",
         "OutOfMemoryError: DEVICE out of memory. Tried to allocate more than 1EB memory.")
def an_exabyte(gpu):
    return raised(lambda: gpu.bytes((1 << 60) + 1))

@program(f"{SOURCE}: malloc, alloc_block (a retry after release_cached_blocks, then num_ooms)", [1, 1, 20 * M])
def counts_of_no_memory(gpu):
    limited(gpu, 30 * M)
    _held = gpu.bytes(2 * M)
    raised(lambda: gpu.bytes(64 * M))
    return stat(gpu, "num_ooms", "num_alloc_retries", "reserved_bytes.all.current")

@program(f"{SOURCE}: malloc (release_cached_blocks before it fails)", [40 * M, 0, 1, 1])
def idle_memory_makes_room(gpu):
    limited(gpu, 50 * M)
    gpu.bytes(20 * M), gpu.bytes(30 * M)
    _held = gpu.bytes(40 * M)
    return stat(
        gpu, "reserved_bytes.all.current", "num_ooms", "num_alloc_retries", "segment.all.current"
    )

@program("torch/cuda/memory.py: set_per_process_memory_fraction", {
    1: "TypeError: Invalid type for fraction argument, must be `float`",
    1.5: "ValueError: Invalid fraction value: 1.5. Allowed range: 0~1",
    -0.5: "ValueError: Invalid fraction value: -0.5. Allowed range: 0~1", 0.5: "raises nothing",
})
def fraction_of_memory(gpu, fraction):
    return raised(lambda: gpu.set_per_process_memory_fraction(fraction))

@program(f"{SOURCE}: free, insert_events, process_events", [False, False, True])
def memory_of_a_recorded_stream(gpu):
    side, first = gpu.Stream(), gpu.bytes(M)
    where = first.data_ptr()
    with gpu.stream(side):
        gpu._sleep(LONG)
    first.record_stream(side)
    del first
    second = gpu.bytes(M)
    found = [second.data_ptr() == where, side.query()]
    side.synchronize()
    return [*found, gpu.bytes(M).data_ptr() == where]

@program(f"{SOURCE}: free (active until the events are over)", [0, 512, 1, 0])
def statistics_of_a_recorded_stream(gpu):
    side, held = gpu.Stream(), gpu.bytes(1)
    with gpu.stream(side):
        gpu._sleep(LONG)
    held.record_stream(side)
    del held
    return stat(gpu, *(f"{name}.all.current" for name in ("allocated_bytes", "active_bytes", "active", "allocation")))

@program(f"{SOURCE}: recordStream (the stream of the allocation is not recorded)", True)
def recorded_on_its_own_stream(gpu):
    held = gpu.bytes(1)
    where = held.data_ptr()
    gpu._sleep(LONG)
    held.record_stream(gpu.current_stream())
    del held
    return gpu.bytes(1).data_ptr() == where

@program("torch/csrc/cuda/Module.cpp: THCPModule_memorySnapshot", {
    "segment": ["active_size", "address", "allocated_size", "blocks", "device", "frames", "is_expandable",
                "requested_size", "segment_pool_id", "segment_type", "stream", "total_size"],
    "block": ["address", "frames", "requested_size", "size", "state"],
})
def keys_of_a_snapshot(gpu, of):
    _held = gpu.bytes(1)
    segment = gpu.memory_snapshot()[0]
    return sorted(segment if of == "segment" else segment["blocks"][0])

@program("torch/csrc/cuda/Module.cpp: THCPModule_memorySnapshot", [
    "small", 2 * M, 512, 512, 1, 0, [[0, 0], False],
    [["active_allocated", 512, 1], ["inactive", 2 * M - 512, 0]],
])
def snapshot_of_a_segment(gpu):
    _held = gpu.bytes(1)
    (of,) = gpu.memory_snapshot()
    names = "segment_type", "total_size", "allocated_size", "active_size", "requested_size", "stream"
    blocks = [[block["state"], block["size"], block["requested_size"]] for block in of["blocks"]]
    return [*(of[name] for name in names), [of["segment_pool_id"], of["is_expandable"]], blocks]

@program("torch/csrc/cuda/Module.cpp: active_pending_free_s", "active_pending_free")
def state_of_a_block_that_a_stream_uses(gpu):
    side, held = gpu.Stream(), gpu.bytes(1)
    with gpu.stream(side):
        gpu._sleep(LONG)
    held.record_stream(side)
    del held
    return gpu.memory_snapshot()[0]["blocks"][0]["state"]

@program(f"{SOURCE}: record_trace (in malloc, free, free_block, release_block)", {
    "new": ["segment_alloc", "alloc"], "freed": ["segment_alloc", "alloc", "free_requested", "free_completed"],
    "reused": ["segment_alloc", "alloc", "free_requested", "free_completed", "alloc"],
    "emptied": ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"],
    "failed": ["segment_alloc", "alloc", "oom"],
})
def events_of_the_history(gpu, what):
    if what == "failed":
        limited(gpu, 20 * M)
    gpu.memory._record_memory_history()
    _held = gpu.bytes(K)
    if what == "failed":
        raised(lambda: gpu.bytes(64 * M))
    elif what != "new":
        del _held
    if what == "reused":
        _held = gpu.bytes(K)
    if what == "emptied":
        gpu.empty_cache()
    return [event["action"] for event in gpu.memory._snapshot()["device_traces"][0]]

@program(f"{SOURCE}: record_trace (sizes: of the segment, of the request)", [["segment_alloc", 2 * M], ["alloc", 1000]])
def sizes_of_the_history(gpu):
    gpu.memory._record_memory_history()
    _held = gpu.bytes(1000)
    return [[e["action"], e["size"]] for e in gpu.memory._snapshot()["device_traces"][0]]

@program(f"{SOURCE}: Note [Expandable Segments] (pages of 2 and 20 MiB)", {
    1: [512, 2 * M], M + 1: [M + 512, 20 * M], 11 * M: [11 * M, 20 * M], 21 * M: [21 * M, 40 * M], 40 * M: [40 * M] * 2,
})
def request_in_an_expandable_segment(gpu, size):
    setting("expandable_segments:True")
    _held = gpu.bytes(size)
    return [gpu.memory_allocated(), gpu.memory_reserved()]

@program(
    f"{SOURCE}: Note [Expandable Segments] (one segment grows; unused pages go back)", [1, 60 * M, True, 20 * M, 0]
)
def expandable_segment_grows(gpu):
    setting("expandable_segments:True")
    held = [gpu.bytes(20 * M) for _ in range(3)]
    found = [len(gpu.memory_snapshot()), gpu.memory_reserved(), gpu.memory_snapshot()[0]["is_expandable"]]
    for keep in (1, 0):
        del held[keep:]
        gpu.empty_cache()
        found.append(gpu.memory_reserved())
    return found

@program(f"{SOURCE}: should_split, get_free_block (blocks of max_split_size and more)", [40 * M, 40 * M, 1, 1])
def largest_block_to_split(gpu):
    setting("max_split_size_mb:30")
    gpu.bytes(40 * M)
    _held = gpu.bytes(39 * M)  # within 20 MiB (kLargeBuffer) of an oversize block
    return [gpu.memory_allocated(), gpu.memory_reserved(),
                                 *stat(gpu, "oversize_allocations.current", "oversize_segments.current")]

@program(f"{SOURCE}: round_size, roundup_power2_next_division", {
    1200: 1536, 2048: 2048, 2049: 2560, 3000: 3072, 5000: 5120, M + 1: 5 * M // 4, 5 * M: 5 * M, 5 * M + 1: 6 * M,
})
def rounded_to_divisions_of_a_power_of_two(gpu, size):
    setting("roundup_power2_divisions:4")
    _held = gpu.bytes(size)
    return gpu.memory_allocated()

@program("c10/core/AllocatorConfig.cpp: parseArgs and what it calls", {
    "nonsense:1": "Unrecognized key 'nonsense' in Accelerator allocator config.",
    "max_split_size_mb:1": "CachingAllocator option max_split_size_mb too small, must be >= 20",
    "garbage_collection_threshold:2": "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
    "roundup_power2_divisions:3": "For roundups, the divisions has to be power of 2",
})
def refused_setting(gpu, text):
    gpu.bytes(1)
    return raised(lambda: setting(text)).partition(": ")[2]

@program("aten/src/ATen/EmptyTensor.cpp: computeStorageNbytesContiguous",
         "RuntimeError: Storage size calculation overflowed with sizes=[4611686018427387904, 8]")
def too_many_bytes_to_count(gpu):
    return raised(lambda: torch.empty(1 << 62, 8, dtype=torch.int64, device=gpu.type))

@program("aten/src/ATen/native/cuda/Resize.cpp: resize_bytes_cuda (a new block; the old one is copied and freed)",
         [[1, 2], 1024, 1024, 1])
def resized_storage(gpu):
    held = torch.tensor([1, 2], dtype=torch.uint8, device=gpu.type)
    held.untyped_storage().resize_(600)
    return [held.tolist(), gpu.memory_allocated(), *stat(gpu, "active_bytes.all.current", "allocation.all.current")]

