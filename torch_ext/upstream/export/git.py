"""Git: reads a repository, and writes a change as a mail, without touching the repository."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# Git sets these variables for its hooks. They take precedence over the folder that a command names.
_HOOK_VARIABLES = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_WORK_TREE")
_EXPLICIT_AUTHOR = ("-c", "user.useConfigOnly=true")
_UTF8 = ("-c", "i18n.logOutputEncoding=UTF-8", "-c", "i18n.commitEncoding=UTF-8")


class CheckoutError(ValueError):
    """A checkout, a path or a tool is missing or unusable."""


def _run(
    where: Path, *command: str, text: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}
    try:
        return subprocess.run(
            ["git", "-C", str(where), *command],
            input=text.encode(),
            capture_output=True,
            env={**kept, "LC_ALL": "C.UTF-8", **(environment or {})},
        )
    except FileNotFoundError:
        raise CheckoutError("git is not on the PATH: install it") from None


def git(where: Path, *command: str, text: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Run git in the folder ``where``, with ``text`` as stdin, and return its stdout.

    Raises:
        CheckoutError: git failed, or there is no git.
    """
    done = _run(where, *command, text=text, environment=environment)
    if done.returncode:
        raise CheckoutError(f"git {' '.join(command[:2])} failed in {where}: {_error(done)}")
    return done.stdout.decode(errors="replace")


def _error(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode(errors="replace").strip()
    return text.removeprefix("fatal: ").removeprefix("error: ")


def commit_of(checkout: Path) -> str:
    """Return the name of the commit that is the checkout's ``HEAD``.

    Raises:
        CheckoutError: there is no such repository, or it has no commit.
    """
    done = _run(checkout, "rev-parse", "--verify", "HEAD^{commit}")
    if done.returncode:
        raise CheckoutError(f"{checkout} is no git checkout with a commit: {_error(done)}")
    return done.stdout.decode().strip()


@cache
def file_at(checkout: Path, path: str, commit: str) -> bytes | None:
    """Return the bytes of ``path`` in ``commit``; None if ``commit`` has no such path."""
    done = _run(checkout, "show", f"{commit}:{path}")
    return None if done.returncode else done.stdout


def check_author(checkout: Path) -> None:
    """Raise a :class:`CheckoutError` unless git knows a name and an address: PyTorch takes patches from people."""
    for identity in ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT"):
        done = _run(checkout, *_EXPLICIT_AUTHOR, "var", identity)
        if done.returncode:
            raise CheckoutError(
                f"git knows no author here ({_error(done).splitlines()[-1]}). PyTorch takes patches from people: set "
                "git config user.name and user.email, and review the patch before you send it."
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

        def run_git(*command: str, text: str = "") -> str:
            return git(checkout, *command, text=text, environment=environment).strip()

        run_git("read-tree", "HEAD")
        for path, text in files.items():
            blob = run_git("hash-object", "-w", "--stdin", text=text)
            mode = run_git("ls-tree", "--full-tree", "HEAD", "--", path).split(" ")[0] or "100644"
            run_git("update-index", "--add", "--cacheinfo", f"{mode},{blob},{path}")
        tree = run_git("write-tree")
        commit = run_git(*_EXPLICIT_AUTHOR, *_UTF8, "commit-tree", tree, "-p", "HEAD", text=message)
        # Override the user's settings: git am refuses the patches that some of them produce.
        options = ["--stdout", "--no-signature", "--no-base", "--no-attach", "--no-cover-letter", "--no-color"]
        options += ["--subject-prefix=PATCH", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/"]
        return git(checkout, *_UTF8, "format-patch", "-1", *options, commit, environment=environment)
