"""A foreign optimizer is judged by its first real updates: taken in parts, each put back, and then as a whole.

Nobody knows what an update that is not torch's own couples. A norm over all parameters, a counter, a draw, the weights
of a neighbour: stepped bucket by bucket, the numbers would be others. So the first two updates of such an optimizer
are left to ``optimizer.step()``, which takes them as in the plain loop. Right before it, parts are stepped alone, by
the same object that steps buckets later; what each part has become is kept as a digest, and the part is put back. In
the first update each parameter is a part, in the order of the groups, and in the second each bucket. When ``step()``
has returned, the digests are compared with what it has made of the same parameters. Memory: one part, beside the
gradients, which are all there, as in the plain loop.

Equal: from the third step on buckets are stepped in backward. Not equal: every step is left to ``optimizer.step()``,
which is right, and saves nothing; the log says so once, with the road that the coupling takes. An optimizer that keeps
what nobody can put back (a counter in a closure, a generator of a module) is told by a part that comes out differently
when it is stepped twice: then an error is raised, before anything of the step is written.

A parameter that gets its first gradient later is left once, and compared. Where more parameters require a gradient than
before (a layer was unfrozen, a group added), all begins anew: one alone shows no coupling.

A coupling may begin later: so of every ``EVERY``-th step two buckets are left to ``optimizer.step()``, other ones each
time, and compared in the same way.

Where nobody takes a step as a whole (``random="keyed"``, ``offload``, ``shard_state``), each part is compared with
itself stepped together with the next one. With keys parts are parameters, as each update then is of one.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.contents import Kept, copy_of, digest_of, digest_of_value, is_back, restore
from instep._optim.kinds import STEPPED_WHOLE
from instep._optim.own_object import WRITES_UNSEEN, Beside, OwnObject, in_functions, reached_by, tables_in
from instep._optim.parameters import AttachedParameter, AttachedParameters, calls_of
from instep._optim.random_numbers import Generators
from instep._optim.shadow import parameters_of
from instep._optim.stepper import Stepper
from instep._optim.undo import BeforeUpdate, KeptByParameter
from instep._optim.values import values_differ
from instep._step.state import gradient_of
from instep._torch.engine import listen
from instep._torch.hooks import has_global_step_hooks
from instep._torch.versions import memory_of
from instep.errors import UnsupportedOptimizerError

_logger = logging.getLogger("instep")

FIRST = 2
"""Updates that are compared as a whole."""
EVERY = 50
"""Of each so many-th step after them two buckets are compared."""

_Digest = tuple[Any, Any]
_IN_SHORT = 160
_WRITES_REACHED = "its step() writes parameters that its groups do not hold, or their gradients"
_READS_REACHED = "its step() reads parameters that it was not given, to which its attributes or methods refer"
_HOOKS = "step hooks are registered for all optimizers: where it calls super().step(), they would run once per part"


class _Compiles:
    """Whether torch.compile has begun to trace something since."""

    def __init__(self) -> None:
        self.any = False
        listen(self)

    def before_compile(self) -> None:
        self.any = True


class _Reached:
    """The parameters to which an optimizer refers otherwise than by the groups of a part, kept once for all parts: it
    may refer to all that it has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.tensors = reached_by(optimizer)
        self._kept = {id(t): (BeforeUpdate(optimizer, [t]), self._look_at(t)) for t in self.tensors}

    def _look_at(self, tensor: torch.Tensor) -> Any:
        return *_digest(self._optimizer, tensor), None if tensor.grad is None else digest_of(tensor.grad)

    def put_back(self, among: Iterable[torch.Tensor]) -> bool:
        """Whether one of ``among`` was written, its state or its gradient."""
        written = False
        for tensor in among:
            if id(tensor) in self._kept:
                kept, then = self._kept[id(tensor)]
                now = self._look_at(tensor)
                if now == then:
                    continue
                kept.put_back()
                # An entry that was none: some make the state of all in the first step.
                written |= now[::2] != then[::2] or then[1] is not None
        return written

    def change(self, among: Iterable[torch.Tensor]) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for tensor in among:
                if id(tensor) in self._kept:
                    memory_of(tensor).add_(1)


