"""Tasks that take turns on one thread."""

import os
import time

import pytest

from torch_ext.runner.loop import Loop, Pause


def test_task_continues_when_its_file_is_readable():
    pipes = [os.pipe() for _ in range(2)]
    log = []

    def task(name, reader):
        log.append(f"{name} waits")
        yield Pause((reader,), time.monotonic() + 60)
        log.append(f"{name} reads {os.read(reader, 1).decode()}")

    loop = Loop()
    for name, (reader, _) in zip("ab", pipes, strict=True):
        loop.add(task(name, reader))
    for number in (1, 0):
        os.write(pipes[number][1], b"x")
        loop.turn()
    assert log == ["a waits", "b waits", "b reads x", "a reads x"] and not loop
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


def test_a_wait_ends_at_its_time_and_a_descriptor_that_is_gone_ends_it_too():
    reader, writer = os.pipe()

    turns = []

    def timed():
        yield Pause((reader,), time.monotonic() + 0.01)
        os.close(reader)
        yield Pause((reader,), time.monotonic() + 60)  # another thread may open a file of this number meanwhile
        turns.append(1)

    loop, end_s = Loop(), time.monotonic() + 30
    loop.add(timed())
    while loop:
        loop.turn()
    os.close(writer)
    assert turns and time.monotonic() < end_s


def test_tasks_that_are_not_done_clean_up_when_the_loop_closes():
    cleaned = []

    def task(number):
        try:
            yield Pause(())
        finally:
            cleaned.append(number)

    loop = Loop()
    for number in range(3):
        loop.add(task(number))
    loop.close()
    assert sorted(cleaned) == [0, 1, 2] and not loop


def test_loop_ticks_while_all_tasks_wait():
    ticks = []

    def task():
        while len(ticks) < 3:
            yield Pause((), time.monotonic() + 60)

    loop = Loop(lambda: ticks.append(1), 0.001)
    loop.add(task())
    for _ in range(3):
        loop.turn()
    assert len(ticks) == 3
    loop.close()


def test_exception_of_a_task_leaves_the_loop():
    def task():
        yield Pause((), 0.0)
        raise ValueError("no")

    loop = Loop()
    loop.add(task())
    with pytest.raises(ValueError, match="no"):
        loop.turn()
    assert not loop
