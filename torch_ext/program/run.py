"""``torch_ext run``: starts the ranks of a program, waits for them, judges them and prints the verdict.

Runs in the process that the user has started, and loads no torch there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

from torch_ext import machine_memory, personality, replicas
from torch_ext.faults import plan
from torch_ext.personality import SIM
from torch_ext.program import autoload, dry, generations, rank, timeline
from torch_ext.program.generations import Generations, Policy, Store, policy
from torch_ext.program.main_module import Program
from torch_ext.program.rank import Facts, find_unused
from torch_ext.program.serve import zygote_for
from torch_ext.program.timeline import replicas_of
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.options import clock_model, count, schedule_of, seconds, typed
from torch_ext.world import settings, wording
from torch_ext.world.files import Live
from torch_ext.world.follow import World, start_world
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.settings import Limits
from torch_ext.world.start import RankTask, ZygoteLostError
from torch_ext.world.tree import LoadError, ZygoteClient, ZygoteDiedError
from torch_ext.world.verdict import Judgement, Verdict, WorldReport, judge, render
from torch_ext.world.warm import search_path
from torch_ext.world.wording import own_message, ranks_phrase

# Simulated devices have indices below this.
_MAX_SIMULATED = 64
# Seconds that peers get after a failure of a rank, and ranks after a signal: programs write checkpoints at exit.
_GRACE_S, _SIGNAL_S = 3.0, 10.0
# A wait counts as endless if it does not end by itself within _ENDLESS_S seconds. If hangs are only reported, a shorter
# limit applies to torch's operations, which raise at their own limit.
_ENDLESS_S, _RAISES_LATER_S = 240.0, 5.0
# Parts of torch's errors in a program that asks a build without CUDA for it.
_NO_CUDA = ("have NCCL built in", "compiled with CUDA enabled", "Found no NVIDIA driver")
# Time limit of a query to the store in seconds, and its listen backlog.
_STORE_S, _BACKLOG = 2.0, 1024
# A shell's exit code for a process that was killed by signal N is this plus N.
_BY_SIGNAL = 128
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Options for the simulated device -> the variables that mean the same.
_OF_SIM = {"memory": "TORCH_EXT_SIM_MEMORY", "schedule": "TORCH_EXT_SCHEDULE"}
# Values of --output: which output of running ranks to show. A report uses all output.
_LIVE: dict[str, bool | Live] = {
    "rank0": Live(ranks=(0,), prefix=None),
    "all": Live(verbatim=True),
    "quiet": False,
}

_DESCRIPTION = """\
Run a program on several ranks of this machine, as torchrun does, without a GPU: each rank has a simulated device. A
rank that fails, dies or hangs is named, with what every rank did. Exit code: that of the first rank that failed, 128
plus the signal that killed it, 1 if it was stopped or a hang was reported; 2 for a usage error; 130 after Ctrl-C.
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse ``arguments``; ``program`` becomes a :class:`Program` without ``path``. Raises SystemExit: 2 after printing
    a usage error, 0 after ``--help``.
    """
    parser = _parser()
    found = parser.parse_args(arguments)
    found.chosen = _chosen_ranks(parser, found)
    words = found.program[1:] if found.program[:1] == ["--"] else found.program
    if not words:
        parser.error("no program: name a script, or a module after -m")
    if found.compare and not found.clock:
        parser.error("--compare is for a run in virtual time: add --clock MODEL")
    if found.pdb is not None and (why := settings.why_no_terminal()):
        parser.error(why)
    if found.pdb is not None and found.pdb not in found.chosen:
        parser.error(f"--pdb {found.pdb}: expected one of {ranks_phrase(found.chosen)}")
    on_sim = found.device == SIM
    for given, flag in (
        (found.cuda_as_sim, "--cuda-as-sim"),
        *((getattr(found, name) is not None, f"--{name}") for name in _OF_SIM),
        (found.races not in (None, "off"), "--races"),
        (bool(found.clock), "--clock"),
        (found.strict, "--strict"),
        (found.dry, "--dry"),
    ):
        if given and not on_sim:
            parser.error(f"{flag} is for the simulated accelerator, but --device is {found.device}")
    if on_sim and found.ranks > _MAX_SIMULATED:
        parser.error(f"-n {found.ranks}: there are at most {_MAX_SIMULATED} simulated devices, one for each rank")
    if not found.module and not os.path.exists(words[0]):
        parser.error(f"{words[0]}: no such file; give a module's name after -m")
    races = found.races or os.environ.get("TORCH_EXT_RACES") or "off"
    words = words[0], found.module, tuple(words[1:])
    found.program = Program(*words, (), on_sim, found.cuda_as_sim, races, found.clock or "", "", found.check_replicas)
    if found.dry:
        found.program = replace(found.program, assumed=tuple(found.assume))
    return found


def _chosen_ranks(parser: argparse.ArgumentParser, found: argparse.Namespace) -> tuple[int, ...]:
    """Return the numbers of the ranks to run, and set ``ranks`` to how many they are."""
    text = found.ranks
    try:
        if found.dry:
            chosen = tuple(dict.fromkeys(int(each) for each in (text or "0").split(",")))
        else:
            chosen = tuple(range(count(1)(text or "4")))
    except ValueError as error:
        parser.error(f"-n/--ranks {text}: {error}")
    if problem := dry.problem(found, chosen) or generations.problem(found):
        parser.error(problem)
    if found.faults and found.dry:
        parser.error("--faults: the peers of a dry run do not exist; leave out --dry")
    if found.faults and not found.faults.ranks.issubset(chosen):
        parser.error(f"--faults '{found.faults}': expected ranks among {ranks_phrase(chosen)}")
    if found.faults and found.faults.needs_clock and not found.clock:
        parser.error(f"--faults '{found.faults}': there is no virtual time; add --clock MODEL, such as unit")
    found.ranks = len(chosen)
    return chosen


def _parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [options] SCRIPT|-m MODULE [ARGS]"
    parser = argparse.ArgumentParser("torch_ext run", description=_DESCRIPTION, allow_abbrev=False, usage=usage)
    add = parser.add_argument
    ranks = "number of ranks (4); with --dry, the ranks to run, such as 0,7 (0)"
    add("-n", "--ranks", metavar="N", help=ranks)
    where = f"the ranks' device ({SIM}); each rank has one"
    add("--device", choices=(SIM, "cpu", "cuda"), default=SIM, help=where)
    add("--cuda-as-sim", action="store_true", help="CUDA and NCCL mean the simulated accelerator")
    size = "memory of each simulated device, such as 2GiB"
    add("--memory", type=typed(machine_memory.bytes_of), metavar="SIZE", help=size)
    add("--races", choices=("error", "report", "off"), help="fail for races between streams, or report them (off)")
    when = "when streams that may not have waited see results: early (default), late, random or random:SEED"
    add("--schedule", type=typed(schedule_of), metavar="WHEN", help=when)
    seed = "the same as --schedule random:N"
    add("--seed", type=typed(lambda text: schedule_of(f"random:{text}")), dest="schedule", metavar="N", help=seed)
    clock = "run in virtual time by this model (unit, h100-sxm, a100, cpu, or a JSON file); end with its figures"
    add("--clock", type=typed(clock_model), metavar="MODEL", help=clock)
    since = "with --clock: also print what moved since the run that wrote this trace"
    add("--compare", type=typed(timeline.read), metavar="TRACE", help=since)
    same = "fail if ranks hold different bits in replicas: DTensors, what DDP trains, gradients, optimizer state"
    add("--check-replicas", action="store_true", help=same)
    wrong = "what goes wrong in the ranks, such as 'rank 1: kill at all_reduce #3'; or a file: see docs/faults.md"
    add("--faults", type=typed(plan.read), metavar="PLAN", help=wrong)
    again = "after a loss of ranks, restart all (world) or those (rank), or go on without them (shrink), N times (3)"
    add("--restart", type=typed(policy), default=Policy(), metavar="POLICY[:N]", help=again)
    add(
        "--pdb",
        type=typed(count(0)),
        metavar="RANK",
        help="debug this rank at the terminal: at breakpoint() and failures",
    )
    alone = "of a job of --world ranks, run a few alone; compute nothing, and report the memory that they need"
    add("--dry", action="store_true", help=alone)
    add("--world", type=typed(count(1)), metavar="N", help="number of ranks of the job of a dry run")
    value = "in a dry run, the value that the host reads at lines with WORD, or at FILE:LINE, or everywhere"
    add("--assume", type=typed(dry.assumption), action="append", default=[], metavar="WORD=VALUE", help=value)
    add("--timeout", type=typed(seconds), metavar="S", help="end the program after S seconds")
    hang = "report a proven hang and go on, or also end the program (report)"
    add("--hang", choices=("report", "end"), default="report", help=hang)
    shown = "show rank 0's output unchanged, all ranks' output with the rank before each line, or none (all)"
    add("--output", choices=tuple(_LIVE), default="all", help=shown)
    add("--strict", action="store_true", help="fail if no rank ever used a device or a process group")
    add("-m", "--module", action="store_true", help="run a module, given by its name")
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help="the program and its arguments")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the program of ``arguments`` and return the exit code of the command; see ``--help``."""
    options = parse(arguments)
    try:
        settings.hang_after_s()
    except ValueError as error:  # of that variable
        print(f"error: {error}", file=sys.stderr)
        return 2
    interrupts = Interrupts(signals=_STOPPED_BY)
    try:
        return _run(options, interrupts)
    except KeyboardInterrupt:
        return _BY_SIGNAL + interrupts.number
    except LoadError as error:
        trace = str(error)
        message = own_message(trace) or f"the modules of the ranks cannot be loaded\n{trace}"
    except ZygoteLostError as error:
        message = str(error)
    except ZygoteDiedError as error:
        message = f"{error}; the ranks ended with it"
    finally:
        for number in _STOPPED_BY:
            signal.signal(number, signal.SIG_IGN)  # keep the exit code that is decided
    print(f"error: {message}", file=sys.stderr)
    return 1


