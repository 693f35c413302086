"""Where source is read from: this project, a PyTorch checkout at its HEAD, and the installed torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from torch_ext.upstream.export.git import CheckoutError, commit_of, ran
from torch_ext.upstream.export.modules import Tree

__all__ = [
    "CheckoutError",
    "file_at",
    "installed_tree",
    "our_tree",
    "our_tree_at",
    "path_of",
    "project_root",
    "tree_at",
    "upstream_at",
]

OURS, THEIRS = "torch_ext.testing._internal", "torch.testing._internal"


def project_root() -> Path:
    """Return the checkout of this project that is imported.

    Raises:
        CheckoutError: it was installed without its tests.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "testing" / "_internal").is_dir():
        raise CheckoutError(f"{root} holds no testing/_internal: run this from a clone of the project")
    return root


def path_of(module: str) -> str:
    """Return the path of a module inside its repository, without ``.py`` or ``/__init__.py``."""
    if module == "torch_ext.testing" or module.startswith("torch_ext.testing."):
        module = module.removeprefix("torch_ext.")
    return module.replace(".", "/")


def our_tree(theirs: Tree | None = None, root: Path | None = None) -> Tree:
    """Return the modules of this project, as they are on disk, and those of torch as ``theirs`` has them."""
    return _with_torch(_disk_tree(root or project_root()), theirs)


def our_tree_at(revision: str, theirs: Tree | None = None, root: Path | None = None) -> Tree:
    """Return the modules of this project as they were in ``revision``."""
    return _with_torch(tree_at(root or project_root(), revision), theirs)


def _with_torch(ours: Tree, theirs: Tree | None) -> Tree:
    def of(name: str) -> Tree | None:
        return theirs if name.split(".")[0] == "torch" else ours

    def read(name: str) -> tuple[str, bool] | None:
        tree = of(name)
        return tree.read(name) if tree is not None else None

    return Tree(read, lambda name: (of(name) or ours).called(name))


def installed_tree() -> Tree:
    """Return the modules of the installed torch, without importing it."""
    # Not the folder that the command runs in, which comes first and may be a checkout of PyTorch.
    here = os.getcwd()
    elsewhere = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    found = importlib.machinery.PathFinder.find_spec("torch", elsewhere) or importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CheckoutError("torch is not installed")
    return _disk_tree(Path(found.origin).parents[1])


def _disk_tree(root: Path) -> Tree:
    def called(name: str) -> str:
        return str(root / f"{path_of(name)}.py")

    def read(name: str) -> tuple[str, bool] | None:
        path = path_of(name)
        for file, package in ((root / f"{path}.py", False), (root / path / "__init__.py", True)):
            if file.is_file():
                return _decoded(_bytes_of(file).replace(b"\r\n", b"\n"), str(file)), package
        return None

    return Tree(read, called)


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckoutError(f"{file} cannot be read: {error.strerror}") from None


def _decoded(text: bytes, called: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise CheckoutError(f"{called}, line {line}: this is no UTF-8 text; save the file as UTF-8") from None


def tree_at(checkout: Path, revision: str = "HEAD") -> Tree:
    """Return the modules of a git repository as they are in ``revision``: what lies uncommitted does not count.

    Raises:
        CheckoutError: there is no such repository or revision.
    """
    commit = commit_of(checkout, revision)

    def called(name: str) -> str:
        return _called(checkout, f"{path_of(name)}.py", revision)

    def read(name: str) -> tuple[str, bool] | None:
        for path, package in ((f"{path_of(name)}.py", False), (f"{path_of(name)}/__init__.py", True)):
            text = _show(checkout, path, commit)
            if text is not None:
                return _decoded(text, _called(checkout, path, revision)), package
        return None

    return Tree(read, called)


def upstream_at(checkout: Path) -> Tree:
    """Return the modules of a PyTorch checkout at its ``HEAD``.

    Raises:
        CheckoutError: it is none.
    """
    tree = tree_at(checkout)
    if ran(checkout, "cat-file", "-e", f"HEAD:{path_of(THEIRS)}").returncode:
        raise CheckoutError(f"{checkout} has no {path_of(THEIRS)} in its HEAD; give a git checkout of PyTorch")
    return tree


def _called(checkout: Path, path: str, revision: str) -> str:
    return f"{path} of {checkout} in {revision}"


def file_at(checkout: Path, path: str, revision: str = "HEAD") -> str | None:
    """Return the text of ``path`` in ``revision``, or None if it is not there.

    Raises:
        CheckoutError: there is no such repository or revision.
    """
    text = _show(checkout, path, commit_of(checkout, revision))
    return None if text is None else _decoded(text, _called(checkout, path, revision))


@cache
def _show(checkout: Path, path: str, commit: str) -> bytes | None:
    shown = ran(checkout, "show", f"{commit}:{path}")
    return shown.stdout if shown.returncode == 0 else None
