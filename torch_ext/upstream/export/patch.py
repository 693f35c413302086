"""A change as a commit on a checkout's ``HEAD``, written without touching its working tree or index."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Author", "NoAuthorError", "author_of", "commit_on_branch", "mailbox"]


class NoAuthorError(ValueError):
    """Git does not know who runs this. Upstream takes patches from people, so none is invented."""


@dataclass(frozen=True)
class Author:
    name: str
    email: str


def author_of(checkout: Path) -> Author:
    """Return who runs the command, as git is configured to call them in ``checkout``.

    Raises:
        NoAuthorError: git has no name or no address.
    """
    found = {}
    for key in ("name", "email"):
        value = os.environ.get(f"GIT_AUTHOR_{key.upper()}", "") or _config(checkout, f"user.{key}")
        if not value.strip():
            raise NoAuthorError(
                f"git knows no user.{key} here. Upstream takes patches from people: set yours with "
                f"git config user.{key} ..., and read what you send before you send it."
            )
        found[key] = value.strip()
    return Author(**found)


def _config(checkout: Path, key: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), "config", "--get", key], capture_output=True, text=True)
    return done.stdout


def mailbox(checkout: Path, files: Mapping[str, str], message: str, author: Author) -> str:
    """Return the change as a mail that ``git am`` applies. Nothing is written to the repository.

    Args:
        checkout: the repository; the change is on its ``HEAD``.
        files: new texts, by path.
        message: the subject, an empty line and the body.
        author: see :func:`author_of`.
    """
    with tempfile.TemporaryDirectory() as folder:
        objects = _git(checkout, ["rev-parse", "--path-format=absolute", "--git-path", "objects"]).strip()
        environment = {"GIT_OBJECT_DIRECTORY": folder, "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects}
        commit = _commit(checkout, files, message, author, environment)
        # What a person's settings may say otherwise, and git am would stumble over.
        options = ["--stdout", "--no-signature", "--no-base", "--no-attach", "--no-cover-letter", "--no-color"]
        options += ["--subject-prefix=PATCH", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/"]
        return _git(checkout, ["format-patch", "-1", *options, commit], environment)


def commit_on_branch(checkout: Path, files: Mapping[str, str], message: str, author: Author, branch: str) -> str:
    """Commit the change on a new branch that starts at ``HEAD``, and return the commit.

    Raises:
        ValueError: there is such a branch already, or git refuses its name.
    """
    commit = _commit(checkout, files, message, author, {})
    done = subprocess.run(["git", "-C", str(checkout), "branch", branch, commit], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return commit


def _commit(checkout: Path, files: Mapping[str, str], message: str, author: Author, environment: dict[str, str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **environment,
            "GIT_INDEX_FILE": str(Path(folder, "index")),
            "GIT_AUTHOR_NAME": author.name,
            "GIT_AUTHOR_EMAIL": author.email,
            "GIT_COMMITTER_NAME": author.name,
            "GIT_COMMITTER_EMAIL": author.email,
        }
        _git(checkout, ["read-tree", "HEAD"], environment)
        for path, text in files.items():
            blob = _git(checkout, ["hash-object", "-w", "--stdin"], environment, text).strip()
            _git(checkout, ["update-index", "--add", "--cacheinfo", f"100644,{blob},{path}"], environment)
        tree = _git(checkout, ["write-tree"], environment).strip()
        return _git(checkout, ["commit-tree", tree, "-p", "HEAD"], environment, message).strip()


def _git(checkout: Path, command: list[str], environment: Mapping[str, str] | None = None, text: str = "") -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), *command],
        input=text.encode(),
        capture_output=True,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise ValueError(f"git {command[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()
