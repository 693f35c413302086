"""The run as one HTML page that needs no other file: counts, a filter, durations, flakes, and what each rank did."""

from __future__ import annotations

import html
import time

import torch_ext
from torch_ext.results import Status, TestResult
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.base import COLUMNS, ReportFile, Tally, counts
from torch_ext.runner.reporters.text import describe_failure, rerun_command
from torch_ext.world.wording import printable

__all__ = ["write_page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884;
  --failed: #c62828; --flaky: #b26a00; --passed: #2e7d32; --skipped: #777; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; } table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .5rem; text-align: left; vertical-align: top; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid; }
td:first-child { overflow-wrap: anywhere; } .s { text-align: right; font-variant-numeric: tabular-nums; }
.failed { color: var(--failed); } .flaky { color: var(--flaky); }
.passed { color: var(--passed); } .skipped { color: var(--skipped); }
pre { background: #8881; overflow-x: auto; padding: .6rem; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
#bar { display: flex; gap: 1rem; flex-wrap: wrap; align-items: center; margin: 1rem 0; }
#bar input[type=search] { flex: 1 1 16rem; font: inherit; padding: .3rem .5rem; }
"""

_SCRIPT = """
const rows = [...document.querySelectorAll('tbody tr')];
const words = document.getElementById('words'), boxes = [...document.querySelectorAll('#bar input[type=checkbox]')];
function filter() {
  const wanted = words.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const shown = new Set(boxes.filter(box => box.checked).map(box => box.value));
  let left = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !shown.has(row.dataset.counted) || !wanted.every(word => text.includes(word));
    left += !row.hidden;
  }
  document.getElementById('left').textContent = left + ' of ' + rows.length + ' shown';
}
for (const each of [words, ...boxes]) each.addEventListener('input', filter);
const orders = {test: row => Number(row.dataset.at), ending: row => row.dataset.counted, time: row => -row.dataset.s};
for (const button of document.querySelectorAll('th button')) button.addEventListener('click', () => {
  const of = orders[button.dataset.by], body = document.querySelector('tbody');
  rows.sort((a, b) => (of(a) > of(b)) - (of(a) < of(b)));
  body.append(...rows);
});
filter();
"""


def write_page(tally: Tally, interrupted: bool, *, options: RunOptions, file: ReportFile, start_s: float) -> None:
    """Write the page of a run that began at ``start_s``."""
    results = tally.results
    found, missing = counts(results), tally.missing()
    total = ", ".join(f'<b class="{one.value}">{found[one]} {one.value}</b>' for one in COLUMNS)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start_s))
    took = f"{time.time() - start_s:.1f} s"
    said = [f"{when}, {took}, on {_text(options.device or 'the best device')}"]
    if interrupted:
        said.append("<b>Interrupted.</b>")
    if missing:
        said.append(f"<b class=failed>{len(missing)} not run</b>, the first of them {_text(missing[0].id)}")
    boxes = "".join(
        f'<label><input type="checkbox" value="{one.value}" checked> {one.value}</label>' for one in COLUMNS
    )
    heads = "".join(
        f'<th scope="col"{style}><button data-by="{by}">{word}</button>'
        for by, word, style in (("test", "test", ""), ("ending", "ending", ""), ("time", "time", " class=s"))
    )
    title = f"torch_ext: {found[Status.FAILED]} failed"
    rows = "".join(_row(place, result, options) for place, result in enumerate(results))
    file.write(
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>\n<h1>{total}</h1>'
        f"<p>{'<br>'.join(said)}<br>torch_ext {torch_ext.__version__}, {_text(str(options.root))}</p>\n"
        f'<div id="bar"><input id="words" type="search" placeholder="words of a name or a report" '
        f'aria-label="filter">{boxes}<span id="left"></span></div>\n'
        f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table>\n"
        f"<script>{_SCRIPT}</script></html>\n"
    )
    file.close()


def _row(place: int, result: TestResult, options: RunOptions) -> str:
    attempts = (*result.earlier, result)
    seconds = sum(one.duration_s for one in attempts)
    ending = result.status.value + (f", attempt {result.attempt}" if result.attempt > 1 else "")
    ending += f", round {result.round}" if result.round > 1 else ""
    counted = result.status.counted.value
    shown = "".join(_details(one, len(attempts) > 1) for one in attempts if one.status.counted is Status.FAILED)
    if result.status.counted is Status.FAILED:
        shown += f"<pre>{_text(rerun_command(options, result.test))}</pre>"
    reason = f"<br>{_text(result.reason)}" if result.reason else ""
    name = _text(result.test.id)
    cell = f"<details><summary>{name}</summary>{shown}</details>" if shown else name
    return (
        f'<tr data-at="{place}" data-counted="{counted}" data-s="{seconds:.3f}"><td>{cell}{reason}'
        f'<td class="{counted}">{ending}<td class="s">{seconds:.2f} s</tr>\n'
    )


def _details(result: TestResult, several: bool) -> str:
    parts = [f"<p>attempt {result.attempt}:</p>"] if several else []
    parts.append(f"<pre>{_text(describe_failure(result))}</pre>")
    for one in result.failed_ranks:
        if one.output:  # whole, below what the report quotes of it
            title = _text(f"output of {one.who}, which {one.describe()}")
            parts.append(f"<details><summary>{title}</summary><pre>{_text(one.output)}</pre></details>")
    return "".join(parts)


def _text(text: str) -> str:
    r"""Return ``text`` as HTML shows it.

    >>> _text("<b> \x1b \udcff")
    '&lt;b&gt; \\x1b \\udcff'
    """
    return html.escape(printable(text).encode("utf-8", "backslashreplace").decode("utf-8"))
