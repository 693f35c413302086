"""``torch_ext run --dry``: ranks without peers, reads of values, and what does not fit."""

import pickle
import re
from textwrap import dedent

import pytest

from test.torch_ext.interpreter import python
from test.torch_ext.program.commands import run
from torch_ext.program.run import parse
from torch_ext.sim.dry import Assumption

READS = """
    import torch

    x = torch.ones(4, device="sim")
    host = torch.ones(3)
    host[:2].mul_(2)  # on the host, where values are real
    assert host.tolist() == [2, 2, 1]
    loss = x.to("sim").sum()

    def attempt(read):
        try:
            print(read())
        except RuntimeError as error:
            print(error)

"""

# read, the word that its message proposes (otherwise the place), what it gives at `--assume 1.5`
GIVEN = [
    ("loss.item()", "loss", "1.5"),
    ("loss.cpu()", "loss", "tensor(1.5000)"),
    ("x.to('cpu')[:2]", "x", "tensor([1.5000, 1.5000])"),
    ("bool(loss > 0)", "", "True"),
    ("int(loss.to(torch.int64))", "loss", "1"),
    ("torch.equal(x, x)", "", "True"),
    ("host.copy_(x[:3])", "", "tensor([1.5000, 1.5000, 1.5000])"),
]
SIZES = ["x.nonzero()", "x.unique()", "x[x > 0]", "torch.masked_select(x, x > 0)", "x.long().bincount()"]
ATTEMPTS = [f"attempt(lambda: {read})" for read in [*(read for read, *_ in GIVEN), *SIZES]]

