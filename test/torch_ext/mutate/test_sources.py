"""Mutants of source texts, and code that takes the place of a function's, in this process."""

import argparse
import ast
import functools
import gc
import statistics
import sys
import threading
from pathlib import Path

import pytest

from torch_ext.mutate import swap
from torch_ext.mutate.sources import Source, find
from torch_ext.results import SetupError

MODULE = "module_that_is_mutated"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes and imports a module; returns it with its source."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(swap, "_functions", {})

    def load(text):
        (tmp_path / f"{MODULE}.py").write_text(text)
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        assert swap.prepare((MODULE,)) == ()
        return sys.modules[MODULE], Source(MODULE, tmp_path / f"{MODULE}.py")

    yield load
    gc.unfreeze()


def diffs(text, tmp_path, operator):
    (tmp_path / "one.py").write_text(text)
    found = [mutant for mutant in Source("one", tmp_path / "one.py").mutants() if mutant.operator == operator]
    return {"\n".join(line for line in mutant.diff.splitlines() if line[0] in "+") for mutant in found}


BODY = "def f(a, b=1, *, group=None):\n    {}\n"


@pytest.mark.parametrize(
    ("operator", "statement", "expected"),
    [
        ("collective dropped", "dist.all_reduce(a, group=group)", "None"),
        ("collective dropped", "x = funcol.all_gather_tensor(a, 0, group)", "x = a"),
        ("group", "dist.all_reduce(a, group=group)", "dist.all_reduce(a, group=None)"),
        ("root", "dist.broadcast(a, src=b)", "dist.broadcast(a, src=(b) + 1)"),
        ("reduction", "dist.all_reduce(a, ReduceOp.SUM)", "dist.all_reduce(a, ReduceOp.MAX)"),
        ("async_op", "dist.all_reduce(a, async_op=True)", "dist.all_reduce(a, async_op=not (True))"),
        ("wait dropped", "stream.wait_event(a)", "None"),
        ("wait dropped", "a = wait_tensor(a)", "a = a"),
        ("hook dropped", "a.register_forward_hook(b)", "None"),
        ("reshard or unshard skipped", "self.reshard()", "None"),
        ("rank or index off by one", "x = a[self.rank]", "x = a[(self.rank + 1)]"),
        ("padding", "x = padded_size", "x = (padded_size + 1)"),
        ("dtype of a cast", "x = a.to(b)", "x = a"),
        ("dtype of a cast", "x = torch.float32", "x = torch.bfloat16"),
        ("requires_grad lost", "x = a.detach()", "x = a"),
        ("cache not invalidated", "self.cache = None", "pass"),
        ("context left out", "with no_grad(): pass", 'with __import__("contextlib").nullcontext(): pass'),
        ("order of events", "for each in groups: a(each)", "for each in [*groups][::-1]: a(each)"),
        ("argument ignored", "return b", "b = 1"),
        ("condition negated", "if a is b: pass", "if not (a is b): pass"),
        ("boundary", "x = a < b", "x = a <= b"),
        ("arithmetic", "x = a % b", "x = (a // b)"),
        ("constant", "x = True", "x = False"),
        ("arguments swapped", "x = a(1, b)", "x = a(b, 1)"),
        ("argument dropped", "x = a(1, key=b)", "x = a(1)"),
        ("exception swallowed", "raise ValueError(a + 1)", "pass"),
        ("return value", "return b", "return None"),
        ("early return", "a()", "return None"),
        ("loop cut", "for each in a: b(each)", "for each in [*a][1:]: b(each)"),
        ("statement deleted", "logger.warning(a)", "pass"),
        ("condition constant", "if a: raise AssertionError\n    else: b()", "if False: raise AssertionError"),
    ],
)
def test_an_operator_makes_its_mistake(tmp_path, operator, statement, expected):
    made = diffs(BODY.format(statement), tmp_path, operator)
    assert any(f"+    {expected}" in each.splitlines() for each in made), made


@pytest.mark.parametrize("call", ["type(a)", "float(a)", "cast(int, a)", "typing.cast(int, a)"])
def test_functions_that_have_the_name_of_a_cast_are_left_alone(tmp_path, call):
    assert not diffs(BODY.format(f"x = {call}"), tmp_path, "dtype of a cast")


def test_finally_becomes_a_straight_line(load):
    body = "    try:\n        if fails:\n            raise KeyError\n    finally:\n        log.append(1)\n"
    module, source = load(f"log = []\ndef f(fails):\n{body}")
    (mutant,) = [each for each in source.mutants() if each.operator == "not restored after an exception"]
    assert swap.apply(swap.Swap(source.codes_of(mutant))) == ""
    with pytest.raises(KeyError):
        module.f(True)
    assert module.log == []
    module.f(False)
    assert module.log == [1]


@pytest.mark.parametrize(
    ("operator", "statement"),
    [
        *(("arithmetic", each) for each in ("log.warning(a + 1)", "raise ValueError(a + 1)", "assert a + 1")),
        ("arithmetic", 'x = f"{a + 1}"'),
        ("context left out", "with SimpleProfiler.profile(a): pass"),
        ("return value", "if a: return"),
        ("argument ignored", "..."),
        ("condition constant", 'if a is None: raise AssertionError("a")'),
        ("exception swallowed", "raise AssertionError"),
        *(("statement deleted", each) for each in ("logger.info(a)", "_p_assert(a, b)", "torch._assert(a, b)")),
    ],
)
def test_what_no_test_can_notice_is_left_alone(tmp_path, operator, statement):
    assert diffs(BODY.format(statement), tmp_path, operator) == set()


