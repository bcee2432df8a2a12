"""Bar charts as SVG, by hand: plain words beside bars, on a card that is light or dark as the reader's screen is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

LINE, TOP, BOTTOM = 22, 44, 16
OURS, OTHERS, LIMIT = "ours", "others", "limit"
STYLE = """<style>
.spread { stroke: #1f2328; stroke-opacity: 0.45 } .zero { stroke: #8b96a5 }
.card { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; stroke: #ffffff; stroke-width: 3; paint-order: stroke }
.mark { stroke: #8b96a5; stroke-dasharray: 3 3 }
.ours { fill: #1a7f5a } .others { fill: #8b96a5 } .limit { fill: #d0a215 }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3; stroke: #0d1117 }
.ours { fill: #3fb98a } .others { fill: #6e7a89 } .limit { fill: #d9b440 } .spread { stroke: #e6edf3 }
}
</style>"""


class Bar(NamedTuple):
    """A bar, to the right of zero or to the left of it.

    Attributes:
        kind: ``OURS``, ``OTHERS`` or ``LIMIT``.
        spread: from where to where its values were found, if that is drawn.
        said: what stands beside it in place of the value.
    """

    words: str
    value: float
    kind: str
    spread: tuple[float, float] | None = None
    said: str = ""


@dataclass(frozen=True)
class Panel:
    """Bars of one scale.

    Attributes:
        title: what they show, with its unit.
        groups: the bars, by heading.
        form: of the value that stands beside a bar, as ``format`` takes it.
        marks: values with a line across all bars, by what they are called.
    """

    title: str
    groups: Mapping[str, Sequence[Bar]]
    form: str = ".0f"
    marks: Mapping[str, float] = field(default_factory=dict)


class Layout(NamedTuple):
    """Widths in pixels: of the picture, of the words before a bar, and of those behind the longest one."""

    width: int = 680
    label: int = 230
    behind: int = 70


WIDE, NARROW = Layout(), Layout(400, 68, 96)
"""For a page, and for a telephone, too."""


def draw(path: Path, *panels: Panel, layout: Layout = WIDE) -> None:
    """Write the chart: the panels, one below the other."""
    parts: list[str] = []
    y = TOP - 18
    for panel in panels:
        parts.append(_text(16, y, panel.title, size=15, weight="bold"))
        y = _bars(parts, panel, y + 18, layout) + LINE
    width = layout.width
    height = y - LINE + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head += ' font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">'
    title = f"<title>{escape('; '.join(panel.title for panel in panels))}</title>"
    card = f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    path.write_text("\n".join([head, title, STYLE, card, *parts, "</svg>", ""]), encoding="utf-8")


def _bars(parts: list[str], panel: Panel, y: int, layout: Layout) -> int:
    """Add the bars of a panel from ``y`` on. Returns where they end."""
    ends = [end for bars in panel.groups.values() for bar in bars for end in (0.0, bar.value, *(bar.spread or ()))]
    ends += panel.marks.values()
    scale = (layout.width - layout.label - layout.behind) / (max(ends) - min(ends))
    zero, top = layout.label - scale * min(ends), y
    marks = {words: zero + scale * value for words, value in panel.marks.items()}
    if marks:
        y += LINE
    for words, x in marks.items():
        parts.append(_text(x, top + 15, words, anchor="middle"))
    above = len(parts)
    for heading, bars in panel.groups.items():
        if heading:
            parts.append(_text(16, y + 16, heading, weight="bold"))
            y += LINE
        for bar in bars:
            width = max(1.0, scale * abs(bar.value))
            left = zero if bar.value >= 0 else zero - width
            low, high = bar.spread or (0.0, bar.value)
            words_at, middle = zero + scale * max(low, high, bar.value, 0.0) + 6, y + LINE // 2
            parts.append(_text(layout.label - 8, y + 15, bar.words, anchor="end"))
            place = f'x="{left:.1f}" y="{y + 3}" width="{width:.1f}" height="{LINE - 7}"'
            parts.append(f'<rect class="{bar.kind}" {place}/>')
            if bar.spread is not None:
                parts.append(_line("spread", zero + scale * low, middle, zero + scale * high, middle))
            parts.append(_text(words_at, y + 15, bar.said or format(bar.value, panel.form)))
            y += LINE
        y += LINE // 2
    for x in marks.values():  # behind the bars and their words
        parts.insert(above, _line("mark", x, top + LINE, x, y - LINE // 2))
    if min(ends) < 0:
        parts.append(_line("zero", zero, top, zero, y - LINE // 2))
    return y - LINE // 2 + 8


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
