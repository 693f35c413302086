"""The error of what is CUDA's alone."""

from __future__ import annotations

import unittest

__all__ = ["NeedsCudaError"]


class NeedsCudaError(unittest.SkipTest, NotImplementedError):
    """The program uses what only CUDA, NCCL or NVIDIA's libraries have; the message says what, in one sentence.

    A test that ends by it is skipped with that sentence, since no simulated device can run it.
    """
