"""Device and backend names in text: what says CUDA or NCCL, said of the simulated accelerator. Pure, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = [
    "BACKEND",
    "DEVICE",
    "FACADE",
    "LEGACY_KINDS",
    "TENSOR_TYPES",
    "environment_as_sim",
    "text_as_sim",
    "word_as_sim",
    "words_as_sim",
]

DEVICE, BACKEND = "sim", "simccl"
FACADE = "torch_ext.cuda_as_sim.cuda"

# What tensors and storages had types for before they had a device and a dtype.
LEGACY_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
TENSOR_TYPES = tuple(f"{kind}Tensor" for kind in LEGACY_KINDS)

_WHOLE = re.compile(r"cuda(?=$|:\d+$)|(?<![\w.])nccl$")
_PAIRS = re.compile(r"\w+:\w+(,\w+:\w+)+|cuda:(nccl|gloo|mpi|ucc|fake|threaded)")
_TYPE = re.compile(rf"torch\.cuda\.({'|'.join(TENSOR_TYPES)})")
_MODULE = re.compile(r"torch\.cuda(?=(\.\w+)+$)")
# In a longer text a device is what has an index behind it or quotes around it.
_INSIDE = re.compile(r"""\bcuda(?=:(?:\d|\{|\\|\[|$))|(?<=["'])cuda(?=["'])""")
# Variables whose value is a name of CUDA's own.
_KEPT = ("CUDA", "NCCL", "TORCH_", "NVIDIA")


def word_as_sim(text: str) -> str:
    """Return a name of a device or backend as one of the simulated accelerator; any other text as it is.

    >>> word_as_sim("cuda"), word_as_sim("cuda:1"), word_as_sim("nccl"), word_as_sim("cpu:gloo,cuda:nccl")
    ('sim', 'sim:1', 'simccl', 'cpu:gloo,sim:simccl')
    >>> word_as_sim("cudart"), word_as_sim("test_cuda"), word_as_sim("cuda is fast")
    ('cudart', 'test_cuda', 'cuda is fast')
    """
    if "cuda" not in text and "nccl" not in text:
        return text
    if _PAIRS.fullmatch(text):
        pairs = (pair.partition(":") for pair in text.split(","))
        return ",".join(f"{_WHOLE.sub(_said, device)}:{_WHOLE.sub(_said, backend)}" for device, _, backend in pairs)
    return _WHOLE.sub(_said, text) if _WHOLE.match(text) else text


def _said(found: re.Match[str]) -> str:
    return BACKEND if found.group() == "nccl" else DEVICE


def text_as_sim(text: str) -> str:
    """Return a string of a program, in which devices may stand between other words.

    >>> text_as_sim("Expected all tensors on cuda:0"), text_as_sim("device(type='cuda', index=0)")
    ('Expected all tensors on sim:0', "device(type='sim', index=0)")
    >>> text_as_sim("rank:0/cuda:0"), text_as_sim("torch.cuda.is_available"), text_as_sim("uses cuda, or not")
    ('rank:0/sim:0', 'torch_ext.cuda_as_sim.cuda.is_available', 'uses cuda, or not')
    >>> text_as_sim("CUDA error: invalid device ordinal")
    'sim error: invalid device ordinal'
    >>> text_as_sim("CUDA out of memory."), text_as_sim("torch.cuda.FloatTensor")
    ('sim out of memory.', 'torch.sim.FloatTensor')
    """
    text = text.replace("CUDA error: ", f"{DEVICE} error: ").replace("CUDA out of memory", f"{DEVICE} out of memory")
    if (word := word_as_sim(text)) != text or "cuda" not in text:
        return word
    if _TYPE.fullmatch(text):
        return text.replace("cuda", DEVICE)
    if _MODULE.match(text):
        return _MODULE.sub(FACADE, text)
    return _INSIDE.sub(DEVICE, text)


def words_as_sim(words: Sequence[str]) -> list[str]:
    """Return the arguments of a program, of which some, or their values, name a device or a backend.

    >>> words_as_sim(["train.py", "--device", "cuda", "--backend=nccl", "--name=cuda-run"])
    ['train.py', '--device', 'sim', '--backend=simccl', '--name=cuda-run']
    """
    parts = (word.rpartition("=") for word in words)
    return [f"{name}{equals}{word_as_sim(value)}" for name, equals, value in parts]


def environment_as_sim(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which no variable of the program's own names CUDA as its device or NCCL as its backend.

    >>> environment_as_sim({"BACKEND": "nccl", "NCCL_DEBUG": "nccl", "HOME": "/home/cuda"})
    {'BACKEND': 'simccl', 'NCCL_DEBUG': 'nccl', 'HOME': '/home/cuda'}
    """
    return {name: value if name.startswith(_KEPT) else word_as_sim(value) for name, value in environment.items()}
