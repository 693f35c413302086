"""Tensors of the device go to other processes, which then share their memory, and to files."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp

import torch_ext.sim  # noqa: F401 - registers the device

SIM = torch.get_device_module("sim")


def _double(given, answers):
    tensor, view = given.get()
    tensor.mul_(2)
    answers.put((str(tensor.device), view.tolist(), tensor.is_shared()))
    given.get()  # the sender keeps the memory until then


def test_both_processes_see_each_others_writes():
    context = mp.get_context("spawn")
    given, answers = context.Queue(), context.Queue()
    tensor = torch.arange(4.0).to("sim:1").share_memory_()
    view = tensor[1:3]
    assert tensor.is_shared()
    process = context.Process(target=_double, args=(given, answers))
    process.start()
    try:
        given.put((tensor, view))
        assert answers.get(timeout=100) == ("sim:1", [2.0, 4.0], True)
        assert tensor.tolist() == [0.0, 2.0, 4.0, 6.0] and view.tolist() == [2.0, 4.0]
        given.put(None)
        process.join(100)
        assert process.exitcode == 0
    finally:
        process.kill()


def _round_trip(value):
    return pickle.loads(ForkingPickler.dumps(value))


def test_sent_tensor_stays_usable():
    tensor = torch.ones(4, device="sim")
    for sum_of_products in (16, 36):
        received = _round_trip(tensor)
        received.add_(1)
        assert torch.equal(tensor, received) and (tensor @ received).item() == sum_of_products
        tensor.record_stream(SIM.Stream())


def test_empty_tensors_parameters_and_host_tensors_are_sent():
    empty = _round_trip(torch.empty(0, device="sim:1"))
    assert str(empty.device) == "sim:1" and empty.numel() == 0
    parameter = _round_trip(torch.nn.Parameter(torch.ones(2, device="sim")))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.sum().item() == 2
    host = torch.ones(4)
    _round_trip(host).add_(1)
    assert host.tolist() == [2.0] * 4


def test_save_load_and_map_location():
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device="sim:1")}, buffer)
    for location, expected in ((None, "sim:1"), ("sim:2", "sim:2"), ("cpu", "cpu")):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=location)["x"]
        assert str(loaded.device) == expected and loaded.tolist() == [0.0, 1.0, 2.0]


def test_dlpack_gives_a_tensor_of_the_same_memory():
    tensor = torch.arange(4.0).to("sim:1")
    other = torch.from_dlpack(tensor)
    other[0] = 9
    assert other.device == tensor.device and tensor.tolist() == [9.0, 1.0, 2.0, 3.0]
    assert torch.from_dlpack(torch.ones(2)).device.type == "cpu"
