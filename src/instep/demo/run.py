"""The demo from its options to its verdict."""

import dataclasses
from pathlib import Path

import torch
from rich.console import Console

from instep._version import __version__
from instep.demo.display import progress, show_header, show_summary
from instep.demo.errors import DemoError
from instep.demo.job import MIN_STEPS, WARM_UP_STEPS, Job, Size
from instep.demo.jsonfile import require_writable, write_json
from instep.demo.launch import launch
from instep.demo.placement import place
from instep.demo.summary import Summary, summarize
from instep.demo.text import load_text


def run(size: Size, steps: int, ranks: int | None, text: Path | None, json: Path | None, quiet: bool) -> bool:
    """Train, show and write what was found. Whether the weights were equal, bit for bit, on all ranks.

    Everything that can be refused is refused before a process is started, with a ``DemoError``.
    """
    if steps < MIN_STEPS:
        raise DemoError(f"--steps {steps}: at least {MIN_STEPS}, of which the first {WARM_UP_STEPS} are not timed")
    job = Job(size, steps, place(ranks))
    content = load_text(text)
    if json is not None:
        require_writable(json)
    summary = _train(job, content, str(text or "the text of Python's help topics"), quiet)
    if json is not None:
        versions = {"instep_version": __version__, "torch_version": torch.__version__}
        write_json(json, {**versions, **dataclasses.asdict(summary)})
    return summary.equal


def _train(job: Job, content: bytes, name: str, quiet: bool) -> Summary:
    console = Console()
    if quiet:
        answers = launch(job, content, lambda now: None)
    else:
        show_header(console, job, f"{len(content):,} bytes of {name}")
        with progress(console, job.steps) as tell:
            answers = launch(job, content, tell)
    summary = summarize(job, answers)
    show_summary(console, summary)
    return summary
