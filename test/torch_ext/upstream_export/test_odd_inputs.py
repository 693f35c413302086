"""What people bring by mistake: each gets one sentence that names it and the remedy, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from test.torch_ext.upstream_export.checkouts import commit, repository
from torch_ext.upstream.__main__ import main
from torch_ext.upstream.drift import drift
from torch_ext.upstream.export import check, command
from torch_ext.upstream.export.git import CheckoutError, commit_of, mailbox
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.modules import Module, installed_tree, our_tree, upstream_at

REPOSITORY = Path(__file__).resolve().parents[3]
SUITE = "test/distributed/test_suite.py"
HELPERS = "torch/testing/_internal/common_fsdp.py"
TEST = (
    "from torch.testing._internal.common_utils import TestCase\n\n\n"
    "class TestA(TestCase):\n    def test_a(self):\n        pass\n"
)
OTHER = TEST.replace("test_a", "test_other")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one suite, which is the one that is exported."""
    root = repository(tmp_path / "ours", {SUITE: TEST, "testing/_internal/ours.py": "x = 1\n", "README.md": "Hello\n"})
    monkeypatch.setattr(command, "project_root", lambda: root)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    utils = {f"torch/testing/_internal/{name}.py": "class TestCase: ...\n" for name in ("common_utils", "common_fsdp")}
    return repository(tmp_path / "a checkout, ä", utils)


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command, which must fail with one sentence and print nothing else, and return the sentence."""

    def run(*arguments: object, code: int) -> str:
        try:
            ended = main([str(each) for each in arguments])
        except SystemExit as ending:  # argparse
            ended = int(str(ending.code))
        shown = capfd.readouterr()
        assert (ended, shown.out) == (code, ""), shown
        assert "Traceback" not in shown.err
        lines = [line for line in shown.err.splitlines() if "error: " in line]
        assert len(lines) == 1, shown.err
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("what", "code", "sentence"),
    [
        ("", 2, "got an empty text, as from a variable that is not set"),
        (".", 2, "only what lies below testing and test/distributed goes upstream; give a part of it"),
        ("..", 2, "'..' is no file, folder or REV.."),
        ("README.md", 2, "README.md is no Python file"),
        ("conftest.py", 1, "conftest.py: only what lies below testing and test/distributed goes upstream"),
        ("HEAD..HEAD", 2, "got HEAD..HEAD; give HEAD.., whose other end is what lies in"),
        ("HEAD..", 1, "nothing below testing and test/distributed changed since HEAD"),
        ("nowhere..", 2, "has no revision 'nowhere'; git log shows which there are"),
        ("--all..", 2, "has no revision '--all'"),
        (f"{SUITE}::", 2, "FILE::NAME wants a file, and a name that it defines"),
        ("test/distributed::TestA", 2, "FILE::NAME wants a file, and a name that it defines"),
        ("test/distributed/empty", 1, "test/distributed/empty holds no Python file"),
        ("test/distributed/link.py", 2, "is no file, folder or REV.."),
        ("test/distributed", 1, "test/distributed/link.py is no file, or a link to nothing; delete it"),
        ("test/distributed/test_nothing.py", 1, "test_nothing.py is empty; write a test first"),
    ],
)
def test_what_cannot_be_sent(
    root: Path, checkout: Path, told: Callable[..., str], what: str, code: int, sentence: str
) -> None:
    commit(root, {"conftest.py": "x = 1\n", "test/distributed/test_nothing.py": ""})
    (root / "test/distributed/empty").mkdir()
    if what.startswith("test/distributed") and "::" not in what and "nothing" not in what:
        (root / "test/distributed/link.py").symlink_to("nowhere.py")
        (root / "test/distributed/test_nothing.py").unlink()
    assert sentence in told("export", "--onto", checkout, "--", what, code=code)


def test_a_suite_is_named_from_where_the_command_runs(
    root: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root / "testing")
    for typed in ("../test/distributed/test_suite.py", SUITE, "../test/distributed"):
        assert main(["export", typed, "--onto", str(checkout)]) == 0
        assert f"+++ b/{SUITE}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"def f(:\n", "test_suite.py, line 1: this is no Python (invalid syntax); mend it first"),
        (b"x = 1\n<<<<<<< HEAD\n", "test_suite.py, line 2: a merge left a conflict here; resolve it first"),
        (b"x = 1\n# \xe9\n", "test_suite.py, line 2: this is no UTF-8 text; save the file as UTF-8"),
        (b"x\0", "test_suite.py"),
    ],
)
def test_a_file_of_ours_that_is_no_python(
    root: Path, checkout: Path, told: Callable[..., str], text: bytes, sentence: str
) -> None:
    (root / SUITE).write_bytes(text)
    assert sentence in told("export", SUITE, "--onto", checkout, code=2)
    assert sentence in told("export", "HEAD..", "--onto", checkout, code=2)


def test_a_file_of_upstreams_that_is_no_python(root: Path, checkout: Path, told: Callable[..., str]) -> None:
    sentence = f"{HELPERS} of {checkout} in HEAD, line 1: a merge left a conflict here; resolve it first"
    commit(checkout, {HELPERS: "<<<<<<< HEAD\n"})
    assert sentence in told("drift", "--against", checkout, code=2)
    utils = HELPERS.replace("common_fsdp", "common_utils")
    (checkout / utils).write_bytes(b"# \xe9\n")
    commit(checkout, {})
    sentence = f"{utils} of {checkout} in HEAD, line 1: this is no UTF-8 text; save the file as UTF-8"
    assert sentence in told("export", SUITE, "--onto", checkout, code=2)


def test_a_folder_that_is_no_checkout_of_pytorch(root: Path, tmp_path: Path, told: Callable[..., str]) -> None:
    (tmp_path / "plain").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "new")], check=True)
    for folder, sentence in (
        ("nowhere", "nowhere is no folder; give a git checkout of PyTorch"),
        ("plain", "plain is no git repository; give a git checkout of PyTorch"),
        ("new", "new has no commit yet; check one out, or commit first"),
        ("ours", "ours has no torch/testing/_internal in its HEAD; give a git checkout of PyTorch"),
    ):
        assert sentence in told("export", SUITE, "--onto", tmp_path / folder, code=2)
        assert sentence in told("drift", "--against", tmp_path / folder, code=2)
    assert "got an empty text" in told("export", SUITE, "--onto", "", code=2)
    assert "got an empty text" in told("drift", "--against", "", code=2)


def test_gits_own_words_are_told(
    root: Path, checkout: Path, told: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    assert "git does not read" in (sentence := told("export", SUITE, "--onto", checkout, code=2))
    assert "dubious ownership" in sentence
    monkeypatch.setenv("PATH", str(root))
    assert "there is no git on the PATH; install it" in told("export", SUITE, "--onto", checkout, code=2)


def test_a_revision_that_a_shallow_clone_lacks(checkout: Path, tmp_path: Path) -> None:
    first = commit_of(checkout)
    commit(checkout, {"x.py": ""})
    copy = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{checkout}", str(copy)], check=True)
    with pytest.raises(CheckoutError, match="shallow clone: git fetch --unshallow brings the rest"):
        commit_of(copy, first)


def test_a_branch_that_is_there_or_has_no_name_for_one(
    root: Path, checkout: Path, told: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", SUITE, "--onto", str(checkout), "--branch"]
    assert main([*asked, "mine"]) == 0
    capfd.readouterr()
    before = subprocess.check_output(["git", "-C", str(checkout), "for-each-ref"])
    sentence = "has a branch mine already; give another name, or delete it with git branch -D mine"
    assert sentence in told(*asked, "mine", code=2)
    for name in ("bad..name", "a b", "mine/below"):
        told(*asked, name, code=2)
    assert "got --branch -D, which git does not take for a name" in told(*asked[:-1], "--branch=-D", code=2)
    assert "got an empty text" in told(*asked, "", code=2)
    assert subprocess.check_output(["git", "-C", str(checkout), "for-each-ref"]) == before


def test_without_a_person_there_is_no_patch(
    root: Path, tmp_path: Path, told: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    nobody = repository(tmp_path / "nobody", {HELPERS: "import torch\n"}, person=None)
    sentence = told("export", SUITE, "--onto", nobody, code=2)
    assert "git knows no author here" in sentence and "PyTorch takes patches from people" in sentence


def test_a_mail_that_cannot_be_written(root: Path, checkout: Path, tmp_path: Path, told: Callable[..., str]) -> None:
    for file in (tmp_path, tmp_path / "no" / "file", ""):
        assert "argument --output: got" in told("export", SUITE, "--onto", checkout, "--output", file, code=2)
    sentence = "/dev/full cannot be written: No space left on device"
    assert sentence in told("export", SUITE, "--onto", checkout, "--output", "/dev/full", code=1)


def test_names_that_are_not_ascii_and_deletions_are_seen(root: Path, checkout: Path) -> None:
    (root / "test/distributed/test_ö.py").write_text(OTHER, encoding="utf-8")
    commit(checkout, {SUITE: TEST})
    (root / SUITE).unlink()
    theirs = upstream_at(checkout)
    linker = Linker(our_tree(theirs, root), theirs)
    command.add(linker, ["HEAD.."], root)
    assert [each.path for each in linker.targets.values() if each.whole] == ["test/distributed/test_ö.py"]
    assert len(linker.problems) == 1
    assert (
        f"{SUITE} is gone since HEAD, and upstream has {SUITE}. A deletion does not go by itself" in linker.problems[0]
    )


def test_what_a_person_has_set_does_not_spoil_it(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_drift_runs_in_a_checkout_and_says_which_modules_are_gone(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(checkout, {"torch/__init__.py": ""})
    monkeypatch.chdir(checkout)
    monkeypatch.syspath_prepend(str(checkout))
    assert installed_tree().module("torch.testing._internal.dist_utils") is not None
    gone = [entry.module for entry in drift(str(checkout)) if entry.name == "(the module)"]
    assert "dist_utils" in gone and "common_fsdp" not in gone


def test_a_list_that_is_put_together_is_no_list() -> None:
    assert Module("m", "__all__ = [*others, 'a']\n").all is None


def started(*arguments: str, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch_ext.upstream", *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload, no-any-return]


def test_a_reader_that_left_and_a_full_disk() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    child = started("drift", "--json", stdout=writing)
    os.close(writing)
    assert (child.communicate()[1], child.returncode) == ("", 130)
    with open("/dev/full", "w") as full:
        child = started("drift", stdout=full)
    assert child.communicate()[1] == "error: stdout cannot be written: No space left on device\n"
    assert child.returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_check_leaves_nothing_behind(checkout: Path, tmp_path: Path, number: int, code: int) -> None:
    scratch, mark = tmp_path / "scratch", tmp_path / "mark"
    scratch.mkdir()
    site = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    commit(checkout, {HELPERS: "", "torch/testing/_internal/distributed/fake.py": ""})
    # The check imports what it has written, and this is what it then finds.
    program = (
        "import sys\n"
        "from torch_ext.upstream import __main__ as command\n"
        "from torch_ext.upstream.export import check\n"
        f"def interrupted(copy, modules):\n    check._python(copy, ['-c', {site!r}], 'cpu', 600)\n"
        "check.import_in_copy = interrupted\n"
        "sys.exit(command.main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "TMPDIR": str(scratch)}
    asked = ["export", "testing/_internal/_fsdp/step_log.py", "--onto", str(checkout), "--check"]
    child = subprocess.Popen(
        [sys.executable, "-c", program, *asked], cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
    )
    while not (mark.exists() and mark.read_text()):
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    child.send_signal(number)
    told = child.communicate()[1]
    assert (told, child.returncode) == ("interrupted\n", code)
    assert list(scratch.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
