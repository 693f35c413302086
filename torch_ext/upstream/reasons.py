"""Why a test cannot run here, by its error or its skip: it needs CUDA, Triton, or another release of torch.

Loads no torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from torch_ext.results import WITHOUT_TESTS, Problem, Raised, RanksFailed, Status, TestResult

ANOTHER_RELEASE = "needs another release of torch"
NEWER_RELEASE = "needs torch >="

_HINT = "--cuda-as-sim has CUDA mean the simulated accelerator"
_NAMES_CUDA = f"the test asks for CUDA or NCCL by name: {_HINT}"
_TRITON = "needs Triton, which has no compiler for this device"
_NO_TRITON = "needs Triton: install it, which is enough where it is only imported"
_SYMMETRIC = (
    "needs symmetric memory of a kind that this device lacks: NVSHMEM, NCCL's windows, NVLink, or any of its "
    "peers' memory"
)

# Skips of upstream's helpers where Inductor has no Triton for a GPU.
_NEEDS_TRITON = re.compile(r"^(?:requires (?:gpu|triton)\b|Inductor\+gpu needs triton\b)", re.IGNORECASE)
# Skips of files that find no CUDA: in their own words, or in our harness's.
_WANTS_CUDA = re.compile(
    rf"\A(?:{re.escape(WITHOUT_TESTS)}|no rank was started, because the test's world_size is 0\b[\s\S]*"
    r"|(?:no|CUDA|multi-?GPU)\b[^\n]*\b(?:unavailable|not (?:available|supported)|found)"
    r"|(?:no supported device|[Rr]equires|[Nn]eeds)\b[^\n]*\b(?:cuda|CUDA)\b[^\n]*)\.?\Z"
)
_NO_NCCL = re.compile(r"^This torch is built without NCCL\.$", re.MULTILINE)
_NAMES_CUDA_ITSELF = re.compile(r"\bcuda\b|\bTEST_(?:CUDA|MULTIGPU)\b")

# Why a test cannot run here, and the errors that say so.
_ERRORS = {
    _NO_TRITON: re.compile(r"ModuleNotFoundError: No module named 'triton"),
    _TRITON: re.compile(
        r"RuntimeError: 0 active drivers \("
        r"|\w*(?:Triton|BackendCompilerFailed)\w*: .*[Cc]annot find a working triton installation"
        r"|(?:\w+\.)*TritonMissing\b"
    ),
    _SYMMETRIC: re.compile(
        r"RuntimeError: SymmetricMemory does not (?:support device type|find allocation backend)\b"
        r"|NotImplementedError: The operator 'symm_mem::\w+(?:\.\w+)?' is not implemented for the device\b"
        r"|NotImplementedError: symm_mem::\w+ needs NVLink multicast\b"
        r"|RuntimeError: DMA connectivity detector for \w+ over nvlink is not available"
    ),
    _NAMES_CUDA: re.compile(
        r"AssertionError: Torch not compiled with CUDA enabled"
        r"|RuntimeError: (?:Distributed package doesn't have NCCL built in|Invalid device, must be cuda device)"
        r"|RuntimeError: Attempting to deserialize object on a CUDA device"
    ),
}


def reason_of(error: str, *, cuda_as_sim: bool) -> str:
    """Return why a test that failed with ``error`` cannot run here, in a sentence; empty if the error does not say.

    >>> reason_of("AssertionError: Torch not compiled with CUDA enabled", cuda_as_sim=False)
    'the test asks for CUDA or NCCL by name: --cuda-as-sim has CUDA mean the simulated accelerator'
    >>> reason_of("AssertionError: Torch not compiled with CUDA enabled", cuda_as_sim=True)
    ''
    >>> reason_of("RuntimeError: SymmetricMemory does not support device type sim", cuda_as_sim=True)[:22]
    'needs symmetric memory'
    """
    reason = next((reason for reason, pattern in _ERRORS.items() if pattern.match(error)), "")
    # Under --cuda-as-sim no test should fail for lack of CUDA: report it as our bug.
    return "" if cuda_as_sim and reason == _NAMES_CUDA else reason


def explain(skip: str) -> str:
    """Return why a test was skipped, as a sentence where upstream's helpers give a few words.

    >>> explain("requires gpu")
    'needs Triton, which has no compiler for this device: requires gpu'
    >>> explain("requires 4 GPUs")
    'requires 4 GPUs'
    """
    return f"{_TRITON}: {skip}" if _NEEDS_TRITON.search(skip) else skip


def advise(skip: str, source: str) -> str:
    """Return why a test of a file was skipped, with advice where ``--cuda-as-sim`` would run the test.

    >>> advise("This torch is built without NCCL.", "")
    'This torch is built without NCCL: --cuda-as-sim has CUDA mean the simulated accelerator'
    >>> advise("CUDA unavailable", "if torch.cuda.is_available(): ...")
    'CUDA unavailable: --cuda-as-sim has CUDA mean the simulated accelerator'
    """
    wants_cuda = _WANTS_CUDA.search(skip) and _NAMES_CUDA_ITSELF.search(source)
    return f"{skip.rstrip('.')}: {_HINT}" if wants_cuda or _NO_NCCL.search(skip) else skip


def _errors(problem: Problem) -> list[str]:
    """Return the first line of each exception of ``problem``; an empty text for a problem without one."""
    if isinstance(problem, Raised):
        return [problem.sentence]
    outcomes = problem.report.outcomes if isinstance(problem, RanksFailed) else ()
    receipts = [outcome.receipt for outcome in outcomes if not outcome.ok and outcome.receipt is not None]
    # Transport errors only follow from a lost peer: skip them, unless they name a reason themselves.
    own = (each.reason for each in receipts if not each.transport or reason_of(each.reason, cuda_as_sim=False))
    return list(own) or [""]


# Characters within which a file names its owners.
_HEAD = 4096
_VERSION = re.compile(r"(\d+)\.(\d+)")
# Python's errors for a name that torch lacks.
_MISSING = (
    # Our replacements look up names that they lack in torch's modules: torch lacks this name as well.
    re.compile(
        r"ImportError: cannot import name '(?P<name>\w+)' from "
        r"'(?P<where>torch_ext\.testing\._internal\.(?:common_distributed|common_fsdp|dist_utils))'"
    ),
    re.compile(r"ImportError: cannot import name '(?P<name>\w+)' from '(?P<where>torch(?:\.\w+)*)'"),
    re.compile(r"ModuleNotFoundError: No module named '(?P<name>torch(?:\.\w+)*)'"),
    re.compile(r"AttributeError: module '(?P<where>torch(?:\.\w+)*)' has no attribute '(?P<name>\w+)'"),
    re.compile(r"AttributeError: '_OpNamespace' '(?P<where>\w+)' object has no attribute '(?P<name>\w+)'"),
    re.compile(r"AttributeError: '(?P<where>torch(?:\.\w+)+)' object has no attribute '(?P<name>\w+)'"),
    re.compile(r"AttributeError: type object '(?P<cls>\w+)' has no attribute '(?P<name>\w+)'"),
    re.compile(r"TypeError: (?P<where>[\w.]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'"),
    re.compile(r"TypeError: (?P<where>[\w.]+)\(\) missing \d+ required positional arguments?: '(?P<name>\w+)'"),
)
# Names that a build without CUDA lacks.
_CUDA_NAMES = re.compile(r"(?:^|_)(?:cuda|cudnn|nccl|nvshmem|ucc|mpi|xccl)(?:_|$)|Cuda|CUDA|NCCL|NVSHMEM|UCC|MPI|XCCL")
# Modules that this project adds to torch; a missing name there is our bug.
_OURS = re.compile(r"torch\.sim(?:\.|$)")
# Modules whose classes may be ours.
_REPLACED = re.compile(r"torch\.(?:sim|cuda|testing\._internal\.(?:common_distributed|common_fsdp|dist_utils))(?:\.|$)")
# Upstream's linter wants this line in each of its test files.
_OWNERS = re.compile(r"^# Owner\(s\): \[", re.MULTILINE)


def release_of_checkout(path: Path) -> str:
    """Return the version, by ``version.txt``, of the PyTorch checkout that holds ``path``; empty outside a checkout."""
    for folder in path.parents:
        file = folder / "version.txt"
        if file.is_file() and (folder / "torch").is_dir():
            return file.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _outside_a_checkout(path: Path) -> bool:
    """Whether ``path`` is a PyTorch test file, by its owners' line, of unknown release."""
    if release_of_checkout(path) or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return _OWNERS.search(file.read(_HEAD)) is not None


