"""Applies a patch to a scratch copy of a checkout, and runs its tests there on plain torch.

Note [Plain torch over a checkout]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An unbuilt checkout cannot be imported as torch. The tests run on the installed torch, whose
``torch.testing._internal`` is looked up in the scratch copy first: a ``sitecustomize`` in a folder on ``PYTHONPATH``,
which spawned ranks inherit, installs a finder for that one package. Nothing of this project is on the path, except the
simulated device in runs on ``sim``, as any out-of-tree device would be. Where ``common_fsdp`` lists the known devices,
the finder sets the device there, as out-of-tree backends do for themselves.
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

from torch_ext.upstream.export.git import git
from torch_ext.upstream.export.modules import project_root

_HOST = "cpu"

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
            found.loader.exec_module = with_device(found.loader.exec_module)
        return found


def with_device(execute):
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
    """One test file on one device: the counts of its tests, and the end of the output."""

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
        CheckoutError: the patch does not apply.
    """
    copy = folder / "copy"
    plain = ("-c", "commit.gpgSign=false", "-c", "core.hooksPath=/dev/null")  # despite the user's settings
    root = git(checkout, "rev-parse", "--show-toplevel").strip()
    git(folder, *plain, "clone", "--quiet", "--shared", "--no-tags", root, str(copy))
    file = folder / "change.patch"
    file.write_text(mail, encoding="utf-8")
    git(copy, *plain, "-c", "user.name=check", "-c", "user.email=check@localhost", "am", "--quiet", str(file))
    return copy


def run_in_copy(copy: Path, file: str, device: str, tests: Sequence[str] = (), timeout_s: float = 1800) -> Run:
    """Run test file ``file`` of ``copy`` on ``cpu`` or ``sim``, all of it or the tests named ``Class.test``."""
    code, text = _python(copy, [str(copy / file), *tests], device, timeout_s)
    count = re.search(r"^Ran (\d+) tests?", text, re.MULTILINE)
    counts = dict(re.findall(r"(failures|errors|skipped|unexpected successes)=(\d+)", text.split("\nRan ")[-1]))
    total, skipped = int(count[1]) if count else 0, int(counts.pop("skipped", 0))
    failed = sum(map(int, counts.values()))
    if not count or (code and not failed):
        failed = 1  # the process died, or never started
    return Run(file, device, max(total - skipped - failed, 0), failed, skipped, text[-8000:])


# Imports modules by name, and test files by path. Fails if that imported this project.
_IMPORT = """
import importlib, runpy, sys
for name in sys.argv[1:]:
    runpy.run_path(name, run_name="imported") if name.endswith(".py") else importlib.import_module(name)
sys.exit(", ".join(name for name in sys.modules if name.split(".")[0] == "torch_ext"))
"""


def import_in_copy(copy: Path, modules: Iterable[str], timeout_s: float = 600) -> str:
    """Import ``modules`` in one process on plain torch, and return the traceback of the first that fails.

    Returns:
        An empty string if all imports passed. The names of this project's modules, if any was imported.
    """
    code, text = _python(copy, ["-c", _IMPORT, *modules], _HOST, timeout_s)
    return text.strip() if code else ""


def _python(copy: Path, command: Sequence[str], device: str, timeout_s: float) -> tuple[int, str]:
    """Run Python on plain torch over ``copy``; return its exit code and output."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        # With CI set, torch's harness imports a package for XML reports, which need not be installed.
        unset = {key for key in os.environ if key.startswith("TORCH_EXT_") and key != "TORCH_EXT_CACHE"} | {"CI"}
        child = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={
                **{key: value for key, value in os.environ.items() if key not in unset},
                "PYTHONPATH": folder,
                "EXPORT_CHECK_COPY": str(copy),
                "EXPORT_CHECK_PROVIDER": str(project_root()),
                "EXPORT_CHECK_DEVICE": "" if device == _HOST else device,
                # Torch imports the packages that are installed as its backends, this project among them.
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # for killpg, which also ends the ranks
        )
        try:
            text = child.communicate(timeout=timeout_s)[0]
            return child.returncode, text
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            text = child.communicate()[0]
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return 1, f"{text}\ntimed out after {timeout_s:g} s"
