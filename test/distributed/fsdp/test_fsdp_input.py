# Owner(s): ["oncall: distributed"]
"""FSDP1 passes every kind of input to the wrapped module: keyword arguments,
dictionaries, tuples, lists.

Each is compared with DDP on the same data. An input that is dropped, swapped or
detached changes the parameters or the gradients of the inputs.
"""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_full_params
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

NUM_STEPS = 3


class ContainerModel(nn.Module):
    """Takes two tensors from any container. The second counts twice, so that swapping
    them changes the output.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, *args, **kwargs):
        first, second = self.unpack(*args, **kwargs)
        return self.layer(first) + 2 * self.layer(second)

    def unpack(self, *args, **kwargs):
        if kwargs:
            return kwargs["first"], kwargs["second"]
        (container,) = args
        return (
            (container["first"], container["second"])
            if isinstance(container, dict)
            else container
        )


def as_keywords(first, second):
    return (), {"first": first, "second": second}


def as_dict(first, second):
    return ({"first": first, "second": second},), {}


def as_tuple(first, second):
    return ((first, second),), {}


def as_list(first, second):
    return ([first, second],), {}


class TestInput(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _inputs(self, step):
        torch.manual_seed(100 * step + self.rank)
        return [
            torch.rand(8, 4, device=self.device, requires_grad=True) for _ in range(2)
        ]

    def _train(self, model, pack):
        """Train for several steps and return the gradients of the inputs."""
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        input_grads = []
        for step in range(NUM_STEPS):
            inputs = self._inputs(step)
            args, kwargs = pack(*inputs)
            model(*args, **kwargs).square().sum().backward()
            optim.step()
            optim.zero_grad()
            input_grads.append([tensor.grad for tensor in inputs])
        return input_grads

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize(
        "pack",
        [
            subtest(as_keywords, name="keywords"),
            subtest(as_dict, name="dict"),
            subtest(as_tuple, name="tuple"),
            subtest(as_list, name="list"),
        ],
    )
    def test_input_type(self, pack):
        """Training with each kind of input equals DDP's, including the gradients of the
        inputs.
        """
        ddp_model = DDP(ContainerModel().to(self.device))
        fsdp_model = FSDP(ContainerModel().to(self.device), device_id=self.device)
        before = get_full_params(fsdp_model)
        expected = self._train(ddp_model, pack)
        found = self._train(fsdp_model, pack)
        self.assertEqual(found, expected, "gradients of the inputs")
        after = get_full_params(fsdp_model)
        self.assertEqual(after, list(ddp_model.parameters()))
        self.assertNotEqual(after, before)


instantiate_parametrized_tests(TestInput)

if __name__ == "__main__":
    run_tests()
