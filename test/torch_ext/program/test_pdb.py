"""``--pdb`` prompts for one rank at the terminal, and the other ranks wait."""

import os
import pty
import select
import signal
import sys
import time

import pytest

from test.torch_ext.interpreter import CHECKOUT

LIMIT_S = 100

PROGRAM = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group()
torch.sim.set_device(rank := dist.get_rank())
x = torch.full((2,), 20.0 + rank, device="sim")
if rank == 1:
    {stop}
dist.all_reduce(x)
print("sum", x[0].item(), "of", rank)
if rank == 1:
    assert not sys.stdin.read()
time.sleep(1)
"""

TEST = """
import torch
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase
from torch_ext.testing._internal.common_utils import run_tests

class TestOne(MultiProcessTestCase):
    world_size = 2
    timeout = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_value(self):
        held = 41 + self.rank
        self.assertEqual(held, 41)

if __name__ == "__main__":
    run_tests()
"""


class Terminal:
    """A command with a terminal of its own. ``shown`` is what it has printed."""

    def __init__(self, folder, *arguments, **environ):
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "dumb", **environ}
            os.execve(sys.executable, [sys.executable, *arguments], environ)
        self.shown = ""

    def read_until(self, text, meanwhile=""):
        """Read until ``text`` is printed, and return what came since the last call. ``meanwhile``: type this each
        second; a signal just before Python waits for a key shows only with the next one.
        """
        began, end_s = len(self.shown), time.monotonic() + LIMIT_S
        while text not in self.shown[began:]:
            assert time.monotonic() < end_s, self.shown
            self.type(meanwhile)
            self._read()
        return self.shown[began:]

    def _read(self, wait_s=1.0):
        if not select.select([self._end], [], [], wait_s)[0]:
            return False
        try:
            self.shown += os.read(self._end, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the other end is closed
            return False
        return True

    def type(self, line):
        os.write(self._end, line.encode())

    def foreground(self):
        """Return the process group in the foreground."""
        return os.tcgetpgrp(self._end)

    def exit_code(self):
        end_s, ended = time.monotonic() + LIMIT_S, (0, 0)
        while not ended[0]:
            assert time.monotonic() < end_s, self.shown
            self._read(0.1)
            ended = os.waitpid(self.pid, os.WNOHANG)
        while self._read(0):
            pass
        return os.waitstatus_to_exitcode(ended[1])


def program(folder, stop, *arguments, **environ):
    (folder / "program.py").write_text(PROGRAM.format(stop=stop))
    return Terminal(folder, "-m", "torch_ext", "run", "-n", "2", *arguments, "program.py", **environ)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stop", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_rank_prompts_and_its_peers_wait(stop, tmp_path):
    limit_s = 8 if stop == "breakpoint()" else 60
    terminal = program(tmp_path, stop, "--pdb", "1", "--timeout", str(limit_s))
    terminal.read_until("(Pdb) ")
    terminal.type("x[0].item() * 2\n")
    assert "42.0" in terminal.read_until("(Pdb) ")
    terminal.type(f"import time; time.sleep({limit_s % 60})\n")
    terminal.read_until("(Pdb) ")
    terminal.type("x.add_(1)\n")
    terminal.read_until("(Pdb) ")
    terminal.read_until("KeyboardInterrupt", meanwhile="\x03")  # Ctrl-C reaches the rank alone
    terminal.type("\x1a")  # Ctrl-Z would stop it forever
    terminal.type("continue\n")
    terminal.read_until("[rank 1] sum 42.0 of 1")
    assert terminal.foreground() == terminal.pid, "Ctrl-C must reach the command again"
    assert terminal.exit_code() == 0, terminal.shown
    assert "[rank 0] sum 42.0 of 0" in terminal.shown


@pytest.mark.costly
def test_other_ranks_pass_a_breakpoint(tmp_path):
    terminal = program(tmp_path, "breakpoint()", "--pdb", "0")
    assert terminal.exit_code() == 0, terminal.shown
    assert "Pdb" not in terminal.shown


@pytest.mark.costly
def test_a_breakpoint_without_a_terminal_names_the_option(tmp_path):
    terminal = program(tmp_path, "breakpoint()")
    assert terminal.exit_code() == 1
    assert "breakpoint() needs a terminal, and a rank has one only with --pdb, here --pdb 1" in terminal.shown
    other = program(tmp_path, "breakpoint()", PYTHONBREAKPOINT="sys.exit")
    other.exit_code()
    assert "needs a terminal" not in other.shown, "the user has chosen another debugger"


@pytest.mark.costly
def test_a_failed_test_prompts_where_it_failed_whatever_its_limit(tmp_path):
    (tmp_path / "test_one.py").write_text(TEST)
    terminal = Terminal(tmp_path, "test_one.py", "--pdb", "1")
    assert "AssertionError: Scalars are not equal" in terminal.read_until("(Pdb) ")
    terminal.type("import time; time.sleep(4)\n")
    terminal.read_until("(Pdb) ")
    terminal.type("up\n")
    terminal.read_until("(Pdb) ")
    terminal.type("p held\n")
    assert "42" in terminal.read_until("(Pdb) ")
    terminal.type("q\n")
    assert terminal.exit_code() == 1
    assert "rank 1 raised AssertionError at test_one.py:16: Scalars are not equal" in terminal.shown


@pytest.mark.long
def test_a_rank_killed_at_its_prompt_is_reported(tmp_path):
    terminal = program(tmp_path, "breakpoint()", "--pdb", "1")
    terminal.read_until("(Pdb) ")
    terminal.type("import os, signal; print('pid', os.getpid()); os.kill(os.getpid(), signal.SIGKILL)\n")
    assert terminal.exit_code() == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in terminal.shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-m", "torch_ext", "run", "-n", "2", "--pdb", "2", "x.py"], "--pdb 2: expected one of ranks 0, 1"),
        (["-m", "torch_ext", "--pdb", "0", "--cluster", "local:2"], "--pdb works on this machine alone"),
    ],
)
def test_wrong_use_is_refused(arguments, sentence, tmp_path):
    terminal = Terminal(tmp_path, *arguments)
    assert terminal.exit_code() == 2
    assert sentence in terminal.shown
