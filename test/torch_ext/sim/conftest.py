"""Loads the simulator once for these tests, or skips them all where it cannot be built."""

from __future__ import annotations

import pytest

from torch_ext.sim.build import MissingCompilerError, ensure_built

try:
    ensure_built()
except MissingCompilerError as error:
    pytest.skip(str(error), allow_module_level=True)
