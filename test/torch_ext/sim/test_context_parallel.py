"""Attention whose inputs are tensor subclasses. Context parallelism: causal attention over a sequence in parts is that
of the whole, with its gradients.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from test.torch_ext.sim import ranks

local = pytest.importorskip("torch.distributed._local_tensor")
experimental = pytest.importorskip("torch.distributed.tensor.experimental._attention")


@ranks.world_of(2)
def test_causal_attention_over_parts_is_that_of_the_whole(rank, world_size):
    mesh = init_device_mesh("sim", (world_size,))
    for rotation in ("allgather", "alltoall"):
        for heads in (4, 2):  # of the keys; with two, each serves two of the queries
            experimental.set_rotate_method(rotation)
            torch.manual_seed(0)
            inputs = [torch.randn(2, count, 16, 8).to("sim").requires_grad_() for count in (4, heads, heads)]
            weights = torch.randn(2, 4, 16, 8).to("sim")
            whole = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=heads != 4)
            (whole * weights).sum().backward()

            parts = [each.detach().clone() for each in (*inputs, weights)]
            with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)):
                own = [part.requires_grad_() for part in parts[:3]]
                out = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=heads != 4)
                (out * parts[3]).sum().backward()
            found = [out.detach(), *(part.grad for part in own)]
            joined = experimental.context_parallel_unshard(mesh, found, [2] * 4)
            for one, other in zip(joined, [whole.detach(), *(each.grad for each in inputs)], strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_a_subclass_that_answers_for_its_sizes_is_that_of_each_rank(is_causal):
    torch.manual_seed(0)
    plain = {rank: torch.randn(1, 2, 4, 8).to("sim").requires_grad_() for rank in range(2)}
    expected = {}
    for rank, tensor in plain.items():
        expected[rank] = F.scaled_dot_product_attention(tensor, tensor, tensor, is_causal=is_causal)
        expected[rank].square().sum().backward()
    with local.LocalTensorMode(2):
        tensor = local.LocalTensor({rank: each.detach() for rank, each in plain.items()}).requires_grad_()
        found = F.scaled_dot_product_attention(tensor, tensor, tensor, is_causal=is_causal)
        found.square().sum().backward()
    for rank, each in plain.items():
        torch.testing.assert_close(found._local_tensors[rank], expected[rank], rtol=0, atol=0)
        torch.testing.assert_close(tensor.grad._local_tensors[rank], each.grad, rtol=0, atol=0)
