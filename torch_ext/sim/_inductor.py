"""Inductor's view of the device: the kernels that it writes in C++ for the host serve ``sim`` tensors as they are.

Importing this module loads Inductor; ``torch.sim`` does so only when Inductor looks its classes up.

Note [Generated kernels]
~~~~~~~~~~~~~~~~~~~~~~~~
Memory of the device is memory of the host and kernels run to their end before their launch returns (Note [Streams of an
eager device]), so a generated kernel needs neither a stream nor a guard. Two things differ from the host: results are
allocated on the device of the graph, with its index, whichever device is current; and ``run_generated`` calls the
kernel and reports its reads and writes (Note [Kernels] in csrc/kernel.h).

The race check gets the accesses of generated kernels to host memory, in all graphs: :func:`_report_host_accesses`.

Note [C++ for more than the CPU]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In two places Inductor infers the generated language from the device type, and assumes Triton for an unknown type: the
decision whether loops may be reindexed after fusion, which C++ does not support, and the types of intermediate values.
:func:`_generate_cpp` makes both answer for ``sim`` as for the CPU.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.compiler.config
from torch._inductor import codecache, config, lowering, scheduler, utils
from torch._inductor.codegen import common
from torch._inductor.codegen.common import DeviceOpOverrides, register_device_op_overrides
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen
from torch._inductor.kernel.flex.flex_cpu import lower_cpu
from torch._inductor.virtualized import V

from torch_ext.sim import _native
from torch_ext.sim._name import IS_CUDA, NAME
from torch_ext.sim._patches import wrap

Scheduling = CppScheduling
_RUN = "run_generated"


class _Calls(PythonWrapperCodegen):
    """The Python around the kernels: allocations and calls."""

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, device: Any = None, triton: bool = True, **kwargs: Any
    ) -> None:
        # Upstream refuses unknown device types.
        if device is None or device.type != NAME:
            self.writeline(self.wrap_kernel_call(kernel_name, call_args))
            return
        arguments = [kernel_name, repr(kernel_name), repr(_roles(kwargs["arg_types"])), *call_args]
        self.writeline(self.wrap_kernel_call(_RUN, arguments))

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline(f"from torch_ext.sim._native import {_RUN}")
        if IS_CUDA:  # builds without CUDA lack it; and its tensors are those of the graph's device, not the current one
            self.header.writeline(f"def empty_strided_{NAME}(size, stride, dtype, device):")
            self.header.writeline("    return empty_strided(size, stride, dtype=dtype, device=device)")

    def make_allocation(self, name: str, device: torch.device, *args: Any, **kwargs: Any) -> str:
        line: str = super().make_allocation(name, device, *args, **kwargs)
        if IS_CUDA:
            return re.sub(rf"(empty_strided_{NAME}\(.*, torch\.\w+)\)", rf"\1, '{device}')", line)
        return line.replace(f"device='{device.type}'", f"device='{device}'")


def _roles(types: list[str]) -> str:
    """Return a letter for each argument of a kernel with C++ types ``types``.

    >>> _roles(["float*", "const float*", "const int64_t"])
    'wrn'
    """
    return "".join("n" if not kind.endswith("*") else "r" if kind.startswith("const ") else "w" for kind in types)


class SimWrapperCodegen(_Calls):
    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None
    ) -> PythonWrapperCodegen:
        if is_subgraph:
            return _SubgraphCodegen(subgraph_name, parent_wrapper, partition_signatures)
        return SimWrapperCodegen()


class _SubgraphCodegen(_Calls, SubgraphPythonWrapperCodegen):
    """The body of a branch or a loop."""


class CppWrapperCodegen(PythonWrapperCodegen):
    """Refuses; Inductor wants a C++ wrapper for each device."""

    @staticmethod
    def create(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"torch.compile on {NAME}: the wrapper around the kernels is Python only; got "
            "torch._inductor.config.cpp_wrapper=True, or ahead-of-time compilation. Use it on cpu, or leave it False."
        )


class _Lines(DeviceOpOverrides):
    """Lines of generated Python."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"def {name}(index):\n    return torch.{NAME}.current_stream(index).stream_id\n"

    def set_device(self, device_idx: int) -> str:
        return f"torch.{NAME}.set_device({device_idx})"

    def synchronize(self) -> str:
        return f"torch.{NAME}.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        return f"torch.{NAME}.device({device_idx})"


