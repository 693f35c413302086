"""A rank passes only if its own body ran to its end, and no thread or exit function of it fails later."""

from test.torch_ext.world.programs import check_rows, class_of
from test.torch_ext.world.suites import SLOWER

HELPERS = """
import _thread, tempfile, weakref

HOOK = threading.excepthook


def after_body(how, *args):
    multiprocessing.util.Finalize(None, how, args=args, exitpriority=1)


def judge_child(case, act, *args):
    os.fork() or act(*args)
    case.assertEqual(os.waitstatus_to_exitcode(os.wait()[1]), 0)


class Waits(Standing):
    @classmethod
    def tearDownClass(cls):
        time.sleep(0.6)
        super().tearDownClass()


class Dropped:
    def __del__(self):
        pass
"""
EARLY, LATE = "failed by 1: ^ before its test was over", "... after its test had"
FORKED = {
    "child_passes": (EARLY, "if os.fork() == 0: return\nos.wait()\nos._exit(0)"),
    "child_outlives_its_parent": (EARLY, "if os.fork() != 0: os._exit(0)\ntime.sleep(0.5)"),
    "child_fails": ("passed", "os.fork() or raise_()\nos.wait()"),
    "child_skips": ("passed", "os.fork() or self.skipTest('in the child')\nos.wait()"),
    "judged_child_fails": ("failed by 1: Scalars are not equal", "judge_child(self, raise_)"),
    "sends_functions_of_os": (
        "passed",
        "import pickle\nself.assertEqual(pickle.loads(pickle.dumps((os._exit, os.kill))), (os._exit, os.kill))",
    ),
    "judged_child_passes": ("passed", "if os.fork(): self.assertEqual(os.wait()[1], 0)"),
}
PLAIN = {
    "child_passes": ("failed: the parent", "if os.fork(): os.wait(); self.fail('the parent')"),
    "child_fails": ("failed: AssertionError: 1 != 0", "judge_child(self, self.fail)"),
    "next": ("passed", "os.fork() and self.assertEqual(os.wait()[1], 0)"),
}
ENDS = {
    "dies_in_atexit": ("failed by 1: ^SIGSEGV", "atexit.register(os.kill, os.getpid(), signal.SIGSEGV)"),
    "exits_5": (f"failed by 1: ^code 5{LATE}", "after_body(os._exit, 5)"),
    "is_killed": (f"failed by 1: ^SIGSEGV{LATE}", "after_body(os.kill, os.getpid(), signal.SIGSEGV)"),
    "thread_exits": ("failed by 1: code 0", "threading.Timer(0.3, os._exit, (0,)).start()"),
    "thread_stays": (f"failed by 1: ^timed out{LATE}", "in_a_thread(forever, joined=False)"),
    "thread_fails_later": ("failed by 1: it failed", "threading.Timer(0.3, raise_).start()"),
    "hangs": (f"failed by 1: ^timed out{LATE}", "after_body(forever)"),
    "finalizer_fails": ("failed by 1: in a finalizer", "after_body(raise_, 'in a finalizer')"),
    "weak_finalizer_fails": (
        "failed by 1: ^a finalizer registered with weakref raised: ValueError: it failed",
        "weakref.finalize(type(self), raise_)",
    ),
    "thread_joins_the_main_thread": ("passed", "in_a_thread(threading.main_thread().join, joined=False)"),
}
# Every rank does these.
REGISTERS = {
    "atexit": ("passed", "atexit.register(note, f'atexit{self.rank}')"),
    "weak_finalizer": ("passed", "weakref.finalize(type(self), note, f'weak{self.rank}')"),
    "temporary_folder": ("passed", "type(self).folder = tempfile.TemporaryDirectory(dir=HERE, prefix='left')"),
    "global": ("passed", "globals()['DROPPED'] = Dropped()"),
    "skip_before_an_exit": ("failed: code 5", "self.rank and after_body(os._exit, 5)\nself.skipTest('on every rank')"),
}
AFTER_CLASS = {
    "is_killed": ("SIGSEGV", "after_body(os.kill, os.getpid(), signal.SIGSEGV)"),
    "exits": ("code 5", "after_body(os._exit, 5)"),
    "exits_in_atexit": ("rank 1 exited with code 3", "atexit.register(os._exit, 3)"),
    "hangs": ("rank 1", "after_body(forever)"),
}
HANDLERS = {
    "runs": ("", "atexit.register(note, 'handled')"),
    "exits": ("failed: exited with code 0", "atexit.register(os._exit, 0)"),
    "raises": ("failed: a function registered with atexit raised: ValueError: it failed", "atexit.register(raise_)"),
}
FAILING_THREADS = {
    "bare": "_thread.start_new_thread(raise_, ())\ntime.sleep(0.3)",
    "hook_put_back": "threading.excepthook = threading.__excepthook__\nin_a_thread()",
    "hook_of_import": "threading.excepthook = HOOK\nin_a_thread()",
    "joined": "in_a_thread()",
}
THREADS = """

class TestHook(Standing):
    def test_a_leaves_a_hook(self):
        before = threading.excepthook
        threading.excepthook = lambda raised: before(raised)

    def test_b_thread_fails_under_it(self):  # failed by 1: it failed
        self.rank == 1 and in_a_thread()


class TestHookOfTheTest(Ranks):
    def test_takes_the_exception(self):
        seen, threading.excepthook = [], lambda raised: seen.append(raised)
        in_a_thread()
        self.assertEqual(len(seen), 1)


class TestHookOfThreads(Threads):
    def test_takes_the_exception(self):
        hook, threading.excepthook = threading.excepthook, lambda raised: None
        if self.rank == 1:
            in_a_thread()
        dist.barrier()
        threading.excepthook = hook


class TestBefore(Threads):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        alone = "alone" in self._testMethodName
        if threading.current_thread().name in (("rank 1",) if alone else ("rank 0", "rank 1")):
            raise_("before the body")

    def test_both_die(self):  # failed by 0, 1: before the body
        pass

    def test_one_dies_alone(self):  # failed by 1: before the body
        pass


class TestAfter(Threads):
    def perThreadTearDown(self):
        if self.rank == 1:
            dist.destroy_process_group()
            raise SystemExit(0)

    def test_exits_in_its_tear_down(self):  # failed by 1: SystemExit
        pass


class TestSpawned(TestCase):
    @spawn_threads_and_init_comms(world_size=2)
    def test_leaves_silently(self):  # failed by 1: SystemExit
        if dist.get_rank() == 1:
            sys.exit(0)

    @spawn_threads_and_init_comms(world_size=2)
    def test_never_begin(self):  # failed by 0, 1: before the body
        self.fail("it ran")

    @spawn_threads_and_init_comms(world_size=2)
    def test_hang(self):  # failed by 1: timed out
        if dist.get_rank() == 1:
            forever()

    def setUp(self):
        super().setUp()
        if self._testMethodName == "test_never_begin":
            begin = dist.init_process_group
            dist.init_process_group = lambda *args, **kwargs: raise_("before the body")
            self.addCleanup(setattr, dist, "init_process_group", begin)


class TestLateChild(Standing):
    def test_1_leaves_a_child(self):
        if self.rank == 0 and os.fork() == 0:
            await_note("second test began")

    def test_2_fails_while_the_child_passes(self):  # failed by 0: the truth
        if self.rank == 0:
            note("second test began")
            time.sleep(1)
            raise_("the truth")

    def test_3_next(self):
        self.check()
"""
# The act of a rank on its inherited connections; `test_hostile_classes` writes junk into them.
CHANNELS = {
    "packs_nothing": ("failed by 1", "import pickle\npickle.dumps = lambda *args, **kwargs: b''\nraise_()"),
    "closes_all": ("failed by 1", "os.closerange(3, 4096)"),
    "becomes_another_program": ("failed by 1", "os.execvp('true', ['true'])"),
}


