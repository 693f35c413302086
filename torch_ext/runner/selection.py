"""Which tests the patterns of a command line mean. Pure: neither disk nor imports.

Note [Patterns]
~~~~~~~~~~~~~~~
The address of a test is ``folders / module :: class :: method``. A pattern spells a part of it:

- folders from the root on, or a module with any number of its folders: the pattern means whole files, and is
  understood before a single one is imported;
- a class, a method or both, alone or behind a module: the pattern needs the names of the tests, yet only those of
  the modules it mentions.

``/``, ``.`` and ``::`` all separate, as far as they leave no doubt: nothing before a ``/`` is a class, nothing behind
``::`` is a folder. One text can still be read in several ways. A file wins over a name, the whole path of a file over
a folder, a folder over the end of a path (so that an id always means exactly one test), and the longest module part
wins over shorter ones.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ext.results import TestName
from torch_ext.runner.keywords import nearest, spellings

__all__ = [
    "PatternTarget",
    "Selected",
    "Selection",
    "SelectionError",
    "fitting_tests",
    "resolve",
    "select_files",
    "select_tests",
]

_Parts = tuple[str, ...]


class SelectionError(ValueError):
    """A pattern means nothing. The message has the pattern and the nearest names."""


class _Reading(NamedTuple):
    """One way to read a pattern: the parts of a path, and the one or two names that follow it."""

    path: _Parts
    names: _Parts


@dataclass(frozen=True)
class PatternTarget:
    """What a pattern means once the files are known.

    Attributes:
        text: the pattern as typed.
        files: names of the files it selects from; empty if it can mean nothing here.
        names: ways to read its class and method parts; empty if it means whole files.
        anchored: it mentions a folder or a module, so that it says nothing about other files.
    """

    text: str
    files: frozenset[str]
    names: tuple[_Parts, ...] = ()
    anchored: bool = True

    def matches(self, test: TestName) -> bool:
        """Whether the pattern selects ``test``."""
        return test.file in self.files and (not self.names or any(_fits(names, test) for names in self.names))


@dataclass(frozen=True)
class Selection:
    """What is known before any name is: the targets, and the files whose names are needed, in their order."""

    include: tuple[PatternTarget, ...]
    exclude: tuple[PatternTarget, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Selected:
    """The tests that were selected, and those files among the unimportable ones that could hold selected tests.

    ``unseen`` are patterns that fit no test that is known, and could mean one in such a file, each with advice.
    """

    tests: tuple[TestName, ...]
    broken: tuple[str, ...]
    unseen: tuple[tuple[str, str], ...] = ()


def resolve(text: str, files: Sequence[str], prefixes: Sequence[str] = ()) -> PatternTarget:
    """Return what the pattern ``text`` means among ``files``. See Note [Patterns].

    Args:
        text: the pattern.
        files: names of all test files, relative to the root.
        prefixes: spellings of the root itself, such as ``"test/"`` and ``"test."``, which a pattern may start with.

    >>> files = ["fsdp/test_a.py", "fsdp/test_b.py", "rpc/test_a.py"]
    >>> sorted(resolve("test/fsdp/", files, ["test/"]).files), sorted(resolve("test_a", files).files)
    (['fsdp/test_a.py', 'fsdp/test_b.py'], ['fsdp/test_a.py', 'rpc/test_a.py'])
    >>> target = resolve("fsdp.test_a.TestX.test_y", files)
    >>> sorted(target.files), target.names
    (['fsdp/test_a.py'], (('TestX', 'test_y'),))
    """
    addresses = _addresses(tuple(files))
    readings = [reading for spelling in _spellings(text, prefixes) for reading in _readings(spelling)]
    rules = _file_rules(text)
    whole = _first_match(rules, (reading for reading in readings if not reading.names), addresses)
    if whole:
        return PatternTarget(text, whole[1])
    anchored = _first_match((_is_file, _ends_file), (one for one in readings if one.names and one.path), addresses)
    if anchored:
        return PatternTarget(text, anchored[1], (anchored[0].names,))
    bare = tuple(reading.names for reading in readings if reading.names and not reading.path)
    return PatternTarget(text, frozenset(files) if bare else frozenset(), bare, anchored=False)


@functools.lru_cache(maxsize=8)  # the same for every pattern, of which there may be thousands
def _addresses(files: tuple[str, ...]) -> dict[str, _Parts]:
    return {file: _split(file.removesuffix(".py"), "/") for file in files}


def _spellings(text: str, prefixes: Sequence[str]) -> list[str]:
    """``text`` itself, and what remains of it behind the root's own name."""
    text = text.removeprefix("./")
    shorter = [text[len(prefix) :] for prefix in prefixes if text.startswith(prefix)]
    whole = [""] if any(text == prefix[:-1] for prefix in prefixes) else []
    return [text, *shorter, *whole]


def _split(text: str, separator: str) -> _Parts:
    return tuple(part for part in text.split(separator) if part not in ("", "."))


def _readings(text: str) -> Iterator[_Reading]:
    path, separator, names = text.partition("::")
    folder, _, last = path.rpartition("/")
    folders, stem = _split(folder, "/"), last.removesuffix(".py")
    is_path = path.endswith((".py", "/"))
    # A dot can be part of a folder's name, or stand between names; in front of a slash it is never the latter.
    plain, dotted = (*folders, *_split(stem, "/")), (*folders, *_split(stem, "."))
    if separator:
        yield _Reading(dotted, tuple(re.split(r"::|\.", names)))
        if len(dotted) == 1 and not folders and not is_path:
            yield _Reading((), (*dotted, names))
        return
    yield _Reading(plain, ())
    least = len(dotted) if is_path else max(len(folders), len(dotted) - 2)
    for end in range(len(dotted), least - 1, -1):
        yield _Reading(dotted[:end], dotted[end:])


