"""Tensors keep their device through saving, pickling and copying."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn


def test_save_load_and_map_location() -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device="sim:1")}, buffer)
    for location, expected in ((None, "sim:1"), ("sim:2", "sim:2"), ("cpu", "cpu")):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=location)["x"]
        assert str(loaded.device) == expected and loaded.tolist() == [0.0, 1.0, 2.0]


def test_deepcopy_and_pickle_keep_the_device() -> None:
    module = nn.Linear(2, 2).to("sim:1")
    clone = copy.deepcopy(module)
    assert clone.weight.device == module.weight.device
    with torch.no_grad():
        clone.weight.zero_()
    assert module.weight.abs().sum().item() > 0
    tensor = torch.ones(2, device="sim:1")
    assert pickle.loads(pickle.dumps(tensor)).device == tensor.device
