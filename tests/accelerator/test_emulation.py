"""The emulation itself: what is not ordered is found, and what is ordered is not."""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.accelerator.device import emu
from tests.accelerator.recording import Log, recorded
from tests.cases import grad_of

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def _first_device() -> Iterator[None]:
    yield
    assert emu().current_device() == 0


def kinds(log: Log) -> list[str]:
    return sorted({finding.kind for finding in log.findings})


def current(device: int = 0) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def ones(device: str = "emu") -> torch.Tensor:
    made = torch.ones(8, device=device)
    torch.accelerator.synchronize()
    return made


# Order.


def test_a_missing_wait_is_a_race_with_both_stacks() -> None:
    a, side = ones(), torch.Stream("emu")
    with recorded() as log:
        a.add_(1)
        with emu().stream(side):
            a.mul_(2)
    assert kinds(log) == ["race"]
    finding = log.findings[0]
    assert "add_" in finding.first
    assert "mul_" in finding.second
    assert all(f"{__name__.rpartition('.')[2]}.py" in stack for stack in (finding.first, finding.second))
    with pytest.raises(AssertionError, match="RACE"):
        log.assert_ordered()


WAITS: dict[str, Callable[[torch.Stream], Any]] = {
    "wait_stream": lambda side: side.wait_stream(current()),
    "event": lambda side: side.wait_event(current().record_event()),
    "Event.wait": lambda side: current().record_event().wait(side),
    "synchronize": lambda side: torch.accelerator.synchronize(),
    "Stream.synchronize": lambda side: current().synchronize(),
    "Event.synchronize": lambda side: current().record_event().synchronize(),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_wait_is_none(how: str) -> None:
    a, side = ones(), torch.Stream("emu")
    with recorded() as log:
        a.add_(1)
        WAITS[how](side)
        with emu().stream(side):
            a.mul_(2)
        current().wait_stream(side)
        a.add_(1)
    log.assert_ordered()
    assert len(log.host_waits) == ("synchronize" in how)


@pytest.mark.parametrize("recorded_late", [False, True])
def test_an_event_orders_what_was_recorded_and_no_more(recorded_late: bool) -> None:
    """And a wait for it before its recording is none."""
    a, side, event = ones(), torch.Stream("emu"), torch.Event("emu")
    with recorded() as log:
        if not recorded_late:
            event.record(current())
        a.add_(1)
        side.wait_event(event)
        if recorded_late:
            event.record(current())
        with emu().stream(side):
            a.mul_(2)
    assert kinds(log) == ["race"]


def test_order_through_a_third_stream() -> None:
    a, one, two = ones(), torch.Stream("emu"), torch.Stream("emu")
    with recorded() as log:
        a.add_(1)
        one.wait_stream(current())
        two.wait_stream(one)
        with emu().stream(two):
            a.mul_(2)
    log.assert_ordered()


def test_the_default_stream_does_not_wait_by_itself() -> None:
    a, side = ones(), torch.Stream("emu")
    with recorded() as log:
        with emu().stream(side):
            a.mul_(2)
        a.add_(1)
    assert kinds(log) == ["race"]


def test_reads_do_not_race_and_neither_do_other_bytes() -> None:
    a, side = ones(), torch.Stream("emu")
    with recorded() as log:
        with emu().stream(side):
            a[:4].add_(1)
        a[4:].add_(1)
        torch.accelerator.synchronize()
        with emu().stream(side):
            b = a * 2
        c = a * 3
        torch.accelerator.synchronize()
    log.assert_ordered()
    del b, c


def test_a_second_race_of_the_same_places_is_counted() -> None:
    a, side = ones(), torch.Stream("emu")
    with recorded() as log:
        for _ in range(3):
            torch.accelerator.synchronize()
            a.add_(1)
            with emu().stream(side):
                a.mul_(2)
    assert [finding.count for finding in log.findings] == [3]


def test_a_host_wait_of_another_thread_counts() -> None:
    a, side = ones(), torch.Stream("emu")
    with recorded() as log:
        a.add_(1)
        stream = current()
        thread = threading.Thread(target=stream.synchronize)
        thread.start()
        thread.join()
        with emu().stream(side):
            a.mul_(2)
    log.assert_ordered()


def test_recordings_are_not_nested() -> None:
    with recorded(), pytest.raises(RuntimeError, match="already"), recorded():
        pass


def test_a_stream_left_current() -> None:
    side = torch.Stream("emu")
    before = current()
    with recorded() as log:
        torch.accelerator.set_stream(side)
    torch.accelerator.set_stream(before)
    assert kinds(log) == ["left"]


# Memory.


@pytest.mark.parametrize("told", ["nobody", "its stream", "another stream", "one that waits for its stream"])
def test_memory_freed_while_another_stream_reads(told: str) -> None:
    """The allocator's event on a stream that is told comes after what that had waited for when the memory was freed."""
    side, other = torch.Stream("emu"), torch.Stream("emu")
    with recorded() as log:
        a = torch.ones(8, device="emu")
        side.wait_stream(current())
        with emu().stream(side):
            b = a * 2
        if told != "nobody":
            a.record_stream(side if told == "its stream" else other)
        if told == "one that waits for its stream":
            other.wait_stream(side)
        del a
        c = torch.empty(8, device="emu")
    assert kinds(log) == (["lifetime"] if told in ("nobody", "another stream") else [])
    assert all("given out again" in finding.second for finding in log.findings)
    del b, c


@pytest.mark.parametrize("how", ["joined", "synchronized", "never asked for memory again"])
def test_memory_freed_and_not_given_out_too_early(how: str) -> None:
    side = torch.Stream("emu")
    with recorded() as log:
        a = torch.ones(8, device="emu")
        side.wait_stream(current())
        with emu().stream(side):
            b = a * 2
        del a
        if how == "joined":
            current().wait_stream(side)
        elif how == "synchronized":
            torch.accelerator.synchronize()
        if how != "never asked for memory again":
            c = torch.empty(8, device="emu")
            del c
    log.assert_ordered()
    del b


def test_peaks_of_memory() -> None:
    before = emu().memory_allocated()
    emu().reset_peak_memory_stats()
    with recorded() as log:
        a = torch.empty(1000, device="emu")
        assert emu().memory_allocated() == before + 4000
        del a
        b = torch.empty(500, device="emu")
        elsewhere = torch.empty(50, device="emu:1")
    assert emu().max_memory_allocated() == before + 4000
    assert log.peak_bytes() == log.peak_bytes(held=True) == before + 4000
    assert log.peak_bytes(1) >= 200
    if hasattr(torch.accelerator, "max_memory_allocated"):
        assert torch.accelerator.max_memory_allocated() == before + 4000
        assert torch.accelerator.memory_allocated() == before + 2000
    del b, elsewhere


@pytest.mark.parametrize("waited", [False, True])
def test_record_stream_holds_memory_until_the_host_has_waited(waited: bool) -> None:
    side = torch.Stream("emu")
    before = emu().memory_allocated()
    with recorded() as log:
        for _ in range(3):
            a = torch.empty(1000, device="emu")
            side.wait_stream(current())
            with emu().stream(side):
                a.zero_()
            a.record_stream(side)
            del a
            if waited:
                side.synchronize()
    assert log.peak_bytes() == before + 4000
    assert log.peak_bytes(held=True) == before + 4000 * (1 if waited else 3)


# The host.


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize(
    "read", [lambda host: host + 1, torch.clone, lambda host: host.numpy(), lambda host: host[2:].tolist()]
)
def test_the_host_reads_pinned_memory(read: Callable[[torch.Tensor], Any], waited: bool) -> None:
    a = ones()
    with recorded() as log:
        a.add_(1)
        host = torch.empty(8, pin_memory=True)
        host.copy_(a, non_blocking=True)
        if waited:
            torch.accelerator.synchronize()
        assert host.view(2, 4).is_pinned()  # reads nothing
        assert torch.empty_like(host).shape == host.shape
        read(host)
    assert kinds(log) == ([] if waited else ["race"])


def test_arrays_of_pinned_memory() -> None:
    import numpy as np

    a = ones()
    with recorded() as log:
        host = torch.empty(8, pin_memory=True)
        host.copy_(a, non_blocking=True)
        np.asarray(host)
    assert kinds(log) == ["race"]
    assert "numpy" in log.findings[0].second
    assert "numpy" not in vars(torch.Tensor)


def test_the_host_writes_pinned_memory_that_is_still_read() -> None:
    a, host = ones(), torch.ones(8).pin_memory()
    with recorded() as log:
        a.copy_(host, non_blocking=True)
        host.zero_()
    assert kinds(log) == ["race"]


def test_a_copy_of_pinned_memory_to_the_host_is_a_read() -> None:
    a = ones()
    with recorded() as log:
        host = torch.empty(8, pin_memory=True)
        host.copy_(a, non_blocking=True)
        torch.empty(8).copy_(host)
    assert kinds(log) == ["race"]


def test_pinned_memory_freed_during_a_copy() -> None:
    a = ones()
    with recorded() as log:
        a.copy_(torch.ones(8).pin_memory(), non_blocking=True)
        a.to("cpu", non_blocking=True)
        for _ in range(3):
            torch.zeros(8).pin_memory()
    log.assert_ordered()


def test_a_copy_to_the_host_that_does_not_block_makes_pinned_memory() -> None:
    a = ones()
    with recorded() as log:
        host = a.to("cpu", non_blocking=True)
        assert host.is_pinned()
        host + 1
    assert kinds(log) == ["race"]
    assert log.host_waits == []


def test_pageable_memory_is_waited_for() -> None:
    a = ones()
    with recorded() as log:
        host = torch.empty(8).copy_(a + 1, non_blocking=True)
        host + 1
        a.copy_(host, non_blocking=True)
        host.zero_()
    log.assert_ordered()
    assert len(log.host_waits) == 1


WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": torch.Tensor.item,
    "bool": bool,
    "tolist": torch.Tensor.tolist,
    "cpu": torch.Tensor.cpu,
    "nonzero": torch.nonzero,
    "mask": lambda a: torch.ones(1, device="emu")[a.reshape(1) > 0],
    "equal": lambda a: torch.equal(a, a + 1),
}


