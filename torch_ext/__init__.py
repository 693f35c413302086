"""Distributed tests for PyTorch that run on any machine, and the engine that runs them.

This package file imports neither torch nor a test module, so that the runner's supervising half starts at once.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
