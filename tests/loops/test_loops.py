"""Every form of a loop, plain and with the line."""

import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep.verification import first_difference
from tests.late import late_updates
from tests.loops.form import FIELDS, Form, Run, Seen, forms
from tests.loops.line import LINE
from tests.loops.table import PAGE, rendered, written

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
    # Of torch's names, which Lightning uses.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]
SMALL = 2_000  # bytes: several buckets even in small models
FORMS = forms()


def cases() -> list[Any]:
    found = []
    for one in FORMS:
        marks = [pytest.mark.xfail(strict=True, reason=one.fails)] if one.fails else []
        found.append(pytest.param(one, marks=marks, id=f"{one.field}-{one.name}"))
    return found


@pytest.mark.parametrize("form", cases())
def test_a_loop_with_the_line_is_the_plain_loop(form: Form) -> None:
    plain = trained(form, None)
    require_same(plain, trained(form, LINE))
    # Only the loop itself looks at weights, and no update runs before somebody waits for it.
    late = trained(form, {**LINE, "bucket_bytes": SMALL}, every_step=False, during=late_updates())
    names = late[-1].keys()
    logged = [{k: v for k, v in step.items() if k.startswith("logged")} for step in plain[:-1]]
    require_same([*logged, {name: plain[-1][name] for name in names if name in plain[-1]}], late)


def trained(
    form: Form,
    options: dict[str, Any] | None,
    *,
    every_step: bool = True,
    during: AbstractContextManager[Any] | None = None,
) -> list[Seen]:
    run = Run(options, every_step=every_step)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        with during or nullcontext():
            form.run(run)
            run.end()
    finally:
        run.detach()
    assert len(run.steps) > 4
    assert options is None or form.by_itself or run.stepped > 3, "instep took no step"
    return run.steps


def require_same(plain: list[Seen], other: list[Seen]) -> None:
    assert len(plain) == len(other)
    for number, (a, b) in enumerate(zip(plain, other, strict=True)):
        difference = first_difference(iter(a.items()), iter(b.items()))
        assert difference is None, f"step {number}: {difference}"


def test_names_of_forms_are_unique_and_every_file_is_read() -> None:
    names = [one.name for one in FORMS]
    assert len(set(names)) == len(names)
    files = {path.stem for path in (Path(__file__).parent / "forms").glob("*.py")}
    assert files - {"__init__"} == set(FIELDS)


def test_the_table_of_the_page_is_that_of_the_forms() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, rendered(FORMS)), "make it anew: python -m tests.loops.table"