@pytest.mark.parametrize("how", WAITING)
def test_what_has_the_host_wait(how: str) -> None:
    a = ones()[0]
    with recorded() as log:
        a.add_(1)
        WAITING[how](a)
    assert len(log.host_waits) == 1
    assert "test_emulation.py" in log.host_waits[0]


def test_what_does_not_have_the_host_wait() -> None:
    a = ones()
    with recorded() as log:
        b = torch.where(a > 0, a, 0).sum().sqrt()
        torch.tensor(3.0).to("emu", non_blocking=True)
        (a.shape, a.is_contiguous(), b.dtype, a.view(2, 4), a.is_pinned())
    assert log.host_waits == []


def test_queries_are_false_first() -> None:
    a = ones()
    with recorded() as log:
        a.add_(1)
        event = current().record_event()
        assert [event.query(), event.query(), event.query()] == [False, True, True]
        assert current().query()  # the event was all that it held
        a.add_(1)
        assert [current().query(), current().query()] == [False, True]
        event.record(current())
        assert not event.query()
        a.add_(1)
        event.synchronize()
        assert event.query()
        assert torch.Event("emu").query()
    assert len(log.queries) == 2
    assert len(log.host_waits) == 1


@pytest.mark.parametrize("asked", [1, 2])
def test_a_query_that_is_true_orders(asked: int) -> None:
    a, side = ones(), torch.Stream("emu")
    with recorded() as log:
        a.add_(1)
        event = current().record_event()
        for _ in range(asked):
            event.query()
        with emu().stream(side):
            a.mul_(2)
    assert kinds(log) == (["race"] if asked == 1 else [])


