"""The table of ``docs/loops.md``, made from the forms: ``python -m tests.loops.table`` writes it."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.loops.form import Form, forms

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
HEAD = "| found in | forms |\n|---|---|\n"


def rendered(all_forms: Sequence[Form]) -> str:
    """One row for each place where forms are found, in the order of the first of each."""
    places: dict[str, list[str]] = {}
    for one in all_forms:
        places.setdefault(one.found_in, []).append(one.what + (f" (**no**: {one.fails})" if one.fails else ""))
    return HEAD + "".join(f"| {place} | {'; '.join(whats)} |\n" for place, whats in places.items())


def written(page: str, table: str) -> str:
    """The page with ``table`` in the place of its own."""
    before, after = re.escape("<!-- table -->\n"), re.escape("<!-- end of the table -->\n")
    text, count = re.subn(f"(?s)({before}).*({after})", lambda match: match[1] + table + match[2], page)
    if count != 1:
        raise ValueError("the page has no place for the table")
    return text


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rendered(forms())), encoding="utf-8")


if __name__ == "__main__":
    main()
