"""``offload="host"``: the plain loop's bits, no access left to chance, state of two buckets on the device at most."""

import io
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import instep
from instep.errors import AttachError, InstepError, UnsupportedOptimizerError
from instep.options import Schedules
from instep_tools.planning.job import Job
from instep_tools.planning.plan import plan
from tests.accelerator import ACCELERATOR
from tests.accelerator.comparing import compare
from tests.accelerator.loops import CLIP, HAPPENINGS, MODELS, ONLY, OPTIMIZERS, train
from tests.accelerator.measuring import BUCKET, GRADIENTS, measure, peak, plain_peak
from tests.accelerator.recording import recorded
from tests.accelerator.sources import HAPPENS, SOURCES, on_device
from tests.accelerator.waits import require_waits
from tests.cases import Blocks, batch
from tests.checkpoint import saved
from tests.distributed.pool import RankPool
from tests.judged import own_steps_are_judged
from tests.parity.keyed import RoundedAdafactor, Whitened

pytestmark = pytest.mark.accelerator
WEIGHTS = GRADIENTS  # bytes of both
OFFLOADED: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward", "offload": "host"},
    "forward": {"schedule": "forward", "offload": "host"},
    "undo": {"schedule": "backward", "undo": True, "offload": "host"},
    "undo on the host": {"schedule": "backward", "undo": "host", "offload": "host"},
}


@pytest.fixture(autouse=True)
def _on_the_device() -> Any:
    with torch.device(ACCELERATOR):
        yield


@pytest.mark.parametrize(
    ("model", "optimizer", "way"),
    [
        (model, optimizer, way)
        for model, optimizer, way in product(MODELS, OPTIMIZERS, OFFLOADED)
        if (way == "backward" or model == "blocks" or optimizer == "AdamW")
        # Of two devices the plain NAdam has its state on one.
        and optimizer != "failing"
        and (model, optimizer) != ("two devices", "NAdam")
    ],
)
def test_models_and_optimizers(model: str, optimizer: str, way: str) -> None:
    compare(OFFLOADED[way], model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("happening", "way", "reader"),
    [
        (happening, way, reader)
        for happening, way, reader in product(HAPPENINGS, OFFLOADED, ["another stream", "the host"])
        if way in ONLY.get(happening, OFFLOADED) and (reader == "the host" or way in ("backward", "forward"))
    ],
)
def test_what_happens_and_who_reads_next(happening: str, way: str, reader: str) -> None:
    optimizer = "failing" if happening == "a bucket that fails" else "AdamW"
    options = dict(OFFLOADED[way])
    if happening == "a gradient that is not finite":
        options["nonfinite"] = "skip"
    compare(options, optimizer=optimizer, happening=happening, reader=reader, own_stream=True)


CLIPS: Mapping[str, Mapping[str, Any]] = {
    "forward": {"schedule": "forward", "clip": instep.ClipNorm(CLIP)},
    "two passes": {"schedule": "backward", "clip": instep.ClipNorm(CLIP, mode="two_pass")},
    "undo": {"schedule": "backward", "undo": True, "clip": instep.ClipNorm(CLIP)},
}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip", CLIPS)
def test_clips(clip: str, micro_batches: int) -> None:
    compare({**CLIPS[clip], "offload": "host"}, {"clip": CLIP}, optimizer="fused", micro_batches=micro_batches)


