"""``instep plan`` from its options to its tables."""

import dataclasses
import json as jsonlib
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console

from instep._version import __version__
from instep.planning.display import show
from instep.planning.job import Job
from instep.planning.making import plan
from instep.report.files import require_writable, write


def run(job: Job, refusals: bool, json: Path | None, quiet: bool) -> None:
    """Plan, show and write what was found.

    Raises:
        PlanError: something that ``job`` names is not there, or cannot be run without data.
        NotWrittenError: ``json`` cannot be written.
    """
    if json is not None:
        require_writable("--json", json)
    terminal = Console(stderr=True)
    with terminal.status("rehearsing some steps without data") if terminal.is_terminal else nullcontext():
        estimate = plan(job, refusals=refusals)
    if json is not None:
        versions = {"instep_version": __version__, "torch_version": torch.__version__}
        write("--json", json, jsonlib.dumps({**versions, **dataclasses.asdict(estimate)}, indent=2) + "\n")
    show(Console(), estimate, quiet)
