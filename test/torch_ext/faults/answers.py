"""Records what the released harness and ours say of each program of the laboratory, for docs/laboratory.md.

python -m test.torch_ext.faults.answers [WORD...]    # programs whose names have a word; all take 15 minutes
"""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase  # the released one

from test.torch_ext.faults.page import ANSWERS, HERE, LIMIT_S, PROGRAMS, answers, name_of
from torch_ext.faults.plan import parse
from torch_ext.world.rank import planned_faults

SIZE = 2
_MOST = 240  # characters of an answer, or of a process's part of one
# Kinds that calls of gloo refuse, or that need the device.
_OF_SIM = ("drop", "duplicate", "split", "fail", "fill")
_ANSWER = "an answer: "
_running = None


class Released(MultiProcessTestCase):
    @property
    def world_size(self):
        return SIZE

    def setUp(self):
        super().setUp()
        # Not _spawn_processes(): on a busy machine, importing torch would take most of the time limit.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def test_program(self):
        program, plan, _ = _running
        os.environ["TORCH_EXT_FAULTS"] = plan
        if os.environ["LABORATORY_DEVICE"] == "sim":
            torch.get_device_module("sim").set_device(self.rank)
        store = dist.FileStore(self.file_name, SIZE)
        dist.init_process_group(rank=self.rank, world_size=SIZE, store=store, timeout=timedelta(hours=1))
        with planned_faults(self.rank):
            program(self.rank, SIZE)
        dist.destroy_process_group()


def device_of(plan):
    """Where the released harness runs a program: on the host, if the faults are possible there."""
    kinds = [each for each in parse(plan).faults if each.point.where != "call"] if plan else []
    return "sim" if any(each.kind in _OF_SIM for each in kinds) else "cpu"


def _run_released(names):
    """Print the answer of the released harness to each program, as JSON."""
    global _running
    if os.environ["LABORATORY_DEVICE"] == "sim":
        importlib.import_module("torch_ext.sim")
    for _running in (row for row in PROGRAMS if name_of(*row[:2]) in names):
        result, began_s = unittest.TestResult(), time.monotonic()
        Released("test_program").run(result)
        failed = [text for _, text in (*result.failures, *result.errors)]
        answer = {"name": name_of(*_running[:2]), "said": failed[0] if failed else "passed"}
        print(f"\n{_ANSWER}{json.dumps(answer | {'seconds': time.monotonic() - began_s})}", flush=True)


def _released(device, names):
    """Yield the answers of an interpreter whose programs use ``device``."""
    limits = {"LABORATORY_DEVICE": device, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S)}
    command = [sys.executable, "-m", __spec__.name, "--released", *names]
    environment, quiet = {**os.environ, **limits}, subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        yield from (json.loads(line.removeprefix(_ANSWER)) for line in process.stdout if line.startswith(_ANSWER))


def _in_short(message):
    """Return the failure of the released harness without tracebacks."""
    with contextlib.suppress(StopIteration):
        message = message[next(re.finditer(r"Process \d (exited|terminated)", message)).start() :]
    advice = r"\n+To execute this test.*?(?=\nProcess \d|\Z)"
    parts = re.split(r"\n(?=Process \d)", re.sub(advice, "", message, flags=re.DOTALL))
    lines = [[line for line in part.splitlines() if line and line[0] != " "] for part in parts]
    return " ".join(_plain(" ".join(each).replace("Traceback (most recent call last): ", "")) for each in lines)


def _plain(answer):
    answer = re.sub(r"/\S*/(?=\w+\.(py|cc)\b)", "", answer)
    answer = re.sub(r"(\w+\.py):(\d+)", _quoted, answer)
    answer = re.sub(r"\bpid:? ?\d+|\(pid\(s\) \d+\)|\(process \d+\)|\(pid \d+\)", "(pid)", answer)
    answer = re.sub(
        r"/tmp/\w+", "/tmp/...", re.sub(r"\]:\d+", "]", re.sub(r"(\d\.\d)\d+ seconds", r"\1 seconds", answer))
    )
    return answer if len(answer) <= _MOST else f"{answer[:_MOST]} ..."


def _quoted(site):
    """Return the code at a line of a program: numbers change with every line that is added above."""
    for file in HERE / site[1], HERE.parent / "sim" / site[1]:
        if file.exists():
            return f"{site[1]}, {file.read_text(encoding='utf-8').splitlines()[int(site[2]) - 1].strip()}"
    return site[0]


def _ours(program, plan, said):
    from test.torch_ext.faults.test_laboratory import report_of

    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        _, report = report_of(program, plan, folder)
        return _plain(report.splitlines()[0]) if said else "passed", time.monotonic() - began_s


def main(words):
    """Run the programs whose names have one of ``words``, and write the answers of all."""
    found = answers()
    rows = {name_of(*row[:2]): row for row in PROGRAMS if any(word in name_of(*row[:2]) for word in words or [""])}
    for device in ("cpu", "sim"):
        for each in _released(device, [name for name, row in rows.items() if device_of(row[1]) == device]):
            name, short = each["name"], _in_short(each["said"])
            guilty = re.match(r"rank (\d) ", rows[name][2])
            found[name] = {
                "name": name, "torch": torch.__version__.partition("+")[0], "device": device, "released": short,
                "names": bool(guilty) and f"Process {guilty[1]} exited" in short,
                "released_s": round(each["seconds"], 1),
            }  # fmt: skip
            _write(found)
    for name, row in rows.items():
        ours, ours_s = _ours(*row)
        found[name] |= {"ours": ours, "ours_s": round(ours_s, 1)}
        _write(found)


def _write(found):
    kept = [found[key] for key in (name_of(*row[:2]) for row in PROGRAMS) if key in found]
    ANSWERS.write_text("".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in kept), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--released"]:
        _run_released(sys.argv[2:])
    else:
        main(sys.argv[1:])
