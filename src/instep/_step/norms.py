"""The norms that ``ClipNorm`` needs: taken in a first backward (``two_pass``), or, on ranks, as gradients arrive."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress
from typing import Literal

import torch

from instep._gradients.clipping import Clipping, are_unlike
from instep._optim.beside import MOST_BYTES
from instep._optim.contents import Kept, copy_of, is_back, restore
from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.random_numbers import Generators
from instep._optim.stepper import PreparedUpdate
from instep._optim.values import is_fake
from instep._step.accumulation import Accumulation
from instep._step.remedies import ANY_LOOP
from instep._step.state import FirstError, StepMembers, StepTimes, gradient_of
from instep._step.streams import StepStreams
from instep._torch.engine import compiled_in, has_reentrant
from instep._torch.placeholders import ZeroedGradient
from instep._torch.versions import version_of
from instep._torch.watch import Watch
from instep.errors import InstepError, SpentGradientError

Losses = torch.Tensor | Sequence[torch.Tensor]
"""From which one backward begins: a loss, or those of several graphs."""


class Passes:
    """The two backwards of ``ClipNorm(mode="two_pass")``: the first one measures, the second one steps. Under DDP,
    whose buckets hold all gradients, one backward does both.

    Attributes:
        running: ``"measuring"``: gradients are measured and freed; ``"stepping"``: the norm is known; ``"all"``: it is
            taken, and everything is stepped, when all gradients are there. ``None``: neither, in a loop that calls
            ``loss.backward()`` itself.
        buffers: of the model, which a checkpointed segment writes that is computed once more.
    """

    def __init__(self, clipping: Clipping, members: StepMembers, streams: StepStreams) -> None:
        self.buffers: Callable[[], Iterable[torch.Tensor]] = tuple
        self.clipping = clipping
        self.running: Literal["measuring", "stepping", "all"] | None = None
        self._members = members
        self._streams = streams
        self._has_looked = False  # for segments of the graph that hide gradients from the first pass
        # The gradients that the second pass has left, with their version: until optimizer.step() has looked at them.
        self._measured: dict[int, tuple[torch.Tensor, int]] | None = None
        # Of the second pass, on an accelerator: names, and for each whether the first has given another gradient. On
        # their way to the host, which does not wait for these: each with what tells whether it is there.
        self._unlike: list[tuple[list[str], torch.Tensor]] = []
        self._coming: list[tuple[list[str], torch.Tensor, torch.Event]] = []
        # Compiled code whose second backward was seen to give the gradients of the first.
        self._proved: weakref.WeakSet[type] = weakref.WeakSet()

    def require_running(self) -> None:
        if self.clipping.mode == "two_pass" and self.running is None:
            raise InstepError(
                "ClipNorm(mode='two_pass') needs the norm before the first update: call overlap.backward(loss) in "
                "place of loss.backward(). Nothing was updated"
            )

    @contextmanager
    def measuring(self) -> Iterator[list[torch.Tensor]]:
        """Around a backward that only measures: gradients are freed as they arrive. Those of earlier micro-batches
        are kept, and are part of the norm.

        Yields the parameters that are to get a gradient.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. Nothing was written.
        """
        members = self._members.all
        parameters = [a for a in members if a.get().requires_grad]
        before = {a.spec.index: a.get().grad for a in members}
        # Zeros that nobody has looked at need not be added, and take no memory.
        added = [a for a in members if not ZeroedGradient.is_unused(before[a.spec.index])]
        earlier = {a.spec.index: gradient for a in added if (gradient := gradient_of(a)) is not None}
        handles = [
            a.get().register_hook(partial(_accumulate_into, a.get(), earlier[a.spec.index]))
            for a in parameters
            if a.spec.index in earlier
        ]
        # Hooks, and segments that are computed once more, are to draw the same in both passes, and find the same.
        generators = Generators({a.spec.device for a in members})
        buffers = [(b, version_of(b), _copy_of(b)) for b in self.buffers()]
        self.clipping.begin()
        self.running = "measuring"
        for attached in members:
            attached.get().grad = None
        try:
            yield [a.get() for a in parameters]
            # Of those that have no hook: added or thawed since the forward, or before one that nobody has seen.
            self.measure([a for a in members if gradient_of(a) is not None])
            self._streams.join()
        finally:
            self.running = None
            for handle in handles:
                handle.remove()
            for attached in members:
                attached.get().grad = before[attached.spec.index]
            generators.restore(even_shared=True)
            lost = _put_back(buffers)
        if lost is not None:
            raise InstepError(
                f"the first pass of ClipNorm(mode='two_pass') has written a buffer of shape {tuple(lost.shape)} of the "
                "model, which is too large, or of a kind, to be put back for the second: a checkpointed segment "
                "computes it in each. Nothing was updated. Leave that part out of the checkpointing, or take "
                "undo=True, mode='exact'"
            )
        self.clipping.compute_total_norm(members, gradient_of)

    def measure(self, parameters: Sequence[AttachedParameter]) -> None:
        """Take the norms of these gradients, which are final, and let them go: on the side streams, which wait for all
        that have made gradients, and for which these then wait with their memory."""
        for device in dict.fromkeys(attached.spec.device for attached in parameters):
            some = [attached for attached in parameters if attached.spec.device == device]
            pairs = [(a, gradient) for a in some if (gradient := gradient_of(a)) is not None]  # a hook may clear some
            gradients = [gradient for _, gradient in pairs]
            with self._streams.on(device):
                self.clipping.measure([a for a, _ in pairs], gradients)
            for attached in some:
                attached.get().grad = attached.spent
            self._streams.hold(gradients)

    def unproved_in(self, losses: Losses) -> set[type]:
        """The compiled code in the graph of ``losses`` whose second backward was not yet seen to give the gradients of
        the first: its code may come from a cache that does not know of two."""
        return compiled_in(_each(losses)) - set(self._proved)

    @contextmanager
    def proving(self, code: set[type]) -> Iterator[None]:
        """Around another measuring of the same graph: raise if that gives other gradients. Nothing is written yet."""
        first, members = dict(self.clipping.norms), self._members.all
        yield
        second = self.clipping.norms
        names = [a.spec.name for a in members if (a.spec.index in first) != (a.spec.index in second)]
        known = [a for a in members if a.spec.index in first and a.spec.index in second]
        for some, differ in self._unlike_those_of(first, known, second):
            names += compress(some, differ.tolist())
        if names:
            raise _another_gradient(names[0])
        self._proved.update(code)

    @staticmethod
    def _unlike_those_of(
        first: Mapping[int, torch.Tensor], parameters: Sequence[AttachedParameter], second: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[list[str], torch.Tensor]]:
        """By device: names, and for each whether its norm in ``second`` is another one than in ``first``."""
        for device in dict.fromkeys(attached.spec.device for attached in parameters):
            some = [attached for attached in parameters if attached.spec.device == device]
            indices = [attached.spec.index for attached in some]
            differ = are_unlike([first[i] for i in indices], [second[i] for i in indices])
            yield [attached.spec.name for attached in some], differ

    def require_seen(self, losses: Losses) -> None:
        """The first pass has run from ``losses``: raise if gradients may have been hidden from it, which the second one
        computes. It is not asked for all gradients, but for those of parameters, and a reentrant checkpoint does not
        say which ones its segment holds. The graph is gone through once, and where a parameter got no gradient."""
        all_measured = all(self.clipping.is_measured(a) for a in self._members.all if a.get().requires_grad)
        if self._has_looked and all_measured:
            return
        if has_reentrant(_each(losses)):
            raise InstepError(
                "ClipNorm(mode='two_pass') cannot measure the gradients of checkpoint(…, use_reentrant=True), whose "
                "segments run a backward of their own. Nothing was updated. Checkpoint with use_reentrant=False"
            )
        self._has_looked = True

    def require_measured(self, parameters: Sequence[AttachedParameter], gradients: Sequence[torch.Tensor]) -> None:
        """Gradients of the second pass are about to be clipped: raise if the first has given one of these none, or
        another one, so that the norm is not that of all. Of an accelerator ``step()`` hears (``what_is_wrong``): here
        the host would wait for each bucket."""
        if self.running != "stepping":
            return
        for attached in parameters:
            if not self.clipping.is_measured(attached):
                raise InstepError(
                    f"the second backward of ClipNorm(mode='two_pass') gave {attached.spec.name!r} a gradient, and the "
                    "first gave it none: the norm is not that of all gradients. Compute the same loss in both (hooks "
                    "run twice)"
                )
        if any(map(is_fake, map(type, gradients))):
            return  # those of a plan have no values
        norms = self.clipping.norms_of(parameters, gradients)
        for names, differ in self._unlike_those_of(self.clipping.norms, parameters, norms):
            if not differ.is_cpu:
                self._unlike.append((names, differ))
            elif (name := _first_of(names, differ)) is not None:
                raise _another_gradient(name)

    @contextmanager
    def measured(self, *, waits_for_all: bool = False) -> Iterator[None]:
        """Around the backward that steps with the norm that is known; or will be known when all gradients are."""
        if waits_for_all:
            self.clipping.begin()
        self.running = "all" if waits_for_all else "stepping"
        self._measured, self._unlike = None, []
        try:
            yield
            self._measured = self._left_by_backward()
        finally:
            self.running = None

    def what_is_wrong(self) -> InstepError | None:
        """``optimizer.step()`` is called: the error if the norm is not that of the gradients that it should be of. The
        plain loop takes it now, of the gradients that it finds. Asked once for each pass."""
        measured, self._measured = self._measured, None
        if (name := self._told_by_device()) is not None:
            return _another_gradient(name, " in an earlier step")
        changed = None if measured is None else self._changed_since(measured)
        if changed is not None and not self._members.applied:
            self.clipping.begin()  # another norm is taken
            return None
        return None if changed is None else _changed_after_measuring(changed)

    def _told_by_device(self) -> str | None:
        """The name of a gradient of which an accelerator has told by now that it was another one in the second pass."""
        coming, self._coming, name = self._coming, [], None
        for names, on_host, event in coming:
            if event.query():
                name = name or _first_of(names, on_host)
            else:
                self._coming.append((names, on_host, event))
        for device in dict.fromkeys(differ.device for _, differ in self._unlike):
            mine = [(names, differ) for names, differ in self._unlike if differ.device == device]
            of_all = torch.cat([differ for _, differ in mine])  # the side streams that have compared have been joined
            on_host = torch.empty_like(of_all, device="cpu", pin_memory=True).copy_(of_all, non_blocking=True)
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._coming.append(([*chain.from_iterable(names for names, _ in mine)], on_host, event))
        self._unlike = []
        return name

    def _changed_since(self, measured: Mapping[int, tuple[torch.Tensor, int]]) -> str | None:
        """The name of one that has changed, come or gone since the second pass."""
        left = self._left_by_backward()
        names = (
            a.spec.name for a in self._members.all if not _same(measured.get(a.spec.index), left.get(a.spec.index))
        )
        return next(names, None)

    def end_step(self) -> None:
        """The step is over, or was none."""
        self._measured, self._unlike = None, []
        if self.clipping.policy is not None:
            self.clipping.begin()

    def _left_by_backward(self) -> dict[int, tuple[torch.Tensor, int]]:
        """By index: the gradients that backward has left to ``optimizer.step()``, with their versions."""
        rest = (a for a in self._members.all if a.spec.index not in self._members.applied)
        return {a.spec.index: (g, version_of(g)) for a in rest if (g := gradient_of(a)) is not None}


def _each(losses: Losses) -> Sequence[torch.Tensor]:
    return [losses] if isinstance(losses, torch.Tensor) else losses


def _copy_of(buffer: torch.Tensor) -> Kept | None:
    try:
        return copy_of(buffer, host=False) if buffer.nbytes <= MOST_BYTES else None
    except TypeError:  # of a kind that nobody could put back
        return None


def _put_back(buffers: Iterable[tuple[torch.Tensor, int, Kept | None]]) -> torch.Tensor | None:
    """The second pass writes them again. Returns one that was written and cannot be put back; ``None``: none."""
    lost = None
    for buffer, version, kept in buffers:
        if kept is None:
            lost = buffer if version_of(buffer) != version else lost
        elif not is_back(buffer, kept):  # torch counts no write of batch normalization's
            restore(buffer, kept)
    return lost


def _first_of(names: Sequence[str], differ: torch.Tensor) -> str | None:
    """The first of ``names`` of which ``differ`` says so. Waits for it."""
    return next(compress(names, differ.tolist()), None)


def _another_gradient(name: str, when: str = "") -> InstepError:
    return InstepError(
        f"the second backward of ClipNorm(mode='two_pass') gave {name!r} another gradient than the first{when}. "
        f"Use deterministic kernels, and hooks that do the same in both. {COMPILED_TWICE}"
    )


COMPILED_TWICE = (
    "For a compiled model set torch._functorch.config.donated_buffer = False before it is compiled, and "
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: else its code writes over what the second backward reads "
    "(docs/clipping.md#what-two-passes-need)"
)


def _changed_after_measuring(name: str) -> SpentGradientError:
    return SpentGradientError(
        f"the gradient of {name!r} was set, written or cleared, or the parameter was added to the optimizer, "
        "between overlap.backward() and optimizer.step(): other gradients were clipped by the norm without that. Do "
        f"it before or after both. {ANY_LOOP}"
    )


def _accumulate_into(parameter: torch.Tensor, earlier: torch.Tensor, _: torch.Tensor) -> None:
    """Just before ``parameter`` gets its gradient: what earlier micro-batches left is there, and stays as it is."""
    if parameter.grad is None:
        parameter.grad = earlier.clone()


def _same(then: tuple[torch.Tensor, int] | None, now: tuple[torch.Tensor, int] | None) -> bool:
    if then is None or now is None:
        return then is now
    return then[0] is now[0] and then[1] == now[1]


class MeasuringSink:
    """What sources announce to with ``schedule="forward"``. With ``ClipNorm``, on several ranks, the norm of each
    gradient is taken as soon as that is final, while backward waits for other ranks.

    A gradient that is used after it was measured is measured again by ``optimizer.step()``.
    """

    waits_for_all = frees_gradients = keeps_gradients = measures = updates_beside = False

    def __init__(self, accumulation: Accumulation, clipping: Clipping, times: StepTimes) -> None:
        self.streams = StepStreams()
        self.lock = threading.RLock()
        self.step_count = 0
        self.times = times
        self.at_open: Sequence[weakref.ref[Callable[[], None]]] = ()
        self._accumulation = accumulation
        self._clipping = clipping
        self._watch = Watch(gradient=self._used)
        self._measured: dict[int, tuple[AttachedParameter, torch.Tensor, int]] = {}
        self._failure = FirstError()
        self._open = False

    @property
    def only_adds(self) -> bool:
        return self._accumulation.only_adds

    @property
    def next_only_adds(self) -> bool:
        return self._accumulation.next_only_adds

    def steps_now(self, *, begun: bool) -> bool:
        return False

    def arrive(self, parameters: Sequence[AttachedParameter]) -> bool:
        if self._accumulation.count():
            return False
        if not self._open:
            self._open = True
            for begin in self.at_open:
                if (call := begin()) is not None:
                    call()
        return True

    def apply(self, bucket: AttachedParameters, fetch: Callable[[], None] | None = None, *, final: bool = True) -> bool:
        try:
            if fetch is not None:
                fetch()
            if final:
                # One that was frozen after the forward is announced, and has none.
                pairs = [(a, g) for a in bucket if (g := a.get().grad) is not None]
                for device in {g.device for _, g in pairs}:
                    self.streams.producers.gather(device)
                self._clipping.measure([a for a, _ in pairs], [g for _, g in pairs])
        except BaseException as error:
            self.fail(error)
            return False
        return True

    def apply_and_free(self, bucket: AttachedParameters) -> bool:
        done = self.apply(bucket)
        self.retire(bucket)
        return done

    def prepare(self, buckets: object) -> Sequence[PreparedUpdate | None]:
        return ()

    def step_prepared(self, bucket: object, update: object, *, arrived: bool = False) -> bool:
        return False

    def join(self) -> None:
        self.streams.join()

    def retire(self, bucket: AttachedParameters) -> None:
        for attached in bucket:
            parameter = attached.get()
            if parameter.grad is not None and self._clipping.is_measured(attached):
                self._measured[id(parameter)] = attached, parameter.grad, version_of(parameter.grad)
                self._watch.start([parameter])

    def count_freed(self, bucket: object) -> None: ...

    def is_applied(self, attached: AttachedParameter) -> bool:
        return self._clipping.is_measured(attached)

    def compute_total_norm(self) -> None: ...

    def fail(self, error: BaseException, begun: object = ()) -> None:
        self._failure.keep(error)

    def updated_on_all(self) -> bool:
        return True  # nothing is stepped in backward

    def received(self, parameters: object) -> None: ...

    def backward_raised(self) -> None:
        self._failure.error = None
        self.end_measuring()
        self._clipping.begin()

    def raise_failure(self) -> None:
        self._failure.raise_if_any()

    def end_measuring(self) -> None:
        """``optimizer.step()`` is about to use the norms: those of gradients that have changed since are forgotten."""
        for attached, gradient, version in self._measured.values():
            parameter = attached.get()
            self._watch.stop([parameter])
            if parameter.grad is not gradient or version_of(gradient) != version:
                self._clipping.drop_norm(attached)
        self._measured.clear()
        self._open = False

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        self._watch.stop([parameter])
        attached, _, _ = self._measured.pop(id(parameter))
        self._clipping.drop_norm(attached)
