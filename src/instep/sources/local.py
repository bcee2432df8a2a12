"""Gradients that are final once their post-accumulate-grad hooks are called: one device, and FSDP2.

Autograd calls the hooks, on one device. For parameters that ``fully_shard`` was applied to FSDP2 calls them itself,
group by group, once it has reduced and sharded the gradients
(``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``, ``foreach_reduce``).

``LocalSource`` counts gradients down to full buckets. Its helpers each answer one question: which parameter is in which
bucket (``LocalLayout``), where hooks are (``GradientHooks``), what compiled code hands over (``CompiledCode``), whether
the running backward may write (``WritingBackwards``), which gradients were there before it (``EarlierGradients``), and
which gradients of FSDP2 are final only where backward ends (``FSDP2Gradients``).
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, eq, is_not
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from instep._optim.kernels import GRADIENT
from instep._optim.parameters import AttachedParameter, AttachedParameters, none_there
from instep._optim.stepper import PreparedUpdate
from instep._step.state import gradient_of
from instep._torch.engine import WHO_IS_TOLD, Phase, current, graph_task, graph_task_number, listen, told_of_compiling
from instep._torch.handing_over import SMALL, WORTH, HandedOver, open_for_compiling
from instep._torch.hooks import WeakHook
from instep._torch.lifetime import weakly
from instep._torch.placeholders import HeldGradient, Placeholder, ZeroedGradient, dtype_of_gradient
from instep._torch.versions import is_pinned, versions_of
from instep.buckets import Bucket, bucket_bytes_for, default_buckets, fill_buckets
from instep.errors import InstepError
from instep.sources import Sink, Source, deliver


class LocalSource(Source):
    """Post-accumulate-grad hooks, gathered into the buckets of a ``LocalLayout``. A bucket with a parameter that gets
    no gradient is never full: ``optimizer.step()`` steps the rest of it.

    A hook on every parameter costs some microseconds for each. Once a step has gone in order, there is one hook for
    each bucket: on the parameter whose gradient arrives last. The gradients of the bucket that are there when that hook
    is called, and were not when the backward began, are final, since a backward gives each parameter its gradient once;
    of one that was there, autograd has counted a write since. Anything else (another order, a gradient too few, nested
    backwards) is left to ``optimizer.step()`` once, and from then on every parameter has its hook again.

    Code that torch.compile has made of a whole model hands gradients over while it runs (``_torch/handing_over.py``):
    a group of them is a bucket, which is stepped at once.

    Args:
        uses: how often FSDP2's groups have run forward; ``None``: there are no such groups.
        applied: told of a parameter of each of their buckets that was applied.
        whole: why compiled code hands no gradients over; ``None``: it does.
    """

    def __init__(
        self,
        sink: Sink,
        parameters: Sequence[AttachedParameter],
        bucket_bytes: int | None,
        uses: "ForwardCounts | None" = None,
        applied: Callable[[torch.Tensor], None] = lambda _: None,
        *,
        whole: str | None = "gradients are those of a part of the model",
    ) -> None:
        self._sink = sink
        self._layout = LocalLayout(parameters, bucket_bytes)
        self._hooks = GradientHooks()
        self.compiled = CompiledCode(self, whole)
        self._fsdp = None if uses is None else FSDP2Gradients(sink, uses, applied, weakly(self._close))
        self._backwards = WritingBackwards(weakly(self._end), weakly(self._raised))
        # Whether every step has gone in order so far. Once one has not, every parameter keeps its hook.
        self._in_order = all(attached.spec.group is None for attached in parameters)
        self._one_per_bucket = False  # whether only the last parameter of each bucket has a hook
        # Of this step, with a hook on every parameter: gradients that have arrived, and those of them that are still to
        # be offered to the sink. A backward that may write offers them bucket by bucket.
        self._arrived: set[int] = set()
        self._to_offer: list[AttachedParameter] = []
        self._missing: list[int] = []  # of each bucket, how many have not arrived
        self._running = RunningBackward(None)
        self._earlier = EarlierGradients()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._layout.buckets

    def connect(self) -> None:
        self.refresh()
        if self.compiled.why_not is None:
            listen(self.compiled)
        if HandedOver.has_code:  # perhaps of this model, of an earlier attachment
            self.compiled.start()

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        self._layout.adopt(parameters)
        return ()

    def refresh(self) -> None:
        if self.compiled.why_not is None and told_of_compiling not in WHO_IS_TOLD:
            listen(self.compiled)
        if list(map(_IMPLEMENTATION, self._hooks.tensors)) != self._hooks.called_by:
            self._hooks.remove()  # torch has swapped one of these: nobody calls its hook
            self._one_per_bucket = False
            self._listen_to_all()
        if self._layout.refresh() or (self._layout.groups and self._layout.regroup()):
            self._missing = list(map(len, self._layout.members))
            self._listen_to_all()
        elif self._one_per_bucket and not self._in_order:
            self._listen_to_all()
        elif self._in_order and not self._one_per_bucket and self._layout.all_observed:
            self._listen_to_last()

    def _listen_to_all(self) -> None:
        if self._one_per_bucket:
            self._hooks.remove()
            self._one_per_bucket = False
        # Weakly: a hook that kept this source would keep the parameters, and a parameter keeps its hooks.
        for attached in self._layout.trainable:
            if attached.spec.index not in self._hooks.parameters:
                self._hooks.add(attached, WeakHook(self._accumulated, attached.spec.index))

    def _listen_to_last(self) -> None:
        # Of each bucket, by number, the parameter whose gradient has arrived last in this step.
        last = {self._layout.bucket_of[attached.spec.index]: attached for attached in self._layout.observed}
        self._hooks.remove()
        for number, attached in last.items():
            self._hooks.add(attached, WeakHook(self._bucket_accumulated, number, attached.spec.index))
        self._earlier.speakers = AttachedParameters(last.values())
        self._one_per_bucket = True
        self._layout.observed = []
        self._running.task = None

    # Where a backward and a step begin.

    def before_backward(self) -> None:
        if not self._one_per_bucket:
            self._running.task = graph_task()
            return
        if self._running.task is not None or not self._earlier.note(self._layout.trainable):
            self._in_order = False  # nested in another, or with a gradient that was applied before
            return
        self._running.task = graph_task()
        current().at(Phase.AFTER_DDP, self._offer_rest, self._forget)
        if self._earlier.zeroed and not self._sink.next_only_adds:  # else they are left for all to see
            self._earlier.take_zeros_off()

    def begin_step(self) -> None:
        layout = self._layout
        if layout.observed and self._sink.step_count and not layout.follows_observed:
            layout.follow_observed()
        layout.observed = []
        self._missing = list(map(len, layout.members))
        self._backwards.begin_step()
        self._arrived.clear()
        self._to_offer = []

    # In backward, with a hook on every parameter.

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        if (handed := self.compiled.handed_over) is not None and index in handed.taken and handed.task == graph_task():
            return  # the engine comes by once more, with nothing
        with self._sink.lock:  # the gradients of another device arrive on a thread of their own
            self._sink.streams.producers.note_current(parameter.device)
            self._count(self._hooks.parameters[index])

    def _count(self, attached: AttachedParameter) -> None:
        """Count a gradient that has been accumulated, and step its bucket if that is full."""
        # Five fields decide: the running backward is compared with _began and _backwards.open_in, the gradient with
        # _arrived and _to_offer, the bucket with _missing.
        #
        #   first      (open_in is None) offered alone: the first of a step opens it. accepts_update() makes this
        #              backward open_in.
        #   in order   (task == open_in) waits in _to_offer until its bucket is full: one offer for all of them.
        #   nested     (reentrant checkpointing; task != open_in) those that wait are offered first, then this one
        #              alone. accepts_update() makes the nested backward open_in, and its end clears that again. So the
        #              outer one goes on as with its first gradient.
        #   again      (in _arrived already) offered alone, now, and not where the bucket is full: a sink that does not
        #              take a second gradient raises before anything more is written.
        #   late       (after the end of a backward that wrote) accepts_update() says no. Each is offered alone: the
        #              sink raises if the parameter was applied; else its gradient is left to optimizer.step().
        #   unseen     (task != _began: no output of the model has begun it) as the others, but no order is learned
        #              from it: hooks stay on every parameter.
        if not self._takes_gradient(attached):
            return
        if self._fsdp is not None and self._fsdp.takes(attached):
            return
        index, task = attached.spec.index, graph_task()
        if task != self._running.task:
            self._in_order = False  # in a backward nested in another, or one that the model's outputs are no part of
        open_in = self._backwards.open_in
        can_wait = open_in is not None and open_in == task and index not in self._arrived
        if can_wait:
            self._to_offer.append(attached)
        elif not (self._offer() and self._sink.arrive(AttachedParameters((attached,)))):
            self._in_order &= self._leaves_all
            return
        self._arrived.add(index)
        number = self._layout.bucket_of.get(index)
        if number is None:
            return  # unfrozen since the buckets were made, within this very forward: left to optimizer.step()
        self._layout.observed.append(attached)
        self._missing[number] -= 1
        if (can_wait or self._backwards.accepts_update(task)) and self._missing[number] == 0 and self._offer():
            members = self._layout.members[number]
            self._sink.apply_and_free(self._not_taken(members) if self.compiled.handed_over is not None else members)
            if self._fsdp is not None:
                self._fsdp.applied(attached.get())

    def _takes_gradient(self, attached: AttachedParameter) -> bool:
        """Whether ``.grad`` has a gradient that counts, now in a tensor of its own. Not if it was added to one of the
        step before that was applied: the loop has still to clear that."""
        gradient = gradient_of(attached)
        if gradient is None and attached.spent is not None and attached.get().grad is attached.spent:
            self._in_order = False
            return False
        return True

    def _offer(self) -> bool:
        """Offer the gradients that have waited for it. ``False``: nothing of this step must be written now."""
        gradients, self._to_offer = self._to_offer, []
        return not gradients or self._sink.arrive(AttachedParameters(gradients))

    # In backward, with one hook for each bucket.

    def _bucket_accumulated(self, number: int, last: int, parameter: torch.Tensor) -> None:
        """The last gradient of a bucket has been accumulated. In order, all of the bucket are final: offer and step
        them. Otherwise offer this one alone; the end of backward looks for the others (``_offer_rest``)."""
        sink = self._sink
        with sink.lock:  # the gradients of another device arrive on a thread of their own
            members, running = self._layout.members[number], self._running
            if self.compiled.handed_over is not None and (taken := self.compiled.taken_in(graph_task())):
                if last in taken:
                    return  # as in _accumulated; what else there is of the bucket is found where backward ends
                self._in_order &= taken.isdisjoint(members.indices)
            if running.task == graph_task_number() and running.prepared and not running.adds_up:
                update = running.prepared[number]
                if (
                    update is not None
                    and (not self._earlier.versions or self._have_come(members, last))
                    and sink.step_prepared(members, update)
                ):
                    running.offered.update(members.indices)
                    return
            if not parameter.is_cpu:
                sink.streams.producers.note_current(parameter.device)
            if running.adds_up and running.task == graph_task_number():
                running.offered.update(members.indices)
                return
            self._count_bucket(number, members, last, graph_task())

    def _count_bucket(self, number: int, members: AttachedParameters, last: int, task: int | None) -> None:
        sink = self._sink
        if self._running.task != task or not self._have_come(members, last):
            self._in_order = False
        if not self._in_order:
            members = AttachedParameters((self._hooks.parameters[last],))
            if not self._takes_gradient(members[0]):
                return
        self._running.offered.update(members.indices)
        if not sink.arrive(members):
            self._in_order &= self._leaves_all
            self._running.adds_up = sink.only_adds
        elif self._backwards.accepts_update(task) and self._in_order:
            first = not self._running.prepared
            if first:  # all others are found as they should be, or are looked at in their turn
                self._running.prepared = sink.prepare(self._layout.members)
            update = self._running.prepared[number] if first and self._running.prepared else None
            if update is None or not sink.step_prepared(members, update, arrived=True):
                sink.apply_and_free(members)

    def _have_come(self, members: AttachedParameters, last: int) -> bool:
        """Whether this backward has given all of a bucket their gradients. ``last``: whose hook is called."""
        gradients: list[Any] = list(map(GRADIENT, members.tensors()))
        if not all(map(is_not, gradients, repeat(None))):
            return False
        return not self._earlier.versions or self._earlier.have_come(last, members, gradients)

    # In backward, handed over by compiled code.

    @property
    def hands_over_bytes(self) -> int:
        return self._layout.bucket_bytes

    def living(self) -> Iterable[torch.Tensor]:
        return [parameter for attached in self._layout.trainable if (parameter := attached.peek()) is not None]

    def kept_because(self, *, is_whole: bool) -> str | None:
        """What keeps gradients of compiled code until its backward ends; ``None``: nothing that is known.

        Args:
            is_whole: whether the whole model is compiled. Parts of one need not hand over anything.
        """
        compiled, by_id, size = self.compiled, self._layout.by_id, self.hands_over_bytes
        handed = compiled.handed_over
        kept = {} if handed is None else {by_id[key]: why for key, why in handed.kept.items() if why and key in by_id}
        if kept:
            first, why = next(iter(kept.items()))
            return f"compiled code keeps gradients ({len(kept)}, as {first.spec.name}'s) until its backward ends: {why}"
        if compiled.has_taken or not is_whole:
            return None
        large = sum(attached.spec.nbytes for attached in self._layout.trainable if attached.spec.nbytes >= SMALL)
        if compiled.why_not is not None:
            why = compiled.why_not
        elif handed is None or not handed.is_met:
            why = _NOT_ASKED
        elif large < WORTH * size:
            why = f"those of at least {SMALL} bytes have {large}, fewer than {WORTH} buckets of {size}"
        else:
            why = "it may read each weight until then, or comes in parts that are too small"
        return f"the whole model is compiled: its gradients are kept until its backward ends: {why}"

    def receives(self, parameter: torch.Tensor) -> int | None:
        attached = self._layout.by_id.get(id(parameter))
        if attached is None or attached.peek() is not parameter or parameter.grad is not None:
            return None
        if not parameter.requires_grad:
            return None  # frozen since the forward: autograd gives it none
        hooks = parameter._post_accumulate_grad_hooks or ()
        ours = 1 if attached.spec.index in self._hooks.parameters else 0
        return attached.spec.index if len(hooks) == ours and not parameter._backward_hooks else None

    def take(self, indices: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> bool:
        with self._sink.lock:
            task = graph_task()
            if self._earlier.versions or not self._sink.steps_now(begun=self._backwards.open_in == task):
                return False  # the engine puts it in its place, and then it is looked at
            members = self._layout.chosen(indices)
            tensors = members.tensors()
            for parameter, gradient in zip(tensors, gradients, strict=True):
                parameter.grad = _as_accumulated(parameter, gradient, is_kept=self._sink.updates_beside)
            is_over = False
            try:
                is_over = self._step_taken(members, task)
            finally:
                if not is_over:
                    _keep(tensors, gradients)
            return True

    def _step_taken(self, members: AttachedParameters, task: int | None) -> bool:
        """Returns whether it is known that nobody keeps the gradients of ``members``."""
        running, sink = self._running, self._sink
        if not self._one_per_bucket or running.task != task:
            self._step_taken_among_all(members, task)
            return False
        running.offered.update(members.indices)
        number = self._layout.bucket_of[members[0].spec.index]
        is_bucket = self._layout.members[number].indices == members.indices
        update = running.prepared[number] if is_bucket and running.prepared else None
        if update is not None and sink.step_prepared(members, update):
            return sink.is_applied(members[0])
        if not sink.arrive(members):
            self._in_order &= self._leaves_all
        elif self._backwards.accepts_update(task):
            first = is_bucket and not running.prepared
            if first:
                running.prepared = sink.prepare(self._layout.members)
            update = running.prepared[number] if first and running.prepared else None
            if update is None or not sink.step_prepared(members, update, arrived=True):
                sink.apply_and_free(members)
        return False

    def _step_taken_among_all(self, members: AttachedParameters, task: int | None) -> None:
        """With a hook on every parameter."""
        if task != self._running.task:
            self._in_order = False
        if not (self._offer() and self._sink.arrive(members)):
            self._in_order &= self._leaves_all
            return
        self._arrived.update(members.indices)
        self._layout.observed.extend(members)
        self._layout.note_group(members)
        for index in members.indices:
            self._missing[self._layout.bucket_of[index]] -= 1
        if self._backwards.accepts_update(task):
            self._sink.apply_and_free(members)

    def _not_taken(self, members: AttachedParameters) -> AttachedParameters:
        taken = self.compiled.taken_in(graph_task())
        if taken.isdisjoint(members.indices):
            return members
        return AttachedParameters(attached for attached in members if attached.spec.index not in taken)

    @property
    def _leaves_all(self) -> bool:
        """A gradient was refused: whether so are all of this backward, which disturbs no order."""
        return self._sink.keeps_gradients or self._sink.only_adds or self._sink.measures

    # Where backward ends: one that may write, before DDP's own end; and, with one hook for each bucket, after it.

    def _end(self) -> None:
        self._offer()
        self._close()

    def _close(self) -> None:
        self._backwards.no_more()
        # Now, and not after DDP's own end, which may use what the side stream has written.
        self._sink.join()
        # An error before the end of a DDP instance in the same backward would leave the instance unusable.
        current().at(Phase.AFTER_DDP, self._sink.raise_failure, self._sink.backward_raised)

    def _offer_rest(self) -> None:
        """This backward is over: gradients whose bucket no hook has offered are left to ``optimizer.step()``, which
        counts them."""
        offered, trainable = self._running.offered, self._layout.trainable
        rest: list[AttachedParameter] = []
        if not offered.issuperset(trainable.indices):
            rest = [a for a in trainable if a.spec.index not in offered and self._earlier.has_changed(a)]
        self._forget()
        if rest:
            self._in_order = False
            self._sink.arrive(AttachedParameters(rest))

    def _forget(self) -> None:
        self._running = RunningBackward(None)
        self._earlier.end_backward()

    def _raised(self) -> None:
        # Those that have waited are offered first: the step is to know of every gradient that this backward has made.
        with suppress(InstepError):
            self._offer()
        self._sink.backward_raised()

    def disconnect(self) -> None:
        self._hooks.remove()
        self.compiled.stop()


def _as_accumulated(parameter: torch.Tensor, gradient: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
    """``gradient`` as autograd would have it in ``.grad``: strided as the parameter is, and of its gradients' dtype.

    Args:
        is_kept: whether somebody else steps it, later.
    """
    dtype = dtype_of_gradient(parameter)
    if gradient.stride() != parameter.stride() or gradient.dtype is not dtype:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(gradient)
    return gradient.clone() if is_kept else gradient


@dataclass(slots=True)
class RunningBackward:
    """The last backward that was seen to begin. The rest is known with one hook for each bucket, while it runs.

    Attributes:
        task: its number; ``None``: none runs.
        adds_up: whether it only adds to gradients.
        offered: those that it has offered, by index.
        prepared: by number of the bucket, from the first one on: the updates that only step.
    """

    task: int | None
    adds_up: bool = False
    offered: set[int] = field(default_factory=set)
    prepared: Sequence[PreparedUpdate | None] = ()


class EarlierGradients:
    """The gradients that are there when a backward begins, which adds to them.

    Zeros that nobody has looked at are nothing that a gradient is added to: they can be taken off until the backward is
    over. Of the others autograd counts the write. None is kept alive. With ``create_graph=True`` it puts another tensor
    in the place, which may have the same count: then it is taken for one that nothing was added to.

    Attributes:
        speakers: the parameters with a hook, one of each bucket.
        versions: of the gradients to which the backward adds, by the index of the parameter.
        zeroed: zeros, with their parameters.
    """

    def __init__(self) -> None:
        self.speakers = AttachedParameters()
        self.versions: dict[int, int] = {}
        self._of_speakers: list[int] = []
        self._silent: list[bool] = []  # of speakers: whether this backward has not called the hook yet
        self.zeroed: list[tuple[AttachedParameter, torch.Tensor]] = []
        self._taken_off: list[tuple[AttachedParameter, torch.Tensor]] = []

    def note(self, parameters: AttachedParameters) -> bool:
        """A backward begins. ``False``: the loop has not cleared a gradient of the step before, which was applied."""
        gradients = list(map(GRADIENT, parameters.tensors()))
        if none_there(gradients):  # as in most loops
            return True
        there = [(a, g) for a, g in zip(parameters, gradients, strict=True) if g is not None]
        added_to = {a.spec.index: g for a, g in there if not isinstance(g, Placeholder)}
        zeroed = [(a, g) for a, g in there if ZeroedGradient.is_unused(g)]
        if len(added_to) + len(zeroed) < len(there):
            return False
        self.zeroed = zeroed
        if added_to:
            self._of_speakers, self._silent = _writes(self.speakers), [True] * len(self.speakers)
            # Last: while there are none, nothing else is looked at. Ctrl-C may come before.
            self.versions = dict(zip(added_to, versions_of([*added_to.values()]), strict=True))
        return True

    def take_zeros_off(self) -> None:
        """Now that the end of the backward will be heard of, also where Ctrl-C ends it."""
        self._taken_off = self.zeroed
        for attached, _ in self.zeroed:
            attached.get().grad = None

    def have_come(self, speaker: int, parameters: AttachedParameters, gradients: Sequence[torch.Tensor]) -> bool:
        """The hook of the ``speaker`` of ``parameters`` is called. Whether the backward has given all of them their
        gradient, which are there. Not if a hook of the loop's writes gradients: one has changed then whose own hook is
        still to be called."""
        self._silent[self.speakers.indices.index(speaker)] = False
        then, now = compress(self._of_speakers, self._silent), compress(_writes(self.speakers), self._silent)
        return all(map(eq, then, now)) and not self._some_stay(parameters, gradients)

    def _some_stay(self, parameters: AttachedParameters, gradients: Sequence[torch.Tensor]) -> bool:
        return any(map(eq, map(self.versions.get, parameters.indices), versions_of(gradients)))

    def has_changed(self, attached: AttachedParameter) -> bool:
        """Whether the backward has given this parameter a gradient."""
        gradient = attached.get().grad
        return gradient is not None and not self._some_stay(AttachedParameters((attached,)), [gradient])

    def end_backward(self) -> None:
        """The backward is over: zeros to which nothing was added are there again."""
        self.versions.clear()
        self.zeroed = []
        zeroed, self._taken_off = self._taken_off, []
        for attached, gradient in zeroed:
            parameter = attached.peek()
            if parameter is not None and parameter.grad is None:
                parameter.grad = gradient


def _writes(parameters: AttachedParameters) -> list[int]:
    """How often the gradient of each was written; -1: it has none."""
    with torch._C.DisableTorchFunctionSubclass():  # instep's own question: some are watched by now
        gradients = list(map(GRADIENT, parameters.tensors()))
    versions = iter(versions_of([gradient for gradient in gradients if gradient is not None]))
    return [-1 if gradient is None else next(versions) for gradient in gradients]


_NOT_ASKED = (
    "it was compiled before attach() (torch.compiler.reset() has it compiled anew), by another backend than inductor, "
    "with hooks of backward on its modules, or with settings that rule it out"
)
_MANY = 1000
_REQUIRES_GRAD = attrgetter("requires_grad")
_IMPLEMENTATION = attrgetter("_cdata")  # which has no public name: tests/unit/test_swapped.py fails without it


class LocalLayout:
    """Which parameter is in which bucket: buckets of up to ``bucket_bytes``, and FSDP2's groups.

    Buckets first follow the model's order backwards; after the first step, the order in which gradients arrived.

    Attributes:
        trainable: the parameters that require a gradient.
        buckets: the plan.
        members: the parameters of each bucket.
        bucket_of: by index of a parameter: the number of its bucket. A parameter that was unfrozen within the running
            forward has none yet.
        by_id: these, by the parameter's ``id``.
        groups: those that compiled code hands over together.
        observed: the parameters whose gradients have arrived in this step, in that order.
        follows_observed: whether the buckets follow the order in which gradients arrived.
    """

    def __init__(self, parameters: Sequence[AttachedParameter], bucket_bytes: int | None) -> None:
        self.trainable = AttachedParameters()
        self.observed: list[AttachedParameter] = []
        self.follows_observed = False
        self._parameters = AttachedParameters(parameters)
        self._requires_grad: list[bool] = []  # as it was found for each parameter
        self._bucket_bytes = bucket_bytes
        self.groups: list[AttachedParameters] = []
        self._known: dict[tuple[int, ...], AttachedParameters] = {}
        self.by_id: dict[int, AttachedParameter] = {}
        self._fill([])

    def adopt(self, parameters: Sequence[AttachedParameter]) -> None:
        self._parameters = AttachedParameters((*self._parameters, *parameters))

    def refresh(self) -> bool:
        """Look for parameters that were frozen, unfrozen or taken in since the last call. Returns whether there are
        any: the buckets are new then."""
        requires_grad = list(map(_REQUIRES_GRAD, self._parameters.tensors()))
        if requires_grad == self._requires_grad:
            return False
        self._requires_grad = requires_grad
        self.trainable = AttachedParameters(compress(self._parameters, requires_grad))
        self.by_id = {id(attached.get()): attached for attached in self.trainable}
        self.groups, self._known = [], {}
        self.follows_observed = False
        self._fill(reversed(self.trainable))
        return True

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes or bucket_bytes_for(attached.spec for attached in self.trainable)

    def chosen(self, indices: tuple[int, ...]) -> AttachedParameters:
        """Those of ``trainable`` with these indices, in their order."""
        found = self._known.get(indices)
        if found is None:
            number = self.bucket_of[indices[0]]
            if self.members[number].indices == indices:  # which know more of themselves by now
                found = self.members[number]
            else:
                by_index = {attached.spec.index: attached for attached in self.trainable}
                found = AttachedParameters(by_index[index] for index in indices)
            if len(self._known) > _MANY:
                self._known.clear()
            self._known[indices] = found
        return found

    def note_group(self, members: AttachedParameters) -> None:
        """These were handed over together. They are to be a bucket, if none of them is in another group."""
        if not any(a in group for group in self.groups for a in members):
            self.groups.append(members)

    def regroup(self) -> bool:
        """Make buckets of the groups that were noted. Returns whether there are any new ones."""
        known = {bucket.indices for bucket in self.members}
        if all(group.indices in known for group in self.groups):
            return False
        self.follows_observed = False
        self._fill([*self.trainable])
        return True

    def follow_observed(self) -> None:
        """Lay out the buckets in the order in which the gradients of the last step have arrived."""
        seen = set(self.observed)
        self.follows_observed = True
        self._fill([*self.observed, *(a for a in reversed(self.trainable) if a not in seen)])

    @property
    def all_observed(self) -> bool:
        """Whether the buckets follow the order of arrival, and every gradient of this step has arrived."""
        return self.follows_observed and len(self.observed) == len(self.trainable)

    def _fill(self, order: Iterable[AttachedParameter]) -> None:
        attached = {a.spec.index: a for a in order}
        grouped = {index for group in self.groups for index in group.indices}
        specs = [a.spec for a in attached.values() if a.spec.index not in grouped]
        size, groups = self._bucket_bytes, [tuple(a.spec for a in group) for group in self.groups]
        self.buckets: tuple[Bucket, ...] = (
            *(Bucket("compiled", group) for group in groups),
            *(fill_buckets("local", specs, size) if size else default_buckets("local", specs)),
        )
        self._known.clear()
        self.members = [AttachedParameters(attached[s.index] for s in bucket.parameters) for bucket in self.buckets]
        self.bucket_of = {a.spec.index: number for number, members in enumerate(self.members) for a in members}


class GradientHooks:
    """The post-accumulate-grad hooks of a ``LocalSource``.

    Attributes:
        parameters: those with a hook, by index: a hook must not hold its parameter.
        tensors: the same.
        called_by: of each of these, by number: what it is to torch, which calls its hook. ``torch.utils.swap_tensors``
            puts another one in, without hooks.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, AttachedParameter] = {}
        self.tensors: list[torch.Tensor] = []
        self.called_by: list[int] = []
        self._called_by: dict[int, int] = {}  # by index, of each that has had a hook
        self._handles: list[RemovableHandle] = []

    def add(self, attached: AttachedParameter, hook: WeakHook) -> None:
        """Have ``hook`` called with the parameter whenever a backward has accumulated its gradient. For parameters
        without a hook."""
        parameter, index = attached.get(), attached.spec.index
        called_by = _IMPLEMENTATION(parameter)
        if self._called_by.setdefault(index, called_by) != called_by:
            # Python goes on to show a table of hooks that nobody calls, and would put this one there.
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # torch takes it
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self.parameters[index] = attached
        self.tensors.append(parameter)
        self.called_by.append(called_by)
        self._called_by[index] = called_by

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.parameters.clear()
        self.tensors.clear()
        self.called_by.clear()


