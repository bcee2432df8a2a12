"""The picture of ``instep demo`` in the README: what it prints, line by line, as an SVG that moves once and stays.

    python benchmarks/demo_picture.py --svg docs/assets/demo.svg          # a minute
    python benchmarks/demo_picture.py --json demo.json --svg demo.svg     # keeps what was printed; drawn again with
    python benchmarks/demo_picture.py --from demo.json --svg demo.svg     # another look, without a run

Each line appears when it was printed, ``--seconds`` for all of them. The command and the first lines are there from the
beginning. Who asks for less motion, a printer, and a program that does not know animations, have the last frame. The
line that names versions is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from textwrap import wrap
from time import perf_counter
from typing import NamedTuple

COLUMNS = 80
COMMAND = "$ instep demo"
SIZE, WIDTH, LINE, MARGIN = 13, 7.83, 18, 16
"""In pixels: of a letter, its width in a font whose letters are 0.6 of their size (each line is stretched to it), of a
line, and around all."""
GREY, GREEN = "grey", "green"
STYLE = """<style>
.card { fill: #22272e } text { fill: #d3dae3; white-space: pre } .grey { fill: #8b96a5 } .green { fill: #6bd49c }
@keyframes shown { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-reduced-motion: no-preference) { g[style] { animation: shown 1ms both } }
@media print { g[style] { animation: none } }
</style>"""


class Line(NamedTuple):
    """A line, and the seconds from the beginning after which it was there."""

    seconds: float
    words: str


def recorded() -> list[Line]:
    """Run the demo, as in a terminal of ``COLUMNS``."""
    with tempfile.TemporaryDirectory(prefix="instep-demo-") as directory:
        command = [sys.executable, "-m", "instep", "demo", "--report", f"{directory}/report.html"]
        settings = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"}
        began, found = perf_counter(), []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings) as running:
            assert running.stdout is not None
            for line in running.stdout:
                found.append(Line(perf_counter() - began, line.rstrip()))
    if running.returncode:
        sys.exit(f"the demo ended with {running.returncode}")
    return found


def shown(lines: Iterable[Line]) -> Iterator[Line]:
    """Those of the picture: no versions, no file, no two empty lines, and none that is too long."""
    before = ""
    for seconds, words in lines:
        if words.startswith(("instep ", "Report: ")) or (not words and not before):
            continue
        before = words
        for part in [words] if len(words) <= COLUMNS else wrap(words, COLUMNS, subsequent_indent="  "):
            yield Line(seconds, part)


def draw(path: Path, lines: list[Line], seconds: float) -> None:
    """Write the picture. It takes ``seconds`` until all is there."""
    first, last = lines[0].seconds, max(line.seconds for line in lines)
    width, height = 2 * MARGIN + round(COLUMNS * WIDTH), 2 * MARGIN + LINE * (len(lines) + 1)
    parts = [_text(0, COMMAND, GREY)]
    for number, line in enumerate(lines, 1):
        if not line.words:
            continue
        late = seconds * (line.seconds - first) / ((last - first) or 1.0)
        text = _text(number, line.words, GREEN if line.words.startswith("Weights: equal") else "")
        parts.append(text if late == 0 else f'<g style="animation-delay: {late:.2f}s">{text}</g>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head += f' font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{SIZE}"'
    head += ' xml:space="preserve" role="img">'
    card = f'<rect class="card" width="{width}" height="{height}" rx="6"/>'
    title = "<title>instep demo in a terminal: memory, time, and weights that are equal bit for bit</title>"
    path.write_text("\n".join([head, title, STYLE, card, *parts, "</svg>", ""]), encoding="utf-8")


def _text(number: int, words: str, kind: str) -> str:
    """A line, where its letters are as wide as they would be in a terminal, whatever the font."""
    bare = words.strip()
    x, y = MARGIN + WIDTH * (len(words) - len(words.lstrip())), MARGIN + LINE * number + SIZE
    wide = f'textLength="{WIDTH * len(bare):.1f}" lengthAdjust="spacingAndGlyphs"'
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y}" {wide}{style}>{escape(bare)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="until the last line is there")
    parser.add_argument("--json", type=Path, help="write what was printed there, with its times")
    parser.add_argument("--from", dest="source", type=Path, help="draw what --json has written")
    options = parser.parse_args()
    if options.source is None:
        lines = recorded()
    else:
        lines = [Line(*line) for line in json.loads(options.source.read_text(encoding="utf-8"))]
    if options.json:
        options.json.write_text(json.dumps(lines) + "\n", encoding="utf-8")
    draw(options.svg, list(shown(lines)), options.seconds)


if __name__ == "__main__":
    main()
