"""Draws bodies of tests, and predicts each ending: plain unittest's, except for the table in ``docs/running.md``."""

import inspect
import itertools
import random
import unittest

# The base classes whose ranks run the bodies, as `suites.PREAMBLE` defines them.
BASES = ("Ranks", "Threads", "Standing")
# This category of warnings is an error in all runs.
OUTSIDE = {"PYTHONWARNINGS": "error::UnicodeWarning"}
# An exit code that means "skipped" (`TEST_SKIPS`), and some that mean nothing.
_SKIPS, _EXITS = 75, ("0", "3", "'words'")

_HEADER = """
import contextlib
import sys
import unittest
import warnings


def raise_(error=ValueError):
    raise error("raised")


@contextlib.contextmanager
def around(before, after):
    before()
    try:
        yield
    finally:
        after()


class Bodies:
"""


# Bodies that a call does not execute. unittest passes them.
_UNRUN = ("async def {}(self): self.fail('ran')", "def {}(self): yield", "async def {}(self): yield")
_NOT_RUN = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class _Body:
    """Writes one drawn method."""

    def __init__(self, draw):
        self._draw = draw
        self.is_expected = draw.random() < 0.2
        self._subs = 0

    def lines(self, name):
        if self._draw.random() < 0.05:
            yield self._draw.choice(_UNRUN).format(name)
            return
        if self.is_expected:
            yield "@unittest.expectedFailure"
        if self._draw.random() < 0.03:
            yield "@unittest.skip('by a decorator')"
        yield f"def {name}(self):"
        yield from self._block(3)

    def _block(self, depth):
        for _ in range(self._draw.randint(1, 3)):
            kinds = [self._end, self._register, self._sub_test, self._context, self._try]
            weights = [4, 3, 4, 2, 1] if depth else [4, 3, 0, 0, 0]
            (kind,) = self._draw.choices(kinds, weights)
            for line in kind(depth - 1):
                yield f"    {line}"

    def _call(self):
        """A statement that may fail, as the name of a function and its arguments."""
        calls = ["int", "self.fail, 'no'", "self.skipTest, 'no'", "raise_", "raise_, KeyError"]
        calls += [f"sys.exit, {self._draw.choice(_EXITS)}", "warnings.warn, 'no', UnicodeWarning", "self.doCleanups"]
        if not self.is_expected:
            calls.append(f"sys.exit, {_SKIPS}")
        return self._draw.choices(calls, [8, 2, 2, 2, 1, 1, 1, 1, 1][: len(calls)])[0]

    def _end(self, depth):
        function, _, arguments = self._call().partition(", ")
        yield f"{function}({arguments})" if self._draw.random() < 0.9 else "return"

    def _register(self, depth):
        nested = "self.addCleanup, " if self._draw.random() < 0.2 else ""
        yield f"self.addCleanup({nested}{self._call()})"

    def _sub_test(self, depth):
        self._subs += 1
        yield f"with self.subTest(i={self._subs}):"
        yield from self._block(depth)

    def _context(self, depth):
        contexts = [
            "self.assertRaises(ValueError)",
            "contextlib.suppress(ValueError)",
            "around(int, raise_)",
            "around(raise_, int)",
            "around(int, lambda: self.skipTest('left'))",
            "around(int, lambda: self.fail('left'))",
        ]
        yield f"with {self._draw.choice(contexts)}:"
        yield from self._block(depth)

    def _try(self, depth):
        yield "try:"
        yield from self._block(depth)
        yield self._draw.choice(["finally:", "except Exception:", "except ValueError:"])
        yield from self._block(depth)


def module_of_bodies(number, seed):
    """Return the source of a module whose class ``Bodies`` has this many tests, ``test_0`` and so on."""
    draw = random.Random(seed)
    lines = [f"    {line}\n" for index in range(number) for line in [*_Body(draw).lines(f"test_{index}"), ""]]
    return _HEADER + "".join(lines)


def suite_text(way, ways, number):
    """Return the source of a suite that runs each body with one of the base classes."""
    return f"""
from bodies import Bodies

for index, base in enumerate(({", ".join(BASES)})):
    names = [f"test_{{n}}" for n in range({number}) if (n + index) % {ways} == {way}]
    methods = {{name: getattr(Bodies, name) for name in names}}
    globals()[f"Test{{base.__name__}}"] = type(f"Test{{base.__name__}}", (base,), {{**methods, "__module__": __name__}})
del base

if __name__ == "__main__":
    run_tests()
"""


def ends(bodies, base):
    """Return a function that says how a body ends when every rank of a class of ``base`` runs it."""
    plain = type("Plain", (bodies.Bodies, unittest.TestCase), {})

    def end(name):
        if getattr(plain, name).__code__.co_flags & _NOT_RUN:
            return "failed"
        found = unittest.TestResult()
        plain(name).run(found)
        words = {_as_in_the_table("failed", trace, base) for _, trace in found.errors + found.failures}
        words |= {_as_in_the_table("expected failure", trace, base) for _, trace in found.expectedFailures}
        words |= {"skipped" for _ in found.skipped} | {"unexpected success" for _ in found.unexpectedSuccesses}
        order = ("failed", "unexpected success", "expected failure", "skipped")
        return next((word for word in order if word in words), "passed")

    return end


def _as_in_the_table(word, trace, base):
    error, _, code = trace.rstrip().rpartition("\n")[2].partition(": ")
    if error != "SystemExit":
        return word
    if code == str(_SKIPS):
        return "skipped"
    return "failed" if base != "Threads" else word  # no test may expect the end of its rank's process


def class_suite():
    """Return the source of bodies that register a cleanup of their class or module, and a class for each."""
    bodies = [
        f"{mark}def body_{number}(self):\n    {register}({action})\n    {end}\n"
        for number, (register, action, (mark, end)) in enumerate(
            itertools.product(
                ("type(self).addClassCleanup", "unittest.addModuleCleanup"),
                ("int", "self.fail, 'no'", "self.skipTest, 'no'", "raise_"),
                (("", "pass"), ("", "self.skipTest('no')"), ("@unittest.expectedFailure\n", "self.fail('no')")),
            )
        )
    ]
    classes = f"""
import bodies

for number in range({len(bodies)}):
    name, base = f"body_{{number}}", ({", ".join(BASES)})[number % {len(BASES)}]
    body = getattr(bodies, name)
    globals()[f"Test{{name}}"] = type(f"Test{{name}}", (base,), {{"test_it": body, "__module__": __name__}})
del base
"""
    return _HEADER.replace("class Bodies:\n", "") + "\n\n".join(bodies), classes


def class_fails(bodies, name):
    """Whether plain unittest has a failure or an error in or after a class of one test, body ``name`` of ``bodies``."""
    plain = type("Plain", (unittest.TestCase,), {"test_it": getattr(bodies, name)})
    result = unittest.TestResult()
    unittest.TestSuite([plain("test_it")]).run(result)
    return not result.wasSuccessful()
