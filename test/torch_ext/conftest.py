"""Keeps the simulated accelerator out of processes that test anything else, spreads the tests over processes of
pytest-xdist, and adds ``--long``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from test.torch_ext import parallel

_SIM = Path(__file__).resolve().parent / "sim"


def _asked_for(config: pytest.Config) -> bool:
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path == _SIM or _SIM in path.parents for path in named)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="thousands of repetitions where hundreds are the default")
    parser.addoption("--times", type=int, default=20, help="how often --long repeats a row of verdict under load")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: deselected unless --long is given or a test is named by ::")
    # Tests run pytest and look at what it prints.
    os.environ.pop("PYTEST_ADDOPTS", None)
    # And expect each program to load torch itself.
    runtime = tempfile.mkdtemp(prefix="runtime-")
    config.add_cleanup(lambda: shutil.rmtree(runtime, ignore_errors=True))
    os.environ["XDG_RUNTIME_DIR"] = runtime
    # Else the first question after the device would register it, for all tests that follow in the process.
    if not _asked_for(config):
        os.environ.setdefault("TORCH_EXT_DEVICE", "cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With ``-n`` alone, keep together what shares something; ``--dist`` chooses another way."""
    if _asked_for(config) or config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        # Groups of pytest-xdist's own would do, but 3.8 writes them into a field of items that pytest 9.2 has not.
        def _split_scope(self, nodeid: str) -> str:
            return parallel.scope(nodeid)

    config.option.loadscopereorder = False  # our order is by time, not by number
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``long``, unless ``--long`` is given or a test is named by ``::``. Of the others, run the
    slowest files last, or first where processes share the tests.
    """
    if not (config.getoption("long") or any("::" in each for each in config.args)):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    direction = 1 if hasattr(config, "workerinput") else -1
    items.sort(key=lambda item: direction * parallel.place_in_queue(item.path.name))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Importing these tests registers the device, which every other test in the process would then find.
    return True if collection_path == _SIM and not _asked_for(config) else None


def pytest_report_header(config: pytest.Config) -> str:
    return "" if _asked_for(config) else "test/torch_ext/sim needs a process of its own: pytest test/torch_ext/sim"
