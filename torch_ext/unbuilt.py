"""Handles unbuilt PyTorch checkouts, in whose root a command may start. Standard library only: torch is not loaded yet.

``python -m`` and ``PYTHONPATH=.`` put the current directory before all installed packages. The ``torch`` of an unbuilt
checkout lacks its compiled half, so importing it fails.
"""

from __future__ import annotations

import sys
from pathlib import Path


def has_unbuilt_torch(folder: Path) -> bool:
    """Whether ``folder`` has the sources of torch without the compiled files."""
    package = folder / "torch"
    return (package / "__init__.py").is_file() and not any(package.glob("_C.*so"))


def demote_unbuilt() -> None:
    """Move unbuilt checkouts to the end of ``sys.path``, so that this process finds the installed torch first."""
    sys.path.sort(key=lambda entry: has_unbuilt_torch(Path(entry)))
