"""Steps a few parameters with the user's own optimizer, from the first bucket of a step to its last."""

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.beside import Beside
from instep._optim.guards import Layouts, SettingsGuard, StateGuard, numbers_of
from instep._optim.kernels import GRADIENT, InBucket, Kernel, KernelCall, MastersCall, Placing, are_usual, kernel_of
from instep._optim.kinds import SCALES, STEPPED_WHOLE, has_usual_parameters, is_elementwise, is_torchs_own
from instep._optim.local_shard import LocalShard
from instep._optim.offload import OffloadedState
from instep._optim.own_object import ObjectCall, OwnObject
from instep._optim.random_numbers import KeyedDraws
from instep._optim.shadow import CallUpdate, GroupLayout, Members, autocast_here, how_to_step, parameters_of
from instep._optim.stages import Begins, CopiedEntries, ShadowCall, Stage, StagedCall, Update, step_shadow
from instep._torch.hooks import is_in_step
from instep._torch.lifetime import reference_to
from instep._torch.versions import VERSION, version_of, versions_of
from instep.errors import HyperparameterChangedError, StaleAttachmentError, UnsupportedOptimizerError
from instep.master_weights import HALF, Masters, notes_of, pairs_of, require_unwritten, require_wide


class _Kind(NamedTuple):
    """What kind of optimizer it is, as long as it has this ``step``. Functions are held weakly: they may refer to the
    object, or, in a class that was made in a function, to the model.

    Attributes:
        own: the ``step`` of the object; ``None``: it has none.
        step: of its class.
        update: what ``step`` wraps, without the calls of hooks; of a class with masters the ``step`` that steps these.
        is_known: whether the update is one of torch's own, over plain parameters.
        call: calls its update.
        kernel: that ``step`` calls, if that can be called in its place.
        is_looked_at: whether it is known whether there is one: the first step finds out.
    """

    own: Callable[[], Any] | None
    step: Callable[[], Any]
    update: Callable[[], Any] | None
    is_known: bool
    call: CallUpdate
    kernel: Kernel | None = None
    is_looked_at: bool = False


class _RunningStep(NamedTuple):
    """One step of the optimizer, from its first bucket on.

    Attributes:
        state: the mapping with which it began.
        size: how many entries that had.
        kernel: that its ``step()`` calls, if that can be called in its place, over the state in the optimizer itself.
        is_known: whether the update is one of torch's.
        stages: around an update that needs some, and those that look at the step as a whole.
        divides: the stage that wants portions of a bucket, each in an update of its own.
        scales: what its kernel was told of a loss scale: by ``id``, and of a tensor how often it was written.
        in_parts: whether it is none of the loop's: its parts are put back.
    """

    state: MutableMapping[Any, Any]
    size: int
    kernel: Kernel | None
    is_known: bool
    stages: Sequence[Stage]
    divides: OffloadedState | KeyedDraws | None
    scales: tuple[Any, ...]
    in_parts: bool


_Call = KernelCall | MastersCall | ShadowCall | ObjectCall | StagedCall


