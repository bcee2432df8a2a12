"""A plugin of pytest's for the runs of ``tests.mutation.matrix``: the likely and cheap tests first, and which fail.

In the environment: ``INSTEP_TEST_ORDER``, a file of JSON with ``ranks``, node ids with numbers (lower is earlier), and
``failed``, the file that gets the node ids of failing tests.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks: dict[str, float] = _orders()["ranks"]
    last = max(ranks.values(), default=0.0)

    def key(item: pytest.Item) -> tuple[bool, float]:
        drawn = hasattr(getattr(item, "obj", None), "hypothesis")  # which programs are drawn is not the defect's doing
        return drawn, ranks.get(item.nodeid, last)

    items.sort(key=key)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        with Path(_orders()["failed"]).open("a", encoding="utf-8") as file:
            file.write(report.nodeid + "\n")


def _orders() -> dict[str, Any]:
    return json.loads(Path(os.environ["INSTEP_TEST_ORDER"]).read_text(encoding="utf-8"))
