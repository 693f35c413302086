"""SIGINT is raised where it does no harm, and once is enough."""

import contextlib
import os
import signal

import pytest

from torch_ext.runner.interrupts import Interrupts, held


def test_interrupt_waits_for_the_end_of_the_outermost_block(before):
    interrupts, done = Interrupts(), []
    with pytest.raises(KeyboardInterrupt):
        with held():
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is before


def test_each_interrupts_a_class_process(before):
    interrupts = Interrupts()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    interrupts.restore()


def test_ignored_interrupts_stay_ignored(before):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts = Interrupts()
    signal.raise_signal(signal.SIGINT)
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.processes
def test_supervisor_handles_sigterm_and_children_do_not(before):
    interrupts = Interrupts(once=True, signals=(signal.SIGINT, signal.SIGTERM))
    child = os.fork()
    if not child:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.number == signal.SIGTERM
    signal.raise_signal(signal.SIGINT)
    interrupts.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "it is about to leave with its own exit code"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_interrupts_are_not_held_without_a_handler(before):
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
