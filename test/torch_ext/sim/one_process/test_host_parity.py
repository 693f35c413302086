"""Training on a device equals training on the host: modules, autocast, losses."""

import pytest
import torch
from torch import nn


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.attention = nn.TransformerEncoderLayer(36, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent, self.gated = nn.LSTM(36, 5, batch_first=True), nn.GRU(5, 4, batch_first=True)

    def forward(self, x):
        features = self.norm(self.convolution(x)).relu().flatten(2)
        hidden, _ = self.recurrent(self.attention(features))
        out, _ = self.gated(hidden)
        return out.square().mean()


def _train(device):
    torch.manual_seed(0)
    net = _Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_step_equals_the_host():
    # The fused cells associate their sums differently from the host's, hence float32 noise over four steps.
    assert _train("sim") == pytest.approx(_train("cpu"), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_follows_the_policies_and_the_scaler_steps(dtype):
    net = nn.Linear(4, 4).to("sim")
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("sim", init_scale=128.0)
    x = torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=dtype):
        y = net(x)
        assert y.dtype == dtype and torch.softmax(y, -1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(torch.sigmoid(y.float()), torch.ones_like(y).float())
        loss = y.float().sum()
    before = net.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(before - net.weight, torch.full_like(before, 0.2), atol=1e-3)  # the gradient is 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("of_input", "of_weight", "of_statistics"),
    [
        (torch.float16, torch.float16, torch.float32),
        (torch.float16, torch.float32, torch.float16),
        (torch.float32, torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
def test_batch_norm_takes_the_mixtures_of_types_that_gpus_take(of_input, of_weight, of_statistics, training):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(20, 3), torch.rand(3) + 0.5, torch.rand(3)

    def run(device, *types):
        leaves = [one.to(device, kind).requires_grad_() for one, kind in zip((x, weight, bias), types, strict=False)]
        mean, variance = torch.zeros(3, device=device, dtype=types[3]), torch.ones(3, device=device, dtype=types[3])
        y = nn.functional.batch_norm(leaves[0], mean, variance, *leaves[1:], training=training)
        return [y, *torch.autograd.grad(y.square().sum(), leaves), mean, variance]

    expected = run("cpu", *[torch.float32] * 4)
    got = run("sim", of_input, of_weight, of_weight, of_statistics)
    wanted = [of_input, of_input, of_weight, of_weight, of_statistics, of_statistics]
    assert [one.dtype for one in got] == wanted
    for one, other in zip(got, expected, strict=True):
        # bfloat16 keeps eight bits; gradients of the weight are sums of twenty products.
        torch.testing.assert_close(one.float().cpu(), other, rtol=3e-2, atol=6e-2)


def test_batch_norm_refuses_the_mixtures_that_gpus_refuse():
    x, half = torch.randn(4, 3, device="sim"), torch.ones(3, device="sim", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        nn.functional.batch_norm(x, None, None, half, half, training=True)
    rows = torch.randn(4, 3, 5, device="sim").half().requires_grad_()
    with pytest.raises(RuntimeError, match="Expected running_mean to have type Half but got Float"):
        nn.functional.batch_norm(rows, half.float(), half.float(), half, half, training=True).sum().backward()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss])
def test_losses_warn_of_nothing_and_equal_the_host(loss, reduction):
    given, wanted = torch.randn(8, 1), torch.randn(8, 1)
    found = loss(given.to("sim"), wanted.to("sim"), reduction=reduction)
    assert torch.equal(found.cpu(), loss(given, wanted, reduction=reduction))


def test_multi_margin_loss_in_half_and_its_gradient_are_those_in_float_rounded():
    x, target = torch.tensor([[0.5, 0.25, 0.125], [0.5, 1.0, 2.0]]), torch.tensor([0, 2])
    found = []
    for given in (x, x.to("sim").half()):
        given = given.clone().requires_grad_()
        loss = nn.functional.multi_margin_loss(given, target.to(given.device))
        found.append((loss, torch.autograd.grad(loss, given)[0]))
    for expected, got in zip(*found, strict=True):
        assert got.dtype == torch.float16 and torch.equal(got.cpu(), expected.half())
