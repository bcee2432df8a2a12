"""The demo from its options to its verdict."""

import dataclasses
import json as jsonlib
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from instep._version import __version__
from instep.demo.acts import Trained, larger, one_device, two_ranks
from instep.demo.display import progress, show_header, show_no_report, show_report, show_summary
from instep.demo.errors import DemoError
from instep.demo.job import MIN_STEPS, SHAPES, SIZE_OF_RANKS, WARM_UP_STEPS, Finished, Line, Size
from instep.demo.placement import place
from instep.demo.summary import Summary, summarize
from instep.demo.text import load_text
from instep.report.files import NotWrittenError, require_writable, write
from instep.report.jobs import Compared
from instep.report.page import page

REPORT = Path("instep-demo-report.html")


def run(
    size: Size, steps: int, ranks: int | None, text: Path | None, json: Path | None, report: Path | None, quiet: bool
) -> bool:
    """Train, show and write what was found. Whether the weights were equal, bit for bit, in every loop.

    Whatever can be refused is refused before a process is started, with a ``DemoError`` or ``NotWrittenError``.
    Without ``report`` a page is written into the working directory, if that can be written.
    """
    if steps < MIN_STEPS:
        raise DemoError(f"--steps {steps}: at least {MIN_STEPS}, of which the first {WARM_UP_STEPS} are not timed")
    placement = place(ranks)
    content = load_text(text)
    if json is not None:
        require_writable("--json", json)
    no_report = _why_not(report)
    console, quietly = Console(), Console(quiet=quiet)
    show_header(quietly, placement, f"{len(content):,} bytes of {text or 'the text of Python’s help topics'}")
    shape, device = SHAPES[size], placement.device
    with progress(quietly, f"One device: three loops in three processes take {steps} steps, in turn", steps) as tell:
        trained = one_device(shape, device, steps, content, tell)
    deeper = larger(shape, device, trained, content)
    finished = []
    if placement.ranks > 1:
        with progress(quietly, f"{placement.ranks} ranks: two loops take {steps} steps, in turn", steps) as tell:
            finished = two_ranks(SHAPES[SIZE_OF_RANKS], placement, steps, content, tell)
    summary = summarize(size, shape.depth, placement, trained, deeper, finished)
    show_summary(console, summary)
    if json is not None:
        write("--json", json, _numbers(summary))
    if no_report is None:
        write("--report", report or REPORT, page(_acts(summary, trained, finished)))
        show_report(console, report or REPORT)
    else:
        show_no_report(console, no_report)
    return not summary.differences


def _acts(summary: Summary, trained: Sequence[Trained], finished: Sequence[Finished]) -> list[Compared]:
    """For the report. The two acts train models of their own."""
    alone = [one.held.recorded for one in trained if one.line is not Line.DEFAULT]
    act, ranks = summary.one_device, summary.two_ranks
    acts = [Compared([run for run in alone if run is not None], "One device", _weights(summary, act.differences))]
    if ranks is not None:
        found = [] if ranks.difference is None else [ranks.difference]
        acts.append(Compared(finished[0].recorded, f"{ranks.ranks} ranks", _weights(summary, found)))
    return acts


def _weights(summary: Summary, differences: Sequence[str]) -> str:
    return "different" if differences else f"equal, bit for bit, after each of {summary.steps} steps"


def _why_not(report: Path | None) -> str | None:
    """Why the page that nobody has asked for cannot be written; ``None``: it can. Raises for one that was asked for."""
    try:
        require_writable("--report", report or REPORT)
    except NotWrittenError as error:
        if report is not None:
            raise
        return str(error).replace("--report ", "")
    return None


def _numbers(summary: Summary) -> str:
    versions = {"instep_version": __version__, "torch_version": torch.__version__}
    found = {"equal": not summary.differences, "differences": summary.differences}
    return jsonlib.dumps({**versions, **found, **dataclasses.asdict(summary)}, indent=2) + "\n"
