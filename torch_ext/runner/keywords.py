"""The ``-k`` option: words that a test's name contains, joined by ``and``, ``or``, ``not`` and parentheses. And the
names nearest to one that was mistyped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch_ext.results import TestName

__all__ = ["keyword_filter", "nearest", "parts", "spellings", "words_without_match"]

_Filter = Callable[[TestName], bool]
_OPERATORS = frozenset({"and", "or", "not", "(", ")"})


def keyword_filter(expressions: Sequence[str]) -> _Filter:
    """Return a function that tells whether a test fits one of ``expressions``; none at all lets every test through.

    A word fits as a substring of the id or of unittest's dotted name, and with ``*``, ``?`` or ``[`` as a glob over
    either of them, the class or the method. Case does not matter.

    Raises:
        ValueError: an expression is incomplete.

    >>> fits = keyword_filter(["TestA and not slow", "test_[xy]"])
    >>> [fits(TestName("test_m.py", "TestA", method)) for method in ("test_1", "test_slow", "test_x")]
    [True, False, True]
    """
    filters = [_KeywordParser(text).parse() for text in expressions]
    return lambda test: not filters or any(fits(test) for fits in filters)


def words_without_match(expressions: Sequence[str], tests: Iterable[TestName]) -> list[str]:
    """Return the words of ``expressions``, which are complete, that no name in ``tests`` contains: mistyped, it seems.

    >>> words_without_match(["TestA and not (slwo)"], [TestName("test_m.py", "TestA", "test_1")])
    ['slwo']
    """
    tests = list(tests)
    words = dict.fromkeys(word for text in expressions for word in _tokens(text) if word not in _OPERATORS)
    return [word for word in words if not any(map(_word(word), tests))]


def _tokens(text: str) -> list[str]:
    return re.findall(r"[()]|[^\s()]+", text)


def _word(word: str) -> _Filter:
    word = word.lower()
    if not any(sign in word for sign in "*?["):
        return lambda test: word in test.id.lower() or word in test.dotted.lower()
    return lambda test: any(fnmatchcase(name.lower(), word) for name in (test.id, test.dotted, test.cls, test.method))


class _KeywordParser:
    """Recursive descent, one method a level: ``or`` binds weakest, ``not`` strongest."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)

    def parse(self) -> _Filter:
        found = self.alternatives()
        if self.tokens:
            lower = self.tokens[0].lower()
            advice = f"; write {lower} in small letters" if lower in _OPERATORS and lower != self.tokens[0] else ""
            raise self.error(f"'and' or 'or' before {self.tokens[0]!r}{advice}")
        return found

    def alternatives(self) -> _Filter:
        filters = [self.conjunction()]
        while self.take("or"):
            filters.append(self.conjunction())
        return lambda test: any(fits(test) for fits in filters)

    def conjunction(self) -> _Filter:
        filters = [self.term()]
        while self.take("and"):
            filters.append(self.term())
        return lambda test: all(fits(test) for fits in filters)

    def term(self) -> _Filter:
        if self.take("not"):
            inner = self.term()
            return lambda test: not inner(test)
        if self.take("("):
            inner = self.alternatives()
            if not self.take(")"):
                raise self.error("a closing parenthesis")
            return inner
        if not self.tokens or self.tokens[0] in _OPERATORS:
            raise self.error(f"a name before {self.tokens[0]!r}" if self.tokens else "a name at the end")
        return _word(self.tokens.pop(0))

    def take(self, token: str) -> bool:
        if self.tokens[:1] == [token]:
            del self.tokens[0]
            return True
        return False

    def error(self, expected: str) -> ValueError:
        return ValueError(f"got -k {self.text!r}, expected {expected}")


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
