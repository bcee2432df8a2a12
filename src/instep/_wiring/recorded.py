"""A recording of a loop begins: with what is recorded in words, and who is told of buckets."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from instep._optim.plan import Plan
from instep._step.recorder import Recorder
from instep.options import Options

if TYPE_CHECKING:
    from instep.recording import Recording

Described = tuple[str, dict[str, str], list[list[str]], dict[str, int] | None]
Listen = Callable[[Recorder | None], None]


def record_plain(model: nn.Module, optimizers: Sequence[Optimizer], steps: int) -> "Recording":
    """Of a loop whose steps are torch's."""
    return _recording(model, optimizers, steps, lambda: ("plain", {}, [], None), lambda recorder: None)


def record_attached(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    steps: int,
    options: Options,
    plan: Callable[[], Plan],
    listen: Listen,
) -> "Recording":
    """``plan`` is asked when the recording is described, ``listen`` takes the recorder of buckets."""
    return _recording(model, optimizers, steps, lambda: _described(options, plan()), listen)


def _described(options: Options, plan: Plan) -> Described:
    said = options.said()
    label = ", ".join(f"{name}={value}" for name, value in said.items())
    buckets = [[spec.name for spec in bucket.parameters] for bucket in plan.buckets]
    gradients = {spec.name: spec.nbytes for bucket in plan.buckets for spec in bucket.parameters}
    return f"instep, {label}", said, buckets, gradients


def _recording(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    steps: int,
    described: Callable[[], Described],
    listen: Listen,
) -> "Recording":
    from instep.recording import Recording  # imports torch.profiler
    from instep.recording.setup import describe

    return Recording(model, optimizers, steps, lambda batch: describe(model, optimizers, batch, *described()), listen)
