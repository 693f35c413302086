"""Selects tests by the patterns and keywords of a command line. Pure: neither disk nor imports.

Note [Patterns]
~~~~~~~~~~~~~~~
The address of a test is ``folders / module :: class :: method``. A pattern spells a part of it:

- folders from the root on, or a module with any number of its folders: the pattern means whole files, and is
  resolved without an import;
- a class, a method or both, alone or after a module: the pattern needs the names of the tests, but only those of
  the modules that it mentions.

``/``, ``.`` and ``::`` all separate parts, with two constraints: no part before a ``/`` is a class, and no part after
``::`` is a folder. A pattern may still have several readings. A file wins over a name, the whole path of a file over a
folder, a folder over the end of a path (so that an id always means exactly one test), and the longest module part wins
over shorter ones.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch_ext.results import SetupError, TestName

_Parts = tuple[str, ...]
# One way to read a pattern: a path without suffix, and the one or two names that follow it.
_Reading = tuple[str, _Parts]


class SelectionError(SetupError):
    """A pattern or keyword matches nothing. The message has its text and the nearest names."""


@dataclass(frozen=True)
class PatternTarget:
    """The meaning of a pattern among known files."""

    text: str  # the pattern as typed
    files: frozenset[str]  # names of the files that it selects from; empty if it matches none
    names: tuple[_Parts, ...] = ()  # readings of its class and method parts; empty if it means whole files
    anchored: bool = True  # mentions a folder or a module, and so cannot match other files

    def matches(self, test: TestName) -> bool:
        """Whether the pattern selects ``test``."""
        names = {(test.cls,), (test.method,), (test.cls, test.method)}
        return test.file in self.files and (not self.names or not names.isdisjoint(self.names))


@dataclass(frozen=True)
class Selection:
    """The selection before any name is known: the targets, and the files whose names are needed, in their order."""

    include: tuple[PatternTarget, ...]
    exclude: tuple[PatternTarget, ...]
    files: tuple[str, ...]


def resolve(text: str, files: Sequence[str], prefixes: Sequence[str] = ()) -> PatternTarget:
    """Resolve the pattern ``text``, which may begin with one of ``prefixes``, among ``files``. See Note [Patterns].

    >>> files = ["fsdp/test_a.py", "fsdp/test_b.py", "rpc/test_a.py"]
    >>> sorted(resolve("test/fsdp/", files, ["test/"]).files), sorted(resolve("test_a", files).files)
    (['fsdp/test_a.py', 'fsdp/test_b.py'], ['fsdp/test_a.py', 'rpc/test_a.py'])
    """
    readings = [reading for spelling in _spellings(text, prefixes) for reading in _readings(spelling)]
    rules = [_is_file, _ends_file] if text.endswith(".py") else [_is_file, _is_folder, _ends_file]
    rules = [_is_folder] if text.endswith("/") else rules
    if whole := _first_match(rules, [(path, names) for path, names in readings if not names], files):
        return PatternTarget(text, whole[1])
    anchored = [(path, names) for path, names in readings if path and names]
    if match := _first_match([_is_file, _ends_file], anchored, files):
        return PatternTarget(text, match[1], (match[0],))
    bare = tuple(names for path, names in readings if names and not path)
    return PatternTarget(text, frozenset(files) if bare else frozenset(), bare, anchored=False)


def _spellings(text: str, prefixes: Sequence[str]) -> list[str]:
    """Return ``text``, and ``text`` without the root's own name."""
    text = text.removeprefix("./")
    shorter = [text[len(prefix) :] for prefix in prefixes if text.startswith(prefix)]
    whole = [""] if any(text == prefix[:-1] for prefix in prefixes) else []
    return [text, *shorter, *whole]


def _split(text: str, separator: str) -> _Parts:
    return tuple(part for part in text.split(separator) if part not in ("", "."))


def _readings(text: str) -> Iterator[_Reading]:
    path, separator, names = text.partition("::")
    is_path = path.endswith((".py", "/"))
    folder, _, last = path.rpartition("/")
    folders, stem = _split(folder, "/"), last.removesuffix(".py")
    # A dot can be part of a folder's name, or separate names; before a slash it never separates.
    plain, dotted = (*folders, *_split(stem, "/")), (*folders, *_split(stem, "."))
    if separator:
        yield "/".join(dotted), tuple(re.split(r"::|\.", names))
        if len(dotted) == 1 and not folders and not is_path:
            yield "", (*dotted, names)
        return
    yield "/".join(plain), ()
    least = len(dotted) if is_path else max(len(folders), len(dotted) - 2)
    for end in range(len(dotted), least - 1, -1):
        yield "/".join(dotted[:end]), dotted[end:]


def _is_file(path: str, file: str) -> bool:
    return f"{path}.py" == file


def _is_folder(path: str, file: str) -> bool:
    return not path or file.startswith(f"{path}/")


def _ends_file(path: str, file: str) -> bool:
    return bool(path) and f"/{file}".endswith(f"/{path}.py")


def _first_match(
    rules: Sequence[Callable[[str, str], bool]], readings: Sequence[_Reading], files: Sequence[str]
) -> tuple[_Parts, frozenset[str]] | None:
    """Return the names of the first reading, by the strongest rule, that matches a file, with its files, if any."""
    for rule, (path, names) in itertools.product(rules, readings):
        if matched := frozenset(file for file in files if rule(path, file)):
            return names, matched
    return None


