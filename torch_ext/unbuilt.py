"""Checkouts of PyTorch that nobody has built, in whose root a command may start. Standard library only: torch is not
yet loaded.

``python -m`` and ``PYTHONPATH=.`` put the current directory before everything that is installed. The ``torch`` of such
a checkout lacks its compiled half, so importing it fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["has_unbuilt_torch", "look_there_last"]


def has_unbuilt_torch(folder: Path) -> bool:
    """Whether ``folder`` has the sources of torch, and not what is compiled from them."""
    package = folder / "torch"
    return (package / "__init__.py").is_file() and not any(package.glob("_C.*so"))


def look_there_last() -> None:
    """Have this process find the installed torch first: such checkouts go to the end of ``sys.path``."""
    sys.path.sort(key=lambda entry: has_unbuilt_torch(Path(entry)))
