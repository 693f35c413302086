"""``torch_ext run``: the environment of a program, the report of its end, and no leftovers."""

import os
import shlex
import signal
import subprocess
import sys
import uuid

import pytest
import torch

from test.torch_ext.interpreter import CHECKOUT
from test.torch_ext.program.commands import EXAMPLE, MARK, alive_with, run, start, with_entry_point
from torch_ext.program.run import main

_FINDS = r"""
    import multiprocessing as mp, os, sys
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor(float(index))

    if __name__ == "__main__":
        rank = int(os.environ["LOCAL_RANK"])
        assert sys.modules["__main__"].Numbers is Numbers
        assert mp.parent_process() is None and mp.current_process().name == "MainProcess"
        assert sys.argv == ["program.py", "--alpha", "-m", "b"], sys.argv
        assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
        assert dist.is_torchelastic_launched() and os.environ["WORLD_SIZE"] == "2"
        assert torch.accelerator.device_count() == 2
        mp.set_start_method("spawn")  # which Python allows once
        for method in ("fork", "spawn"):
            batches = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
            assert sum(batch.sum().item() for batch in batches) == 6.0
        child = os.fork()
        if not child:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        torch.accelerator.set_device_index(rank)
        dist.init_process_group()
        # Groups of one job: a second default group would find the first one's addresses in the store.
        for group in (None, dist.new_group(backend="gloo"), dist.new_group(backend="simccl")):
            tensor = torch.ones(2, device="sim")
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2.0, 2.0]
        dist.destroy_process_group()
        print("\x1b[1mfine\x1b[0m", flush=True)
        sys.exit(0)
"""


