"""What ``attach`` returns, and which models have one."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from instep._arguments import models_of, optimizers_of, require_model
from instep._micro_batches.run import micro_batches
from instep._micro_batches.waiting import Waiting
from instep._optim.parameters import AttachedParameter
from instep._refusals.rules import ask_rules, say_once
from instep._step.state import Recorder
from instep._torch.interrupts import heard, held
from instep._torch.pipelining import Pipeline
from instep._wiring.advice import advice
from instep._wiring.build import build, connect
from instep._wiring.saved import load_state, saved_state
from instep._wiring.verbs import Stats, begin_recording, resync_from, stats_of, table_of
from instep.buckets import MIB, Plan
from instep.errors import AttachError, InstepError, UncommittedStepError, class_name
from instep.options import Options, pipeline_of
from instep.target import Target, as_one

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    from instep_tools.recording import Recording

Batch = TypeVar("Batch")

_logger = logging.getLogger("instep")
_attachments: "weakref.WeakKeyDictionary[nn.Module, Attachment]" = weakref.WeakKeyDictionary()


def attached(model: nn.Module) -> "Attachment | None":
    """The attachment of ``model``, ``None`` if it has none.

    Raises:
        AttachError: ``model`` is no ``torch.nn.Module``.

    Since 0.1.0.

    Example:
        ```python
        instep.attach(model, optimizer, schedule="backward")
        overlap = instep.attached(model)  # elsewhere, where only the model is at hand
        if overlap is not None:
            print(overlap.step_count, overlap.state)
        ```
    """
    require_model(model, AttachError)
    return _attachments.get(model)


def record(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    steps: int = 5,
    *,
    pipeline: "PipelineScheduleSingle | PipelineScheduleMulti | None" = None,
) -> "Recording":
    """Record what runs when in a training loop, and what memory it holds: ``with instep.record(model, optimizer):``
    around it. Of an attached model it is the attachment's ``Attachment.record``.

    Args:
        model: whose forward begins an iteration; what the loop calls, with its wrappers. Of a pipeline the module of
            this rank's stage, or a list of those of several.
        optimizer: whose ``step()`` ends one.
        steps: after so many the recording ends, and the loop goes on; or on leaving the block.
        pipeline: the schedule of ``torch.distributed.pipelining`` that trains ``model``: an iteration begins with
            ``schedule.step(…)``. An attached model's is known.

    Returns:
        A recording: ``recording.save(path)`` after the block, for ``instep report`` and for trace viewers.

    Raises:
        AttachError: ``model``, ``optimizer``, ``steps`` or ``pipeline`` is something else; a ``ValueError``.
        InstepError: several models that are no stages of a pipeline; on entering the block: ``torch.profiler`` is
            running already; on leaving it: another one has run in it, or the loop ran on another thread.

    Since 0.1.0.

    Example:
        ```python
        with instep.record(model, optimizer, steps=4) as recording:
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        recording.save("plain.json")  # then: instep report plain.json
        ```
    """
    models = models_of(model, AttachError)
    attachment = attached(models[0])
    if attachment is not None:
        return attachment.record(steps)
    stages = pipeline_of(pipeline)
    return begin_recording(as_one(models), optimizers_of(optimizer, AttachError), steps, stages)


def attachments() -> "list[Attachment]":
    """Of every model that is attached. Several models may have one."""
    return list(dict.fromkeys(_attachments.values()))


def attached_parameters() -> "dict[int, Attachment]":
    """By ``id``: every parameter that is attached, with its attachment."""
    return {id(p): attachment for attachment in attachments() for p in attachment._parts.step.members.living()}


def replaceable(optimizers: Iterable[Optimizer]) -> "list[Attachment]":
    """The attachments of these optimizers' parameters that another ``attach`` may replace: they have no option that
    would be lost with them."""
    taken = attached_parameters()
    given = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    earlier = dict.fromkeys(taken[id(p)] for p in given if id(p) in taken)
    return [attachment for attachment in earlier if attachment._options.asks_for_nothing]


def _make_way(earlier: Iterable["Attachment"]) -> None:
    """Detach those whose place another attachment takes."""
    for attachment in earlier:
        attachment.detach()
        say_once(
            logging.WARNING,
            "an earlier instep.attach() of these parameters is detached: this call takes its place. Several optimizers "
            "go into one call: attach(model, [first, second])",
        )


class Attachment:
    """What ``attach`` returns. As a context manager it detaches on leaving.

    Since 0.1.0.

    Example:
        ```python
        with instep.attach(model, optimizer, schedule="backward") as overlap:
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(overlap.step_count)  # the model is detached again
        ```
    """

    def __init__(self, target: Target, options: Options, earlier: Sequence["Attachment"] = ()) -> None:
        self._options = options = replace(options, left_to_torch=ask_rules(target, options))
        _make_way(earlier)
        self._parts = build(target, options)
        self._waiting: Waiting | None = None
        try:
            connect(self._parts, target, options)
            _attachments.update(dict.fromkeys(target.called, self))
        except BaseException:
            self.detach()
            raise

    @property
    def plan(self) -> Plan:
        """The buckets as they are now. They change after the first steps, when the order of gradients is known."""
        return self._parts.plan

    @property
    def state(self) -> str:
        """``"open"``: backward has stepped parameters, or ``undo`` holds a step, until ``optimizer.step()``;
        ``"pending"``: buckets of the last step are still due; ``"torn"``: a step was applied in part only;
        ``"idle"``: none of these; ``"disabled"``, with ``INSTEP_DISABLE=1``; ``"detached"``."""
        return self._parts.schedule.state if self._parts.handles else "detached"

    @property
    def step_count(self) -> int:
        """How many steps ``optimizer.step()`` has committed that wrote anything; of optimizers of torch's alone."""
        return self._parts.schedule.step_count

    @property
    def redo_count(self) -> int:
        """With ``undo``: how many steps were put back, to be done again as the plain loop does, or not at all."""
        return self._parts.step.ledger.redo_count

    @property
    def skip_count(self) -> int:
        """With ``nonfinite="skip"``: how many steps were left out, for a gradient that was not finite."""
        return self._parts.step.ledger.skip_count

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """With ``clip=ClipNorm(…)``: the norm of all gradients of the last step before they were clipped, 0-dim, as
        ``clip_grad_norm_`` returns it; ``None`` before the first step."""
        return self._parts.clipping.grad_norm

    def stats(self) -> Stats:
        """Plain numbers for a log: ``wandb.log(overlap.stats())``.

        ``steps``, ``redos`` and ``skips`` are ``step_count``, ``redo_count`` and ``skip_count``; ``votes`` those that
        this rank has cast; ``freed_bytes`` of gradients that backward has freed before ``optimizer.step()``, in all
        steps. On a CPU, after the first step: ``exposed_ms``, milliseconds within ``optimizer.step()`` and of waiting
        for updates, and ``outside_ms``, of updates that ran outside of it (in backward, or beside the loop), both from
        one commit to the next. The most gradients at one time are measured by ``overlap.record()``.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                print(overlap.stats())  # {"steps": 1, "redos": 0, …}
            ```
        """
        return stats_of(self._parts)

    @property
    def advice(self) -> str:
        """With ``schedule="forward"``: whether steps are put off, and why; after a few steps also what this loop could
        gain by ``schedule="backward"``, and by how much DDP's communication outlasts backward. With any: whether
        bfloat16 weights are stepped without masters. One sentence a line; empty where there is nothing to say."""
        refs = self._parts.refs
        divided = bool(refs.wrapped) or self._parts.sharding is not None
        schedule, step, whole = self._parts.schedule, self._parts.step, self._parts.whole
        return advice(schedule, step, self._options, refs.ddps(), whole, divided=divided)

    @property
    def recorder(self) -> Recorder | None:
        """Told of every bucket's step and communication; ``None``, the default, costs nothing."""
        return self._parts.schedule.times.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        if recorder is not None and not callable(recorder):
            raise InstepError(f"recorder must be a function of (kind, names, start, end) or None, not {recorder!r}")
        self._parts.schedule.times.recorder = recorder

    def record(self, steps: int = 5) -> "Recording":
        """Record what runs when in the loop, and what memory it holds: ``with overlap.record() as recording:`` around
        it, and ``recording.save(path)`` afterwards. See ``instep.record``.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            with overlap.record(steps=4) as recording:
                for batch in loader:
                    model(batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            recording.save("attached.json")  # then: instep report attached.json
            ```
        """
        model, optimizers = self._parts.refs.model(), self._parts.refs.optimizers()
        if model is None or not optimizers:
            raise InstepError("there is nothing to record: the model or the optimizer is gone")
        attached = None if self._options.disabled else (self._options, self._parts.schedule)
        return begin_recording(model, optimizers, steps, self.pipeline, attached)

    def accumulate(self) -> AbstractContextManager[None]:
        """Around forward and backward of every micro-batch but the last: gradients add up, nothing steps.

        Under DDP this is ``no_sync()`` too.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            *first, last = loader
            with overlap.accumulate():
                for batch in first:
                    (model(batch) / len(loader)).backward()
            (model(last) / len(loader)).backward()  # steps
            optimizer.step()
            optimizer.zero_grad()
            ```
        """
        return self._parts.accumulation.hold()

    def keep_gradients(self) -> AbstractContextManager[None]:
        """With ``schedule="backward"``, around a backward: the step is left to ``optimizer.step()``, as in the plain
        loop. For a loop that looks at its gradients now and then.

        Gradients stay in ``.grad``, to be read, clipped, written or thrown away, and no parameter is updated before
        ``optimizer.step()``. DDP, ``replicate`` and FSDP reduce as ever: this is not ``no_sync()``. That step saves
        no memory. With ``clip=`` they are clipped in ``optimizer.step()``, as one bucket. The block may end when
        ``backward()`` has returned, or later. The next backward outside of it steps again. With ``shard_state`` all
        ranks must do this in the same steps.

        With ``schedule="forward"`` gradients are kept in every step, and this does nothing.

        Raises:
            InstepError: nobody calls ``optimizer.step()``: a verb of the functional API has attached the model.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            with overlap.keep_gradients():
                model(batch).backward()
            print(max(p.grad.abs().max() for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            ```
        """
        if self._options.steps_itself:
            raise InstepError(
                "keep_gradients() leaves a step to optimizer.step(), and here the end of each backward is the step. "
                "Attach the model with instep.attach(model, optimizer, schedule='backward')"
            )
        return self._parts.accumulation.keep()

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None, *, more: bool = False) -> None:
        """``loss.backward(gradient)``; with ``ClipNorm(mode="two_pass")`` twice, first to measure and then to step.

        Both passes run all hooks, and recompute what is checkpointed. They must compute the same gradients, bit for
        bit: use deterministic kernels. Under DDP, whose buckets hold all gradients anyway, one pass does.

        With ``more=True`` this is a micro-batch of a step, and more of them follow: the numbers of the plain
        accumulation loop, without all gradients in memory. With ``schedule="backward"`` nothing runs yet. The step's
        last micro-batch, whose call is without ``more``, has one backward for all; what that needs, and what it
        refuses, is said at ``micro_batches``. With ``schedule="forward"``, or ``INSTEP_DISABLE=1``, each call is a
        backward. ``zero_grad()`` in between throws away what waits, and ``optimizer.step()`` runs the backward of what
        waits where no last micro-batch came. Under DDP calls with ``more`` belong into ``no_sync()``, with FSDP2 into
        ``set_requires_gradient_sync(False)``; there it raises without one.

        Args:
            loss: that backward begins from; with ``more``, and for the last micro-batch, a tensor of one number.
            gradient: of ``loss``, if it has more than one number.
            more: whether the loss is of a micro-batch that is not the last of its step.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. Nothing was updated.
            AccumulationError: one backward for all micro-batches would not compute what the plain loop does. Nothing
                was updated. While they wait, also of who uses a gradient; on several ranks of who steps.
            InstepError: ``loss`` is no tensor; ``gradient`` was given for one of several micro-batches.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            for i, batch in enumerate(loader, 1):
                more = i % 2 != 0  # of this step's micro-batches are to come
                overlap.backward(model(batch) / 2, more=more)
                if not more:
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        if not isinstance(loss, torch.Tensor):
            raise InstepError(f"loss must be a tensor to begin backward() from, not {class_name(loss, in_full=True)}")
        if more:
            self._require_no_pipeline("overlap.backward(more=True)")
        waiting = self._waiting
        if gradient is not None and (more or (waiting is not None and waiting.count())):
            raise InstepError("gradient was given for one of several micro-batches: give a loss of one number alone")
        if more and self._frees_in_backward:
            self._waiting = waiting or Waiting(self._parts)
            self._waiting.add(loss)
        elif waiting is not None and (step := waiting.take(loss)) is not None:
            step.backward()
        else:
            self._parts.backward(loss, gradient)

    def micro_batches(
        self, loss_of: Callable[[Batch], torch.Tensor] | None = None, batches: Iterable[Batch] | None = None
    ) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches of a step, with ``optimizer.step()`` to follow: the numbers of
        ``for batch in batches: loss_of(batch).backward()``, bit for bit, without all gradients in memory.

        With ``schedule="backward"`` the forwards run first, one after the other. One backward follows, in which each
        parameter's gradient is added up over the micro-batches, applied, and freed. What the forwards keep for backward
        (activations, or with checkpointing the inputs of the segments) is in memory for all micro-batches at once. With
        ``schedule="forward"``, or ``INSTEP_DISABLE=1``, this is the loop above; under DDP with ``no_sync()`` around all
        micro-batches but the last, with FSDP2 as much. HSDP after ``set_requires_all_reduce(False)`` reduces each.

        Args:
            loss_of: computes the loss of a micro-batch, a tensor of one number, divided or scaled as the loop would.
            batches: each is taken when the one before is done. On several ranks: with a length.

        Returns:
            The losses, detached, in order; an empty list if there were no batches.

        Raises:
            AccumulationError: one backward would not compute what the loop does: with FSDP1, a hook on a parameter,
                reentrant checkpointing, a graph that micro-batches share, DDP's ``static_graph``, within
                ``accumulate()``. Nothing was updated; of a backward that draws random numbers or writes buffers the
                step is torn.
            InstepError: ``loss_of`` returned no loss; or an argument is missing.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            for micro_batches in batches:
                losses = overlap.micro_batches(lambda batch: model(batch) / len(micro_batches), micro_batches)
                optimizer.step()
                optimizer.zero_grad()
                print(sum(losses).item())
            ```
        """
        self._require_no_pipeline("overlap.micro_batches()")
        return micro_batches(self._parts, loss_of, batches, together=self._frees_in_backward)

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of which the model is a stage, or several stages."""
        return self._options.communication.pipeline

    def _require_no_pipeline(self, call: str) -> None:
        if (pipeline := self.pipeline) is not None:
            raise InstepError(
                f"{call} does not go with pipeline=: {pipeline.kind} runs {pipeline.micro_batches} micro-batches in "
                "each schedule.step(…). Call that"
            )

    @property
    def _frees_in_backward(self) -> bool:
        """Whether micro-batches have one backward for all, and not one each."""
        return self._options.schedule == "backward" and not self._options.disabled and bool(self._parts.handles)

    def rollback(self) -> None:
        """Go back to where the last ``optimizer.step()`` left parameters and state, bit for bit, and clear all
        gradients.

        With ``schedule="forward"`` nothing is written before ``optimizer.step()``, and only gradients are thrown
        away. A step that was committed stays.

        Raises:
            InstepError: ``schedule="backward"`` without ``undo``.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward", undo=True)
            model(batch).backward()  # steps on trial
            overlap.rollback()  # as if this backward had not been
            model(loader[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            ```
        """
        if self._waiting is not None:
            self._waiting.drop()
        self._parts.schedule.rollback()

    def synchronize(self) -> None:
        """Return when every parameter holds what the steps so far have written, for the device's current stream.

        With ``schedule="backward"`` this is so when ``backward()`` has returned: call it before reading weights from
        another stream. With ``"forward"``, call it before reading weights or optimizer state in a way that Python
        does not see: an alias made earlier (``weight.detach()``, a NumPy array, an entry of ``optimizer.state``).
        """
        self._parts.schedule.synchronize()

    def accept_torn(self) -> None:
        """Take the weights as they are after a step that was applied only in part, and train on.

        Call it after loading model and optimizer from a checkpoint, or to go on from the torn weights; on all ranks,
        which wait for what the others say of the last step.
        Clears the gradients, and counts the step if anything of it was written. A step that backward has written, and
        that no ``optimizer.step()`` has committed (after an interrupt), is given up in the same way: call it first
        then, and load after. Does nothing where no step is torn or written, nor with ``undo`` to one that is not torn.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            try:
                loss = model(batch)
            except instep.errors.TornStepError:  # the step before was applied in part
                overlap.accept_torn()  # train on from these weights, on all ranks
                loss = model(batch)
            loss.backward()
            optimizer.step()
            ```
        """
        accepted = self._parts.schedule.accept()
        if not accepted:
            # Others may wait for what this rank says of a step that it has left out; and what they say of the last one
            # would else be heard after this, where it tears the step anew.
            with suppress(Exception):
                self._parts.schedule.hear_of_last_step()
            accepted = self._parts.schedule.accept()
        if accepted:
            _logger.warning("step %d was taken as it is", self.step_count)

    def resync_from(self, rank: int) -> None:
        """Take parameters, buffers, optimizer state, ``param_groups`` and the number of steps from another rank, and
        clear the gradients and a torn step. All ranks must call this.

        For models that every rank has as a whole: ``DistributedDataParallel`` and ``instep.replicate``.

        Args:
            rank: one on which the last step stands as a whole, of ``torch.distributed``'s default group.

        Raises:
            InstepError: there is no such copy: the model or the state is sharded, ``rank`` is not one of its ranks, or
                its own step is torn in the middle. On all ranks, and nothing was changed.
        """
        resync_from(self._parts, rank)

    def require_committed(self) -> None:
        """Wait for what is due, and raise unless parameters and state are those of the last committed step.

        Raises:
            TornStepError: a step was applied to some of the parameters only.
            UncommittedStepError: a backward has been that ``optimizer.step()`` has not committed.
        """
        schedule = self._parts.schedule
        schedule.hear_of_last_step()
        schedule.synchronize()
        schedule.require_whole()
        gradients = any(p.grad is not None for p in self._parts.step.members.living())
        if schedule.state == "open" or (self._parts.accumulation.only_adds and gradients):
            raise UncommittedStepError(
                f"step {self.step_count + 1} is under way: a checkpoint is of committed steps. Save after "
                "optimizer.step(), or before the first backward of the step"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model's and the optimizer's: the number of steps, with
        ``random="keyed"`` the seed and the step from which draws go on, of a pipeline the number of its stages, and
        whether all of the last step was applied.

        Always the same keys, each of one type, equal on all ranks: the attachment is a ``Stateful`` of
        ``torch.distributed.checkpoint``. Nothing is changed, and nothing raised: a checkpoint that mends a torn step
        is loaded through this. Before you save, call ``require_committed()``, on all ranks.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            overlap.require_committed()  # on all ranks: raises in the middle of a step, or after half of one
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "overlap": overlap.state_dict()}
            torch.save(saved, "checkpoint.pt")
            ```
        """
        return saved_state(self._parts, self._stage_count)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin again where ``state_dict`` was taken. A step that is open or torn is given up, and gradients are
        cleared; parameters and optimizer state are loaded as without instep, before or after this.

        Raises:
            CheckpointError: a key is missing, ``random``, ``seed`` or the number of stages were others, or it was
                taken in the middle of a step. Nothing of the attachment was changed.
        """
        load_state(self._parts, state_dict, self._stage_count)

    @property
    def _stage_count(self) -> int:
        return 0 if self.pipeline is None else self.pipeline.count

    @property
    def parameters(self) -> Sequence[AttachedParameter]:
        """What is known of each attached parameter."""
        return self._parts.schedule.parameters

    def detach(self) -> None:
        """Give the model and the optimizer back as they came. Safe to call twice, and with a step open or torn. What
        ``optimizer.step()`` was called for is finished first. Of a step that backward has applied in part, the
        gradients that are left are clipped with ``clip=`` as those were that backward applied: the plain
        ``optimizer.step()`` completes the step. Weights that backward has updated stay so, and nobody is told who uses
        them before that ``step()``. Otherwise nothing is clipped any more. Micro-batches that wait for the last
        (``backward(more=True)``) are thrown away, and a warning is logged.

        One thing stays: DDP cannot let go of a communication hook. It becomes the plain mean that DDP computes
        without one, or the ``comm_hook`` that was given, and a later ``attach`` takes it up again.

        Example:
            ```python
            overlap = instep.attach(model, optimizer, schedule="backward")
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            overlap.detach()
            model(batch).backward()  # plain from here on: every gradient stays in .grad
            optimizer.step()
            ```
        """
        with held(heard()):  # half of the hooks would step what the other half has stepped
            self._detach()

    def _detach(self) -> None:
        parts = self._parts
        if self._waiting is not None and (dropped := self._waiting.drop()):
            _logger.warning("detach() has thrown away %d micro-batches, which waited for the last of a step", dropped)
        for source in parts.sources:
            source.disconnect()
        for handle in parts.handles:
            handle.remove()
        parts.handles.clear()
        parts.accumulation.communicate_again()
        if parts.zero is not None:
            parts.schedule.synchronize()
            parts.zero.close()
        for model in parts.refs.called():
            if _attachments.get(model) is self:
                del _attachments[model]
        try:
            parts.schedule.close()
        finally:
            for stepper in parts.refs.steppers:
                stepper.restore_to_device()
            if not parts.hooks.in_backward:
                parts.let_go()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        optimizers = ", ".join(stepper.name for stepper in self._parts.refs.steppers) or "no optimizer of torch's"
        plan, deferral = self.plan, self._parts.schedule.deferral
        return (
            f"<instep.Attachment {self._parts.refs.name} with {optimizers}: schedule={self._options.schedule!r}, "
            f"{'' if deferral is None else f'steps {deferral}, '}"
            f"{len(plan.buckets)} buckets of {plan.nbytes / MIB:.2f} MiB, {self.step_count} steps, "
            f"{''.join(f'{note}, ' for note in self._parts.notes)}{self.state}>"
        )

    def _repr_html_(self) -> str:
        refs, plan = self._parts.refs, self.plan
        rows = {
            "optimizers": ", ".join(stepper.name for stepper in refs.steppers),
            **self._options.given(),
            "state": self.state,
            "buckets": f"{len(plan.buckets)} of {plan.nbytes / MIB:.2f} MiB",
            **self.stats(),
        }
        return table_of(f"instep.Attachment of {refs.name}", rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model is not attached: what refers to its attachment refers to nothing."""
        return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
