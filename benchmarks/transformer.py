"""The training step that benchmarks of the simulated device share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def training_step() -> Callable[[], None]:
    """Return a training step of a two-layer transformer on ``sim``, which the caller has registered."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("sim")
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(8, 64, 128).to("sim")

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step
