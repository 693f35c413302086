"""Bring the generated parts of ``docs/architecture.md`` (or of the page that you name) up to date with the tree."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    importlib.import_module("test.torch_ext.house.architecture").main(*map(Path, sys.argv[1:]))
