# Owner(s): ["oncall: distributed"]
"""The tracer that notes in which order a forward uses modules and parameters."""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp._trace_utils import TracingConfig, _ExecOrderTracer

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Used(nn.Module):
    """Uses its weights in functions, its layers in another order than they are
    registered, and one of them twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.other = nn.Parameter(torch.randn(3, 3))
        self.unused = nn.Parameter(torch.randn(3, 3))
        self.late = nn.Linear(3, 3)
        self.act = nn.ReLU()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        z = self.act(self.block(torch.matmul(x, self.other)))
        z = z + torch.addmm(self.weight, z, self.other)
        return self.late(z).mul(self.weight) if more else self.block(z)


class TestSymbolicTracing(TestCase):
    def _traced(self, model: Used, more: bool):
        """Return what the tracer noted, and the traced module."""
        config = TracingConfig(concrete_args={"more": more})
        tracer, noted = config.tracer, _ExecOrderTracer()
        before = tracer.call_module, tracer.create_proxy
        with noted.patch_tracer(tracer=tracer, root_module=model):
            self.assertNotEqual((tracer.call_module, tracer.create_proxy), before)
            graph = tracer.trace(model, config.concrete_args)
        self.assertEqual((tracer.call_module, tracer.create_proxy), before)
        return noted.exec_info, torch.fx.GraphModule(model, graph)

    def test_symbolic_tracing_outputs(self):
        model = Used()
        modules = {module: name or "root" for name, module in model.named_modules()}
        names = {param: name for name, param in model.named_parameters()}
        for more in (True, False):
            info, traced = self._traced(model, more)
            rows = torch.randn(2 + 1, 3)
            self.assertEqual(traced(rows, more), model(rows, more))
            order = ["root", "block", "block.0", "block.1", "act"]
            order += ["late"] if more else ["block", "block.0", "block.1"]
            self.assertEqual(
                [modules[each] for each in info.module_forward_order], order
            )
            self.assertEqual(info.curr_module, model)
            params = ["other", "block.0.weight", "block.0.bias", "block.1.weight"]
            params += ["weight", *(["late.weight", "late.bias"] if more else [])]
            found = [names[each] for each in info.param_forward_order]
            self.assertEqual(found, params, "parameters by their first use")
            self.assertEqual({names[each] for each in info.visited_params}, {*params})
            used = {
                modules[module]: [
                    f"{modules[each.module]}: {', '.join(dict(each.named_params))}"
                    for each in uses
                ]
                for module, uses in info.module_to_param_usage_infos.items()
            }
            block = "block: 0.weight, 0.bias, 1.weight"
            start = ["root: other", block, "root: weight, other"]
            end = ["late: weight, bias", "root: weight"] if more else [block]
            self.assertEqual(used["root"], [*start, *end])
            layers = ["block.0: weight, bias", "block.1: weight"]
            self.assertEqual(used["block"], layers)
            self.assertEqual(used["block.0"], layers[:1])
            self.assertEqual([used["block.1"], used["act"]], [layers[1:], []])

    def test_tracer_is_restored_after_an_exception(self):
        tracer, noted = torch.fx.Tracer(), _ExecOrderTracer()
        before = tracer.call_module, tracer.create_proxy
        with self.assertRaises(KeyError), noted.patch_tracer(tracer, nn.ReLU()):
            raise KeyError
        self.assertEqual((tracer.call_module, tracer.create_proxy), before)
        first, second = TracingConfig(), TracingConfig()
        self.assertIsNot(first.tracer, second.tracer)
        self.assertIs(type(first.tracer), torch.fx.Tracer)
        self.assertIsNone(first.concrete_args)


if __name__ == "__main__":
    run_tests()
