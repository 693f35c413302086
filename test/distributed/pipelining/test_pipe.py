# Owner(s): ["oncall: distributed"]
"""Models that are traced and cut into stages: together the stages compute, hold and
learn what the whole model does.
"""

import collections
import copy
import itertools
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.pipelining import SplitPoint, pipe_split, pipeline
from torch.distributed.pipelining._IR import PipeSequential

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH = 4


class Blocks(nn.Module):
    """Three layers and what makes cutting hard: a value that skips a stage, a weight
    that two stages use, buffers that are saved and not, a weight of the root.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)

    def forward(self, x, factor=None, *, bias):
        first = torch.tanh(self.layers[0](x + bias)) @ self.shared
        pipe_split()
        y = self.layers[1](first) * self.scale + self.shift
        pipe_split()
        y = torch.tanh(self.layers[2](y) @ self.shared) + self.hidden + first
        return y * torch.full((WIDTH,), 0.5, device=y.device)


def first_of(output):
    """Return the tensor that a traced module hands on, alone or in a sequence."""
    return output if isinstance(output, torch.Tensor) else output[0]


class PipeTests(TestCase):
    def _inputs(self):
        torch.manual_seed(1)
        return torch.randn(2, 3, WIDTH).unbind()

    def test_stages_compute_and_hold_the_model(self):
        model, (x, bias) = Blocks(), self._inputs()
        pipe = pipeline(model, (x,), {"bias": bias})
        for one, other in ((x, bias), (bias, x)):
            whole = model(one, bias=other)
            self.assertEqual(first_of(pipe(one, bias=other)), whole)
        stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
        names = [
            ["layers.0.bias", "layers.0.weight", "shared"],
            ["layers.1.bias", "layers.1.weight", "scale", "shift"],
            ["hidden", "layers.2.bias", "layers.2.weight", "shared"],
        ]
        buffers, parameters = (
            dict(x) for x in (model.named_buffers(), model.named_parameters())
        )
        for stage, wanted in zip(stages, names, strict=True):
            found = dict(stage.named_buffers()), dict(stage.named_parameters())
            held = [{n: x[n] for n in wanted if n in x} for x in (buffers, parameters)]
            self.assertEqual([*found], held)
        places = [dict.fromkeys(("submod_pp_0", "submod_pp_2"), "shared")]
        self.assertEqual(pipe.replicated_params, places, "parameters of two stages")
        self.assertIsNot(stages[0].shared, stages[2].shared)
        # The shares of a weight's gradient that stages have add up to the whole.
        whole.square().sum().backward()
        first = first_of(stages[0](bias, bias=x))
        last = first_of(stages[2](first_of(stages[1](first)), first))
        self.assertEqual(last, whole, "one stage after another")
        last.square().sum().backward()
        sums = collections.Counter()
        for name, each in itertools.chain(
            *(each.named_parameters() for each in stages)
        ):
            sums[name] = sums[name] + each.grad
        grads = {name: each.grad for name, each in parameters.items() if name in sums}
        self.assertEqual(dict(sums), grads)
        for wrong in (-1, 3):
            with self.assertRaisesRegex(ValueError, f"Invalid stage index {wrong}"):
                pipe.get_stage_module(wrong)
        with self.assertRaisesRegex(RuntimeError, "invoke the Pipe object"):
            pipe.split_gm(x)
        self.assertIn("submod_pp_1", str(pipe))

    def test_points_of_a_cut(self):
        """Before or after submodules, by a policy, between those of a sequence."""
        (x, _), layers = self._inputs(), [nn.Linear(WIDTH, WIDTH) for _ in range(4)]

        def made():
            inner = nn.Sequential(*copy.deepcopy(layers[1:3]))
            return nn.Sequential(
                copy.deepcopy(layers[0]), inner, copy.deepcopy(layers[3])
            )

        def policy(traced):
            *_, last = (n for n in traced.graph.nodes if n.op == "call_function")
            with traced.graph.inserting_before(last):
                traced.graph.call_function(torch.ops.pippy._pipe_split.default)
            return traced

        begin, end = SplitPoint.BEGINNING, SplitPoint.END
        cuts = (
            ({"split_spec": {"1.1": begin}}, "0 1.0|1.1 2"),
            ({"split_spec": {"1": begin, "2": begin}}, "0|1.0 1.1|2"),
            ({"split_spec": {"0": end, "1.0": end}}, "0|1.0|1.1 2"),
            ({"split_policy": policy}, "0 1.0 1.1|2"),
            ({}, "0 1.0 1.1 2"),
        )
        expected = made()(x)
        for options, names in cuts:
            pipe = pipeline(made(), (x,), **options)
            found = [
                " ".join(sorted({n.rpartition(".")[0] for n in stage.state_dict()}))
                for stage in map(pipe.get_stage_module, range(pipe.num_stages))
            ]
            self.assertEqual("|".join(found), names)
            self.assertEqual(first_of(pipe(x)), expected, names)
        pipe = pipeline(PipeSequential.from_sequential(made()), (x,))
        self.assertEqual((pipe.num_stages, first_of(pipe(x))), (3, expected))
        both = {"split_spec": {"1.1": begin}, "split_policy": policy}
        for options, kind, text in (
            (both, ValueError, "only one"),
            ({"split_spec": {"7.1": begin}}, AttributeError, "nonexistent module 7"),
            ({"split_spec": {"1": "middle"}}, ValueError, "Unknown split point"),
        ):
            with self.assertRaisesRegex(kind, text):
                pipeline(made(), (x,), **options)


if __name__ == "__main__":
    run_tests()
