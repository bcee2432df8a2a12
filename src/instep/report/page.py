"""A report as one HTML page, with nothing to load from elsewhere."""

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from instep.report.advice import advice_beside
from instep.report.drawing import curves, ticks, timelines
from instep.report.jobs import Compared
from instep.report.table import MIB, rows
from instep.report.verdict import cards


def page(jobs: Sequence[Compared]) -> str:
    """Of one recording, or of several side by side, each job by itself. The page can be read without its script, which
    shows the values under a pointer, and zooms."""
    environment = Environment(
        loader=PackageLoader("instep.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ms"] = lambda seconds: f"{1e3 * seconds:.1f}"
    environment.filters["mib"] = lambda nbytes: f"{nbytes / MIB:.1f}"
    environment.filters["breakable"] = breakable
    return environment.get_template("page.html").render(jobs=[_shown(job) for job in jobs], ticks=ticks)


def _shown(compared: Compared) -> dict[str, Any]:
    runs, found = compared.runs, compared.figures
    sections = [
        {"run": run, "setup": run.setup, "figures": one, "timeline": timeline, "memory": run.ranks[0].memory}
        for run, one, timeline in zip(runs, found, timelines(runs), strict=True)
    ]
    return {
        "title": compared.title,
        "sections": sections,
        "cards": cards(compared),
        "advice": advice_beside(runs, found),
        "rows": rows(runs, found),
        "curves": curves(runs),
    }


def breakable(name: str) -> Markup:
    """A name that may go on in the next line behind a mark between two of its words, and nowhere else."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._,=(])(?=[^._,=(\s])", name))
