"""instep in Hugging Face's ``Trainer``: one callback, which attaches when training begins.

A ``Trainer`` does not give its callbacks the model as it has wrapped it, nor its ``Accelerator``. So ``_trainer_of``
looks for the ``Trainer``, which has both. Where instep clips, or micro-batches have one backward, two methods of that
``Accelerator`` are replaced while training runs, and with ``log_stats`` the ``Trainer``'s ``log``: a callback is told
of logs after those that write them. Apart from that, only documented names of both libraries are used.
"""

import gc
import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "instep.integrations.transformers needs transformers and accelerate: pip install transformers accelerate"
    ) from error

from instep._gradients.clipping import ClipNorm
from instep._gradients.scaling import Policy
from instep._torch.hooks import StandIn
from instep.attaching import attach
from instep.attachment import Attachment, attached
from instep.errors import AttachError, InstepError
from instep.integrations.callbacks import named_stats, require_backward
from instep.options import Defer, Schedules

__all__ = ["InstepCallback"]

_logger = logging.getLogger("instep")


class InstepCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow this import
    """Attach a ``Trainer``'s model and optimizer while it trains: ``Trainer(…, callbacks=[InstepCallback()])``.

    Attached is what the ``Trainer`` trains with, after it has made, wrapped and prepared both: under ``torchrun``
    the ``DistributedDataParallel``, or what FSDP2 has sharded. Accumulation, clipping (``max_grad_norm``),
    schedulers, evaluation, checkpoints and ``resume_from_checkpoint`` stay the ``Trainer``'s; weights, optimizer
    state and what is logged are bit for bit those without the callback. When training ends the model and the
    optimizer are given back as they came. After training that has failed they stay attached, so that nobody uses a
    step that was applied in part without being told; the next ``train()`` attaches anew.

    Args:
        schedule: when a bucket steps, as for ``instep.attach``. ``"forward"``, the default here, goes with every
            setting; ``"backward"`` frees gradients while backward runs, and cannot clip without ``undo`` or ``clip``.
        defer: as for ``instep.attach``: whether a step is put off, or runs beside backward.
        bucket_bytes: bytes of gradient at which a bucket is full, on one device. Under DDP
            ``TrainingArguments(ddp_bucket_cap_mb=…)`` decides.
        clip: clip by this in place of the ``Trainer``, whose ``max_grad_norm`` must be the same number, or 0. For
            ``ClipNorm(…, mode="two_pass")`` and the other modes of ``schedule="backward"``; else ``max_grad_norm``.
        undo: with ``schedule="backward"``, step on trial, and put back what turns out to need clipping.
        together: with ``schedule="backward"`` and ``gradient_accumulation_steps``, one backward for all micro-batches
            of a step, after their forwards: gradients are freed, and what the forwards keep for backward is in memory
            for all micro-batches at once. It pays with short micro-batches, or with ``gradient_checkpointing``. See
            ``Attachment.backward(more=True)``.
        nonfinite: what becomes of a step with a gradient that holds NaN or infinity, as for ``instep.attach``.
        log_stats: add ``Attachment.stats()``, each name behind ``instep/``, to what the ``Trainer`` logs of training.

    Attributes:
        overlap: the ``instep.Attachment``; ``None`` before training and after it.

    Raises:
        AttachError: an option here, or a setting of the ``Trainer``, that does not fit; from ``Trainer(…)`` where its
            arguments tell, else from ``train()``. Nothing was changed.
    """

    def __init__(
        self,
        *,
        schedule: Schedules = "forward",
        defer: Defer = "auto",
        bucket_bytes: int | None = None,
        clip: ClipNorm | None = None,
        undo: bool | Literal["host"] = False,
        together: bool = False,
        nonfinite: Policy = "allow",
        log_stats: bool = False,
    ) -> None:
        if clip is not None and not isinstance(clip, ClipNorm):
            raise AttachError(f"clip must be an instep.ClipNorm or None, not {clip!r}: the Trainer clips by norm")
        require_backward(together, schedule)
        self.overlap: Attachment | None = None
        # For the settings of the Trainer that do not go with these.
        self._schedule, self._clip, self._undo, self._together = schedule, clip, undo, together
        self._attach = partial(
            attach, schedule=schedule, defer=defer, bucket_bytes=bucket_bytes, undo=undo, nonfinite=nonfinite
        )
        self._logs_stats = log_stats
        self._replaced: list[StandIn] = []  # while it trains
        self._accelerator: Any = None
        self._grad_norm: torch.Tensor | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The ``Trainer`` was made: refuse settings before anything is loaded."""
        self._clip_for(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach. What an earlier training that failed has left attached is detached first.

        Raises:
            TornStepError: that training failed within a step, which has reached only some of the weights, and these
                were not loaded anew. ``UncommittedStepError`` where it has reached all of them.
        """
        clip = self._clip_for(args)
        trainer = _trainer_of(state)
        model, accelerator = trainer.model_wrapped, trainer.accelerator
        self._refuse_placement(model, accelerator)
        self._refuse_methods(accelerator, clip)
        if self._writes_in_backward:
            _tell_meshes(trainer)
        if self.overlap is not None:
            if self._writes_in_backward and state.global_step == 0 and attached(model) is self.overlap:
                self.overlap.require_committed()
            self.detach()
        optimizer = trainer.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):  # which adds nothing to a step but whether it is due
            optimizer = optimizer.optimizer
        overlap = self._attach(
            model,
            optimizer,
            clip=clip,
            # Under DDP the Trainer runs all but the last micro-batch in no_sync(), which tells. With fewer in the last
            # step of an epoch, optimizer.step() finds their gradients, and applies them.
            accumulation_steps=1 if args.world_size > 1 or self._together else args.gradient_accumulation_steps,
        )
        self.overlap = overlap
        self._accelerator = accelerator
        if self._keeps_gradients(args):
            _logger.info(
                "gradient_accumulation_steps=%d: all gradients are kept until a step's last micro-batch. "
                "InstepCallback(schedule='backward', together=True, …) frees them, and keeps activations instead",
                args.gradient_accumulation_steps,
            )
        if clip is not None:
            self._replaced.append(StandIn(accelerator, "clip_grad_norm_", self._norm_after_step))
        if self._runs_backward(clip):
            backward = partial(_backward, overlap, accelerator, self._together)
            self._replaced.append(StandIn(accelerator, "backward", backward))
        if self._logs_stats:
            self._replaced.append(StandIn(trainer, "log", partial(_log_with_stats, overlap, trainer.log)))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Where instep clips, the norm is known now: fill the tensor that the ``Trainer`` has of it."""
        if self.overlap is not None and self._grad_norm is not None and self.overlap.grad_norm is not None:
            self._grad_norm.copy_(self.overlap.grad_norm)
            self._grad_norm = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Give model, optimizer and ``Accelerator`` back as they came. Called when training ends. Call it yourself to
        use the model outside of the ``Trainer`` after training that has failed. Safe to call twice."""
        for replaced in self._replaced:
            replaced.remove()
        self._replaced = []
        self._accelerator = None
        if self.overlap is not None:
            self.overlap.detach()
            self.overlap = None

    def _runs_backward(self, clip: ClipNorm | None) -> bool:
        return self._together or (clip is not None and clip.mode == "two_pass")

    def _refuse_methods(self, accelerator: Any, clip: ClipNorm | None) -> None:
        """Of somebody else's, in whose place instep's would run."""
        named = {"clip_grad_norm_": clip is not None, "backward": self._runs_backward(clip)}
        for name in (name for name, is_replaced in named.items() if is_replaced):
            method = vars(accelerator).get(name)
            is_ours = method in self._replaced  # after training that has failed
            own = getattr(type(accelerator), name) is not getattr(Accelerator, name)
            if own or not (method is None or is_ours):
                raise AttachError(
                    f"the Trainer's Accelerator has a {name}() of its own, and InstepCallback would run in its place. "
                    "Leave it out, or use InstepCallback(schedule='forward'), which replaces nothing"
                )

    @property
    def _writes_in_backward(self) -> bool:
        """Whether backward writes weights that cannot be put back."""
        return self._schedule == "backward" and not self._undo

    def _norm_after_step(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """In place of ``Accelerator.clip_grad_norm_``. The ``Trainer`` asks for the norm before the step, when it is
        not known yet, and logs it after the step. So it gets a tensor that ``on_optimizer_step`` fills."""
        self._grad_norm = torch.full((), math.nan, dtype=torch.float64, device=self._accelerator.device)
        return self._grad_norm

    def _clip_for(self, args: TrainingArguments) -> ClipNorm | None:
        """Refuse settings that do not go with the options. Returns what clips in place of the ``Trainer``; ``None``:
        the ``Trainer`` clips by itself."""
        self._refuse_settings(args)
        limit = args.max_grad_norm
        if self._clip is not None:
            if limit > 0 and limit != self._clip.max_norm:
                raise AttachError(
                    f"TrainingArguments(max_grad_norm={limit}) and InstepCallback(clip=ClipNorm("
                    f"{self._clip.max_norm}, …)) are two limits. Write max_grad_norm={self._clip.max_norm}, or "
                    f"ClipNorm({limit}, …)"
                )
            return self._clip
        if self._schedule != "backward":
            return None
        if self._undo:
            return ClipNorm(limit if limit > 0 else math.inf)
        if 0 < limit < math.inf:
            raise AttachError(
                f"TrainingArguments(max_grad_norm={limit}) needs every gradient before the first update, and "
                "schedule='backward' updates during backward. (max_grad_norm is 1.0 unless told.) Write "
                f"{'; '.join(self._exact_lines(args))}; or, not to clip, TrainingArguments(max_grad_norm=0)"
            )
        return ClipNorm(math.inf)  # clips nothing, and knows the norm, which the Trainer logs

    def _exact_lines(self, args: TrainingArguments) -> list[str]:
        """The lines that clip as the ``Trainer`` does, with what each costs: first those that free gradients."""
        clip = f"clip=instep.ClipNorm({args.max_grad_norm}, mode='two_pass')"
        kept, together = "", "together=True, " if self._together else ""
        lines = []
        if self._keeps_gradients(args):
            count = args.gradient_accumulation_steps
            kept = f"; keeps all gradients until the last of {count} micro-batches"
            lines.append(
                f"InstepCallback(schedule='backward', together=True, {clip}), exact, and frees gradients: one backward "
                f"for all {count} micro-batches, whose activations are kept until then, runs twice"
            )
        twice = f"InstepCallback(schedule='backward', {together}{clip}), exact: backward runs twice{kept}"
        undo = (
            f"InstepCallback(schedule='backward', {together}undo=True), exact: a step that turns out to need clipping "
            f"is put back and done again{kept}"
        )
        return [*lines, twice, undo, "InstepCallback(schedule='forward'), exact: frees nothing"]

    def _keeps_gradients(self, args: TrainingArguments) -> bool:
        """Whether gradients of several micro-batches add up, and need not. DDP's buckets keep them in any case."""
        by_ddp = args.world_size > 1 and not args.fsdp
        return (
            self._schedule == "backward" and not self._together and args.gradient_accumulation_steps > 1 and not by_ddp
        )

    def _refuse_settings(self, args: TrainingArguments) -> None:
        if args.optim in ("lomo", "adalomo"):
            raise AttachError(
                f"optim={args.optim!s} steps in a backward of its own, and its step() does nothing. Use it without "
                "InstepCallback, or another one: optim='adamw_torch_fused'"
            )
        if self._writes_in_backward and args.auto_find_batch_size:
            raise AttachError(
                "auto_find_batch_size=True begins again where backward ran out of memory, and schedule='backward' has "
                "updated weights by then. Use InstepCallback(schedule='forward'), "
                "InstepCallback(schedule='backward', undo=True), or auto_find_batch_size=False"
            )
        gradient_accumulation = args.accelerator_config.gradient_accumulation_kwargs or {}
        if self._writes_in_backward and args.world_size > 1 and gradient_accumulation.get("sync_each_batch"):
            raise AttachError(
                "sync_each_batch=True (in accelerator_config, gradient_accumulation_kwargs) reduces the gradients of "
                "every micro-batch, and schedule='backward' steps what has been reduced. Leave it out, or use "
                "InstepCallback(schedule='forward')"
            )

    def _refuse_placement(self, model: nn.Module, accelerator: Any) -> None:
        placed = accelerator.distributed_type.value
        if placed != "NO" and not placed.startswith("MULTI_") and not getattr(accelerator, "is_fsdp2", False):
            kind = f"{placed} of version 1" if placed == "FSDP" else placed
            raise AttachError(
                f"InstepCallback is for one device, DistributedDataParallel and FSDP2, and the Trainer uses {kind}. "
                "With fsdp write fsdp_config={'fsdp_version': 2, …}; leave out deepspeed, or the callback"
            )
        if isinstance(model, nn.DataParallel):
            raise AttachError(
                "the Trainer has wrapped the model in nn.DataParallel, which computes with copies of it. Start one "
                "process for each device (torchrun --nproc-per-node …), or make one visible (CUDA_VISIBLE_DEVICES=0)"
            )
        if self._schedule == "backward" and accelerator.scaler is not None:
            raise AttachError(
                "fp16=True scales the loss, and leaves out the steps whose gradients are infinite, which "
                "schedule='backward' has begun to apply. Use InstepCallback(schedule='forward'), or bf16=True"
            )


def _backward(overlap: Attachment, accelerator: Any, together: bool, loss: torch.Tensor, **options: Any) -> None:
    """All that ``Accelerator.backward()`` is without a loss scale, DeepSpeed and LOMO, by ``overlap``: if ``together``,
    the micro-batches of a step have one backward for all."""
    if options:
        raise InstepError(
            f"accelerator.backward(loss, {', '.join(f'{name}=…' for name in options)}): with together=True, or "
            "ClipNorm(mode='two_pass'), instep runs backward in its own way, and takes a loss alone. Use "
            "InstepCallback(schedule='forward')"
        )
    more = together and not accelerator.sync_gradients
    overlap.backward(loss / accelerator.gradient_accumulation_steps, more=more)


def _tell_meshes(trainer: Trainer) -> None:
    """Newer versions ask before the first step, of gradients, whether they are spread over several device meshes: their
    norm is taken in another way then. Those of FSDP2 that backward has freed do not tell."""
    if getattr(trainer, "_mixed_mesh_grads", False) is not None:
        return
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    if len(meshes) > 1:
        raise AttachError(
            f"the model's parameters are spread over {len(meshes)} device meshes, or some over none, and with "
            "schedule='backward' the Trainer cannot tell their norm. Use InstepCallback(schedule='forward')"
        )
    trainer._mixed_mesh_grads = False


def _log_with_stats(
    overlap: Attachment, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any
) -> None:
    """In place of ``Trainer.log``, which also logs evaluations, and at the end the speed of all of training."""
    log({**logs, **named_stats(overlap)} if "loss" in logs else logs, *args, **kwargs)


def _trainer_of(state: TrainerState) -> Trainer:
    """The ``Trainer`` whose ``TrainerState`` is ``state``. Nothing public leads from the one to the other. So it is
    looked for among the objects that refer to its class, as every instance does."""
    classes = [Trainer]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    for referrer in gc.get_referrers(*classes):
        if isinstance(referrer, Trainer) and referrer.state is state:
            return referrer
    raise AttachError(
        "InstepCallback is for a transformers.Trainer, and none has this TrainerState. In a loop of your own call "
        "instep.attach(model, optimizer)"
    )
