"""Final gradients are handed from a source to its sink."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from instep._optim.parameters import AttachedParameter
from instep.sources import Sink


@contextmanager
def errors_kept(sink: Sink) -> Iterator[None]:
    """Around a step in a hook of backward, or before DDP's own end: ``sink`` keeps an error until the source calls
    ``raise_failure``. Raised at once, an error would leave DDP unusable, and other ranks without this rank's part of
    the buckets that are still to be sent."""
    try:
        yield
    except BaseException as error:
        sink.fail(error)


def deliver(sink: Sink, gradients: Sequence[AttachedParameter], step: Callable[[], bool]) -> bool:
    """Offer ``gradients``, which are final, and call ``step`` if they may be written now. Errors are kept.

    Returns:
        Whether all of ``step`` was done: if not, this backward must write nothing after it.
    """
    with errors_kept(sink):
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
