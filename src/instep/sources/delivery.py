"""Final gradients are handed from a source to its sink."""

from collections.abc import Callable, Sequence

from instep._optim.parameters import AttachedParameter
from instep.sources import Sink


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


def deliver(sink: Sink, gradients: Sequence[AttachedParameter], step: Callable[[], bool]) -> bool:
    """Offer ``gradients``, which are final, and call ``step`` if they may be written now. Errors are kept.

    Returns:
        Whether all of ``step`` was done: if not, this backward must write nothing after it.
    """
    with ErrorsKept(sink):
        return sink.arrive(gradients) and step()
    return False


def step_bucket(sink: Sink, gradients: Sequence[AttachedParameter]) -> bool:
    """The ``step`` of gradients that nothing but instep needs any more: step them in one call, and free them."""
    done = sink.apply(gradients)
    sink.retire(gradients)
    sink.freed(gradients)
    return done


def step_all(sink: Sink, gradients: Sequence[AttachedParameter]) -> bool:
    """The ``step`` of a sink that ``waits_for_all``: all gradients of the model are in ``.grad``, and clipped by the
    norm that they have together."""
    sink.compute_total_norm()
    done = sink.apply(gradients)
    sink.retire(gradients)
    return done
