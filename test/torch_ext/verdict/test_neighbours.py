"""What runs side by side never meets: connections of worlds, though gloo does not know which job one is of, and
zygotes and processes of classes.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import SLOWER, programs
from torch_ext.world import transports

# In one run a rank looks for its peer at a port that meanwhile belongs to another world, as if the peer had died.
STRAYS = """
import socket


class TestStrays(Ranks):
    world_size = 1

    def look_for_peer_at(self, port):
        store = dist.FileStore(self.file_name, 2)

        def pretend():
            while not (keys := [key for key in store.list_keys() if key.endswith("/0")]):
                time.sleep(0.01)
            told = bytearray(store.get(keys[0]))
            at = told.index(socket.inet_aton(os.environ.get("TORCH_EXT_ADDRESS", "127.0.0.1")))
            told[at - 2 : at] = port.to_bytes(2, "big")  # the port stands before the address
            store.set(keys[0][:-1] + "1", bytes(told))

        threading.Thread(target=pretend).start()
        with self.assertRaises(RuntimeError):
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=2))

    def test_low_port(self):
        self.look_for_peer_at(int(os.environ["LOW"]))

    def test_high_port(self):
        self.look_for_peer_at(int(os.environ["HIGH"]))
"""
# Which of two ranks calls the other depends on their ports, so there is one on either side of those that the kernel
# gives out.
LOW, HIGH = range(20_000, 21_000), range(61_000, 62_000)


def listen(address: str, ports: range) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port))
    raise AssertionError(f"no free port at {address}")


def test_port_of_a_dead_rank_that_another_world_was_given_is_not_reached(tmp_path: Path) -> None:
    address, reservation = transports.reserve()
    with (
        listen(address or "127.0.0.1", LOW) as low,
        listen(address or "127.0.0.1", HIGH) as high,
        programs(tmp_path, STRAYS) as suite,
    ):
        run = suite.run(extra={"LOW": str(low.getsockname()[1]), "HIGH": str(high.getsockname()[1])})
        assert set(run.status.values()) == {"passed"}, run
        for server in (low, high):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
    os.close(reservation)


def test_no_two_worlds_have_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    address, reservation = transports.reserve()
    assert re.fullmatch(r"127\.\d+\.\d+\.\d+", address)
    assert transports.reserve() == ("", -1)
    os.close(reservation)
    again, reservation = transports.reserve()
    assert again == address
    os.close(reservation)


ADDRESSES = """
import socket


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
    own = os.environ["TORCH_EXT_ADDRESS"]
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
        own = os.environ["TORCH_EXT_ADDRESS"]
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.2")
        assert listening() == {"127.0.0.2"}, listening()


class TestStanding(Standing):
    def test_first(self):
        check_addresses(self)
"""


def test_ranks_listen_at_the_address_of_their_world_alone(tmp_path: Path) -> None:
    with programs(tmp_path, ADDRESSES) as suite:
        run = suite.run()
        assert run.code == 0, run
        check_pipes(tmp_path)
        told = {path.name: path.read_text() for path in tmp_path.glob("Test*.test_*")}
        worlds = ("TestFresh.test_first", "TestFresh.test_second", "TestStanding.test_first")
        pairs = [{told[f"{world}.{rank}"] for rank in (0, 1)} for world in worlds]
        assert [len(pair) for pair in pairs] == [1, 1, 1], told
        assert "127.0.0.1" not in set.union(*pairs)


def check_pipes(folder: Path) -> None:
    """A rank that holds what its peer was given keeps that open when the peer is gone, and nobody sees its end."""
    for world in ("TestFresh.test_first", "TestFresh.test_second", "TestStanding.test_first"):
        first, second = (set((folder / f"pipes.{world}.{rank}").read_text().split()) for rank in (0, 1))
        assert first and second and not first & second, (world, first, second)


def test_ranks_with_interpreters_of_their_own_listen_there_too(tmp_path: Path) -> None:
    with programs(tmp_path, ADDRESSES) as suite:
        run = suite.run("-i", "TestFresh.test_first", extra={"TORCH_EXT_START_METHOD": "interpreter"})
        assert run.status == {"test_first": "passed"}, run


# The first class hurts its zygote while the second one runs, which needs its own again for its second test.
HURTS = """
def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class TestHurts(Ranks):
    def test_hurts_its_zygote(self):
        if self.rank == 1:
            await_note("beside")
            note("zygote", os.getppid())
            os.kill(os.getppid(), getattr(signal, os.environ["HOW"]))
        forever()

    def test_next(self):
        self.check()


class TestBeside(Ranks):
    def test_1_beside(self):
        self.join_group()
        if self.rank == 0:
            note("beside")
            hurt = await_note("zygote")
            while state_of(hurt) not in ("", "T", "X", "Z"):
                time.sleep(0.01)
        self.assertEqual(torch.ones(2), torch.ones(2))
        dist.barrier()

    def test_2_beside(self):
        self.check()
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [("SIGKILL", "(the process that had started the ranks|its zygote) was killed"), ("SIGSTOP", "stopped by a signal")],
)
def test_a_zygote_that_a_rank_kills_or_stops_costs_that_test_alone(tmp_path: Path, how: str, words: str) -> None:
    with programs(tmp_path, HURTS) as suite:
        run = suite.run("--timeout", str(round(4 * SLOWER)), extra={"HOW": how})
        assert run.status.pop("test_hurts_its_zygote") == "failed", run
        assert run.status == dict.fromkeys(["test_next", "test_1_beside", "test_2_beside"], "passed"), run
        assert re.search(words, run.text["test_hurts_its_zygote"]), run
        suite.assert_nothing_left()


# Neither its process group nor its environment tells whose process this is.
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
            note("owns")
            await_note("ended")
            time.sleep(0.5)
            os.kill(daemon, signal.SIGKILL)


class TestEnds(Ranks):
    def test_1_ends(self):
        await_note("owns")

    def test_2_ends(self):
        note("ended")
"""


def test_the_end_of_a_world_ends_no_process_of_a_class_beside_it(tmp_path: Path) -> None:
    with programs(tmp_path, LEAVES) as suite:
        run = suite.run("--timeout", "20")
        assert run.status == dict.fromkeys(["test_owns", "test_1_ends", "test_2_ends"], "passed"), run
        assert "left" not in run.out, run
        suite.assert_nothing_left()


UNFORKABLE = """
import threading

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


class TestOne(Ranks):
    def test_one(self):
        self.check()


class TestTwo(Ranks):
    def test_two(self):
        self.check()
"""


def test_classes_of_a_file_that_cannot_be_forked_run_side_by_side(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("long"):
        pytest.skip("takes a minute, since every process is a fresh interpreter; pytest --long runs it")
    with programs(tmp_path, UNFORKABLE) as suite:
        run = suite.run("--timeout", "50", "--device", "cpu")
        assert run.status == {"test_one": "passed", "test_two": "passed"}, run
        suite.assert_nothing_left()