def _release(version: str) -> tuple[int, int]:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _class_of_torch(name: str, path: Path | None) -> str:
    """Return the full name of class ``name`` if the file imports it from torch and the class is not ours."""
    for node in ast.walk(ast.parse(path.read_bytes() if path is not None else b"")):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            module = node.module or ""
            return f"{module}.{name}" if module.partition(".")[0] == "torch" and not _REPLACED.match(module) else ""
    return ""


def _defines(path: Path | None, name: str) -> bool:
    """Whether a file has a function ``name`` of its own."""
    tree = ast.parse(path.read_bytes() if path is not None else b"")
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


class Releases:
    """Compares a checkout with the installed torch.

    A PyTorch file outside of any checkout has an unknown release: if the installed torch lacks a name that the file
    imports, its release is a different one. ``paths`` are the files of the run.
    """

    def __init__(self, paths: Iterable[Path], *, cuda_as_sim: bool = False) -> None:
        self._cuda_as_sim = cuda_as_sim
        self._installed = metadata.version("torch")
        self._files = list(paths)
        self.checkout = max(map(release_of_checkout, self._files), key=_release, default="")
        self._newer = _release(self.checkout) > _release(self._installed)
        self.notice = ""  # a sentence to begin with if the checkout is newer; else empty
        if self._newer:
            self.notice = (
                f"the checkout is of torch {self.checkout}, and {self._installed} is installed: "
                "tests that need a missing name are skipped"
            )

    def path_of(self, file: str) -> Path | None:
        """Return the path of a test's file in this run."""
        return next((path for path in self._files if path.as_posix().endswith(f"/{file}")), None)

    def judged(self, result: TestResult) -> TestResult:
        """Return ``result``, or a skip if it failed only because torch or this machine lacks something."""
        if result.status is not Status.FAILED:
            return result
        path = self.path_of(result.test.file)
        reasons = {self._reason(error, path) for problem in result.problems for error in _errors(problem)}
        if len(reasons) != 1 or not (reason := reasons.pop()):
            return result
        return replace(result, status=Status.SKIPPED, reason=reason, problems=(), output="")

    def _reason(self, error: str, path: Path | None) -> str:
        if reason := reason_of(error, cuda_as_sim=self._cuda_as_sim):
            return reason
        found = next((found for pattern in _MISSING if (found := pattern.search(error))), None)
        if found is None:
            return ""
        parts = found.groupdict()
        where = (parts.get("where") or "").replace("torch_ext.", "torch.", 1)
        if "cls" in parts:
            where = _class_of_torch(parts["cls"], path)
        if _OURS.match(where) or ("cls" in parts and not where):
            return ""
        name = f"{where}.{parts['name']}" if where else parts["name"]
        if error.startswith(("ImportError", "AttributeError")) and _CUDA_NAMES.search(parts["name"]):
            return f"needs a build of torch with {name}, which this one does not have"
        is_name = not error.startswith("TypeError") or not _defines(path, where.rpartition(".")[2])
        if is_name and path is not None and _outside_a_checkout(path):
            return f"{ANOTHER_RELEASE}: {self._installed} has {'another' if '() missing ' in error else 'no'} {name}"
        if not self._newer:
            return ""
        major, minor = _release(self.checkout)
        return f"{NEWER_RELEASE} {major}.{minor}: {self._installed} has no {name}"
