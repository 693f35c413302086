"""Imported once by the root zygote of a run, so that test files and ranks need not."""

from torch_ext import accelerator

# Chosen and loaded here. Every rank would otherwise import the package of an out-of-tree device.
accelerator.device_type()
