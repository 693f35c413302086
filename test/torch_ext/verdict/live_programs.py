"""Draws programs in which one rank waits for an actor that ends its wait, and the same programs without the act.

The oracle is the program: while its actor may still act, no rule of ours may end it. Each drawn program becomes a test
class whose rank 1 waits; an actor ends that wait after some seconds, mostly more than the proof of a hang takes. In the
dead program the same actor ends at once without acting.
"""

import random
from dataclasses import dataclass

# Waits inside a process, ended by a call of one of its threads or signal handlers.
LOCAL = ("lock", "condition", "event", "queue", "join", "future")
KEYS = ("file_wait", "file_get", "tcp_wait")
# No hang in these is ever proven.
UNPROVABLE = ("pipe", "mp_queue", "flock", "waitpid")
# How the other rank waits for the waiting rank, if it does.
THROUGH = ("", "gloo", "sim", "rpc", "threads")
THREADS = ("threading", "timer", "_thread", "executor", "notified")
BIDES = ("sleep", "epoll", "select", "poll", "timed_lock")
PROCESSES = ("forked", "daemon", "exec", "adopted", "forkserver")
# The actor's place: the waiting rank, the other one, the parent half or its setUpClass().
PLACES = ("rank", "other", "parent", "class")


@dataclass(frozen=True)
class Program:
    """One drawn program."""

    wait: str
    through: str
    actor: str
    bide: str
    place: str
    seconds: float

    @property
    def must_be_proven(self):
        """Whether the engine must prove a hang once the actor is gone."""
        return self.wait not in UNPROVABLE


def draw(seed, number):
    """Return ``number`` programs, the same for each ``seed``."""
    chance = random.Random(seed)
    return [_draw(chance) for _ in range(number)]


def _draw(chance):
    wait = chance.choices((*LOCAL, *KEYS, *UNPROVABLE), weights=[4] * 6 + [3] * 3 + [1] * 4)[0]
    through = chance.choice(THROUGH) if wait in LOCAL else chance.choice(("", "gloo"))
    place = chance.choice(PLACES)
    if wait in UNPROVABLE:
        actor, place = chance.choice(("forked", "threading") if wait != "waitpid" else ("forked", "exec")), "rank"
    elif through == "threads":
        actor, place = chance.choice(THREADS), "rank"  # signal handlers run in the main thread only
    elif place == "class":
        actor = chance.choice(("daemon", "adopted"))
    elif wait in KEYS:
        actor = chance.choice((*THREADS, "forked", "daemon"))
    else:
        actor = chance.choice((*THREADS, *PROCESSES, "alarm"))
    if actor == "alarm" and place != "rank":
        actor = "_thread"
    if actor in ("exec", "adopted") and wait in KEYS:  # a shell cannot set a key
        actor = "daemon"
    if place == "other" and not through:  # else the other rank ends, and its threads with it
        through = "gloo"
    return Program(wait, through, actor, chance.choice(BIDES), place, round(chance.uniform(1.0, 8.0), 1))


def source_of(programs):
    """Return a file with two classes for each program, the live one and the dead one."""
    limit = 20 if len(programs) < 100 else 40  # ends a dead program whose hang has no proof
    lines = [f"LIMIT = {limit}", RUNTIME]
    for number, program in enumerate(programs):
        base = "LiveThreads" if program.through == "threads" else "LiveRanks"
        for kind in ("live", "dead"):
            name = f"{kind}_{number:03}"
            lines.append(
                f"class Test{name}({base}):\n"
                f"    program, acts, name = {program!r}, {kind == 'live'}, {name!r}\n"
                f"    def test_{name}(self): self.runs()\n"
            )
    return "\n\n".join(lines)


