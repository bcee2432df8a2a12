"""``TornStepError`` tells the truth of each parameter, on the rank whose update stops and on the others."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import InstepError, TornStepError
from instep.sources.fsdp.modules import put_shards_in_place
from tests.cases import Blocks
from tests.distributed.loops import loss_of
from tests.distributed.pool import RankPool
from tests.distributed.sharded import nested
from tests.distributed.sharded_failures import fsdp1
from tests.inside import schedule_of
from tests.stopping import LEFT, Stops, require_true, updates_stop

BUCKET_MIB = 0.004


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True)


def _replicated(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=BUCKET_MIB)


def _fsdp1(model: nn.Module) -> nn.Module:
    return fsdp1(model)


DEFAULT: dict[str, Any] = {}
UNDO: dict[str, Any] = {"schedule": "backward", "undo": True}
BACKWARD: dict[str, Any] = {"schedule": "backward"}
FORWARD: dict[str, Any] = {"schedule": "forward", "defer": True}
WAYS: Mapping[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    "ddp, backward": (_ddp, BACKWARD),
    "ddp, forward": (_ddp, FORWARD),
    "replicate, backward": (_replicated, BACKWARD),
    "shard_state, backward": (_ddp, {**BACKWARD, "shard_state": True}),
    "shard_state, forward": (_ddp, {**FORWARD, "shard_state": True}),
}
SHARDED: Mapping[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    f"{source}, {way}": (shard, options)
    for source, shard in {"fsdp1": _fsdp1, "fsdp2": nested}.items()
    for way, options in {"default": DEFAULT, "backward": BACKWARD, "forward": FORWARD, "undo": UNDO}.items()
}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = _ddp(Blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(steps):
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def stopped(way: str, left: int) -> str | None:
    """The first rank's update stops in the second step. Returns what this rank was told of it."""
    old, new = plain(1), plain(2)
    wrap, options = WAYS[way]
    torch.manual_seed(0)
    model = wrap(Blocks())
    is_put_off = options["schedule"] == "forward" and "shard_state" not in options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_put_off else Stops(model.parameters(), lr=0.1)
    with patch.object(instep.options, "DEFAULT_BUCKET_BYTES", 4_000):  # of updates that are put off
        overlap = instep.attach(model, optimizer, **options)
    with updates_stop() if is_put_off else nullcontext():
        told = stopped_in_the_second_step(model, optimizer, overlap, left)
    with torch._C.DisableTorchFunctionSubclass():
        found = values(model)
    if told is not None:
        named = {name.removeprefix("module.") for name in (*told.applied, *told.pending, *told.unsure)}
        assert named
        words = [
            [name.removeprefix("module.") for name in names] for names in (told.applied, told.pending, told.unsure)
        ]
        require_true(TornStepError(2, words[0], words[1], told.rank, None, words[2]), found, old, new)
    return None if told is None else str(told)


def stopped_in_the_second_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, overlap: instep.Attachment, left: int
) -> TornStepError | None:
    told: TornStepError | None = None
    for i in range(2):
        if i == 1 and dist.get_rank() == 0:
            LEFT["parameters"] = left
        with suppress(ZeroDivisionError, InstepError):  # the very error; or another rank's
            loss_of(model, i).backward()
            optimizer.step()
            overlap.synchronize()
            optimizer.zero_grad()
    LEFT.clear()
    for _ in range(2):  # the first may raise what has stopped the step
        try:
            loss_of(model, 2)
        except TornStepError as error:
            told = error
        except (ZeroDivisionError, InstepError):
            pass
    return told


@pytest.mark.parametrize("left", [0, 3, 6])
@pytest.mark.parametrize("way", WAYS)
def test_each_parameter_is_what_its_list_says(way: str, left: int) -> None:
    """Ranks of their own: what has stopped half way may leave collectives that nobody waits for."""
    pool = RankPool(2)
    try:
        first, _ = pool.run(stopped, way, left)
    finally:
        pool.stop()
    assert first is not None


def bare(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of each parameter."""
    put_shards_in_place(model)
    with torch._C.DisableTorchFunctionSubclass():
        return {
            bare(name): (p._local_tensor if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


class StopsBefore(torch.optim.SGD):
    """Updates a bucket as a whole, or not at all."""

    def step(self, closure: Any = None) -> Any:
        if LEFT.get("parameters") == 0:
            raise MemoryError("the update")
        if LEFT:
            LEFT["parameters"] -= 1
        return super().step(closure)


def stopped_in_part(way: str, optimizer_class: type[torch.optim.Optimizer], left: int) -> tuple[str, str | None]:
    """The first rank's update stops in the second step, and that rank is gone. Returns what each of them has met, and
    was told."""
    wrap, options = SHARDED[way]
    found = []
    for steps in (1, 2):
        torch.manual_seed(0)
        model = wrap(Blocks())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(steps):
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(shards(model))
    old, new = found
    torch.manual_seed(0)
    model = wrap(Blocks())
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    overlap = instep.attach(model, optimizer, **options)
    loss_of(model, 0).backward()
    optimizer.step()
    overlap.synchronize()
    optimizer.zero_grad()
    first = dist.get_rank() == 0
    if first:
        LEFT["parameters"] = left
    met = ""
    try:
        loss_of(model, 1).backward()
        optimizer.step()
        overlap.synchronize()
    except (ZeroDivisionError, MemoryError, RuntimeError) as error:
        met = type(error).__name__
    LEFT.clear()
    if first:
        dist.destroy_process_group()  # or the other one would wait for this one
    torn: TornStepError | None = None
    try:
        schedule_of(overlap).before_forward()  # without FSDP's own, which gathers the weights
    except TornStepError as error:
        torn = error
    except InstepError:  # a step that is open and whole
        pass
    now = shards(model)
    if torn is not None:
        lists = torn.applied, torn.pending, torn.unsure
        applied, pending, unsure = ([bare(name) for name in names] for names in lists)
        assert applied or pending or unsure
        require_true(TornStepError(2, applied, pending, torn.rank, None, unsure), now, old, new)
    elif met:  # nothing of it was written, or all of it was put back; or torch's own step() has raised
        written = [name for name, shard in now.items() if not torch.equal(shard, old[name])]
        assert not written or way.endswith(("default", "forward")), f"nobody says that these were updated: {written}"
    return met, None if torn is None else str(torn)


BY_DEFAULT = (("fsdp1, backward", Stops, 4), ("fsdp1, backward", StopsBefore, 3), ("fsdp2, forward", Stops, 4))


@pytest.mark.parametrize(
    ("way", "stops", "left"),
    [
        pytest.param(way, stops, left, marks=[] if default else [pytest.mark.nightly])
        for way in SHARDED
        for stops, count in ((Stops, 14), (StopsBefore, 4))
        for left in range(count)
        for default in [(way, stops, left) in BY_DEFAULT]
    ],
)
def test_each_parameter_of_fsdp_is_what_its_list_says(way: str, stops: type[torch.optim.Optimizer], left: int) -> None:
    pool = RankPool(2, group_seconds=30)
    try:
        (met, told), (_, other) = pool.run(stopped_in_part, way, stops, left)
    finally:
        pool.stop()
    if way.endswith("backward") and met:
        assert told is not None
        assert other is not None
