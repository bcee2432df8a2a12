"""Gradients of FSDP2 that are not final where their hook is called, but where backward ends."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from instep._autograd.backward import Phase, current
from instep._optim.parameters import AttachedParameter
from instep._optim.parts import memory_of
from instep.sources import Sink
from instep.sources.delivery import deliver, step_bucket


class ForwardCounts:
    """How often FSDP2's groups have run forward since the last backward. It reduces a group's gradients once for each
    time, so that in one backward they come in several parts, between which it gathers the weights again."""

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()

    def ran(self, group: int) -> None:
        self._counts[group] += 1

    def several(self, group: int | None) -> bool:
        return self._counts[group] > 1

    def clear(self) -> None:
        self._counts.clear()


class LatePart:
    """The gradients of the running backward that are final where it ends.

    Args:
        closed: called at the end of backward, once they were stepped.
    """

    def __init__(self, sink: Sink, uses: ForwardCounts, closed: Callable[[], None]) -> None:
        self._sink = sink
        self._uses = uses
        self._closed = closed
        self._gradients: dict[int, AttachedParameter] = {}

    def takes(self, attached: AttachedParameter) -> bool:
        """Whether the gradient that has just arrived is one of them, or a part of one."""
        if not self._uses.several(attached.spec.group) and not _is_being_copied(attached.get()):
            return False
        if not self._gradients:
            # FSDP2 has asked for the end of this backward before its first gradient, so that its own end comes first.
            current().at(Phase.BEFORE_DDP, self._step, self._drop)
        self._gradients[attached.spec.index] = attached
        return True

    def _step(self) -> None:
        gradients = list(self._gradients.values())
        self._gradients.clear()
        deliver(self._sink, gradients, partial(step_bucket, self._sink, gradients))
        self._closed()

    def _drop(self) -> None:
        self._gradients.clear()
        self._sink.backward_raised()


def _is_being_copied(parameter: torch.Tensor) -> bool:
    """Whether FSDP2's ``CPUOffloadPolicy`` copies this gradient to the host beside what the host does. It waits for
    that where backward ends; in a torch before 2.13 or so for hooks of its parameters, too."""
    return parameter.grad is not None and memory_of(parameter.grad).is_pinned()