def test_each_rank_ends_as_its_row_states(tmp_path):
    source = HELPERS + THREADS
    source += class_of("TestForked", "Ranks", FORKED) + class_of("TestEnds", "Ranks", ENDS)
    source += class_of("TestPlain", "unittest.TestCase", PLAIN, on="True")
    source += class_of("TestRegisters", "Ranks", REGISTERS, on="True")
    source += class_of("TestChannels", "Ranks", {**CHANNELS, "next": ("passed", "pass")})
    for base in ("Ranks", "Threads", "Standing"):
        rows = {name: ("failed by 1: ValueError: it failed", act) for name, act in FAILING_THREADS.items()}
        if base == "Threads":  # a bare thread has no known rank
            rows["bare"] = ("failed: ValueError: it failed", rows["bare"][1])
        source += class_of(f"TestThreads_{base}", base, rows)
    for name, (words, act) in AFTER_CLASS.items():
        source += class_of(f"TestAfter_{name}", "Waits", {name: ("passed", act)}, end=f"failed: {words}")
    for name, (end, act) in HANDLERS.items():
        source += class_of(f"TestHandler_{name}", "TestCase", {name: ("passed", act)}, on="True", end=end)
    run = check_rows(tmp_path, source, "--timeout", str(round(4 * SLOWER)), deadline_s=100)
    notes = {"atexit0", "atexit1", "weak0", "weak1", "handled"}
    assert notes <= {path.name for path in tmp_path.iterdir()}
    assert "__del__" in run.out + run.err, "a global that nobody drops is told"
    assert list(tmp_path.glob("left*")) == []
