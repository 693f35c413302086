"""Where source is read from: this project, a PyTorch checkout at its HEAD, and the installed torch."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

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
]

OURS, THEIRS = "torch_ext.testing._internal", "torch.testing._internal"


class CheckoutError(ValueError):
    """A folder is not what it should be: a git checkout of PyTorch, or of this project."""


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
    return _with_torch(lambda name: _from_disk(root or project_root(), path_of(name)), theirs)


def our_tree_at(revision: str, theirs: Tree | None = None, root: Path | None = None) -> Tree:
    """Return the modules of this project as they were in ``revision``."""
    return _with_torch(tree_at(root or project_root(), revision).read, theirs)


def _with_torch(read: Callable[[str], tuple[str, bool] | None], theirs: Tree | None) -> Tree:
    def either(name: str) -> tuple[str, bool] | None:
        if name.split(".")[0] != "torch":
            return read(name)
        return theirs.read(name) if theirs is not None else None

    return Tree(either)


def installed_tree() -> Tree:
    """Return the modules of the installed torch, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CheckoutError("torch is not installed")
    site = Path(found.origin).parents[1]
    return Tree(lambda name: _from_disk(site, path_of(name)))


def _from_disk(root: Path, path: str) -> tuple[str, bool] | None:
    for file, package in ((root / f"{path}.py", False), (root / path / "__init__.py", True)):
        if file.is_file():
            return file.read_text(encoding="utf-8"), package
    return None


def tree_at(checkout: Path, revision: str = "HEAD") -> Tree:
    """Return the modules of a git repository as they are in ``revision``: what lies uncommitted does not count.

    Raises:
        CheckoutError: there is no such repository or revision.
    """
    commit = _commit(checkout, revision)

    def read(name: str) -> tuple[str, bool] | None:
        for path, package in ((f"{path_of(name)}.py", False), (f"{path_of(name)}/__init__.py", True)):
            text = _show(checkout, path, commit)
            if text is not None:
                return text, package
        return None

    return Tree(read)


def file_at(checkout: Path, path: str, revision: str = "HEAD") -> str | None:
    """Return the text of ``path`` in ``revision``, or None if it is not there.

    Raises:
        CheckoutError: there is no such repository or revision.
    """
    return _show(checkout, path, _commit(checkout, revision))


def _commit(checkout: Path, revision: str) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    known = subprocess.run(command, capture_output=True, text=True)
    if known.returncode:
        raise CheckoutError(f"{checkout} is no git repository with a commit {revision}")
    return known.stdout.strip()


@cache
def _show(checkout: Path, path: str, commit: str) -> str | None:
    shown = subprocess.run(["git", "-C", str(checkout), "show", f"{commit}:{path}"], capture_output=True)
    return shown.stdout.decode("utf-8") if shown.returncode == 0 else None
