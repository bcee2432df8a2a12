"""One training loop on an accelerator, plain and attached, with what may happen in it, and who may read its weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import instep
from instep.errors import TornStepError
from tests.accelerator import ACCELERATOR
from tests.cases import Blocks, Sometimes, Tied, batch

CLIP = 0.05
SMALL = 2_000  # bytes: several buckets
STEPS = 5
AT = 2  # the iteration in which something happens


class StoppedError(Exception):
    """What a loop meets in the middle of a step."""


class Failing(torch.optim.SGD):
    """Raises in the middle of the step of one parameter, when it is told to."""

    bad: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p is self.bad for p in mine):
            with torch.no_grad():
                for p in mine:
                    p.add_(1)
            raise StoppedError
        return super().step(closure)


class Dropping(nn.Module):
    """Draws in its forward, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24), nn.Linear(24, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Checkpointed(nn.Module):
    """Computes its layers once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.2)) for _ in range(3))
        self.outer = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.outer(x)


class OnTwoDevices(nn.Module):
    """The second half of its layers on another device."""

    def __init__(self) -> None:
        super().__init__()
        first, second = torch.device(ACCELERATOR, 0), torch.device(ACCELERATOR, 1)
        self.first = nn.Sequential(nn.Linear(16, 24, device=first), nn.ReLU(), nn.Linear(24, 24, device=first))
        self.second = nn.Sequential(nn.Linear(24, 24, device=second), nn.ReLU(), nn.Linear(24, 10, device=second))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to(f"{ACCELERATOR}:1", non_blocking=True)).to(
            f"{ACCELERATOR}:0", non_blocking=True
        )


def _blocks_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _tied_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    tokens = y.repeat(2).view(2, -1)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _expert_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x, 1), y)


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Loss]] = {
    "blocks": (Blocks, _blocks_loss),
    "tied": (Tied, _tied_loss),
    "unused": (Sometimes, _expert_loss),
    "dropout": (Dropping, _blocks_loss),
    "checkpointed": (Checkpointed, _blocks_loss),
    "two devices": (OnTwoDevices, _blocks_loss),
}
Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Optimizers] = {
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "failing": lambda p: Failing(p, lr=0.05, momentum=0.9),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
    "undo on the host": {"schedule": "backward", "undo": "host"},
}


@dataclass
class Loop:
    """A model with its optimizer, plain or attached.

    Attributes:
        options: for ``attach``; ``None``: the plain loop.
    """

    model: Any
    optimizer: Any
    loss: Loss
    options: Mapping[str, Any] | None
    clip: float | None = None  # to this norm, by the loop itself
    clip_value: float | None = None
    micro_batches: int = 1
    scaler: Any = None
    overlap: Any = None
    copied: list[torch.Tensor] = field(default_factory=list)

    def attach(self) -> None:
        if self.options is not None:
            self.overlap = instep.attach(self.model, self.optimizer, **self.options)

    def learn(self, i: int) -> None:
        """An iteration of the usual kind."""
        self.backward(i)
        self.step()

    def backward(self, i: int) -> None:
        for micro in range(self.micro_batches):
            loss = self.loss(self.model, *batch(i * self.micro_batches + micro))
            loss = loss if self.scaler is None else self.scaler.scale(loss)
            last = micro == self.micro_batches - 1
            with nullcontext() if last else self._adding_up():
                if self.overlap is None:
                    loss.backward()
                else:
                    self.overlap.backward(loss)

    @contextmanager
    def _adding_up(self) -> Iterator[None]:
        """Around all micro-batches but the last."""
        if isinstance(self.model, FSDPModule) and self.overlap is None:
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        elif self.overlap is not None:
            with self.overlap.accumulate():
                yield
        else:
            with self.model.no_sync() if hasattr(self.model, "no_sync") else nullcontext():
                yield

    def evaluate(self, i: int) -> torch.Tensor:
        """A forward without gradients."""
        with torch.no_grad():
            loss = self.loss(self.model, *batch(i))
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # which it leaves to the next backward
        return loss

    def step(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.clip_value)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def snapshot(self) -> Callable[[], None]:
        """Copies, on the device, of all that a step writes; called, they are put back as a checkpoint is."""
        weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        state = _copied(self.optimizer.state_dict())

        def load() -> None:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)

        return load

    def result(self) -> list[torch.Tensor]:
        """Weights, state, and what was copied of them, once the loop is over."""
        if self.overlap is not None:
            self.overlap.detach()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [t.detach().cpu() for t in (*tensors, *self.copied)]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# What may happen in an iteration, in place of the usual.


def _nothing(loop: Loop, i: int) -> None:
    loop.learn(i)


@contextmanager
def _raising(parameter: torch.Tensor) -> Iterator[None]:
    """A backward that comes to ``parameter`` raises."""

    def stop(gradient: torch.Tensor) -> None:
        raise StoppedError

    handle = parameter.register_hook(stop)
    with suppress(StoppedError):
        yield
    handle.remove()


def _backward_raises(loop: Loop, i: int) -> None:
    """In the first layer, when others have been stepped; and the loop goes on from a checkpoint."""
    load = loop.snapshot()
    with _raising(next(loop.model.parameters())):
        loop.backward(i)
    if loop.overlap is not None:
        loop.overlap.accept_torn()
    loop.optimizer.zero_grad()
    load()


def _backward_raises_and_weights_are_read(loop: Loop, i: int) -> None:
    """Whatever they are: the loop wants them whole."""
    load = loop.snapshot()
    with _raising(next(loop.model.parameters())):
        loop.backward(i)
    if loop.overlap is not None and loop.options is not None and loop.options.get("undo"):
        loop.overlap.rollback()
    elif loop.overlap is not None:
        loop.overlap.accept_torn()
    loop.optimizer.zero_grad()
    loop.evaluate(i)
    load()


def _bucket_fails(loop: Loop, i: int) -> None:
    """The update of one bucket raises, when a part of it is written."""
    load = loop.snapshot()
    loop.optimizer.bad = list(loop.model.parameters())[2]
    with suppress(StoppedError, TornStepError):
        loop.learn(i)
        if loop.overlap is not None:
            loop.overlap.synchronize()
    loop.optimizer.bad = None
    if loop.overlap is not None:
        loop.overlap.accept_torn()
    loop.optimizer.zero_grad()
    load()


def _rolled_back(loop: Loop, i: int) -> None:
    loop.backward(i)
    if loop.overlap is not None:
        loop.overlap.rollback()
    loop.optimizer.zero_grad()


def _given_up(loop: Loop, i: int) -> None:
    """Between backward and step; and the loop goes on from a checkpoint."""
    load = loop.snapshot()
    loop.backward(i)
    if loop.overlap is not None:
        loop.overlap.accept_torn()
    loop.optimizer.zero_grad()
    load()


def _detached(loop: Loop, i: int) -> None:
    """In the middle of the step, which the plain loop ends; and attached again."""
    loop.backward(i)
    if loop.overlap is not None:
        loop.overlap.detach()
    loop.step()
    loop.attach()


def _detached_after(loop: Loop, i: int) -> None:
    """When ``step()`` has returned."""
    loop.learn(i)
    if loop.overlap is not None:
        loop.overlap.detach()
    loop.evaluate(i)
    loop.attach()


def _looked_at(loop: Loop, i: int) -> None:
    """Somebody uses weights between backward and step, which puts the step back; on another stream."""
    loop.backward(i)
    _copy(loop)
    loop.step()


def _not_finite(loop: Loop, i: int) -> None:
    """A gradient is infinite: the step is left out."""
    last = list(loop.model.parameters())[-1]
    handle = last.register_hook(lambda gradient: gradient * torch.inf)
    loop.backward(i)
    handle.remove()
    if loop.overlap is None:
        loop.optimizer.zero_grad()
    else:
        loop.step()


def _state_read(loop: Loop, i: int) -> None:
    """Right after the step, and loaded again: on the device."""
    loop.learn(i)
    loop.optimizer.load_state_dict(_copied(loop.optimizer.state_dict()))


def _gradients_kept(loop: Loop, i: int) -> None:
    """Read after the step, on the device."""
    loop.backward(i)
    loop.optimizer.step()
    loop.copied += [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
    loop.optimizer.zero_grad()


def _new_weights(loop: Loop, i: int) -> None:
    """Weights are loaded right after the step."""
    load = loop.snapshot()
    loop.learn(i)
    load()


Happening = Callable[[Loop, int], None]
HAPPENINGS: Mapping[str, Happening] = {
    "nothing": _nothing,
    "a backward that raises": _backward_raises,
    "a backward that raises, and a forward": _backward_raises_and_weights_are_read,
    "a bucket that fails": _bucket_fails,
    "rollback": _rolled_back,
    "accept_torn": _given_up,
    "detach in the middle": _detached,
    "detach after the step": _detached_after,
    "weights used on another stream": _looked_at,
    "a gradient that is not finite": _not_finite,
    "state saved and loaded": _state_read,
    "gradients read after the step": _gradients_kept,
    "weights loaded": _new_weights,
}
ONLY: Mapping[str, tuple[str, ...]] = {
    # What "backward" refuses, or tears for good.
    "rollback": ("forward", "undo", "undo on the host"),
    "weights used on another stream": ("forward", "undo", "undo on the host"),
    "gradients read after the step": ("forward", "undo", "undo on the host"),
    "a gradient that is not finite": ("forward", "undo", "undo on the host"),
    "accept_torn": ("backward",),
}


# Who reads weights after a step, on what.


def _nobody(loop: Loop) -> None: ...


@contextmanager
def _on_other_streams() -> Iterator[None]:
    """On every device, one that waits for the loop's, which waits for it in turn: weights are written again."""
    mine = [torch.accelerator.current_stream(index) for index in range(torch.accelerator.device_count())]
    others = [torch.Stream(stream.device) for stream in mine]
    for other, stream in zip(others, mine, strict=True):
        other.wait_stream(stream)
    with _current(others):
        yield
    for other, stream in zip(others, mine, strict=True):
        stream.wait_stream(other)


@contextmanager
def _current(streams: Sequence[torch.Stream]) -> Iterator[None]:
    index = torch.accelerator.current_device_index()
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    for stream in streams:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)
    yield
    for stream in before:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)


