"""What does not go together, as ``docs/features.md`` shows it: ``python -m tests.pairs`` writes the table there."""

from instep._refusals.pairs import OF_DISABLED, OF_MODEL, OF_OPTIONS, OF_PARAMETERS
from tests.documentation import ROOT
from tests.loops.table import written

PAGE = ROOT / "docs" / "features.md"
PAIRS = {**OF_OPTIONS, **OF_MODEL, **OF_PARAMETERS, **OF_DISABLED}
"""All pairs, by name, in the order in which the table has them."""


def rendered() -> str:
    """The table of the page: one row for each option. Why, says the error."""
    others: dict[str, list[str]] = {}
    for row in PAIRS.values():
        others.setdefault(row.option.text, []).append(row.other.text)
    rows = [f"| {option} | {'; '.join(texts)} |\n" for option, texts in others.items()]
    return "| option | does not go with |\n|---|---|\n" + "".join(rows)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rendered()), encoding="utf-8")


if __name__ == "__main__":
    main()