def _run(options: argparse.Namespace, interrupts: Interrupts) -> int:
    path = search_path()
    autoload.hide()
    before = dict(os.environ)
    if options.program.cuda_as_sim:
        before[personality.VARIABLE] = personality.AS_CUDA
    _set_environment(options)
    size = options.world or options.ranks
    hosts = dry.hosts(size) if options.dry else 1
    with zygote_for(options.program.simulated, path, before) as zygote:
        given = options.restart, options.chosen, size, hosts, options.timeout or float("inf")
        with contextlib.closing(Generations(*given, lambda: _Store(zygote))) as run:
            while (code := _run_world(options, path, zygote, run, interrupts)) and run.starts_again():
                pass
            run.tell()
            return code


def _run_world(
    options: argparse.Namespace,
    path: tuple[str, ...],
    zygote: ZygoteClient,
    run: Generations,
    interrupts: Interrupts,
) -> int:
    """Run the program on one world and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="torch_ext_") as events:
        options.program = replace(options.program, path=path, events=events)
        shown = _LIVE[options.output]
        world = start_world(
            zygote,
            [_task(options.program, run, place) for place in range(options.ranks)],
            show=replace(shown, numbers=options.chosen) if isinstance(shown, Live) else shown,
            name="rank",
            test=options.program.target,
        )
        try:
            with world:
                code = _wait(world, options, run, interrupts)
        finally:
            differ = options.check_replicas and replicas.compare(replicas_of(events, r) for r in range(options.ranks))
            if differ:
                wording.announce(f"error: {differ}")
        return code or int(bool(differ))


def _task(program: Program, run: Generations, place: int) -> RankTask:
    return RankTask(rank.run, (program,), environment=run.variables(place))


class _Store:
    """The ranks' rendezvous store, in a separate process. Its socket listens before the ranks start."""

    def __init__(self, zygote: ZygoteClient) -> None:
        with socket.socket() as listening:
            listening.bind((rank.STORE_HOST, 0))
            listening.listen(_BACKLOG)
            self.port: int = listening.getsockname()[1]
            target, more = "torch_ext.program.rank:serve_store", [listening.fileno()]
            self._process = zygote.start(target, self.port, os.environ, more)
        self.close = self._process.close

    def was_used(self) -> bool:
        """Whether a rank has ever set a key; False if the store does not answer."""
        with contextlib.suppress(OSError):
            self._process.channel.send("keys")
            if self._process.channel.poll(_STORE_S):
                return bool(self._process.channel.receive()[0])
        return False


