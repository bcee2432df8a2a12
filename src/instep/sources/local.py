"""Gradients that are final once their post-accumulate-grad hooks are called.

Autograd calls them, on one device. Of parameters that ``fully_shard`` was applied to FSDP2 calls them itself, group by
group, once it has reduced and sharded the gradients (``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``,
``foreach_reduce``).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from operator import attrgetter

import torch
from torch.utils.hooks import RemovableHandle

from instep._autograd.backward import Phase, current
from instep._autograd.engine import graph_task
from instep._autograd.hooks import UntracedHook
from instep._life.weak import weakly
from instep._optim.parameters import GRADIENT, AttachedParameter, AttachedParameters, all_there, none_there
from instep._optim.parts import memory_of
from instep._optim.plan import Bucket, fill_buckets
from instep.errors import InstepError
from instep.sources import Sink
from instep.sources.delivery import deliver, step_bucket

_REQUIRES_GRAD = attrgetter("requires_grad")


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


class LocalSource:
    """Post-accumulate-grad hooks, gathered into buckets: FSDP2's groups, others of about ``bucket_bytes``.

    Buckets first follow the model's order backwards; after the first step, the order in which gradients arrived.
    A bucket with a parameter that gets no gradient is never full: ``optimizer.step()`` steps the rest of it.

    A hook on every parameter costs some microseconds for each. Once a step has gone in order, only the last of each
    bucket to arrive keeps its hook, and speaks for the bucket: in a backward that began without any gradient, those
    that are there are final, since a backward gives each parameter its gradient once. Anything else (accumulation,
    another order, a gradient too few, nested backwards) is left to ``optimizer.step()`` once, and from then on every
    parameter has its hook again.
    """

    def __init__(
        self, sink: Sink, parameters: Sequence[AttachedParameter], bucket_bytes: int, uses: ForwardCounts | None = None
    ) -> None:
        self._sink = sink
        self._uses = uses
        self._in_parts: dict[int, AttachedParameter] = {}
        self._parameters = AttachedParameters(parameters)
        self._bucket_bytes = bucket_bytes
        self._handles: dict[int, RemovableHandle] = {}
        self._listened: dict[int, AttachedParameter] = {}  # with a hook; by index, since a hook must not hold one
        self._trainable = AttachedParameters()
        self._requires_grad: list[bool] = []  # as it was found for each parameter
        self._observed: list[AttachedParameter] = []
        self._follows_observed = False
        self._running: set[int] = set()
        self._late: set[int] = set()
        self._ended = False
        # In the backward ``_open_in``, which writes this step, gradients are noted, and announced bucket by bucket.
        self._open_in: int | None = None
        self._noted: set[int] = set()
        self._unannounced: list[AttachedParameter] = []
        self._in_order = all(attached.spec.group is None for attached in parameters)
        self._speakers_only = False
        # The last backward that was seen to begin; with speakers only, while it runs, if it began without gradients.
        self._began: int | None = None
        self._announced: set[int] = set()
        self._fill([])

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    def connect(self) -> None:
        self.refresh()

    def disconnect(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._listened.clear()

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        self._parameters = AttachedParameters((*self._parameters, *parameters))
        return ()

    def refresh(self) -> None:
        requires_grad = list(map(_REQUIRES_GRAD, self._parameters.tensors()))
        if requires_grad != self._requires_grad:
            self._requires_grad = requires_grad
            self._trainable = AttachedParameters(compress(self._parameters, requires_grad))
            self._follows_observed = False
            self._fill(reversed(self._trainable))
            self._listen_to_all()
        elif self._speakers_only and not self._in_order:
            self._listen_to_all()
        elif self._in_order and self._follows_observed and len(self._observed) == len(self._trainable):
            self._listen_to_speakers()

    def _listen_to_all(self) -> None:
        if self._speakers_only:
            self.disconnect()
            self._speakers_only = False
        for attached in self._trainable:
            if attached.spec.index not in self._handles:
                self._listen(attached, weakly(self._accumulated, attached.spec.index))

    def _listen_to_speakers(self) -> None:
        speakers = {self._bucket_of[attached.spec.index]: attached for attached in self._observed}
        self.disconnect()
        for number, attached in speakers.items():
            self._listen(attached, weakly(self._bucket_accumulated, number, attached.spec.index))
        self._speakers_only = True
        self._observed = []
        self._began = None

    def _listen(self, attached: AttachedParameter, call: Callable[[torch.Tensor], None]) -> None:
        handle = attached.get().register_post_accumulate_grad_hook(UntracedHook(call))
        self._handles[attached.spec.index] = handle
        self._listened[attached.spec.index] = attached

    def before_backward(self) -> None:
        if not self._speakers_only:
            self._began = graph_task()
        elif self._began is not None or not none_there(map(GRADIENT, self._trainable.tensors())):
            self._in_order = False  # nested in another, or with gradients from before
        else:
            self._began = graph_task()
            current().at(Phase.AFTER_DDP, self._announce_rest, self._forget)

    def begin_step(self) -> None:
        if self._observed and self._sink.step_count and not self._follows_observed:
            seen = set(self._observed)
            self._follows_observed = True
            self._fill([*self._observed, *(a for a in reversed(self._trainable) if a not in seen)])
        self._missing = [len(members) for members in self._members]
        self._observed = []
        self._running.clear()
        self._late.clear()
        self._ended = False
        self._open_in = None
        self._noted.clear()
        self._unannounced = []

    def _fill(self, order: Iterable[AttachedParameter]) -> None:
        attached = {a.spec.index: a for a in order}
        self._buckets = fill_buckets("local", (a.spec for a in attached.values()), self._bucket_bytes)
        self._members = [
            AttachedParameters(attached[spec.index] for spec in bucket.parameters) for bucket in self._buckets
        ]
        self._bucket_of = {a.spec.index: number for number, members in enumerate(self._members) for a in members}
        self._missing = [len(members) for members in self._members]

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        with self._sink.lock:  # the gradients of another device arrive on a thread of their own
            self._sink.streams.makers.saw(parameter.device)
            self._count(self._listened[index])

    def _count(self, attached: AttachedParameter) -> None:
        index, task = attached.spec.index, graph_task()
        if self._uses is not None and (self._uses.several(attached.spec.group) or _is_being_copied(attached.get())):
            if not self._in_parts:
                current().at(Phase.BEFORE_DDP, self._apply_whole, self._drop_parts)
            self._in_parts[index] = attached
            return
        if task != self._began:
            self._in_order = False  # in a backward nested in another, or one that the model's outputs are no part of
        noted = self._open_in is not None and self._open_in == task and index not in self._noted
        if noted:
            self._unannounced.append(attached)
        elif not (self._announce() and self._sink.arrive((attached,))):
            self._in_order = False
            return
        self._noted.add(index)
        number = self._bucket_of.get(index)
        if number is None:
            return  # thawed since the buckets were made, within this very forward: left to optimizer.step()
        self._observed.append(attached)
        self._missing[number] -= 1
        if (noted or self._may_write()) and self._missing[number] == 0 and self._announce():
            members = self._members[number]
            if self._sink.apply(members):
                self._sink.retire(members)

    def _bucket_accumulated(self, number: int, speaker: int, parameter: torch.Tensor) -> None:
        with self._sink.lock:
            self._sink.streams.makers.saw(parameter.device)
            self._count_bucket(number, speaker)

    def _count_bucket(self, number: int, speaker: int) -> None:
        members = self._members[number]
        if self._began != graph_task() or not all_there(map(GRADIENT, members.tensors())):
            self._in_order = False
        if not self._in_order:
            members = AttachedParameters((self._listened[speaker],))
        self._announced.update(members.indices)
        if not self._sink.arrive(members):
            self._in_order = False
        elif self._may_write() and self._in_order and self._sink.apply(members):
            self._sink.retire(members)

    def _announce_rest(self) -> None:
        """This backward is over: what nobody spoke for is left to ``optimizer.step()``, which counts it."""
        announced = self._announced
        rest = (
            []
            if announced.issuperset(self._trainable.indices)
            else [a for a in self._trainable if a.spec.index not in announced and a.get().grad is not None]
        )
        self._forget()
        if rest:
            self._in_order = False
            self._sink.arrive(rest)

    def _forget(self) -> None:
        self._began = None
        self._announced.clear()

    def _announce(self) -> bool:
        """Announce what was noted. ``False``: nothing of it must be written now."""
        noted, self._unannounced = self._unannounced, []
        return not noted or self._sink.arrive(noted)

    def _may_write(self) -> bool:
        """Whether the running backward is the first of this step, or nested in it (reentrant checkpointing).

        In a later one gradients stay where they are: if it goes on to reach an applied parameter, that raises
        before anything of it was written, else ``optimizer.step()`` steps them.
        """
        task = graph_task()
        if task is None or task in self._late:
            return False
        if task not in self._running:
            if self._ended and not self._running:
                self._late.add(task)
                return False
            self._running.add(task)
            current().at(Phase.BEFORE_DDP, partial(self._end, task), partial(self._raised, task))
        self._open_in = task
        return True

    def _end(self, task: int) -> None:
        self._running.discard(task)
        self._open_in = None
        self._announce()
        self._close()

    def _close(self) -> None:
        self._ended = True
        self._sink.streams.join()
        # An error before the end of a DDP instance in the same backward would leave the instance unusable.
        current().at(Phase.AFTER_DDP, self._sink.raise_failure, self._sink.backward_raised)

    def _apply_whole(self) -> None:
        """What came in parts, or was on its way to the host, is final now: FSDP2 asked for the end of this backward
        before its first gradient."""
        members = list(self._in_parts.values())
        self._in_parts.clear()
        deliver(self._sink, members, partial(step_bucket, self._sink, members))
        self._close()

    def _drop_parts(self) -> None:
        self._in_parts.clear()
        self._sink.backward_raised()

    def _raised(self, task: int) -> None:
        self._running.discard(task)
        self._open_in = None
        with suppress(InstepError):
            self._announce()
        self._sink.backward_raised()


def _is_being_copied(parameter: torch.Tensor) -> bool:
    """Whether FSDP2's ``CPUOffloadPolicy`` copies this gradient to the host beside what the host does. It waits for
    that where backward ends; in a torch before 2.13 or so for hooks of its parameters, too."""
    return parameter.grad is not None and memory_of(parameter.grad).is_pinned()
