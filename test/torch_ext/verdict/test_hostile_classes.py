"""Classes that replace functions of the harness, or write into its descriptors, cost at most their own results."""

import random
import re

import pytest

from test.torch_ext.world.suites import suite_of

# Functions that a test replaces, and other settings that it changes for its whole process

CHANGES = """
import inspect, shutil, socket


def reap(*signal_and_frame):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def remove_temporary_folder():
    # Not tempfile.gettempdir(): where the folder is gone already, that is the machine's.
    folder = os.path.realpath(os.environ["TMPDIR"])
    assert folder.startswith(os.path.realpath(HERE) + os.sep)
    shutil.rmtree(folder, ignore_errors=True)


CHANGES = {
    "sigchld_ignored": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "sigchld_reaped": lambda: signal.signal(signal.SIGCHLD, reap),
    "waitpid": lambda: setattr(os, "waitpid", lambda *arguments: (0, 0)),
    "getpid": lambda: setattr(os, "getpid", lambda: 1),
    "fork": lambda: setattr(os, "fork", None),
    "monotonic": lambda: setattr(time, "monotonic", lambda: 0.0),
    "default_timeout": lambda: socket.setdefaulttimeout(0.001),
    # Below a test method, unittest itself needs about twelve.
    "recursion_limit": lambda: sys.setrecursionlimit(len(inspect.stack()) + 14),
    "no_temporary_folder": remove_temporary_folder,
}


def change(names):
    for name in names:
        CHANGES[name]()


class Changes(Ranks):
    def test_1(self):
        self.check()

    def test_2(self):
        self.check()
"""
# Changes that do not hide one another share a test. Alone, each but the recursion limit has been seen to fail a test.
FUNCTIONS = ("waitpid", "getpid", "fork", "monotonic", "default_timeout", "no_temporary_folder")
AT_IMPORT = {"functions": FUNCTIONS[:-1], "reaped": ("sigchld_reaped",), "ignored": ("sigchld_ignored",)}
LATER = {
    "InClass": ("@classmethod\n    def setUpClass(cls):\n        super().setUpClass()\n        {}", FUNCTIONS),
    "BeforeSetUp": ("def setUp(self):\n        {}\n        super().setUp()", (*FUNCTIONS, "sigchld_reaped")),
    "InSetUp": ("def setUp(self):\n        super().setUp()\n        {}", (*FUNCTIONS, "recursion_limit")),
    "InBody": ("def test_1(self):\n        self.check()\n        {}", (*FUNCTIONS, "recursion_limit")),
    "InTearDown": ("def tearDown(self):\n        super().tearDown()\n        {}", (*FUNCTIONS, "recursion_limit")),
}


def test_changes_of_a_class_to_its_process_fail_no_test(tmp_path):
    with suite_of(tmp_path, CHANGES) as suite:
        source = CHANGES
        for where, (code, names) in LATER.items():
            source += f"\n\nclass Test{where}(Changes):\n    {code.format(f'change({names})')}\n"
        suite.add("test_suite.py", source + "\n\ndel Changes")
        for name, names in AT_IMPORT.items():
            cls = f"class TestAtImport_{name}(Changes):\n    pass"
            suite.add(f"test_{name}.py", f"{CHANGES}\n\nchange({names})\n\n\n{cls}\n\n\ndel Changes")
        run = suite.finish(suite.start_runner("--timeout", "30"), deadline_s=200)
        expected = 2 * (len(LATER) + len(AT_IMPORT))
        assert run.out.splitlines()[-1] == f"{expected} passed, 0 failed, 0 skipped", run


# Junk in inherited descriptors

JUNK = """
import random, struct


def spoil(seed):
    # As many descriptors as a test may try, with one of the things that may be written there.
    chance = random.Random(seed)
    content = chance.choice([
        b"\\0", b"\\0" * 4096, chance.randbytes(11), chance.randbytes(9000), b"hello\\n" * 9,
        struct.pack("!III", 0xF57E54C4, 5, 0) + b"hello", struct.pack("!III", 0xF57E54C4, 2**31, 0),
        struct.pack("!III", 0xF57E54C4, 13, 0) + b"\\x80\\x04\\x95\\x02\\0\\0\\0\\0\\0\\0\\0K\\x01.",
    ])
    close = chance.random() < 0.2
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.close(number) if close else os.write(number, content)
"""
CLASS_METHOD = "@classmethod\n    def {name}(cls):\n        super().{name}()\n        {{act}}"
PLACES = {
    "set_up_class": CLASS_METHOD.format(name="setUpClass").format(act="spoil({seed})"),
    "set_up": "def setUp(self):\n        super().setUp()\n        spoil({seed})",
    "before_set_up": "def setUp(self):\n        spoil({seed})\n        super().setUp()",
    "body": "def test_1(self):\n        spoil({seed})\n        self.check()",
    "one_body": "def test_1(self):\n        self.check()\n        spoil({seed}) if self.rank == 1 else None",
    "thread": "def setUp(self):\n        threading.Timer(0.2, spoil, ({seed},)).start()\n        super().setUp()",
    "child": "def setUp(self):\n        super().setUp()\n        os.fork() or spoil({seed}) or os._exit(0)",
    "tear_down": "def tearDown(self):\n        super().tearDown()\n        spoil({seed})",
    "tear_down_class": CLASS_METHOD.format(name="tearDownClass").format(act="spoil({seed})"),
    "exit": CLASS_METHOD.format(name="setUpClass").format(act="atexit.register(spoil, {seed})"),
}


CLASS = """

class Test{}({}):
    def test_1(self):
        self.check()

    def test_2(self):
        self.check()

    {}
"""


def spoil_and_run(suite, seed, places):
    """Run classes and an import that write junk, beside a class that does not. The model: its results are complete,
    each planned test of the others has at most one, and the run ends in order and says that something is wrong.
    """
    chance = random.Random(seed)
    chosen = chance.sample(sorted(PLACES), places)
    source = JUNK
    for name in chosen:
        base = "Standing" if name not in ("body", "one_body") and chance.random() < 0.3 else "Ranks"
        source += CLASS.format(f"_{name}", base, PLACES[name].format(seed=chance.randrange(1000)))
    (suite.folder / "test_suite.py").unlink()
    suite.add("test_spoilt.py", source)
    suite.add("test_import.py", f"{JUNK}\nspoil({seed})\n{CLASS.format('Imported', 'Ranks', '')}")
    suite.add("test_z.py", CLASS.format("Neighbour", "Ranks", ""))
    run = suite.finish(suite.start_runner("--timeout", "8"), deadline_s=150)
    assert "Traceback" not in run.err and run.code == 1, (seed, run)
    results = re.findall(r"^(\S+::\w+::test_\w+)  (\w+)  [\d.]+ s$", run.out, re.MULTILINE)
    assert len(dict(results)) == len(results), (seed, run)
    neighbours = [status for name, status in results if name.startswith("test_z.py")]
    assert neighbours == ["passed"] * 2, (seed, run)
    refusals = re.findall(r"into its connection with the harness(?:, descriptor \d+)?", run.out)
    assert refusals or "closed" in run.out, (seed, run)


@pytest.mark.parametrize("seed", [1, pytest.param(range(2, 60), marks=pytest.mark.long)], ids=["one", "many"])
def test_junk_in_every_descriptor_costs_the_class_alone(tmp_path, seed):
    for each in [seed] if isinstance(seed, int) else seed:
        with suite_of(tmp_path / str(each), "") as suite:
            spoil_and_run(suite, each, len(PLACES) if each == 1 else 4)