def test_the_same_text_is_no_mutant_whatever_the_module_imports(tmp_path):
    (tmp_path / "one.py").write_text("import os\n\ndef f(a):\n    if a:\n        return None\n    return os.getcwd()\n")
    source = Source("one", tmp_path / "one.py")
    made = [each for each in source.mutants() if each.operator == "return value" and source.codes_of(each)]
    assert ["os.getcwd" in each.diff for each in made] == [True]


def test_a_function_with_nonlocal_has_mutants(load):
    module, source = load("""
def outer():
    n = m = 1
    def inner():
        nonlocal n
        n += m
        return n
    return inner
""")
    codes = [source.codes_of(each) for each in source.mutants() if each.operator == "statement deleted"]
    assert swap.apply(swap.Swap(codes[0])) == "" and len(codes) == 1
    assert module.outer()() == 1


@pytest.mark.parametrize("module", [argparse, ast, statistics], ids=lambda module: module.__name__)
def test_mutants_of_a_whole_module_compile_and_differ(module):
    """The compiler is the oracle: a mutant is another program, with the closures of the old one, or none."""
    source = Source(module.__name__, Path(module.__file__))
    mutants = [*source.mutants()]
    assert len({mutant.id for mutant in mutants}) == len(mutants) > 200
    sample = mutants[::40]
    compiled = [mutant for mutant in sample if source.codes_of(mutant)]
    assert len(compiled) > 0.8 * len(sample)
    assert all(mutant.diff.count("\n") for mutant in compiled)


HELD = """
import functools
held = []
def passed(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper
class Base:
    def __init__(self):
        self.made = True
class C(Base):
    def __init__(self):
        super().__init__()
    @passed
    def decorated(self): return 1
    @property
    def of_property(self): return 1
    @staticmethod
    def static(): return 1
def hook(): return 1
held.append(hook)
def adder(number):
    def add(other):
        return number + other
    return add
add_two = adder(2)
"""


@pytest.mark.parametrize(
    ("function", "operator", "after"),
    [
        ("C.__init__", "statement deleted", lambda module: not hasattr(module.C(), "made")),
        ("C.decorated", "constant", lambda module: module.C().decorated() == 2),
        ("C.of_property", "constant", lambda module: module.C().of_property == 2),
        ("C.static", "constant", lambda module: module.C.static() == 2),
        ("hook", "constant", lambda module: module.held[0]() == 2),
        ("adder.add", "arithmetic", lambda module: (module.add_two(5), module.adder(3)(5)) == (-3, -2)),
        ("passed.wrapper", "return value", lambda module: module.C().decorated() is None),
    ],
)
def test_every_reference_to_a_function_sees_the_mutant(load, function, operator, after):
    module, source = load(HELD)
    before = functools.partial(after, module)
    assert not before()
    mutants = [each for each in source.mutants(function) if each.operator == operator]
    assert swap.apply(swap.Swap(source.codes_of(mutants[0]))) == ""
    assert after(module)


def test_marks_show_the_reached_lines_of_every_thread(load, tmp_path):
    text = 'def f(a):\n    """Words."""\n    if a:\n        return 1\n    g()\n'
    text += "\ndef g():\n    for _ in ():\n        pass\n"
    module, source = load(text)
    marks = tmp_path / "marks"
    marks.write_bytes(bytes(source.lines + 1))
    swap.apply(swap.Swap(source.probes(), str(marks)))
    reached = lambda: {line for line, mark in enumerate(marks.read_bytes()) if mark}  # noqa: E731
    assert module.f.__doc__ == "Words." and reached() == set()
    module.f(1)
    assert reached() == {3, 4}
    thread = threading.Thread(target=module.f, args=(0,))
    thread.start()
    thread.join()
    assert reached() == {3, 4, 5, 8}


def test_a_process_without_the_functions_says_so(monkeypatch):
    monkeypatch.setattr(swap, "_functions", {})
    assert "fresh interpreters" in swap.apply(swap.Swap(()))


def test_find_reads_what_an_import_would(tmp_path):
    (tmp_path / "one" / "two").mkdir(parents=True)
    for name in ("one/__init__.py", "one/two/__init__.py", "one/two/three.py", "one/__main__.py"):
        (tmp_path / name).touch()
    assert [*find("one", [str(tmp_path)])] == ["one", "one.two", "one.two.three"]
    assert [*find("one.two.three", [str(tmp_path)])] == ["one.two.three"]
    with pytest.raises(SetupError, match=r"there is no one\.four"):
        find("one.four", [str(tmp_path)])
    with pytest.raises(SetupError, match="expected a module with Python source"):
        find("math", sys.path)


def test_functions_are_found_behind_frozen_objects(load):
    module, _ = load("def f(): return 1\n")
    assert module.f in swap._functions[MODULE, 1, "f"]
