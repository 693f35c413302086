"""Runs an FSDP2 test eagerly, and with each module's computation compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch.distributed.fsdp import fully_shard

from torch_ext.compat import fsdp as private
from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal._fsdp.patches import patched

__all__ = ["compile_backend", "compiled_fsdp_test", "test_compiled_fsdp"]


def compiled_fsdp_test(
    compile_compute_on_module: type | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that runs a test eagerly, then again with each sharded module
    compiled, or only those of class ``compile_compute_on_module``.

    Only calls of ``fully_shard`` as a global of the test's module are compiled; a test
    without that global runs twice as it is. The global and the compiler's settings are
    restored afterwards, even if the test raises.
    """

    def decorator(func: Callable[..., Any]) -> Callable[..., None]:
        @wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            func(*args, **kwargs)
            with _compiling(func, compile_compute_on_module):
                func(*args, **kwargs)

        return wrapper

    return decorator


test_compiled_fsdp = compiled_fsdp_test
# pytest would collect this as a test in every file that imports it.
compiled_fsdp_test.__test__ = False  # type: ignore[attr-defined]


@contextmanager
def _compiling(func: Callable[..., Any], only: type | None) -> Iterator[None]:
    dynamo = private.dynamo_config

    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = fully_shard(module, *args, **kwargs)
        if only is None or isinstance(module, only):
            module.compile(backend=compile_backend())
        return sharded

    with ExitStack() as stack:
        if fully_shard.__name__ in func.__globals__:
            stack.enter_context(patched(func.__globals__, fully_shard.__name__, shard))
        # The compiler would fork its workers from a rank that has threads.
        stack.enter_context(patched(private.inductor_config, "compile_threads", 1))
        if hasattr(dynamo, "skip_fsdp_hooks"):
            stack.enter_context(patched(dynamo, "skip_fsdp_hooks", True))
        yield


def compile_backend() -> str:
    """Return ``inductor`` if it supports the device under test (GPUs need Triton), else
    ``aot_eager``, which runs the same graphs op by op.
    """
    kind = device.get_devtype().type
    if not device.is_accelerator():
        supported = True
    elif private.is_gpu(kind):
        supported = private.has_triton()
    else:
        private.init_backend_registration()
        supported = private.get_scheduling_for_device(kind) is not None
    return "inductor" if supported else "aot_eager"
