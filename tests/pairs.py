"""What does not go together, as ``docs/features.md`` shows it: ``python -m tests.pairs`` writes the table there."""

from instep._refusals.pairs import OF_DISABLED, OF_MODEL, OF_OPTIONS, OF_PARAMETERS
from tests.documentation import ROOT
from tests.loops.table import written

PAGE = ROOT / "docs" / "features.md"
PAIRS = {**OF_OPTIONS, **OF_MODEL, **OF_PARAMETERS, **OF_DISABLED}
"""The rows of the table, by name, in the order in which they stand there."""


def rendered() -> str:
    """The table of the page."""
    rows = [f"| {row.option.text} | {row.other.text} | {row.reason} |\n" for row in PAIRS.values()]
    return "| option | does not go with | because |\n|---|---|---|\n" + "".join(rows)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rendered()), encoding="utf-8")


if __name__ == "__main__":
    main()
