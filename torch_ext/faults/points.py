"""Arms a fault plan in this process: counts the moments that its points name, and does what its faults say there.

Note [Where calls pass]
~~~~~~~~~~~~~~~~~~~~~~~
Calls of simccl pass the seam of its transport (Note [Seams] in ``sim/csrc/transport/transport.cpp``), where each kind
of fault is possible. Calls with tensors of the host pass torch's dispatcher, also those from C++, such as DDP's, and
those of ``dist.barrier()``. There, a wrapper of the operations of ``c10d`` can delay or fail a call and corrupt what it
sends, but not lose or repeat it. It has the key of autograd, which comes before gloo's kernels and which tensors of
inference mode lack. Calls of other accelerators pass unseen. Only the points that the plan names are watched.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import pydoc
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch_ext.compat import c10d as compat
from torch_ext.faults.modules import Names
from torch_ext.faults.plan import COLLECTIVE, OF_A_CALL, TIME, TRANSFERS, Fault, Plan, family

# What a call of simccl gets back from the seam: the kind, and the element and bit to corrupt.
Effect = tuple[str, int, int]
# The second highest bit of an element, of its sign and exponent, so that no tolerance covers it.
_STRIKING_BIT = -2
# The native half of the simulated accelerator, once a process has loaded it.
native: Any = None


class InjectedFault(RuntimeError):
    """Raised by a fault of kind ``raise``."""


def _is_now(fault: Fault) -> bool:
    """Whether this process is in the generation of the fault. A survivor of a restart goes on in the next one."""
    return fault.point.generation in (None, int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))


def hang_for_ever() -> NoReturn:
    """Wait without a limit, as a thread does whose peer never answers."""
    while True:
        threading.Event().wait()


class _Armed:
    """A fault of this rank, and how many calls have fitted its point."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.seen, self.has_happened = 0, False
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Count one more call, and return whether the fault happens at it."""
        if not _is_now(self.fault):
            return False
        with self._lock:
            self.seen += 1
            point = self.fault.point
            lasts = point.onwards or self.fault.kind in ("slow", "split")
            return self.seen >= point.number if lasts else self.seen == point.number


def announce(fault: Fault) -> None:
    """Say that a fault happens now."""
    with contextlib.suppress(OSError, ValueError):  # the program has closed its stderr
        print(f"torch_ext: a planted fault: {fault}", file=sys.stderr, flush=True)


class Armament:
    """The armed faults of rank ``rank`` in this process. ``tell`` is called once for each fault that happens, just
    before it does; ``hang`` by a fault that hangs. Call :meth:`disarm` to end it.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tell: Callable[[Fault], None] = announce,
        hang: Callable[[], None] = hang_for_ever,
        *,
        counts: bool = False,
    ) -> None:
        self._tell, self._hang = tell, hang
        armed = [_Armed(fault) for fault in plan.faults if fault.strikes(rank)]
        self._armed = {where: [each for each in armed if each.fault.point.where == where] for where in _PLACES}
        self._of_memory = [each for each in self._armed[""] if each.fault.kind == "fail"]
        self._calls = [each for each in self._armed[""] if each not in self._of_memory]
        self._is_slow = any(each.fault.kind == "slow" for each in self._calls)
        self._used_s = time.process_time()
        self._undo = contextlib.ExitStack()
        self._saw_clock = False
        self._folders = {each.fault.point.name: _folder(each.fault.point.name) for each in self._armed["write"]}
        self.calls: Counter[str] = Counter()  # of process groups, by family
        try:
            places = [where for where in _PLACES if self._armed[where] or (counts and not where)]
            places += ["", "forward", "step", "phase"] if self._armed[TIME] else []
            places += ["write" for each in armed if each.fault.kind == "fill"]
            for prepare in dict.fromkeys(_PLACES[where] for where in places):
                prepare(self)
        except BaseException:
            self.disarm()
            raise

    def missed(self) -> list[str]:
        """Return sentences about the faults that have not happened."""
        return [
            f"{each.fault} has not happened: "
            + ("no call came then or later" if where == TIME else f"its call was reached {each.seen} times")
            for where, armed in self._armed.items()
            for each in armed
            if not each.has_happened and each not in self._of_memory and _is_now(each.fault)
        ]

    def disarm(self) -> None:
        """Remove what was installed. Faults that have not happened never will."""
        self._undo.close()

    # What happens

    def reach(self, where: str, fits: Callable[[str], bool]) -> Effect | None:
        """Note that this rank has reached a point; ``fits`` tells its name from others. Return the effect on a call."""
        if self._armed[TIME]:
            self._look_at_the_clock()
        return self._strike(each for each in self._armed[where] if fits(each.fault.point.name))

    def _look_at_the_clock(self) -> None:
        is_on = native is not None and native.is_clock_on()
        self._saw_clock |= is_on
        if is_on:
            now_ns = native.clock_ns()
            self._strike(each for each in self._armed[TIME] if now_ns >= each.fault.point.time_ns)
        elif not self._saw_clock:
            raise ValueError(f"{self._armed[TIME][0].fault}: there is no virtual time; add --clock MODEL, such as unit")

    def _strike(self, fitting: Iterator[_Armed]) -> Effect | None:
        effect = None
        for each in fitting:
            if each.is_due():
                if not each.has_happened:
                    each.has_happened = True
                    self._tell(each.fault)
                effect = self._perform(each.fault) or effect
        return effect

    def _perform(self, fault: Fault) -> Effect | None:
        if fault.kind in OF_A_CALL:
            numbers = [int(word) for word in fault.value.split() if word.isdigit()] if fault.kind == "corrupt" else []
            element = numbers[0] if "element" in fault.value else 0
            return fault.kind, element, numbers[-1] if "bit" in fault.value else _STRIKING_BIT
        if fault.kind == "raise":
            raise _error_type(fault.value)(f"torch_ext: a planted fault: {fault}")
        if fault.kind in ("kill", "exit"):
            _end(fault)
        elif fault.kind == "hang":
            self._hang()
        elif fault.kind == "delay":
            time.sleep(fault.seconds)
        elif fault.kind == "stop":
            wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
            with subprocess.Popen(["sh", "-c", wake], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "fill":
            native.fill_disk(self._folders.get(fault.point.name, ""), int(fault.value.split()[-1].replace("disk", "0")))
        elif fault.kind == "slow":
            time.sleep((float(fault.value[:-1]) - 1) * (time.process_time() - self._used_s))
        return None

    # Calls of process groups

    def on_call(self, name: str, group: str) -> Effect | None:
        """The seam of a call ``name`` of the process group that is named ``group``."""
        kind = family(name)
        self.calls[kind] += 1
        if self._armed[TIME]:
            self._look_at_the_clock()
        effect = self._strike(each for each in self._calls if _is_of(each.fault, kind, group))
        if effect is not None and effect[0] == "split":
            effect = ("drop", 0, 0) if self._is_cut(group) else None
        if self._is_slow:
            self._used_s = time.process_time()
        return effect

    def _is_cut(self, group: str) -> bool:
        """Whether a group has ranks on both sides of a network that is split in two."""
        sides = (set(map(int, each.fault.value.split(", "))) for each in self._calls if each.fault.kind == "split")
        members = set(compat.ranks_of_groups().get(group, ()))
        return any(members & side and members - side for side in sides)

    def _watch_calls(self) -> None:
        for each in self._of_memory:
            if not _is_now(each.fault):
                continue
            if native is None:
                raise ValueError(f"{each.fault}: allocations fail on the simulated accelerator only")
            native.fail_allocation(each.fault.point.number)
            self._undo.callback(native.fail_allocation, 0)
        _seams.open(self)
        self._undo.callback(_seams.close, self)

    # Modules, optimizers, functions

    def _watch_modules(self) -> None:
        from torch.nn.modules import module

        names = Names([each.fault.point.name for each in (*self._armed["forward"], *self._armed["backward"])])

        def before(called: Any, _: Any) -> None:
            name = names.of(called)
            self.reach("forward", lambda wanted: names.fit(name, wanted))

        def after(called: Any, _: Any, output: Any) -> None:
            tensor = next((each for each in _tensors(output) if each.requires_grad), None)
            name = names.of(called)
            if tensor is not None and any(names.fit(name, each.fault.point.name) for each in self._armed["backward"]):
                tensor.register_hook(lambda _: self.reach("backward", lambda wanted: names.fit(name, wanted)) and None)

        if self._armed["forward"] or self._armed[TIME]:
            self._undo.callback(module.register_module_forward_pre_hook(before).remove)
        if self._armed["backward"]:
            self._undo.callback(module.register_module_forward_hook(after).remove)

    def _watch_steps(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        hook = register_optimizer_step_pre_hook(lambda *_: self.reach("step", lambda _: True) and None)
        self._undo.callback(hook.remove)

    def _watch_phases(self) -> None:
        _listening.append(self)
        self._undo.callback(_listening.remove, self)

    def _watch_writes(self) -> None:
        if native is None:
            raise ValueError("fill disk, and points 'write to FOLDER', are for the simulated accelerator only")

        def on_write(path: str) -> None:
            self.reach("write", lambda name: path.startswith(self._folders[name]))

        native.watch_writes(on_write)
        self._undo.callback(native.watch_writes, None)

    def _watch_functions(self) -> None:
        for name in dict.fromkeys(each.fault.point.name for each in self._armed["call"]):
            self._replace(name)

    def _replace(self, name: str) -> None:
        """Replace the function of this dotted name, in its module and where others have imported it."""
        function = pydoc.locate(name)
        owner: Any = pydoc.locate(name.rpartition(".")[0])
        if not callable(function) or owner is None:
            raise ValueError(f"call of {name}: there is no such function; give its full name, such as torch.save")

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            kind, *where = self.reach("call", name.__eq__) or ("", 0, 0)
            if kind == "drop":
                return None
            if kind == "duplicate":
                function(*arguments, **keywords)
            result = function(*arguments, **keywords)
            return corrupted(result, *where, in_place=False) if kind == "corrupt" else result

        holders = {id(owner): owner}
        for found in list(sys.modules.values()):
            if getattr(found, "__dict__", {}).get(name.rpartition(".")[2]) is function:
                holders[id(found)] = found
        for holder in holders.values():
            setattr(holder, name.rpartition(".")[2], call)
            self._undo.callback(setattr, holder, name.rpartition(".")[2], function)


class _Seams:
    """Passes calls of process groups to the armaments that watch them; see Note [Where calls pass]."""

    def __init__(self) -> None:
        self._armaments: list[Armament] = []
        self._undo = contextlib.ExitStack()

    def open(self, armament: Armament) -> None:
        self._armaments.append(armament)
        if len(self._armaments) > 1:
            return
        if native is not None:
            native.set_fault_hook(self._on_call)
            self._undo.callback(native.set_fault_hook, None)
        self._wrap_operations()

    def close(self, armament: Armament) -> None:
        self._armaments.remove(armament)
        if not self._armaments:
            self._undo.close()

    def _on_call(self, name: str, group: str) -> Effect | None:
        effect = None
        for each in list(self._armaments):
            effect = each.on_call(name, group) or effect
        return effect

    def _wrap_operations(self) -> None:
        import torch

        library = torch.library.Library("c10d", "IMPL")
        self._undo.callback(library._destroy)
        for name in compat.operations():
            if family(name):
                library.impl(name, self._replacement(getattr(torch.ops.c10d, name).default), "AutogradCPU")

    def _replacement(self, operation: Any) -> Callable[..., Any]:
        import torch

        names = [each.name for each in operation._schema.arguments]
        place = names.index("process_group")
        sent = next((at for at, name in enumerate(names) if name.startswith("input")), 0)
        name = operation._schema.name.partition("::")[2]
        is_copied = name == "send" or names[sent].startswith("input")

        def call(*arguments: Any) -> Any:
            group = torch.distributed.ProcessGroup.unbox(arguments[place]).group_name
            kind, *where = self._on_call(name, group) or ("", 0, 0)
            if kind == "corrupt":
                value = corrupted(arguments[sent], *where, in_place=not is_copied)
                arguments = (*arguments[:sent], value, *arguments[sent + 1 :])
            elif kind:
                raise NotImplementedError(
                    f"a planted fault can {kind} calls of simccl only, but {family(name)} of group {group} goes to "
                    "another backend. Run on the simulated accelerator, or plan another fault, such as corrupt or hang."
                )
            with compat._AutoDispatchBelowAutograd():
                return operation(*arguments)  # releases the GIL, which gloo's threads may need

        return call


_seams = _Seams()

# What installs the places of each kind of point.
_PLACES: dict[str, Callable[[Armament], None]] = {
    "": Armament._watch_calls,
    "forward": Armament._watch_modules,
    "backward": Armament._watch_modules,
    "step": Armament._watch_steps,
    "phase": Armament._watch_phases,
    "call": Armament._watch_functions,
    "write": Armament._watch_writes,
    TIME: Armament._watch_calls,
}
_listening: list[Armament] = []


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a part of a program: the point ``phase NAME #k`` of a plan is its k-th beginning."""
    for each in list(_listening):
        each.reach("phase", name.__eq__)
    yield


def corrupted(value: Any, element: int, bit: int, *, in_place: bool) -> Any:
    """Return ``value``, a tensor or a list with tensors, with one bit flipped in each."""
    import torch

    if isinstance(value, (list, tuple)):
        return type(value)(corrupted(each, element, bit, in_place=in_place) for each in value)
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    with torch.no_grad():
        flipped = value if in_place else value.clone()
        whole = flipped.detach().cpu().contiguous().view(-1)
        bits = whole.element_size() * 8
        at = element % whole.numel() * bits + bit % bits
        whole.view(torch.uint8)[at // 8] ^= 1 << (at % 8)
        flipped.copy_(whole.view(flipped.shape))
    return flipped


def _is_of(fault: Fault, kind: str, group: str) -> bool:
    name = fault.point.name
    if name == COLLECTIVE and kind in TRANSFERS:
        return False
    wanted = fault.point.group
    return name in ("", COLLECTIVE, kind) and (not wanted or wanted in compat.names_of_group(group))


def _end(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.Signals[fault.value or "SIGKILL"])
    else:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(int(fault.value or "1"))


def _folder(name: str) -> str:
    """Return what the paths of files below a folder begin with."""
    return os.path.join(os.path.realpath(name), "") if name else ""


def _error_type(name: str) -> Any:
    found = getattr(builtins, name, None) or pydoc.locate(name) if name else InjectedFault
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise ValueError(f"raise {name}: there is no such exception")
    return found


def _tensors(value: Any) -> Iterator[Any]:
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
