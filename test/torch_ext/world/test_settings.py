"""Hidden behaviours of the world can be turned off, and each switch has the effect that its note states."""

import os
import threading

import pytest

from torch_ext.world import child, settings, zygote
from torch_ext.world.channel import channel_pair
from torch_ext.world.child import preparation_of_this_process


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS changed"), ({"MYLIB_MODE": "7"}, "")],
)
def test_variables_read_at_load_force_a_fresh_interpreter(monkeypatch, changed, message):
    monkeypatch.setattr(zygote, "reason_not_to_fork", lambda: "")
    ends = channel_pair()
    made = zygote.Zygote(ends[0], "the zygote", preparation_of_this_process(()))
    why = made._why_interpreter({**made._environment, **changed})
    for end in ends:
        end.close()
    assert (message in why) if message else why == ""


def test_a_trial_fork_is_made_only_where_there_are_threads(monkeypatch):
    calls = []
    monkeypatch.setattr(child, "_trial_fork", lambda: calls.append(1))
    monkeypatch.setattr(child._os, "threads_of", lambda: {os.getpid()})
    child.reason_not_to_fork()
    assert calls == []
    monkeypatch.setattr(child._os, "threads_of", lambda: {os.getpid(), 2})
    assert "runs other threads" in child.reason_not_to_fork()
    assert len(calls) == 1
    assert child.reason_not_to_fork({2}) == "", "a harmless thread"


@pytest.mark.processes
def test_a_trial_fork_does_not_end_other_peoples_threads():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="mine")
    thread.start()
    try:
        assert "Python thread 'mine'" in child.reason_not_to_fork()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(("asked", "seconds"), [("", 10.0), ("0", 0.0), ("2.5", 2.5)])
def test_a_provable_hang_ends_ten_seconds_after_the_last_progress_unless_a_variable_says_otherwise(
    monkeypatch, asked, seconds
):
    monkeypatch.setenv("TORCH_EXT_HANG_AFTER", asked)
    assert settings.hang_after_s() == seconds


@pytest.mark.parametrize("asked", ["nan", "inf", "-1", "ten"])
def test_a_variable_with_no_finite_time_is_refused(monkeypatch, asked):
    for name, read in (("TORCH_EXT_HANG_AFTER", settings.hang_after_s), ("TORCH_EXT_TIMEOUT", settings.time_limit_s)):
        monkeypatch.setenv(name, asked)
        with pytest.raises(ValueError, match=f"{name} is '{asked}'; expected a finite number of seconds"):
            read()
