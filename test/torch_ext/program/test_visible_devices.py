"""``CUDA_VISIBLE_DEVICES``: a program chooses its devices by it; a value set before the program hides none."""

import sys

import pytest

from test.torch_ext.program.commands import launched, run, torchrun

# Each rank has one device, which it calls cuda:0.
_ONE_EACH = """
import os
{choice}
import torch
import torch.distributed as dist

rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
assert torch.cuda.get_device_properties(0).uuid.int == rank
tensor = torch.full((3,), float(rank), device="cuda:0")
dist.all_reduce(tensor)
assert tensor.tolist() == [float(sum(range(size)))] * 3
other = torch.empty(2, device="cuda")
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, torch.full((2,), float(rank), device="cuda"), (rank + 1) % size),
    dist.P2POp(dist.irecv, other, (rank - 1) % size),
]):
    work.wait()
assert other.tolist() == [(rank - 1) % size] * 2
try:
    torch.empty(1, device="cuda:1")
except RuntimeError as error:
    told = str(error)
os.write(1, (told.partition(". ")[2] + "\\n").encode())
dist.destroy_process_group()
"""
_BY_PROGRAM = 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]'


def _passed(ended, ranks):
    assert ended.returncode == 0, ended
    assert ended.stdout.count(f"The program hid {ranks - 1} by setting CUDA_VISIBLE_DEVICES.") == ranks, ended


@pytest.mark.drawn(1)
@pytest.mark.parametrize("outside", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "1"}])
def test_a_program_shows_each_rank_its_own_device(outside, tmp_path):
    program = _ONE_EACH.format(choice=_BY_PROGRAM)
    _passed(run("-n 3 --cuda-as-sim --strict --races error --memory 64MiB", program, folder=tmp_path, **outside), 3)


@pytest.mark.parametrize("outside", ["", "0", "1"])
def test_previous_value_hides_no_device(outside, tmp_path):
    ended = run(
        "-n 2 --cuda-as-sim",
        """
        import os, torch, torch.distributed as dist
        rank = int(os.environ["LOCAL_RANK"])
        print("seen:", torch.cuda.device_count(), os.environ["CUDA_VISIBLE_DEVICES"] == "{outside}", flush=True)
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(1).cuda())
        """.replace("{outside}", outside),
        folder=tmp_path,
        CUDA_VISIBLE_DEVICES=outside,
    )
    assert ended.returncode == 0, ended
    assert ended.stdout.count("seen: 2 True") == 2


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("outside", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_torchrun_workers_choose_devices(outside, tmp_path):
    (tmp_path / "program.py").write_text(_ONE_EACH.format(choice=_BY_PROGRAM))
    ended = torchrun("--nproc-per-node", "2", "program.py", folder=tmp_path, TORCH_EXT_SIM="cuda", **outside)
    _passed(ended, 2)


@pytest.mark.long
def test_a_script_chooses_for_the_workers_that_it_becomes(tmp_path):
    (tmp_path / "program.py").write_text(_ONE_EACH.format(choice=""))
    words = ("--no-python", "--nproc-per-node", "2", "bash", "-c")
    command = 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec "$PYTHON" program.py'
    ended = torchrun(*words, command, folder=tmp_path, TORCH_EXT_SIM="cuda", PYTHON=sys.executable)
    _passed(ended, 2)


@pytest.mark.costly
def test_a_script_that_starts_ranks_without_a_launcher_chooses_for_them(tmp_path):
    (tmp_path / "program.py").write_text(_ONE_EACH.format(choice=""))
    (tmp_path / "start.py").write_text(
        """
import os, socket, subprocess, sys
with socket.socket() as held:
    held.bind(("127.0.0.1", 0))
    port = str(held.getsockname()[1])
job = {**os.environ, "TORCH_EXT_SIM": "cuda", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
def own(rank):
    return {**job, "RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": rank}
ranks = [subprocess.Popen([sys.executable, "program.py"], env=own(rank)) for rank in "01"]
sys.exit(max(rank.wait() for rank in ranks))
"""
    )
    _passed(launched("start", folder=tmp_path), 2)


def test_invalid_device_entries_are_read_as_cuda_reads_them(tmp_path):
    ended = run(
        "-n 1 --cuda-as-sim",
        """
        import os, torch
        expected = {
            "2,0": [2, 0], " 1, 3": [1, 3], "1,9,2": [1], "3,-1,2": [3], "0,x,1": [0], "1x,2": [1, 2], "2,": [2],
            "": [], "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6": [], "-1": [], "4": [], "1,1": [], "0,2,0": [],
        }
        for value, devices in expected.items():
            os.environ["CUDA_VISIBLE_DEVICES"] = value
            assert torch.cuda.device_count() == len(devices), (value, torch.cuda.device_count())
            assert torch.cuda.is_available() == bool(devices), value
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            print(error)
        os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"
        torch.ones(1, device="cuda")
        assert [torch.cuda.get_device_properties(index).uuid.int for index in range(2)] == [2, 0]
        os.environ["CUDA_VISIBLE_DEVICES"] = "3"  # too late
        assert torch.cuda.device_count() == 2
        """,
        folder=tmp_path,
        TORCH_EXT_SIM_DEVICES="4",
    )
    assert ended.returncode == 0, ended
    assert "no device is visible: the program set CUDA_VISIBLE_DEVICES='0,2,0', which names none of the" in ended.stdout
