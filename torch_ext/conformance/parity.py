"""The tier ``parity``: small programs, and what they observe of a device: sizes, counts, orders, texts of errors.

A program is a function with ``@program`` in a file of the folder ``--programs``. ``--record`` runs all of them on a
real device and writes what they observe to ``recorded.json`` there; other devices then have to agree with it. A program
without a record is compared with its expectation, which cites torch's source or a manual.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

from torch_ext import accelerator, cache
from torch_ext.conformance import forks
from torch_ext.conformance.forks import Finding, Status, first_line
from torch_ext.results import SetupError

# Programs of this project, in a checkout.
PROGRAMS = Path(__file__).parents[2] / "test" / "torch_ext" / "conformance" / "parity"
_RECORD = "recorded.json"
_ONLY = "observed"  # the case of a program that is no family
_MACHINE = "machine"  # the case that describes where a record is made
# What texts have in other words on each device and in each process: a pattern, and the common word.
_WORDS = (
    (r"0x[0-9a-f]+", "ADDRESS"),
    (r"(?<![\w/])(?:/[\w.+-]+){2,}", "PATH"),
    (r"(?i)\b(?:simccl|nccl)\b", "BACKEND"),
    (r"(?i)\b(?:cuda|sim|privateuse1|privateuseone)\b", "DEVICE"),
)
# How the text of an error begins, as ``raised`` returns it.
_ERROR = re.compile(r"\w*(?:Error|Exception): ")


@dataclass(frozen=True)
class Device:
    """The device of a program: attributes are those of its module, such as ``torch.cuda``."""

    type: str

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.get_device_module(self.type), name)

    def bytes(self, size: int) -> torch.Tensor:
        """Return a tensor of ``size`` bytes."""
        return torch.empty(size, dtype=torch.uint8, device=self.type)


@dataclass(frozen=True)
class Program:
    """A program, and what each of its cases is called with and should observe."""

    run: Callable[..., object]
    cites: str
    cases: Mapping[str, tuple[tuple[object, ...], object]]
    devices: int

    @property
    def code(self) -> str:
        """A key of the function without its expectation; a record of other code does not count."""
        text = inspect.getsource(self.run)
        return hashlib.sha256(text[text.index("\ndef ") :].encode()).hexdigest()[:12]


_programs: dict[str, Program] = {}


def program(cites: str, expected: Any, *, devices: int = 1) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Make a program of a function of a ``Device``, which by ``cites`` returns ``expected``. A function with a second
    parameter is a family: ``expected`` maps each argument to what is returned for it.
    """

    def add(run: Callable[..., object]) -> Callable[..., object]:
        is_family = len(inspect.signature(run).parameters) > 1
        cases = {str(key): ((key,), value) for key, value in expected.items()} if is_family else {_ONLY: ((), expected)}
        _programs[f"{run.__module__.rpartition('.')[2]}.{run.__name__}"] = Program(run, cites, cases, devices)
        return run

    return add


def raised(call: Callable[[], object]) -> str:
    """Return the type and the first line of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(str(error))}"
    return "raises nothing"


def neutral(observed: object) -> Any:
    """Return an observation as JSON has it, with texts that depend neither on the device's name nor on the process."""
    text = json.dumps(observed, default=str)
    for pattern, word in _WORDS:
        text = re.sub(pattern, word, text)
    return json.loads(text)


def agrees(observed: Any, expected: Any) -> bool:
    """Whether two observations agree: they are equal, but an error's text may go on with values and a remedy."""
    if isinstance(observed, str) and isinstance(expected, str) and _ERROR.match(expected):
        return observed.startswith(expected.rstrip("."))
    if isinstance(observed, list) and isinstance(expected, list):
        return len(observed) == len(expected) and all(map(agrees, observed, expected))
    return type(observed) is type(expected) and bool(observed == expected)


def load(folder: Path) -> dict[str, Program]:
    """Return the programs of the files in ``folder``. Raises SetupError if there are none."""
    _programs.clear()
    for path in sorted(folder.glob("[a-z]*.py")):
        spec = importlib.util.spec_from_file_location(f"torch_ext_parity.{path.stem}", path)
        if spec and spec.loader:
            sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # inspect looks there for sources
            spec.loader.exec_module(module)
    if not _programs:
        raise SetupError(f"--programs {folder}: no program there; this project's are in its checkout, not in a wheel")
    return dict(_programs)


@dataclass(frozen=True)
class Record:
    """What programs observed; ``made``: on which device, with which driver and torch. Empty without a record."""

    made: Mapping[str, str]
    observed: Mapping[str, Mapping[str, Any]]  # by program: the key of its code, and by case

    @property
    def digest(self) -> str:
        """A key of the record, which shows that it has been changed by hand."""
        return hashlib.sha256(json.dumps([self.made, self.observed], sort_keys=True).encode()).hexdigest()

    def of(self, name: str, program: Program) -> Mapping[str, Any]:
        """Return a program's observations by case; none if its code is another now."""
        found = self.observed.get(name, {})
        return {case: found[case] for case in program.cases if case in found and found["code"] == program.code}


