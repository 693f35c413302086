"""Functions that the RPC suites run on other workers, which find them by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from torch_ext.compat import dist_autograd
from torch_ext.testing._internal.dist_utils import worker_name


def my_name() -> str:
    """Return the name of the worker that runs this."""
    return str(rpc.get_worker_info().name)


def identity(value: Any) -> Any:
    return value


def scaled(tensor: Tensor, *, by: float = 1.0) -> Tensor:
    return tensor * by


@torch.jit.script
def scripted_double(tensor: Tensor) -> Tensor:
    return tensor + tensor


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def gradients_of(rref: rpc.RRef[Any], context_id: int) -> list[Tensor]:
    """Return the gradients of the tensor, or of the module's parameters, that this
    worker owns.
    """
    value, grads = rref.local_value(), dist_autograd.get_gradients(context_id)
    leaves = value.parameters() if isinstance(value, nn.Module) else [value]
    return [grads[leaf] for leaf in leaves]


def knows_context(context_id: int) -> bool:
    try:
        dist_autograd.retrieve_context(context_id)
    except RuntimeError:
        return False
    return True


def raise_value_error(message: str) -> NoReturn:
    raise ValueError(message)


class UnrebuildableError(Exception):
    """Cannot be rebuilt from its message alone, as torch tries on the caller's side."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def raise_unrebuildable() -> NoReturn:
    raise UnrebuildableError(7, "out of cheese")


def relay(
    function: Callable[..., Any], args: tuple[Any, ...], hops: int, world_size: int
) -> Any:
    """Call ``function`` after ``hops`` more hops around the ring of workers."""
    if hops == 0:
        return function(*args)
    rank = rpc.get_worker_info().id
    return rpc.rpc_sync(
        worker_name((rank + 1) % world_size),
        relay,
        args=(function, args, hops - 1, world_size),
    )


def add_to_rref(rref: rpc.RRef[Tensor], value: Tensor | float) -> Tensor:
    return rref.to_here() + value


class Accumulator:
    """An object with state, to be owned by one worker and used from others."""

    def __init__(self, start: float = 0) -> None:
        self.total = torch.tensor(float(start))
        self._lock = threading.Lock()

    def add(self, value: float) -> Tensor:
        with self._lock:
            self.total = self.total + value
            return self.total

    def value(self) -> Tensor:
        return self.total

    def value_behind_gate(self, timeout_s: float = 60.0) -> Any:
        return pass_gate(self.total, timeout_s)

    @classmethod
    def starting_at(cls, start: float) -> Accumulator:
        return cls(start)

    product = staticmethod(multiply)

    def __getstate__(self) -> Tensor:
        return self.total

    def __setstate__(self, total: Tensor) -> None:
        self.total, self._lock = total, threading.Lock()


# Holds remote calls back until the test lets them go on, so that no test depends on how
# long a call sleeps.
_gate = threading.Event()


def pass_gate(result: Any, timeout_s: float = 60.0) -> Any:
    """Return ``result`` once :func:`open_gate` has run on this worker.

    Raises:
        TimeoutError: it did not run within ``timeout_s`` seconds.
    """
    if not _gate.wait(timeout_s):
        raise TimeoutError(f"nobody opened the gate within {timeout_s:g} s")
    return result


def open_gate() -> None:
    _gate.set()


_arrivals: set[tuple[int, int]] = set()


def note_arrival(turn: int, rank: int) -> None:
    """Note on this worker that ``rank`` reached the barrier of ``turn``."""
    _arrivals.add((turn, rank))


def arrivals(turn: int) -> set[int]:
    """Return which ranks are noted on this worker for ``turn``."""
    return {rank for each, rank in _arrivals if each == turn}
