"""The source of the mutated package: its functions, their mutants, and the code that takes the place of theirs.

Imports none of the package: reads the files that an import would read.
"""

from __future__ import annotations
import __future__

import ast
import difflib
import fnmatch
import hashlib
import marshal
import re
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType

from torch_ext.mutate.operators import Text, first_of, is_docstring, is_talk, is_unseen, proposals
from torch_ext.mutate.swap import REACH, Code
from torch_ext.results import SetupError

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Chain = tuple[_Function, ...]  # functions, each within the one before
_Edit = tuple[int, int, str]  # start and end in bytes, and the new text
_Key = tuple[int, str]  # first line and name of a function's code
_NEWLINE = b"\n"
_TEXTS = ("__repr__", "__str__", "extra_repr")  # functions that only speak to a person


@dataclass(frozen=True)
class Mutant:
    """One mistake in one function."""

    module: str
    function: str  # within the module, such as `FSDPParam.to_sharded`
    operator: str
    is_field: bool  # the operator is one of distributed code
    edits: tuple[_Edit, ...]  # in order
    mark: int  # that a test sets if it reaches the statement
    id: str
    diff: str
    within: tuple[_Key, ...]  # the functions that hold it, the outermost first


class Source(Text):
    """A module's source. ``offset``: of its lines in the marks of a run."""

    def __init__(self, name: str, path: Path, offset: int = 0) -> None:
        super().__init__(path.read_bytes())
        self.name, self.path, self.offset = name, path, offset
        self._code = self._compile(self.tree)
        self._unchanged = dict[tuple[_Key, ...], dict[_Key, CodeType]]()

    def mutants(self, pattern: str = "*", lines: frozenset[int] | None = None) -> Iterator[Mutant]:
        """Yield the mutants of functions whose names fit ``pattern`` and, if given, that hold one of ``lines``. Some of
        them may not compile, or come to the same as another.
        """
        for name, chain in _functions(self.tree):
            own = range(chain[-1].lineno, (chain[-1].end_lineno or 0) + 1)
            is_wanted = chain[-1].name not in _TEXTS and fnmatch.fnmatchcase(name, pattern)
            is_wanted &= not is_docstring(first_of(chain[-1]))  # an overload, or abstract
            if is_wanted and (lines is None or not lines.isdisjoint(own)):
                yield from {mutant.edits: mutant for mutant in reversed([*self._of(name, chain)])}.values()

    def _of(self, name: str, chain: _Chain) -> Iterator[Mutant]:
        base, text = self.span(chain[-1])[0], self.of(chain[-1])
        within, inner = tuple(map(_key, chain)), (pair for each in chain[-1].body for pair in _counting(each, each))
        for node, statement in ((chain[-1], first_of(chain[-1])), *inner):
            for operator, is_field, changes in proposals(node, self):
                spans = [(part if isinstance(part, tuple) else self.span(part), new) for part, new in changes]
                edits = tuple(sorted((*span, new) for span, new in spans))
                moved = [(start - base, end - base, new) for start, end, new in edits]
                digest = hashlib.sha256(repr((text, moved)).encode()).hexdigest()[:8]
                mark = self.offset + statement.lineno
                identity, diff = f"{self.name}:{name}:{digest}", self._diff(edits)
                yield Mutant(self.name, name, operator, is_field, edits, mark, identity, diff, within)

    def _edited(self, edits: Sequence[_Edit], start: int, end: int) -> bytes:
        text = self.bytes[start:end]
        for first, last, new in reversed(edits):
            text = text[: first - start] + new.encode() + text[last - start :]
        return text

    def _diff(self, edits: Sequence[_Edit]) -> str:
        start, end = self.bytes.rfind(_NEWLINE, 0, edits[0][0]) + 1, self.bytes.find(_NEWLINE, edits[-1][1])
        old, new = (text.decode().splitlines() for text in (self.bytes[start:end], self._edited(edits, start, end)))
        lines = [*difflib.unified_diff(old, new, n=1, lineterm="")][3:]
        return "\n".join([f"@@ {self.path.name}:{self.bytes.count(_NEWLINE, 0, start) + 1}", *lines])

    def _compile(self, tree: ast.Module) -> CodeType:
        flags = __future__.annotations.compiler_flag if b"from __future__ import annotations" in self.bytes else 0
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of None()
            code: CodeType = compile(ast.fix_missing_locations(tree), str(self.path), "exec", flags, dont_inherit=True)
        return code

    def codes_of(self, mutant: Mutant) -> tuple[Code, ...]:
        """Return the codes that make ``mutant``; empty if it does not compile, or means what the source means."""
        try:
            if (old := self._unchanged.get(mutant.within)) is None:
                old = self._unchanged[mutant.within] = self._codes(mutant, ())
            new = self._codes(mutant, mutant.edits)
        except (SyntaxError, LookupError):
            return ()
        fits = all(code.co_freevars == old[key].co_freevars for key, code in new.items())
        if not fits or _meaning(old[mutant.within[-1]]) == _meaning(new[mutant.within[-1]]):
            return ()
        return tuple(Code(self.name, *key, marshal.dumps(code)) for key, code in new.items())

    def _codes(self, mutant: Mutant, edits: Sequence[_Edit]) -> dict[_Key, CodeType]:
        """Return the codes of the functions that hold ``mutant``, with ``edits``. Compiles their statement of the
        module alone, which is faster; both then lack the imports, which change the choice of instructions.
        """
        free = {key: _code_at(self._code, key).co_freevars for key in mutant.within}
        statement = next(each for each in self.tree.body if self.span(each)[1] >= mutant.edits[-1][1])
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
        tree = ast.parse(_NEWLINE * (first - 1) + self._edited(edits, self.starts[first - 1], self.span(statement)[1]))
        _mention(tree, free)
        return {key: _code_at(self._compile(tree), key) for key in mutant.within}

    def probes(self) -> tuple[Code, ...]:
        """Return the codes of all functions, with a statement before each of theirs that marks its line as reached."""
        tree = ast.parse(self.bytes)
        keys = [_key(chain[-1]) for _, chain in _functions(tree)]
        for outermost in [chain[0] for _, chain in _functions(tree) if len(chain) == 1]:
            _add_probes(outermost, self.offset)
        code = self._compile(tree)
        return tuple(Code(self.name, *key, marshal.dumps(_code_at(code, key))) for key in keys)


