"""``instep plan`` from its options to its tables."""

import dataclasses
from pathlib import Path

import torch
from rich.console import Console

from instep._version import __version__
from instep.demo.jsonfile import require_writable, write_json
from instep.planning.display import show
from instep.planning.job import Job
from instep.planning.making import plan


def run(job: Job, json: Path | None, quiet: bool) -> None:
    """Plan, show and write what was found.

    Raises:
        PlanError: something that ``job`` names is not there, or cannot be run without data.
        DemoError: ``json`` cannot be written.
    """
    if json is not None:
        require_writable(json)
    estimate = plan(job)
    if json is not None:
        versions = {"instep_version": __version__, "torch_version": torch.__version__}
        write_json(json, {**versions, **dataclasses.asdict(estimate)})
    show(Console(), estimate, quiet)
