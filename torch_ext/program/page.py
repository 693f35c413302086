"""The page of ``run --clock``: the timeline of one step of all ranks, drawn as SVG, in one file without scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_RANKS = 16
_WIDTH, _ROW, _TICKS = 1000, 18, 5  # in units of the drawing
_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 1.5em; color-scheme: light dark; }
svg { width: 100%; display: block; margin-bottom: 1em; border-top: 1px solid #8888; }
text { font-size: 11px; fill: currentColor; } line { stroke: #8884; }
rect:hover { stroke: currentColor; } .kernel { fill: #4878cf; } .copy { fill: #6acc65; } .collective { fill: #ee854a; }
.transfer { fill: #d65f5f; } .host { fill: #8888; } b { padding: 0 .6em; border-radius: 3px; font-weight: normal; }
"""


def shown(time_ns: float) -> str:
    """Return a time in its unit.

    >>> shown(1500)
    '1.50 us'
    """
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= size:
            return f"{time_ns / size:.2f} {unit}"
    return f"{time_ns:.0f} ns"


def render(by_rank: Mapping[str, Mapping[str, Any]], events: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return the page of the ranks' summaries and events, which torch_ext.sim.clock makes: the last step, or the whole
    run if no optimizer has stepped twice.
    """
    spans = [each["last_step"] or [0, each["time"]] for each in by_rank.values()]
    begin, end = min(start for start, _ in spans), max(over for _, over in spans)
    first = next(iter(by_rank.values()))
    validated = "" if first["validated"] else ", which no measurement has validated"
    ranks = list(zip(by_rank, events, strict=True))[:_MOST_RANKS]
    left_out = f" The first {_MOST_RANKS} of {len(by_rank)} ranks." if len(by_rank) > _MOST_RANKS else ""
    kinds = ("kernel", "copy", "collective", "transfer", "host")
    legend = " ".join(f'<b class="{kind}" style="background:{_color(kind)}">{kind}</b>' for kind in kinds)
    drawn = "\n".join(f"<h3>rank {rank}</h3>\n{_draw(each, begin, end)}" for rank, each in ranks)
    return (
        f'<!doctype html><meta charset="utf-8"><title>torch_ext: one step</title>'
        f"<style>{_STYLE}</style>\n<h2>{'One step' if first['last_step'] else 'The run'}: {shown(end - begin)}</h2>\n"
        f"<p>Virtual time by the model {html.escape(first['model'])}{validated}.{left_out} {legend}</p>\n{drawn}\n"
    )


def _color(kind: str) -> str:
    return _STYLE.split(f".{kind} {{ fill: ")[1].split(";")[0]


def _draw(events: Sequence[Mapping[str, Any]], begin: int, end: int) -> str:
    """Return the lanes of a rank as SVG. Events are Chrome's, in microseconds."""
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    rows = {tid: row for row, tid in enumerate(sorted(names, key=lambda tid: str(names[tid])))}
    scale = _WIDTH / max(end - begin, 1)
    height = _ROW * (len(rows) + 1)
    parts = []
    for tick in range(_TICKS + 1):
        x = tick * _WIDTH / _TICKS
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{height}"/>')
        parts.append(f'<text x="{x + 2:.0f}" y="{height - 4}">{shown((end - begin) * tick / _TICKS)}</text>')
    parts += [f'<text x="-4" y="{row * _ROW + 13}" text-anchor="end">{names[tid]}</text>' for tid, row in rows.items()]
    for each in events:
        if each["ph"] != "X":
            continue
        length = each["dur"] * 1e3
        start, over = max(each["ts"] * 1e3, begin), min(each["ts"] * 1e3 + length, end)
        if start >= over:
            continue
        details = "".join(f"\n{name}: {value}" for name, value in each["args"].items())
        title = html.escape(f"{each['name']}  {shown(length)}{details}")
        parts.append(
            f'<rect class="{each["cat"]}" x="{(start - begin) * scale:.2f}" y="{rows[each["tid"]] * _ROW + 2}" '
            f'width="{max((over - start) * scale, 0.3):.2f}" height="{_ROW - 4}"><title>{title}</title></rect>'
        )
    return f'<svg viewBox="-110 0 {_WIDTH + 170} {height}">{"".join(parts)}</svg>'