JOB = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.parallel import DistributedDataParallel

    kind, backend = sys.argv[1:]
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend if backend != "default" else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    objects = [None] * size
    dist.all_gather_object(objects, ("from", rank) if kind == "objects" else "equal")
    assert objects[-1] == (("from", rank) if kind == "objects" else "equal")
    dist.broadcast_object_list([rank], 0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).to("sim")
    if kind == "fsdp":
        mesh = init_device_mesh("sim", (max(1, size // 4), min(4, size)), mesh_dim_names=("replicate", "shard"))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model.append(nn.SyncBatchNorm(256, device="sim")))
    elif kind == "1F1B":
        one = torch.ones(16, 256, device="sim")
        stage = PipelineStage(
            model, rank, size, one.device, input_args=(one.clone().requires_grad_(rank > 0),), output_args=(model(one),)
        )
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
        arguments, target = ([one.repeat(4, 1)], None) if rank == 0 else ([], one.repeat(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        if kind == "1F1B":
            schedule.step(*arguments, target=target)
            optimizer.step()
        elif kind == "pipeline":
            got = torch.empty(64, 256, device="sim")
            if rank:
                dist.recv(got, rank - 1)
            if rank < size - 1:
                dist.send(model(got), rank + 1)
        else:
            model(torch.ones(64, 256, device="sim")).sum().backward()
            optimizer.step()
    if kind == "fsdp" and size == 4:
        part, parts = torch.ones(100, device="sim"), [torch.empty(100, device="sim") for _ in range(size)]
        dist.gather(part, parts if rank == 2 else None, 2)
        dist.scatter(part, parts if rank == 2 else None, 2)
        parts[2] = parts[2][:50]
        dist.all_gather(parts, parts[rank].clone())
    dist.barrier()
    torch.empty(1 << 26, device="sim")
    print("peaks", torch.sim.max_memory_allocated(), torch.sim.max_memory_reserved())
    dist.destroy_process_group()
"""


def dry(options, program, *arguments, folder):
    ended = run(f"--dry {options}", program, *arguments, folder=folder)
    return ended.returncode, ended.stdout, ended.stderr


def printed_by_reads(options, folder):
    program = READS + "".join(f"    {each}\n" for each in ATTEMPTS)
    code, printed, error = dry(f"--world 1 {options}", program, folder=folder)
    assert (code, error) == (0, "")
    return printed.splitlines()[: len(ATTEMPTS)], dedent(program).splitlines()


@pytest.mark.costly
def test_reads_name_their_lines_and_the_remedy(tmp_path):
    printed, lines = printed_by_reads("", tmp_path)
    for (read, word, _), message in zip(GIVEN, printed, strict=False):
        where = f"program.py:{lines.index(f'attempt(lambda: {read})') + 1}"
        assert f"{where}, in `attempt(lambda: {read})`: the host reads a value of the device" in message
        assert message.endswith(f"Give it: --assume {word or where}=VALUE, or do not read it.")
    for size, message in zip(SIZES, printed[len(GIVEN) :], strict=True):
        assert f"in `attempt(lambda: {size})`: the size of the result of aten::" in message


@pytest.mark.drawn(1)
@pytest.mark.parametrize("options", ["--assume 1.5", "--assume attempt=1.5", "--assume y=7 --assume lambda=1.5"])
def test_reads_give_what_is_assumed(options, tmp_path):
    printed, _ = printed_by_reads(options, tmp_path)
    assert [line.removeprefix("[rank 0] ") for line in printed[: len(GIVEN)]] == [value for *_, value in GIVEN]
    assert all("the size of the result" in line for line in printed[len(GIVEN) :])


def test_places_and_words_are_whole():
    assert Assumption("t.py:41", 0).covers("/a/t.py:41", "") and not Assumption("t.py:4", 0).covers("/a/t.py:41", "")
    assert not Assumption("t.py:41", 0).covers("/a/ct.py:41", "")
    assert Assumption("loss", 0).covers("", "a=loss.item()") and not Assumption("loss", 0).covers("", "my_loss.item()")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "1F1B"])
def test_a_rank_without_peers_is_one_with_peers(kind, tmp_path):
    """Peaks and, for FSDP, virtual time. DDP compares parameters at its start, which takes time, and a stage of a
    pipeline waits for the others.
    """
    wet = run("-n 4 --clock unit", JOB, kind, "default", folder=tmp_path)
    code, printed, error = dry("--world 4 --ranks 1,3 --clock unit", JOB, kind, "default", folder=tmp_path)
    assert (wet.returncode, code, error) == (0, 0, "")
    rows = {line.split()[0]: line for line in wet.stdout.splitlines() if re.match(r"\d  ", line)}
    peaks = dict(re.findall(r"\[rank (\d)\] (peaks .*)", wet.stdout))
    assert dict(re.findall(r"\[rank (\d)\] (.*)", printed)) == {"1": peaks["1"], "3": peaks["3"]}
    if kind == "fsdp":
        assert [line for line in printed.splitlines() if re.match(r"\d  ", line)] == [rows["1"], rows["3"]]


def test_states_are_sharded_over_the_job(tmp_path):
    code, printed, _ = dry("--world 1024 --ranks 1023 --memory 1GiB", JOB, "fsdp", "sim:simccl", folder=tmp_path)
    assert code == 0
    assert "rank 1023 of 1024: at most 257.00 MiB allocated" in printed
    assert "parameters 256.00 KiB, gradients 256.00 KiB" in printed  # a quarter of 4 * 256 * 256 * 4 bytes
    assert "optimizer state 512.00 KiB" in printed
    assert "fits in 1.00 GiB" in printed
    snapshot = pickle.loads((tmp_path / "torch_ext_memory_1023.pickle").read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)


def test_what_does_not_fit_fails_with_the_amount_and_the_line(tmp_path):
    program = """
        import torch
        a = torch.empty(3 << 20, device="sim")
        del a
        b = torch.empty(5 << 20, device="sim")  # 20 MiB, after what is cached went back
        c = torch.empty(2 << 20, device="sim")
        d = torch.empty(1 << 20, device="sim")
    """
    code, printed, _ = dry("--world 1 --memory 20MiB", program, folder=tmp_path)
    assert code == 1
    assert re.search(r"does not fit in 20\.00 MiB by 20\.00 MiB at .*:6$", printed, re.M), printed
    code, printed, _ = dry("--world 1 --memory 40MiB", program, folder=tmp_path)
    assert (code, "fits in 40.00 MiB" in printed) == (0, True)


def test_partners_of_transfers_are_modelled(tmp_path):
    code, printed, error = dry("--world 4 --ranks 2 --clock unit", JOB, "pipeline", "default", folder=tmp_path)
    assert (code, error) == (0, "")
    nbytes = 64 * 256 * 4
    assert f"recv {2 * nbytes / 1e3:.2f} us" in printed and f"send {2 * nbytes / 1e3:.2f} us" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "--dry needs --world N"),
        ("--world 4 --ranks 4", "--ranks 4: expected numbers from 0 to 3"),
        ("--world 12", "--world 12: expected a multiple of 8"),
        ("--world 4 --races error", "--races is not for a dry run"),
        ("--world 4 --assume loss=high", "expected VALUE, WORD=VALUE or FILE:LINE=VALUE with a number"),
        ("--world 4 --device cpu", "--dry is for the simulated accelerator"),
    ],
)
def test_wrong_options_are_named(options, words, capsys):
    with pytest.raises(SystemExit):
        parse(["--dry", *options.split(), __file__])
    assert words in capsys.readouterr().err


@pytest.mark.costly
def test_a_run_lasts_as_long_as_the_process():
    norm = "print(torch.nn.LayerNorm(2).to('sim')(torch.ones(1, 2, device='sim')).shape)"  # its shapes are in Python
    done = python("-c", f"import torch; from torch_ext.sim import dry; dry.Program([]); {norm}")
    assert done.stdout == "torch.Size([1, 2])\n", done.stderr
