"""What the world does in secret can be turned off, and each switch does what its note says."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_ext.world import fork_safety, settings, zygote
from torch_ext.world.channel import Channel, channel_pair
from torch_ext.world.preparation import preparation_of_this_process
from torch_ext.world.protocol import Preparation
from torch_ext.world.thread_origin import find_thread_origin


@pytest.fixture
def channel() -> Iterator[Channel]:
    ours, theirs = channel_pair()
    yield ours
    ours.close()
    theirs.close()


def make_zygote(channel: Channel) -> zygote.Zygote:
    return zygote.Zygote(channel, "the zygote", preparation_of_this_process(()))


@pytest.mark.parametrize(
    ("switch", "changed", "told"),
    [
        (None, {"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS changed"),
        (None, {"MYLIB_MODE": "7"}, ""),
        ("MYLIB_", {"MYLIB_MODE": "7"}, "MYLIB_MODE changed"),
        ("OTHER_,MYLIB_", {"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS changed"),
        ("0", {"OMP_NUM_THREADS": "7"}, ""),
    ],
)
def test_variables_read_at_load_force_a_fresh_interpreter(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, switch: str | None, changed: dict[str, str], told: str
) -> None:
    if switch is not None:
        monkeypatch.setenv("TORCH_EXT_READ_AT_LOAD", switch)
    monkeypatch.setattr(zygote, "reason_not_to_fork", lambda: "")
    made = make_zygote(channel)
    why = made._why_interpreter({**made._environment, **changed})
    assert (told in why) if told else why == ""


@pytest.mark.parametrize(("switch", "gathered"), [(None, 1), ("0", 0)])
def test_the_heap_is_gathered_once_after_the_eighth_fork(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, switch: str | None, gathered: int
) -> None:
    if switch is not None:
        monkeypatch.setenv("TORCH_EXT_HUGE_PAGES", switch)
    calls: list[int] = []
    monkeypatch.setattr(zygote._os, "collapse_memory", lambda: calls.append(1))
    made = make_zygote(channel)
    for forks in range(12):
        made._forks = forks
        made._prepare_next(0)
        assert len(calls) == (gathered if forks >= 8 else 0)


@pytest.mark.parametrize(("switch", "forks"), [(None, 1), ("0", 0)])
def test_a_trial_fork_is_made_only_where_there_are_threads(
    monkeypatch: pytest.MonkeyPatch, switch: str | None, forks: int
) -> None:
    if switch is not None:
        monkeypatch.setenv("TORCH_EXT_TRIAL_FORK", switch)
    calls: list[int] = []
    monkeypatch.setattr(fork_safety, "_trial_fork", lambda: calls.append(1))
    monkeypatch.setattr(fork_safety._os, "tasks", lambda: 1)
    fork_safety.reason_not_to_fork()
    assert calls == []
    monkeypatch.setattr(fork_safety._os, "tasks", lambda: 2)
    assert "runs other threads" in fork_safety.reason_not_to_fork()
    assert len(calls) == forks


def test_a_trial_fork_does_not_end_other_peoples_threads() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="mine")
    thread.start()
    try:
        assert "Python thread 'mine'" in fork_safety.reason_not_to_fork()
    finally:
        done.set()
        thread.join()


def test_the_origin_of_a_thread_is_a_line_of_the_module(tmp_path: Path) -> None:
    line = "threading.Thread(target=time.sleep, args=(9,)).start()"
    (tmp_path / "starts.py").write_text(f"import threading, time\n{line}\n")
    preparation = Preparation((str(tmp_path), *sys.path), ("starts",))
    found = find_thread_origin(preparation, os.environ, 60.0)
    assert found == f"{tmp_path / 'starts.py'}:2: {line}"
    assert find_thread_origin(preparation, os.environ, 0) == ""


@pytest.mark.parametrize(("asked", "seconds"), [("", 60.0), ("0", 0.0), ("2.5", 2.5), ("-1", 0.0), ("soon", 60.0)])
def test_how_long_the_origin_is_looked_for(monkeypatch: pytest.MonkeyPatch, asked: str, seconds: float) -> None:
    monkeypatch.setenv("TORCH_EXT_THREAD_ORIGIN", asked)
    assert settings.thread_origin_s() == seconds
