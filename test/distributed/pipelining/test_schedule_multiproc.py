# Owner(s): ["oncall: distributed"]
"""Pipeline schedules on four ranks: losses, outputs and gradients of a model that is
cut into stages equal those of the whole model, microbatch by microbatch.
"""

import copy
import os
import sys
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining._utils import PipeliningMetadataError
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _ScheduleForwardOnly,
)
from torch.distributed.pipelining.stage import build_stage
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_devtype, world_mesh
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

SINGLE = (ScheduleGPipe, Schedule1F1B)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
LOOPED = (
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
OPTIONS = {
    "kind": (*SINGLE, *LOOPED, *V_SHAPED),
    "microbatches": (8, 12),
    "pairs": (False, True),  # of tensors between stages
    "scale_grads": (True, False),
    "static": (False, True),  # shapes are given, or found in the first step
    "frozen": (False, True),  # the first stage has no gradients
    "keyword": (False, True),
    "defers": (False, True),  # receives
    "shards": (False, True),  # stages, over their one rank
}
WIDTH, ROWS = 6, 2


def works(row):
    """Whether torch 2.13 trains a row, or the part of one that there is yet, as the
    whole model. Without a word, schedules that split backward lose the gradients of a
    stage after a frozen one, and deferred receives get another message than was meant
    where forward and backward send in one direction. Schedules that split backward
    raise for a sharded stage that hands on its input.
    """
    splits = (ScheduleInterleavedZeroBubble, *V_SHAPED)
    kind = row.get("kind")
    if kind in SINGLE and row.get("defers"):  # have no such option
        return False
    return not (
        (row.get("frozen") and kind in splits)
        or (row.get("defers") and kind in V_SHAPED)
        or (row.get("shards") and kind in splits)
    )


class Stage(nn.Module):
    """A residual layer of width 6. With ``pairs``, a stage also hands on its input."""

    def __init__(self, pairs: bool, is_last: bool) -> None:
        super().__init__()
        self.layer, self.pairs, self.is_last = nn.Linear(WIDTH, WIDTH), pairs, is_last

    def forward(self, x, before=None, *, factor=None):
        y = 0.5 * x + torch.tanh(self.layer(x))
        if before is not None:
            y = y + 0.3 * before
        if factor is not None:
            y = y * (1 + 0.1 * torch.tanh(factor))
        return (y, x) if self.pairs and not self.is_last else y


def loss_of(output, target):
    return (output - target).square().mean()


class ScheduleTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _stage_indices(self, kind, number):
        if kind in SINGLE:
            return [self.rank]
        if kind in V_SHAPED:
            return [self.rank, number - 1 - self.rank]
        return list(range(self.rank, number, self.world_size))

    def _layers(self, number, pairs):
        torch.manual_seed(0)
        layers = [Stage(pairs, index == number - 1) for index in range(number)]
        return nn.ModuleList(layers).to(self.device)

    def _batch(self, step, microbatches):
        """Return the same inputs, factors and targets on all ranks."""
        generator = torch.Generator().manual_seed(step)
        shape = microbatches * ROWS, WIDTH
        inputs, factors, targets = torch.randn(3, *shape, generator=generator)
        return [each.to(self.device) for each in (inputs, factors, targets)]

    def _whole(self, layers, x, **keywords):
        values = (x,)
        for layer in layers if isinstance(layers, nn.ModuleList) else [layers]:
            values = layer(*values, **keywords)
            values = values if isinstance(values, tuple) else (values,)
        return values[0]

    def _reference(self, layers, batch, row):
        """Return the outputs and losses of the microbatches; accumulate gradients."""
        outputs, losses = [], []
        chunks = zip(*(each.chunk(row["microbatches"]) for each in batch), strict=True)
        for x, factor, target in chunks:
            keywords = {"factor": factor} if row["keyword"] else {}
            outputs.append(self._whole(layers, x, **keywords))
            losses.append(loss_of(outputs[-1], target))
            losses[-1].backward()
        for each in layers.parameters() if row["scale_grads"] else ():
            if each.grad is not None:
                each.grad /= row["microbatches"]
        return torch.cat(outputs).detach(), torch.stack(losses).detach()

    def _schedule(self, layers, row, group=None):
        kind, number = row["kind"], len(layers)
        stages = []
        for index in self._stage_indices(kind, number):
            shapes = {}
            if row["shards"]:
                fully_shard(layers[index], mesh=world_mesh(4, 1)["shard"])
            if row["static"]:
                some = torch.empty(ROWS, WIDTH, device=self.device)
                first = torch.empty_like(some)
                pair = (some.requires_grad_(), torch.empty_like(some).requires_grad_())
                inner = pair if row["pairs"] else (some.requires_grad_(),)
                if index == 1 and row["frozen"]:
                    shapes = {}  # which gradients there are is found out
                else:
                    shapes["input_args"] = (first,) if index == 0 else inner
                    shapes["output_args"] = inner[: 1 if index == number - 1 else 2]
            stages.append(
                PipelineStage(
                    layers[index], index, number, self.device, group=group, **shapes
                )
            )
        arguments = {"loss_fn": loss_of, "scale_grads": row["scale_grads"]}
        one = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        if row["defers"]:
            arguments["defer_pp_recv"] = True
        return kind(one, row["microbatches"], **arguments), stages

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("number", range(len(pairwise(OPTIONS, works))))
    def test_training_equals_that_of_the_whole_model(self, number):
        row = pairwise(OPTIONS, works)[number]
        number = self.world_size * (1 if row["kind"] in SINGLE else 2)
        layers = self._layers(number, row["pairs"])
        if row["frozen"]:
            layers[0].requires_grad_(False)
        reference = copy.deepcopy(layers)
        schedule, stages = self._schedule(layers, row)
        self._train(schedule, stages, layers, reference, row)

    def _train(self, schedule, stages, layers, reference, row):
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (layers, reference)
        ]
        for step in range(3):
            where = f"step {step} of {row}"
            batch = self._batch(step, row["microbatches"])
            outputs, losses = self._reference(reference, batch, row)
            found_losses = ["of an earlier step"]
            found = self._step(schedule, stages, batch, row, found_losses)
            if any(each.is_last for each in stages):
                self.assertEqual(found, outputs, f"output of {where}")
                found_losses = torch.stack(found_losses)
                self.assertEqual(found_losses, losses, f"losses of {where}")
            else:
                self.assertIsNone(found, f"output of {where}")
            self._check_gradients(stages, reference, where)
            for each in optimizers:
                each.step()
                each.zero_grad()
            if step == 1 and row["kind"] not in V_SHAPED:
                self._check_evaluation(schedule, stages, reference, batch, row)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_plan_of_a_file(self):
        """A plan without messages runs in lockstep, each step with its messages. On
        the host: with NCCL, torch 2.13 sends some by one communicator and receives
        them by another.
        """
        host, group = torch.get_default_device(), dist.new_group(backend="cpu:gloo")
        path = os.path.join(self.shared_folder(), "plan.csv")
        row = dict.fromkeys(OPTIONS, False) | {"microbatches": 8, "keyword": True}
        row |= {"kind": PipelineScheduleMulti, "scale_grads": True}
        on_host = mock.patch.object(type(self), "device", host)
        on_host.start()
        self.addCleanup(on_host.stop)
        for kind in LOOPED:
            layers = self._layers(8, False)
            reference = copy.deepcopy(layers)
            schedule, stages = self._schedule(layers, row, group)
            if self.rank == 0:
                kind(stages, 8)._dump_csv(path, format="compute_only")
            dist.barrier()
            schedule._load_csv(path)
            self._train(schedule, stages, layers, reference, row)
            schedule._dump_csv(f"{path}{self.rank}")
            with open(path) as one, open(f"{path}{self.rank}") as other:
                self.assertEqual(one.read(), other.read())

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_batch_along_another_dimension(self):
        """Arguments are cut and the output is joined as asked."""
        generator = torch.Generator().manual_seed(0)
        x, factor = torch.randn(2, 3, 8, WIDTH, generator=generator).to(self.device)
        specs = (
            TensorChunkSpec.from_tuple((1,)),
            TensorChunkSpec.from_dict({"factor": 1}),
        )
        options = {"args_chunk_spec": specs[0], "kwargs_chunk_spec": specs[1]}
        options["output_merge_spec"] = TensorChunkSpec(1)
        layers, args = self._layers(4, False), [x][self.rank :]
        for kind in (_ScheduleForwardOnly, *SINGLE):
            stage = PipelineStage(layers[self.rank], self.rank, 4, self.device)
            schedule = kind(stage, 8, **options)
            for run in (schedule.step, schedule.eval):
                with torch.no_grad():
                    found = run(*args, factor=factor)
                    expected = self._whole(layers, x, factor=factor)
                self.assertEqual(found, expected if self.rank == 3 else None, f"{kind}")
            if kind in SINGLE:
                found = schedule.step(*args, return_outputs=False, factor=factor)
                self.assertEqual((found, stage.output_chunks), (None, []), f"{kind}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_stages_of_several_ranks_exchange_parts(self):
        """Tensors between stages keep their placements, forth and back, and each rank
        sends its part.
        """
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("pp", "tp"))
        tp, group, index = mesh["tp"], mesh["pp"].get_group(), self.rank // 2
        torch.manual_seed(0)
        whole = [torch.randn(WIDTH, WIDTH, device=self.device) for _ in range(2)]
        x, _, target = self._batch(0, 4)

        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                parts = distribute_tensor(whole[index], tp, [Shard(1 - index)])
                self.weight = nn.Parameter(parts)

            def forward(self, x):
                y = (x @ self.weight).tanh() if index == 0 else x @ self.weight
                return y.redistribute(tp, [Replicate()]) if index else y

        reference = [each.clone().requires_grad_() for each in whole]
        expected = (x @ reference[0]).tanh() @ reference[1]
        loss_of(expected, target).backward()
        stage = PipelineStage(
            Part(), index, 2, self.device, group=group, get_mesh=lambda *_: tp
        )
        args = (distribute_tensor(x, tp, [Replicate()]),)[index:]
        goal = distribute_tensor(target, tp, [Replicate()]) if index else None
        for kind in SINGLE:
            stage.submod.zero_grad()
            found = kind(stage, 4, loss_of).step(*args, target=goal)
            if index:
                self.assertEqual(found.full_tensor(), expected, kind.__name__)
            grad = stage.submod.weight.grad
            self.assertEqual(grad.placements, (Shard(1 - index),))
            self.assertEqual(grad.full_tensor(), reference[index].grad, kind.__name__)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_traced_model(self):
        """``pipeline`` cuts a model at the given points. Stages keep the names."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
                self.register_buffer("shift", torch.full((WIDTH,), 0.5))

            def forward(self, x):
                for block in self.blocks:
                    x = torch.tanh(block(x)) + self.shift
                return x

        model = Model().to(self.device)
        reference = copy.deepcopy(model)
        cuts = {"blocks.1": SplitPoint.BEGINNING}
        index, (group, _) = self.rank % 2, dist.new_subgroups(group_size=2)
        some = torch.zeros(ROWS, WIDTH, device=self.device)
        pipe = pipeline(model, (some,), split_spec=cuts)
        module, info = pipe.get_stage_module(index), pipe.info()
        stage = build_stage(module, index, info, self.device, group)
        self.assertEqual((stage.pipe_info, stage.group), (info, group))
        self.assertEqual(stage.name, f"submod_pp_{index}")
        names = [f"blocks.{index}.bias", f"blocks.{index}.weight"]
        found = sorted(name for name, _ in stage.submod.named_parameters())
        self.assertEqual(found, names, "parameters of the stage")
        row = {"microbatches": 4, "scale_grads": True, "keyword": False}
        for kind in SINGLE:
            schedule = kind(stage, 4, loss_of)
            for step in range(2):
                reference.zero_grad()
                stage.submod.zero_grad()
                batch, losses = self._batch(step, 4), []
                expected = self._reference(reference, batch, row)
                inputs, goal = [batch[0]][index:], batch[2] if index else None
                output = schedule.step(*inputs, target=goal, losses=losses)
                where = f"{kind.__name__}, step {step}"
                if index:
                    self.assertEqual((output, torch.stack(losses)), expected, where)
                for name, each in stage.submod.named_parameters():
                    wanted = reference.get_parameter(name).grad
                    self.assertEqual(each.grad, wanted, f"{name}, {where}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_traced_values_that_skip_stages(self):
        """Reach each stage that uses them. Training with them is refused. On the host:
        to begin with, torch 2.13 receives two messages at once into one tensor.
        """

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

            def forward(self, x):
                first, second = torch.tanh(self.blocks[0](x)), x * 2
                pipe_split()
                y = self.blocks[1](first) + second
                pipe_split()
                y = self.blocks[2](y) * first
                pipe_split()
                return self.blocks[3](y) + first - second

        host, group = torch.get_default_device(), dist.new_group(backend="cpu:gloo")
        model = Model().to(host)
        reference = copy.deepcopy(model)
        pipe = pipeline(model, (torch.zeros(ROWS, WIDTH, device=host),))
        stage = pipe.build_stage(self.rank, host, group)
        schedule = _ScheduleForwardOnly(stage, 4)
        for step in range(2):
            x = self._batch(step, 4)[0].to(host)
            with torch.no_grad():
                found, expected = schedule.step(*[x][self.rank :]), reference(x)
            self.assertEqual(found, expected if self.rank == 3 else None)
        stage.has_backward = True
        stage._prepare_forward_infra(4, (x[:ROWS],) if self.rank == 0 else ())
        if self.rank == 0:
            text = "Backward of skip connections not supported"
            with self.assertRaisesRegex(PipeliningMetadataError, text):
                stage._prepare_backward_infra(4)
            return
        stage._prepare_backward_infra(4)
        infos = stage.grad_recv_info[3]
        source = None if self.rank == 3 else self.rank + 1
        found = [each.source for each in infos if each.buffer is not None]
        self.assertEqual(found, [source] if source else [])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_steps_that_cannot_work_are_refused(self):
        row = {"kind": Schedule1F1B, "microbatches": 8, "scale_grads": True}
        row |= dict.fromkeys(
            ("pairs", "static", "frozen", "keyword", "defers", "shards"), False
        )
        schedule, stages = self._schedule(self._layers(4, False), row)
        batch = self._batch(0, 8)
        with torch.no_grad(), self.assertRaisesRegex(RuntimeError, "call eval"):
            self._step(schedule, stages, batch, row, None)
        with self.assertRaisesRegex(TypeError, "losses must be a list"):
            schedule._step_microbatches([()] * 8, losses=())
        with self.assertRaisesRegex(ValueError, "Expecting 8 arg_mbs but got 7"):
            schedule._step_microbatches([()] * 7)
        for size in (0, 2):
            with self.assertRaisesRegex(ValueError, "can.?not be|out of range|must be"):
                PipelineStage(nn.Identity(), size, size and 2, self.device)

    def _step(self, schedule, stages, batch, row, losses, run="step"):
        x, factor, target = batch
        is_first, is_last = (
            any(getattr(each, name) for each in stages)
            for name in ("is_first", "is_last")
        )
        return getattr(schedule, run)(
            *([x] if is_first else []),
            target=target if is_last else None,
            losses=losses,
            **({"factor": factor} if row["keyword"] else {}),
        )

    def _check_gradients(self, stages, reference, where):
        for stage in stages:
            expected = dict(reference[stage.stage_index].named_parameters())
            for name, each in stage.submod.named_parameters():
                what = f"gradient of {name} in stage {stage.stage_index}, {where}"
                grad = each.grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                self.assertEqual(grad, expected[name].grad, what)

    def _check_evaluation(self, schedule, stages, reference, batch, row):
        """``eval`` returns the output and trains nothing."""
        with torch.no_grad():
            found = self._step(schedule, stages, batch, row, None, "eval")
            keywords = {"factor": batch[1]} if row["keyword"] else {}
            expected = self._whole(reference, batch[0], **keywords)
        if any(each.is_last for each in stages):
            self.assertEqual(found, expected, f"evaluation of {row}")
        for stage in stages:
            for each in stage.submod.parameters():
                self.assertTrue(
                    each.grad is None or not each.grad.any(), f"gradient, {row}"
                )


instantiate_parametrized_tests(ScheduleTest)

if __name__ == "__main__":
    run_tests()
