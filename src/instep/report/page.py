"""A report as one HTML page, with nothing to load from elsewhere."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from instep.report.advice import advice
from instep.report.drawing import area, peak_position, timelines
from instep.report.figures import figures
from instep.report.run import Run
from instep.report.table import MIB, rows


def page(runs: Sequence[Run]) -> str:
    """Of one recording, or of several side by side."""
    found = [figures(run) for run in runs]
    environment = Environment(
        loader=PackageLoader("instep.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ms"] = lambda seconds: f"{1e3 * seconds:.1f}"
    environment.filters["mib"] = lambda nbytes: f"{nbytes / MIB:.1f}"
    sections = [
        {
            "run": run,
            "setup": run.setup,
            "figures": one,
            "advice": advice(run, one),
            "timeline": timeline,
            "memory": run.ranks[0].memory,
            "area": area(run.ranks[0].memory),
            "peak_position": peak_position(run.ranks[0].memory),
        }
        for run, one, timeline in zip(runs, found, timelines(runs), strict=True)
    ]
    return environment.get_template("page.html").render(sections=sections, rows=rows(runs, found))
