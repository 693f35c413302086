"""``torch_ext serve`` serves its user alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from torch_ext.program import warm


def test_a_run_does_not_trust_what_others_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = warm.address_of(False, ("a",))
    assert address != warm.address_of(False, ("b",)), "another search path finds other modules"
    address.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder of yours alone"):
        warm.address_of(False, ("a",))


def test_the_kernel_is_asked_whose_process_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert warm.is_own(ours)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not warm.is_own(ours)
