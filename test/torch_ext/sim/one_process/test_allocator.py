"""The allocator does what CUDA's does: see allocator_sequences.py."""

import json
import struct
import zlib

import pytest
import torch

from test.torch_ext.sim.one_process.allocator_sequences import HUNDRED, RECORD, crc, sequence
from torch_ext.sim import _native

SEEN = json.loads(RECORD.read_text(encoding="utf-8"))
CHECKSUMS, HUNDREDS = SEEN["checksums"].split(), SEEN["hundreds"].split()


@pytest.fixture(autouse=True)
def _no_settings():
    yield
    torch._C._accelerator_setAllocatorSettings("")


class _Ours:
    """Runs a sequence; every block of the trace goes back to the host with it."""

    def __init__(self, line):
        settings, limit, fraction, *self.calls = line.split()
        torch._C._accelerator_setAllocatorSettings("" if settings == "-" else settings)
        self.trace = _native.AllocatorTrace(int(limit))
        if float(fraction):
            self.trace.set_fraction(float(fraction))
        self.held: list[int | None] = []
        self.addresses: list[str] = []

    def call(self, call):
        first, _, second = call[1:].partition(",")
        match call[0]:
            case "a":
                taken = self.trace.take(int(first), int(second))
                self.held.append(taken and taken[0])
                self.addresses.append("oom" if taken is None else f"{taken[1]}+{taken[2] // 512}")
            case "f" if (address := self.held[int(first)]) is not None:
                self.trace.give_back(address)
            case "r" if (address := self.held[int(first)]) is not None:
                self.trace.add_user(address, int(second))
            case "b":
                self.trace.make_busy(int(first))
            case "d":
                self.trace.finish()
            case "e":
                self.trace.empty()

    def checksum(self):
        value = 0
        for call in self.calls:
            self.call(call)
            value = _crc(self.trace.stats(), value)
        return f"{_crc([int(number) for block in self.trace.blocks() for number in block], value):08x}"


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