def _copy(loop: Loop) -> None:
    """Another stream copies them."""
    with _on_other_streams():
        loop.copied += [p.detach().clone() for p in loop.model.parameters()]


def _copy_to_host(loop: Loop) -> None:
    with _on_other_streams():
        weights = [p.detach() for p in loop.model.parameters()]
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in weights]
        hosts = [torch.empty_like(p, device="cpu", pin_memory=True) for p in weights]
        for host, p in zip(hosts, weights, strict=True):
            host.copy_(p, non_blocking=True)
        events = [torch.accelerator.current_stream(p.device).record_event() for p in weights]
    for event in events:
        event.synchronize()
    loop.copied += [torch.from_numpy(host.numpy().copy()) for host in hosts]


def _evaluate(loop: Loop) -> None:
    """A forward of the model on another stream."""
    with _on_other_streams():
        loop.copied.append(loop.evaluate(77))


def _both_forward(loop: Loop) -> None:
    """A forward on the loop's stream, and one on another stream that has waited for it before."""
    mine = torch.accelerator.current_stream()
    with _on_other_streams():
        with torch.get_device_module(mine.device).stream(mine):
            loop.copied.append(loop.evaluate(77))
        loop.copied.append(loop.evaluate(77))


def _item(loop: Loop) -> None:
    """The host."""
    loop.copied.append(torch.tensor(sum(float(p.detach().sum()) for p in loop.model.parameters())))


