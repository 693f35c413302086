"""Which cache folders are used: none that another user could have written."""

import os
import stat
from pathlib import Path

import pytest

from torch_ext import cache


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "a" / "b" / "cache"
    cache.make(made)
    return made


def test_folders_are_made_for_the_user_alone(tmp_path):
    before = os.umask(0)
    try:
        cache.make(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_own_folder_is_trusted_whether_it_exists_or_not(folder):
    assert cache.why_not_trusted(folder) == ""
    assert cache.why_not_trusted(folder / "names" / "deeper") == ""


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_folder_that_others_may_write_is_refused_with_the_remedy(folder, mode, level):
    loose = [folder, *folder.parents][level]
    loose.chmod(mode)
    for asked in (folder, folder / "names"):
        message = cache.why_not_trusted(asked)
        assert f"others may write {loose} (mode {mode:04o})" in message
        assert "chmod go-w" in message and "TORCH_EXT_CACHE" in message and "\n" not in message


def test_file_that_others_may_write_is_refused(folder):
    library = folder / "library.so"
    library.touch(mode=0o600)
    assert cache.why_not_trusted(library) == ""
    library.chmod(0o622)
    assert str(library) in cache.why_not_trusted(library)


def test_sticky_folder_may_stand_above_but_hold_nothing(folder):
    folder.parent.chmod(0o1777)
    assert cache.why_not_trusted(folder) == ""
    assert str(folder.parent) in cache.why_not_trusted(folder.parent)


def test_folder_of_another_user_is_refused(folder, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    message = cache.why_not_trusted(folder / "names")
    owner = folder.stat().st_uid
    assert f"{folder} belongs to user {owner}, not you (user {os.geteuid()})" in message and "chown" in message


def test_link_is_judged_at_both_ends(folder, tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    (loose / "link").symlink_to(folder)
    assert str(loose) in cache.why_not_trusted(loose / "link")
    (tmp_path / "link").symlink_to(loose)
    assert "others may write" in cache.why_not_trusted(tmp_path / "link" / "names")


def test_the_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TORCH_EXT_CACHE", raising=False)
    assert cache.folder() == tmp_path / ".cache/torch_ext"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/torch_ext")
    monkeypatch.setenv("TORCH_EXT_CACHE", "/own")
    assert cache.folder() == Path("/own")
    monkeypatch.setenv("TORCH_EXT_CACHE", "~/own")
    assert cache.folder() == tmp_path / "own"
