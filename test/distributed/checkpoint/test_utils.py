# Owner(s): ["oncall: distributed"]
"""Views of files."""

import io
import os
import sys

import hypothesis.strategies as st
from hypothesis import given, settings
from torch import distributed as dist
from torch.distributed.checkpoint.utils import _create_file_view

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestReaderView(TestCase):
    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(0, 9),
        st.integers(1, 9),
        st.lists(st.tuples(st.sampled_from("rish"), st.integers(0, 9)), max_size=6),
    )
    def test_part_of_a_file(self, offset, size, steps):
        """A view reads as a file with only these bytes."""
        data = bytes(range(20))
        view = _create_file_view(io.BytesIO(data), offset, size)
        part = io.BytesIO(data[offset : offset + size])
        for step, count in steps:
            if step == "r":
                self.assertEqual(view.read(count), part.read(count))
            elif step == "i":
                into, expected = bytearray(count), bytearray(count)
                self.assertEqual(view.readinto(into), part.readinto(expected))
                self.assertEqual(into, expected)
            elif step == "s":
                view.seek(min(count, size))
                part.seek(min(count, size))
            else:
                view.seek(0, os.SEEK_END if count % 2 else os.SEEK_CUR)
                part.seek(0, os.SEEK_END if count % 2 else os.SEEK_CUR)
            self.assertEqual(view.tell(), part.tell(), f"after {step} {count}")
        self.assertEqual(view.read(), part.read(), "the rest")
        self.assertTrue(view.seekable() and view.readable())


if __name__ == "__main__":
    run_tests()
