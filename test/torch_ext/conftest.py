"""Keeps the simulated accelerator out of processes that test anything else, spreads the tests over processes of
pytest-xdist, and adds ``--long``.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from test.torch_ext import parallel, tiers

_SIM = Path(__file__).resolve().parent / "sim"


def _asked_for(config):
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path == _SIM or _SIM in path.parents for path in named)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="thousands of repetitions where hundreds are the default")
    parser.addoption("--tier", choices=tiers.TIERS, help="which tests run: see test/torch_ext/tiers.py")
    parser.addoption("--draw", metavar="SEED", help="of tests marked drawn or costly, those that SEED draws")
    parser.addoption("--times", type=int, default=20, help="how often --long repeats a row of verdict under load")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: deselected unless --long is given or a test is named by ::")
    config.addinivalue_line("markers", "costly: with --draw, a twelfth of these marks run, each with all of its tests")
    config.addinivalue_line("markers", "drawn(n): with --draw, n of the tests and rows that share this mark run")
    config.addinivalue_line("markers", "processes: it starts processes, though its file imports nothing that tells so")
    config.addinivalue_line("markers", "promise: one of the tests with ranks that the README's second command runs")
    tiers.is_long = config.getoption("long")
    tiers.watch_for_processes()
    # Tests run pytest and look at what it prints.
    os.environ.pop("PYTEST_ADDOPTS", None)
    # No program may use a server of the developer's.
    runtime = tempfile.mkdtemp(prefix="runtime-")
    config.add_cleanup(lambda: shutil.rmtree(runtime, ignore_errors=True))
    os.environ["XDG_RUNTIME_DIR"] = runtime
    # Otherwise the first query of the device would register sim for all later tests in the process.
    if not _asked_for(config):
        os.environ.setdefault("TORCH_EXT_DEVICE", "cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n`` alone, keep tests that share state in one process; ``--dist`` chooses another way."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        # pytest-xdist's own groups have no effect: 3.8 writes them into a field of items that pytest 9.2 lacks.
        def _split_scope(self, nodeid):
            return parallel.scope(nodeid)

    config.option.loadscopereorder = False  # our order is by time, not by number
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)  # folders below add marks
def pytest_collection_modifyitems(config, items):
    """Deselect tests of other tiers, tests marked ``long`` unless ``--long`` is given or a test is named by ``::``, and
    tests that ``--draw`` does not draw. Run the slowest files last, or first where processes share the tests.
    """
    tier, is_named = tiers.tier_of(config), any("::" in each for each in config.args)
    wanted, left = [], []
    for item in items:
        too_long = item.get_closest_marker("long") and not (config.getoption("long") or is_named)
        (left if too_long or not tiers.is_wanted(item, tier) else wanted).append(item)
    if seed := config.getoption("draw"):
        wanted, not_drawn = tiers.draw(wanted, seed)
        left += not_drawn
    config.hook.pytest_deselected(items=left)
    items[:] = wanted
    direction = 1 if hasattr(config, "workerinput") else -1
    items.sort(key=lambda item: direction * parallel.place_in_queue(item.path.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    tiers.refuse_processes(not tiers.may_start_processes(item))
    try:
        return (yield)
    finally:
        tiers.refuse_processes(False)


def pytest_runtest_teardown(item, nextitem):
    servers = sys.modules.get("test.torch_ext.servers")
    if servers is not None and (nextitem is None or nextitem.path != item.path):
        servers.end_servers()


def pytest_ignore_collect(collection_path, config):
    # Importing these tests registers the device, which every other test in the process would then find.
    return True if collection_path == _SIM and not _asked_for(config) else None


def pytest_report_header(config):
    tier = f"tier: {tiers.tier_of(config)} (--tier {', '.join(tiers.TIERS)}; test/torch_ext/tiers.py)"
    sim = "test/torch_ext/sim needs its own process: pytest test/torch_ext/sim"
    return tier if _asked_for(config) else f"{tier}; {sim}"