# The body of each class.
RUNTIME = '''
import _thread, concurrent.futures, fcntl, queue, select
import torch.distributed.rpc as rpc
from test.torch_ext.verdict.live_programs import LOCAL, Program

LONG = timedelta(seconds=300)
_arrived, _kept = threading.Event(), []


def wait_for_a_lock(seconds):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)


BIDES = {
    "sleep": time.sleep,
    "epoll": lambda seconds: select.epoll().poll(seconds),
    "select": lambda seconds: select.select([], [], [], seconds),
    "poll": lambda seconds: select.poll().poll(seconds * 1000),
    "timed_lock": wait_for_a_lock,
}


def of_forkserver(pid, seconds):
    time.sleep(seconds)
    os.kill(pid, signal.SIGUSR1)


class Sigevent(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
                ("function", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("pad", ctypes.c_char * 64)]


class Acting:
    """Starts the actor of a program."""

    timeout = property(lambda self: 300 if self.acts else LIMIT)  # the first is a deadline, where machines are busy
    is_local = property(lambda self: self.program.wait in LOCAL)

    def start_actor(self, act, pid=0):
        """Have ``act`` called by a thread of this process, or by a process that it starts."""
        seconds = self.program.seconds if self.acts else 0.05
        actor, acts = self.program.actor, self.acts
        if not acts and actor in ("notified", "forkserver", "alarm"):
            return  # a thread of libc's and a server would stay, which may act

        def run():
            BIDES[self.program.bide](seconds)
            if acts:
                act()

        def by_timer():  # a POSIX one, in a thread of libc's
            called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: act())
            event = Sigevent(None, 0, 2, ctypes.cast(called, ctypes.c_void_p))
            timer = ctypes.c_void_p()
            _kept.append((called, event, timer))
            libc = ctypes.CDLL(None)
            assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
            libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9) or 1), None)

        def by_alarm():
            signal.signal(signal.SIGALRM, lambda *_: act())
            signal.setitimer(signal.ITIMER_REAL, seconds)

        def by_forkserver():
            process = multiprocessing.get_context("forkserver").Process(target=of_forkserver, args=(pid, seconds))
            process.start()
            _kept.append(process)

        shell = f"sleep {seconds}; " + (f"kill -USR1 {pid}" if acts else "true")
        pool = concurrent.futures.ThreadPoolExecutor(1)
        starts = {
            "threading": lambda: threading.Thread(target=run, daemon=True).start(),
            "timer": lambda: threading.Timer(seconds, act if acts else int).start(),
            "_thread": lambda: _thread.start_new_thread(run, ()),
            "executor": lambda: _kept.append((pool, pool.submit(run))),
            "notified": by_timer,
            "alarm": by_alarm,
            "forked": lambda: self.fork(run),
            "daemon": lambda: self.start_daemon(run),
            "exec": lambda: _kept.append(subprocess.Popen(["sh", "-c", shell])),
            "adopted": lambda: subprocess.run(["sh", "-c", f"({shell}) > /dev/null 2>&1 &"]),
            "forkserver": by_forkserver,
        }
        starts[actor]()

    def fork(self, run):
        pid = os.fork()
        if pid == 0:
            try:
                run()
            finally:
                os._exit(0)
        _kept.append(pid)
        return pid

    def start_daemon(self, run):
        def become_daemon():
            os.setsid()
            self.fork(run)
        os.waitpid(self.fork(become_daemon), 0)

    # The wait of rank 1

    def prepare_wait(self):
        """Return what waits, and what ends that from another thread of this process."""
        wait, event, fifo = self.program.wait, threading.Event(), queue.SimpleQueue()  # a handler may call its put()
        if wait == "condition":
            condition, over = threading.Condition(threading.RLock()), []
            def notify():
                over.append(1)
                with condition:
                    condition.notify()
            def wait_for():
                with condition:
                    condition.wait_for(lambda: over)
            return wait_for, notify
        if wait == "lock":
            lock = threading.Lock()
            lock.acquire()
            return lock.acquire, lock.release
        if wait == "join":
            thread = threading.Thread(target=event.wait, daemon=True)
            thread.start()
            return thread.join, event.set
        if wait == "future":
            future = concurrent.futures.Future()
            return future.result, lambda: future.set_result(1)
        if wait in ("event", "queue"):
            return (event.wait, event.set) if wait == "event" else (fifo.get, lambda: fifo.put(1))
        if wait == "pipe":
            reader, writer = os.pipe()
            return (lambda: os.read(reader, 1)), (lambda: os.write(writer, b"x"))
        if wait == "mp_queue":
            shared = multiprocessing.SimpleQueue()
            return shared.get, lambda: shared.put(1)
        if wait == "flock":
            held, other = (os.open(f"{self.name}.file", os.O_RDWR | os.O_CREAT) for _ in range(2))
            fcntl.flock(held, fcntl.LOCK_EX)
            return (lambda: fcntl.flock(other, fcntl.LOCK_EX)), (lambda: fcntl.flock(held, fcntl.LOCK_UN))
        if wait == "waitpid":
            never = self.fork(forever) if not self.acts else 0
            return (lambda: os.waitpid(never or self.last_pid(), 0)), lambda: None
        store = self.open_store()
        store.set_timeout(LONG)
        return (lambda: store.wait(["key"]) if wait.endswith("wait") else store.get("key")), self.set_key

    def last_pid(self):
        last = _kept[-1]
        return last if isinstance(last, int) else last.pid

    def open_store(self):
        if self.program.wait.startswith("file"):
            return dist.FileStore(os.path.join(HERE, f"{self.name}.store"), 9)
        return dist.TCPStore("127.0.0.1", int(await_note(f"{self.name}.port")), is_master=False, timeout=LONG)

    def set_key(self):
        self.open_store().set("key", "set")

    def waits(self):
        """What rank 1 does."""
        wait, end = self.prepare_wait()
        by_signal = self.is_local
        if self.program.place == "rank":
            by_signal = self.program.actor in ("exec", "adopted", "forkserver") or (
                self.program.actor in ("forked", "daemon") and self.is_local
            )
        if by_signal:
            signal.signal(signal.SIGUSR1, lambda *_: end())
        if self.program.place == "rank":
            self.start_actor((lambda pid=os.getpid(): os.kill(pid, signal.SIGUSR1)) if by_signal else end, os.getpid())
        note(f"{self.name}.pid", os.getpid())
        wait()

    def act_from_outside(self):
        pid = int(await_note(f"{self.name}.pid"))
        self.start_actor(lambda: self.act_on(pid), pid)

    def act_on(self, pid):
        os.kill(pid, signal.SIGUSR1) if self.is_local else self.set_key()


def returns_late():
    _arrived.wait()


class LiveRanks(Acting, DistributedTestBase):
    world_size = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if cls.program.place == "class":
            self = object.__new__(cls)
            self.start_daemon(self.act_as_daemon)

    def act_as_daemon(self):
        pid = int(await_note(f"{self.name}.pid"))
        if self.acts:
            BIDES[self.program.bide](self.program.seconds)
            self.act_on(pid)

    def setUp(self):
        if self.program.wait == "tcp_wait":
            self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            note(f"{self.name}.port", self.server.port)
        super().setUp()
        if self.program.place == "parent":
            self.act_from_outside()

    def runs(self):
        through = self.program.through
        if through in ("gloo", "sim"):
            self.create_pg("sim" if through == "sim" else "cpu")
        if through == "rpc":
            rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=2, rpc_backend_options=(
                rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.file_name}", rpc_timeout=0)))
        if self.rank == 1:
            self.waits()
            _arrived.set()
        elif self.program.place == "other":
            self.act_from_outside()
        if through in ("gloo", "sim"):
            ones = torch.ones(3, device="sim" if through == "sim" else "cpu")
            dist.all_reduce(ones)
            self.assertEqual(ones.cpu(), torch.full((3,), 2.0))
        if through == "rpc":
            if self.rank == 0:
                rpc.rpc_sync("worker1", returns_late)
            rpc.shutdown()


class LiveThreads(Acting, Threads):
    def runs(self):
        if self.rank == 1:
            wait, end = self.prepare_wait()
            self.start_actor(end)
            wait()
        self.check()
'''
