"""Runs ``torch_ext run`` and torchrun on small programs, and finds processes that they leave behind."""

import os
import subprocess
import sys
import uuid
from textwrap import dedent

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.servers import LIMIT_S, environment, eventually, server_for
from test.torch_ext.world.faults import MARK, marked_processes

EXAMPLE = CHECKOUT / "examples" / "train.py"

# The option of ``torch_ext serve`` by the option of a command that it serves.
_SERVERS = {"--device cpu": "--host", "--cuda-as-sim": "--cuda-as-sim", "": ""}


def start(options, program, *arguments, folder, **more):
    """Start ``torch_ext run`` on the text ``program``, in the file ``program.py`` of ``folder``."""
    (folder / "program.py").write_text(dedent(program), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "torch_ext", "run", *options.split(), "program.py", *arguments],
        cwd=folder,
        env=environment(more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(options, program, *arguments, folder, **more):
    """As :func:`start`, then wait for the end. No process may be left. A server may start the ranks."""
    device = next(option for option in _SERVERS if option in options)
    server = None if "XDG_RUNTIME_DIR" in more else server_for(_SERVERS[device], environment(more))
    mark = uuid.uuid4().hex
    runtime = {"XDG_RUNTIME_DIR": server.runtime} if server else {}
    with start(options, program, *arguments, folder=folder, **{MARK: mark}, **runtime, **more) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert alive_with(mark) == []
    assert server is None or "`torch_ext serve` is not used" not in err, err
    assert server is None or eventually(server.is_idle), "processes of the program are left"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def alive_with(mark):
    """Return the command lines of processes that were started with ``mark`` in their environment."""
    return [command for command in marked_processes(mark).values() if command]  # an ending process has no command line


def torchrun(*words, folder, **more):
    """Run torch's own torchrun, with our entry point installed beside what there is."""
    return launched("torch.distributed.run", *words, folder=folder, **more)


def launched(launcher, *words, folder, **more):
    """Run the module ``launcher``, with our entry point installed beside what there is."""
    variables = environment({**with_entry_point(folder), **more})
    command = [sys.executable, "-m", launcher, *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S)


def with_entry_point(folder):
    """Install our entry point in ``folder``; return what a process needs in its environment to find it."""
    installed = folder / "installed"
    information = installed / "entry_of_torch_ext-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: entry_of_torch_ext\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\nours = torch_ext.program.autoload:load\n")
    return {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{installed}"}
