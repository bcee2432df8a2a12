"""The attached loop beside the plain one, recorded."""

from collections.abc import Mapping
from typing import Any

import torch

from tests.accelerator.loops import train
from tests.accelerator.recording import Log, recorded


def compare(
    options: Mapping[str, Any], plain: Mapping[str, Any] | None = None, **how: Any
) -> tuple[list[torch.Tensor], Log]:
    """Train plain, with ``plain`` on top, and attached, with what the attached loop left for dispatch."""
    expected = train(None, **{**how, **(plain or {})})
    with recorded() as log:
        found = train(options, **how)
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), f"tensor {number} differs by {(one - other).abs().max()}"
    log.assert_ordered()
    return found, log
