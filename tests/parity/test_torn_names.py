"""``TornStepError`` tells the truth of each parameter, wherever in the update the error comes."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import TornStepError
from tests.cases import Blocks, batch
from tests.stopping import LEFT, require_true, updates_stop

BUCKET = 2_500  # bytes: one or two layers
PARAMETERS = 22
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "kept": {"schedule": "forward", "defer": True},  # a weight that has another owner: step() itself updates it
    "clipped": {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(1e6)},
}


@pytest.fixture(autouse=True)
def _unbounded() -> Iterator[None]:
    with updates_stop():
        yield
    LEFT.clear()


def run(
    options: Mapping[str, Any] | None, several: bool, left: int | None, *, keeps: bool = False
) -> tuple[nn.Module, TornStepError | None]:
    """A regular step, and one in which the update stops."""
    torch.manual_seed(0)
    model = Blocks()
    parameters = list(model.parameters())
    parts = [parameters[:5], parameters[5:]] if several else [parameters]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    torn: TornStepError | None = None
    kept = model.inner.weight.detach() if keeps else None
    overlap = None if options is None else instep.attach(model, optimizers, bucket_bytes=BUCKET, **options)
    for i in range(2):
        if i == 1 and left is not None:
            LEFT["parameters"] = left
        try:
            model(batch(i)[0]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            model(batch(i)[0])  # with "forward" the error comes here
            for optimizer in optimizers:
                optimizer.zero_grad()
        except ZeroDivisionError:
            with suppress(
                ZeroDivisionError, TornStepError
            ):  # where step() itself has raised, and a bucket that it had put off does
                model(batch(i)[0])
            with pytest.raises(TornStepError) as raised:
                model(batch(i)[0])
            torn = raised.value
    LEFT.clear()
    del kept
    if overlap is not None:
        if torn is not None:
            overlap.accept_torn()
        overlap.detach()
    return model, torn


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("way", WAYS)
def test_each_parameter_is_what_its_list_says(way: str, several: bool) -> None:
    seen: set[str] = set()
    stopped = 0
    for left in range(PARAMETERS):
        model, torn = run(WAYS[way], several, left, keeps=way == "kept")
        if torn is None:
            continue
        stopped += 1
        found, new = values(model), values(run(None, several, None)[0])
        old = values(before(several))
        require_true(torn, found, old, new)
        assert torn.unsure
        assert sum(found[name].nbytes for name in torn.unsure) <= 2 * BUCKET
        seen |= {word for word in ("applied", "pending") if getattr(torn, word)}
        seen |= {"inner.weight"}.intersection(torn.applied)
    assert stopped >= PARAMETERS // 2
    expected = {"backward": {"applied"}, "kept": {"applied", "pending", "inner.weight"}}
    assert seen >= expected.get(way, {"applied", "pending"})


def before(several: bool) -> nn.Module:
    """After the regular step alone."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0)[0]).square().mean().backward()
    optimizer.step()
    return model