@pytest.mark.parametrize("way", ["forward", "undo"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
def test_a_scaler(optimizer: str, way: str) -> None:
    scalers = [torch.amp.GradScaler(ACCELERATOR, init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    options = {**OFFLOADED[way], **({"scaler": scalers[1]} if way == "undo" else {})}
    expected = train(None, optimizer=optimizer, scaler=scalers[0])
    with recorded() as log:
        found = train(options, optimizer=optimizer, scaler=scalers[1])
    assert all(map(torch.equal, expected, found))
    log.assert_ordered()


# Ranks.

RANKS = [
    (source, way)
    for source, (_, ways) in SOURCES.items()
    for way in ways
    # The state of the first is in host memory, and that of the others is refused.
    if source != "fsdp2, offloaded" and "shard_state" not in source
]


@pytest.mark.parametrize(("source", "way"), RANKS)
def test_ranks(two_emulated_ranks: RankPool, source: str, way: str) -> None:
    args = (source, way, "nothing", "another stream", True, "AdamW")
    two_emulated_ranks.run(on_device, *args, offload="host")


@pytest.mark.parametrize(
    ("source", "way", "happening"),
    [
        (source, way, happening)
        for source, happening in product(("ddp", "replicate", "fsdp2"), HAPPENS)
        for way in HAPPENS[happening]
        if way in OFFLOADED
    ],
)
def test_what_happens_on_ranks(two_emulated_ranks: RankPool, source: str, way: str, happening: str) -> None:
    two_emulated_ranks.run(on_device, source, way, happening, "another stream", False, "AdamW", offload="host")


# Memory.


def state_bytes(optimizer: str) -> int:
    """Of the plain loop's, beside the weights."""
    return plain_peak(optimizer).own - WEIGHTS


@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
@pytest.mark.parametrize("way", ["backward", "undo on the host"])
def test_state_of_two_buckets_is_on_the_device(way: str, optimizer: str) -> None:
    options = {"schedule": "backward", **({"undo": "host"} if "undo" in way else {})}
    beside = peak(optimizer, options) - peak(optimizer, {**options, "offload": "host"})
    of_a_bucket = state_bytes(optimizer) * BUCKET // WEIGHTS
    assert beside >= state_bytes(optimizer) - 2 * of_a_bucket - 1024


@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
def test_forward_has_state_of_two_buckets_too(optimizer: str) -> None:
    options = {"schedule": "forward", "defer": True}
    beside = peak(optimizer, options) - peak(optimizer, {**options, "offload": "host"})
    of_a_bucket = state_bytes(optimizer) * BUCKET // WEIGHTS
    assert beside >= state_bytes(optimizer) - 2 * of_a_bucket - 1024


def test_state_of_a_shard_leaves_the_device(two_emulated_ranks: RankPool) -> None:
    plain, found = (
        two_emulated_ranks.run(measure, "fsdp2", "SGD", {"schedule": "backward", "offload": offload})[0][0]
        for offload in (None, "host")
    )
    assert plain - found >= WEIGHTS // 2 - 3 * BUCKET


# What the loop sees.


def attached(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, instep.Attachment]:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"schedule": "backward", "offload": "host", "bucket_bytes": 2_000, **options}
    return model, optimizer, instep.attach(model, optimizer, **given)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        x, y = batch(i)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for entry in optimizer.state.values() for t in entry.values() if t.numel() > 1]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.detach().cpu() for t in (*model.parameters(), *tensors_of(optimizer))]


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_state_is_in_pinned_memory_and_may_be_read_after_the_step(schedule: str) -> None:
    plain_model, plain, overlap = attached(offload=None, schedule=schedule)
    overlap.detach()
    model, optimizer, overlap = attached(schedule=schedule)
    for i in range(3):
        learn(plain_model, plain, range(i, i + 1))
        with recorded() as log:
            learn(model, optimizer, range(i, i + 1))
            found = [t.clone() for t in tensors_of(optimizer)]
        log.assert_ordered()
        assert all(t.device.type == "cpu" and t.is_pinned() for t in tensors_of(optimizer))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(found, tensors_of(plain), strict=True))
    overlap.detach()


def test_detach_brings_it_back() -> None:
    model, optimizer, overlap = attached()
    learn(model, optimizer, range(2))
    overlap.detach()
    assert {t.device.type for t in tensors_of(optimizer)} == {"emu"}
    learn(model, optimizer, range(2, 4))
    other, plain, without = attached(offload=None)
    without.detach()
    learn(other, plain, range(4))
    assert all(map(torch.equal, everything(model, optimizer), everything(other, plain)))