@pytest.mark.costly
def test_a_program_finds_what_torchrun_gives_it(tmp_path):
    ended = run("-n 2", _FINDS, "--alpha", "-m", "b", folder=tmp_path)
    assert ended.stderr == ""
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] \x1b[1mfine\x1b[0m", "[rank 1] \x1b[1mfine\x1b[0m"]
    assert ended.returncode == 0


@pytest.mark.costly
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("raise ValueError('no data')", 1, "rank 1 raised ValueError at program.py:3: no data"),
        ("sys.exit(7)", 7, "rank 1 raised SystemExit at program.py:3: 7"),
        ("os._exit(5)", 5, "rank 1 exited with code 5 at program.py:3 before its program was over"),
        ("os.kill(os.getpid(), 11)", 128 + 11, "rank 1 was killed by SIGSEGV at program.py:3"),
    ],
)
def test_the_first_rank_that_fails_is_named_and_gives_the_exit_code(body, code, message, tmp_path):
    program = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {body}\n"
    if code == 7:
        program += "time.sleep(600)\n"
    ended = run("-n 3 --device cpu", program, folder=tmp_path)
    assert message in ended.stderr
    assert ("rank 0 was stopped at program.py:4 while its program was running" in ended.stderr) == (code == 7)
    assert "torch_ext/program/" not in ended.stderr, "frames of ours say nothing"
    assert ended.returncode == code


def test_leaving_early_with_code_0_is_success_as_under_torchrun(tmp_path):
    ended = run(
        "-n 2 --device cpu --output rank0", "import os\nprint('done', flush=True)\nos._exit(0)", folder=tmp_path
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert "ranks 0, 1 ended by os._exit(0)" in ended.stderr


def test_a_rank_that_left_while_others_waited_for_it_is_named(tmp_path):
    program = "import os\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    ended = run("-n 2 --device cpu", program + "os._exit(0) if dist.get_rank() else dist.barrier()", folder=tmp_path)
    assert "rank 1 exited with code 0 at program.py:4 before its program was over" in ended.stderr
    assert ended.returncode == 1


def test_a_program_may_close_every_descriptor_and_reuse_their_numbers(tmp_path):
    program = """
        import os
        os.closerange(3, 1024)
        own = [open(f"{os.environ['RANK']}.{number}", "w") for number in range(64)]
        if os.environ["RANK"] == "1":
            raise ValueError("no data")
    """
    ended = run("-n 2 --device cpu", program, folder=tmp_path)
    assert "rank 1 exited with code 1" in ended.stderr
    assert ended.stdout.count("ValueError: no data") == 1 and "torch_ext/" not in ended.stdout
    assert {file.stat().st_size for file in tmp_path.glob("?.*") if file.suffix != ".py"} == {0}
    assert ended.returncode == 1


@pytest.mark.parametrize("end", ["", "raise ValueError('no data')", "sys.exit(3)"])
def test_globals_are_finalized_and_files_written_at_the_end(end, tmp_path):
    program = f"""
        import os, sys

        class Last:
            def __del__(self):
                print("deleted")

        own, last = open("log." + os.environ["RANK"], "w"), Last()
        own.write("all of it")
        kept_by_another_module = sys.kept = open("kept." + os.environ["RANK"], "wb")
        sys.kept.write(b"this too")
        {end}
    """
    ended = run("-n 2 --device cpu --output rank0", program, folder=tmp_path)
    assert ended.stdout == "deleted\n"
    assert [(tmp_path / f"log.{rank}").read_text() for rank in range(2)] == ["all of it"] * 2
    assert [(tmp_path / f"kept.{rank}").read_text() for rank in range(2)] == ["this too"] * 2


@pytest.mark.costly
def test_groups_that_are_made_anew_do_not_meet_those_before_them(tmp_path):
    """Names and store stay the same, and a rank may join before its peers have destroyed the previous group."""
    program = """
        import time
        import torch
        import torch.distributed as dist

        for number in range(4):
            dist.init_process_group("nccl")
            rank = dist.get_rank()
            x = torch.full((1,), float(number + rank), device=f"cuda:{rank}")
            dist.all_reduce(x)
            assert x.item() == 3 * number + 3, x
            group = dist.new_group([0, 1] if number % 2 else [0, 1, 2])
            if rank < 2:
                dist.all_reduce(x, group=group)
                assert x.item() == (3 * number + 3) * 2, x
            elif number % 2 == 0:
                dist.all_reduce(torch.zeros_like(x), group=group)
            time.sleep(0.2 * rank)
            dist.destroy_process_group()
    """
    ended = run("-n 3 --cuda-as-sim", program, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.drawn(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there: the program runs on it")
@pytest.mark.parametrize("line", ["torch.distributed.init_process_group('nccl')", "torch.ones(1, device='cuda')"])
def test_a_program_that_asks_for_cuda_is_told_of_the_option(line, tmp_path):
    ended = run("-n 1", f"import torch\n{line}", folder=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith("with --cuda-as-sim, that is the simulated device\n"), ended.stderr


@pytest.mark.drawn(1)
@pytest.mark.parametrize("options", ["--device cpu", "--cuda-as-sim"])
def test_build_failure_is_one_line(options, tmp_path):
    ended = run(f"-n 1 {options}", "def f(:  # cuda", folder=tmp_path)
    assert "rank 0 raised SyntaxError: invalid syntax (program.py, line 1)" in ended.stderr
    assert "torch_ext/" not in ended.stderr and "ast.py" not in ended.stderr, "frames of ours say nothing"


@pytest.mark.costly
def test_hang_is_proven_and_traced_to_the_absent_rank(tmp_path):
    program = EXAMPLE.read_text().replace("        optimizer.step()\n", "        if rank == 1 and step == 2:\n"
        "            dist.barrier()\n        optimizer.step()\n")  # fmt: skip
    ended = run("-n 2 --hang end", program, folder=tmp_path)
    assert "ranks 0, 1 wait for each other: rank 0 in all_gather_into_tensor (" in ended.stderr
    assert "barrier() in main (program.py:25)" in ended.stderr
    assert ended.returncode == 1


@pytest.mark.costly
def test_reported_hang_fails_a_program_that_ends_with_code_0(tmp_path):
    """This process, outside the run, ends a wait that no process of the run can end."""
    program = """
        import os, signal, threading

        lock = threading.Lock()
        lock.acquire()
        signal.signal(signal.SIGUSR1, lambda *_: lock.release())
        print("pid", os.getpid(), flush=True)
        lock.acquire()
    """
    with start("-n 2 --device cpu --output all", program, folder=tmp_path, TORCH_EXT_HANG_AFTER="1") as process:
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        text = ""
        while "the program goes on until" not in text:
            line = process.stderr.readline()
            assert line, text
            text += line
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        _, rest = process.communicate(timeout=100)
    assert "HUNG program.py" in text and "ranks 0, 1 hung at program.py:8" in text and "Stacks of ranks 0, 1" in text, (
        text
    )
    assert "error: the program ended by itself, but had hung after" in rest and "FAILED" not in rest, rest
    assert process.returncode == 1


@pytest.mark.costly
def test_a_hang_in_a_kernel_that_waits_for_a_collective_is_proven(tmp_path):
    """No frame of c10d is on the stack: the collective was called, and ordered before the stream, long ago."""
    program = (
        "import os, torch, torch.distributed as dist\n"
        "device = torch.device('sim', int(os.environ['LOCAL_RANK']))\n"
        "torch.accelerator.set_device_index(device.index)\n"
        "dist.init_process_group('simccl')\n"
        "x = torch.ones(2, device=device)\n"
        "if device.index == 0:\n"
        "    dist.irecv(x, 1).wait()\n"
        "else:\n"
        "    dist.all_reduce(x, async_op=True).wait()\n"
        "print(x + 1)\n"
    )
    ended = run("-n 2 --hang end", program, folder=tmp_path)
    assert "ranks 0, 1 wait for each other: rank 0 in recv (program.py:" in ended.stderr
    assert "rank 0 waits in recv in group 0, called at" in ended.stderr and "program.py:7 for rank 1" in ended.stderr
    assert ended.returncode == 1


def test_memory_and_races_are_those_of_the_device(tmp_path):
    text = EXAMPLE.read_text()
    out_of_memory = run("-n 2 --memory 32KiB", text, folder=tmp_path)
    assert "raised torch.OutOfMemoryError" in out_of_memory.stderr
    assert out_of_memory.returncode == 1
    copied = "            batch = torch.randn(32, 64).to(device)\n"
    behind = copied.replace(".to(device)", ".pin_memory().to(device, non_blocking=True)")
    racing = text.replace(copied.removeprefix("    "), f"        with torch.Stream(device):\n{behind}")
    found = run("-n 2 --races error", racing, folder=tmp_path)
    assert "torch_ext.sim.races.RaceError" in found.stderr
    assert "ranks 0, 1 raised" in found.stderr, "they differ in their device alone"
    assert "program.py:22" in found.stderr
    assert found.returncode == 1


def test_silent_fake_is_an_error_with_strict(tmp_path):
    ended = run("-n 2 --strict", "import torch\ntorch.ones(2).sum()", folder=tmp_path)
    assert "error: none of the 2 ranks made a process group" in ended.stderr
    assert "used no simulated device" in ended.stderr
    assert ended.returncode == 1


_MAKES_GROUP = """
import torch, torch.distributed as dist
dist.init_process_group()
torch.accelerator.set_device_index(dist.get_rank())
"""
_GATHERS = "found = [None, None]; dist.all_gather_object(found, dist.get_rank()); assert found == [0, 1]; "


@pytest.mark.parametrize(
    "program",
    [
        "dist.all_reduce(torch.empty(0, device='sim'))",
        "other = 1 - dist.get_rank(); none = torch.empty(0, device='sim'); [dist.send, dist.recv][other](none, other)",
        _GATHERS,
        _GATHERS + "dist.destroy_process_group()",
    ],
)
def test_ranks_that_move_empty_tensors_or_objects_alone_are_no_fakes(program, tmp_path):
    ended = run("-n 2 --strict", _MAKES_GROUP + program, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("also", ["", _GATHERS])
def test_ranks_that_reduce_on_the_host_are_fakes_also_if_they_move_objects(also, tmp_path):
    ended = run("-n 2 --strict", _MAKES_GROUP + also + "dist.all_reduce(torch.ones(3))", folder=tmp_path)
    assert "used no simulated device and computed on the host." in ended.stderr
    assert ended.returncode == 1


@pytest.mark.costly
def test_processes_of_a_rank_need_not_join_the_job(tmp_path):
    (tmp_path / "helper.py").write_text("import torch\n")
    started = "import subprocess, sys; subprocess.run([sys.executable, 'helper.py'], check=True); "
    ended = run(
        "-n 2 --strict",
        _MAKES_GROUP + started + "dist.all_reduce(torch.ones(1, device='sim'))",
        folder=tmp_path,
        **with_entry_point(tmp_path),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.costly
def test_ctrl_c_reaches_the_ranks_and_leaves_nothing(tmp_path):
    program = """
        import time
        try:
            print("begun", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("saved", flush=True)
    """
    mark = uuid.uuid4().hex
    with start("-n 2 --device cpu", program, folder=tmp_path, **{MARK: mark}) as process:
        assert {process.stdout.readline() for _ in range(2)} == {"[rank 0] begun\n", "[rank 1] begun\n"}
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["[rank 0] saved", "[rank 1] saved"]
    assert "Traceback" not in err
    assert alive_with(mark) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no program: name"),
        ("no_such_file.py", "no such file"),
        ("-n 0 a.py", "expected a whole number of at least 1"),
        ("-n 65 a.py", "at most 64 simulated devices"),
        ("-n 2 --faults 'rank 9: kill' a.py", "'rank 9: kill at #1': expected ranks among ranks 0, 1"),
        ("--dry --world 8 --faults 'rank 0: kill' a.py", "the peers of a dry run do not exist"),
        ("--clock soon a.py", "got the model 'soon', expected one of a100, cpu, h100-sxm, unit or the path of a JSON"),
        ("--memory two a.py", "expected a size such as 2GiB"),
        ("--schedule soon a.py", "got 'soon', expected one of early, late, random, random:SEED"),
        ("--device cpu --seed 1 a.py", "--schedule is for the simulated accelerator, but --device is cpu"),
        ("--timeout 0 a.py", "expected a number of seconds above 0"),
        ("--device cpu --races error a.py", "--races is for the simulated accelerator"),
    ],
)
def test_a_usage_error_says_what_to_do(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(words))
    assert message in capsys.readouterr().err


def test_a_limit_that_is_no_number_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXT_HANG_AFTER", "nan")
    assert main([__file__]) == 2
    assert capsys.readouterr().err.startswith("error: TORCH_EXT_HANG_AFTER is 'nan'; expected")


@pytest.mark.costly
def test_a_command_without_standard_streams_runs(tmp_path):
    (tmp_path / "program.py").write_text("print('lost')\nraise SystemExit(5)")
    command = f"{sys.executable} -m torch_ext run -n 1 --device cpu program.py <&- >&-"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert "rank 0 raised SystemExit at " in done.stderr
    assert done.returncode == 5
