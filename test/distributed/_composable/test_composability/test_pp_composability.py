# Owner(s): ["oncall: distributed"]
"""Pipelines whose stages are sharded or replicated over several ranks: every stage
learns what the whole model does on the rows of all ranks.
"""

import copy
import itertools
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_devtype
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH, ROWS, LAYERS, STEPS = 6, 8, 4, 3
SCHEDULES = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
# Under DDP other schedules end in an internal assertion of its reducer, in the second
# step: it counts a backward that the pipeline did not prepare (torch 2.13).
TRAINED = [
    *itertools.product(("reshard", "keep", "replicate"), SCHEDULES),
    ("DDP", Schedule1F1B),
]


def square(output, target):
    return nn.functional.mse_loss(output, target)


class TestPipelineComposability(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _layer(self, number):
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(self.device)

    def _rows(self, step, replica):
        generator = torch.Generator().manual_seed(100 * step + replica)
        rows = torch.randn(2, ROWS, WIDTH, generator=generator)
        return rows.to(self.device)

    def _sharded(self, module, mesh, kind):
        if kind == "replicate":
            for layer in module:
                replicate(layer, mesh=mesh["dp"])
            return replicate(module, mesh=mesh["dp"])
        if kind == "DDP":
            index = self.device.index
            device_ids = None if index is None else [index]
            return DDP(
                module, device_ids=device_ids, process_group=mesh["dp"].get_group()
            )
        for layer in module:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=kind == "reshard")
        return fully_shard(module, mesh=mesh["dp"])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("kind,schedule", TRAINED)
    def test_training_parity(self, kind, schedule):
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("pp", "dp"))
        here, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
        number = 4 if schedule is ScheduleInterleaved1F1B else 2
        reference = nn.Sequential(*(self._layer(index) for index in range(LAYERS)))
        model = copy.deepcopy(reference)
        each, stages = LAYERS // number, {}
        for stage in range(here, number, 2):
            part = nn.Sequential(*model[stage * each : (stage + 1) * each])
            part = self._sharded(part, mesh, kind)
            stages[stage] = PipelineStage(part, stage, number, self.device, group=group)
        given = [*stages.values()]
        given = given if number > 2 else given[0]
        pipeline = schedule(given, n_microbatches=4, loss_fn=square)
        optimizers = [
            torch.optim.Adam(stage.submod.parameters(), lr=0.01)
            for stage in stages.values()
        ]
        other = torch.optim.Adam(reference.parameters(), lr=0.01)
        for step in range(STEPS):
            rows, target = self._rows(step, mesh["dp"].get_local_rank())
            losses = []
            inputs = (rows,) if here == 0 else ()
            is_last = number - 1 in stages
            pipeline.step(
                *inputs,
                target=target if is_last else None,
                losses=losses if is_last else None,
            )
            expected = []
            for replica in range(2):
                whole, wanted = self._rows(step, replica)
                expected.append(square(reference(whole), wanted))
            (sum(expected) / 2).backward()
            if is_last:
                mine = expected[mesh["dp"].get_local_rank()]
                self.assertEqual(torch.stack(losses).mean(), mine, f"loss {step}")
            for optimizer in (*optimizers, other):
                optimizer.step()
                optimizer.zero_grad()
        options = StateDictOptions(full_state_dict=True)
        for stage, made in stages.items():
            found = get_model_state_dict(made.submod, options=options)
            part = reference[stage * each : (stage + 1) * each]
            for name, value in part.state_dict().items():
                index, _, rest = name.partition(".")
                got = found[f"{int(index) % each}.{rest}"]
                self.assertEqual(got.to(value.device), value, f"{name} of {stage}")


instantiate_parametrized_tests(TestPipelineComposability)

if __name__ == "__main__":
    run_tests()
