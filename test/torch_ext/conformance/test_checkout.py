"""The checkout of PyTorch's tests that the nightly run makes."""

import os
import subprocess

from test.torch_ext.house.source import CHECKOUT


def git(*words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *map(str, words)], check=True)


def test_a_release_is_cloned_once_with_its_tests_and_version(tmp_path):
    remote = tmp_path / "remote"
    files = ("version.txt", "setup.py", "test/distributed/test_c10d.py", "torch/testing/a.py", "torch/csrc/b.cpp")
    for name in files:
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        (remote / name).write_text("2.13.0\n")
    git("init", "-q", "-b", "main", remote)
    git("-C", remote, "add", ".")
    git("-C", remote, "commit", "-q", "-m", "a release")
    git("-C", remote, "tag", "v2.13.0")

    settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{remote}.insteadOf"}
    settings |= {"GIT_CONFIG_VALUE_0": "https://github.com/pytorch/pytorch", "TORCH_EXT_CACHE": str(tmp_path / "cache")}

    def checkout(release, **other):
        command = [CHECKOUT / ".ci" / "checkout", release]
        return subprocess.run(command, env={**os.environ, **settings, **other}, capture_output=True, text=True)

    missing = checkout("2.99.0")
    assert missing.returncode and "v2.99.0 not found" in missing.stderr and not missing.stdout
    made = checkout("2.13.0")
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "cache" / "pytorch-2.13.0"
    assert made.stdout == f"{folder}\n" and [*folder.parent.iterdir()] == [folder]
    there = [name for name in files if (folder / name).exists()]
    assert there == [name for name in files if "csrc" not in name]
    assert checkout("2.13.0", GIT_CONFIG_VALUE_0="https://nowhere").stdout == made.stdout