def select_files(
    files: Sequence[str], include: Sequence[str], exclude: Sequence[str], prefixes: Sequence[str] = ()
) -> Selection:
    """Resolve the patterns of ``-i`` and ``-x`` among ``files``, which may begin with spellings of the root
    (``prefixes``), and find the files whose names are needed.
    """
    included, excluded = (tuple(resolve(text, files, prefixes) for text in texts) for texts in (include, exclude))
    for target in (*included, *excluded):
        if not target.files or not target.text.strip():
            raise _unmatched(target, files, ())
    dropped = {file for target in excluded if not target.names for file in target.files}
    wanted = {file for target in included for file in target.files} if include else set(files)
    return Selection(included, excluded, tuple(file for file in files if file in wanted - dropped))


def select_tests(
    selection: Selection, tests: Sequence[TestName], broken: Iterable[str] = ()
) -> tuple[list[TestName], list[str], list[str]]:
    """Return the selected ones of ``tests``, the ``broken`` files, which failed to import, that could hold some, and a
    warning for each bare name that only they could hold. Raises SelectionError if a pattern matches no test, and no
    broken file explains it.
    """
    broken = [file for file in selection.files if file in set(broken)]
    targets = (*selection.include, *selection.exclude)
    matched = {target for target in targets if any(map(target.matches, tests))}
    for target in targets:
        # The names of a class were never read if its file does not run, such as one that -x drops.
        unread = target.anchored and target.files.isdisjoint(selection.files)
        if target.names and target not in matched and not unread and target.files.isdisjoint(broken):
            raise _unmatched(target, selection.files, tests)
    # A broken file could hold a requested test, unless other files match its bare name.
    missed = [target for target in selection.include if target.anchored or target not in matched]
    suspects = [file for file in broken if not selection.include or any(file in target.files for target in missed)]
    chosen = [test for test in tests if not selection.include or _any_matches(selection.include, test)]
    warnings = [
        f"{_unmatched(target, selection.files, tests)}; maybe one in {', '.join(sorted(target.files & set(broken)))}, "
        "which cannot be imported"
        for target in targets
        if target.names and not target.anchored and target not in matched
    ]
    return [test for test in chosen if not _any_matches(selection.exclude, test)], suspects, warnings


def _any_matches(targets: Iterable[PatternTarget], test: TestName) -> bool:
    return any(target.matches(test) for target in targets)


def _unmatched(target: PatternTarget, files: Sequence[str], tests: Sequence[TestName]) -> SelectionError:
    # A spelling of every folder, file, class and test, in that order
    folders = {file[: slash.start()] for file in files for slash in re.finditer("/", file)}
    of_tests = [test.cls for test in tests] + [f"{test.cls}.{test.method}" for test in tests]
    names = [*sorted(folders), *sorted(files), *dict.fromkeys(of_tests)]
    near = advice(target.text, names) or "; no name is similar, --list shows every test"
    return SelectionError(f"{target.text!r} matches no folder, module, class or test{near}")


_OPERATORS = frozenset({"and", "or", "not", "(", ")"})


def keyword_filter(expressions: Sequence[str]) -> Callable[[TestName], bool]:
    """Return a predicate: whether a test matches one of ``expressions``. Without expressions, every test matches.

    Combine words with ``and``, ``or``, ``not`` and parentheses. A word matches a substring of the id or of unittest's
    dotted name. A word with ``*``, ``?`` or ``[`` is a glob for the id, the dotted name, the class or the method. Case
    does not matter.

    >>> fits = keyword_filter(["TestA and not slow", "test_[xy]"])
    >>> [fits(TestName("test_m.py", "TestA", method)) for method in ("test_1", "test_slow", "test_x")]
    [True, False, True]
    """
    filters = [_expression(text) for text in expressions]
    return lambda test: not filters or any(fits(test) for fits in filters)


def _expression(text: str) -> Callable[[TestName], bool]:
    """Return a predicate that lets Python evaluate ``text``, with a number in place of each word."""
    tokens = re.findall(r"[()]|[^\s()]+", text)
    words = [token for token in tokens if token not in _OPERATORS]
    numbers = itertools.count()
    source = " ".join(token if token in _OPERATORS else f"fits[{next(numbers)}]" for token in tokens)
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        tree = None
    if tree is None or any(isinstance(node, (ast.Call, ast.Tuple)) for node in ast.walk(tree)):
        raise SelectionError(f"got -k {text!r}, expected names joined by 'and', 'or', 'not' and parentheses")
    code = compile(tree, "-k", "eval")
    return lambda test: bool(eval(code, {"fits": [_contains(word.lower(), test) for word in words]}))


def _contains(word: str, test: TestName) -> bool:
    if not any(sign in word for sign in "*?["):
        return word in test.id.lower() or word in test.dotted.lower()
    return any(fnmatchcase(name.lower(), word) for name in (test.id, test.dotted, test.cls, test.method))


def advice(text: str, names: Iterable[str]) -> str:
    """Return the end of a message with the five of ``names`` most similar to ``text``; empty if none is similar.

    Compares names as a whole and by their last parts, ignoring case.

    >>> advice("testinputs", ["distributed/fsdp", "TestInput", "TestInput.test_words"])
    '; nearest: TestInput, TestInput.test_words'
    """
    from difflib import get_close_matches

    whole, last = _views(text)
    views = {view: name for name in names for view in _views(name)}
    near = {views[view]: None for part in (whole, last) for view in get_close_matches(part, views, 5)}
    return f"; nearest: {', '.join([*near][:5])}" if near else ""


def _views(name: str) -> tuple[str, str]:
    """Return the whole name and its last part, normalized."""
    whole = name.lower().removesuffix(".py").rstrip("/").replace("::", ".").replace("/", ".")
    return whole, whole.rpartition(".")[2]