def test_an_event_of_a_stream_that_the_host_has_waited_for_through_another() -> None:
    a, side = ones(), torch.Stream("emu")
    a.add_(1)
    event = current().record_event()
    side.wait_stream(current())
    side.synchronize()
    assert event.query()


# Streams.


def test_streams_as_contexts() -> None:
    side = emu().Stream()
    with emu().stream(side):
        assert current() == side
    if hasattr(torch.Stream, "__enter__"):  # since torch 2.7
        with side:
            assert emu().current_stream() == side
    assert current() == emu().default_stream()
    other = emu().Stream(device="emu:1")
    with emu().stream(other):
        assert emu().current_device() == 1
    assert other.device == torch.device("emu", 1)


def test_elapsed_time() -> None:
    first, second = (emu().Event(enable_timing=True) for _ in range(2))
    first.record()
    ones()
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 0


def test_backward_runs_on_the_stream_of_forward() -> None:
    side = torch.Stream("emu")
    weight = ones().requires_grad_()
    with recorded() as log:
        with emu().stream(side):
            loss = (weight * 2).sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(grad_of(weight))  # backward() has the current stream wait
    log.assert_ordered()
    assert log.count("op", f"0.{side.stream_id}") >= 3


def test_a_hook_that_uses_another_stream_without_a_wait() -> None:
    side = torch.Stream("emu")
    weight = ones().requires_grad_()

    def hook(p: torch.Tensor) -> None:
        with emu().stream(side), torch.no_grad():
            p.sub_(grad_of(p))

    weight.register_post_accumulate_grad_hook(hook)
    with recorded() as log:
        (weight * 2).sum().backward()
    assert "race" in kinds(log)
    assert any("test_emulation.py" in f.second and "Backward" in f.first for f in log.findings)


