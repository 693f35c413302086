"""Classes side by side stay apart: connections of worlds, which gloo does not tell apart, zygotes and processes."""

import os
import re

from test.torch_ext.world.programs import check_rows
from test.torch_ext.world.suites import SLOWER, suite_of
from test.torch_ext.world.test_classes import CONFORMS
from torch_ext.world import threads

ADDRESSES = """
import socket

from torch_ext.world import threads


def what_is_open():
    held = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(f"/proc/self/fd/{number}"))
    return held


def listening():
    # The addresses at which this process listens.
    held = what_is_open()
    with open("/proc/self/net/tcp") as stream:
        rows = [line.split() for line in stream][1:]
    return {
        socket.inet_ntoa(bytes.fromhex(row[1][:8])[::-1])
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in held
    }


def check_addresses(case):
    note(
        f"pipes.{type(case).__name__}.{case._testMethodName}.{case.rank}",
        " ".join(name for name in what_is_open() if name.startswith("pipe:")),
    )
    case.check()
    own = threads._address
    dist.barrier(dist.new_group())
    assert listening() == {own}, listening()
    for device in (
        dist.ProcessGroupGloo.create_device(interface="lo"),
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1"),
    ):
        assert listening() == {own}, listening()
    note(f"{type(case).__name__}.{case._testMethodName}.{case.rank}", own)


class TestFresh(Ranks):
    def test_first(self):
        check_addresses(self)

    def test_second(self):
        check_addresses(self)

    def test_interface_of_its_own(self):
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.2")
        assert listening() == {"127.0.0.2"}, listening()


class TestStanding(Standing):
    def test_first(self):
        check_addresses(self)
"""


def test_ranks_listen_at_the_address_of_their_world_alone(tmp_path):
    check_rows(tmp_path, ADDRESSES)
    addresses = set()
    for world in ("TestFresh.test_first", "TestFresh.test_second", "TestStanding.test_first"):
        first, second = ((tmp_path / f"{world}.{rank}").read_text() for rank in (0, 1))
        assert first == second != "127.0.0.1"
        addresses.add(first)
        # A rank that inherits its peer's pipe keeps it open when the peer ends, and its reader never sees the end.
        one, other = (set((tmp_path / f"pipes.{world}.{rank}").read_text().split()) for rank in (0, 1))
        assert one and other and not one & other, (world, one, other)
    assert len(addresses) == 3


def test_no_two_worlds_have_one_address(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    for _ in range(2):
        address, reservation = threads.reserve()
        assert re.fullmatch(r"127\.\d+\.\d+\.\d+", address)
        assert threads.reserve() == ("", -1)
        os.close(reservation)


IMPORTS = """
if os.environ.get("PARENT_HALF"):
    forever()  # in a rank that imports this file


class TestImports(Ranks):
    timeout = 8

    def test_still_importing(self):  # failed by 0, 1: ^import
        pass
"""


def test_fresh_interpreters_conform_and_listen_at_the_address_of_their_world_alone(tmp_path):
    addresses = ADDRESSES.partition("    def test_second")[0]
    files = {"test_suite.py": CONFORMS, "test_addresses.py": addresses, "test_imports.py": IMPORTS}
    run = check_rows(tmp_path, files, "--show-output", extra={"TORCH_EXT_START_METHOD": "interpreter"})
    for rank in (0, 1):
        assert f"[rank {rank}] hello from {rank}\n" in run.out + run.err, run


# The first class of each pair damages its zygote while the second one runs, which needs its own for its second test.
HURTS = """
import fcntl, tempfile


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
""" + "".join(
    f"""

class TestHurts_{how}(Ranks):
    def test_hurts_its_zygote(self):  # failed: {words}
        lock = open(os.path.join(HERE, "lock"), "a")
        fcntl.flock(lock, fcntl.LOCK_SH)
        if self.rank == 1:
            await_note("beside {how}")
            note("zygote {how}", os.getppid())
            os.kill(os.getppid(), signal.{how})
        forever()

    def test_next(self):
        self.check()


class TestBeside_{how}(Ranks):
    def test_1_beside(self):
        self.join_group()
        if self.rank == 0:
            note("beside {how}")
            hurt = await_note("zygote {how}")
            while state_of(hurt) not in ("", "T", "X", "Z"):
                time.sleep(0.01)
        dist.barrier()

    def test_2_beside(self):
        self.check()
"""
    for how, words in (
        ("SIGKILL", "the process that had started the ranks was killed|its zygote was killed"),
        ("SIGSTOP", "stopped by a signal"),
    )
)
# Neither its process group nor its environment shows to which test the process belongs.
LEAVES = """

def start_daemon():
    program = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-I", "-S", "-c", program]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_EXT_")}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    started.wait()
    return int(started.stdout.readline())


class TestOwns(Ranks):
    def test_owns(self):
        if self.rank == 0:
            daemon = start_daemon()
            note("owns", tempfile.gettempdir())
            await_note("ended")
            time.sleep(0.5)
            os.kill(daemon, signal.SIGKILL)


class TestEnds(Ranks):
    def test_1_ends(self):
        self.assertNotEqual(await_note("owns"), tempfile.gettempdir(), "classes at once share no folder")

    def test_2_ends(self):
        note("ended")


class TestAlone(Ranks):
    alone = True

    def test_alone(self):
        with open(os.path.join(HERE, "lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) if self.rank == 0 else None
"""


def test_killed_zygote_or_daemon_of_a_class_affects_no_other_class(tmp_path):
    run = check_rows(tmp_path, HURTS + LEAVES, "--timeout", str(round(6 * SLOWER)), "--slots", "16", deadline_s=100)
    assert "left a process behind" not in run.out, run


FAILS_FAST = """
class TestA(Ranks):
    def test_waits(self):
        time.sleep(300)


class TestB(Ranks):
    def test_fails(self):
        raise ValueError("enough")
"""


def test_the_first_failure_stops_the_neighbours(tmp_path):
    with suite_of(tmp_path, FAILS_FAST) as suite:
        run = suite.run("-f", "--slots", "8")
        assert run.code == 1 and run.status == {"test_fails": "failed"} and "Not run: 1 test" in run.out, run
