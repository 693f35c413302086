"""Distributed tests for PyTorch that run on any machine, and the engine that runs them.

Importing this package loads neither torch nor a test module, so the runner starts at once.
"""

import sys

__version__ = "0.1.0"

if sys.version_info < (3, 10):  # noqa: UP036  # before an import fails on newer syntax
    raise SystemExit(f"torch_ext needs Python 3.10 or newer, and this is {sys.version.split()[0]} ({sys.executable})")
