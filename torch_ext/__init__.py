"""Distributed tests for PyTorch that run on any machine, and the engine that runs them.

Importing this package loads neither torch nor a test module, so the runner starts at once.
"""

__version__ = "0.1.0"