def read(folder: Path) -> Record:
    """Return the record in ``folder``. Raises SetupError if it is not as it was written."""
    path = folder / _RECORD
    if not path.exists():
        return Record({}, {})
    with contextlib.suppress(ValueError, TypeError):
        digest, *parts = json.loads(path.read_text(encoding="utf-8"))
        if digest == (record := Record(*parts)).digest:
            return record
    raise SetupError(f"{path} is not as --record wrote it: restore it, or record anew")


def write(folder: Path, record: Record) -> None:
    """Write ``record``, a line for each program."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(record.observed.items()))
    cache.write(folder / _RECORD, f'["{record.digest}",\n{json.dumps(record.made)},\n{{{lines}}}]\n')


def key(options: argparse.Namespace) -> tuple[object, ...]:
    """Return what findings depend on: the files of programs, the record, and the allocator's settings."""
    settings = [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return (*settings, *(path.read_bytes() for path in sorted(_folder(options).glob("*.[jp]*"))))


def groups(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the cases of each program."""
    return {name: [*each.cases] for name, each in load(_folder(options)).items()}


def findings(groups: Mapping[str, Sequence[str]], options: argparse.Namespace) -> Iterator[Finding]:
    """Run the cases of ``groups``, each program in a fork of its own."""
    body = Body(options.device, load(_folder(options)), read(_folder(options)))
    return forks.run(groups, body, slots=options.slots, limit_s=options.timeout)


def record(options: argparse.Namespace) -> None:
    """Write what all programs observe, for ``findings``, where a program that differs at once depends on chance. Raises
    SetupError if the device is none that can be recorded.
    """
    body = Body(options.device, load(_folder(options)), Record({}, {}))
    run = functools.partial(forks.run, body=body.observe, slots=options.slots, limit_s=options.timeout)
    (machine,) = run({_MACHINE: [_MACHINE]})
    if machine.status is not Status.AGREES:
        raise SetupError(f"--record needs a real device that works; {options.device}: {machine.text.splitlines()[-1]}")
    observed: dict[str, dict[str, Any]] = {}
    for each in run(groups(options)):
        if each.status is Status.AGREES:
            cases = observed.setdefault(each.group, {"code": body.programs[each.group].code})
            cases[each.case] = json.loads(each.text)
    write(_folder(options), Record(json.loads(machine.text), observed))


class Body:
    """Runs cases on ``device``, and compares what they observe."""

    def __init__(self, device: str, programs: Mapping[str, Program], record: Record) -> None:
        self.device = Device(device)
        self.programs = programs
        self.record = record

    def observe(self, group: str, case: str) -> tuple[Status, str]:
        """Return what a case observes, as JSON."""
        if group == _MACHINE:
            return self._machine()
        program = self.programs[group]
        if accelerator.device_count() < program.devices:
            return Status.REFUSED, f"needs {program.devices} devices: {accelerator.device_count()} here"
        gc.collect()
        if accelerator.is_accelerator():
            self.device.empty_cache()
            self.device.reset_peak_memory_stats()
        arguments, _ = program.cases[case]
        return Status.AGREES, json.dumps(neutral(program.run(self.device, *arguments)))

    def _machine(self) -> tuple[Status, str]:
        if accelerator.is_simulated():
            return Status.REFUSED, "it is simulated"
        device = self.device.get_device_name() if accelerator.is_accelerator() else self.device.type
        driver = str(collect_env.get_nvidia_driver_version(collect_env.run))
        return Status.AGREES, json.dumps({"device": device, "driver": driver, "torch": torch.__version__})

    def __call__(self, group: str, case: str) -> tuple[Status, str]:
        status, text = self.observe(group, case)
        program = self.programs[group]
        recorded = self.record.of(group, program)
        expected = recorded.get(case, neutral(program.cases[case][1]))
        if status is Status.REFUSED or agrees(json.loads(text), expected):
            return status, text if status is Status.REFUSED else ""
        source = "recorded" if case in recorded else f"by {program.cites}"
        return Status.DIFFERS, f"observes {text}; {source}: {json.dumps(expected)}"


def note(options: argparse.Namespace) -> str:
    """Return what the page says of the record: where it was made, what it lacks, which expectation it contradicts."""
    record, programs = read(_folder(options)), load(_folder(options))
    if not record.made:
        return "Not recorded on a real device yet: programs are compared with what torch's source or a manual says.\n"
    lines = [f"Recorded on {', '.join(f'{what} {value}' for what, value in record.made.items())}."]
    if old := [name for name, each in programs.items() if not record.of(name, each)]:
        lines.append(f"Not recorded: {', '.join(old)}.")
    wrong = [f"`{name}::{case}`" for name, each in programs.items() for case, value in record.of(name, each).items()
             if not agrees(value, neutral(each.cases[case][1]))]  # fmt: skip
    lines += [f"The record contradicts the cited source: {', '.join(wrong)}."] if wrong else []
    return "\n".join(lines) + "\n"


def _folder(options: argparse.Namespace) -> Path:
    return Path(options.programs or PROGRAMS)
