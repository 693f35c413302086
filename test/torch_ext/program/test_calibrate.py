"""``torch_ext calibrate``: constants from times that are known, and the whole command on this machine's processor."""

import json

import pytest
import torch

from test.torch_ext.interpreter import python
from test.torch_ext.program.commands import run
from torch_ext.program.calibrate import constants, main, programs

# Of an imaginary device, in operations and bytes per nanosecond.
FLOPS, MEMORY, KERNEL_NS, COPY_NS, BUS, LINK, NETWORK, COLLECTIVE_NS = 50.0, 20.0, 3000, 4000, 5.0, 2.0, 0.5, 9000
BYTES = 64 << 20


def times(size, world, node):
    product = KERNEL_NS + 2 * size**3 / FLOPS
    return {
        "a kernel of one element": KERNEL_NS,
        **{f"a matrix product, {name}": product for name in ("Float", "BFloat16", "Half", "Double")},
        "a copy within the device": KERNEL_NS + 2 * BYTES / MEMORY,
        "a copy of one element": COPY_NS,
        "to_device": COPY_NS + BYTES / BUS,
        "to_host": COPY_NS + BYTES / BUS,
        "an all-reduce of one element": COLLECTIVE_NS,
        "an all-reduce, link": COLLECTIVE_NS + 2 * (node - 1) / node * BYTES / LINK,
        "an all-reduce, network": COLLECTIVE_NS + 2 * (world - 1) / world * BYTES / node / NETWORK,
    }


@pytest.mark.parametrize(("world", "node"), ((1, 1), (4, 4), (4, 2), (4, 1)))
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_constants_give_back_the_times_that_they_are_from(monkeypatch, device, world, node):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    monkeypatch.setattr(torch.distributed, "new_subgroups", lambda size: [None])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: world > 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    known, asked = times(128, world, node), []
    monkeypatch.setattr(torch, "ones", lambda *sizes, _ones=torch.ones, pin_memory=False, **rest: _ones(*sizes, **rest))

    def measure(title, body):
        asked.append(title)
        return known[title]

    expected = {f"flops.{name}": FLOPS for name in ("Float", "BFloat16", "Half", "Double")}
    expected |= {"kernel": KERNEL_NS, "memory": MEMORY}
    expected |= {"copy": COPY_NS, "to_device": BUS, "to_host": BUS} if device != "cpu" else {}
    expected |= {"collective": COLLECTIVE_NS} if world > 1 else {}
    expected |= {"link": LINK} if node > 1 else {}
    expected |= {"node": node, "network": NETWORK} if world > node else {}
    assert constants(device, 128, measure) == pytest.approx(expected)
    assert len(set(asked)) == len(asked)


def test_a_type_without_a_product_is_left_out():
    def measure(title, body):
        if "Half" in title:
            raise RuntimeError("not implemented for 'Half'")
        return 5000.0

    assert "flops.Half" not in constants("cpu", 16, measure)


@pytest.mark.long
def test_this_processor_has_a_model_that_runs_a_program(tmp_path):
    ended = python(
        "-m",
        "torch_ext",
        "calibrate",
        "--device",
        "cpu",
        "--size",
        256,
        "--out",
        tmp_path / "own.json",
        OMP_NUM_THREADS="1",
    )
    assert ended.returncode == 0, ended.stderr
    model = json.loads((tmp_path / "own.json").read_text())
    assert model["validated"] and all(row["value"] > 0 for row in model["constants"].values())
    assert list(model["compared"]) == list(programs("meta", 16)) and len(model["compared"]) == 10
    assert all(min(times) > 0 for times in model["compared"].values())
    ran = run(f"-n 1 --clock {tmp_path / 'own.json'}", "import torch\ntorch.ones(9, device='sim')", folder=tmp_path)
    assert "virtual time by the model own\n" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize(("words", "said"), [("--device nope", "nope"), ("--out /nowhere/own.json", "No such file")])
def test_a_usage_error_names_it(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert said in capsys.readouterr().err
