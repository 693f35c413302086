"""Sequences of calls on an allocator, which CUDA's caching allocator of torch 2.13 ran once, and what they gave there.

A sequence is a line: settings (``-`` for none), bytes of the device, the part that the process may use (0: all), and
calls:

    a<bytes>,<stream>   allocate; the n-th one makes block n
    f<block>            free
    r<block>,<stream>   record_stream
    b<stream>           the stream becomes busy
    d                   the work of all streams is done
    e                   empty_cache

A run on CUDA gives a checksum of all statistics after each call and of the blocks in the end, and the addresses: the
segment's number and the place in it, in units of 512 bytes. allocator_sequences.json has the addresses of the first
sequences, a checksum of both for each of the first hundred, and one of the former for each later hundred. To record it
again, build the recorder (``git show e04033ea:test/torch_ext/sim/one_process/allocator_recorder/driver.cpp``, with
runtime.cpp and nvml.cpp beside it, stubs of CUDA's runtime and of NVML), print the sequences with this module, and give
it the recorder's output on its standard input.
"""

import json
import random
import sys
import zlib
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")
COUNT, HUNDRED, IN_FULL = 10_000, 100, 10
_MIB = 1 << 20
_SIZES = ((1, 4096), (1, _MIB), (_MIB, 10 * _MIB), (10 * _MIB, 40 * _MIB))
_SETTINGS = (
    *["-"] * 6,
    "max_split_size_mb:21",
    "max_split_size_mb:32,max_non_split_rounding_mb:40",
    "garbage_collection_threshold:0.5",
    "roundup_power2_divisions:4",
    *["expandable_segments:True"] * 3,
    "expandable_segments:True,garbage_collection_threshold:0.5",
)


def sequence(seed):
    """Return the line of ``seed``."""
    rng = random.Random(seed)
    settings = rng.choice(_SETTINGS)
    small = rng.random() < 0.3
    limit = rng.randrange(40, 200) * _MIB if small else 16 << 30
    fraction = rng.choice((0.5, 0.9, 1.0)) if "garbage" in settings or rng.random() < 0.1 else 0
    weights = [rng.random() for _ in _SIZES]
    streams = rng.randrange(1, 4)
    user = rng.randrange(streams + 1)  # one: CUDA keeps blocks in use in the order of a hash of their streams
    calls = []
    live = []
    made = 0
    for _ in range(rng.randrange(10, 90)):
        kind = rng.random()
        if kind < 0.5 or not live:
            low, high = rng.choices(_SIZES, weights)[0]
            calls.append(f"a{rng.randrange(low, high + 1)},{rng.randrange(streams)}")
            live.append(made)
            made += 1
        elif kind < 0.82:
            calls.append(f"f{live.pop(rng.randrange(len(live)))}")
        elif kind < 0.9:
            calls.append(f"r{rng.choice(live)},{user}")
        elif kind < 0.95:
            calls.append(f"b{rng.choice((user, rng.randrange(streams + 1)))}")
        else:
            calls.append("d" if kind < 0.98 else "e")
    return f"{settings} {limit} {fraction} {' '.join(calls)}"


def crc(text):
    return f"{zlib.crc32(text.encode()):08x}"


if __name__ == "__main__":
    if sys.stdin.isatty():
        print(*map(sequence, range(COUNT)), sep="\n")
    else:
        given = sys.stdin.read().split("\n")[:COUNT]
        sums = [line[:8] for line in given]
        text = {
            "addresses": [line[9:] for line in given[:IN_FULL]],
            "checksums": " ".join(map(crc, given[:HUNDRED])),
            "hundreds": " ".join(crc(" ".join(sums[n : n + HUNDRED])) for n in range(HUNDRED, COUNT, HUNDRED)),
        }
        RECORD.write_text(json.dumps(text, indent=0) + "\n", encoding="utf-8")