def _set_environment(options: argparse.Namespace) -> None:
    """Set the variables of all ranks, and of the processes that they start, in this process."""
    if options.program.simulated:
        os.environ[personality.VARIABLE] = personality.AS_CUDA if options.program.cuda_as_sim else autoload.ON
        os.environ.setdefault("TORCH_EXT_SIM_DEVICES", str(dry.PER_HOST if options.dry else options.ranks))
        machine_memory.share()  # before any process starts, so that all share one page
        if options.dry:
            os.environ["TORCH_EXT_SIM_MEMORY"] = str(dry.UNBOUNDED)
        given = {variable: getattr(options, name) for name, variable in _OF_SIM.items()}
        os.environ.update({variable: str(value) for variable, value in given.items() if value is not None})
    if options.faults:
        os.environ["TORCH_EXT_FAULTS"] = str(options.faults)
    if options.pdb is not None:
        os.environ["TORCH_EXT_PDB"] = str(options.chosen.index(options.pdb))
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():  # like torchrun, keep the user's value
        os.environ.setdefault("TORCH_EXT_THREADS", os.environ["OMP_NUM_THREADS"])


def _wait(world: World, options: argparse.Namespace, run: Generations, interrupts: Interrupts) -> int:
    limits = Limits(
        test_s=run.left_s,
        grace_s=_GRACE_S,
        hang_s=settings.hang_after_s(),
        endless_s=_ENDLESS_S,
        raises_later_s=_ENDLESS_S if options.hang == "end" else _RAISES_LATER_S,
        end_hangs=options.hang == "end",
    )
    hangs: list[float] = []

    def on_hang(outcomes: list[Outcome]) -> None:
        hangs.append(world.took_s)
        shown = _as_program(run.members(outcomes), options.output)
        _print_report("HUNG", options, WorldReport(tuple(shown), judge(shown), hangs[-1]))
        until = f"--timeout {options.timeout:g}" if options.timeout else "a time limit in it"
        print(file=sys.stderr)
        wording.announce(f"the program goes on until {until} or Ctrl-C; with --hang end, a hang ends it")

    recover = functools.partial(_recover, world, options, run) if run.outlive_losses else None
    try:
        outcomes = world.wait(limits, expected_exit=0, on_hang=on_hang, recover=recover)
    except KeyboardInterrupt:
        number = interrupts.number
        _forward_signal(world, number)
        wording.announce(f"interrupted by {signal.Signals(number).name}")
        raise
    took_s = time.monotonic() - world.started_s
    outcomes = run.members(outcomes)
    facts = [outcome.receipt.facts if outcome.receipt else None for outcome in outcomes]
    silent = [outcome.rank for outcome in outcomes if outcome.ending is Ending.SILENT]
    outcomes = _as_program(outcomes, options.output)
    verdict = judge(outcomes)
    if verdict.judgement is not Judgement.PASSED:
        _print_report("FAILED", options, WorldReport(tuple(outcomes), verdict, took_s))
        _advise(options.program, outcomes)
        run.end(verdict.summary)
        return _exit_code(outcomes, facts, verdict)
    for outcome in outcomes:
        for command in outcome.left_behind:
            wording.announce(f"rank {outcome.rank} {wording.left_behind(command)}")
    if silent:
        wording.announce(
            f"{ranks_phrase(silent)} ended by os._exit(0) or similar, which counts as success; races and unused "
            "devices were not checked there"
        )
    timelines = [each.timeline for each in facts if each is not None and each.timeline is not None]
    if options.program.clock and len(timelines) == len(facts):
        print(f"\n{timeline.finish(timelines, options.program.events, options.chosen, options.compare)}", flush=True)
    if options.dry:
        code = dry.finish(
            [each.memory if each else None for each in facts], options.chosen, options.world, options.memory
        )
    else:
        code = _judge_usage(options, facts, run.store)
    if hangs:
        wording.announce(f"error: the program ended by itself, but had hung after {hangs[0]:.0f} s: see above")
    return code or int(bool(hangs))