def _is_file(path: _Parts, address: _Parts) -> bool:
    return path == address


def _is_folder(path: _Parts, address: _Parts) -> bool:
    return len(path) < len(address) and address[: len(path)] == path


def _ends_file(path: _Parts, address: _Parts) -> bool:
    return bool(path) and address[-len(path) :] == path


_Rule = Callable[[_Parts, _Parts], bool]


def _file_rules(text: str) -> tuple[_Rule, ...]:
    if text.endswith(".py"):
        return (_is_file, _ends_file)
    return (_is_folder,) if text.endswith("/") else (_is_file, _is_folder, _ends_file)


def _first_match(
    rules: Sequence[_Rule], readings: Iterable[_Reading], addresses: Mapping[str, _Parts]
) -> tuple[_Reading, frozenset[str]] | None:
    """The first reading, by the strongest rule, that means some file, with its files."""
    readings = list(readings)
    for rule in rules:
        for reading in readings:
            files = frozenset(file for file, address in addresses.items() if rule(reading.path, address))
            if files:
                return reading, files
    return None


def _fits(names: _Parts, test: TestName) -> bool:
    return names in ((test.cls,), (test.method,), (test.cls, test.method))


def select_files(
    files: Sequence[str], include: Sequence[str], exclude: Sequence[str], prefixes: Sequence[str] = ()
) -> Selection:
    """Resolve the patterns of ``-i`` and ``-x`` among ``files``, and find the files whose names are needed.

    Raises:
        SelectionError: a pattern is spelt as a path, and no such path exists.
    """
    included, excluded = (tuple(resolve(text, files, prefixes) for text in texts) for texts in (include, exclude))
    for target in (*included, *excluded):
        if not target.files or not target.text.strip():
            raise _unmatched(target, files, ())
    dropped = {file for target in excluded if not target.names for file in target.files}
    wanted = {file for target in included for file in target.files} if include else set(files)
    return Selection(included, excluded, tuple(file for file in files if file in wanted - dropped))


def select_tests(selection: Selection, tests: Sequence[TestName], broken: Iterable[str] = ()) -> Selected:
    """Apply ``selection`` to the names of its files.

    Args:
        selection: what :func:`select_files` returned.
        tests: the tests of ``selection.files``; the result keeps their order.
        broken: those of ``selection.files`` that could not be imported and thus have no names.

    Raises:
        SelectionError: a pattern matches no test, and no broken file explains it.
    """
    broken = [file for file in selection.files if file in set(broken)]
    by_file: dict[str, list[TestName]] = {}
    for test in tests:
        by_file.setdefault(test.file, []).append(test)
    unseen: list[tuple[str, str]] = []
    for target in (*selection.include, *selection.exclude):
        near = tests if len(target.files) > 1 else [test for file in target.files for test in by_file.get(file, ())]
        if not _explained(target, selection, near, broken):
            raise _unmatched(target, selection.files, tests)
        if target.names and target.files.intersection(broken) and not any(map(target.matches, tests)):
            unseen.append((target.text, _advice(target, selection.files, tests)))
    suspects = tuple(file for file in broken if _suspect(file, selection.include, tests))
    return Selected(fitting_tests(selection, tests), suspects, tuple(unseen))


def fitting_tests(selection: Selection, tests: Sequence[TestName]) -> tuple[TestName, ...]:
    """Return those of ``tests`` that ``selection`` selects, which may be none."""
    include, exclude = (_by_file(targets, selection.files) for targets in (selection.include, selection.exclude))
    chosen = [test for test in tests if not selection.include or _any_matches(include, test)]
    return tuple(test for test in chosen if not _any_matches(exclude, test))


def _by_file(targets: Sequence[PatternTarget], files: Sequence[str]) -> dict[str, list[PatternTarget]]:
    """The targets that say something about each file, so that thousands of ids are not tried on every test."""
    found: dict[str, list[PatternTarget]] = {file: [] for file in files}
    for target in targets:
        for file in target.files & found.keys():
            found[file].append(target)
    return found


def _any_matches(targets: Mapping[str, Sequence[PatternTarget]], test: TestName) -> bool:
    return any(target.matches(test) for target in targets.get(test.file, ()))


def _explained(target: PatternTarget, selection: Selection, tests: Sequence[TestName], broken: Sequence[str]) -> bool:
    """Whether ``target`` matches, or fails to for a reason other than a mistyped name."""
    if not target.names or any(map(target.matches, tests)) or target.files.intersection(broken):
        return True
    # A class of a file that is not run, or that -x drops: its names were never read.
    return target.anchored and target.files.isdisjoint(selection.files)


def _suspect(file: str, include: Sequence[PatternTarget], tests: Sequence[TestName]) -> bool:
    """Whether the broken ``file`` could hold what was asked for: a name found elsewhere is not searched in it."""
    return not include or any(
        file in target.files and (target.anchored or not any(map(target.matches, tests))) for target in include
    )


def _unmatched(target: PatternTarget, files: Sequence[str], tests: Sequence[TestName]) -> SelectionError:
    advice = _advice(target, files, tests) or "nothing resembles it; --list shows every test"
    return SelectionError(f"{target.text!r} matches no folder, module, class or test; {advice}")


def _advice(target: PatternTarget, files: Sequence[str], tests: Sequence[TestName]) -> str:
    near = nearest(target.text, spellings(files, tests))
    return f"nearest: {', '.join(near)}" if near else ""
