"""Registers the device with torch: its name, module, tensor methods and process group backend. Runs once, on import."""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys

import torch
from torch.utils import backend_registration

from torch_ext import machine_memory
from torch_ext.sim import build
from torch_ext.sim._name import IS_CUDA, NAME

_NATIVE = "torch_ext.sim._native"


def register() -> None:
    """Register everything. Calling it again does nothing.

    Raises:
        RuntimeError: another package has taken torch's PrivateUse1 device.
        BuildError: the native half could not be built.
    """
    if _NATIVE in sys.modules:
        return
    # Build before claiming the name: a failed build must leave the process unchanged.
    library = str(build.ensure_built(verbose=True))
    if not IS_CUDA:
        _claim_name()
    _load_native(library)
    from torch_ext.sim import (
        _attention,
        _by_name,
        _collectives,
        _comm,
        _dynamo,
        _module,
        _native,
        _rpc,
        _sharing,
        _symmetric_memory,
        races,
    )

    atexit.register(_native.before_finalization)  # first of ours, so that it runs last
    _count_memory()
    if not IS_CUDA:
        torch._register_device_module(NAME, _module)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    _collectives.register()
    _comm.register()
    _dynamo.register()
    _rpc.register()
    _attention.register()
    _by_name.register()
    _sharing.register()
    _symmetric_memory.register()
    races.check_program()


def _count_memory() -> None:
    from torch_ext.sim import _native

    file = machine_memory.share()
    if file:
        page = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        _native.use_memory_page(page)
        os.close(page)


def _claim_name() -> None:
    # Rename before any device call: torch caches the name in messages, parsers and tables.
    try:
        backend_registration.rename_privateuse1_backend(NAME)
    except RuntimeError as error:
        taken = torch._C._get_privateuse1_backend_name()
        raise RuntimeError(
            f"torch's PrivateUse1 device is already named {taken!r}, and a process can have only one such device. "
            f"Run on {taken!r}, or do not import the package that registers it."
        ) from error


def _load_native(library: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader(_NATIVE, library)
    spec = importlib.util.spec_from_file_location(_NATIVE, library, loader=loader)
    if spec is None:
        raise ImportError(f"cannot load {library}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NATIVE] = module
    loader.exec_module(module)