class PreparedUpdate:
    """The update of some parameters of one optimizer, made before their gradients are there.

    A kernel writes nothing but its lists, a shadow of one of torch's nothing but parameters and their state, and a
    foreign object looks after itself; what needs more is a call with stages around it (``StagedCall``). So here only
    the two guards have anything to do: the settings were looked at when this was made, and the state is noted as the
    update leaves it.

    Args:
        guard: of the state; ``None``: nobody looks back, and nothing is counted.
        state: of the optimizer.
        masters: the stepper of an optimizer that has some; ``None``: it has none.

    Attributes:
        tensors: the parameters, or aliases of them.
        versions: of ``tensors``, as the update has left them, where somebody looks back.
        of_masters: whether it casts the gradients.
    """

    __slots__ = ("_calls", "_guard", "_masters", "_owned", "_places", "_state", "of_masters", "tensors", "versions")

    def __init__(
        self,
        calls: Sequence[_Call],
        bucket: InBucket,
        guard: StateGuard | None,
        state: Mapping[Any, Any],
        masters: "Stepper | None" = None,
    ) -> None:
        self._calls, self._guard, self._state, self._masters = calls, guard, state, masters
        self.tensors, self._owned, self.of_masters = bucket.tensors, bucket.owned, masters is not None
        # Of the state that kernels write. An object may replace it.
        self._places = bucket.placing.places if isinstance(calls[0], (KernelCall, MastersCall)) else None
        self.versions: list[int] = []

    @property
    def may_make_tensors(self) -> bool:
        """Whether an object is called: a kernel makes none."""
        return self._places is None

    def run(self, gradients: list[torch.Tensor]) -> None:
        guard = self._guard
        if self._masters is not None:
            look_at_masters(self._masters, self._owned)  # a hook of this backward may have written one since it began
        try:
            for call in self._calls:
                call.run(gradients)
        finally:
            if guard is not None:  # also of an update that raised: what it has written is written
                written = self.tensors
                if guard.found is not None and guard.found.layout.share:  # else nobody asks for another bucket's
                    columns = (column for call in self._calls for column in call.lists)
                    written = [*written, *chain.from_iterable(columns)]
                torch.autograd.graph.increment_version(written)
        if self._masters is not None:
            note_masters(self._masters, self.tensors, self._owned)
        places = self._places
        if guard is not None and places is None:
            guard.note(self._owned, self._state)
            self.versions = versions_of(self.tensors)
        elif guard is not None and guard.found is not None and places is not None:
            tensors, state = self.tensors, places.read(guard.found.values)
            try:
                self.versions, versions = [*map(VERSION, tensors)], [*map(VERSION, state)]  # all are plain, as was seen
            except RuntimeError:  # one is an inference tensor
                self.versions, versions = versions_of(tensors), versions_of(state)
            guard.stepped.append((self._owned, places, versions))


