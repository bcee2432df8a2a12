"""A report in a terminal, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from instep.report.advice import advice, advice_beside
from instep.report.figures import BucketFigures, figures
from instep.report.jobs import Compared
from instep.report.run import Run
from instep.report.table import MIB, rows


def show(console: Console, jobs: Sequence[Compared]) -> None:
    """Print it: what the page says, without its pictures."""
    for compared in jobs:
        if len(jobs) > 1:
            console.print(Text(f"\n{compared.title}", style="bold"))
        _show(console, compared)


def _show(console: Console, compared: Compared) -> None:
    runs, found = compared.runs, compared.figures
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for run in runs:
        table.add_column(Text(run.setup.label), justify="right")
    for row in rows(runs, found):
        table.add_row(row.name, *row.values)
    console.print(table)
    for run, one, sentences in zip(runs, found, advice_beside(runs, found), strict=True):
        memory = run.ranks[0].memory
        held = sorted(memory.alive.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {nbytes / MIB:.1f}" for name, nbytes in held if nbytes >= MIB / 20)
        console.print(Text(f"{run.setup.label}: at the peak, in MiB: {parts}"))
        if one.buckets:
            console.print(_table(one.buckets))
        for sentence in sentences:
            console.print(Text(f"- {sentence}"))


def _table(buckets: Sequence[BucketFigures]) -> Table:
    table = Table("bucket", "MiB", "step, ms", "hidden", "on its way", box=box.SIMPLE_HEAD, pad_edge=False)
    for bucket in buckets:
        flight = "–" if bucket.flight is None else f"{1e3 * bucket.flight:.1f}"
        times = (f"{1e3 * bucket.step:.1f}", f"{1e3 * bucket.hidden:.1f}", flight)
        table.add_row(Text(bucket.name), f"{bucket.nbytes / MIB:.1f}", *times)
    return table


def summary(run: Run) -> dict[str, Any]:
    """For machines: seconds and bytes."""
    found, memory = figures(run), run.ranks[0].memory
    parts = {"step": found.step, "communication": found.communication}
    hidden = {name: {**asdict(part), "hidden": part.hidden} for name, part in parts.items()}
    return {
        "setup": asdict(run.setup),
        "figures": {**asdict(found), **hidden},
        "peak": {"bytes": memory.peak, "alive": dict(memory.alive)},
        "advice": advice(run, found),
    }