class PartsOfUpdate:
    """One real update of an optimizer, and beside it each part of it.

    Args:
        parts: of the parameters that the update is to step.

    Attributes:
        reason: why parts come out otherwise than the whole, in words; ``None``: nothing is known to.
        counts: whether parts were compared.
    """

    def __init__(self, stepper: Stepper, parts: Sequence[AttachedParameters]) -> None:
        self.reason: str | None = None
        self.counts = True
        self._stepper = stepper
        self._optimizer = stepper.optimizer()
        self._parts = parts
        self._digests: dict[AttachedParameter, _Digest] = {}
        self._before: dict[int, Any] = {}
        self._is_foreign = stepper.is_foreign
        self._reached: _Reached | None = None
        self._unseen: list[tuple[torch.Tensor, Kept]] = []  # averages in a module, say: copied once, not for each part
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of parameters and buffers, in modules
        self._by_parameter: KeptByParameter | None = None
        self._held: Any = None  # a digest of what the optimizer holds beside
        self._beside: Beside | None = None

    # Before the update.

    def take(self, *, twice: bool, is_warm: bool, in_pairs: bool) -> None:
        """Step each part alone, and put it back.

        Args:
            twice: each of them, to see that it comes out the same.
            is_warm: whether all that the update compiles was compiled by an earlier one.
            in_pairs: compare each part with itself stepped together with the next one.

        Raises:
            UnsupportedOptimizerError: it keeps what cannot be put back. Nothing of the step is written.
        """
        optimizer = self._optimizer
        # Versions do not tell: what is written through ``.data`` counts nothing.
        self._before = {id(p): digest_of(p) for p in parameters_of(optimizer)}
        compiles = _Compiles()
        try:
            # Asked first: a part may move on what cannot be put back, a Python generator, say.
            self.reason = _HOOKS if has_global_step_hooks() else self._stepper.begin_parts()
            if self.reason is None:
                self._look_beside()
            for part in self._parts if self.reason is None else ():
                try:
                    self._take_part(part, twice=twice)
                except TypeError as error:  # of a tensor of a class that tells nobody what it holds
                    self.reason = self.reason or f"what it keeps of {_names(part)} could not be put back ({error})"
                if compiles.any and self.reason is None:
                    self._meet_compiler(is_warm)
                if self.reason is not None or not self.counts:
                    break
            if twice and self.reason is None and self.counts:
                self._look_at_reads()
            if in_pairs and self.reason is None and self.counts:
                self._compare_pairs()
        finally:
            self._put_beside_back()
            self._beside = self._stepper.end_parts()
        if written := self._written(list(parameters_of(optimizer))):
            self._raise_written(written)

    @property
    def _own(self) -> OwnObject:
        own = self._stepper.own_object
        assert own is not None, "torch's own are not judged"
        return own

    def _look_beside(self) -> None:
        others = (*self._own.beside.unseen, *in_functions(self._optimizer)) if self._is_foreign else ()
        tensors = {id(t): t for t in others}
        try:
            self._unseen = [(tensor, copy_of(tensor, host=False)) for tensor in tensors.values()]
            self._tables = [(table, dict(table)) for table in tables_in(self._optimizer)]
            self._by_parameter = KeptByParameter(self._optimizer)
            self._reached = _Reached(self._optimizer) if self._is_foreign else None
            self._held = self._own.beside.digest()
        except (TypeError, RecursionError) as error:
            self.reason = f"what it refers to could not be put back ({in_short(error)})"

    def _put_beside_back(self) -> None:
        """Put back what parts have moved that is not looked into after each of them. By what tensors hold, not by their
        versions: averages are often written through ``.data``."""
        for table, before in self._tables:
            if table.keys() != before.keys() or not all(table[name] is before[name] for name in before):
                table.clear()
                table.update(before)
                self.reason = self.reason or WRITES_UNSEEN
        for tensor, kept in self._unseen:
            if not is_back(tensor, kept):
                restore(tensor, kept)
                self.reason = self.reason or WRITES_UNSEEN
        if self._reached is not None and self._reached.put_back(self._reached.tensors):
            self.reason = self.reason or _WRITES_REACHED
        if self._held is not None and self._own.beside.digest() != self._held:
            self._own.beside.put_all_back()
            if self._by_parameter is not None:
                self._by_parameter.restore()
            self.reason = self.reason or "its step() changes what instep does not look into for each bucket"
            if self._own.beside.digest() != self._held:
                raise self._moved_on("what its attributes hold")

    def _meet_compiler(self, is_warm: bool) -> None:
        # What is compiled for one parameter is compiled by now, where the loop has come to it. What is compiled for a
        # list of them would be compiled for each bucket anew, and left uncompiled beyond torch's limit.
        if is_warm:
            self.reason = "its update is compiled (torch.compile) anew for each choice of parameters"
        else:
            self.counts = False  # the loop's own update is to be the first that compiles: this one is not compared

    def _take_part(self, part: AttachedParameters, *, twice: bool) -> None:
        optimizer, tensors = self._optimizer, part.tensors()
        if self._reached is not None and self._reached.put_back(tensors):
            self.reason = _WRITES_REACHED
            return
        kept = BeforeUpdate(optimizer, tensors)
        try:
            returned = self._step(part)
            digests = [_digest(optimizer, tensor) for tensor in tensors]
            kept.put_back()
            if self.reason is None and twice:
                self._require_same_again(part, digests, kept)
                kept.put_back()
            if self.reason is None and self._is_foreign:
                self._step_without_gradient(part, returned)
        finally:
            kept.put_back()
        self._digests.update(zip(part, digests, strict=True))

    def _step(self, part: AttachedParameters, *, notes: bool = True) -> Any:
        """Returns what the update returns."""
        gradients = [g for a in part if (g := gradient_of(a)) is not None]
        generators = Generators({part[0].spec.device}, [self._optimizer])
        returned, name = None, self._stepper.name
        try:
            for call in calls_of(part, gradients, alias=False):
                returned = self._stepper.step_part(call.tensors, call.parameters, notes=notes)
        except UnsupportedOptimizerError as error:
            # What it has written there is put back, with all parts.
            why = str(error).removesuffix(f". {STEPPED_WHOLE}").removeprefix(f"{name} ")
            self.reason = self.reason or (WRITES_UNSEEN if self._stepper.wrote_in_place else why)
        except Exception as error:
            raised = f"its step() raises on {_names(part)} alone ({in_short(error)})"
            self.reason = _no_dict(self._optimizer, part) or raised
        finally:
            if generators.drawn() == "yes":
                generators.restore()
                self.reason = "it draws random numbers in step()"
        return returned

    def _require_same_again(self, part: AttachedParameters, digests: Sequence[_Digest], kept: BeforeUpdate) -> None:
        self._step(part)
        again = [_digest(self._optimizer, tensor) for tensor in part.tensors()]
        if again != digests:
            kept.put_back()
            self._put_beside_back()  # what the second has read
        if self.reason is None and again != digests:
            name = next(a.spec.name for a, one, two in zip(part, digests, again, strict=True) if one != two)
            raise self._moved_on(repr(name))

    def _look_at_reads(self) -> None:
        """In backward some of the parameters to which it refers are stepped before a part, and in the whole update
        after it: a part comes out as it did while all others are changed."""
        reached = self._reached
        if reached is None or not reached.tensors:
            return
        try:
            reached.change(reached.tensors)
            for part in self._parts if self.reason is None else ():
                tensors = part.tensors()
                reached.put_back(tensors)
                kept = BeforeUpdate(self._optimizer, tensors)
                try:
                    self._step(part, notes=False)
                    found = [_digest(self._optimizer, tensor) for tensor in tensors]
                finally:
                    kept.put_back()
                if self.reason is None and found != [self._digests[attached] for attached in part]:
                    self.reason = _READS_REACHED
                reached.change(tensors)
        finally:
            reached.put_back(reached.tensors)

    def _moved_on(self, what: str) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"{self._stepper.name}.step() gives {what} other values when the same step is taken again: it keeps "
            "something that instep does not find, and cannot put back, such as a counter outside of its attributes "
            "or a generator of its module. Nothing of this step was written, but what it keeps has moved: make the "
            f"optimizer anew. {STEPPED_WHOLE}"
        )

    def _step_without_gradient(self, part: AttachedParameters, returned: Any) -> None:
        """After backward ``step()`` finds no gradient: it must leave all as it is, and return the same."""
        tensors = part.tensors()
        gradients = [tensor.grad for tensor in tensors]
        before = [_digest(self._optimizer, tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
        try:
            nothing = self._stepper.step_part(tensors, tensors, notes=False)
        except Exception as error:
            self.reason = f"its step() raises when no parameter has a gradient ({in_short(error)})"
            return
        finally:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
        after = [_digest(self._optimizer, tensor) for tensor in tensors]
        # Of a weight that is written with what it holds (clamped, say) autograd is told nevertheless.
        if self._own.wrote or any(_has_moved(*pair) for pair in zip(before, after, strict=True)):
            self.reason = f"its step() changes parameters that have no gradient, or their state ({_names(part)})"
        elif values_differ(nothing, returned):
            self.reason = "its step() returns a value that depends on what it updates"

    def _compare_pairs(self) -> None:
        """Nobody takes the step as a whole: the first of two that are stepped together comes out as by itself. Where
        updates draw by the key of the first, only that one does."""
        for one, other in zip(self._parts, self._parts[1:], strict=False):
            kept = BeforeUpdate(self._optimizer, [*one.tensors(), *other.tensors()])
            try:
                self._step(AttachedParameters((*one, *other)), notes=False)
                found = [_digest(self._optimizer, tensor) for tensor in one.tensors()]
            finally:
                kept.put_back()
            if self.reason is None and found != [self._digests[attached] for attached in one]:
                self.reason = f"parameter {one.names[0]!r} gets other values together with {other.names[0]!r}"
            if self.reason is not None:
                return

    def _written(self, tensors: Sequence[torch.Tensor]) -> int:
        """How many of these are not as they were before all parts."""
        return sum(digest_of(tensor) != self._before.get(id(tensor)) for tensor in tensors)

    def _raise_written(self, written: int) -> None:
        raise UnsupportedOptimizerError(
            f"{self._stepper.name}.step() writes {written} parameters, too, where its groups hold others alone: "
            "it keeps parameters elsewhere. They were written, and cannot be put back: load a checkpoint. "
            f"{STEPPED_WHOLE}"
        )

    # After it.

    def only_counts(self) -> None:
        """The parts were compared with each other: there is no whole to compare them with."""
        self._digests.clear()
        self._beside = None

    @property
    def indices(self) -> list[int]:
        """Of the parameters of all parts."""
        return [index for part in self._parts for index in part.indices]

    def compare(self) -> str | None:
        """``step()`` has returned. Why parts differ from what it has made of them, in words; ``None``: they do not."""
        if self.reason is not None or not self.counts:
            return self.reason
        for attached, digest in self._digests.items():
            try:
                whole = _digest(self._optimizer, attached.get())
            except TypeError as error:
                return f"what it keeps of {attached.spec.name!r} could not be put back ({error})"
            if whole != digest:
                what = "other values" if whole[0] != digest[0] else "another state"
                return f"parameter {attached.spec.name!r} gets {what} when it is stepped without the others"
        differs = None if self._beside is None else self._beside.differs()
        return None if differs is None else f"its {differs} depends on which parameters step together"


def _digest(optimizer: Optimizer, parameter: torch.Tensor) -> _Digest:
    entry = optimizer.state.get(parameter)
    return digest_of(parameter), digest_of_value(entry) if entry else None


def _has_moved(before: _Digest, after: _Digest) -> bool:
    # An entry that was none: a look at ``state[p]`` makes an empty one, and some make all state in the first step.
    return before[0] != after[0] or (before[1] is not None and before[1] != after[1])


def _no_dict(optimizer: Optimizer, part: AttachedParameters) -> str | None:
    """In words, where the state of one of these is no mapping, of which nobody could say whether it was written."""
    kinds = (type(optimizer.state.get(tensor, {})) for tensor in part.tensors())
    found = next((kind for kind in kinds if not issubclass(kind, Mapping)), None)
    return None if found is None else f"it keeps the state of a parameter as a {found.__name__}"


def _names(part: AttachedParameters) -> str:
    return repr(part.names[0]) if len(part) == 1 else f"{part.names[0]!r} and {len(part) - 1} others"


def in_short(error: BaseException) -> str:
    """The error's class and the beginning of its message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_IN_SHORT]}" if text else type(error).__name__


# The updates that are judged, of all optimizers of one attachment.


class _Met:
    """What was there to be compared.

    Attributes:
        unproved: the optimizers that are compared.
        compared: parameters, by their indices.
        requiring: those that required a gradient when all began.
    """

    def __init__(self) -> None:
        self.unproved: set[Stepper] = set()
        self.compared: set[int] = set()
        self.requiring: set[int] = set()

    def is_new(self, bucket: AttachedParameters) -> bool:
        """Whether a parameter in it was never compared."""
        return not self.unproved.isdisjoint(bucket.steppers) and not self.compared.issuperset(bucket.indices)


class Judge:
    """Judges the first updates of each foreign optimizer of an attachment, and parts of later ones.

    Args:
        steppers: of all optimizers.
        in_parts: whether buckets are stepped in backward.

    Attributes:
        verdict: why every step is left to ``optimizer.step()``; ``None``: buckets are stepped.
        leaves_all: whether all of the running step is left to ``optimizer.step()``.
        has_compared: whether parts of the last step were compared: on another rank they may have been found to differ.
        due: of each foreign optimizer, how many updates are still to be compared.
    """

    def __init__(self, steppers: Sequence[Stepper], *, in_parts: bool) -> None:
        self.verdict: str | None = None
        self._in_parts = in_parts
        self.due: dict[Stepper, int] = {}
        self.leaves_all = False
        self._running: dict[Stepper, PartsOfUpdate] = {}
        self._has_begun: set[Stepper] = set()  # to be judged: its first update was compared, one by one
        self._is_warm: set[Stepper] = set()  # those that have taken a step
        self._met = _Met()
        self._meets_new = False  # whether a bucket of the running step is left that was never compared
        self._apart: list[Sequence[int]] = []  # buckets of the running step that are left, to be compared
        self._steps_others = False  # whether backward steps other ones of it
        self._objects = False
        self.has_compared = self._compared = False
        for stepper in steppers:
            if stepper.is_foreign:
                self.meet(stepper)

    # In backward.

    def meet(self, stepper: Stepper) -> None:
        """An optimizer is foreign."""
        self.due[stepper] = 0 if stepper.is_proved else FIRST
        if self.due[stepper]:
            self._met.unproved.add(stepper)
        self.leaves_all = self.verdict is not None or (self._in_parts and any(self.due.values()))

    def look(self, every: Iterable[AttachedParameter]) -> None:
        """A forward begins."""
        if self.verdict is not None or not self._met.unproved or not self._in_parts:
            return
        requiring = {a.spec.index for a in every if a.get().requires_grad}
        if not requiring <= self._met.requiring:
            self._met.requiring |= requiring
            for stepper in self._met.unproved:
                self.due[stepper] = FIRST
                self._has_begun.discard(stepper)
            self.leaves_all = True

    def step_opens(self, number: int, buckets: Iterable[Sequence[int]]) -> None:
        """The first final gradient of step ``number`` has come.

        Args:
            buckets: those of the plan, by the indices of their parameters. Those that backward steps may be others, and
                come in another order on each rank: the ranks must leave the same.
        """
        self._apart, self._steps_others, self._meets_new = [], False, False
        for stepper in self.due if self.verdict is None else ():
            if has_global_step_hooks():
                self._objects = True
                self.object(f"{stepper.name}: {_HOOKS}")
        if number % EVERY == 0 and len(every := [*buckets]) > 1:
            first = number // EVERY % (len(every) - 1)
            self._apart = every[first : first + 2]

    def leaves(self, bucket: AttachedParameters) -> bool:
        """Whether this bucket is left to ``optimizer.step()``, to be compared."""
        if self.leaves_all:  # since this step began
            return True
        if not any(stepper.is_foreign for stepper in bucket.steppers):
            return False
        is_new = self._met.is_new(bucket)
        self._meets_new |= is_new
        leaves = is_new or not all(map(set(bucket.indices).isdisjoint, self._apart))
        self._steps_others |= not leaves
        return leaves

    # Around ``optimizer.step()``.

    def before_update(
        self, stepper: Stepper, left: Iterable[AttachedParameter], buckets: Iterable[Sequence[int]]
    ) -> None:
        """``step()`` is about to update all of ``left`` that have a gradient.

        Args:
            buckets: those of the plan, by the indices of their parameters.

        Raises:
            UnsupportedOptimizerError: the optimizer keeps what cannot be put back, or, where nobody but instep can take
                its steps, couples parameters. Nothing of the step is written.
        """
        if self.verdict is not None or not (self.due.get(stepper) or self._apart or self._meets_new):
            return
        there = [a for a in left if gradient_of(a) is not None and (a.shard is None or a.shard.is_owner)]
        is_first = bool(self.due.get(stepper)) and stepper not in self._has_begun
        # With keys each update is of one parameter: stepped together, the second would draw by the key of the first.
        by_one = is_first or stepper.keyed is not None
        of_plan = buckets if self._meets_new or not self._apart else self._apart
        parts = _one_by_one(stepper, there) if by_one else in_buckets(there, of_plan)
        if not parts:
            return
        in_pairs = stepper.steps_every_parameter or any(a.is_divided for a in there)
        running = PartsOfUpdate(stepper, parts)
        running.take(
            twice=bool(self.due.get(stepper)) and stepper.is_foreign,
            is_warm=stepper in self._is_warm,
            in_pairs=in_pairs,
        )
        if in_pairs and running.reason is not None:
            raise UnsupportedOptimizerError(f"{stepper.name}: {running.reason}. {STEPPED_WHOLE}")
        if in_pairs:
            running.only_counts()
        self._running[stepper] = running

    def after_update(self, stepper: Stepper) -> UnsupportedOptimizerError | None:
        """``step()`` has returned. The error that tears the step, where a part of it was taken in backward, and should
        not have been."""
        self._is_warm.add(stepper)
        running = self._running.pop(stepper, None)
        if running is None:
            return None
        self._compared = True
        if (reason := running.compare()) is not None:
            self.object(f"{stepper.name}: {reason}")
            self._objects = True
            if self._steps_others:
                return UnsupportedOptimizerError(
                    f"{stepper.name} has begun to couple parameters: {reason}. Backward had stepped the other buckets "
                    f"of this step. Load a checkpoint. {STEPPED_WHOLE}"
                )
        elif running.counts:
            stepper.came_out_alike()
            self._met.compared.update(running.indices)
            self._has_begun.add(stepper)
            self.due[stepper] = max(0, self.due.get(stepper, 0) - 1)
            self.leaves_all = self._in_parts and any(self.due.values())
        return None

    def committed(self) -> bool:
        """A step stands. Whether this rank has found in it that steps must be left whole, which the others are to
        know."""
        objects, self._objects = self._objects, False
        self.has_compared, self._compared = self._compared, False
        return objects

    def object(self, reason: str) -> None:
        """From now on every step is left to ``optimizer.step()``."""
        if self.verdict is None:
            self.verdict, self.leaves_all = reason, True
            _logger.warning(
                "%s. Every step is left to optimizer.step(), as in the plain loop: the numbers are right, and no "
                "gradient is freed in backward",
                reason,
            )

    def forget(self) -> None:
        """The running step was none, or is given up."""
        self._running.clear()
        self._apart, self._steps_others, self._meets_new = [], False, False

    def __str__(self) -> str:
        if self.verdict is not None:
            return f"left to optimizer.step(): {self.verdict}"
        due = max(self.due.values(), default=0) if self._in_parts else 0
        names = " and ".join(stepper.name for stepper, left in self.due.items() if left)
        return (
            f"{names}: the next {due} steps are taken in optimizer.step(), and compared with their parts" if due else ""
        )


def in_buckets(there: Sequence[AttachedParameter], buckets: Iterable[Sequence[int]]) -> list[AttachedParameters]:
    """``there`` in the buckets of the plan, which are given by the indices of their parameters."""
    by_index = {attached.spec.index: attached for attached in there}
    found = [AttachedParameters(by_index.pop(i) for i in bucket if i in by_index) for bucket in buckets]
    return _filled([*found, AttachedParameters(by_index.values())])


def _filled(parts: Iterable[AttachedParameters]) -> list[AttachedParameters]:
    return [part for part in parts if part]


def _one_by_one(stepper: Stepper, there: Iterable[AttachedParameter]) -> list[AttachedParameters]:
    """Each parameter by itself, in the order of the groups: what an update compiles is compiled in that order."""
    by_id = {id(attached.get()): attached for attached in there}
    found = (by_id.get(id(parameter)) for parameter in parameters_of(stepper.optimizer()))
    return [AttachedParameters((attached,)) for attached in found if attached is not None]
