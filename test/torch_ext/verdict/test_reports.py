"""The report of a failure: complete, of any length, and without false statements."""

import re

from test.torch_ext.world.programs import check_rows, class_of, ranks_in_first_line
from test.torch_ext.world.suites import SLOWER
from torch_ext import cache

SOURCE = r"""
import mmap, struct

BAD = "\x1b]0;owned\x07 \x1b[2J\0 \x9b5m \r overwritten \x08\x08"
SPINS = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
libc = ctypes.CDLL(None)


def chain(length):
    error = ValueError("the innermost")
    for number in range(length):
        try:
            raise ValueError(f"link {number}") from error
        except ValueError as caught:
            error = caught
    raise ValueError("the outermost") from error


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
def deeper(depth):
    return deeper(depth + 1)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.lock = threading.Lock()


class TestDeaths(Ranks):
    def test_abort_of_gloo(self):  # failed: ^SIGABRT
        self.join_group()
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3 if self.rank == 0 else 5000))

    def test_abort_of_the_allocator(self):  # failed by 1: ^rank 1 was killed by SIGABRT at test_suite.py:
        self.join_group()
        if self.rank == 1:
            libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            memory = libc.malloc(5000)
            libc.free(memory)
            libc.free(memory)
        dist.barrier()


class TestBoth(Ranks):
    def test_a_megabyte_on_each_rank(self):  # failed by 0, 1: ^word word
        raise ValueError("word " * 200_000 + str(self.rank))

    def test_numbers_in_output_differ(self):  # failed: hello from rank 0...hello from rank 1
        print("hello from rank", self.rank)
        self.fail("to see the output")


class TestSystemCall(Ranks):
    def test_is_not_cut_short(self):  # failed by 1: Stacks...test_is_not_cut_short
        if self.rank == 1:
            libc.pause()
            os.write(2, b"the system call came back\n")
            raise ValueError("the system call was cut short")


# A rank that cannot answer has recorded its wait in its page.
class TestPage(Ranks):
    def test_page(self):  # failed: was in #9 all_reduce in group 2, called at model.py:7
        page = mmap.mmap(int(os.environ["TORCH_EXT_WAIT_PAGE"]), 4096)
        struct.pack_into("=Q", page, 0, 2)
        text = b"2", b"all_reduce", b"model.py:7"
        struct.pack_into("=IiqQ64s40s200s", page, 64, 2, 1 - self.rank, 5, 9, *text)
        os.kill(os.getpid(), signal.SIGSTOP)


# A core that computing processes share: the report says that the ranks had to wait for it.
class TestCrowd(Ranks):
    def test_computes_in_a_crowd(self):  # failed by 0, 1: ^timed out
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for _ in range(2):
            subprocess.Popen([sys.executable, "-S", "-E", "-c", SPINS])
        while True:
            pass
"""
# `check_rows` refuses control characters in the output of a run.
ESCAPES = r"""

class TestEscapes(Ranks):
    def test_message(self):  # failed: owned
        raise ValueError(BAD)

    def test_output(self):  # failed: owned
        print(BAD)
        self.fail("to see the output")

    def test_skip(self):  # skipped
        self.skipTest(BAD)

    def test_parent_half(self):  # failed: owned
        pass

    def test_left(self):
        subprocess.Popen(["sh", "-c", "sleep 6543; : \x1b]0;owned\x07"], start_new_session=True)

    def tearDown(self):
        super().tearDown()
        print(BAD)
        if "parent_half" in self._testMethodName:
            raise ValueError(BAD)
"""


AT = "test_suite.py:..."
ERRORS = {
    "a_megabyte": (f"failed by 1: ^ValueError at {AT}: word word", "raise ValueError('word ' * 200_000)"),
    "deep_chain": (f"failed by 1: ^ValueError at {AT}: the outermost", "chain(2000)"),
    "unprintable": (f"failed by 1: ^Unprintable at {AT}: <exc", "raise Unprintable"),
    "unpicklable": (f"failed by 1: ^Unpicklable at {AT}: 1", "raise Unpicklable(1, 2)"),
    "surrogates": (f"failed by 1: ^ValueError at {AT}: half: \\ud800", "raise ValueError('half: \\ud800')"),
    "exception_group": (
        f"failed by 1: ^ExceptionGroup at {AT}: several",
        "raise ExceptionGroup('several', [ValueError('one of them'), KeyError('another')])",
    ),
    "overflow_of_the_c_stack": (
        "failed by 1: was killed by SIGSEGV at test_suite.py:...Fatal Python error: Segmentation",
        "for number in range(80): threading.Thread(target=forever, daemon=True).start()\n"
        "sys.setrecursionlimit(10**9)\ndeeper(0)",
    ),
    "long_command_line_left": (
        "failed by 1: left a process behind",
        "subprocess.Popen(['sleep', '6543', '0' * 5000], start_new_session=True)\nself.fail('to see it')",
    ),
}


def test_each_report_matches_its_row(tmp_path):
    texts = check_rows(
        tmp_path, SOURCE + ESCAPES + class_of("TestErrors", "Ranks", ERRORS), "--timeout", str(round(4 * SLOWER))
    ).text
    chain = texts["test_deep_chain"]
    assert "RecursionError" not in chain and len(chain) < 200_000
    assert re.search("the innermost|link 0|more|left out", chain), chain
    assert "0" * 101 not in texts["test_long_command_line_left"]
    assert not re.search("cut short|came back", texts["test_is_not_cut_short"])
    abort = texts["test_abort_of_gloo"]
    (aborted,) = re.findall(r"^  rank (\d) was killed by SIGABRT", abort, re.MULTILINE)
    assert ranks_in_first_line(abort) == {int(aborted)}, abort
    assert "terminate called after throwing" in abort and "#2 gloo:all_reduce([" in abort, abort
    crowd = texts["test_computes_in_a_crowd"]
    assert len(re.findall(r"^    waited for a core for [\d.]+ s of that time$", crowd, re.MULTILINE)) == 2, crowd
    assert "run fewer tests at once (-j, --slots), or raise --timeout" in crowd, crowd


def test_escape_sequences_are_escaped_in_reports(tmp_path):
    check_rows(tmp_path, SOURCE.partition("class TestDeaths")[0] + ESCAPES, "--show-output")


MEMORY = """
from torch_ext.testing._internal.common_fsdp import FSDPTest


class TestMemory(Ranks):
    def test_fits(self):
        torch.ones(1 << 17, device="sim")

    def test_does_not_fit(self):  # failed by 0, 1: ^raised torch.OutOfMemoryError...capacity of 2.00 MiB
        torch.ones(1 << 19, device="sim")


class TestCrossed(FSDPTest):
    world_size = 2

    def test_receive_returns_at_once(self):  # hangs by 0, 1: ^rank 0 in barrier (...rank 1 in recv (
        if self.rank == 0:
            dist.barrier()
        else:
            dist.recv(torch.ones(3, device="sim"), 0)
"""


# Simccl compares the calls: its message has the caller of the barrier after the body, and no line of the harness.
SHORTER = {"loop": ("failed by 1: called barrier at...cases.py:", "dist.all_reduce(torch.ones(3, device='sim'))")}


def test_simulated_devices_have_the_memory_of_the_command_line_and_hangs_the_last_line_of_the_program(tmp_path):
    shorter = class_of("TestShorter", "FSDPTest", SHORTER, on="self.rank == 0") + "\n    world_size = 2\n"
    extra = {"TORCH_EXT_CACHE": str(cache.folder())}
    check_rows(tmp_path, MEMORY + shorter, "--device", "sim", "--memory", "2MiB", extra=extra)
