"""A change as a commit on a checkout's ``HEAD``, written without touching its working tree or index."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_ext.upstream.export.git import CheckoutError, git, ran

__all__ = ["Author", "NoAuthorError", "author_of", "check_branch", "commit_on_branch", "mailbox"]


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
    return ran(checkout, "config", "--get", key).stdout.decode(errors="replace")


def mailbox(checkout: Path, files: Mapping[str, str], message: str, author: Author) -> str:
    """Return the change as a mail that ``git am`` applies. Nothing is written to the repository.

    Args:
        checkout: the repository; the change is on its ``HEAD``.
        files: new texts, by path.
        message: the subject, an empty line and the body.
        author: see :func:`author_of`.
    """
    with tempfile.TemporaryDirectory() as folder:
        objects = git(checkout, "rev-parse", "--path-format=absolute", "--git-path", "objects").strip()
        environment = {"GIT_OBJECT_DIRECTORY": folder, "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects}
        commit = _commit(checkout, files, message, author, environment)
        # What a person's settings may say otherwise, and git am would stumble over.
        options = ["--stdout", "--no-signature", "--no-base", "--no-attach", "--no-cover-letter", "--no-color"]
        options += ["--subject-prefix=PATCH", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/"]
        utf8 = ("-c", "i18n.logOutputEncoding=UTF-8", "-c", "i18n.commitEncoding=UTF-8")
        return git(checkout, *utf8, "format-patch", "-1", *options, commit, environment=environment)


def check_branch(checkout: Path, branch: str) -> None:
    """Raise an error unless ``branch`` can be made in ``checkout``.

    Raises:
        CheckoutError: there is such a branch already, or git refuses its name.
    """
    if branch.startswith("-") or ran(checkout, "check-ref-format", f"refs/heads/{branch}").returncode:
        raise CheckoutError(f"got --branch {branch}, which git does not take for a name; give another one")
    if not ran(checkout, "show-ref", "--verify", "--quiet", f"refs/heads/{branch}").returncode:
        raise CheckoutError(
            f"{checkout} has a branch {branch} already; give another name, or delete it with git branch -D {branch}"
        )


def commit_on_branch(checkout: Path, files: Mapping[str, str], message: str, author: Author, branch: str) -> str:
    """Commit the change on a new branch that starts at ``HEAD``, and return the commit.

    Raises:
        CheckoutError: there is such a branch already, or git refuses its name.
    """
    check_branch(checkout, branch)
    commit = _commit(checkout, files, message, author, {})
    git(checkout, "update-ref", f"refs/heads/{branch}", commit, "")  # that is: where there is none
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
        git(checkout, "read-tree", "HEAD", environment=environment)
        for path, text in files.items():
            blob = git(checkout, "hash-object", "-w", "--stdin", text=text, environment=environment).strip()
            known = git(checkout, "ls-tree", "--full-tree", "HEAD", "--", path).split(" ")[0]
            change = f"{known or '100644'},{blob},{path}"
            git(checkout, "update-index", "--add", "--cacheinfo", change, environment=environment)
        tree = git(checkout, "write-tree", environment=environment).strip()
        return git(checkout, "commit-tree", tree, "-p", "HEAD", text=message, environment=environment).strip()
