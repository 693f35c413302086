"""The allocator does what CUDA's does: see allocator_sequences.py."""

import gc
import itertools
import json
import struct
import time
import zlib

import pytest
import torch

from test.torch_ext.sim.one_process.allocator_sequences import HUNDRED, RECORD, crc, sequence
from torch_ext.sim import _native

SEEN = json.loads(RECORD.read_text(encoding="utf-8"))
CHECKSUMS, HUNDREDS = SEEN["checksums"].split(), SEEN["hundreds"].split()


SIM = torch.get_device_module("sim")
DEVICE = torch.device("sim", 3)
_DEVICE_TYPE = SIM.default_stream().device_type
_moments = itertools.count(time.monotonic_ns(), 1000)
_BY_POOL = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_COUNTS = (
    "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free", "max_split_size",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_settings():
    limit = SIM.mem_get_info(DEVICE)[1]
    gc.collect()
    SIM.empty_cache()
    yield
    torch._C._accelerator_setAllocatorSettings("")
    SIM.set_memory_limit(limit, DEVICE)
    SIM.set_per_process_memory_fraction(1.0, DEVICE)
    _native.stop_stream_clock(0)


class _Ours:
    """Runs a sequence on a device that nothing else uses, with the clock of streams standing still."""

    def __init__(self, line):
        settings, limit, fraction, *self.calls = line.split()
        torch._C._accelerator_setAllocatorSettings("" if settings == "-" else settings)
        SIM.set_memory_limit(int(limit), DEVICE)
        SIM.set_per_process_memory_fraction(float(fraction) or 1.0, DEVICE)
        SIM.reset_accumulated_memory_stats(DEVICE)
        SIM.reset_peak_memory_stats(DEVICE)
        self.held: list[torch.Tensor | None] = []
        self.addresses: list[str] = []
        self.segments: list[int] = []  # their addresses, by number

    def call(self, call):
        first, _, second = call[1:].partition(",")
        match call[0]:
            case "a":
                self.allocate(int(first), int(second))
            case "f":
                self.held[int(first)] = None
            case "r" if (tensor := self.held[int(first)]) is not None:
                tensor.record_stream(_stream(int(second)))
            case "b":
                with SIM.stream(_stream(int(first))):
                    SIM._sleep(1)
            case "d":
                _end_all_work()
            case "e":
                SIM.empty_cache()

    def allocate(self, nbytes, stream):
        try:
            with SIM.stream(_stream(stream)):
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        except torch.OutOfMemoryError:
            self.held.append(None)
            self.addresses.append("oom")
            return
        starts = [each["address"] for each in _segments() if each["address"] <= tensor.data_ptr()]
        if _statistics()["num_device_alloc"] > len(self.segments):
            self.segments.append(max(starts))
        number = len(self.segments) - 1 - self.segments[::-1].index(max(starts))  # a new one may get an old address
        self.held.append(tensor)
        self.addresses.append(f"{number}+{(tensor.data_ptr() - max(starts)) // 512}")

    def checksum(self):
        value = 0
        for call in self.calls:
            self.call(call)
            value = _crc(_numbers(), value)
        states = {"active_allocated": (1, 1), "active_awaiting_free": (0, 1), "inactive": (0, 0)}
        blocks = [
            (block["size"], *states[block["state"]], segment["segment_type"] == "large")
            for segment in _segments()
            for block in segment["blocks"]
        ]
        self.held.clear()
        _end_all_work()
        SIM.empty_cache()  # before the settings change: they say what counts as oversize
        return f"{_crc([int(number) for block in blocks for number in block], value):08x}"


def _end_all_work():
    """Stop the clock at a later moment: further than a sequence, of nanoseconds, has made a stream busy."""
    _native.stop_stream_clock(next(_moments))


def _stream(number):
    return SIM.Stream(stream_id=number, device_index=DEVICE.index, device_type=_DEVICE_TYPE)


def _segments():
    return [each for each in SIM.memory_snapshot() if each["device"] == DEVICE.index]


def _statistics():
    return SIM.memory_stats_as_nested_dict(DEVICE)


def _numbers():
    """All statistics, in the order of torch's struct."""
    found = _statistics()
    stats = [found[name][kind] for name in _BY_POOL for kind in ("all", "small_pool", "large_pool")]
    stats += [found["oversize_allocations"], found["oversize_segments"]]
    numbers = [stat[which] for stat in stats for which in ("current", "peak", "allocated", "freed")]
    return [*numbers, *(found[name] for name in _COUNTS)]


def _crc(numbers, value):
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers), value)


def test_addresses_statistics_and_blocks_are_those_of_cuda():
    for seed, wanted in enumerate(CHECKSUMS):
        ours = _Ours(sequence(seed))
        checksum, addresses = ours.checksum(), " ".join(ours.addresses)
        assert addresses in SEEN["addresses"][seed : seed + 1] or seed >= len(SEEN["addresses"]), f"seed {seed}"
        assert crc(f"{checksum} {addresses}") == wanted, f"seed {seed}"


@pytest.mark.long
def test_more_sequences_are_those_of_cuda():
    for hundred, wanted in enumerate(HUNDREDS, start=1):
        seeds = range(hundred * HUNDRED, (hundred + 1) * HUNDRED)
        assert crc(" ".join(_Ours(sequence(seed)).checksum() for seed in seeds)) == wanted, f"among {seeds}"
