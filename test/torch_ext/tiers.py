"""Which tests run when: by what a test's file imports and by marks, never by lists.

==========  =============================================================  ============================
tier        tests                                                          run by
==========  =============================================================  ============================
quick       those that start no process                                    ``pytest test/torch_ext``
promises    quick, and those with ranks that are marked ``promise``        the README's second command
rest        the others, but for those marked ``long``                      ``.ci/run``, after that command
all         promises and rest
==========  =============================================================  ============================

``.ci/run`` draws (``--draw``), and each commit draws anew. Of the tests and rows that share one mark ``drawn(n)``,
``n`` run. Of all marks ``costly`` a twelfth is drawn, each with all tests that share it: tests that cost more than six
seconds of a core, and files whose tests share such a run. ``.ci/nightly rest`` runs all. Rows that share the run of a
fixture cost nothing, so leave them unmarked.

A test may start processes if its file imports what starts them, or a helper of ours that does, or if it is marked
``processes``. Any other test fails if it does so (:func:`refuse_processes`), so that the tiers are what they say.
"""

import functools
import hashlib
import os
import sys
from collections import defaultdict
from types import ModuleType

TIERS = ("quick", "promises", "rest", "all")
_COSTLY = 12  # one of how many marks `costly` is drawn

_OURS = "torch_ext.testing._internal."
_STARTERS = (
    "multiprocessing", "pty", "subprocess", "torch_ext.program.run", "torch_ext.world.follow.start_world",
    *(_OURS + name for name in ("_distributed.continuous", "_distributed.multi_process", "_fsdp.cases")),
)  # fmt: skip
_EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"})
_own_tests = __name__.rpartition(".")[0]
_refused = False

# Whether ``--long`` is given. ``conftest.py`` sets it.
is_long = False


def tier_of(config):
    """Return the requested tier. Tests named below this folder run whatever their tier."""
    folder = os.path.dirname(os.path.abspath(__file__)) + os.sep
    named = all(os.path.abspath(each.partition("::")[0]).startswith(folder) for each in config.args)
    return config.getoption("tier") or ("all" if named or config.getoption("long") else "quick")


def is_wanted(item, tier):
    """Whether ``item`` belongs to ``tier``."""
    is_quick = not may_start_processes(item)
    is_promised = is_quick or item.get_closest_marker("promise") is not None
    return {"quick": is_quick, "promises": is_promised, "rest": not is_promised, "all": True}[tier]


def draw(items, seed):
    """Return the items that run with ``--draw seed``, in their order, and the items that do not."""
    drawn = {*items}
    for group in _by_mark(items, "drawn"):
        group.sort(key=lambda item: _rank(item, seed))
        drawn.difference_update(group[group[0].get_closest_marker("drawn").args[0] :])
    # By one item of each, or a group of many would be drawn more often.
    costly = sorted(_by_mark(items, "costly"), key=lambda group: _rank(min(group, key=lambda each: each.nodeid), seed))
    for group in costly[-(-len(costly) // _COSTLY) :]:
        drawn.difference_update(group)
    return [item for item in items if item in drawn], [item for item in items if item not in drawn]


def _by_mark(items, name):
    """Return, for each mark of this name, the items that share it."""
    groups = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker(name)) is not None:
            groups[id(mark)].append(item)  # two marks may be equal
    return list(groups.values())


def _rank(item, seed):
    return hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest()


def may_start_processes(item):
    """Whether ``item`` is marked ``processes``, or its file imports modules that start processes."""
    module = getattr(item, "module", None)
    is_marked = item.get_closest_marker("processes") is not None
    return is_marked or (module is not None and _imports_a_starter(module.__name__))


@functools.cache
def _imports_a_starter(name):
    seen, open_ = set[str](), [name]
    while open_:
        module = open_.pop()
        if module.partition(".")[0] in _STARTERS or module in _STARTERS:
            return True
        if module not in seen and module.startswith(_own_tests) and module in sys.modules:
            open_ += _imported_by(sys.modules[module])
        seen.add(module)
    return False


def _imported_by(module):
    for value in vars(module).values():
        if isinstance(value, ModuleType):
            yield value.__name__
        else:
            home = str(getattr(value, "__module__", "") or "")
            yield from (home, f"{home}.{getattr(value, '__name__', '')}")


def refuse_processes(refused):
    """Make the running test fail if it starts a process, or allow processes."""
    global _refused
    _refused = refused


def watch_for_processes():
    """Install the audit hook, once in a process."""
    sys.addaudithook(_on_event)


def _on_event(event, args):
    if _refused and event in _EVENTS:
        raise AssertionError(f"{event}: this test is to be marked `processes`: see {__name__}")