def _functions(node: ast.AST, prefix: str = "", outer: _Chain = ()) -> Iterator[tuple[str, _Chain]]:
    """Yield the name of every function below ``node``, and the functions that hold it, itself last."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield prefix + child.name, (*outer, child)
            yield from _functions(child, f"{prefix}{child.name}.", (*outer, child))
        else:
            yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix, outer)


def _key(function: _Function) -> _Key:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)]), function.name


def _code_at(code: CodeType, key: _Key) -> CodeType:
    """Return the code of the function ``key`` within ``code``. Raises LookupError if there is none."""
    stack = [code]
    while stack:
        inner = [each for each in stack.pop().co_consts if isinstance(each, CodeType)]
        for each in inner:
            if (each.co_firstlineno, each.co_name) == key:
                return each
        stack += inner
    raise LookupError(f"no code of {key[1]} in line {key[0]}")


def _meaning(code: CodeType) -> object:
    constants = [_meaning(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def _mention(tree: ast.Module, free: dict[_Key, tuple[str, ...]]) -> None:
    """Have functions mention their free variables, so that changed code without ``super()`` fits the old closure."""
    for node in ast.walk(tree):
        if isinstance(node, _Function) and (names := [*filter(str.isidentifier, free.get(_key(node), ()))]):
            # Last, since a declaration comes before any mention. Names such as .defaults are the compiler's own.
            kept = ast.parse(f"if 0: {', '.join(names)},").body[0]
            node.body.append(ast.copy_location(kept, node.body[-1]))


def _add_probes(node: ast.AST, offset: int) -> None:
    for child in ast.iter_child_nodes(node):
        _add_probes(child, offset)
    for field in ("body", "orelse", "finalbody"):
        if isinstance(statements := getattr(node, field, None), list):
            kept, probed = int(isinstance(node, _Function) and is_docstring(statements[0])), []
            for each in statements[kept:]:
                (probe,) = ast.parse(f"{REACH}[{offset + each.lineno}] = 1").body
                probed += [ast.fix_missing_locations(ast.copy_location(probe, each)), each]
            statements[kept:] = probed


def _counting(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """Yield each node in which a mistake counts, with its statement; functions within ``node`` have their own."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or is_docstring(node) or is_unseen(node):
        return
    if isinstance(node, ast.Raise) or not is_talk(node):
        yield node, statement
    for child in () if is_talk(node) else ast.iter_child_nodes(node):
        if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
            yield from _counting(child, child if isinstance(child, ast.stmt) else statement)


def find(target: str, path: Sequence[str]) -> dict[str, Source]:
    """Return the sources of the module or package ``target`` below ``path``, by name; SetupError if there are none."""
    folders: Sequence[str] | None = [*path]
    name, origin = "", Path()
    for part in target.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, folders)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise SetupError(f"got {target!r}, expected a module with Python source: there is no {name}")
        folders, origin = spec.submodule_search_locations, Path(spec.origin)
    found = {target: origin}
    if origin.name == "__init__.py":
        below = [each for each in sorted(origin.parent.rglob("*.py")) if each.name != "__main__.py"]
        parts = ((target, *each.relative_to(origin.parent).with_suffix("").parts) for each in below)
        found = dict(zip((".".join(each).removesuffix(".__init__") for each in parts), below, strict=True))
    return {name: Source(name, each) for name, each in found.items()}


def changed_lines(path: Path, revision: str) -> frozenset[int]:
    """Return the lines of ``path`` that differ from ``revision`` in git. Raises SetupError if git cannot tell."""
    command = ("git", "diff", "-U0", "--no-color", "--end-of-options", revision, "--", path.name)
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"--since {revision} needs git, which fails in {path.parent}: {done.stderr.strip()}")
    found = re.findall(r"^@@ .*\+(\d+)(?:,(\d+))? @@", done.stdout, re.MULTILINE)
    return frozenset(line for at, count in found for line in range(int(at), int(at) + int(count or 1)))
