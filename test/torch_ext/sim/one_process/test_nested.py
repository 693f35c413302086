"""Nested tensors on the device: of the jagged layout, and of the strided one, which attention produces."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture(autouse=True)
def _of_a_prototype():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _parts(device):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(length, 8, generator=draw).to(device).requires_grad_() for length in (3, 5)]


def _attention_of_jagged(parts):
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    heads = nested.unflatten(-1, [2, 4]).transpose(1, 2)
    output = F.scaled_dot_product_attention(heads, heads, heads)
    return output.transpose(1, 2).values()


def _strided(parts):
    nested = torch.nested.as_nested_tensor(parts)
    return torch.nested.to_padded_tensor(torch.softmax(nested * 2 + nested, -1).transpose(1, 2).contiguous(), 0.5)


def _norm(parts):
    nested = torch.nested.as_nested_tensor(parts)
    scale = torch.full((8,), 3.0, device=parts[0].device)
    return torch.nested.to_padded_tensor(F.layer_norm(nested, (8,), scale, scale), 0.0)


def _product(parts):
    nested = torch.nested.as_nested_tensor(parts)
    return torch.nested.to_padded_tensor(torch.matmul(nested, nested.transpose(1, 2).contiguous()), 0.0)


@pytest.mark.parametrize("of", [_attention_of_jagged, _strided, _norm, _product])
def test_results_and_gradients_are_those_of_the_host(of):
    found = {}
    for device in ("cpu", "sim"):
        parts = _parts(device)
        output = of(parts)
        assert output.device.type == device
        output.square().sum().backward()
        found[device] = [output.cpu(), *(part.grad.cpu() for part in parts if part.grad is not None)]
    assert len(found["cpu"]) == 3
    torch.testing.assert_close(found["sim"], found["cpu"], rtol=0, atol=0)


def test_an_encoder_s_fast_path_for_padded_batches_is_the_host_s():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    batch, padding = torch.randn(2, 4, 8), torch.tensor([[False, False, True, True], [False] * 4])
    with torch.no_grad():
        expected = model(batch, src_key_padding_mask=padding)
        output = model.to("sim")(batch.to("sim"), src_key_padding_mask=padding.to("sim"))
    torch.testing.assert_close(output.cpu(), expected)


def test_nested_tensors_move_and_print():
    for layout in (torch.jagged, torch.strided):
        parts = [part.detach() for part in _parts("cpu")]
        there = torch.nested.nested_tensor(parts, layout=layout).to("sim")
        assert there.device.type == "sim"
        assert "sim" in repr(there)
        torch.testing.assert_close(list(there.cpu().unbind()), parts)


def test_operators_without_nested_kernels_are_refused_with_a_reason():
    nested = torch.nested.nested_tensor([part.detach() for part in _parts("sim")])
    with pytest.raises(
        NotImplementedError, match="'aten::cumsum' is not implemented for nested tensors of the strided"
    ):
        nested.cumsum(1)