class CompiledCode:
    """What compiled code hands over to ``source``. Nothing is asked of it before something is compiled.

    Attributes:
        why_not: why it is to hand nothing over; ``None``: it is to.
        handed_over: what it hands over; ``None``: nothing was compiled yet.
    """

    def __init__(self, source: LocalSource, why_not: str | None) -> None:
        self.why_not = why_not
        self.handed_over: HandedOver | None = None
        self._source = weakref.ref(source)

    def start(self) -> None:
        source = self._source()
        if self.why_not is None and self.handed_over is None and source is not None:
            self.handed_over = HandedOver(source)

    def before_compile(self) -> None:
        """torch.compile is about to compile something: perhaps the model."""
        self.start()
        open_for_compiling()

    @property
    def has_taken(self) -> bool:
        """Whether any code that there still is has handed something over."""
        return self.handed_over is not None and len(self.handed_over.has_taken_from) > 0

    def taken_in(self, task: int | None) -> set[int]:
        """Indices of the parameters whose gradients were taken in this backward."""
        handed = self.handed_over
        return handed.taken if handed is not None and handed.task == task else set()

    def stop(self) -> None:
        self.why_not = "it is detached"
        if self.handed_over is not None:
            self.handed_over.stop()


def _keep(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """The compiler wants the memory of those ``gradients`` that are still in ``.grad``, which nobody has stepped."""
    with torch._C.DisableTorchFunctionSubclass():  # some are watched by now, and this is no use of them
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is gradient:
                parameter.grad = gradient.clone()


class WritingBackwards:
    """Which backwards may write a step: the first one, and those nested in it by reentrant checkpointing.

    In a later backward gradients stay where they are: if it goes on to reach an applied parameter, that raises before
    anything of it was written, else ``optimizer.step()`` steps them.

    Args:
        end: called where a backward that may write ends, before DDP's own end.
        raised: called in place of ``end`` where such a backward raises.

    Attributes:
        open_in: the graph task of the backward that was last found to be one that may write; ``None``: none runs.
    """

    def __init__(self, end: Callable[[], None], raised: Callable[[], None]) -> None:
        self.open_in: int | None = None
        self._end = end
        self._raised = raised
        self._running: set[int] = set()
        self._late: set[int] = set()
        self._ended = False

    def begin_step(self) -> None:
        """The next backward may write."""
        self.open_in = None
        self._running.clear()
        self._late.clear()
        self._ended = False

    def accepts_update(self, task: int | None) -> bool:
        """Whether the running backward, whose ``graph_task`` this is, may write. If so, its end is asked for."""
        if task is None or task in self._late:
            return False
        if task not in self._running:
            if self._ended and not self._running:
                self._late.add(task)
                return False
            self._running.add(task)
            current().at(
                Phase.BEFORE_DDP, partial(self._leave, task, self._end), partial(self._leave, task, self._raised)
            )
        self.open_in = task
        return True

    def no_more(self) -> None:
        """No backward after the running ones may write this step."""
        self._ended = True

    def _leave(self, task: int, then: Callable[[], None]) -> None:
        self._running.discard(task)
        self.open_in = None
        then()


class FSDP2Gradients:
    """What FSDP2's gradients have of their own: some are not final where their hook is called, but where backward ends.

    FSDP2 reduces a group once for each of its forwards: with several forwards a gradient comes in several parts, and
    the sum is final at the end. So are gradients that FSDP2 copies to the host while backward goes on. Both are
    collected here, and stepped together.

    Args:
        applied: told of a parameter of each bucket that was applied before that.
        closed: called at the end of backward, once the late ones were stepped.
    """

    def __init__(
        self, sink: Sink, uses: "ForwardCounts", applied: Callable[[torch.Tensor], None], closed: Callable[[], None]
    ) -> None:
        self._applied = applied
        self._sink = sink
        self._uses = uses
        self._closed = closed
        self._gradients: dict[int, AttachedParameter] = {}

    def takes(self, attached: AttachedParameter) -> bool:
        """Whether the gradient that has just arrived is a late one, or a part of one: then it is taken in."""
        if not self._uses.several(attached.spec.group):
            # FSDP2's ``CPUOffloadPolicy`` copies a gradient to the host beside what the host does. It waits for that
            # where backward ends; in a torch before 2.13 or so for hooks of its parameters, too.
            gradient = attached.get().grad
            if gradient is None or not is_pinned(gradient):
                return False
        if not self._gradients:
            # FSDP2 has asked for the end of this backward before its first gradient, so that its own end comes first.
            current().at(Phase.BEFORE_DDP, self._step, self._drop)
        self._gradients[attached.spec.index] = attached
        return True

    def applied(self, parameter: torch.Tensor) -> None:
        """A bucket was applied in backward, which ``parameter`` is in. ``undo`` keeps its gradients, and has to find
        them unused: so they are not asked for by ``gradient_of``."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
        if gradient is None or (isinstance(gradient, Placeholder) and not isinstance(gradient, HeldGradient)):
            self._applied(parameter)

    def _step(self) -> None:
        gradients = AttachedParameters(self._gradients.values())
        self._gradients.clear()
        deliver(self._sink, gradients, partial(self._sink.apply_and_free, gradients))
        self._closed()

    def _drop(self) -> None:
        self._gradients.clear()
        self._sink.backward_raised()


class ForwardCounts:
    """How often each of FSDP2's groups has run forward since the last backward. FSDP2 reduces a group's gradients once
    for each forward, so that in one backward they come in several parts, between which FSDP2 gathers the weights again.
    """

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()

    def ran(self, group: int) -> None:
        self._counts[group] += 1

    def several(self, group: int | None) -> bool:
        return self._counts[group] > 1

    def clear(self) -> None:
        self._counts.clear()
