"""Bar charts as SVG, by hand: plain words beside bars, on a card that is light or dark as the reader's screen is.

The README's picture is drawn of what two benchmarks have found:

    python benchmarks/memory.py --settings float32 --parts one-batch micro-batches --json memory.json
    python benchmarks/heavy_steps.py --float32 --rounds 5 --json heavy.json
    python benchmarks/bars.py memory.json heavy.json --svg gains.svg
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LABEL, LINE, TOP, BOTTOM = 680, 230, 22, 44, 16
OURS, OTHERS, LIMIT = "ours", "others", "limit"
STYLE = """<style>
.spread { stroke: #1f2328; stroke-opacity: 0.45 } .zero { stroke: #8b96a5 }
.card { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328 }
.ours { fill: #1a7f5a } .others { fill: #8b96a5 } .limit { fill: #d0a215 }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 }
.ours { fill: #3fb98a } .others { fill: #6e7a89 } .limit { fill: #d9b440 } .spread { stroke: #e6edf3 }
}
</style>"""
MIB = 2**20


class Bar(NamedTuple):
    """A bar, to the right of zero or to the left of it.

    Attributes:
        kind: ``OURS``, ``OTHERS`` or ``LIMIT``.
        spread: from where to where its values were found, if that is drawn.
    """

    words: str
    value: float
    kind: str
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """Bars of one scale.

    Attributes:
        title: what they show, with its unit.
        groups: the bars, by heading.
        form: of the value that stands beside a bar, as ``format`` takes it.
    """

    title: str
    groups: Mapping[str, Sequence[Bar]]
    form: str = ".0f"


def draw(path: Path, *panels: Panel) -> None:
    """Write the chart: the panels, one below the other."""
    parts: list[str] = []
    y = TOP - 18
    for panel in panels:
        parts.append(_text(16, y, panel.title, size=15, weight="bold"))
        y = _bars(parts, panel, y + 18) + LINE
    height = y - LINE + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head += ' font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">'
    title = f"<title>{escape('; '.join(panel.title for panel in panels))}</title>"
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    path.write_text("\n".join([head, title, STYLE, card, *parts, "</svg>", ""]), encoding="utf-8")


def _bars(parts: list[str], panel: Panel, y: int) -> int:
    """Add the bars of a panel from ``y`` on. Returns where they end."""
    ends = [end for bars in panel.groups.values() for bar in bars for end in (0.0, bar.value, *(bar.spread or ()))]
    scale = (WIDTH - LABEL - 70) / (max(ends) - min(ends))
    zero, top = LABEL - scale * min(ends), y
    for heading, bars in panel.groups.items():
        if heading:
            parts.append(_text(16, y + 16, heading, weight="bold"))
            y += LINE
        for bar in bars:
            width = max(1.0, scale * abs(bar.value))
            left = zero if bar.value >= 0 else zero - width
            low, high = bar.spread or (0.0, bar.value)
            words_at, middle = zero + scale * max(low, high, bar.value, 0.0) + 6, y + LINE // 2
            parts.append(_text(LABEL - 8, y + 15, bar.words, anchor="end"))
            place = f'x="{left:.1f}" y="{y + 3}" width="{width:.1f}" height="{LINE - 7}"'
            parts.append(f'<rect class="{bar.kind}" {place}/>')
            if bar.spread is not None:
                parts.append(_line("spread", zero + scale * low, middle, zero + scale * high, middle))
            parts.append(_text(words_at, y + 15, format(bar.value, panel.form)))
            y += LINE
        y += LINE // 2
    if min(ends) < 0:
        parts.append(_line("zero", zero, top, zero, y - LINE // 2))
    return y - LINE // 2 + 8


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


# The README's picture.


def gains(memory: Mapping[str, Any], heavy: Mapping[str, Any]) -> list[Panel]:
    """What a step needs and how fast it is, of the plain loop, with instep, and at the limit."""

    def bars(part: str, way: str) -> list[Bar]:
        found = {
            name: max(one["above"]) / MIB for name, one in memory[f"float32, {part}"]["GPT"].items() if "above" in one
        }
        limit = Bar("limit: activations, one bucket", found["limit"], LIMIT)
        return [Bar("plain loop", found["plain"], OTHERS), Bar("instep", found[way], OURS), limit]

    speeds = {way: heavy["ratio"][way]["median"] for way in ("backward, default", "no optimizer")}
    return [
        Panel(
            "Memory of a step above weights and state, GPT of 38 M, MiB",
            {"one batch": bars("one-batch", "backward"), "four micro-batches": bars("micro-batches", "micro_batches")},
        ),
        Panel(
            "Speed with Muon in float32, a core idle, GPT of 4.7 M, times plain",
            {
                "": [
                    Bar("plain loop", 1.0, OTHERS),
                    Bar("instep", speeds["backward, default"], OURS),
                    Bar("no step at all", speeds["no optimizer"], LIMIT),
                ]
            },
            form=".2f",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("memory", type=Path, help="what memory.py --json has written")
    parser.add_argument("heavy", type=Path, help="what heavy_steps.py --json has written")
    parser.add_argument("--svg", type=Path, required=True)
    arguments = parser.parse_args()
    draw(arguments.svg, *gains(*(json.loads(path.read_text()) for path in (arguments.memory, arguments.heavy))))


if __name__ == "__main__":
    main()
