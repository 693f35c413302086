# Owner(s): ["oncall: distributed"]

"""A pickler that sends shared memory by handle, so that workers on one machine share
parameters.
"""

import contextlib
import copyreg

import torch
import torch.multiprocessing.reductions as reductions
from torch import multiprocessing, nn
from torch.distributed import rpc
from torch.distributed.rpc.api import _use_rpc_pickler
from torch.distributed.rpc.internal import _InternalRPCPickler

from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.dist_utils import dist_init
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)
from torch_ext.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E501
    TensorPipeRpcAgentTestFixture,
)
from torch_ext.testing._internal.distributed.rpc_utils import generate_tests


@contextlib.contextmanager
def fs_sharing():
    """Share memory through files, which any process can open; descriptors need a common
    parent.
    """
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)


class ShareMemoryRPCPickler(_InternalRPCPickler):
    def __init__(self):
        super().__init__()
        self._dispatch_table = copyreg.dispatch_table.copy()
        storages = dict.fromkeys(torch._storage_classes, reductions.reduce_storage)
        tensors = dict.fromkeys(
            [*torch._tensor_classes, torch.Tensor, nn.Parameter],
            reductions.reduce_tensor,
        )
        self._dispatch_table.update(storages | tensors)


def fill_parameters(module, value):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


class ShareMemoryTest(RpcAgentTestFixture):
    @property
    def world_size(self):
        return 2

    def _filled_by_the_peer(self):
        """Have the other worker fill the parameters of a module in shared memory, and
        return them here.
        """
        module = nn.Linear(2, 3)
        module.share_memory()
        fill_parameters(module, 1.0)
        rpc.remote(self.peer(), fill_parameters, args=(module, 7.0)).to_here()
        return list(module.parameters())

    @dist_init
    def test_shared_parameters_are_the_same_memory_on_both_workers(self):
        with fs_sharing(), _use_rpc_pickler(ShareMemoryRPCPickler()):
            for parameter in self._filled_by_the_peer():
                self.assertEqual(parameter, torch.full_like(parameter, 7.0))

    @dist_init
    def test_default_pickler_sends_a_copy_of_shared_parameters(self):
        for parameter in self._filled_by_the_peer():
            self.assertEqual(parameter, torch.full_like(parameter, 1.0))


globals().update(
    generate_tests(
        "TensorPipe", TensorPipeRpcAgentTestFixture, [ShareMemoryTest], __name__
    )
)

if __name__ == "__main__":
    run_tests()
