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
# From the present, not from the import: work of an earlier test may have ended since.
_moments = (time.monotonic_ns() + passed_ns for passed_ns in itertools.count(0, 1000))
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
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    SIM.set_memory_limit(limit, DEVICE)
    SIM.set_per_process_memory_fraction(1.0, DEVICE)
    _native.stop_stream_clock(0)


class _Ours:
    """Runs a sequence on a device that nothing else uses, with the clock of streams standing still."""

    def __init__(self, line):
        settings, limit, fraction, *self.calls = line.split()
        # Torch keeps the last one, and the later of two.
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:False,{settings}".removesuffix(",-"))
        SIM.set_memory_limit(int(limit), DEVICE)
        SIM.set_per_process_memory_fraction(float(fraction) or 1.0, DEVICE)
        SIM.reset_accumulated_memory_stats(DEVICE)
        SIM.reset_peak_memory_stats(DEVICE)
        _end_all_work()
        self.held: list[torch.Tensor | None] = []
        self.addresses: list[str] = []
        self.segments: list[range] = []  # their addresses, by number
        self.reserved = int(limit) * 9 // 8 if "expandable_segments:True" in settings else 0

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
                before = _statistics()
                SIM.empty_cache()
                self.drop_unmapped(before)

    def allocate(self, nbytes, stream):
        before = _statistics()
        try:
            with SIM.stream(_stream(stream)):
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        except torch.OutOfMemoryError:
            tensor = None
        self.drop_unmapped(before)
        self.held.append(tensor)
        if tensor is None:
            self.addresses.append("oom")
            return
        address = tensor.data_ptr()
        segment = max((each for each in _segments() if each["address"] <= address), key=lambda each: each["address"])
        is_known = self.reserved and any(address in each for each in self.segments)
        if not is_known and _statistics()["num_device_alloc"] > before["num_device_alloc"]:
            unit = (2 if segment["segment_type"] == "small" else 20) << 20
            size = -(-self.reserved // unit) * unit or segment["total_size"]
            self.segments.append(range(segment["address"], segment["address"] + size))
        number = max(n for n, each in enumerate(self.segments) if address in each)  # a new one may get an old address
        self.addresses.append(f"{number}+{(address - self.segments[number].start) // 512}")

    def drop_unmapped(self, before):
        """Forget the expandable segments that are gone. Whenever one is unmapped, all memory without tensors is."""
        if self.reserved and _statistics()["num_device_free"] > before["num_device_free"]:
            addresses = [each.data_ptr() for each in self.held if each is not None]
            self.segments = [s if any(each in s for each in addresses) else range(0) for s in self.segments]

    def checksum(self):
        value = 0
        for call in self.calls:
            self.call(call)
            value = _crc(_numbers(), value)
        states = {"active_allocated": (1, 1), "active_pending_free": (0, 1), "inactive": (0, 0)}
        blocks = [
            (block["size"], *states[block["state"]], segment["segment_type"] == "large")
            for segment in _segments()
            for block in segment["blocks"]
        ]
        self.held.clear()
        _end_all_work()
        SIM.empty_cache()  # before the settings change: they say what counts as oversize
        if self.reserved:  # a segment that was too large to map still has its addresses
            SIM.set_memory_limit(1 << 30, DEVICE)
            for stream, nbytes in itertools.product(range(4), (1, 2 << 20)):
                with SIM.stream(_stream(stream)):
                    torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
            SIM.empty_cache()
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
