"""A source says when the gradients of some parameters are final. Each kind of wrapper has one, in a folder of its own;
a ``Sink`` is told of them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Protocol

import torch

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.plan import Bucket
from instep._step.recorder import Recorder
from instep._step.streams import StepStreams


class Sink(Protocol):
    """The step, as a source sees it: ``BucketSink`` steps what it is given, ``MeasuringSink`` takes norms alone.

    During backward the source offers final gradients with ``arrive``, has full buckets stepped with ``apply``, and
    frees their gradients with ``retire``. Where backward ends, and nothing is left to run that an exception would
    harm, the source calls ``raise_failure``. ``backward_raised`` takes the place of all calls that are still to come.

    Attributes:
        lock: held while gradients are counted: on accelerators each device has a thread of the engine's.
        waits_for_all: whether nothing may be stepped before all gradients are there.
        by_bucket: whether no two buckets may be stepped in one call of the optimizer.
        frees_gradients: whether an applied gradient is needed no more.
        keeps_gradients: whether the loop is to find all gradients of the running backward in ``.grad``.
    """

    @property
    def streams(self) -> StepStreams: ...
    @property
    def lock(self) -> AbstractContextManager[Any]: ...
    @property
    def step_count(self) -> int: ...
    @property
    def recorder(self) -> Recorder | None: ...
    @property
    def waits_for_all(self) -> bool: ...
    @property
    def by_bucket(self) -> bool: ...
    @property
    def frees_gradients(self) -> bool: ...
    @property
    def keeps_gradients(self) -> bool: ...
    def arrive(self, parameters: Sequence[AttachedParameter]) -> bool: ...
    def apply(
        self, bucket: Sequence[AttachedParameter], fetch: Callable[[], None] | None = None, *, final: bool = True
    ) -> bool: ...
    def retire(self, bucket: Iterable[AttachedParameter]) -> None: ...
    def freed(self, bucket: Sequence[AttachedParameter]) -> None: ...
    def is_applied(self, attached: AttachedParameter) -> bool: ...
    def compute_total_norm(self) -> None: ...
    def fail(self, error: BaseException, begun: Sequence[str] = ()) -> None: ...
    def updated_on_all(self) -> bool: ...
    def received(self, parameters: AttachedParameters) -> None: ...
    def backward_raised(self) -> None: ...
    def raise_failure(self) -> None: ...


def record_arrival(sink: Sink, bucket: Iterable[AttachedParameter], future: torch.futures.Future[Any]) -> None:
    """Tell the recorder of the step, if it has one, of the communication of ``bucket``: from now until ``future`` is
    done, which a thread of the backend's notes."""
    recorder, started = sink.recorder, perf_counter()
    if recorder is not None:
        names = [attached.spec.name for attached in bucket]
        future.add_done_callback(lambda _: recorder("communication", names, started, perf_counter()))


class Source(Protocol):
    """What the attachment asks of a source."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets as they are now, in the order in which they are expected."""

    def connect(self) -> None:
        """Register the hooks: all of them, or none and an error."""

    def disconnect(self) -> None:
        """Take the hooks off again. Safe to call twice."""

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        """Between steps: take in those of ``parameters``, which were added to an optimizer, that this source has the
        gradients of. Returns the others."""

    def refresh(self) -> None:
        """Between steps: take in parameters that were frozen or unfrozen."""

    def before_backward(self) -> None:
        """A backward is about to begin: no gradient has changed yet."""

    def begin_step(self) -> None:
        """The first gradient of a step is being offered, by this source or another one."""