def test_state_from_before_attach_is_moved() -> None:
    model, optimizer, overlap = attached(offload=None)
    learn(model, optimizer, range(2))
    overlap.detach()
    with instep.attach(model, optimizer, schedule="backward", offload="host"):
        assert {t.device.type for t in tensors_of(optimizer)} == {"cpu"}
        learn(model, optimizer, range(2, 4))
    other, plain, overlap = attached()
    learn(other, plain, range(4))
    assert all(map(torch.equal, everything(model, optimizer), everything(other, plain)))
    overlap.detach()


@pytest.mark.parametrize("schedule", ["backward", "forward"])
@pytest.mark.parametrize("into", ["attached", "plain"])
def test_a_state_dict_loads_anywhere(into: str, schedule: str) -> None:
    model, optimizer, overlap = attached(schedule=schedule)
    learn(model, optimizer, range(2))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = {key: _kept(value) for key, value in saved.items()}
    learn(model, optimizer, range(2, 4))
    other, loaded, again = attached(schedule=schedule)
    learn(other, loaded, range(7, 8))
    if into == "plain":
        again.detach()
    other.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    assert {t.device.type for t in tensors_of(loaded)} == {"emu" if into == "plain" else "cpu"}
    learn(other, loaded, range(2, 4))
    assert all(map(torch.equal, everything(model, optimizer), everything(other, loaded)))
    for one in (overlap, again):
        one.detach()