def _recover(world: World, options: argparse.Namespace, run: Generations, lost: list[Outcome]) -> bool:
    """Go on without ``lost``, or with others in their place, if the options say so."""
    places = [outcome.rank for outcome in lost]
    if not run.goes_on(places):
        return False
    shown = [replace(each, stacks="") for each in _as_program(run.members(lost), options.output)]
    report = WorldReport(tuple(shown), judge(shown), world.took_s)
    _print_report("LOST", options, report)
    run.end(report.verdict.summary)
    run.go_on(world, places, functools.partial(_task, options.program, run))
    return True


def _advise(program: Program, outcomes: Sequence[Outcome]) -> None:
    """Name the option that gives CUDA to a program that asks for it."""
    asked = any(words in outcome.reason for outcome in outcomes for words in _NO_CUDA)
    if asked and program.simulated and not program.cuda_as_sim:
        wording.announce("the program asks for CUDA by name: with --cuda-as-sim, that is the simulated device")


def _as_program(outcomes: Sequence[Outcome], output: str) -> list[Outcome]:
    """Return the outcomes of a program's ranks, without output that was shown as they ran. A rank that exited with code
    0 has passed, as under torchrun, unless other ranks failed because it was gone.
    """
    verdict = judge(outcomes)
    silent = {outcome.rank for outcome in outcomes if outcome.ending is Ending.SILENT}
    missed = bool(verdict.victims) and silent.issuperset(verdict.culprits)
    return [
        replace(
            outcome,
            task="program",
            died_at=outcome.place if outcome.ending is Ending.KILLED else "",
            ending=Ending.PASSED if outcome.rank in silent and not missed else outcome.ending,
            output="" if output == "all" or (output == "rank0" and outcome.rank == 0) else outcome.output,
        )
        for outcome in outcomes
    ]


