"""``TORCH_NCCL_ASYNC_ERROR_HANDLING``: what follows a collective that takes longer than its group's timeout.

Torch's own reader of flight records is the oracle of the dump.
"""

import json
import logging
import os
import re
import signal
import socket

import pytest
from torch.distributed.flight_recorder.fr_trace import main as read_dumps

from test.torch_ext.program.commands import run

# Rank 1 leaves out the second of two collectives.
PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta

dist.init_process_group(timeout=timedelta(seconds=1))
torch.sim.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(2, 3, device="sim")
dist.all_reduce(x)
torch.sim.synchronize()
work = dist.all_reduce(x, async_op=True) if dist.get_rank() != 1 else None
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and not (work and work.is_completed()):
    time.sleep(0.05)
try:
    if work:
        work.wait()
    x.cpu()
    print("read")
except dist.DistBackendError as error:
    print("raised", error)
"""

ERROR = (
    r"\[Rank (\d)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=2, OpType=ALLREDUCE, NumelIn=6, "
    r"NumelOut=6, Timeout\(ms\)=1000\) ran for \d+ milliseconds before timing out\."
)


def program(mode, folder, *, wait_s=30, **more):
    return run("-n 3 --hang end", PROGRAM, str(wait_s), folder=folder, TORCH_NCCL_ASYNC_ERROR_HANDLING=mode, **more)


@pytest.mark.costly
def test_clean_up_raises_nccls_error_and_goes_on(tmp_path):
    ended = program("2", tmp_path, wait_s=15)
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(rf"raised {ERROR}", ended.stdout)) == ["0", "2"]
    assert ended.stdout.count("read") == 1
    said = (
        r"What the ranks of group 0 \(default_pg\) came to:\n.*  rank 0 is in #2 all_reduce\n"
        r".*  rank 1 has finished #1 all_reduce, and never called #2 all_reduce\n.*  rank 2 is in #2 all_reduce\n"
    )
    assert re.search(said, "".join(f"{line}\n" for line in ended.stdout.splitlines() if line.startswith("[rank 0]")))


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["1", "3"])
def test_tear_down_ends_the_process_and_torch_reads_the_dumps(mode, tmp_path, caplog):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    ended = program(mode, tmp_path, TORCH_FR_DUMP_TEMP_FILE=f"{dumps}/rank_")
    assert ended.returncode == 128 + signal.SIGABRT, ended.stderr
    assert re.search(rf"Process group watchdog thread terminated with exception: {ERROR}", ended.stdout)
    assert re.search(r"rank [02] was killed by SIGABRT", ended.stderr)
    assert sorted(os.listdir(dumps)) == ["rank_0", "rank_1", "rank_2"]
    with caplog.at_level(logging.INFO):
        read_dumps([str(dumps)])
    read = caplog.text
    assert "Not all ranks joining collective, sequence number: 2" in read and "missing ranks: {1}" in read, read


# Rank 1 leaves out the second of two sends; the ranks exchange tensors in a batch or one by one.
TRANSFERS = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta

dist.init_process_group(timeout=timedelta(seconds=1))
rank = dist.get_rank()
torch.sim.set_device(rank)
x = torch.ones(2, 3, device="sim")

def receive():
    if sys.argv[1] == "batch":
        return dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0]
    return dist.irecv(x, 1)

if rank == 1:
    dist.send(x, 0)
else:
    receive().wait()
dist.barrier()
if rank == 0:
    work = receive()
time.sleep(15 if rank else 5)
try:
    if rank == 0:
        work.wait()
        x.cpu()
except dist.DistBackendError as error:
    print("raised", error)
"""


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("how", ["alone", "batch"])
def test_a_receive_without_a_send(how, tmp_path):
    more = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    ended = run("-n 2 --hang end", TRANSFERS, how, folder=tmp_path, **more)
    assert ended.returncode == 0, ended.stderr
    receive = r"SeqNum=2, OpType=RECV, NumelIn=0, NumelOut=6, Timeout\(ms\)=1000"
    assert re.search(
        rf"raised \[Rank 0\] Watchdog caught collective operation timeout: WorkNCCL\({receive}", ended.stdout
    )
    assert "  rank 0 is in recv with rank 1\n" in "".join(
        f"{line.removeprefix('[rank 0] ')}\n" for line in ended.stdout.splitlines()
    )


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["0", ""])
def test_off(mode, tmp_path):
    ended = program(mode, tmp_path, wait_s=4)
    assert "Watchdog" not in ended.stdout + ended.stderr
    assert "raised simccl on rank 0: rank 1 (process" in ended.stdout  # which has ended meanwhile


@pytest.mark.costly
def test_unknown_value(tmp_path):
    ended = program("4", tmp_path)
    assert ended.returncode == 1
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=4: expected 0, 1, 2 or 3" in ended.stderr


# A rank's server answers for its recorder, and the pages of the frontend read that.
PAGES = """
import json, os, socket, sys, time, urllib.request, torch, torch.distributed as dist
from torch.distributed import debug
dist.init_process_group()
torch.sim.set_device(rank := dist.get_rank())
x = torch.ones(2, 3, device="sim")
dist.all_reduce(x)
torch.sim.synchronize()
if rank == 0:
    dist.all_reduce(x, async_op=True)
if port := int(sys.argv[1]):
    debug.start_debug_server(port=port)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"serves {rank}", "")
    store.wait(["serves 0", "serves 1"])
    asked = f"http://localhost:{port}/fr_trace"
else:
    server = debug._WorkerServer("::", 0)
    asked = f"http://localhost:{server.port}/handler/simccl_fr_trace_json"
    asked = urllib.request.Request(asked, method="POST", data=b"")
while rank == 0:
    try:
        print("page", json.dumps(urllib.request.urlopen(asked).read().decode()))
        break
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())
    except OSError:
        time.sleep(0.2)
if rank == 0:
    dist.distributed_c10d._get_default_store().set("read", "")
dist.distributed_c10d._get_default_store().wait(["read"])
os._exit(0)
"""


def page(port, folder):
    ended = run("-n 2", PAGES, str(port), folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(re.search(r"page (.*)", ended.stdout)[1])


def test_a_ranks_server_has_the_operations_of_the_device(tmp_path):
    entries = json.loads(page(0, tmp_path))["entries"]
    assert [each["profiling_name"] for each in entries] == ["nccl:all_reduce"] * 2
    assert [each["state"] for each in entries] == ["completed", "scheduled"]


def test_the_pages_of_torch_show_the_operations_of_the_device(tmp_path):
    for name in ("aiohttp", "tabulate"):
        pytest.importorskip(name)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    cells = re.findall(r"<td[^>]*>\s*(.*?)\s*</td>", page(port, tmp_path))
    assert cells.count("nccl:all_reduce") == 5 and "{1}" in cells, cells  # two collectives, and each rank's calls