def _kept(value: Any) -> Any:
    """As a file has it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def test_loading_puts_no_state_on_the_device() -> None:
    model, optimizer, overlap = attached()
    learn(model, optimizer, range(2))
    saved = _kept(optimizer.state_dict())
    with recorded() as log:
        optimizer.load_state_dict(saved)
    overlap.detach()
    assert log.count("alloc") == 0


def test_loading_casts_as_torch_does() -> None:
    model, optimizer, overlap = attached()
    learn(model, optimizer, range(2))
    saved = _kept(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].double()
    optimizer.load_state_dict(saved)
    assert {t.dtype for t in tensors_of(optimizer)} == {torch.float32}
    learn(model, optimizer, range(2, 3))
    overlap.detach()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_torchs_own_checkpoints(schedule: str, before: int) -> None:
    """Which have an optimizer without state make it, in a step of their own."""
    model, optimizer, overlap = attached(schedule=schedule)
    learn(model, optimizer, range(2))
    saved = {key: _kept(value) for key, value in zip("mo", get_state_dict(model, optimizer), strict=True)}
    learn(model, optimizer, range(2, 4))
    other, loaded, again = attached(schedule=schedule)
    learn(other, loaded, range(7, 7 + before))
    set_state_dict(other, loaded, model_state_dict=saved["m"], optim_state_dict=saved["o"])
    learn(other, loaded, range(2, 4))
    assert {t.device.type for t in tensors_of(loaded)} == {"cpu"}
    assert all(map(torch.equal, everything(model, optimizer), everything(other, loaded)))
    for one in (overlap, again):
        one.detach()


def _resynced() -> None:
    with torch.device("emu"):
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with instep.attach(model, optimizer, schedule="backward", offload="host") as overlap:
            learn(model, optimizer, range(2))
            if dist.get_rank() == 1:
                for tensor in tensors_of(optimizer):
                    tensor.zero_()
            overlap.resync_from(0)
            assert all(t.is_pinned() for t in tensors_of(optimizer))
            learn(model, optimizer, range(2, 4))
            for tensor in everything(model, optimizer):
                first = tensor.to("emu")
                dist.broadcast(first, 0)
                assert torch.equal(first.cpu(), tensor)


def test_resync(two_emulated_ranks: RankPool) -> None:
    two_emulated_ranks.run(_resynced)


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_verify(schedule: str) -> None:
    def build() -> Any:
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, lambda i: learn(model, optimizer, range(i, i + 1))

    found = instep.verify(build, steps=3, schedule=schedule, offload="host")
    assert found.difference is None


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("schedule", ["backward", "forward"])
@pytest.mark.parametrize("into", ["attached", "plain"])
def test_checkpoints(tmp_path: Path, into: str, schedule: str, before: int) -> None:
    model, optimizer, overlap = attached(schedule=schedule)
    learn(model, optimizer, range(2))
    saved.save(tmp_path, model, optimizer, overlap)
    learn(model, optimizer, range(2, 4))
    other, loaded, again = attached(schedule=schedule)
    learn(other, loaded, range(7, 7 + before))
    if into == "plain":
        again.detach()
    saved.load(tmp_path, other, loaded, None if into == "plain" else again)
    assert {t.device.type for t in tensors_of(loaded)} == {"emu" if into == "plain" else "cpu"}
    learn(other, loaded, range(2, 4))
    assert all(map(torch.equal, everything(model, optimizer), everything(other, loaded)))
    for one in (overlap, again):
        one.detach()


@pytest.mark.parametrize(("way", "more"), [("backward", 1), ("forward", 1)])
def test_the_host_waits_once_a_step(way: str, more: int) -> None:
    require_waits(OFFLOADED[way], more)


def test_forward_waits_for_copies_when_its_last_bucket_is_read() -> None:
    """And not in ``step()``, which is put off."""
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # whose step() has no wait of its own
    overlap = instep.attach(model, optimizer, schedule="forward", offload="host", bucket_bytes=2_000)
    learn(model, optimizer, range(2))
    (x, y), (after, _) = batch(2), batch(3)
    nn.functional.cross_entropy(model(x), y).backward()
    with recorded() as log:
        optimizer.step()
    assert log.host_waits == []
    with recorded() as log:
        model(after)
    assert len(log.host_waits) == 1
    overlap.detach()


def test_state_is_copied_ahead_of_its_step() -> None:
    """Before the first bucket is stepped, the copies of its state and of that of the second are launched."""
    model, optimizer, overlap = attached()
    learn(model, optimizer, range(2))
    first, second = (len(bucket.parameters) for bucket in overlap.plan.buckets[:2])
    with recorded() as log:
        learn(model, optimizer, range(2, 3))
    overlap.detach()
    kernels = log.kernels()
    step = next(index for index, name in enumerate(kernels) if "sqrt" in name)
    assert kernels[:step].count("copy from host") == 2 * (first + second) + len(batch(2))


class Replacing(torch.optim.SGD):
    """Makes its state anew in each step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                self.state[p]["made"] = self.state[p].get("made", 0) + p.grad
                p.sub_(self.state[p]["made"], alpha=0.1)


def test_state_that_is_made_anew_in_each_step() -> None:
    """It is copied out, and what the next bucket makes gets its memory."""

    def run(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
        optimizer = Replacing(model.parameters(), lr=0.1)
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=1, **options):
            for _ in range(4):
                model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return everything(model, optimizer)

    with recorded() as log:
        found = run(offload="host")
    log.assert_ordered()
    assert all(map(torch.equal, found, run()))


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_the_plan_says_what_the_allocator_gives_out(way: str) -> None:
    job = Job(
        "tests.planning.models:forty_layers",
        options=("fused=True",),
        inputs="tests.planning.models:two_rows",
        bucket_bytes=BUCKET,
        offload="host",
        tflops=1,
        terabytes=1,
        pcie_gbytes=1,
    )
    with torch.device("cpu"):
        said = {one.way: one.total for one in plan(job).peaks}
    found = peak("fused AdamW", {"schedule": way, "defer": way == "forward", "offload": "host"})
    assert abs(said[f"{way}, offload"] - found) < found / 10


