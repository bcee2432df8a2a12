"""In a regular step the host waits for the device as often as in the plain loop's: never, unless something asks."""

import math
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._torch.engine import Backwards, EndOfBackward, is_of_backward
from tests.accelerator.loops import CLIP, MODELS, OPTIMIZERS, WAYS
from tests.accelerator.recording import recorded
from tests.accelerator.waits import STEPS, Asking, regular_steps, require_waits
from tests.cases import Blocks, batch
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "failing"])
def test_optimizers(optimizer: str, way: str) -> None:
    require_waits(WAYS[way], optimizers=optimizer)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, way: str) -> None:
    """None of these loops has a wait."""
    log, _ = regular_steps(WAYS[way], model=model)
    assert log.host_waits == []
    assert log.queries == []


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_asks(way: str) -> None:
    """As often as the plain loop's: once for each gradient."""

    def asking(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [Asking(model.parameters(), lr=0.05)]

    expected, _ = regular_steps(None, optimizers=asking)
    assert len(expected.host_waits) == STEPS * len(list(Blocks().parameters()))
    require_waits(WAYS[way], optimizers=asking)


@pytest.mark.parametrize("way", WAYS)
def test_several_optimizers(way: str) -> None:
    def several(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return [torch.optim.AdamW(matrices, lr=1e-2, fused=True), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]

    require_waits(WAYS[way], optimizers=several)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counted", [False, True])
def test_accumulation(counted: bool, way: str) -> None:
    options = {**WAYS[way], **({"accumulation_steps": 3} if counted else {})}
    require_waits(options, micro_batches=3)


CLIPS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "forward": ({"schedule": "forward", "defer": True, "clip": instep.ClipNorm(CLIP)}, 0),
    "two passes": ({"schedule": "backward", "clip": instep.ClipNorm(CLIP, mode="two_pass")}, 0),
    "the norm alone": ({"schedule": "backward", "clip": instep.ClipNorm(math.inf)}, 0),
    "by value": ({"schedule": "backward", "clip": instep.ClipValue(CLIP)}, 0),
    # Whether the trial stands is known to the device alone.
    "undo": ({"schedule": "backward", "undo": True, "clip": instep.ClipNorm(CLIP)}, 1),
    "undo, and nothing to clip": ({"schedule": "backward", "undo": True, "clip": instep.ClipNorm(1e6)}, 1),
    "undo on the host": ({"schedule": "backward", "undo": "host", "clip": instep.ClipNorm(1e6)}, 1),
}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
@pytest.mark.parametrize("clip", CLIPS)
def test_clips(clip: str, optimizer: str) -> None:
    options, waits = CLIPS[clip]
    require_waits(options, waits, {"clip": CLIP}, asks=clip == "two passes", optimizers=optimizer)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "backward"])
def test_the_loop_clips(way: str) -> None:
    require_waits(WAYS[way], clip=CLIP)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "backward"])
