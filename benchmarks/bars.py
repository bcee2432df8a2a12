"""A bar chart as SVG, by hand: plain words beside bars, on a light card that dark pages show as it is."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, LABEL, LINE, TOP, BOTTOM = 680, 230, 22, 44, 16
OURS, OTHERS, LIMIT = "#1a7f5a", "#8b96a5", "#d0a215"


def draw(path: Path, title: str, groups: Mapping[str, Sequence[tuple[str, float, bool]]]) -> None:
    """Write the chart.

    Args:
        groups: by heading: words, value and whether it is ours, of each bar. Words that begin with "limit" are marked.
    """
    longest = max(value for bars in groups.values() for _, value, _ in bars)
    scale = (WIDTH - LABEL - 70) / longest
    parts, y = [_text(16, 26, title, size=15, weight="bold")], TOP
    for heading, bars in groups.items():
        parts.append(_text(16, y + 16, heading, weight="bold"))
        y += LINE
        for words, value, ours in bars:
            colour = LIMIT if words.startswith("limit") else OURS if ours else OTHERS
            width = max(1.0, scale * value)
            parts.append(_text(LABEL - 8, y + 15, words, anchor="end"))
            parts.append(f'<rect x="{LABEL}" y="{y + 3}" width="{width:.1f}" height="{LINE - 7}" fill="{colour}"/>')
            parts.append(_text(LABEL + width + 6, y + 15, f"{value:.0f}"))
            y += LINE
        y += LINE // 2
    height = y + BOTTOM - LINE // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head += ' font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2328" role="img">'
    card = f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff" stroke="#d0d7de"/>'
    path.write_text("\n".join([head, f"<title>{escape(title)}</title>", card, *parts, "</svg>", ""]), encoding="utf-8")


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
