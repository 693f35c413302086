"""Has the rows share a warm zygote, for what they judge is what a run does with ranks, not how it comes by torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext import warm_runs

# These are about the runner's own processes, start pytest for the rows, or start nothing.
_ALONE = {f"test_{name}.py" for name in ("judge", "neighbours", "runner_survives", "side_by_side", "under_load")}


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which runs find a server."""
    runtime = tmp_path_factory.mktemp("runtime")
    with warm_runs.server(runtime):
        yield runtime


@pytest.fixture(scope="module", autouse=True)
def _rows_are_served(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.name in _ALONE or not warm_runs.can_tell_whose():
        yield
        return
    with warm_runs.used(request.getfixturevalue("served")):
        yield