def require_plain(
    train: Callable[[nn.Module, torch.optim.Optimizer], Any], of: slice = slice(None), **options: Any
) -> None:
    """``train`` ends with the options as without instep, and its launches are ordered."""

    def run(attaches: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(list(model.parameters())[of], lr=1e-2)
        with instep.attach(model, optimizer, offload="host", **options) if attaches else nullcontext():
            train(model, optimizer)
        return everything(model, optimizer)

    expected = run(False)
    with recorded() as log:
        found = run(True)
    log.assert_ordered()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_a_gradient_that_no_backward_has_made(schedule: str) -> None:
    """It is stepped in ``step()``, where torch's own would not find the state."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in range(3):
            for number, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, (i + 1) * 0.1 / (number + 1))
            optimizer.step()
            optimizer.zero_grad()
            learn(model, optimizer, range(i, i + 1))

    require_plain(train, schedule=schedule, bucket_bytes=2_000)


@pytest.mark.parametrize("undo", [False, True])
def test_a_group_that_is_added_between_backward_and_step(undo: bool) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        *_, last = model.parameters()
        for i in range(4):
            x, y = batch(i)
            nn.functional.cross_entropy(model(x), y).backward()
            if i == 2:
                optimizer.add_param_group({"params": [last], "lr": 0.1})
            optimizer.step()
            model.zero_grad()

    require_plain(train, slice(-1), schedule="backward", undo=undo, bucket_bytes=2_000)


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_state_that_the_loop_puts_on_the_device(schedule: str) -> None:
    """It is stepped there, and goes to host memory; its own goes back to the loop's stream."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in range(5):
            learn(model, optimizer, range(i, i + 1))
            for p, entry in list(optimizer.state.items()):
                optimizer.state[p] = {k: v.to("emu").clone() if v.numel() > 1 else v for k, v in entry.items()}

    require_plain(train, schedule=schedule, bucket_bytes=900)


class StoppedError(Exception):
    """A backward is stopped."""


def stop(gradient: torch.Tensor) -> None:
    raise StoppedError


@pytest.mark.parametrize("torn", [True, False])
def test_state_is_read_when_the_step_is_torn(torn: bool) -> None:
    model, optimizer, overlap = attached(**({} if torn else {"undo": True}))
    learn(model, optimizer, range(2))
    handle = next(model.parameters()).register_hook(stop)
    with recorded() as log:
        with pytest.raises(StoppedError):
            learn(model, optimizer, range(2, 3))
        assert overlap.state == ("torn" if torn else "open")
        found = [t.clone() for t in tensors_of(optimizer)]
    log.assert_ordered()
    assert len(found) == len(tensors_of(optimizer))
    handle.remove()
    overlap.accept_torn() if torn else overlap.rollback()
    overlap.detach()


def test_state_is_written_after_a_backward_that_raised() -> None:
    """Also that of a bucket that was on its way to the device."""
    model, optimizer, overlap = attached()
    learn(model, optimizer, range(2))
    with recorded() as log:
        handle = next(model.parameters()).register_hook(stop)
        with pytest.raises(StoppedError):
            learn(model, optimizer, range(2, 3))
        handle.remove()
        overlap.accept_torn()
        for tensor in tensors_of(optimizer):
            tensor.zero_()
        learn(model, optimizer, range(3, 4))
    log.assert_ordered()
    overlap.detach()


def test_state_is_written_in_backward() -> None:
    """Of a bucket whose state has been copied to the device before."""

    def run(options: Mapping[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        first = next(model.parameters())

        def double(gradient: torch.Tensor) -> None:
            optimizer.state[first]["momentum_buffer"].mul_(2)

        with nullcontext() if options is None else instep.attach(model, optimizer, **options):
            for i in range(4):
                if i == 2:
                    first.register_hook(double)
                learn(model, optimizer, range(i, i + 1))
        return everything(model, optimizer)

    found = run({"schedule": "backward", "offload": "host", "bucket_bytes": 2_000})
    assert all(map(torch.equal, found, run(None)))


@pytest.mark.parametrize("schedule", ["backward", "forward"])
@pytest.mark.parametrize("make", [RoundedAdafactor, Whitened])
def test_with_keyed_draws(make: Callable[..., torch.optim.Optimizer], schedule: Schedules) -> None:
    def run(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Blocks()
        optimizer = make(model.parameters())
        with instep.attach(model, optimizer, schedule=schedule, random="keyed", seed=3, **options):
            learn(model, optimizer, range(4))
        return everything(model, optimizer)

    with recorded() as log:
        found = run(offload="host", bucket_bytes=2_000)
    log.assert_ordered()
    assert all(map(torch.equal, found, run()))


@pytest.mark.parametrize("undo", [False, True])
def test_with_micro_batches(undo: bool) -> None:
    def run(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def loss_of(number: int) -> torch.Tensor:
            x, y = batch(number)
            return nn.functional.cross_entropy(model(x), y) / 3

        with instep.attach(model, optimizer, schedule="backward", undo=undo, **options) as overlap:
            for i in range(3):
                overlap.micro_batches(loss_of, range(3 * i, 3 * i + 3))
                optimizer.step()
                optimizer.zero_grad()
        return everything(model, optimizer)

    with recorded() as log:
        found = run(offload="host", bucket_bytes=2_000)
    log.assert_ordered()
    assert all(map(torch.equal, found, run()))


# What is refused.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "disk"}, "offload must be None or 'host', not 'disk'"),
        ({"offload": True}, "offload must be None or 'host', not True"),
        ({"offload": "host", "shard_state": True}, "offload='host' does not go with shard_state=True"),
    ],
)
def test_options_that_do_not_go_together(options: Mapping[str, Any], said: str) -> None:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AttachError, match=said):
        instep.attach(model, optimizer, **options)


def test_a_model_in_host_memory_is_refused() -> None:
    with torch.device("cpu"):
        model = Blocks()
    with pytest.raises(ValueError, match=r"the parameter 'inner\.weight' is on cpu.*Leave out offload"):
        instep.attach(model, torch.optim.AdamW(model.parameters()), offload="host")


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_an_optimizer_that_is_stepped_as_a_whole_is_refused(schedule: Schedules) -> None:
    model = Blocks()
    with pytest.raises(UnsupportedOptimizerError, match="without offload"):
        instep.attach(model, torch.optim.LBFGS(model.parameters()), schedule=schedule, offload="host")


class Odd(torch.optim.SGD):
    """SGD with state of a kind that cannot live in host memory."""

    def __init__(self, params: Any, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.make = make

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p]["odd"] = self.make(p.detach())
        return super().step(closure)


class Wrapper(torch.Tensor):
    pass


class Holder:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _twice(p: torch.Tensor) -> list[torch.Tensor]:
    made = torch.zeros_like(p)
    return [made, made.view(-1)]


REFUSED: Mapping[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "the parameter": (lambda p: p, "shares memory with another tensor"),
    "a part of a larger one": (lambda p: torch.zeros(2 * p.numel(), device=p.device)[: p.numel()], "shares memory"),
    "the same memory twice": (_twice, "shares memory"),
    "a class of its own": (lambda p: torch.zeros_like(p).as_subclass(Wrapper), "is a Wrapper"),
    "in host memory": (lambda p: torch.zeros(p.shape, device="cpu"), "is on cpu"),
    "in an object": (lambda p: Holder(torch.zeros_like(p)), "holds tensors in a Holder"),
    "sparse": (lambda p: torch.zeros_like(p).to_sparse(), r"is a Tensor \(torch.sparse_coo\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_state_that_cannot_live_in_host_memory(schedule: Schedules, kind: str) -> None:
    """Its first step says so, before it writes a parameter."""
    make, said = REFUSED[kind]
    model = nn.Linear(16, 8)
    optimizer = Odd(model.parameters(), make)
    before = [p.detach().clone() for p in model.parameters()]
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule=schedule, offload="host") as overlap:
        model(torch.ones(4, 16)).sum().backward()
        with pytest.raises(UnsupportedOptimizerError, match=rf"offload='host'.*Odd {said}"):
            optimizer.step()
        assert overlap.state == "idle"
        assert all(map(torch.equal, model.parameters(), before))


class Later(Odd):
    """Makes it from the third step on, and so not on made-up parameters."""

    def step(self, closure: Any = None) -> Any:
        if len(self.param_groups[0]["params"][0]) == 8 and self.param_groups[0].get("odd"):
            return super().step(closure)
        return torch.optim.SGD.step(self, closure)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_state_of_a_later_step_that_cannot_live_in_host_memory(schedule: Schedules, kind: str) -> None:
    make, said = REFUSED[kind]
    model = nn.Linear(16, 8)
    optimizer = Later(model.parameters(), make)

    def learn_once() -> None:
        with instep.attach(model, optimizer, schedule=schedule, offload="host") as overlap:
            optimizer.param_groups[0]["odd"] = True
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            overlap.synchronize()

    with pytest.raises(UnsupportedOptimizerError, match=rf"(?s)offload='host'.*Later {said}"):
        learn_once()


class WithArguments(torch.optim.SGD):
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_a_step_with_arguments_is_refused(schedule: Schedules) -> None:
    model = Blocks()
    optimizer = WithArguments(model.parameters(), lr=0.1, momentum=0.9)
    with instep.attach(model, optimizer, schedule=schedule, offload="host") as overlap:
        if schedule == "forward":
            learn(model, optimizer, range(1))
        nn.functional.cross_entropy(model(batch(2)[0]), batch(2)[1]).backward()
        with pytest.raises(InstepError, match="was called with arguments"):
            optimizer.step(scale=2.0)
        overlap.accept_torn()


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_a_step_that_needs_a_closure_is_refused(schedule: Schedules) -> None:
    model = Blocks()
    optimizer = NeedsClosure(model.parameters(), lr=0.1)

    def learn() -> None:
        with own_steps_are_judged(), instep.attach(model, optimizer, schedule=schedule, offload="host"):
            model(batch(0)[0]).sum().backward()
            optimizer.step()

    said = r"(fails without a closure|raises on 'inner.weight' alone).* Use schedule='forward'"
    with pytest.raises(UnsupportedOptimizerError, match=said):
        learn()


def test_state_that_is_judged_is_read_once_it_has_come_back() -> None:
    def run(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
        optimizer = Averaging(model.parameters())
        with instep.attach(model, optimizer, bucket_bytes=600, **options):
            for i in range(5):
                model(torch.full((2, 16), 1.0 + i)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.parameters(), *(optimizer.state[p]["mean"] for p in model.parameters())]

    with own_steps_are_judged(), recorded() as log:
        found = run(schedule="backward", offload="host")
    log.assert_ordered()
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, run(schedule="forward"), strict=True))


class Averaging(torch.optim.SGD):
    """torch's by name alone: it keeps a mean of the gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(mean.lerp_(p.grad, 0.1), alpha=group["lr"])


@pytest.mark.parametrize("make", [lambda p: [torch.zeros_like(p), (torch.ones_like(p), 3)], lambda p: {"a": p + 1}])
def test_state_in_containers(make: Callable[[torch.Tensor], Any]) -> None:
    def run(**options: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
        optimizer = Counting(model.parameters(), make)
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=600, **options):
            for _ in range(3):
                model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return tree_leaves([optimizer.state[p] for p in model.parameters()] + list(model.parameters()))

    with recorded() as log:
        found = run(offload="host")
    log.assert_ordered()
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, run(), strict=True))


class Counting(Odd):
    """Adds to all of its state in each step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            for leaf in tree_leaves(self.state[p]):
                if isinstance(leaf, torch.Tensor):
                    leaf.add_(p)
        return loss