def _allocate(loop: Loop) -> None:
    """Nobody; the memory of gradients is given out again, and written."""
    loop.copied += [torch.full_like(p, 3.0) for p in loop.model.parameters()]


Reader = Callable[[Loop], None]
READERS: Mapping[str, Reader] = {
    "the next forward": _nobody,
    "another stream": _copy,
    "a copy to the host": _copy_to_host,
    "a forward on another stream": _evaluate,
    "forwards on both": _both_forward,
    "the host": _item,
    "the next allocation": _allocate,
}


@contextmanager
def on_stream(own: bool) -> Iterator[None]:
    """A stream for the loop; or the device's default one."""
    if not own:
        yield
        return
    before = torch.accelerator.current_stream()
    stream = torch.Stream(before.device)
    stream.wait_stream(before)
    with _current([stream]):
        yield


def train(
    options: Mapping[str, Any] | None,
    *,
    model: str = "blocks",
    optimizer: str = "AdamW",
    happening: str = "nothing",
    reader: str = "the next forward",
    own_stream: bool = False,
    steps: int = STEPS,
    **how: Any,
) -> list[torch.Tensor]:
    """Weights, state, and what readers have found. ``how``: more of ``Loop``'s attributes."""
    torch.manual_seed(0)
    if options is not None:
        options = {"bucket_bytes": SMALL, **options}
    build, loss = MODELS[model]
    made = build()
    loop = Loop(made, OPTIMIZERS[optimizer](made.parameters()), loss, options, **how)
    with on_stream(own_stream):
        loop.attach()
        for i in range(steps):
            (HAPPENINGS[happening] if i == AT else _nothing)(loop, i)
            READERS[reader](loop)
        return loop.result()
