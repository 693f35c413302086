"""Applies a patch to a scratch copy of a checkout, and runs its tests there on plain torch.

Note [Plain torch over a checkout]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkout that nobody has built cannot be imported as torch. The tests run on the installed torch, whose
``torch.testing._internal`` is looked up in the scratch copy first: a ``sitecustomize`` in a folder on ``PYTHONPATH``,
which spawned ranks inherit, installs a finder for that one package. Nothing of this project is on the path, except the
simulated device where that is asked for, as any out-of-tree device would be. Releases whose ``common_fsdp`` lists the
devices that it knows are told of it, as out-of-tree backends do for themselves.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ext.upstream.export.git import git, root_of
from torch_ext.upstream.export.trees import project_root

__all__ = ["Run", "apply_to_copy", "import_in_copy", "run_in_copy"]

_SITE = '''
import importlib.machinery, os, sys

COPY, HOME = os.environ["EXPORT_CHECK_COPY"], "torch.testing._internal"


class Copy:
    """Finds modules of torch.testing._internal in the copy, then where torch is installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != HOME and not name.startswith(HOME + "."):
            return None
        import torch

        below = name.split(".")[1:-1]
        roots = [os.path.join(COPY, "torch"), os.path.dirname(torch.__file__)]
        found = importlib.machinery.PathFinder.find_spec(name, [os.path.join(root, *below) for root in roots])
        if found is not None and name.endswith(".common_fsdp") and os.environ.get("EXPORT_CHECK_DEVICE"):
            found.loader.exec_module = told(found.loader.exec_module)
        return found


def told(execute):
    def run(module):
        execute(module)
        device = os.environ["EXPORT_CHECK_DEVICE"]
        import torch

        module.DEVICE_TYPE = device
        module.DISTRIBUTED_BACKEND = torch.distributed.get_default_backend_for_device(device)
        module.DEVICE_COUNT = torch.get_device_module(device).device_count()
        module.TEST_XPU = True  # the branch that sets a rank's device through torch.accelerator

    return run


sys.meta_path.insert(0, Copy)
if os.environ.get("EXPORT_CHECK_DEVICE"):
    sys.path.append(os.environ["EXPORT_CHECK_PROVIDER"])
    import torch_ext.sim
'''


@dataclass(frozen=True)
class Run:
    """What became of one test file on one device: how many of its tests ended how, and the end of what it printed."""

    file: str
    device: str
    passed: int
    failed: int
    skipped: int
    output: str

    @property
    def good(self) -> bool:
        return not self.failed and self.passed + self.skipped > 0

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"{self.file} on {self.device}: {counts}"


def apply_to_copy(checkout: Path, mail: str, folder: Path) -> Path:
    """Clone ``checkout`` into ``folder``, apply the patch with ``git am`` and return the clone.

    Raises:
        CheckoutError: it does not apply.
    """
    copy = folder / "copy"
    plain = ("-c", "commit.gpgSign=false", "-c", "core.hooksPath=/dev/null")  # whatever a person has set
    git(folder, *plain, "clone", "--quiet", "--shared", "--no-tags", str(root_of(checkout).resolve()), str(copy))
    file = folder / "change.patch"
    file.write_text(mail, encoding="utf-8")
    git(copy, *plain, "-c", "user.name=check", "-c", "user.email=check@localhost", "am", "--quiet", str(file))
    return copy


def run_in_copy(copy: Path, file: str, device: str, tests: Sequence[str] = (), timeout_s: float = 1800) -> Run:
    """Run test file ``file`` of ``copy`` on ``cpu`` or ``sim``, all of it or the tests named ``Class.test``."""
    done = _python(copy, [str(copy / file), *tests], device, timeout_s)
    text = done.stdout + done.stderr
    count = re.search(r"^Ran (\d+) tests?", text, re.MULTILINE)
    told = dict(re.findall(r"(failures|errors|skipped|unexpected successes)=(\d+)", text.split("\nRan ")[-1]))
    skipped = int(told.get("skipped", 0))
    bad = sum(int(told.get(kind, 0)) for kind in ("failures", "errors", "unexpected successes"))
    total = int(count[1]) if count else 0
    if not count or (done.returncode and not bad):
        bad = max(bad, 1)  # it died, or never started
    return Run(file, device, max(total - skipped - bad, 0), bad, skipped, text[-8000:])


def import_in_copy(copy: Path, modules: Iterable[str], timeout_s: float = 600) -> str:
    """Import ``modules`` in one process on plain torch and return what went wrong, or an empty string.

    A file of tests is imported by its path. A process that loaded anything of this project is wrong, too.
    """
    program = (
        "import importlib, importlib.util, sys, traceback\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        if name.endswith('.py'):\n"
        "            spec = importlib.util.spec_from_file_location(name.split('/')[-1][:-3], name)\n"
        "            spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "        else:\n"
        "            importlib.import_module(name)\n"
        "    except BaseException:\n"
        "        print(name, traceback.format_exc())\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'torch_ext'] or '')\n"
    )
    done = _python(copy, ["-c", program, *modules], "cpu", timeout_s)
    return done.stdout.strip() or (done.stderr.strip() if done.returncode else "")


def _python(copy: Path, command: Sequence[str], device: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        environment = {
            key: value for key, value in os.environ.items() if key in _KEPT or not key.startswith("TORCH_EXT_")
        }
        environment.update(PYTHONPATH=folder, EXPORT_CHECK_COPY=str(copy), EXPORT_CHECK_PROVIDER=str(project_root()))
        # torch imports what installed packages register as its backends, and so this project.
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        environment["EXPORT_CHECK_DEVICE"] = "" if device == _HOST else device
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,  # its ranks, which outlive it, end with its session
        )
        try:
            stdout, stderr = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            stdout, stderr = child.communicate()
            stderr += f"\nnot done after {timeout_s:g} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


_HOST = "cpu"

# Of our own variables: where the simulated device was built.
_KEPT = ("TORCH_EXT_CACHE",)
