"""``torch_ext run``: starts the ranks of a program, waits for them and judges them. Runs in the process that the user
has started, which loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from torch_ext import machine_memory
from torch_ext.program import autoload, rank, report
from torch_ext.program.options import Hang, Options, Output, parse
from torch_ext.program.usage import Facts, what_was_never_used
from torch_ext.program.zygote import search_path, zygote_for
from torch_ext.world import settings, wording
from torch_ext.world.channel import ChannelClosedError, channel_pair
from torch_ext.world.files import Live
from torch_ext.world.follow import RankTask, World, ZygoteLostError, start_world
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import Inherited
from torch_ext.world.settings import Limits, launcher_variables
from torch_ext.world.tree import Child, LoadError, ZygoteClient, ZygoteDiedError
from torch_ext.world.verdict import Judgement, WorldReport, judge
from torch_ext.world.wording import own_message

__all__ = ["main"]

# How long the peers of a rank that failed may go on, and how long any rank may after a signal, in seconds: programs
# have exit functions, and write checkpoints.
_GRACE_S, _SIGNAL_S = 3.0, 10.0
# A wait counts as endless if it ends by itself no sooner than after so many seconds. If a hang is only reported, an
# operation of torch's, whose limit is an error, needs less.
_ENDLESS_S, _RAISES_LATER_S = 240.0, 5.0
# How long a query to the store may take, and how many ranks may wait for it to accept them.
_STORE_S, _BACKLOG = 2.0, 1024
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _SignalledError(BaseException):
    """The user wants the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str]) -> int:
    """Run the program that ``arguments`` name, and return the exit code of the command; see ``--help``."""
    try:
        options = parse(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    handlers = {number: signal.getsignal(number) for number in _STOPPED_BY}
    for number, before in handlers.items():
        if before is not signal.SIG_IGN:  # nohup, or a shell's background
            signal.signal(number, _raise)
    try:
        return _run(options)
    except _SignalledError as stop:
        return 128 + stop.number
    except LoadError as error:
        trace = str(error)
        message = own_message(trace) or f"what every rank needs cannot be loaded\n{trace}"
        print(f"error: {message}", file=sys.stderr)
        return 1
    except ZygoteLostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ZygoteDiedError as error:
        print(f"error: {error}; the ranks ended with it", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:
        for number in _STOPPED_BY:
            signal.signal(number, signal.SIG_IGN)  # this process is about to end with a code of its own


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise _SignalledError(number)


def _run(options: Options) -> int:
    path = search_path()
    autoload.hide()
    before = dict(os.environ)
    _set_environment(options)
    with zygote_for(options.program.simulated, path, before) as zygote, contextlib.closing(_Store(zygote)) as store:
        world = start_world(
            zygote.channel,
            _tasks(options, path, store.port),
            interpreter=settings.interpreter_wanted(),
            show=_LIVE[options.output],
            name="rank",
            test=options.program.target,
        )
        with world:
            if world.why_interpreter:
                wording.announce(f"{world.why_interpreter}; every rank gets a fresh interpreter, which takes seconds")
            return _wait(world, options, store)


_LIVE: dict[Output, bool | Live] = {
    Output.ALL: Live(verbatim=True),
    Output.RANK0: Live(ranks=(0,), prefix=False),
    Output.QUIET: False,
}


class _Store:
    """The store that the ranks meet at, in a process of its own. Its socket listens before the ranks start.

    Raises:
        ZygoteDiedError: the zygote is gone.
    """

    def __init__(self, zygote: ZygoteClient) -> None:
        self._channel, theirs = channel_pair()
        with socket.socket() as listening:
            listening.bind((rank.STORE_HOST, 0))
            listening.listen(_BACKLOG)
            self.port: int = listening.getsockname()[1]
            try:
                self._process: Child = zygote.start(
                    "torch_ext.program.rank:serve_store",
                    self.port,
                    [theirs.fileno(), listening.fileno()],
                    os.environ,
                )
            finally:
                theirs.close()

    def was_used(self) -> bool:
        """Whether a rank has ever set a key; False if that cannot be told."""
        with contextlib.suppress(ChannelClosedError, OSError):
            self._channel.send("keys")
            if self._channel.poll(_STORE_S):
                return bool(self._channel.receive()[0])
        return False

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.close()


def _set_environment(options: Options) -> None:
    """Set in this process what all ranks get, and what the processes get that they start."""
    if options.program.simulated:
        autoload.ask(autoload.ON_AS_CUDA if options.program.cuda_as_sim else autoload.ON, options.program.packages)
        os.environ.setdefault("TORCH_EXT_SIM_DEVICES", str(options.ranks))
        machine_memory.share()  # now, so that all processes of the run have the same
        if options.memory_bytes is not None:
            os.environ["TORCH_EXT_SIM_MEMORY"] = str(options.memory_bytes)
    if options.program.cuda_as_sim:
        from torch_ext.cuda_as_sim.words import environment_as_sim

        os.environ.update(environment_as_sim(os.environ))
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():  # torchrun leaves it alone where it is set
        os.environ.setdefault("TORCH_EXT_THREADS", os.environ["OMP_NUM_THREADS"])


def _tasks(options: Options, path: tuple[str, ...], port: int) -> list[RankTask]:
    program = replace(options.program, path=path)
    if program.cuda_as_sim:
        from torch_ext.cuda_as_sim.words import words_as_sim

        program = replace(program, arguments=tuple(words_as_sim(program.arguments)))
    return [
        RankTask(rank.run, (program, launcher_variables(number, options.ranks, port), Inherited(0)), connections=1)
        for number in range(options.ranks)
    ]


def _wait(world: World, options: Options, store: _Store) -> int:
    limits = Limits(
        test_s=options.timeout_s or float("inf"),
        grace_s=_GRACE_S,
        hang_s=settings.hang_after_s(),
        endless_s=_ENDLESS_S,
        raises_later_s=_ENDLESS_S if options.hang is Hang.END else _RAISES_LATER_S,
        end_hangs=options.hang is Hang.END,
    )
    hangs: list[float] = []

    def on_hang(outcomes: list[Outcome]) -> None:
        hangs.append(world.took_s)
        shown = report.as_program(outcomes, options.output)
        print(report.hang(options, WorldReport(tuple(shown), judge(shown), hangs[-1])), file=sys.stderr, flush=True)

    try:
        outcomes = world.wait(limits, expected_exit=0, on_hang=on_hang)
    except _SignalledError as stop:
        _hand_on(world, stop.number)
        print(f"{wording.PREFIX}interrupted by {signal.Signals(stop.number).name}", file=sys.stderr, flush=True)
        raise
    took_s = time.monotonic() - world.started_s
    facts = [_facts_of(world, number) for number in range(len(outcomes))]
    silent = [outcome.rank for outcome in outcomes if outcome.ending is Ending.SILENT]
    outcomes = report.as_program(outcomes, options.output)
    verdict = judge(outcomes)
    if verdict.judgement is not Judgement.PASSED:
        print(report.failure(options, WorldReport(tuple(outcomes), verdict, took_s)), file=sys.stderr, flush=True)
        return report.exit_code(outcomes, facts, verdict)
    for line in report.remarks(outcomes, silent):
        wording.announce(line)
    code = _judge_usage(options, facts, store)
    if hangs:
        wording.announce(f"error: the program ended by itself, but had hung after {hangs[0]:.0f} s: see above")
    return code or int(bool(hangs))


def _judge_usage(options: Options, facts: Sequence[Facts | None], store: _Store) -> int:
    """See Note [Silent fakes]."""
    if not options.program.simulated:
        return 0
    unused = what_was_never_used(facts, cuda_as_sim=options.program.cuda_as_sim)
    if unused and not all(each and each.groups for each in facts) and store.was_used():
        unused = what_was_never_used(facts, met=True, cuda_as_sim=options.program.cuda_as_sim)
    for sentence in unused:
        wording.announce(f"{'error' if options.strict else 'warning'}: {sentence}")
    return 1 if unused and options.strict else 0


def _facts_of(world: World, number: int) -> Facts | None:
    connection = world.processes[number].connections[0]
    with contextlib.suppress(EOFError, OSError):
        if connection.poll():
            found = connection.recv()
            return found if isinstance(found, Facts) else None
    return None


def _hand_on(world: World, number: int) -> None:
    """Give every rank the signal, and time to act on it; one more signal takes that time away."""
    end_s = time.monotonic() + _SIGNAL_S
    with contextlib.suppress(_SignalledError, ZygoteLostError):
        for process in world.processes:
            world.send_signal(process.rank, number)
        while any(process.is_alive() for process in world.processes) and (left := end_s - time.monotonic()) > 0:
            world.pump(left)
