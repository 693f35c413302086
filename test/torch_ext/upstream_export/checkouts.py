"""Temporary git repositories: one is laid out like PyTorch, from the installed torch's own test helpers."""

import shutil
import subprocess
from pathlib import Path

from torch.testing import _internal as upstream_helpers

PERSON = ("A Person", "person@example.org")


def repository(folder, files, person=PERSON):
    """Return a repository at ``folder`` with one commit of ``files``."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    if person:
        for key, value in zip(("user.name", "user.email"), person, strict=True):
            git(folder, "config", key, value)
    return commit(folder, files)


def commit(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "As it is")
    return folder


def like_upstream(folder):
    """Return a repository with the helpers of the installed torch at upstream's paths, and one stub of a test."""
    helpers = Path(upstream_helpers.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.dll")
    shutil.copytree(helpers, folder / "torch" / "testing" / "_internal", ignore=ignored)
    return repository(folder, {"test/distributed/fsdp/test_wrap.py": '# Owner(s): ["oncall: distributed"]\n'})


def git(folder, *command):
    """Return the output of a git command."""
    return subprocess.check_output(["git", "-C", str(folder), *command], text=True)
