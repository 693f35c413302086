"""The names nearest to one that was mistyped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch_ext.runner.results import TestName

__all__ = ["nearest", "parts", "spellings"]

# Below this ratio a suggestion has more letters wrong than right.
_CUTOFF = 0.6


def spellings(files: Iterable[str], tests: Iterable[TestName] = ()) -> list[str]:
    """Return one accepted spelling of every folder, file, class and test, in that order.

    >>> spellings(["a/b/test_c.py"], [TestName("a/b/test_c.py", "TestD", "test_e")])
    ['a', 'a/b', 'a/b/test_c.py', 'TestD', 'TestD.test_e']
    """
    files, tests = sorted(files), list(tests)
    folders = {file[: slash.start()] for file in files for slash in re.finditer("/", file)}
    classes = dict.fromkeys(test.cls for test in tests)
    return [*sorted(folders), *files, *classes, *dict.fromkeys(f"{test.cls}.{test.method}" for test in tests)]


def parts(tests: Iterable[TestName]) -> list[str]:
    """Return the words that the names of classes and tests are made of.

    >>> parts([TestName("a/test_c.py", "TestStateDict", "test_save_all")])
    ['Test', 'State', 'Dict', 'test', 'save', 'all']
    """
    names = dict.fromkeys(name for test in tests for name in (test.cls, test.method))
    return list(dict.fromkeys(word for name in names for word in re.findall(r"[A-Z]*[a-z0-9]+", name)))


def nearest(text: str, names: Iterable[str], count: int = 5) -> list[str]:
    """Return at most ``count`` of ``names`` that resemble ``text``, the most alike first.

    Two names are alike as a whole or in their last parts, whatever their case.

    >>> nearest("distributed/fspd", ["distributed/fsdp", "distributed/rpc", "TestInput"], count=1)
    ['distributed/fsdp']
    >>> nearest("testinputs", ["distributed/fsdp", "TestInput", "TestInput.test_words"])
    ['TestInput', 'TestInput.test_words']
    """
    scored = [(score, name) for name in names if (score := _likeness(text, name)) >= _CUTOFF]
    return [name for _, name in sorted(scored, key=lambda pair: -pair[0])[:count]]


def _likeness(text: str, name: str) -> float:
    pairs = zip(_views(text), _views(name), strict=True)
    return max(_ratio(one, other) for one, other in pairs)


def _views(name: str) -> tuple[str, str]:
    """The whole name and its last part, in one spelling."""
    whole = name.lower().removesuffix(".py").rstrip("/").replace("::", ".").replace("/", ".")
    return whole, whole.rpartition(".")[2]


def _ratio(one: str, other: str) -> float:
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(None, one, other, autojunk=False)
    # Both bounds are cheap, and nearly every name of a large suite falls at one of them.
    if matcher.real_quick_ratio() < _CUTOFF or matcher.quick_ratio() < _CUTOFF:
        return 0.0
    return matcher.ratio()