def _print_report(title: str, options: argparse.Namespace, report: WorldReport) -> None:
    outcomes = tuple(replace(outcome, rank=options.chosen[outcome.rank]) for outcome in report.outcomes)
    report = replace(report, outcomes=outcomes, verdict=judge(outcomes))
    name = f"-m {options.program.target}" if options.program.is_module else options.program.target
    print(f"\n{title} {name}  {report.took_s:.2f} s\n{render(report)}", file=sys.stderr, flush=True)


def _exit_code(outcomes: Sequence[Outcome], facts: Sequence[Facts | None], verdict: Verdict) -> int:
    """Return the exit code of the first rank that failed; 128 plus the number of a signal; 1 if it was stopped."""
    first = next(iter(verdict.culprits or verdict.victims), 0)
    outcome, reported = outcomes[first], facts[first]
    if outcome.ending is Ending.FAILED:
        return (reported.exit_code if reported is not None else 1) or 1
    if outcome.ending is Ending.KILLED:
        return _BY_SIGNAL - (outcome.exit_code or 0)
    return (outcome.exit_code or 1) if outcome.ending is Ending.EXITED else 1


def _judge_usage(options: argparse.Namespace, facts: Sequence[Facts | None], store: Store) -> int:
    """See Note [Silent fakes]."""
    if not options.program.simulated:
        return 0
    met = not all(each and each.groups for each in facts) and store.was_used()
    unused = find_unused(facts, met=met, cuda_as_sim=options.program.cuda_as_sim)
    for sentence in unused:
        wording.announce(f"{'error' if options.strict else 'warning'}: {sentence}")
    return 1 if unused and options.strict else 0


def _forward_signal(world: World, number: int) -> None:
    """Send every rank a signal, and wait for the ranks to end; one more signal ends the wait."""
    end_s = time.monotonic() + _SIGNAL_S
    with contextlib.suppress(KeyboardInterrupt, ZygoteLostError):
        for process in world.processes:
            world.send_signal(process.rank, number)
        while any(process.is_alive() for process in world.processes) and (left := end_s - time.monotonic()) > 0:
            world.pump(left)
