"""Mistakes of users: each gets one sentence that names it and the remedy, and leaves no files behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from test.torch_ext.interpreter import CHECKOUT
from test.torch_ext.upstream_export.checkouts import commit, git, repository
from torch_ext.upstream.export import check, command
from torch_ext.upstream.export.command import main
from torch_ext.upstream.export.git import mailbox
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.modules import Module, our_tree, upstream_at

SUITE = "test/distributed/test_suite.py"
HELPERS = "torch/testing/_internal/common_utils.py"
TEST = (
    "from torch.testing._internal.common_utils import TestCase\n\n\n"
    "class TestA(TestCase):\n    def test_a(self):\n        pass\n"
)
OTHER = TEST.replace("test_a", "test_other")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project with one suite, the one to export."""
    front = "testing/_internal/common_fsdp.py"
    root = repository(tmp_path / "ours", {SUITE: TEST, front: "class TestCase: ...\n", "README.md": "Hello\n"})
    monkeypatch.setattr(command, "project_root", lambda: root)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def checkout(tmp_path):
    utils = {f"torch/testing/_internal/{name}.py": "class TestCase: ...\n" for name in ("common_utils", "common_fsdp")}
    return repository(tmp_path / "a checkout, ä", utils)


@pytest.fixture
def fail(capfd):
    """Run a command, which must fail with one sentence and print nothing else, and return the sentence."""

    def run(*arguments, code=2):
        try:
            ended = main([str(each) for each in arguments])
        except SystemExit as usage_error:
            ended = int(str(usage_error))
        output = capfd.readouterr()
        assert (ended, output.out) == (code, ""), output
        lines = [line for line in output.err.splitlines() if "error: " in line]
        assert len(lines) == 1, output.err
        return lines[0]

    return run


@pytest.mark.parametrize(
    "case",
    [
        ("", 2, "only Python files below testing and test/distributed go upstream"),
        ("..", 2, "'..' is no file or folder of"),
        ("README.md", 2, "README.md: only Python files below testing and test/distributed go upstream"),
        (f"{SUITE}::Nothing", 1, "test/distributed/test_suite.py defines no Nothing"),
        ("testing/_internal/common_fsdp.py::TestCase", 1, "common_fsdp has TestCase: port your change by hand"),
        ("test/distributed/empty", 1, "upstream already has everything: nothing to export"),
    ],
)
def test_unexportable_arguments(root, checkout, fail, case):
    item, code, sentence = case
    (root / "test/distributed/empty").mkdir()
    assert sentence in fail("--onto", checkout, "--", item, code=code)


def test_a_suite_is_named_from_where_the_command_runs(root, checkout, monkeypatch, capfd):
    monkeypatch.chdir(root / "testing")
    for typed in ("../test/distributed/test_suite.py", SUITE, "../test/distributed"):
        assert main([typed, "--onto", str(checkout)]) == 0
        assert f"+++ b/{SUITE}" in capfd.readouterr().out


def test_a_file_that_is_no_python_is_named(root, checkout, fail):
    for text in (b"x = 1\n<<<<<<< HEAD\n", b"x = 1\n# \xe9\n", b"x\0"):
        (root / SUITE).write_bytes(text)
        assert "test_suite.py is no Python in UTF-8: " in fail(SUITE, "--onto", checkout)
    (root / SUITE).write_text(TEST)
    commit(checkout, {HELPERS: "<<<<<<< HEAD\n"})
    assert f"{HELPERS} of {checkout} in HEAD is no Python in UTF-8: " in fail(SUITE, "--onto", checkout)


def test_a_folder_that_is_no_checkout_of_pytorch(root, tmp_path, fail):
    for name in ("plain", "new"):
        (tmp_path / name).mkdir()
    git(tmp_path / "new", "init", "-q")
    for folder, sentence in (
        ("nowhere", "nowhere is no git checkout with a commit"),
        ("plain", "plain is no git checkout with a commit"),
        ("new", "new is no git checkout with a commit"),
        ("ours", "ours has no torch/testing/_internal in its HEAD; give a git checkout of PyTorch"),
    ):
        assert sentence in fail(SUITE, "--onto", tmp_path / folder)


def test_without_git_or_an_author_there_is_no_patch(root, checkout, tmp_path, fail, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    nobody = repository(tmp_path / "nobody", {HELPERS: "import torch\n"}, person=None)
    sentence = fail(SUITE, "--onto", nobody)
    assert "git knows no author here" in sentence and "PyTorch takes patches from people" in sentence
    monkeypatch.setenv("PATH", str(root))
    assert "git is not on the PATH: install it" in fail(SUITE, "--onto", checkout)


def test_a_mail_that_cannot_be_written(root, checkout, tmp_path, fail):
    for file in (tmp_path, tmp_path / "no" / "file"):
        assert "argument --output: got" in fail(SUITE, "--onto", checkout, "--output", file)


def test_file_with_a_non_ascii_name_is_exported(root, checkout):
    (root / "test/distributed/test_ö.py").write_text(OTHER, encoding="utf-8")
    theirs = upstream_at(checkout)
    linker = Linker(our_tree(theirs, root), theirs)
    command.add(linker, "test/distributed/test_ö.py", root)
    assert [each.path for each in linker.targets.values() if each.whole] == ["test/distributed/test_ö.py"]
    assert linker.problems == []


def test_user_settings_of_git_have_no_effect(checkout, tmp_path, monkeypatch):
    os.chmod(checkout / HELPERS, 0o755)
    commit(checkout, {})
    settings = tmp_path / "settings"
    settings.write_text(
        "[commit]\ngpgSign = true\n[gpg]\nprogram = false\n[i18n]\nlogOutputEncoding = latin1\n"
        "[diff]\nnoprefix = true\n[format]\nattach = x\n[color]\nui = always\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # as in a hook
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Jörg")
    mail = mailbox(checkout / "torch", {HELPERS: "x = 1\n"}, "Über\n")
    assert "multipart" not in mail
    assert "Jörg".encode() in mail.encode() or "=?UTF-8?q?J=C3=B6rg?=" in mail
    copy = check.apply_to_copy(checkout / "torch", mail, tmp_path)
    assert os.access(copy / HELPERS, os.X_OK) and (copy / HELPERS).read_text(encoding="utf-8") == "x = 1\n"


def test_computed_all_is_ignored():
    assert Module("m", "__all__ = [*others, 'a']\n").all is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_check_leaves_no_files_or_processes(checkout, tmp_path, number, code):
    scratch, mark = tmp_path / "scratch", tmp_path / "mark"
    scratch.mkdir()
    site = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    commit(checkout, {HELPERS: "", "torch/testing/_internal/distributed/fake.py": ""})
    # Replaces the import of the written files by a program that sleeps until the interrupt.
    program = (
        "import sys\n"
        "from torch_ext.__main__ import main\n"
        "from torch_ext.upstream.export import check\n"
        f"def interrupted(copy, modules):\n    check._python(copy, ['-c', {site!r}], 'cpu', 600)\n"
        "check.import_in_copy = interrupted\n"
        "sys.exit(main())\n"
    )
    environment = {**os.environ, "TMPDIR": str(scratch)}
    arguments = ["export", "testing/_internal/_fsdp/step_log.py", "--onto", str(checkout), "--check"]
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=CHECKOUT, env=environment, stderr=subprocess.PIPE, text=True
    )
    while not (mark.exists() and mark.read_text()):
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    child.send_signal(number)
    errors = child.communicate()[1]
    assert (errors, child.returncode) == ("", code)
    assert list(scratch.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
