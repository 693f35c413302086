"""A program that ran a backward on ``sim`` ends with its own exit code, however it was started and however it ends.

In the programs here a device thread is sure to need Python after finalization has begun, unless the exit function of
Note [Threads at exit] (``csrc/finalization.cpp``) lets it finish.
"""

import signal

import pytest

from test.torch_ext.interpreter import python

SIM = "import atexit, os, signal, sys, threading, time\nimport torch\nimport torch_ext.sim\n"
BACKWARD = """
import sys, torch
def backward(device="sim"):
    a = torch.ones(3, 3, device=device, requires_grad=True)
    (a @ a).sum().backward()
"""
# A graph task holds a copy of the context. If a device thread drops the last reference, the thread waits until Python
# finalizes, or for a second, and needs the interpreter's lock afterwards.
LATE = """
import contextvars, ctypes, os, select, sys, threading, time
value, main, late, limit_s = contextvars.ContextVar("value"), threading.get_ident(), [], 1
reader, writer = os.pipe()
class Late:
    def __del__(self):
        if threading.get_ident() != main:
            late.append(1)
            select.select([reader], [], [], limit_s)
class Finalization:
    def __del__(self, write=os.write, writer=writer, usleep=ctypes.PyDLL(None).usleep):
        write(writer, b"now")
        usleep(500_000)
def end_late():
    late.clear()
    while not late:
        token = value.set(Late())
        backward()
        value.reset(token)
        time.sleep(0.05)  # else the next backward waits for the thread
sys.modules["finalization"] = Finalization()
end_late()
"""
UNMENDED = "from torch_ext.sim import _native\natexit.unregister(_native.before_finalization)\n"
ABORTED = "terminate called without an active exception"


def ends(text, code=0, shown=""):
    return text, code, shown


IN_THREADS = """
def train():
    while True: backward()
sys.setswitchinterval(1e-4)
for _ in range(3): threading.Thread(target=train, daemon=True).start()
time.sleep(0.2)
"""
# The end of the program after its backward, its exit code, and its output.
ENDS = {
    "sys.exit": ends("sys.exit(3)", 3, ""),
    "an exception": ends("raise ValueError('mine')", 1, "ValueError: mine"),
    "Ctrl-C": ends("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    "several devices": ends("[backward(f'sim:{index}') for index in range(4)]"),
    "an exception in backward": ends(
        """
a = torch.ones(3, device="sim:1", requires_grad=True)
b = a * 2
b.register_hook(lambda grad: 1 // 0)
b.sum().backward()
""",
        1,
        "ZeroDivisionError",
    ),
    "reentrant backward, in threads of their own": ends("""
class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, device="sim", requires_grad=True)
                Deep.apply(x, ctx.depth - 1).sum().backward()
        return grad, None
Deep.apply(torch.ones(1, device="sim", requires_grad=True), 80).sum().backward()
"""),
    "exit functions": ends("atexit.register(print, 'later', flush=True)", 0, "later\nearlier\n"),
    "daemon threads in a backward": ends(IN_THREADS),
    "daemon threads that know no device": ends(IN_THREADS.replace("backward()", "backward('cpu')")),
    "anomaly mode": ends("with torch.autograd.detect_anomaly(): backward()"),
    "a default device": ends("torch.set_default_device('sim:2'); backward()"),
}
# Registered before the simulator, so this function runs after the simulator's.
EARLIER = """
import atexit
def earlier():
    print("earlier", flush=True)
    backward()
atexit.register(earlier)
"""

MAIN = "\nif __name__ == '__main__':\n"
FORKED = """
child = os.fork()
if not child:
    import sys
    KEEP
    sys.exit(0)
sys.exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
""".replace("    KEEP", LATE.replace("\n", "\n    "))
SPAWNED = """
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    sys.exit(abs(child.exitcode))
"""
DDP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("simccl")
torch.sim.set_device(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(3, 3).to("sim"))
model(torch.ones(2, 3, device="sim")).sum().backward()
dist.destroy_process_group()
"""
WORK = "def work():" + LATE.replace("\n", "\n    ") + "\n"
# The program, and the options with which Python starts it.
WAYS = {
    "script": (SIM + BACKWARD + LATE, ()),
    "by a variable": (BACKWARD + LATE, ()),
    "torchrun": (
        SIM + BACKWARD + DDP + LATE,
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    ),
    "torch_ext run": (BACKWARD + DDP + LATE, ("-m", "torch_ext", "run", "-n", "2")),
    "forked": (SIM + BACKWARD + FORKED, ()),
    "spawned": (SIM + BACKWARD + WORK + MAIN + SPAWNED, ()),
    "pytest": (
        SIM + BACKWARD + WORK + "def test_backward():\n    work()\n",
        ("-m", "pytest", "-q", "-p", "no:cacheprovider"),
    ),
}


def run(program, folder, options=()):
    (folder / "test_program.py").write_text(program, encoding="utf-8")
    by_variable = {} if "import torch_ext" in program or options else {"TORCH_EXT_SIM": "1"}
    done = python(*options, "test_program.py", folder=folder, OMP_NUM_THREADS="1", **by_variable)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.drawn(2)
@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_it_would_without_a_device(end, tmp_path):
    text, code, shown = ENDS[end]
    before = EARLIER if end == "exit functions" else ""
    ended, output = run(before + SIM + BACKWARD + LATE + text, tmp_path)
    assert (ended, ABORTED in output) == (code, False), output
    assert shown in output


@pytest.mark.drawn(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_program_ends_well_however_it_was_started(way, tmp_path):
    text, options = WAYS[way]
    code, output = run(text, tmp_path, options)
    assert (code, ABORTED in output) == (0, False), output


# Ranks of `torch_ext run` end without finalization.
FINALIZED = [way for way in WAYS if way != "torch_ext run"]


@pytest.mark.parametrize("way", ["script", *(pytest.param(way, marks=pytest.mark.long) for way in FINALIZED[1:])])
def test_without_the_exit_function_it_aborts(way, tmp_path):
    text, options = WAYS[way]
    code, output = run("import atexit\n" + UNMENDED + text.replace("[], 1\n", "[], 20\n"), tmp_path, options)
    # The status of the process itself, of its child, or of torchrun, which reports that of its worker.
    assert code in (-signal.SIGABRT, signal.SIGABRT) or "SIGABRT" in output, output
    assert ABORTED in output or "Fatal Python error: PyEval_SaveThread" in output, output


def test_the_exit_function_may_be_called_twice_and_starts_no_threads(tmp_path):
    count = "print(len(os.listdir('/proc/self/task')))\n"
    called = "from torch_ext.sim import _native\n_native.before_finalization()\n"
    code, output = run(SIM + count + called + count + BACKWARD + "backward()", tmp_path)
    before, after = output.split()
    assert (code, before) == (0, after)