class Stepper:
    """Steps the parameters of one optimizer, which it holds weakly, and which stays as it is.

    Args:
        kind: of the optimizer, where it is known.
        layouts: of it, as another one's steps have found them.
        looks_back: whether anybody asks, after an update, if the state was written since.

    Attributes:
        options: the stages of options that an update enters before it counts as begun.
        offloaded: with ``offload``: where the state lives.
        draws: with ``random="keyed"``: what each parameter's update draws from.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: _Kind | None = None,
        layouts: Layouts | None = None,
        *,
        looks_back: bool = True,
    ) -> None:
        self.name = type(optimizer).__name__
        self.options: list[Stage] = []
        self.offloaded: OffloadedState | None = None
        self.draws: KeyedDraws | None = None
        self._optimizer = weakref.ref(optimizer)
        self._looks_back = looks_back
        self._call_is_seen = False
        self._layouts = layouts or Layouts(GroupLayout(self.name, ()))
        self._settings = SettingsGuard(self.name)
        self.own_object: OwnObject | None = None  # of a foreign optimizer, once it was stepped
        self._alike_in: set[torch.dtype] = set()  # autocast blocks in which step() came out as outside
        self._state_guard = StateGuard(self.name)
        self._kind = kind or _kind_of(optimizer)
        self._running: _RunningStep | None = None

    def optimizer(self) -> Optimizer:
        """The user's optimizer; ``StaleAttachmentError`` if it is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise StaleAttachmentError(
                f"the attached {self.name} no longer exists: keep a reference to an optimizer. Call "
                "instep.attached(model).detach(), and attach another one"
            )
        return optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer, if that is still there."""
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def of_copy(self, copy: Optimizer) -> "Stepper":
        """For updates of this step that come later: the same options, over a copy of the optimizer. Nobody asks whether
        state was written since: whoever uses it waits for them."""
        later = Stepper(copy, self._kind, self._layouts, looks_back=False)
        later.options, later.offloaded = self.options, self.offloaded
        return later

    def add(self, option: Stage) -> None:
        """From now on updates that run apart from ``optimizer.step()`` enter this stage of an option."""
        self.options = sorted([*self.options, option], key=lambda stage: stage.place)

    # A bucket.

    def step(
        self,
        parameters: Sequence[torch.Tensor],
        in_place_of: Sequence[torch.Tensor] | None = None,
        shards: Sequence[LocalShard | None] | None = None,
        begins: Begins | None = None,
        placing: Placing | None = None,
    ) -> None:
        """Update ``parameters`` from their ``.grad``, as the optimizer's ``step()`` would, and nothing else.

        Step hooks do not run. Version counters are bumped even where the kernel does not (fused ones), so that autograd
        still notices a weight that was saved for a later node.

        Args:
            in_place_of: the optimizer's own parameters, where ``parameters`` are aliases of them.
            shards: this rank's shards, of those parameters of which ``parameters`` holds an alias of the shard.
            begins: called right before the update, inside of the stages of options; ``None`` in ``optimizer.step()``:
                these are skipped, for the caller has kept what they would keep.
            placing: of a bucket that comes in each step.

        Raises:
            HyperparameterChangedError: a group was changed since another bucket of this step.
            StaleAttachmentError: a parameter is in no group any more, or the optimizer is gone.
            UnsupportedOptimizerError: the update does what bucket by bucket comes out otherwise than in one call.
        """
        optimizer = self.optimizer()
        if self._running is None:
            self._begin(optimizer)
        bucket = InBucket(parameters, in_place_of or parameters, placing or Placing(), shards)
        with ExitStack() as entered:
            if begins is not None:
                update = Update(optimizer, parameters, bucket.owned, shards)
                for stage in self.options:
                    entered.enter_context(stage.around(update))
                begins()
            gradients: list[Any] = list(map(GRADIENT, parameters))
            (prepared,) = self.prepare([bucket])
            if not (prepared.may_make_tensors or are_usual(parameters, gradients, of_masters=prepared.of_masters)):
                (prepared,) = self.prepare([bucket], kernels=False)
            prepared.run(gradients)

    def begin_parts(self) -> str | None:
        """Parts of an update are about to be stepped, and put back. What the optimizer holds that nobody could put
        back, in words; ``None``: nothing, as far as is known."""
        self._layouts.groups.reached = None  # what it refers to by now
        if self._running is None:
            self._begin(self.optimizer(), in_parts=True)
        own = self.own_object
        return None if own is None or not self.is_foreign else own.beside.look_deeper(self.optimizer())

    def step_part(self, tensors: Sequence[torch.Tensor], owned: Sequence[torch.Tensor], *, notes: bool = True) -> Any:
        """``step`` of a foreign optimizer in one call, to see what becomes of these parameters, which are put back.
        Returns what the update returns.

        Args:
            notes: whether what it makes of other values is compared with what it makes in other parts.
        """
        optimizer = self.optimizer()
        running = self._running or self._begin(optimizer, in_parts=True)
        own, noted = self.own_object, len(self._state_guard.left)
        assert own is not None, "torch's own are not judged"
        members = self._layouts.groups.members_of(owned)
        self._settings.look(optimizer, numbers_of(members))
        call = self._staged(running, Update(optimizer, tensors, owned, None, members))
        own.notes, own.belongings.rests = notes, True
        try:
            PreparedUpdate([call], InBucket(tensors, owned, Placing()), self._state_guard, running.state).run([])
        finally:
            own.notes, own.belongings.rests = True, False
            self.wait_for_state()  # the host reads it next, and puts it back
            del self._state_guard.left[noted:]  # that of buckets which backward has stepped stays
        return own.returned

    def end_parts(self) -> Beside | None:
        """All parts were put back. Returns what they have left beside parameters and state, to be compared."""
        own = self.own_object
        beside = None if own is None else own.beside
        if own is not None and self._running is not None and self._running.in_parts:
            own.beside = Beside(self.name)
            self.abort()
        return beside

    def look_at_settings(self, parameters: Sequence[torch.Tensor]) -> None:
        """An update of ``parameters`` is about to be handed to another thread: raise ``HyperparameterChangedError``, as
        it would, if a group was changed since another bucket of this step. From here on it has the groups of now."""
        optimizer = self.optimizer()
        if self._running is None:
            self._begin(optimizer)
        self._settings.look(optimizer, numbers_of(self._layouts.groups.members_of(parameters)))

    @property
    def is_foreign(self) -> bool:
        """Whether its update is not one of torch's own, over plain parameters: nobody knows what it reads and writes
        beside the parameters that it is given, their gradients and their state."""
        optimizer, kind = self._optimizer(), self._kind
        if optimizer is not None:
            own, step = vars(optimizer).get("step"), type(optimizer).step
            update = optimizer.inside.step if isinstance(optimizer, Masters) else getattr(step, "__wrapped__", None)
            is_same = step is kind.step() and update is (kind.update and kind.update())
            if not is_same or own is not (kind.own and kind.own()):
                self._kind = _kind_of(optimizer)  # a trainer has replaced it since, or a scheduler counts its calls
        return not self._kind.is_known

    def _begin(self, optimizer: Optimizer, *, in_parts: bool = False) -> _RunningStep:
        """A step begins: choose the stages of its updates."""
        if not self._layouts.groups.is_of(optimizer.param_groups):
            self._layouts.groups = GroupLayout(self.name, optimizer.param_groups)
            self._kind = _kind_of(optimizer)
        known = not self.is_foreign
        if isinstance(optimizer, Masters) and self._looks_back and not in_parts:
            look_at_masters(self)
        watched = [self._state_guard] if self._looks_back else []
        stages: list[Stage] = [self._settings, *watched, *([CopiedEntries()] if known else [])]
        divides: OffloadedState | KeyedDraws | None = self.offloaded
        if self.offloaded is not None:
            stages.append(self.offloaded)
        if not known:
            self.own_object = self.own_object or OwnObject(self.name, self._settings)
            stages.append(self.own_object.belongings)
            self.own_object.begin(optimizer, self._layouts.groups, may_draw=self.draws is not None, in_parts=in_parts)
            if self.draws is not None:
                stages.append(self.draws)
                divides = self.draws
        for stage in (*self.options, *stages):
            stage.begin(optimizer, self._layouts.groups)
        if not self._kind.is_looked_at:
            self._kind = self._kind._replace(kernel=kernel_of(optimizer), is_looked_at=True)
        kernel = self._kind.kernel if known and self.offloaded is None else None
        if kernel is not None and not kernel.is_called_by(optimizer):
            kernel = None
        state, scales = optimizer.state, _scales_of(optimizer)
        if kernel is not None:
            self._state_guard.find(state, self._layouts)
        self._running = _RunningStep(state, len(state), kernel, known, stages, divides, scales, in_parts)
        return self._running

    def prepare(self, buckets: Sequence[InBucket], *, kernels: bool = True) -> list[PreparedUpdate]:
        """The updates of ``buckets``.

        Args:
            kernels: where ``step()`` would call one, do so, if the gradients are what it takes (``are_usual``).
        """
        optimizer = self._optimizer() or self.optimizer()
        running, found = self._running or self._begin(optimizer), self._state_guard.found
        if running.divides is not None:
            self._take_in(optimizer, buckets)
        members = [self._layouts.groups.members_of(bucket.owned) for bucket in buckets]
        calls: Sequence[Sequence[_Call] | None] = [None] * len(buckets)
        if kernels and running.kernel is not None and found is not None:
            calls = running.kernel.calls(optimizer, buckets, self._layouts.groups, found)
        self._settings.look(optimizer, sorted({n for some in members for n, (mine, _) in enumerate(some) if mine}))
        guard = self._state_guard if self._looks_back else None
        mine = self if isinstance(optimizer, Masters) else None
        return [
            PreparedUpdate(some or self._calls_of(running, optimizer, bucket, its), bucket, guard, running.state, mine)
            for some, bucket, its in zip(calls, buckets, members, strict=True)
        ]

    def _take_in(self, optimizer: Optimizer, buckets: Sequence[InBucket]) -> None:
        """Parameters may have been added to the groups since the step began, whose gradients ``step()`` has found."""
        groups = optimizer.param_groups
        is_known = all(map(self._layouts.groups.holds, chain.from_iterable(bucket.owned for bucket in buckets)))
        if not (is_known or self._layouts.groups.were_moved(groups)):
            self._layouts.groups = self._settings.layout = GroupLayout(self.name, groups)

    def _calls_of(
        self, running: _RunningStep, optimizer: Optimizer, bucket: InBucket, members: Sequence[Members]
    ) -> Sequence[_Call]:
        """By a shadow, or by the foreign object itself; where anything is to be done around that, in stages."""
        tensors, owned, _, shards = bucket
        own = None if running.is_known else self.own_object
        if running.divides is None and shards is None:
            if own is None and tensors is owned:
                return [ShadowCall.of(optimizer, tensors, members, running.state)]
            if own is not None and own.beside.is_flat:
                return [ObjectCall(own, self._kind.call, optimizer, owned, tensors, members)]
        parts = [slice(None)] if running.divides is None else running.divides.portions_of(tensors)
        calls = []
        for part in parts:
            mine = self._layouts.groups.members_of(owned[part])
            update = Update(optimizer, tensors[part], owned[part], None if shards is None else shards[part], mine)
            calls.append(self._staged(running, update))
        return calls

    def _staged(self, running: _RunningStep, update: Update) -> StagedCall:
        own = None if running.is_known else self.own_object
        step = step_shadow if own is None else partial(_step_object, own, self._kind.call)
        return StagedCall(running.stages, update, step)

    # What the updates of the running step have done.

    @property
    def wrote_in_place(self) -> bool:
        """Whether an update has changed an object beside parameters and their state that nobody can put back."""
        return self.own_object is not None and self.own_object.beside.wrote_in_place

    @property
    def state_was_written(self) -> bool:
        """Whether the state of a parameter was written since its update in this step, or replaced."""
        optimizer = self._optimizer()
        return optimizer is not None and self._state_guard.was_written(optimizer)

    @property
    def state_is_as_left(self) -> bool:
        """Whether the state of parameters is still as their updates in this step have left it."""
        return self._state_guard.is_as_left(self.optimizer())

    @property
    def gave_back(self) -> bool:
        """Whether an update of this step has given back memory of an accelerator that it has read."""
        return self._running is not None and self.own_object is not None and self.own_object.gave_back

    # The call of step().

    def called(self) -> None:
        """``step()`` of the optimizer begins. For its pre-hook."""
        self._call_is_seen = is_in_step(self.optimizer())

    @property
    def was_stopped(self) -> bool:
        """Whether an error has ended the ``step()`` that was begun last, as far as torch.compile does not hide it."""
        return self._call_is_seen and not self.is_stepping

    @property
    def runs(self) -> bool:
        """Whether the ``step()`` that was begun last is running: what is asked this has been called by its closure."""
        return self._call_is_seen and self.is_stepping

    @property
    def is_stepping(self) -> bool:
        """Whether a ``step()`` of the optimizer runs, in any thread, as far as torch.compile does not hide it."""
        optimizer = self._optimizer()
        return optimizer is not None and is_in_step(optimizer)

    @property
    def steps_every_parameter(self) -> bool:
        """Whether the optimizer's own ``step()`` is to find no gradient: it could not step with the state where that
        is, or draws by another key."""
        return self.offloaded is not None or self.keyed is not None

    @property
    def keyed(self) -> KeyedDraws | None:
        """What each parameter's update draws from, by a call of its own; ``None``: torch's own never draw."""
        return None if self.draws is None or not self.is_foreign else self.draws

    def autocast_matters(self) -> bool:
        """Whether ``step()``, called in the autocast block that this thread is in, may compute other numbers than
        outside. torch's elementwise ones have no operation in float32 that such a block changes; others, and foreign
        ones where they were not compared, are taken for such that do."""
        optimizer = self.optimizer()
        dtype = autocast_here(optimizer)
        if dtype is None or dtype in self._alike_in:
            return False
        is_known = not self.is_foreign and is_elementwise(optimizer)
        return not is_known or any(p.dtype is not torch.float32 for p in parameters_of(optimizer))

    def came_out_alike(self) -> None:
        """A ``step()`` that was called here came out as its parts, which are stepped outside of autocast."""
        if (dtype := autocast_here(self.optimizer())) is not None:
            self._alike_in.add(dtype)

    def require_unchanged(self) -> None:
        """Raise ``HyperparameterChangedError`` if groups or state are not those the buckets were stepped with."""
        optimizer = self.optimizer()
        if self._running is None or optimizer.state is not self._running.state:
            raise HyperparameterChangedError(
                f"the state of {self.name} was replaced (load_state_dict?) after backward had already stepped "
                "parameters with the old one. Load before backward() or after optimizer.step()"
            )
        for stage in self._running.stages:
            stage.require_unchanged(optimizer)
        if self.own_object is not None:
            self.own_object.beside.require_unchanged()

    def require_same_scale(self) -> None:
        """Raise ``HyperparameterChangedError`` if ``step()`` would take off another loss scale than buckets' updates
        have taken off, or leave the step out: by ``grad_scale`` or ``found_inf``, as ``GradScaler`` sets them."""
        if self._running is not None and _scales_of(self.optimizer()) != self._running.scales:
            raise HyperparameterChangedError(
                f"grad_scale or found_inf of {self.name} was set or written between backward() and optimizer.step(), "
                "but backward had already stepped parameters with what it was. Use undo=True or schedule='forward'"
            )

    def commit(self, into: Optimizer | None = None, *, rest: Sequence[torch.Tensor] | None = None) -> None:
        """End the step: a foreign optimizer holds what its buckets' updates have left beside the parameters' own state,
        and entries that were added are ordered as a plain ``step()`` orders them: by group, not by bucket.

        Args:
            into: the user's optimizer, where this one steps a copy of it.
            rest: the loop's own ``step()`` is still to come, and finds gradients of these; ``None``: it has returned.
        """
        optimizer = into or self.optimizer()
        if self._running is not None:
            self.wait_for_state()
            if self.own_object is not None:
                some = self._layouts.groups.members_of(rest) if rest else ()
                self.own_object.beside.commit(rest=None if rest is None else numbers_of(some))
            for key in self._layouts.groups.added_to(optimizer.state, self._running.size):
                optimizer.state[key] = optimizer.state.pop(key)
        self._forget()

    def abort(self) -> None:
        if self._running is not None:
            self.wait_for_state()
            self._forget()

    def stops(self) -> None:
        """The step is torn: nothing more is stepped of it."""
        self.wait_for_state()
        if self.own_object is not None:
            self.own_object.end_step()  # it refers to the optimizer, and so to its parameters

    def _forget(self) -> None:
        if self._running is not None:
            for stage in (*self.options, *self._running.stages):
                stage.end_step()
            if self.own_object is not None:
                self.own_object.end_step()
        if not self._looks_back:  # else it is among the stages
            self._state_guard.end_step()
        self._running = None

    def wait_for_state(self) -> None:
        """Return when the host may read and write the state."""
        if self.offloaded is not None:
            self.offloaded.finish()

    def restore_to_device(self) -> None:
        """From now on the state is on the parameters' device."""
        offloaded, self.offloaded = self.offloaded, None
        if offloaded is not None:
            offloaded.give_back()