# Two devices.


def test_devices() -> None:
    assert torch.accelerator.device_count() == emu().device_count() == 2
    with emu().device(1):
        a = torch.ones(8, device="emu")
        assert torch.accelerator.current_device_index() == 1
    assert a.device == torch.device("emu", 1)
    with pytest.raises(RuntimeError, match="same device"):
        a + ones()
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(8)
    assert torch.equal((a + torch.tensor(1.0)).cpu(), torch.full((8,), 2.0))


def test_copies_between_devices_order_both_streams() -> None:
    a = ones()
    with recorded() as log:
        a.add_(1)
        b = a.to("emu:1")
        b.mul_(2)
        a.zero_()
    log.assert_ordered()
    assert log.count("op", "0.0") == 3  # the copy is on the source's stream
    assert log.host_waits == []
    assert b.device.index == 1
    assert b.tolist() == [4.0] * 8


def test_a_copy_between_devices_orders_the_current_streams_alone() -> None:
    a, side = ones(), torch.Stream("emu:1")
    b = ones("emu:1")
    with recorded() as log:
        with emu().stream(side):
            b.add_(1)
        b.copy_(a)
    assert kinds(log) == ["race"]


def test_backward_over_two_devices() -> None:
    first, second = nn.Linear(8, 8).to("emu:0"), nn.Linear(8, 8).to("emu:1")
    with recorded() as log:
        loss = second(first(torch.ones(2, 8, device="emu:0")).to("emu:1")).sum()
        loss.backward()
        for module in (first, second):
            grad_of(module.weight).add_(1)
    log.assert_ordered()
    assert log.streams == {"0.0", "1.0"}


# Random numbers.


def test_random_numbers_are_those_of_a_cpu_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(5), torch.randn(20), torch.randint(9, (4,)), torch.randperm(6)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = (
        torch.rand(5, device="emu"),
        torch.randn(20, device="emu"),
        torch.randint(9, (4,), device="emu"),
        torch.randperm(6, device="emu"),
    )
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(drawn, expected, strict=True))
    assert torch.equal(state, torch.get_rng_state()), "the CPU's generator is another"
    generator = torch.Generator(device="emu").manual_seed(3)
    assert generator.device.type == "emu"
    assert torch.equal(torch.rand(5, device="emu", generator=generator).cpu(), expected[0])
    assert torch.equal(torch.empty(5, device="emu").uniform_(generator=generator.manual_seed(3)).cpu(), expected[0])


