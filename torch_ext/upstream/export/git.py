"""Git: reads a repository, and writes a change as a mail, without touching the repository."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["CheckoutError", "check_author", "commit_of", "git", "mailbox", "shown"]

# Git sets these variables for its hooks. They take precedence over the folder that a command names.
_OF_A_HOOK = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_WORK_TREE")
_NO_GUESS = ("-c", "user.useConfigOnly=true")
_UTF8 = ("-c", "i18n.logOutputEncoding=UTF-8", "-c", "i18n.commitEncoding=UTF-8")


class CheckoutError(ValueError):
    """A checkout, a path, a revision or a tool is missing or unusable."""


def _ran(
    where: Path, *command: str, text: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
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
    """Run git in the folder ``where``, with ``text`` as stdin, and return its stdout.

    Raises:
        CheckoutError: git failed, or there is no git.
    """
    done = _ran(where, *command, text=text, environment=environment)
    if done.returncode:
        raise CheckoutError(f"git {' '.join(command[:2])} failed in {where}: {_words(done)}")
    return done.stdout.decode(errors="replace")


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode(errors="replace").strip()
    return text.removeprefix("fatal: ").removeprefix("error: ")


def commit_of(checkout: Path, revision: str = "HEAD") -> str:
    """Return the name of the commit that ``revision`` names.

    Raises:
        CheckoutError: there is no such repository or revision.
    """
    done = _ran(checkout, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode or not revision:
        raise CheckoutError(f"{checkout} is no git checkout with the revision {revision!r}: {_words(done)}")
    return done.stdout.decode().strip()


@cache
def shown(checkout: Path, path: str, commit: str) -> bytes | None:
    """Return the bytes of ``path`` in ``commit``; None if ``commit`` has no such path."""
    done = _ran(checkout, "show", f"{commit}:{path}")
    return None if done.returncode else done.stdout


def check_author(checkout: Path) -> None:
    """Raise a :class:`CheckoutError` unless git knows a name and an address: PyTorch takes patches from people."""
    for identity in ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT"):
        done = _ran(checkout, *_NO_GUESS, "var", identity)
        if done.returncode:
            raise CheckoutError(
                f"git knows no author here ({_words(done).splitlines()[-1]}). PyTorch takes patches from people: set "
                "git config user.name and user.email, and read what you send before you send it."
            )


def mailbox(checkout: Path, files: Mapping[str, str], message: str) -> str:
    """Return a change of ``files``, by path, as a mail for ``git am``. The repository gets no new object."""
    with tempfile.TemporaryDirectory() as folder:
        objects = git(checkout, "rev-parse", "--path-format=absolute", "--git-path", "objects").strip()
        environment = {
            "GIT_OBJECT_DIRECTORY": folder,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
            "GIT_INDEX_FILE": str(Path(folder, "index")),
        }

        def there(*command: str, text: str = "") -> str:
            return git(checkout, *command, text=text, environment=environment).strip()

        there("read-tree", "HEAD")
        for path, text in files.items():
            blob = there("hash-object", "-w", "--stdin", text=text)
            mode = there("ls-tree", "--full-tree", "HEAD", "--", path).split(" ")[0] or "100644"
            there("update-index", "--add", "--cacheinfo", f"{mode},{blob},{path}")
        tree = there("write-tree")
        commit = there(*_NO_GUESS, *_UTF8, "commit-tree", tree, "-p", "HEAD", text=message)
        # Override the user's settings: git am refuses the patches that some of them produce.
        options = ["--stdout", "--no-signature", "--no-base", "--no-attach", "--no-cover-letter", "--no-color"]
        options += ["--subject-prefix=PATCH", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/"]
        return git(checkout, *_UTF8, "format-patch", "-1", *options, commit, environment=environment)
