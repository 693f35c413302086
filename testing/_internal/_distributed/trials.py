"""Tests whose ranks run under fault plans, and what each rank must see of the faults.

Note [Trials]
~~~~~~~~~~~~~
The parent half runs a world without faults, which must pass, then a fresh one for each plan. Files beside the test's
rendezvous file carry the plan to the ranks, and what happens there to all: a line for each fault, and at its end a line
for each rank, with a hash of what its test method returned. A rank that a fault ends or hangs is excused; one that
hangs submits its receipt before, so that no time limit has to end it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import signal
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_ext.faults.plan import TRANSFERS, Fault, Plan, draw, parse, simpler
from torch_ext.faults.points import Armament
from torch_ext.testing._internal._distributed.methods import PARENT_HALF
from torch_ext.testing._internal._distributed.multi_process import raise_verdict
from torch_ext.world import rank as world_rank
from torch_ext.world import settings
from torch_ext.world._os import monotonic
from torch_ext.world.outcome import Ending
from torch_ext.world.settings import Limits, timeout_of
from torch_ext.world.verdict import Judgement, WorldFailure, WorldReport, judge

__unittest = True

_TRIAL = "_torch_ext_trial"
# Worlds to spend on the smallest plan that fails.
_MOST_SMALLER = 12


# Where an error of simccl names the rank that raises it.
_BY_ITSELF = re.compile(r"simccl on rank \d+: |what rank \d+ called")


class Undisturbed:
    """What a rank sees that completes with the result that it has without faults, bit for bit."""


What = type[BaseException] | type[Undisturbed] | signal.Signals


@dataclass
class _Sight:
    """What ranks must see: one of ``what``."""

    what: tuple[What, ...]
    naming: int | None
    within_s: float
    ranks: tuple[int, ...]  # empty: all that no fault ends

    def mismatch(self, rank: int, error: BaseException | None, is_same: bool, took_s: float) -> str:
        """Return what ``rank`` saw instead, as a sentence; empty if it saw what it must."""
        types = tuple(each for each in self.what if isinstance(each, type) and issubclass(each, BaseException))
        wanted = " or ".join(getattr(each, "__name__", str(each)) for each in self.what)
        saw = f"{type(error).__name__}: {error}" if error else f"{'the' if is_same else 'another'} result and no error"
        if not (isinstance(error, types) if error else is_same and Undisturbed in self.what):
            return f"rank {rank}: expected {wanted}, saw {saw}"
        if (
            error
            and self.naming is not None
            and not re.search(rf"\brank {self.naming}\b", _BY_ITSELF.sub("", str(error)))
        ):
            return f"rank {rank}: expected an error that names rank {self.naming}, saw {saw}"
        if took_s > self.within_s:
            return f"rank {rank}: expected {wanted} within {self.within_s:g} s of the fault, not after {took_s:.1f} s"
        return ""


@dataclass
class _Trial:
    """The plans of a test method and its oracles."""

    body: Callable[..., Any]
    plans: tuple[Plan, ...] = ()
    seeds: int = 0
    kinds: tuple[str, ...] = ()
    sights: list[_Sight] = field(default_factory=list)


def fault_plan(*plans: str, seeds: int = 0, kinds: Sequence[str] = ("kill",)) -> Callable[[Any], Any]:
    """Run a method of :class:`MultiProcessTestCase` without faults, then under each of ``plans``, or under ``seeds``
    random ones: one of ``kinds`` at a random collective of a random rank. See :mod:`torch_ext.faults.plan`.

    A rank passes if it sees what :func:`every_rank_sees` says; without that, if it raises nothing. A plan passes if one
    of its faults happens and all ranks pass, except those that the plan ends or hangs. Of a random plan that fails, the
    report has the smallest variant that fails too, and a table of all.
    """
    found = tuple(map(parse, plans))
    for each in kinds if seeds else ():
        parse(f"every rank: {each}")
    if bool(found) == bool(seeds):
        raise ValueError("fault_plan() got plans and seeds, or neither; expected one of them")

    def decorate(test: Any) -> Any:
        trial, wrapper = _trial_of(test)
        trial.plans, trial.seeds, trial.kinds = found, seeds, tuple(kinds)
        return wrapper

    return decorate


def every_rank_sees(
    *what: What, naming: int | None = None, within: float = float("inf"), ranks: Sequence[int] = ()
) -> Callable[[Any], Any]:
    """Say what every rank (or ``ranks``) that no fault ends must see under a :func:`fault_plan`: an exception of a type
    in ``what`` whose text has ``rank N`` for ``naming=N``, :class:`Undisturbed`, or its end by a signal. ``within``:
    seconds since the first fault.
    """

    def decorate(test: Any) -> Any:
        trial, wrapper = _trial_of(test)
        trial.sights.append(_Sight(what, naming, within, tuple(ranks)))
        return wrapper

    return decorate


def _trial_of(test: Any) -> tuple[_Trial, Any]:
    if hasattr(test, _TRIAL):
        return getattr(test, _TRIAL), test
    trial = _Trial(test)

    @functools.wraps(test)
    def in_rank(case: Any, *args: Any, **kwargs: Any) -> None:
        _run_in_rank(trial, case, functools.partial(test, case, *args, **kwargs))

    setattr(in_rank, _TRIAL, trial)
    setattr(in_rank, PARENT_HALF, functools.partial(_run_in_parent, trial))
    return trial, in_rank


@dataclass(frozen=True)
class _Notes:
    """The files of a trial; see Note [Trials]."""

    path: str

    @property
    def reference(self) -> str:
        return f"{self.path}.undisturbed"

    def plan(self) -> Plan | None:
        """Return the plan of the world that runs now; None without one."""
        with contextlib.suppress(FileNotFoundError), open(f"{self.path}.plan", encoding="utf-8") as file:
            return parse(file.read())
        return None

    def begin(self, plan: Plan) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)
        with open(f"{self.path}.plan", "w", encoding="utf-8") as file:
            file.write(str(plan))

    def write(self, **line: Any) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.close(descriptor)

    def read(self, key: str, path: str = "") -> Iterator[dict[str, Any]]:
        """Yield the lines that have ``key``."""
        with contextlib.suppress(FileNotFoundError), open(path or self.path, encoding="utf-8") as file:
            yield from (line for line in map(json.loads, file) if key in line)

    def remove(self) -> None:
        for path in (self.path, self.reference, f"{self.path}.plan"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def _run_in_rank(trial: _Trial, case: Any, body: Callable[[], Any]) -> None:
    notes, rank = _Notes(f"{case.file_name}.faults"), case.rank
    plan = notes.plan()

    def tell(fault: Fault) -> None:
        notes.write(fault=str(fault), rank=rank, time_s=monotonic())

    armament = Armament(plan or Plan(), rank, tell, world_rank.this_rank().hang, counts=bool(trial.seeds))
    error: BaseException | None = None
    result = None
    try:
        result = body()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as raised:  # as DCP's errors are
        error = raised
    finally:
        armament.disarm()
    sights = [sight for sight in trial.sights if plan and (not sight.ranks or rank in sight.ranks)]
    if error is not None and plan is not None and _is_own(plan, rank, error):
        return
    if isinstance(error, unittest.SkipTest) or (error is not None and not sights):
        raise error
    digest = _digest(result)
    if plan is None:
        calls = sum(count for name, count in armament.calls.items() if name not in TRANSFERS)
        notes.write(end=rank, digest=digest, calls=calls)
        return
    first_s = min((line["time_s"] for line in notes.read("fault")), default=monotonic())
    before = next((line["digest"] for line in notes.read("end", notes.reference) if line["end"] == rank), "")
    for sight in sights:
        if why := sight.mismatch(rank, error, digest == before, monotonic() - first_s):
            raise AssertionError(why) from error


def _is_own(plan: Plan, rank: int, error: BaseException) -> bool:
    """Whether ``error`` is a planned one of this rank itself."""
    planned = [fault for fault in plan.faults if fault.strikes(rank) and fault.kind in ("raise", "fail")]
    return any("planted fault" in str(each).lower() for each in (error, error.__cause__)) and bool(planned)


def _digest(value: Any) -> str:
    """Return a hash of tensors in containers, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            local = getattr(part, "_local_tensor", part).detach().cpu().contiguous()
            digest.update(f"{local.dtype}{tuple(local.shape)}".encode())
            digest.update(local.view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            add(list(part.items()))
        elif isinstance(part, (list, tuple)):
            digest.update(f"[{len(part)}".encode())
            for each in part:
                add(each)
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()


def _run_in_parent(trial: _Trial, case: Any, fn: Any) -> None:
    notes, end_s = _Notes(f"{case.file_name}.faults"), monotonic() + timeout_of(case)
    try:
        outcomes = case._world.wait(Limits(timeout_of(case), hang_s=settings.hang_after_s()))
        raise_verdict(outcomes, case._world.took_s)
        os.replace(notes.path, notes.reference)
        calls = {line["end"]: line["calls"] for line in notes.read("end", notes.reference)}
        plans = trial.plans or tuple(draw(seed, calls, trial.kinds) for seed in range(trial.seeds))
        rows: list[str] = []
        for number, plan in enumerate(plans):
            began_s = monotonic()
            failure = _attempt(trial, case, notes, plan, end_s)
            rows.append(f"{number:>5}  {'FAILED' if failure else 'passed'}  {monotonic() - began_s:5.2f} s  {plan}")
            if failure is not None:
                raise _smallest(trial, case, notes, plan, failure, end_s, rows)
    finally:
        notes.remove()


def _attempt(trial: _Trial, case: Any, notes: _Notes, plan: Plan, end_s: float) -> WorldFailure | None:
    """Run a world under ``plan``; return its failure."""
    case._kill_ranks()
    notes.begin(plan)
    case._spawn_processes()
    limits = Limits(max(1.0, end_s - monotonic()), hang_s=settings.hang_after_s())
    signals = {-each for sight in trial.sights for each in sight.what if isinstance(each, signal.Signals)}
    codes = {fault.exit_code for fault in plan.faults if fault.exit_code is not None}
    one = next(iter(codes), None) if len(codes) == 1 and not signals else None
    world = case._world
    outcomes = world.wait(limits, one, bool(codes | signals) and one is None)
    happened = [line["fault"] for line in notes.read("fault")]

    def excused(rank: int) -> set[int | None]:
        return signals | {fault.exit_code for fault in plan.faults if fault.strikes(rank) and str(fault) in happened}

    judged = [
        replace(each, ending=Ending.PASSED)
        if each.receipt is None and not each.was_stopped and each.exit_code in excused(each.rank) - {None}
        else each
        for each in outcomes
    ]
    verdict = judge(judged)
    if verdict.judgement is Judgement.PASSED and not happened and not any(f.kind == "fail" for f in plan.faults):
        verdict = replace(
            verdict, judgement=Judgement.FAILED, summary=f"no fault of the plan has happened: {plan}", culprits=()
        )
    if verdict.judgement is not Judgement.FAILED:
        return None
    return WorldFailure(WorldReport(tuple(judged), verdict, world.took_s, (f"The fault plan: {plan}",)))


def _smallest(
    trial: _Trial, case: Any, notes: _Notes, plan: Plan, failure: WorldFailure, end_s: float, rows: list[str]
) -> WorldFailure:
    """Return the failure of the smallest variant of ``plan`` that fails, with the table of all plans."""
    left = _MOST_SMALLER if trial.seeds or len(plan.faults) > 1 else 0
    queue = simpler(plan)
    while queue and left:
        left, smaller = left - 1, queue.pop(0)
        if found := _attempt(trial, case, notes, smaller, end_s):
            failure, plan, queue = found, smaller, simpler(smaller)
    title = f"{'The smallest plan that fails' if left < _MOST_SMALLER else 'The plan'}:\n    @fault_plan({str(plan)!r})"
    details = (title, "\n".join(("Plans:", *rows))) if trial.seeds else (title,)
    return WorldFailure(replace(failure.report, details=details))


def nothing_lost(folder: str | os.PathLike[str]) -> Any:
    """Return the state dict of the newest whole DCP checkpoint below ``folder``.

    Raises AssertionError if a checkpoint that says it is whole, by its ``.metadata``, cannot be loaded, or if none is.
    """
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    marks = [mark for each in os.scandir(folder) if os.path.exists(mark := os.path.join(each.path, ".metadata"))]
    if not marks:
        raise AssertionError(f"{os.fspath(folder)} has no whole checkpoint: no folder in it has a .metadata")
    state: Any = None
    for mark in sorted(marks, key=os.path.getmtime):
        held: Any = io.BytesIO()
        try:
            dcp_to_torch_save(os.path.dirname(mark), held)
        except (Exception, CheckpointException) as error:
            raise AssertionError(f"{mark} marks a checkpoint as whole that cannot be loaded: {error}") from error
        held.seek(0)
        state = torch.load(held, weights_only=False)
    return state
