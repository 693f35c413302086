"""Which files are rewritten, and how they are imported or compiled.

``install`` is called once in a process, before what it rewrites is imported. Forked children inherit it. The standard
library only, until a rewritten file runs.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType

from torch_ext import cache
from torch_ext.cuda_as_sim.rewrite import rewrite

__all__ = ["HELPERS", "code_of", "install"]

# Torch's own test helpers ask what hardware there is when they are imported.
HELPERS = "torch.testing._internal"
# But what they know of each operator, by device, is knowledge of CUDA; and it says "CUDA" in names of arguments, which
# stay, where it says "cuda" in strings.
_OPERATORS = (f"{HELPERS}.common_methods_invocations", f"{HELPERS}.opinfo")

_FOLDER = "cuda_as_sim"  # of code that has been rewritten, below the cache's


def install(roots: Iterable[str | os.PathLike[str]], packages: Iterable[str] = (HELPERS,)) -> None:
    """Rewrite every module that is imported from below ``roots``, files or folders, or from one of ``packages``.

    Modules that are imported already stay as they are.
    """
    sys.meta_path.insert(0, _Finder(tuple(os.path.realpath(root) for root in roots), tuple(packages)))


def code_of(path: str | os.PathLike[str]) -> CodeType:
    """Return the compiled code of the rewritten file ``path``, for running it as a program.

    Raises:
        SyntaxError: the file does not parse.
        OSError: it cannot be read.
    """
    return _compile(Path(path).read_bytes(), os.fspath(path))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, roots: tuple[str, ...], packages: tuple[str, ...]) -> None:
        self._roots, self._packages = roots, packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader) or not spec.origin:
            return None
        if not self._is_wanted(fullname, os.path.realpath(spec.origin)):
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec

    def _is_wanted(self, name: str, origin: str) -> bool:
        if _is_of(name, _OPERATORS):
            return False
        if _is_of(name, self._packages):
            return True
        below = any(origin == root or _is_part(origin, root) for root in self._roots)
        return below and name.partition(".")[0] not in ("torch", "torch_ext")


def _is_of(name: str, packages: Iterable[str]) -> bool:
    """Whether the module ``name`` is, or lies in, one of ``packages``."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_part(origin: str, root: str) -> bool:
    """Whether ``origin`` lies below ``root``, but not in an environment that is installed there."""
    below = origin.removeprefix(root + os.sep)
    return below != origin and not {"site-packages", "dist-packages"} & set(below.split(os.sep))


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return _compile(self.get_data(path), path)


def _compile(source: bytes, path: str) -> CodeType:
    if b"cuda" not in source and b"nccl" not in source and b"NCCL" not in source:
        return compile(source, path, "exec", dont_inherit=True)
    kept = _kept_file(source, path)
    if kept is not None:
        with suppress(OSError, ValueError, EOFError, TypeError):
            found = marshal.loads(kept.read_bytes())
            if isinstance(found, CodeType):
                return found
    code = compile(rewrite(ast.parse(source, path)), path, "exec", dont_inherit=True)
    if kept is not None:
        with suppress(OSError):
            _write(kept, marshal.dumps(code))
    return code


def _kept_file(source: bytes, path: str) -> Path | None:
    """Return where the code of this very source is kept; None where no folder is to be trusted with code."""
    above = cache.folder()
    if above is None or cache.why_not_trusted(above / _FOLDER):
        return None
    digest = hashlib.sha256(source)
    for part in (path.encode(), importlib.util.MAGIC_NUMBER, _rewriter()):
        digest.update(part)
    return above / _FOLDER / f"{digest.hexdigest()[:32]}.code"


def _rewriter() -> bytes:
    """The sources that decide what rewritten code looks like."""
    here = Path(__file__).parent
    return b"".join((here / name).read_bytes() for name in ("rewrite.py", "words.py"))


def _write(path: Path, data: bytes) -> None:
    cache.make(path.parent)
    handle, aside = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(aside, path)
