"""One real update of a foreign optimizer, and beside it each part of it: stepped alone by the same object, put back.

A part finds what a bucket will find in backward: no other parameter has a gradient, and none may be used. It is taken

- once: digests of what becomes of its parameters are kept, to be compared with what the whole update makes of them;
- then without its gradient: ``step()`` after backward must change nothing; nor must a step of the next part;
- again, while every other parameter, its state, and what is kept by it are disturbed: in backward some of them are
  stepped before this part, and in the whole update after it. If it comes out otherwise, and otherwise still when they
  are as they were, something moves that nobody can put back.

Memory: two parts, and what the optimizer refers to beside its groups.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.belongings import kept_of, mappings_of, mappings_with
from instep._optim.beside import WRITES_UNSEEN, Beside
from instep._optim.contents import Kept, copy_of, digest_of, digest_of_value, disturb, is_back, restore
from instep._optim.dtensor import is_sharded
from instep._optim.kinds import STEPPED_WHOLE, read_by_update
from instep._optim.own_object import OwnObject
from instep._optim.parameters import AttachedParameter, AttachedParameters, calls_of
from instep._optim.random_numbers import Generators
from instep._optim.reached import Tables, in_functions
from instep._optim.shadow import parameters_of
from instep._optim.stepper import Stepper
from instep._optim.undo import BeforeUpdate, KeptByParameter
from instep._optim.values import address_of, held_in, is_immutable, is_of_torch, reachable_values
from instep._ranks.process_groups import count_of_collectives
from instep._step.state import gradient_of
from instep._torch.engine import count_of_runs, listen
from instep._torch.hooks import has_global_step_hooks
from instep._torch.versions import memory_of
from instep._torch.watch import Watch
from instep.errors import InstepError, UnsupportedOptimizerError

_IN_SHORT = 160
_USES_OTHERS = "its step() uses parameters that it was not given (an average of the weights?), or what belongs to them"
HOOKS = "step hooks are registered for all optimizers: where it calls super().step(), they would run once per part"
_DRAWS = "it draws random numbers in step()"
_COMMUNICATES = "its step() communicates with other ranks, which step their buckets in another order"
_CHANGES_RESTING = "its step() changes parameters that have no gradient, where others have one"
_RUNS_BACKWARD = "its step() runs a backward of its own"


class Digest(NamedTuple):
    """Of what belongs to one parameter.

    Attributes:
        values: of the parameter.
        state: ``None``: there is none.
        elsewhere: of what the optimizer keeps by it in attributes, and of the parameter's own attributes.
    """

    values: Any
    state: Any
    elsewhere: Any


class _Belongings:
    """What belongs to single parameters of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.mappings = mappings_of(optimizer)

    def digest(self, parameter: torch.Tensor) -> Digest:
        entry, elsewhere = self._optimizer.state.get(parameter), kept_of(parameter, self.mappings)
        is_empty = entry is None or (isinstance(entry, Mapping) and not entry)
        return Digest(
            digest_of(parameter),
            None if is_empty else digest_of_value(entry),
            digest_of_value(elsewhere) if elsewhere else None,
        )

    def tensors(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parameter, and what belongs to it."""
        yield parameter
        kept = kept_of(parameter, self.mappings).values()
        yield from held_in([self._optimizer.state.get(parameter), *kept], torch.Tensor)

    def numbers(self, parameter: torch.Tensor) -> Iterator[tuple[MutableMapping[Any, Any], Any, Any]]:
        """Python's numbers among it: where each is, under which key, and which."""
        held: list[tuple[MutableMapping[Any, Any], Any]] = [
            (mapping, parameter) for mapping in mappings_with(parameter, self.mappings)
        ]
        for mapping in (self._optimizer.state.get(parameter), vars(parameter)):
            if isinstance(mapping, MutableMapping):
                held += ((mapping, key) for key in mapping if isinstance(key, str))
        yield from ((mapping, key, mapping[key]) for mapping, key in held if isinstance(mapping[key], (int, float)))


class _Gradients:
    """The gradients of all parameters, of which a part finds its own alone."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._of = {id(p): (p, p.grad) for p in parameters}

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for parameter, _ in self._of.values()]

    def with_some(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that have one."""
        return [p for p in parameters if self._of.get(id(p), (p, None))[1] is not None]

    def without(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that have none."""
        return [p for p in parameters if self._of.get(id(p), (p, None))[1] is None]

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                parameter.grad = None

    def show(self, parameters: Iterable[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                parameter.grad = self._of[id(parameter)][1]

    def give_back(self) -> None:
        """All of them."""
        self.show(self.parameters)
        self._of.clear()


_OF_THE_SHAPE = frozenset(
    [torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like]
    + [getattr(torch.Tensor, name) for name in ("new_zeros", "new_ones", "new_empty", "new_full")]
)


class _TouchedError(InstepError):
    """A part was about to use a parameter that it was not given."""


class _Untouched:
    """All parameters but those of a part: who uses one, or its gradient, on this thread, is stopped before."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.were_touched = False
        self._thread = threading.get_ident()
        self._watch = Watch(values=self._touched, gradient=self._touched)
        self._parameters = self._watched(parameters)
        self._watch.start(self._parameters)

    @staticmethod
    def _watched(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Of a class with values of its own torch does not tell who uses them."""
        return [p for p in parameters if not hasattr(type(p), "__tensor_flatten__")]

    def _touched(self, parameter: torch.Tensor, function: Any) -> None:
        # Another thread may evaluate the model meanwhile; and some make the state of all in their first step.
        if threading.get_ident() == self._thread and function not in _OF_THE_SHAPE:
            self.were_touched = True
            raise _TouchedError("parameters that step() was not given")

    @contextmanager
    def but(self, part: Sequence[torch.Tensor]) -> Iterator[None]:
        some = self._watched(part)
        self._watch.stop(some)
        try:
            yield
        finally:
            self._watch.start(some)

    def rest(self) -> None:
        self._watch.stop(self._parameters)


class _Others:
    """Disturbs all parameters but those of a part, with what belongs to them. What belongs to several stays.

    Args:
        optimizers: of all parameters, each with what belongs to its own.
    """

    def __init__(self, optimizers: Iterable[tuple[Iterable[torch.Tensor], _Belongings]]) -> None:
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self._numbers: dict[int, list[tuple[MutableMapping[Any, Any], Any, Any]]] = {}
        self._disturbed: set[int] = set()
        owners: dict[int, set[int]] = {}
        for parameters, belongings in optimizers:
            for parameter in parameters:
                tensors = [memory_of(t) for t in belongings.tensors(parameter) if not t.is_inference()]
                self._tensors[id(parameter)] = list({id(t): t for t in tensors}.values())
                self._numbers[id(parameter)] = list(belongings.numbers(parameter))
                for tensor in tensors:
                    owners.setdefault(address_of(tensor) or -id(tensor), set()).add(id(parameter))
        for key, tensors in self._tensors.items():
            self._tensors[key] = [t for t in tensors if len(owners[address_of(t) or -id(t)]) == 1]

    def set_apart(self, part: Iterable[torch.Tensor]) -> None:
        """All but ``part`` are disturbed."""
        self._turn(self._disturbed ^ (self._tensors.keys() - set(map(id, part))))

    def rest(self) -> None:
        """None is disturbed."""
        self._turn(set(self._disturbed))

    def _turn(self, keys: Iterable[int]) -> None:
        for key in keys:
            for tensor in self._tensors[key]:
                disturb(tensor)
            for mapping, name, number in self._numbers[key]:
                mapping[name] = number if key in self._disturbed else number + 1
            self._disturbed ^= {key}


class _Around:
    """What an optimizer refers to that is no parameter, as it is before all parts: copied once."""

    def __init__(self, optimizer: Optimizer, beside: Beside) -> None:
        self.beside = beside
        tensors = {id(t): t for t in (*beside.unseen, *in_functions(optimizer))}
        self._tensors: list[tuple[torch.Tensor, Kept]] = [(t, copy_of(t, host=False)) for t in tensors.values()]
        self._tables = Tables(optimizer)
        self._by_parameter = KeptByParameter(mappings_of(optimizer))
        self._held = beside.digest()

    def put_back(self) -> str | None:
        """What was moved, in words. By what tensors hold, not by their versions: averages are often written through
        ``.data``."""
        moved = WRITES_UNSEEN if self._tables.put_back() else None
        for tensor, kept in self._tensors:
            if not is_back(tensor, kept):
                restore(tensor, kept)
                moved = WRITES_UNSEEN
        if not self.is_back():
            self.beside.put_all_back()
            self._by_parameter.restore()
            moved = moved or "its step() changes what instep does not look into for each bucket"
        self.beside.look_at_unseen()  # what was put back was written
        return moved

    def is_back(self) -> bool:
        return bool(self.beside.digest() == self._held)


class _Compiles:
    """Whether torch.compile has begun to trace something since."""

    def __init__(self) -> None:
        self.any = False
        listen(self)

    def before_compile(self) -> None:
        self.any = True


class PartsOfUpdate:
    """One real update of an optimizer, and beside it each part of it.

    Args:
        every: the parameters of all optimizers.

    Attributes:
        reason: why parts come out otherwise than the whole, in words; ``None``: nothing is known to.
        counts: whether parts were compared.
    """

    def __init__(
        self, stepper: Stepper, parts: Sequence[AttachedParameters], every: Sequence[AttachedParameter]
    ) -> None:
        self.reason: str | None = None
        self.counts = True
        self._stepper = stepper
        self._parts = parts
        self._every = every
        self._belongings = _Belongings(self._optimizer)
        self._generators = Generators.of(self._optimizer, {a.spec.device for part in parts for a in part})
        own = parameters_of(self._optimizer)
        self._gradients = _Gradients({id(p): p for p in (*own, *(a.get() for a in every))}.values())
        self._digests: dict[AttachedParameter, Digest] = {}
        # Of those that get no gradient in this update.
        self._resting: list[tuple[weakref.ref[torch.Tensor], Digest]] = []
        # The first part, or one that came out otherwise while others were disturbed, and what it is to come to.
        self._witness: tuple[AttachedParameters, list[Digest]] | None = None
        self._untouched = _Untouched(())
        self._around: _Around | None = None
        self._beside: Beside | None = None

    @property
    def _optimizer(self) -> Optimizer:
        return self._stepper.optimizer()

    # Before the update.

    def take(self, *, twice: bool, is_warm: bool, in_pairs: bool, reason: str | None) -> None:
        """Step each part alone, and put it back.

        Args:
            twice: each of them, also while others hold other values.
            is_warm: whether all that the update compiles was compiled by an earlier one.
            in_pairs: compare each part with itself stepped together with the next one.
            reason: why they would come out otherwise in backward, in words, if that is known: none is stepped.

        Raises:
            UnsupportedOptimizerError: it keeps what cannot be put back. Nothing of the step is written.
        """
        if reason is not None:
            self.reason = reason
            return
        # Versions do not tell: what is written through ``.data`` counts nothing.
        try:
            before = {id(p): self._belongings.digest(p) for p in parameters_of(self._optimizer)}
        except (TypeError, RuntimeError) as error:  # of a tensor nobody can read, or a key that no tensor may be
            self.reason = f"what it keeps of its parameters could not be put back ({in_short(error)})"
            return
        self._resting = [
            (weakref.ref(p), before[id(p)]) for p in self._gradients.without(parameters_of(self._optimizer))
        ]
        keys = set(map(id, self._optimizer.state))
        try:
            self._gradients.hide(self._gradients.parameters)
            self._untouched = _Untouched(self._gradients.parameters)
            try:
                self._take_all(twice=twice, is_warm=is_warm, in_pairs=in_pairs)
            finally:
                self._put_around_back()
            self._take_out(keys)
            self._require_unwritten(before)
            if self.reason is not None:
                self._require_back()
        finally:
            self._take_out(keys)
            self._untouched.rest()
            self._gradients.give_back()
            self._beside = self._stepper.end_parts()

    def _take_out(self, keys: set[int]) -> None:
        """Of the state, entries that were made for parameters of other parts; ``keys`` were there."""
        state = self._optimizer.state
        for key in [key for key in state if id(key) not in keys]:
            del state[key]

    def _require_unwritten(self, before: dict[int, Digest]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            written = sum(self._belongings.digest(p) != before[id(p)] for p in parameters_of(self._optimizer))
        if written:
            raise UnsupportedOptimizerError(
                f"{self._stepper.name}.step() writes {written} parameters, too, or their state, where its groups hold "
                "others alone: it keeps them elsewhere. They were written, and cannot be put back: load a checkpoint. "
                f"{STEPPED_WHOLE}"
            )

    def _take_all(self, *, twice: bool, is_warm: bool, in_pairs: bool) -> None:
        # Asked first: a part may move on what cannot be put back, a Python generator, say.
        self.reason = HOOKS if has_global_step_hooks() else self._stepper.begin_parts()
        compiles = _Compiles()
        if self.reason is None:
            self._look_around(is_first=not is_warm)
        for part in self._parts if self.reason is None else ():
            try:
                self._take_part(part)
            except TypeError as error:  # of a tensor of a class that tells nobody what it holds
                self.reason = self.reason or f"what it keeps of {_names(part)} could not be put back ({error})"
            if compiles.any and self.reason is None:
                self._meet_compiler(is_warm)
            if self.reason is not None or not self.counts:
                return
        if self._generators.drawn():  # a part has made one
            self.reason = _DRAWS
        if twice and self.reason is None:
            self._rest_beside_others()
        if twice and self.reason is None:
            self._take_again()
        if in_pairs and self.reason is None:
            self._compare_pairs()

    @property
    def _own(self) -> OwnObject:
        own = self._stepper.own_object
        assert own is not None, "torch's own are not judged"
        return own

    def _look_around(self, *, is_first: bool) -> None:
        try:
            if is_first:
                self._own.beside.is_first()
            self._around = _Around(self._optimizer, self._own.beside)
            self.reason = self._shares()
        except (TypeError, RecursionError) as error:
            self.reason = f"what it refers to could not be put back ({in_short(error)})"

    def _shares(self) -> str | None:
        """What two optimizers refer to, in words: nobody knows which of them has changed it."""
        others = {attached.stepper for attached in self._every if attached.stepper.is_foreign} - {self._stepper}
        own = {id(value) for value in _changeable(self._optimizer)}
        for stepper in others:
            for value in _changeable(stepper.optimizer()):
                if id(value) in own:
                    return f"it shares a {type(value).__name__} with another optimizer, {stepper.name}"
        return None

    def _put_around_back(self) -> None:
        """Put back what parts have moved that is not looked into after each of them. No gradient is shown."""
        if self._around is not None and (moved := self._around.put_back()) is not None:
            self.reason = self.reason or moved
            if not self._around.is_back():
                raise self._moved_on("what its attributes hold")

    def _require_back(self) -> None:
        """The whole update is about to be taken by ``step()``: a part, once more, finds all as it was. It is that which
        came out otherwise, or the first."""
        if self._witness is None or self._around is None:
            return
        (part, expected), reason, results = self._witness, self.reason, []
        self._around.beside.reset_left()
        try:
            for _ in range(2):  # also what it leaves elsewhere is the same
                self.reason = None
                with self._alone(part):
                    self._step(part)
                    results.append((self._look_at(part), self.reason))
                self._put_around_back()
        finally:
            self.reason = reason
        if results[0] != results[1] or results[0][0] != expected:
            raise self._moved_on(repr(part.names[0]))

    def _meet_compiler(self, is_warm: bool) -> None:
        # What is compiled for one parameter is compiled by now, where the loop has come to it. What is compiled for a
        # list of them would be compiled for each bucket anew, and left uncompiled beyond torch's limit.
        if is_warm:
            self.reason = "its update is compiled (torch.compile) anew for each choice of parameters"
        else:
            self.counts = False  # the loop's own update is to be the first that compiles: this one is not compared

    @contextmanager
    def _alone(self, part: AttachedParameters) -> Iterator[None]:
        """Its gradients are there, and no other parameter may be used. All of the part is put back after the block."""
        tensors = part.tensors()
        with self._untouched.but(tensors):
            self._gradients.show(tensors)
            kept = BeforeUpdate(self._optimizer, tensors, self._belongings.mappings, gradients=True)
            try:
                yield
            finally:
                kept.put_back()
                self._gradients.hide(tensors)

    def _take_part(self, part: AttachedParameters) -> None:
        runs, sent = count_of_runs(), count_of_collectives()
        with self._alone(part):
            returned = self._step(part)
            digests = self._look_at(part)
            self._witness = self._witness or (part, digests)
            if count_of_runs() != runs:
                self.reason = self.reason or _RUNS_BACKWARD
            # FSDP2's groups are stepped in one order on all ranks, and operations on DTensors communicate.
            if count_of_collectives() != sent and not any(map(is_sharded, part.tensors())):
                self.reason = self.reason or _COMMUNICATES
            if self.reason is None:
                self._step_without_gradient(part, digests, returned)
        self._digests.update(zip(part, digests, strict=True))

    def _look_at(self, part: AttachedParameters) -> list[Digest]:
        return list(map(self._belongings.digest, part.tensors()))

    def _step(self, part: AttachedParameters, *, notes: bool = True) -> Any:
        """Returns what the update returns."""
        gradients = [g for a in part if (g := gradient_of(a)) is not None]
        self._generators.begin()
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
            if self._untouched.were_touched:
                raised = _USES_OTHERS
            self.reason = _no_dict(self._optimizer, part) or raised
        finally:
            if self._untouched.were_touched:  # and step() has caught the error
                self.reason = self.reason or _USES_OTHERS
            if self._generators.have_advanced():
                self.reason = _DRAWS
        return returned

    def _step_without_gradient(self, part: AttachedParameters, digests: list[Digest], returned: Any) -> None:
        """After backward ``step()`` finds no gradient: it must leave all as the update has left it, and return the
        same."""
        tensors = part.tensors()
        self._gradients.hide(tensors)
        try:
            nothing = self._stepper.step_part(tensors, tensors, notes=False)
        except Exception as error:
            self.reason = f"its step() raises when no parameter has a gradient ({in_short(error)})"
            return
        finally:
            self._gradients.show(tensors)
        # Of a weight that is written with what it holds (clamped, say) autograd is told nevertheless.
        if self._own.wrote or self._look_at(part) != digests:
            self.reason = f"its step() changes parameters that have no gradient, or their state ({_names(part)})"
        elif digest_of_value(nothing) != digest_of_value(returned):
            self.reason = "its step() returns a value that depends on what it updates"

    def _rest_beside_others(self) -> None:
        """Each part without its gradient, stepped together with the next one: it must stay as it is."""
        for part, other in zip(self._parts, self._parts[1:], strict=False):
            tensors, both = part.tensors(), AttachedParameters((*part, *other))
            with self._alone(both):
                self._gradients.hide(tensors)
                before = self._look_at(part)
                try:
                    self._stepper.step_part(both.tensors(), both.tensors(), notes=False)
                except Exception as error:
                    self.reason = f"its step() raises where {_names(part)} has no gradient ({in_short(error)})"
                else:
                    self.reason = None if self._look_at(part) == before else _CHANGES_RESTING
            if self.reason is not None:
                return

    def _take_again(self) -> None:
        """Each part, while all others are disturbed."""
        self._put_around_back()
        others, beside = _Others(self._by_optimizer()), self._own.beside
        left = beside.look_anew()
        # Handlers of signals wait for the lock of the call: one that reads weights would find them disturbed.
        try:
            for part in self._parts if self.reason is None else ():
                others.set_apart(part.tensors())
                # Numbers that attributes keep by others have changed: not by the update.
                beside.look_anew()
                with self._alone(part):
                    self._step(part)
                    digests = self._look_at(part)
                if self.reason is not None or digests != self._digests_of(part):
                    self.reason, self._witness = _USES_OTHERS, (part, self._digests_of(part))
                    break
        finally:
            others.rest()
            beside.look_anew(left)

    def _digests_of(self, part: AttachedParameters) -> list[Digest]:
        return [self._digests[attached] for attached in part]

    def _by_optimizer(self) -> Iterator[tuple[list[torch.Tensor], _Belongings]]:
        """Those that are stepped: no others are other ones before a part."""
        yield self._gradients.with_some(parameters_of(self._optimizer)), self._belongings
        for stepper in dict.fromkeys(attached.stepper for attached in self._every):
            if stepper is not self._stepper:
                optimizer = stepper.optimizer()
                yield self._gradients.with_some(parameters_of(optimizer)), _Belongings(optimizer)

    def _compare_pairs(self) -> None:
        """Nobody takes the step as a whole: the first of two that are stepped together comes out as by itself. Where
        updates draw by the key of the first, only that one does."""
        for first, other in zip(self._parts, self._parts[1:], strict=False):
            pair = AttachedParameters((*first, *other))
            with self._alone(pair):
                self._step(pair, notes=False)
                digests = self._look_at(first)
            if self.reason is None and digests != self._digests_of(first):
                self.reason = f"parameter {first.names[0]!r} gets other values together with {other.names[0]!r}"
            if self.reason is not None:
                return

    def _moved_on(self, what: str) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"{self._stepper.name}.step() gives {what} other values when the same step is taken again: it keeps "
            "something that instep does not find, and cannot put back, such as a counter outside of its attributes "
            "or a generator of its module. Nothing of this step was written, but what it keeps has moved: make the "
            f"optimizer anew. {STEPPED_WHOLE}"
        )

    # After it.

    def only_counts(self) -> None:
        """The parts were compared with each other: there is no whole to compare them with."""
        self._digests.clear()
        self._resting.clear()
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
                whole = self._belongings.digest(attached.get())
            except TypeError as error:
                return f"what it keeps of {attached.spec.name!r} could not be put back ({error})"
            if whole != digest:
                what = "other values" if whole.values != digest.values else "another state"
                return f"parameter {attached.spec.name!r} gets {what} when it is stepped without the others"
        if any((p := resting()) is not None and self._belongings.digest(p) != then for resting, then in self._resting):
            return _CHANGES_RESTING
        differs = None if self._beside is None else self._beside.differs()
        return None if differs is None else f"its {differs} depends on which parameters step together"


def _changeable(optimizer: Optimizer) -> Iterator[Any]:
    """What its attributes refer to that it may change in place, tensors and modules aside."""
    for value in reachable_values([read_by_update(optimizer)], optimizer):
        is_plain = isinstance(value, (torch.Tensor, torch.nn.Module, type, ModuleType)) or callable(value)
        if not (is_plain or is_immutable(value) or is_of_torch(value)):
            yield value


def _no_dict(optimizer: Optimizer, part: AttachedParameters) -> str | None:
    """In words, where the state of one of these is no mapping, of which nobody could say whether it was written."""
    kinds = (type(optimizer.state.get(tensor, {})) for tensor in part.tensors())
    kind = next((kind for kind in kinds if not issubclass(kind, Mapping)), None)
    return None if kind is None else f"it keeps the state of a parameter as a {kind.__name__}"


def _names(part: AttachedParameters) -> str:
    return repr(part.names[0]) if len(part) == 1 else f"{part.names[0]!r} and {len(part) - 1} others"


def in_short(error: BaseException) -> str:
    """The error's class and the beginning of its message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_IN_SHORT]}" if text else type(error).__name__
