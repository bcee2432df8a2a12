"""The demo from its options to its verdict."""

import dataclasses
import json as jsonlib
from pathlib import Path

import torch
from rich.console import Console

from instep._version import __version__
from instep.demo.display import progress, show_header, show_report, show_summary
from instep.demo.errors import DemoError
from instep.demo.job import MIN_STEPS, WARM_UP_STEPS, Finished, Job, Size
from instep.demo.launch import launch
from instep.demo.placement import place
from instep.demo.summary import summarize
from instep.demo.text import load_text
from instep.report.files import require_writable, write
from instep.report.page import page


def run(
    size: Size, steps: int, ranks: int | None, text: Path | None, json: Path | None, report: Path, quiet: bool
) -> bool:
    """Train, show and write what was found. Whether the weights were equal, bit for bit, on all ranks.

    Everything that can be refused is refused before a process is started, with a ``DemoError`` or ``NotWrittenError``.
    """
    if steps < MIN_STEPS:
        raise DemoError(f"--steps {steps}: at least {MIN_STEPS}, of which the first {WARM_UP_STEPS} are not timed")
    job = Job(size, steps, place(ranks))
    content = load_text(text)
    if json is not None:
        require_writable("--json", json)
    require_writable("--report", report)
    console = Console()
    answers = _train(console, job, content, str(text or "the text of Python's help topics"), quiet)
    summary = summarize(job, answers)
    show_summary(console, summary)
    if json is not None:
        versions = {"instep_version": __version__, "torch_version": torch.__version__}
        write(
            "--json",
            json,
            jsonlib.dumps({**versions, "equal": summary.equal, **dataclasses.asdict(summary)}, indent=2) + "\n",
        )
    write("--report", report, page(answers[0].recorded))
    show_report(console, report)
    return summary.equal


def _train(console: Console, job: Job, content: bytes, name: str, quiet: bool) -> list[Finished]:
    if quiet:
        return launch(job, content, lambda now: None)
    show_header(console, job, f"{len(content):,} bytes of {name}")
    with progress(console, job.steps) as tell:
        return launch(job, content, tell)
