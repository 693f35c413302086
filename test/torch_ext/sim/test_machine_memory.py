"""All processes of a run together hold no more of the machine's memory on ``sim`` than its cap.

The caps here are small: no test comes near the machine's own bound.
"""

import re
from pathlib import Path

import pytest

from test.torch_ext.interpreter import python
from torch_ext import machine_memory

MIB = 1 << 20
# `fill()` takes blocks of one MiB until memory runs out, and returns the error.
PRELUDE = """
import os, signal, subprocess, sys
import torch
from torch_ext.sim import _native
MIB = 1 << 20
held = []
def fill(most=1000):
    try:
        while len(held) < most:
            held.append(torch.empty(MIB, dtype=torch.uint8, device=f"sim:{len(held) % 4}"))
    except torch.OutOfMemoryError as error:
        return error
def child(text):
    command = [sys.executable, "-c", "from prelude import *\\n" + text]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
"""


def run(text, folder, cap=16 * MIB, **variables):
    (folder / "prelude.py").write_text(PRELUDE, encoding="utf-8")
    (folder / "program.py").write_text("from prelude import *\nfrom prelude import _native\n" + text, encoding="utf-8")
    done = python("program.py", folder=folder, **{"TORCH_EXT_SIM_MACHINE_MEMORY": str(cap), **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.costly
def test_one_process_holds_the_cap_to_the_byte_on_all_its_devices(tmp_path):
    text = """
total = torch.sim.get_device_properties(0).total_memory
print(torch.sim.mem_get_info(3)[0] == 16 * MIB)
print(fill())
print(len(held), total == torch.sim.get_device_properties(0).total_memory == torch.sim.mem_get_info(0)[1] == 16 << 30)
print(torch.sim.mem_get_info(3)[0])
del held[:5]
fill()
print(len(held))
held.clear()
torch.sim.empty_cache()
held.append(torch.empty(16 * MIB, dtype=torch.uint8, device="sim:3"))
print(_native.machine_memory() == (16 * MIB,) * 3)
"""
    output = run(text, tmp_path)
    free, message, *_ = output.splitlines()
    assert free == "True" and message == (
        "sim out of memory: the machine's, not the device's. Tried to allocate 1.00 MiB. The processes of this run "
        "hold 16.00 MiB on simulated devices together, this one 16.00 MiB; they may hold 16.00 MiB, by default 80 % of "
        "what the machine or its cgroup had available when the run began."
    )
    assert "or bound each device with --memory SIZE" in output
    assert "TORCH_EXT_SIM_MACHINE_MEMORY=BYTES sets another cap" in output
    assert output.splitlines()[-4:] == ["16 True", "0", "16", "True"]


@pytest.mark.costly
def test_a_segment_counts_what_was_handed_out_and_idle_pages_serve_other_blocks(tmp_path):
    text = """
held.append(torch.empty(1, device="sim"))
print(torch.sim.memory_reserved(), _native.machine_memory()[2])
idle = torch.empty(9 * MIB, dtype=torch.uint8, device="sim:1")
rest = torch.empty(2 * MIB, dtype=torch.uint8, device="sim:1")
del idle
held.append(torch.empty(12 * MIB, dtype=torch.uint8, device="sim:2"))
print(torch.sim.memory_reserved(1) // MIB, _native.machine_memory()[2] - 512 == 14 * MIB)
del rest
held.append(torch.empty(2 * MIB, dtype=torch.uint8, device="sim:1").fill_(1))
print(_native.machine_memory()[2] - 512 == 14 * MIB)
"""
    assert run(text, tmp_path).splitlines() == ["2097152 512", "20 True", "True"]


@pytest.mark.costly
def test_processes_share_the_cap_and_one_that_dies_gives_its_part_back(tmp_path):
    text = """
fill(10)
one = child("print(fill()); print(len(held), flush=True); signal.pause()")
lines = []
while not lines or not lines[-1].strip().isdigit():
    lines.append(one.stdout.readline())
print("".join(lines), end="")
print(fill(11) is not None, len(held))
one.kill()
os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
print(fill(16), len(held))
one.wait()
"""
    output = run(text, tmp_path)
    assert "hold 16.00 MiB on simulated devices together, this one 6.00 MiB" in output
    assert output.splitlines()[-3:] == ["6", "True 10", "None 16"]


@pytest.mark.costly
def test_forked_children_share_it_too(tmp_path):
    text = """
end, start = os.pipe()
counted, count = os.pipe()
children = []
for number in range(3):
    children.append(os.fork())
    if not children[-1]:
        os.read(end, 1)
        fill()
        os.write(count, bytes([len(held)]))
        signal.pause()
os.write(start, b"123")
print(sum(os.read(counted, 1)[0] for child in children))
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(fill(16), len(held))
"""
    assert run(text, tmp_path).splitlines() == ["16", "None 16"]


@pytest.mark.costly
def test_ranks_without_a_common_process_get_equal_parts():
    variables = {"LOCAL_WORLD_SIZE": "4", "TORCH_EXT_SIM_MEMORY_PAGE": "", "TORCH_EXT_SIM_MACHINE_MEMORY": None}
    done = python("-c", "from torch_ext.sim import _native\nprint(_native.machine_memory()[0])", **variables)
    assert 0 < int(done.stdout) <= 0.2 * machine_memory.available_bytes() * 1.5


@pytest.mark.costly
def test_the_capacity_of_each_device_comes_from_a_variable(tmp_path):
    text = "print([torch.sim.get_device_properties(index).total_memory for index in range(4)], str(fill())[:60])"
    output = run(text, tmp_path, TORCH_EXT_SIM_MEMORY=str(2 * MIB))
    assert output.startswith(f"{[2 * MIB] * 4} sim out of memory. Tried to allocate 1.00 MiB. Device sim:0 ")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["TORCH_EXT_SIM_MEMORY", "TORCH_EXT_SIM_MACHINE_MEMORY"])
def test_invalid_byte_counts_are_refused(name, tmp_path):
    with pytest.raises(AssertionError, match=f"{name}=2GiB: expected a number of bytes above 0."):
        run("torch.ones(1, device='sim')", tmp_path, **{name: "2GiB"})


def test_cgroup_bounds_available_memory(tmp_path, monkeypatch):
    def group(folder, limit, used, idle, values):
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, value in zip((limit, used), values, strict=False):
            (place / name).write_text(f"{value}\n")
        (place / "memory.stat").write_text(f"anon 7\n{idle} {values[2]}\n")

    two = ("memory.max", "memory.current", "inactive_file")
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group("outer", *two, ("1000", 300, 50))
    group("outer/inner", *two, ("max", 200, 10))
    group("memory/job", *one, ("900", 500, 100))
    membership = tmp_path / "cgroup"
    for text, expected in [
        ("0::/outer/inner\n", 750),
        ("4:cpu,memory:/job\n0::/nothing\n", 500),
        ("0::/outer/inner\n4:memory:/job\n", 500),
        ("0::/\n", 1 << 62),
    ]:
        membership.write_text(text)
        assert min(machine_memory._in_cgroups(membership, tmp_path)) == expected
    assert min(machine_memory._in_cgroups(tmp_path / "none", tmp_path)) == 1 << 62
    total = int(re.findall(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    assert 0 < machine_memory.available_bytes() <= total
