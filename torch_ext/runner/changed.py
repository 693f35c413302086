"""Which files differ from a revision, as git tells it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["changed_files"]


def changed_files(folder: Path, revision: str) -> frozenset[Path]:
    """Return the files that differ from ``revision`` in the working tree of ``folder``: changed, new or gone.

    Raises:
        ValueError: git cannot tell, for a reason that the message has.
    """
    top = Path(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
    if revision.startswith("-"):
        raise ValueError(f"got --changed {revision}, which is no revision")
    try:
        _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except ValueError:
        advice = "write --changed=REV, and patterns apart from it"
        if _git(top, "rev-parse", "--is-shallow-repository").strip() == "true":
            advice = "this clone is shallow and may lack it; fetch more of it first: git fetch --unshallow"
        raise ValueError(f"git knows no revision {revision!r}; {advice}") from None
    differing = _git(top, "diff", "--name-only", "--no-renames", "-z", revision, "--")
    new = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    return frozenset((top / name).resolve() for name in f"{differing}{new}".split("\0") if name)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise ValueError(f"--changed asks git, which cannot be run: {error}") from error
    if done.returncode:
        said = os.fsdecode(done.stderr).strip().removeprefix("fatal: ") or f"exit code {done.returncode}"
        raise ValueError(f"--changed asks git, which says of {folder}: {said}")
    return os.fsdecode(done.stdout)
