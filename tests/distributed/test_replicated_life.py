"""``instep.replicate``: memory, what goes wrong, what is refused, and what is left behind."""

import copy
import gc
import io
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep import ClipNorm
from instep._torch.engine import current
from instep.errors import AccumulationError, AttachError, InstepError, TornStepError
from instep.sources.replicate import buckets as transient
from instep_tools.harness import LiveBytes, first_difference, training_state
from tests import net
from tests.cases import Blocks, batch, weights
from tests.devices import let_go, sparse_collectives
from tests.distributed.loops import Fails, WithOwn, equal, loss_of, require_two_optimizers_at_once, train
from tests.distributed.pool import RankPool
from tests.living import settle
from tests.parity.interrupts import once

CAP = 0.004
OPTIONS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
}


def make(**options: Any) -> tuple[instep.Replicated, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = instep.replicate(Blocks(), **{"bucket_cap_mb": CAP, **options})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


# Memory.

LAYERS, WIDTH = 16, 128
LAYER = 4 * WIDTH * WIDTH


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class SkipsSome(nn.Module):
    """Some layers are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if number % 4 else x
        return x


def wait_until(there: Callable[[], bool]) -> None:
    """For gloo's threads, which tell and let go of a tensor a moment after it has arrived."""
    last = time.monotonic() + net.SECONDS / 2
    while not there():
        assert time.monotonic() < last, "still not there"
        time.sleep(0.01)


def body_memory(kind: str, make_module: Any, attach: dict[str, Any] | None) -> list[float]:
    """Of each step, the most gradient memory there was, in layers: the optimizer has no state, the batch one row."""
    module, peaks = make_module(), []
    with LiveBytes(module.parameters()) as live:
        if kind == "ddp":
            model: Any = DistributedDataParallel(module, bucket_cap_mb=LAYER / 2**20)
        else:
            model = instep.replicate(module, bucket_cap_mb=LAYER / 2**20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        overlap = None if attach is None else instep.attach(model, optimizer, **attach)
        permanent = LAYERS * LAYER if kind == "ddp" else 0
        for _ in range(3):
            wait_until(lambda: live.now < permanent + LAYER / 2)
            live.reset()
            model(torch.ones(1, WIDTH)).sum().backward()
            peaks.append(live.peak / LAYER)
            optimizer.step()
            optimizer.zero_grad()
            if overlap is not None:
                overlap.synchronize()
        wait_until(lambda: live.now < permanent + LAYER / 2)
    return peaks


# Two buckets are on their way, and one fills. Each of gloo's two threads may hold one that has arrived a moment longer.
FEW = 3 + 2 + 0.5


def test_gradient_memory_is_that_of_a_few_buckets(two_ranks: RankPool) -> None:
    for peaks in two_ranks.run(body_memory, "replicated", deep, OPTIONS["backward"]):
        assert all(2.5 < peak < FEW for peak in peaks), peaks


@pytest.mark.parametrize(
    ("kind", "attach", "layers"),
    [
        ("ddp", None, 2 * LAYERS),  # buckets, and what is copied out of them
        ("replicated", None, LAYERS + 1),
        ("replicated", {"schedule": "forward", "defer": True}, LAYERS + 1),
    ],
    ids=str,
)
def test_gradient_memory_where_gradients_stay(two_ranks: RankPool, kind: str, attach: Any, layers: int) -> None:
    for peaks in two_ranks.run(body_memory, kind, deep, attach):
        assert all(layers - 0.5 < peak < layers + 2.5 for peak in peaks), peaks


def test_what_nobody_uses_does_not_keep_the_rest_waiting(two_ranks: RankPool) -> None:
    for first, *later in two_ranks.run(body_memory, "replicated", SkipsSome, OPTIONS["backward"]):
        assert first > 6  # nobody knew yet
        assert all(peak < FEW + 1 for peak in later), later


class MostlyTrained(nn.Module):
    """Beside each layer a small parameter that gets a gradient, and is not in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.scales = nn.ParameterList(torch.ones(1) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x) * scale
        return x


def body_partly_optimized() -> float:
    module = MostlyTrained()
    with LiveBytes(module.parameters()) as live:
        model = instep.replicate(module, bucket_cap_mb=LAYER / 2**20)
        optimizer = torch.optim.SGD(module.layers.parameters(), lr=0.01, foreach=False)
        overlap = instep.attach(model, optimizer, schedule="backward")
        for _ in range(2):
            wait_until(lambda: live.now < LAYER / 2)
            live.reset()
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(scale.grad is not None for scale in module.scales)
        overlap.detach()
    return live.peak / LAYER


def test_a_gradient_that_stays_does_not_keep_its_bucket(two_ranks: RankPool) -> None:
    assert all(peak < FEW for peak in two_ranks.run(body_partly_optimized))


# What goes wrong.


class Stops(torch.autograd.Function):
    """Passes its input on, and may raise in backward."""

    stops = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Stops.stops:
            raise ZeroDivisionError("in backward")
        return gradient


class BlocksThatStop(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for number, block in enumerate(self.blocks):
            x = x + block(Stops.apply(x) if number == 0 else x)
        return self.outer(x)


def stopping(way: str | None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = instep.replicate(BlocksThatStop(), bucket_cap_mb=CAP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if way is not None:
        instep.attach(model, optimizer, **OPTIONS[way])
    train(model, optimizer, range(2))
    return model, optimizer


def body_backward_raises(way: str | None) -> str | None:
    """On all ranks, late: some buckets were stepped by then. The iteration is done again."""
    never, optimizer_of_never = stopping(None)
    model, optimizer = stopping(way)
    overlap = instep.attached(model)
    if overlap is not None:
        overlap.synchronize()
    before = weights(model)
    Stops.stops = True
    try:
        with pytest.raises(ZeroDivisionError, match="in backward"):
            loss_of(model, 2).backward()
    finally:
        Stops.stops = False
    if way == "backward":
        with pytest.raises(TornStepError):
            loss_of(model, 2)
        assert not equal(weights(model), before)
        assert overlap is not None
        overlap.accept_torn()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        optimizer.load_state_dict(copy.deepcopy(optimizer_of_never.state_dict()))
    else:
        assert equal(weights(model), before)
    optimizer.zero_grad()
    for one, its in ((never, optimizer_of_never), (model, optimizer)):
        train(one, its, range(2, 4))
    if overlap is not None:
        overlap.synchronize()
    return first_difference(training_state(never, optimizer_of_never), training_state(model, optimizer))


@pytest.mark.parametrize("way", [None, *OPTIONS])
def test_a_backward_that_raises_leaves_a_working_model(two_ranks: RankPool, way: str | None) -> None:
    assert two_ranks.run(body_backward_raises, way) == [None] * 2


def body_backward_raises_on_one_rank() -> tuple[str, bool]:
    group = dist.new_group(timeout=timedelta(seconds=10))
    torch.manual_seed(0)
    model = instep.replicate(BlocksThatStop(), bucket_cap_mb=CAP, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    instep.attach(model, optimizer, schedule="backward")
    train(model, optimizer, range(2))
    Stops.stops = dist.get_rank() == 1
    try:
        loss_of(model, 2).backward()
    except (RuntimeError, ZeroDivisionError) as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "no error"
    finally:
        Stops.stops = False
    try:
        optimizer.step()
    except TornStepError:
        return message, True
    return message, False


def test_a_backward_that_raises_on_one_rank_does_not_leave_the_others_waiting_for_ever() -> None:
    pool = RankPool(2)
    try:
        (first, first_torn), (second, second_torn) = pool.run(body_backward_raises_on_one_rank)
    finally:
        pool.stop()
    assert second == "ZeroDivisionError: in backward"
    assert first.startswith("RuntimeError")
    assert first_torn
    assert second_torn


def body_update_raises(ranks: list[int]) -> bool:
    model, _ = make()
    optimizer = Fails(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward")
    Fails.failing = False
    train(model, optimizer, range(2))
    Fails.failing = dist.get_rank() in ranks
    if not Fails.failing:
        loss_of(model, 2).backward()  # the other rank goes on sending
        optimizer.step()
        optimizer.zero_grad()
        after = weights(model)
        with pytest.raises(TornStepError, match="rank 1 said that this step failed there") as torn:
            overlap.synchronize()
        assert torn.value.step == 3
        assert not torn.value.pending
        with pytest.raises(TornStepError):
            loss_of(model, 3)
        assert equal(weights(model), after)
        overlap.accept_torn()
    else:
        with pytest.raises(ZeroDivisionError, match="the update"):
            loss_of(model, 2).backward()
        after = weights(model)
        for use in (optimizer.step, lambda: loss_of(model, 3)):
            with pytest.raises(TornStepError) as torn:
                use()
            assert torn.value.step == 3
            assert "inner.weight" in torn.value.unsure
        assert equal(weights(model), after)
        overlap.accept_torn()
    Fails.failing = False
    train(model, optimizer, range(3, 6))
    return overlap.step_count == 6  # the torn one counts


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_an_error_in_the_update(two_ranks: RankPool, ranks: list[int]) -> None:
    assert two_ranks.run(body_update_raises, ranks) == [True] * 2


def body_communication_fails(way: str | None, failing: int) -> tuple[bool, bool]:
    """The bucket numbered ``failing`` is lost on its way, on all ranks."""
    model, optimizer = make()
    overlap = None if way is None else instep.attach(model, optimizer, **OPTIONS[way])
    train(model, optimizer, range(2))
    if overlap is not None:
        overlap.synchronize()
    before, real = weights(model), dist.all_reduce
    calls: list[Any] = []

    class Lost:
        def __init__(self, work: Any) -> None:
            self.get_future, self._work = work.get_future, work

        def wait(self) -> None:
            self._work.wait()
            raise ConnectionError("the peer is gone")

    def all_reduce(*args: Any, **options: Any) -> Any:
        work = real(*args, **options)
        calls.append(Lost(work) if len(calls) == failing else work)
        return calls[-1]

    loss = loss_of(model, 2)
    with patch.object(dist, "all_reduce", all_reduce), pytest.raises(ConnectionError, match="the peer is gone"):
        loss.backward()
    assert len(calls) > failing
    untouched = equal(weights(model), before)
    torn = False
    if overlap is not None:
        try:
            optimizer.step()
        except TornStepError as error:
            torn = "the peer is gone" in str(error.cause)
            overlap.accept_torn()
    optimizer.zero_grad()
    train(model, optimizer, range(3, 5))  # behind what was left on its way
    return untouched, torn


@pytest.mark.parametrize("failing", [0, 2, 4])  # there are four buckets; then the flags
@pytest.mark.parametrize("way", [None, *OPTIONS])
def test_a_failed_communication_is_never_stepped_from(two_ranks: RankPool, way: str | None, failing: int) -> None:
    for untouched, torn in two_ranks.run(body_communication_fails, way, failing):
        assert untouched != torn
        assert torn == (way == "backward" and failing > 0)


def body_second_backward() -> bool:
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, schedule="backward")
    train(model, optimizer, range(2))
    loss = loss_of(model, 2)
    loss.backward(retain_graph=True)
    before = weights(model)
    with pytest.raises(AccumulationError):
        loss.backward()
    for use in (lambda: loss_of(model, 3), optimizer.step):  # the first loss alone is half a step
        with pytest.raises(TornStepError):
            use()
    assert equal(weights(model), before)
    overlap.accept_torn()
    train(model, optimizer, range(3, 5))
    return overlap.step_count == 5


def test_a_second_backward_is_refused_before_any_write(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_second_backward) == [True] * 2


def body_sparse_and_dense() -> None:
    class Words(nn.Module):
        def __init__(self, *, told: bool) -> None:
            super().__init__()
            self.told = told
            self.words = nn.Embedding(8, 4, sparse=told)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(tokens, self.words.weight, sparse=not self.told)

    for told, found in ((True, "'words.weight' is dense"), (False, "'words.weight' is sparse")):
        model = instep.replicate(Words(told=told))
        with pytest.raises(InstepError, match=found):
            model(torch.arange(4)).sum().backward()


@sparse_collectives
def test_sparse_gradients_where_dense_ones_were_expected(two_ranks: RankPool) -> None:
    two_ranks.run(body_sparse_and_dense)


# What is refused.


def test_without_a_process_group() -> None:
    with pytest.raises(AttachError, match="init_process_group"):
        instep.replicate(Blocks())


def with_own_optimizers() -> nn.Module:
    model = Blocks()
    instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def body_refused() -> None:
    twice = instep.replicate(Blocks())
    refused: list[tuple[Any, str]] = [
        (Blocks, "the class Blocks: make an object of it"),
        (nn.ReLU(), "no parameter that requires a gradient"),
        (Blocks().requires_grad_(False), "no parameter that requires a gradient"),
        (DistributedDataParallel(Blocks()), "the model' is a DistributedDataParallel"),
        (nn.Sequential(DistributedDataParallel(Blocks())), "'0' is a DistributedDataParallel"),
        (instep.replicate(Blocks()), "is a Replicated"),
        (twice.module, "'inner.weight' is replicated already"),
        (with_own_optimizers(), "'inner.weight' has optimizers of its own"),
        (fully_shard(Blocks()), "is a DTensor"),
        (nn.LazyLinear(3), "lazy module"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "one device"),
    ]
    for model, message in refused:
        with pytest.raises(AttachError, match=message):
            instep.replicate(model)
    caps: list[Any] = [0, -1, True, "25"]
    for cap in caps:
        with pytest.raises(AttachError, match="bucket_cap_mb must be"):
            instep.replicate(Blocks(), bucket_cap_mb=cap)
    rank = dist.get_rank()
    frozen = Blocks()
    frozen.outer.requires_grad_(rank == 0)
    for other, message in (
        (Blocks(out=10 + rank), r"'outer.weight' is \(10, 24\) float32 on rank 0 .* \(11, 24\)"),
        (Blocks(depth=3 + rank), r"'blocks.3.0.weight' is missing on rank 0"),
        (frozen, r"'outer.weight' .* float32, frozen on rank 1"),
    ):
        with pytest.raises(AttachError, match=message):
            instep.replicate(other)
    with pytest.raises(AttachError, match=r"option 'bucket_cap_mb' is 1 on rank 0 .* 2 on rank 1"):
        instep.replicate(Blocks(), bucket_cap_mb=1 + rank)
    early = Blocks()
    with (
        instep.attach(early, torch.optim.SGD(early.parameters(), lr=0.1), schedule="backward"),
        pytest.raises(AttachError, match=r"'inner.weight' is already attached"),
    ):
        instep.replicate(early)
    instep.replicate(early)  # and it left nothing


def test_what_replicate_refuses(two_ranks: RankPool) -> None:
    two_ranks.run(body_refused)


def body_attach_refused() -> None:
    model, optimizer = make()
    with pytest.raises(AttachError, match="Attach the Replicated instead"):
        instep.attach(model.module, optimizer, schedule="backward")
    with pytest.raises(AttachError, match=r"bucket_cap_mb=… to DistributedDataParallel or replicate"):
        instep.attach(model, optimizer, bucket_bytes=1024, schedule="backward")
    with pytest.raises(AttachError, match="comm_hook does not go with replicate"):
        instep.attach(model, optimizer, comm_hook=(None, lambda state, bucket: state), schedule="backward")
    with pytest.raises(AttachError, match="schedule='forward'"):
        instep.attach(model, optimizer, clip=ClipNorm(1.0), schedule="backward")
    require_two_optimizers_at_once(model)


def test_what_attach_refuses(two_ranks: RankPool) -> None:
    two_ranks.run(body_attach_refused)


# What is left behind.


def body_detach(way: str) -> str | None:
    plain, replica = make(), make()
    train(*plain, range(9))
    overlap = instep.attach(*replica, **OPTIONS[way])
    train(*replica, range(3))
    overlap.detach()
    loss_of(replica[0], 3).backward()
    assert all(type(p.grad) is torch.Tensor for p in replica[0].parameters())
    replica[1].step()
    replica[1].zero_grad()
    train(*replica, range(4, 6))
    with instep.attach(*replica, **OPTIONS[way]) as overlap:
        train(*replica, range(6, 9))
        assert overlap.step_count == 3
    return first_difference(training_state(*plain), training_state(*replica))


@pytest.mark.parametrize("way", OPTIONS)
def test_detach_leaves_a_replicated_model(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(body_detach, way) == [None] * 2


def body_freed(way: str | None) -> list[str]:
    """Dropping the last reference frees everything at once: no cycle, no hook, no tensor is left."""
    model, optimizer = make()
    if way is not None:
        instep.attach(model, optimizer, **OPTIONS[way])
    train(model, optimizer, range(2))
    let_go()  # an accelerator's thread of the engine still has the graph of the last backward
    module = model.module
    refs: list[weakref.ref[Any]] = [
        weakref.ref(model),
        weakref.ref(model._buckets),
        weakref.ref(module),
        *map(weakref.ref, module.parameters()),
    ]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        left = [ref for ref in refs[:2] if ref() is not None]
        hooks = [name for name, p in module.named_parameters() if p._post_accumulate_grad_hooks]
        if dist.get_rank() == 1:
            x, y = batch(0)
            nn.functional.cross_entropy(module(x), y).backward()  # waits for nobody
        del module
        settle()  # what is due has the parameters until it is applied
        patience = time.monotonic() + net.SECONDS
        while any(ref() is not None for ref in refs) and time.monotonic() < patience:
            time.sleep(0.001)  # and the thread that has applied it, until it has come back from there
        left += [ref for ref in refs if ref() is not None]
    finally:
        gc.enable()
    return [repr(ref()) for ref in left] + hooks


@pytest.mark.parametrize("way", [None, *OPTIONS])
def test_a_dropped_model_is_freed(two_ranks: RankPool, way: str | None) -> None:
    assert two_ranks.run(body_freed, way) == [[]] * 2


def copied(model: nn.Module, pickled: bool) -> Any:
    if not pickled:
        return copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def body_copies(pickled: bool) -> str | None:
    """The copy trains on, averaged and unattached; the original neither steps nor gets a gradient from it."""
    plain, original = make(), make()
    instep.attach(*original, schedule="backward")
    for loop in (plain, original):
        train(*loop, range(2))
    before = weights(original[0])
    twin = copied(original[0], pickled)
    assert instep.attached(twin) is None
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    other = torch.optim.SGD(plain[0].parameters(), lr=0.1)
    train(twin, optimizer, range(2, 5))
    assert equal(weights(original[0]), before)
    assert all(p.grad is None for p in original[0].parameters())
    train(plain[0], other, range(2, 5))
    found = first_difference(training_state(plain[0], other), training_state(twin, optimizer))
    train(*original, range(5, 6))
    return found


@pytest.mark.parametrize("pickled", [False, True])
def test_a_copy_is_replicated_and_not_attached(two_ranks: RankPool, pickled: bool) -> None:
    assert two_ranks.run(body_copies, pickled) == [None] * 2


def body_group_of_two() -> str | None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(AttachError, match="not in process_group"):
            make(process_group=group)
        return None
    model, optimizer = make(process_group=group)
    torch.manual_seed(0)
    plain = DistributedDataParallel(Blocks(), process_group=group)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    instep.attach(model, optimizer, schedule="backward")
    train(plain, plain_optimizer, range(3))
    train(model, optimizer, range(3))
    with pytest.raises(InstepError, match="process_group of its own"):
        copy.deepcopy(model)
    return first_difference(training_state(plain, plain_optimizer), training_state(model, optimizer))


def test_a_process_group_of_some_ranks(three_ranks: RankPool) -> None:
    assert three_ranks.run(body_group_of_two) == [None] * 3


def body_plan() -> tuple[str, list[str]]:
    model, optimizer = make()
    told: list[str] = []
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        overlap.recorder = lambda kind, name, start, end: told.append(kind)
        train(model, optimizer, range(2))
        wait_until(lambda: told.count("step") == told.count("communication"))
        assert sum(len(bucket.parameters) for bucket in overlap.plan.buckets) == len(list(model.parameters()))
        return str(overlap.plan), told


def test_the_plan_and_the_recorder(two_ranks: RankPool) -> None:
    (plan, told), (other, _) = two_ranks.run(body_plan)
    assert plan == other
    assert plan.splitlines()[1].split()[1] == "replicated"
    assert len(plan.splitlines()) > 4
    assert "module." not in plan
    assert told.count("step") > 4


def body_inside_another_module(hold: bool) -> str | None:
    def run(attach: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        core = make()[0] if attach else DistributedDataParallel(make_blocks(), bucket_cap_mb=CAP)
        model = WithOwn(core)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if attach:
            overlap = instep.attach(model, optimizer, schedule="backward")
            assert {bucket.source for bucket in overlap.plan.buckets} == {"replicated", "local"}
        for i in range(3):
            with core.no_sync() if hold else nullcontext():
                loss_of(model, 2 * i).backward()
            if hold:
                loss_of(model, 2 * i + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return first_difference(training_state(*run(False)), training_state(*run(True)))


def make_blocks() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


@pytest.mark.parametrize("hold", [False, True])
def test_inside_another_module(two_ranks: RankPool, hold: bool) -> None:
    assert two_ranks.run(body_inside_another_module, hold) == [None] * 2


def body_interrupted(way: str) -> str | None:
    """On all ranks, before the wrapper has asked for the end of backward."""
    never, optimizer_of_never = stopping(None)
    model, optimizer = stopping(way)
    with patch.object(transient, "current", once(current)), pytest.raises(KeyboardInterrupt):
        loss_of(model, 2).backward()
    optimizer.zero_grad()
    for one, its in ((never, optimizer_of_never), (model, optimizer)):
        train(one, its, range(2, 4))
    if (overlap := instep.attached(model)) is not None:
        overlap.synchronize()
    return first_difference(training_state(never, optimizer_of_never), training_state(model, optimizer))


@pytest.mark.parametrize("way", OPTIONS)
def test_an_interrupted_backward_is_over(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(body_interrupted, way) == [None] * 2
