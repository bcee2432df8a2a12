"""Where final gradients come from. A source says when the gradients of some parameters are final; a sink takes them.

Each kind of wrapper has a source, in a folder of its own. All of them go the same way: hooks in backward tell the
source that gradients are there, or on their way (``LaunchedBucket``); the source offers them to its ``Sink``, and has
them stepped if the sink accepts them (``deliver``); where backward ends it raises what went wrong
(``Sink.raise_failure``).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._step.in_backward import BucketSink
from instep._step.norms import MeasuringSink
from instep._torch.engine import profiled
from instep.buckets import Bucket


class Source:
    """What the attachment asks of a source, in the order of the calls of one attachment, and of each iteration."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets as they are now, in the order in which they are expected."""
        raise NotImplementedError

    def connect(self) -> None:
        """Register the hooks: all of them, or none and an error."""

    def refresh(self) -> None:
        """Between steps: take in parameters that were frozen or unfrozen."""

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        """Between steps: take in those of ``parameters``, which were added to an optimizer, that this source has the
        gradients of. Returns the others."""
        return parameters

    def before_backward(self) -> None:
        """A backward is about to begin: no gradient has changed yet."""

    def begin_step(self) -> None:
        """The first gradient of a step is being offered, by this source or another one."""

    def disconnect(self) -> None:
        """Take the hooks off again. Safe to call twice."""


Sink = BucketSink | MeasuringSink
"""The step, as a source sees it: ``BucketSink`` steps what it is given, ``MeasuringSink`` takes norms alone.

During backward the source offers final gradients with ``arrive``, has full buckets stepped with ``apply``, and frees
their gradients with ``retire``. Where backward ends, and nothing is left to run that an exception would harm, the
source calls ``raise_failure``. ``backward_raised`` takes the place of all calls that are still to come.
"""


def record_arrival(sink: Sink, bucket: Iterable[AttachedParameter], future: torch.futures.Future[Any]) -> None:
    """Tell the recorder of the step, if it has one, of the communication of ``bucket``: from now until ``future`` is
    done, which a thread of the backend's notes."""
    recorder, started = sink.times.recorder, perf_counter()
    if recorder is not None:
        names = [attached.spec.name for attached in bucket]
        future.add_done_callback(lambda _: recorder("communication", names, started, perf_counter()))


def deliver(sink: Sink, gradients: AttachedParameters, step: Callable[[], bool]) -> bool:
    """Offer ``gradients``, which are final, and call ``step`` if they may be written now. Errors are kept.

    Returns:
        Whether all of ``step`` was done: if not, this backward must write nothing after it.
    """
    with ErrorsKept(sink):
        return sink.arrive(gradients) and step()
    return False


class ErrorsKept:
    """Around a step in a hook of backward, or before DDP's own end: ``sink`` keeps an error until the source calls
    ``raise_failure``. Raised at once, an error would leave DDP unusable, and other ranks without this rank's part of
    the buckets that are still to be sent."""

    # No generator: Ctrl-C before its ``yield`` would be kept, too, and the generator be told that it has not yielded.

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            self._sink.fail(error)
        return error is not None


def step_all(sink: Sink, gradients: AttachedParameters) -> bool:
    """The ``step`` of a sink that ``waits_for_all``: all gradients of the model are in ``.grad``, and clipped by the
    norm that they have together."""
    sink.compute_total_norm()
    done = sink.apply(gradients)
    sink.retire(gradients)
    return done


def drain(communications: Iterable[Any]) -> None:
    """Return when all of ``communications`` are done, or one has failed. The failure is not raised: another error is on
    its way already. After it none is waited for: once a rank is lost, each takes as long as the process group waits."""
    with suppress(Exception):
        for communication in communications:
            communication.wait()


class LaunchedBucket:
    """A bucket of gradients whose communication was started.

    Attributes:
        members: all of the bucket's parameters.
        communication: reduces the bucket: the future of a communication hook or of a backend, or several works in one.
            Its ``wait()`` raises what the communication raised; on an accelerator the current stream waits, and not the
            host.
    """

    __slots__ = ("communication", "members")

    def __init__(self, members: Sequence[torch.Tensor], communication: Any) -> None:
        self.members = members
        self.communication = communication

    def wait(self) -> None:
        """Return when the bucket has arrived, for the current stream. Raises what the communication raised."""
        with profiled("wait for gradients"):
            self.communication.wait()


_KNOWN = 1000


class WrappedParameters:
    """The attached parameters that a wrapper (``DistributedDataParallel``, ``Replicated``) reduces. They are found by
    the tensors in the wrapper's buckets, some of which may not be attached."""

    def __init__(self, parameters: Iterable[AttachedParameter]) -> None:
        self._by_id = {id(attached.get()): attached for attached in parameters}
        self._known: dict[tuple[int, ...], AttachedParameters] = {}  # that were asked for: buckets come in each step

    def adopt(self, parameters: Sequence[AttachedParameter], reduced: Collection[int]) -> list[AttachedParameter]:
        """Take in those of ``parameters`` that are in ``reduced``, by ``id``. Returns the others."""
        self._by_id.update((id(a.get()), a) for a in parameters if id(a.get()) in reduced)
        self._known.clear()
        return [attached for attached in parameters if id(attached.get()) not in reduced]

    def among(self, tensors: Iterable[torch.Tensor]) -> AttachedParameters:
        """The attached parameters among ``tensors``, in the same order."""
        keys = tuple(map(id, tensors))
        found = self._known.get(keys)
        if found is None:
            if len(self._known) > _KNOWN:  # DDP has made other buckets, or they arrive together in ever other ways
                self._known.clear()
            found = self._known[keys] = AttachedParameters(self._by_id[key] for key in keys if key in self._by_id)
        return found

    def __getitem__(self, tensor: torch.Tensor) -> AttachedParameter:
        return self._by_id[id(tensor)]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._by_id

    def __iter__(self) -> Iterator[AttachedParameter]:
        return iter(self._by_id.values())


def as_bucket(source: str, parameters: Iterable[AttachedParameter]) -> Bucket:
    """A bucket of the wrapper as a plan shows it."""
    return Bucket(source, tuple(attached.spec for attached in parameters))