def test_states_of_generators() -> None:
    torch.manual_seed(5)
    assert emu().initial_seed() == 5
    state = emu().get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="emu"):
        inside = torch.rand(3, device="emu")
    assert torch.equal(torch.rand(3, device="emu"), inside)
    emu().set_rng_state(state)
    assert torch.equal(torch.rand(3, device="emu"), inside)
    emu().manual_seed_all(5)
    assert torch.equal(torch.rand(3, device="emu:1").cpu(), inside.cpu())
    before = torch.get_rng_state()
    torch.native_dropout(torch.ones(9, device="emu"), 0.5, True)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(emu().get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_draws_again(reentrant: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("emu")
    x = torch.ones(4, 8, device="emu", requires_grad=True)

    def gradients(run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        module.zero_grad()
        run().sum().backward()
        return [grad_of(p).clone() for p in module.parameters()]

    plain = gradients(lambda: module(x))
    with recorded() as log:
        again = gradients(lambda: checkpoint(module, x, use_reentrant=reentrant))
    log.assert_ordered()
    assert all(map(torch.equal, plain, again))


# Mixed precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    module, x = nn.Linear(8, 8).to("emu"), torch.ones(2, 8, device="emu")
    with torch.autocast("emu", dtype):
        y = module(x)
        assert y.dtype == dtype
        assert y.softmax(-1).dtype == torch.float32
        assert y.sum().dtype == torch.float32
        assert torch.cat([y, x]).dtype == torch.float32
        assert torch.addcmul(y, x, x).dtype == torch.float32
    assert module(x).dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_grad_scaler(fused: bool, overflows: bool) -> None:
    module = nn.Linear(8, 8).to("emu")
    before = module.weight.detach().cpu()
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("emu", init_scale=4.0)
    with recorded() as log:
        with torch.autocast("emu", torch.float16):
            loss = module(torch.ones(2, 8, device="emu")).sum() * (float("inf") if overflows else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    log.assert_ordered()
    assert torch.equal(module.weight.detach().cpu(), before) == overflows
    assert scaler.get_scale() == (2.0 if overflows else 4.0)
    waits = [wait for wait in log.host_waits if "_local_scalar_dense" in wait]
    assert len(waits) == (0 if fused else 1)
    assert all("test_emulation.py" in wait for wait in waits)


# What torch does with a device's tensors.


def test_saved_and_loaded() -> None:
    a = ones() * 3
    file = io.BytesIO()
    torch.save({"a": a, "b": a[2:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["a"].device == a.device
    assert torch.equal(loaded["a"], a)
    assert loaded["b"].untyped_storage().data_ptr() == loaded["a"].untyped_storage().data_ptr()
    file.seek(0)
    assert torch.load(file, map_location="cpu")["b"].device.type == "cpu"
    file.seek(0)
    assert torch.load(file, map_location="emu:1")["b"].device.index == 1
    for twin in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert twin.device == a.device
        assert torch.equal(twin, a)


def test_storages() -> None:
    a = ones()
    with recorded() as log:
        a.untyped_storage().resize_(64)
        a.resize_(16)
        a[8:] = 2
        assert a.tolist() == [1.0] * 8 + [2.0] * 8
        b = torch.empty(0, device="emu").set_(a.untyped_storage(), 2, (3, 2), (1, 3))
        b.zero_()
        assert a[:10].tolist() == [1.0] * 2 + [0.0] * 6 + [2.0] * 2
        a.untyped_storage().resize_(0)
        assert a.untyped_storage().nbytes() == 0
        c = torch.empty(0, device="emu")
        torch.add(torch.ones(3, device="emu"), 1, out=c)
        assert c.tolist() == [2.0] * 3
    log.assert_ordered()


def test_inference_mode_and_transforms() -> None:
    with torch.inference_mode():
        a = torch.ones(4, device="emu")
        assert (a * 2).add_(1).is_inference()
    x = torch.randn(5, 3, device="emu")
    assert torch.allclose(torch.func.vmap(torch.func.grad(lambda v: (v * v).sum()))(x), 2 * x)
    assert torch.func.functional_call(nn.Linear(3, 1).to("emu"), {"bias": ones()[:1]}, (x,)).shape == (5, 1)


def test_layouts_and_deterministic_algorithms() -> None:
    x = torch.randn(2, 3, 4, 4).to("emu", memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert (x + 1).is_contiguous(memory_format=torch.channels_last)
    torch.use_deterministic_algorithms(True)
    try:
        a = ones()
        a.index_put_((torch.tensor([0, 0]).to("emu"),), torch.ones(2, device="emu"), accumulate=True)
        assert a[0].item() == 3
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_stays_allocated() -> None:
    gc.collect()
    before = emu().memory_allocated()
    module = nn.Linear(8, 8).to("emu")
    module(torch.ones(2, 8, device="emu")).sum().backward()
    del module
    gc.collect()
    assert emu().memory_allocated() == before


def test_recorded_device_fixture(device: torch.device) -> None:
    assert device == torch.device("emu", 0)
    assert torch.ones(2, device=device).sum().item() == 2