def halves_of(stepper: Stepper, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that a master is copied into when they are stepped."""
    return [p for p in parameters if p.dtype in HALF] if isinstance(stepper.optimizer(), Masters) else []


def look_at_masters(stepper: Stepper, some: Sequence[torch.Tensor] | None = None) -> None:
    """Raise ``StaleMasterError`` if a weight was written without its master: all are looked at before the first one is
    stepped, and then ``some`` before their own update."""
    optimizer = stepper.optimizer()
    if isinstance(optimizer, Masters):
        require_unwritten(optimizer, *pairs_of(optimizer, some))
        require_wide(optimizer, parameters_of(optimizer) if some is None else some)


def note_masters(stepper: Stepper, parameters: Sequence[torch.Tensor], owned: Sequence[torch.Tensor]) -> None:
    """``parameters``, which may be aliases of the optimizer's ``owned``, were stepped, or a write of them was counted
    in advance: it counts as none of the loop's."""
    optimizer = stepper.optimizer()
    if isinstance(optimizer, Masters):
        notes_of(optimizer).take(*pairs_of(optimizer, owned, parameters))


def _step_object(own: OwnObject, call: CallUpdate, update: Update) -> None:
    own.step(update.optimizer, update.members, update.owned, update.tensors, call)


def _kind_of(optimizer: Optimizer) -> _Kind:
    own, step = vars(optimizer).get("step"), type(optimizer).step
    update = optimizer.inside.step if isinstance(optimizer, Masters) else getattr(step, "__wrapped__", None)
    known = is_torchs_own(optimizer) and has_usual_parameters(optimizer)
    call = how_to_step(optimizer)
    return _Kind(own and reference_to(own), reference_to(step), update and reference_to(update), known, call)


def _scales_of(optimizer: Optimizer) -> tuple[Any, ...]:
    scales = list(map(vars(optimizer).get, SCALES))
    if all(map(is_, scales, repeat(None))):  # as mostly, and asked in each step
        return ()
    return tuple((id(scale), version_of(scale) if isinstance(scale, torch.Tensor) else 0) for scale in scales)


def writes_state_without_gradient(optimizer: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer}.step() writes the state of parameters without a gradient too, which had been updated: the plain "
        f"loop writes it once. {STEPPED_WHOLE}"
    )


def writes_without_gradient(optimizer: str, parameter: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer}.step() writes parameters without a gradient too: {parameter!r}, which had been updated, was "
        f"written a second time. {STEPPED_WHOLE}"
    )
