"""Which module of a program launched a work: its forward, its backward, or the step of an optimizer."""

from __future__ import annotations

import re
import warnings
from bisect import bisect
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torch_ext.sim._patches import wrap

_WRAPPERS = re.compile(r"\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


class Modules:
    """Follows the modules and optimizers of a program from here on, in the order in which they launch work."""

    def __init__(self, launched: Callable[[], int]) -> None:
        """Begin. ``launched`` returns the number of works so far."""
        self.steps: list[int] = []  # how many works there were when an optimizer had stepped
        self._launched = launched
        self._starts, self._names = [0], [""]  # of each stretch of works
        self._running: list[str] = []
        self._paths: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        warnings.filterwarnings("ignore", message=".*there are global hooks on modules")  # of torch.compile
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._mark(type(optimizer).__name__))
        register_optimizer_step_post_hook(lambda *_: self._stepped())

        @wrap(torch.autograd, "_engine_run_backward")
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._mark(self._running[-1] if self._running else "")

    def of(self, work: int) -> str:
        """Return the module or optimizer that launched the work of this number; empty if none did."""
        return self._names[bisect(self._starts, work) - 1]

    def _mark(self, name: str) -> None:
        self._starts.append(self._launched())
        self._names.append(name)

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in self._paths:
            for path, each in module.named_modules():
                self._paths.setdefault(each, _WRAPPERS.sub("", f"{path}.")[:-1] or type(module).__name__)
        self._running.append(self._paths[module])
        self._mark(self._running[-1])

    def _leave(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._running:
            return
        name = f"{self._running.pop()} backward"
        self._mark(self._running[-1] if self._running else "")
        for leaf in tree_leaves(output):
            # The innermost module of several that return a tensor is the first to leave.
            node: Any = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
            if node is not None and node.metadata.setdefault(self, name) is name:
                leaf.register_hook(partial(self._begin_backward, name))

    def _begin_backward(self, name: str, _gradient: torch.Tensor) -> None:
        self._mark(name)

    def _stepped(self) -> None:
        self._mark("")
        self.steps.append(self._launched())
