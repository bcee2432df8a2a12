"""What the demo shows: a header, the falling loss, a table of each act, and the verdict."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from instep._version import __version__
from instep.demo.job import Placement
from instep.demo.summary import MIB, OneDevice, Summary, Time, TwoRanks, verdict

LINES = 4
"""Of each act, where the output is no terminal."""


def show_header(console: Console, placement: Placement, text: str) -> None:
    """Which versions run, on which text, and why the demo is not as one would expect."""
    _print(console, f"instep {__version__}, torch {torch.__version__}, on {text}")
    if placement.note is not None:
        _print(console, placement.note)


@contextmanager
def progress(console: Console, act: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A function to call after each step: it moves a bar on a terminal, and else prints a few lines in all."""
    _print(console, act)
    if not console.is_interactive:
        yield lambda step, loss: _line(console, step, steps, loss)
        return
    with Bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), console=console) as bar:
        task = bar.add_task("", total=steps, loss="starting")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"loss {loss:.3f}")


def show_summary(console: Console, summary: Summary) -> None:
    """A table of each act, the differences if there are any, and the verdict."""
    for one in summary.one_device.loops:
        _print(console, f"  {one.line:10} {one.code}")
    console.print(_one_device(summary.one_device))
    if summary.two_ranks is not None:
        console.print(_two_ranks(summary.two_ranks))
    for difference in summary.differences:
        console.print(f"NOT EQUAL: {difference}", style="bold red", markup=False, highlight=False)
    for line in verdict(summary):
        _print(console, line)


def show_report(console: Console, path: Path) -> None:
    """Where the report is; as a terminal can open it."""
    _print(console, f"Report: {path.resolve().as_uri()}")


def show_no_report(console: Console, reason: str) -> None:
    _print(console, f"No report: {reason}. --report FILE writes one elsewhere")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _line(console: Console, step: int, steps: int, loss: float) -> None:
    if step in (1, steps) or step % max(1, steps // LINES) == 0:
        _print(console, f"step {step}/{steps}: loss {loss:.3f}")


def _one_device(act: OneDevice) -> Table:
    table = Table(
        f"one device, {act.parameters / 1e6:.1f} M parameters",
        *(one.line for one in act.loops),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_row("loss, first → last", *(f"{one.first_loss:.3f} → {one.last_loss:.3f}" for one in act.loops))
    table.add_row("weights and state", "", *(_equal(one.difference) for one in act.loops[1:]))
    table.add_row("tensors, peak", *(_mebibytes(one.peak_bytes) for one in act.loops))
    if all(one.resident_bytes is not None for one in act.loops):
        table.add_row("process, peak", *(_mebibytes(one.resident_bytes) for one in act.loops))
    table.add_row("iteration, median", *(_milliseconds(one.time.median_seconds) for one in act.loops))
    table.add_row("plain / this (p10–p90)", "", *(_ratio(one.time) for one in act.loops[1:]))
    return table


def _two_ranks(act: TwoRanks) -> Table:
    title = f"{act.ranks} ranks over {act.backend}, {act.parameters / 1e6:.1f} M parameters"
    table = Table(title, "DistributedDataParallel", "instep.replicate", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row("weights and state", "", _equal(act.difference))
    table.add_row("gradients, peak", _mebibytes(act.ddp_gradient_bytes), _mebibytes(act.gradient_bytes))
    table.add_row("iteration, median", _milliseconds(act.ddp_median_seconds), _milliseconds(act.time.median_seconds))
    table.add_row("DDP / this (p10–p90)", "", _ratio(act.time))
    return table


def _equal(difference: str | None) -> str:
    return "equal" if difference is None else "[bold red]NOT EQUAL"


def _ratio(time: Time) -> str:
    return f"{time.ratio:.2f} ({time.p10:.2f}–{time.p90:.2f})"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _mebibytes(nbytes: int | None) -> str:
    return "n/a" if nbytes is None else f"{nbytes / MIB:.0f} MiB"
