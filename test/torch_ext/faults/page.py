"""Writes docs/laboratory.md: each program, its fault, what torch's released harness says, and what we say.

python -m test.torch_ext.faults.page    # of answers.jsonl, which test.torch_ext.faults.answers records
"""

import json
import re
from pathlib import Path

from test.torch_ext.faults import jobs, laboratory, mistakes

HERE = Path(__file__).parent
ANSWERS, PAGE = HERE / "answers.jsonl", HERE.parents[2] / "docs" / "laboratory.md"
PARTS = {
    "Planted faults": laboratory.PROGRAMS,
    "Mistakes": mistakes.PROGRAMS,
    "Reported hangs and losses": jobs.PROGRAMS,
}
PROGRAMS = [row for rows in PARTS.values() for row in rows]
LIMIT_S = 15
_TRACKERS = {"pytorch": "pytorch/pytorch", "torchtitan": "pytorch/torchtitan", "vllm": "vllm-project/vllm",
             "verl": "verl-project/verl", "Megatron-LM": "NVIDIA/Megatron-LM",
             "Model-Optimizer": "NVIDIA/Model-Optimizer"}  # fmt: skip
_HEAD = """# The laboratory

{count} programs of two ranks, each with one fault, and what a test of it reports. Written by `python -m
test.torch_ext.faults.page`; do not edit. `python -m test.torch_ext.faults.answers` runs the programs again.

- *released*: `MultiProcessTestCase` of torch {torch} on gloo and the CPU, or on the simulated accelerator (*sim*) where
  a fault needs it. With forked ranks, a time limit of {limit} seconds (300 by default), and none of the process group.
- *torch_ext*: the first line of the report, on the simulated accelerator; the page shows the code instead of the
  number of its line. Hangs count as proven after 2 seconds instead of 10.

Of {faulty} programs with a fault, the released harness passes {passed}, and runs into its time limit for {late}. One
rank alone is guilty in {guilty}; that rank's own error is in {named} of these messages.
"""


def name_of(program, plan):
    """The key of a program and its plan, as pytest shows it."""
    return f"{program.__name__}: {plan}"


def answers():
    """Return the recorded answers by name."""
    lines = ANSWERS.read_text(encoding="utf-8").splitlines() if ANSWERS.exists() else []
    return {each["name"]: each for each in map(json.loads, lines)}


def text():
    """Return the page."""
    recorded = answers()
    rows = [(recorded[name_of(program, plan)], said) for program, plan, said in PROGRAMS]
    faulty = [answer for answer, said in rows if said]
    head = _HEAD.format(
        count=len(rows), limit=LIMIT_S, faulty=len(faulty), torch=rows[0][0]["torch"],
        guilty=sum(bool(re.match(r"rank \d ", said)) for _, said in rows),
        named=sum(answer["names"] for answer in faulty), late=sum("timed out" in each["released"] for each in faulty),
        passed=sum(answer["released"] == "passed" for answer in faulty),
    )  # fmt: skip
    return "\n".join([head, *(_part(title, programs, recorded) for title, programs in PARTS.items())])


def _part(title, programs, recorded):
    lines = [f"## {title}", "", "| program | fault | released | torch_ext |", "| --- | --- | --- | --- |"]
    for program, plan, _ in programs:
        answer = recorded[name_of(program, plan)]
        sim = " (*sim*)" if answer["device"] == "sim" else ""
        what = _linked(
            " ".join((program.__doc__ or "").split()) or f"{program.__name__.replace('_', ' ')}.".capitalize()
        )
        cells = [f"`{program.__name__}` {what}", f"`{plan}`" if plan else "its own"]
        cells += [
            f"{_cell(answer[side])} <br>{answer[f'{side}_s']:.1f} s{mark}"
            for side, mark in (("released", sim), ("ours", ""))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(answer):
    return re.sub(r"([|<>*_`\[\]$])", r"\\\1", answer)


def _linked(sentence):
    """Link the report that a docstring begins with."""
    found = re.match(r"([\w-]+)#(\d+): (.*)", sentence)
    if found is None:
        return sentence
    return f"([{found[1]}#{found[2]}](https://github.com/{_TRACKERS[found[1]]}/issues/{found[2]})) {found[3]}"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
