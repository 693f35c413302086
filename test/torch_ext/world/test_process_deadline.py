"""When a process counts as hung: at its limit if it does not compute, otherwise a while later."""

from __future__ import annotations

import pytest

from torch_ext.world.settings import ProcessDeadline


def end_s(deadline: ProcessDeadline, share: float, until_s: float = 1000.0) -> float:
    """Return when a process that computes for ``share`` of the time is given up, if sampled at each ``look_s``."""
    while deadline.look_s < until_s:
        now_s = deadline.look_s
        if deadline.is_over(now_s, cpu_time_s=now_s * share):
            return now_s
    return until_s


@pytest.mark.parametrize(
    ("how", "shares", "expected_s"),
    [
        ({}, (0, 0.04), 8),  # idle
        ({}, (0.06, 1, 2), 37),  # computes: half a minute more
        ({"cpu_time_s": 0.0}, (0,), 7),  # the time computed until now is known
        ({"cpu_time_s": 0.0}, (0.06,), 37),
        ({"extra_s": 0}, (0, 1), 7),  # no extension
    ],
)
def test_process_counts_as_hung_at(how: dict[str, float], shares: tuple[float, ...], expected_s: float) -> None:
    assert [end_s(ProcessDeadline(7, 0, **how), share) for share in shares] == [expected_s] * len(shares)


def test_smaller_cpu_time_after_the_end_of_a_process_is_progress() -> None:
    deadline = ProcessDeadline(7, now_s=0)
    assert [deadline.is_over(now_s, cpu_time_s) for now_s, cpu_time_s in ((7, 5), (8, 2), (9, 2))] == [0, 0, 1]


def test_no_process_counts_as_hung_before_its_limit() -> None:
    deadline = ProcessDeadline(7, now_s=100)
    assert not any(deadline.is_over(now_s, cpu_time_s=0) for now_s in (100, 103, 106.9))


def test_process_that_stops_computing_counts_as_hung() -> None:
    deadline, cpu_time_s = ProcessDeadline(7, now_s=0), 0.0
    while not deadline.is_over(deadline.look_s, cpu_time_s):
        cpu_time_s = min(deadline.look_s, 20)
    assert 20 <= deadline.look_s <= 22
