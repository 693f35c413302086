"""Runs git in a repository, and says in one sentence why it would not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CheckoutError", "commit_of", "git", "ran", "root_of"]

# Git sets these for its hooks. They would have another repository be meant than the one that is named.
_OF_A_HOOK = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
)


class CheckoutError(ValueError):
    """A folder, a file or a revision is not what it should be: of a git checkout of PyTorch, or of this project."""


def ran(
    where: Path, *command: str, text: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in the folder ``where`` and return what came of it.

    Args:
        where: a folder of the repository.
        command: what git is to do.
        text: for its stdin.
        environment: besides that of this process.

    Raises:
        CheckoutError: there is no git.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    try:
        return subprocess.run(
            ["git", "-C", str(where), *command],
            input=text.encode(),
            capture_output=True,
            env={**kept, "LC_ALL": "C.UTF-8", **(environment or {})},
        )
    except FileNotFoundError:
        raise CheckoutError("there is no git on the PATH; install it") from None


def git(where: Path, *command: str, text: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Run git as :func:`ran` does and return what it printed.

    Raises:
        CheckoutError: git failed; the message has its words.
    """
    done = ran(where, *command, text=text, environment=environment)
    if done.returncode:
        raise CheckoutError(f"git {' '.join(command[:2])} failed in {where}: {_words(done)}")
    return done.stdout.decode(errors="replace")


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode(errors="replace").strip()
    return text.removeprefix("fatal: ").removeprefix("error: ")


def root_of(checkout: Path) -> Path:
    """Return the top folder of the repository that ``checkout`` lies in, or ``checkout`` itself if it is bare.

    Raises:
        CheckoutError: there is no such folder, or git does not read it.
    """
    if not checkout.is_dir():
        raise CheckoutError(f"{checkout} is no folder; give a git checkout of PyTorch")
    done = ran(checkout, "rev-parse", "--is-bare-repository", "--is-inside-work-tree", "--show-cdup")
    if done.returncode:
        if b"not a git repository" in done.stderr:
            raise CheckoutError(f"{checkout} is no git repository; give a git checkout of PyTorch")
        raise CheckoutError(f"git does not read {checkout}: {_words(done)}")
    bare, inside, *up = done.stdout.decode().splitlines()
    if bare == "true" or inside == "false":
        return checkout
    return (checkout / up[0] if up else checkout).resolve()


def commit_of(checkout: Path, revision: str = "HEAD") -> str:
    """Return the name of the commit that ``revision`` is.

    Raises:
        CheckoutError: there is no such repository or revision.
    """
    root_of(checkout)
    known = None
    if revision and not revision.startswith("-"):
        known = ran(checkout, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if known is not None and not known.returncode:
        return known.stdout.decode().strip()
    if revision == "HEAD":
        raise CheckoutError(f"{checkout} has no commit yet; check one out, or commit first")
    shallow = ran(checkout, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
    more = ", which it may lack as a shallow clone: git fetch --unshallow brings the rest" if shallow else ""
    raise CheckoutError(f"{checkout} has no revision {revision!r}{more or '; git log shows which there are'}")