def _generate_cpp() -> None:
    """See Note [C++ for more than the CPU]."""

    @wrap(scheduler.BaseSchedulerNode, "is_cpu")
    def is_cpu_or_sim(is_cpu: Callable[..., bool], self: Any) -> bool:
        device = self.get_device()
        return is_cpu(self) or (device is not None and device.type == NAME)

    for module in (utils, common):

        @wrap(module, "get_current_backend")
        def backend(current_backend: Callable[..., str], device_type: str | None = None) -> str:
            device_type = device_type or V.graph.get_current_device_or_throw().type
            return current_backend("cpu" if device_type == NAME else device_type)


def _lower_flex_attention() -> None:
    """Lower ``flex_attention`` by Inductor's CPU template; Inductor treats every other device as a GPU.

    That template has no backward, and returns no log-sum-exp or maxima of the scores.
    """
    flex: Any = torch.ops.higher_order.flex_attention
    lower = lowering.lowerings.get(flex)
    if lower is None:
        return

    def lower_flex_attention(
        query: Any, key: Any, value: Any, subgraph: Any, block_mask: Any, scale: Any, options: Any, *others: Any
    ) -> Any:
        if query.get_device().type != NAME:
            return lower(query, key, value, subgraph, block_mask, scale, options, *others)
        if any(user.target is operator.getitem and user.args[1] for user in V.graph.current_node.users):
            raise NotImplementedError(
                f"flex_attention on {NAME} is compiled for its output alone, as on cpu: without gradients, return_lse "
                "and return_aux. Leave torch.compile out, for this call at least, or call it under torch.no_grad()."
            )
        options = {**options, "OUTPUT_LOGSUMEXP": False}
        return lower_cpu(query, key, value, subgraph, block_mask, scale, options, *others)

    lowering.lowerings[flex] = lower_flex_attention


def _report_host_accesses() -> None:
    """Report generated kernels' accesses to host memory to the race check, also in graphs for the CPU alone."""
    cache: Any = codecache.CppPythonBindingsCodeCache
    load = cache.load_pybinding_async.__func__

    def load_and_wrap(cls: Any, argtypes: list[str], *args: Any, **kwargs: Any) -> Any:
        kernel = load(cls, argtypes, *args, **kwargs)
        return (lambda: _with_access_reports(kernel(), _roles(argtypes))) if cls is cache else kernel

    cache.load_pybinding_async = classmethod(load_and_wrap)


def _with_access_reports(kernel: Callable[..., Any], roles: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        if _native.is_checking_races():
            for role in "rw":
                used = [
                    argument
                    for argument, argument_role in zip(arguments, roles, strict=True)
                    if argument_role == role and argument.device.type == "cpu"
                ]
                _native.use_tensors("generated code", used, role == "w")
        return kernel(*arguments)

    return run


def _tag_cache() -> None:
    """Add a hash of this file to Inductor's cache key, which covers torch's sources only."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    torch.compiler.config.cache_key_tag += f"torch_ext.sim:{digest}"


def _replace_cuda_codegen() -> None:
    """Generate C++ for CUDA: torch would generate Triton code, and calls that builds without CUDA lack."""
    common.register_backend_for_device(NAME, Scheduling, SimWrapperCodegen, CppWrapperCodegen, WrapperFxCodegen)
    utils.GPU_TYPES.remove(NAME)
    config.online_softmax = False


if IS_CUDA:
    _replace_cuda_codegen()
register_device_op_overrides(NAME, _Lines())
_generate_cpp()
_lower_flex_attention()
_report_host_accesses()
_tag_cache()
