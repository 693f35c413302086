"""Worlds side by side never meet, though gloo does not know which job a connection is of."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import programs
from test.torch_ext.world.suites import CHECKOUT
from torch_ext.world import loopback

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
    address, reservation = loopback.reserve()
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
    address, reservation = loopback.reserve()
    assert re.fullmatch(r"127\.\d+\.\d+\.\d+", address)
    assert loopback.reserve() == ("", -1)
    os.close(reservation)
    again, reservation = loopback.reserve()
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


NEIGHBOURS = """
class TestNeighbours(Ranks):
    world_size = 3

    def meet(self):
        self.join_group()
        mine = torch.full((1,), float(os.environ["RUN"]))
        for _ in range(5):
            found = [torch.zeros(1) for _ in range(3)]
            dist.all_gather(found, mine)
            self.assertEqual(torch.cat(found), mine.expand(3))
""" + "".join(
    f"""
    def test_{number}_dies(self):
        self.join_group()
        os.kill(os.getpid(), signal.SIGKILL)

    def test_{number}_meets(self):
        self.meet()
"""
    for number in range(4)
)
# All connections of these runs share few ports, so that a port of one is soon another's.
FEW_PORTS = "ip link set lo up 2>/dev/null || ifconfig lo up; echo 40000 40200 > /proc/sys/net/ipv4/ip_local_port_range"


def may_make_a_network() -> bool:
    return not subprocess.run(["unshare", "-n", "sh", "-c", FEW_PORTS], capture_output=True, check=False).returncode


def test_eight_runs_side_by_side_never_meet(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("long"):
        pytest.skip("takes minutes; pytest --long runs it")
    if not may_make_a_network():
        pytest.skip("needs the right to make a network namespace (unshare -n)")
    with programs(tmp_path_factory.mktemp("neighbours"), NEIGHBOURS) as suite:
        command = f"""{FEW_PORTS}
            for run in 1 2 3 4 5 6 7 8; do
                RUN=$run "$@" > out$run 2>&1 &
            done
            wait
        """
        program = "import os, sys; os.execvp('unshare', ['unshare', '-n', 'sh', '-c', *sys.argv[1:]])"
        runner = [os.sys.executable, str(CHECKOUT / "run_test.py"), "--root", str(suite.folder), "-v"]
        suite.finish(suite.start(["-c", program, command, "sh", *runner]), deadline_s=240)
        for number in range(1, 9):
            out = (suite.folder / f"out{number}").read_text()
            assert out.splitlines()[-1:] == ["4 passed, 4 failed, 0 skipped"], out
            assert len(re.findall(r"_meets  passed", out)) == 4, out
        suite.assert_nothing_left()