@pytest.mark.parametrize("optimizer", ["AdamW", "fused"])
def test_a_scaler(optimizer: str, way: str) -> None:
    """Whether the kernel of a fused optimizer will skip is asked, and with ``undo`` which scale was taken off."""
    more = (optimizer == "fused") + ("undo" in way)
    scalers = [torch.amp.GradScaler("emu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    options = {**WAYS[way], **({"scaler": scalers[1]} if "undo" in WAYS[way] else {})}
    require_waits(options, more, {"scaler": scalers[0]}, optimizers=optimizer, scaler=scalers[1])


@pytest.mark.parametrize("optimizer", ["AdamW", "fused"])
def test_a_scaler_in_a_loop_that_does_not_unscale(optimizer: str) -> None:
    """A fused kernel takes the scale off by itself: whether as it was taken off in backward is asked, too."""
    scalers = [torch.amp.GradScaler("emu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    options = {"schedule": "backward", "undo": True, "scaler": scalers[1]}
    how: dict[str, Any] = {"optimizers": optimizer, "scaler": scalers[1], "unscales": False}
    require_waits(options, 5 if optimizer == "fused" else 1, {"scaler": scalers[0]}, **how)


@pytest.mark.parametrize(("way", "more"), [("backward", 1), ("forward", 0), ("undo", 2), ("undo on the host", 2)])
def test_rates_that_are_on_the_device(way: str, more: int) -> None:
    """However many groups there are."""

    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = [{"params": [p], "lr": torch.tensor(0.01, device="emu")} for p in model.parameters()]
        return [torch.optim.AdamW(groups, capturable=True)]

    require_waits(WAYS[way], more, optimizers=build)


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("way", [name for name in WAYS if name != "backward"])
@pytest.mark.parametrize("model", ["blocks", "two devices"])
def test_whether_gradients_are_finite_is_asked_once(model: str, way: str, policy: str) -> None:
    require_waits({**WAYS[way], "nonfinite": policy}, 1, model=model)


def test_whether_gradients_are_finite_is_asked_for_each_bucket_in_backward() -> None:
    log, buckets = regular_steps({"schedule": "backward", "nonfinite": "raise"})
    assert buckets > 1
    assert len(log.host_waits) == STEPS * buckets


# Ranks.


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True)


def _replicated(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=0.002)


def _fully_sharded(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("emu", (2,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


WRAPPERS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": _ddp,
    "replicate": _replicated,
    "fsdp2": _fully_sharded,
}
Waits = tuple[Sequence[str], Sequence[str]]
"""Of the host, and its questions."""


def _ranks_body(wrapper: str, options: Mapping[str, Any] | None, fused: bool, first: int, last: int) -> Waits:
    torch.manual_seed(0)
    with torch.device("emu"):
        model = WRAPPERS[wrapper](Blocks())
        data = [batch(i) for i in range(last)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    overlap = None if options is None else instep.attach(model, optimizer, **options)

    def learn(i: int) -> None:
        x, y = data[i]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward() if overlap is None else overlap.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    for i in range(first):
        learn(i)
    with recorded() as log:
        for i in range(first, last):
            learn(i)
    if overlap is not None:
        overlap.detach()
    log.assert_ordered()
    return log.host_waits, log.queries


OF_RANKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{f"{wrapper}, {way}": (wrapper, WAYS[way]) for wrapper in WRAPPERS for way in WAYS},
    "ddp, clipped": ("ddp", {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(CLIP)}),
    "ddp, clipped in two passes": ("ddp", {"schedule": "backward", "clip": instep.ClipNorm(CLIP, mode="two_pass")}),
    "fsdp2, clipped": ("fsdp2", {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(CLIP)}),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", OF_RANKS)
def test_ranks(two_emulated_ranks: RankPool, case: str, fused: bool) -> None:
    wrapper, options = OF_RANKS[case]
    for how in (None, options):
        assert two_emulated_ranks.run(_ranks_body, wrapper, how, fused, 3, 6) == [([], [])] * 2


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("way", [name for name in WAYS if name != "backward"])
def test_ranks_vote_behind_one_wait(two_emulated_ranks: RankPool, wrapper: str, way: str) -> None:
    options = {**WAYS[way], "nonfinite": "skip"}
    for waits, queries in two_emulated_ranks.run(_ranks_body, wrapper, options, False, 3, 6):
        assert len(waits) == 3, "\n".join(waits)
        assert queries == []


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_divided_state(two_emulated_ranks: RankPool, schedule: str) -> None:
    """It is asked whether what was sent has arrived and may be freed; nobody waits."""
    options = {"schedule": schedule, "defer": schedule == "forward", "shard_state": True}
    for waits, queries in two_emulated_ranks.run(_ranks_body, "ddp", options, False, 3, 6):
        assert waits == []
        assert all("zero/shards.py" in query for query in queries), "\n".join(queries)


@pytest.mark.skipif(sys.platform != "linux", reason="tells no thread's name")
def test_the_engine_s_threads_are_known_by_their_name() -> None:
    """A failure says that torch has named them otherwise."""
    seen = []
    parameter = torch.zeros(2, device="emu", requires_grad=True)
    parameter.register_hook(lambda _: seen.append(threading.get_native_id()))
    parameter.sum().backward()
    assert list(map(is_of_backward, [*seen, threading.get_native_id(), 0])) == [True, False, False]


def _drop(backwards: Backwards, failed: Sequence[Callable[[], None]], *, by_engine: bool) -> None:
    """Keep ends of a backward until it is over, as the engine may. Then drop them: the engine's own thread, in another
    backward, or the loop's."""
    held: list[EndOfBackward] = []
    parameter = torch.zeros(2, device="emu", requires_grad=True)

    def begin(gradient: torch.Tensor) -> None:
        backwards.begin(gradient.device)
        held.extend(EndOfBackward(lambda: None, one) for one in failed)
        raise RuntimeError("the user's own")

    def drop(_: object = None) -> None:
        while held:
            held.pop(0)

    handle = parameter.register_hook(begin)
    with pytest.raises(RuntimeError, match="own"):
        parameter.sum().backward()
    handle.remove()
    if by_engine:
        parameter.register_hook(drop)
        parameter.sum().backward()
    drop()


@pytest.mark.skipif(sys.platform != "linux", reason="tells no thread's name")
def test_what_the_engine_s_own_thread_drops_is_told_on_the_loop_s() -> None:
    """By then the loop may be clearing gradients, and two threads at one ``.grad`` is more than torch bears."""
    backwards, told = Backwards(), list[str]()
    _drop(backwards, [partial(told.append, name) for name in "ab"], by_engine=True)
    assert told == []
    backwards.drain_failed()
    assert told == ["a", "b"]
    backwards.drain_failed()
    assert told == ["a", "b"]


def test_what_the_loop_s_thread_drops_is_told_at_once() -> None:
    told: list[str] = []
    _drop(Backwards(), [partial(told.append, "a")], by_engine=False)
    assert told == ["a"]


@pytest.mark.skipif(sys.platform != "linux", reason="tells no thread's name")
def test_what_is_told_late_may_let_go_again() -> None:
    """To put a step back waits for backwards, too."""
    backwards, told = Backwards(), list[str]()

    def failed(name: str) -> None:
        told.append(name)
        backwards.drain_failed()

    _drop(backwards, [partial(failed, name) for name in "ab"], by_engine=True)
    backwards.drain_failed()
    assert told == ["a", "b"]


@pytest.mark.skipif(sys.platform != "linux", reason="tells no thread's name")
def test_ctrl_c_in_what_is_told_late_waits_and_leaves_the_others() -> None:
    backwards, told = Backwards(), list[str]()

    def first() -> None:
        signal.raise_signal(signal.SIGINT)
        told.append("first")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _drop(backwards, [first, lambda: told.append("second")], by_engine=True)
        with pytest.raises(KeyboardInterrupt):
            backwards.drain_failed()
        assert told == ["first"]
        backwards.drain_failed()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == ["first", "second"]
