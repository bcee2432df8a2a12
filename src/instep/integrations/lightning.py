"""``InstepCallback``: Lightning's ``Trainer`` with the optimizer step inside backward, or behind the next forward.

Lightning calls a callback at every point that instep needs: ``setup`` refuses settings, ``on_train_start`` attaches,
and ``on_train_end`` or ``on_exception`` detaches. One thing of Lightning's is replaced, where instep runs backward in
another way (twice, or once for several batches): the module's ``backward``, a hook that Lightning documents.
"""

from contextlib import ExitStack
from functools import partial
from inspect import signature
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor

from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import Policy
from instep._torch.hooks import StandIn
from instep.attaching import attach
from instep.attachment import Attachment
from instep.errors import AttachError, InstepError
from instep.integrations.callbacks import named_stats, require_backward
from instep.options import Defer, Schedules
from instep.sources.ddp.reducer import CommHook

try:
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import DoublePrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
except ImportError as missing:
    raise ImportError("instep.integrations.lightning needs Lightning: pip install lightning") from missing

__all__ = ["InstepCallback", "fabric_backward"]


class InstepCallback(Callback):
    """Attaches the model of ``Trainer.fit`` and the optimizers of ``configure_optimizers`` while it trains.

    Weights, optimizer state and logged values are bit for bit those of the ``Trainer`` without it, in automatic and in
    manual optimization; so are checkpoints, which load with and without it.

    Attached is what the strategy made of the model, when training begins: after a checkpoint (``ckpt_path``) has been
    loaded and after the sanity check. When training has ended, or raised, it is detached. With ``schedule="backward"``
    and no ``undo`` an error in backward, or before the step is over, leaves weights that no step has: they are not
    saved by ``ModelCheckpoint(save_on_exception=True)``, and the next ``fit`` must have a ``ckpt_path``.

    What is not here is the Trainer's: ``accumulate_grad_batches`` decides which backwards step, ``precision`` the
    dtypes and the loss scale.

    Args:
        schedule: ``"backward"`` or ``"forward"``, which takes ``gradient_clip_val`` and every hook that uses gradients.
        defer: as for ``instep.attach``: whether a step is put off, or runs beside backward.
        bucket_bytes: as for ``instep.attach``; not under DDP.
        clip: clip all gradients, in place of ``gradient_clip_val``.
        undo: as for ``instep.attach``: step on trial, and put back what turns out otherwise.
        together: with ``schedule="backward"`` and ``accumulate_grad_batches``, in automatic optimization, one backward
            for all batches of a step, after their forwards: gradients are freed, and what the forwards keep for
            backward is in memory for all of these batches at once. See ``Attachment.backward(more=True)``.
        nonfinite: as for ``instep.attach``.
        comm_hook: as for ``instep.attach``, in place of ``DDPStrategy(ddp_comm_hook=…)``.
        shard_state: as for ``instep.attach``, under DDP.
        log_stats: log ``Attachment.stats()`` of this rank after each batch, each name behind ``instep/``. The Trainer's
            ``log_every_n_steps`` decides which are written.

    Raises:
        AttachError: when ``fit`` begins: a setting of the Trainer does not go with these options, named in the message
            with the one that does; or what ``instep.attach`` refuses.
        InstepError: weights that an error left in the middle of a step are saved, or trained.
    """

    def __init__(
        self,
        *,
        schedule: Schedules = "forward",
        defer: Defer = "auto",
        bucket_bytes: int | None = None,
        clip: ClipNorm | ClipValue | None = None,
        undo: bool | Literal["host"] = False,
        together: bool = False,
        nonfinite: Policy = "allow",
        comm_hook: CommHook | None = None,
        shard_state: bool = False,
        log_stats: bool = False,
    ) -> None:
        require_backward(together, schedule)
        # For the settings of the Trainer that do not go with these.
        self._schedule, self._clip, self._undo, self._shard_state = schedule, clip, undo, shard_state
        self._together, self._logs_stats = together, log_stats
        self._attach = partial(
            attach,
            schedule=schedule,
            defer=defer,
            bucket_bytes=bucket_bytes,
            clip=clip,
            undo=undo,
            nonfinite=nonfinite,
            comm_hook=comm_hook,
            shard_state=shard_state,
        )
        self._attachment: Attachment | None = None
        self._torn_by: BaseException | None = None
        self._accumulating = ExitStack()
        self._replaced: StandIn | None = None  # the module's backward()

    @property
    def attachment(self) -> Attachment | None:
        """The attachment, while the model is attached."""
        return self._attachment

    @property
    def _writes_in_backward(self) -> bool:
        """Whether backward writes weights that cannot be put back."""
        return self._schedule == "backward" and not self._undo

    @property
    def _has_two_passes(self) -> bool:
        return isinstance(self._clip, ClipNorm) and self._clip.mode == "two_pass"

    # What Lightning calls, in the order of its calls.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer, Trainer):
            raise AttachError(
                f"InstepCallback is for the Trainer of lightning.pytorch; this one is {type(trainer).__module__}'s. "
                "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"
            )
        if stage != "fit":
            return
        self._refuse_strategy(trainer)
        self._refuse_precision(trainer)
        self._refuse_clipping(trainer)
        self._refuse_backward(pl_module)
        self._refuse_iterator(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._refuse_torn()
        self._attachment = self._attach(
            trainer.model or pl_module,
            [o.optimizer if isinstance(o, LightningOptimizer) else o for o in trainer.optimizers],
            scaler=_scaler(trainer) if self._undo else None,
        )
        if self._together or self._has_two_passes:
            self._replaced = StandIn(pl_module, "backward", partial(self._backward, trainer, self._attachment))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # FSDP2 reduces the gradients of each micro-batch, with Lightning; accumulate() would add them up before.
        if self._attachment is None or self._together:
            return
        if _leaves_out_step(trainer) and not _is_sharded(trainer):
            self._accumulating.enter_context(self._attachment.accumulate())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._accumulating.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._logs_stats and self._attachment is not None:
            # Lightning asks for a size where the step has the iterator. It weighs epochs by it, which are not logged.
            pl_module.log_dict(named_stats(self._attachment), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Not require_committed(), which waits for ranks that may be waiting for this one.
        state = "idle" if self._attachment is None else self._attachment.state
        if state == "torn" or (state == "open" and self._writes_in_backward):
            self._torn_by = exception
        self._detach()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._refuse_torn()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._torn_by = None  # the weights are whole again

    def _refuse_torn(self) -> None:
        if self._torn_by is not None:
            raise InstepError(
                f"training stopped in the middle of a step ({type(self._torn_by).__name__}: {self._torn_by}), with "
                "some weights updated and others not: they are not saved, nor trained any further. Call "
                "fit(…, ckpt_path=…) with a checkpoint, or use another InstepCallback to go on from these weights"
            ) from self._torn_by

    def _backward(self, trainer: Trainer, overlap: Attachment, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of ``LightningModule.backward``."""
        if args or kwargs:  # of manual_backward()
            loss.backward(*args, **kwargs)
            return
        by_itself = trainer.lightning_module.automatic_optimization
        overlap.backward(loss, more=self._together and by_itself and _leaves_out_step(trainer))

    def _detach(self) -> None:
        self._accumulating.close()
        if self._replaced is not None:
            self._replaced.remove()
            self._replaced = None
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None

    def _refuse_strategy(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
            raise AttachError(
                f"strategy={type(strategy).__name__} is not supported by InstepCallback: use a single device, "
                "strategy='ddp', or, for sharded models, ModelParallelStrategy with fully_shard in configure_model()"
            )
        frees = self._writes_in_backward or self._together
        if frees and _is_sharded(trainer) and trainer.accumulate_grad_batches > 1:
            raise AttachError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}: with {type(strategy).__name__} Lightning "
                "reduces the gradients of every micro-batch, and schedule='backward' would step each of them. Use "
                "InstepCallback(schedule='forward') or InstepCallback(schedule='backward', undo=True)"
            )

    def _refuse_precision(self, trainer: Trainer) -> None:
        if self._schedule == "forward" and isinstance(trainer.precision_plugin, DoublePrecision):
            raise AttachError(
                f"precision={trainer.precision!r} changes torch's default dtype in every forward, where "
                "schedule='forward' updates weights: state made there would have another dtype. Use "
                "InstepCallback(schedule='backward'), with undo=True where gradients are clipped"
            )
        if self._writes_in_backward and _scaler(trainer) is not None:
            raise AttachError(
                f"precision={trainer.precision!r} scales the loss, and schedule='backward' updates weights before the "
                "scaler has seen whether a gradient is infinite. Use InstepCallback(schedule='forward') or "
                "InstepCallback(schedule='backward', undo=True), or precision='bf16-mixed'"
            )

    def _refuse_clipping(self, trainer: Trainer) -> None:
        value, clip = trainer.gradient_clip_val or None, self._clip
        if value is not None and clip is not None:
            raise AttachError(
                f"gradient_clip_val={value} and InstepCallback(clip={clip!r}) would clip one after the other. Leave "
                "one of them out"
            )
        if value is not None and self._writes_in_backward:
            raise AttachError(
                f"gradient_clip_val={value}: Lightning clips after backward, and schedule='backward' has applied the "
                f"gradients by then. Use {self._instead_of(trainer, value)}; or InstepCallback(schedule='forward')"
            )

    def _instead_of(self, trainer: Trainer, value: float) -> str:
        """What clips in place of ``gradient_clip_val``. First what frees gradients of several batches, where they add
        up."""
        count = trainer.accumulate_grad_batches
        together, cost = "", ""
        if self._together or (count > 1 and not isinstance(trainer.strategy, DDPStrategy)):
            together, cost = "together=True, ", f", and activations of all {count} batches are kept"
        if trainer.gradient_clip_algorithm == "value":
            line = f"InstepCallback(schedule='backward', {together}clip=instep.ClipValue({value}))"
            return f"in place of gradient_clip_val {line}{cost}"
        twice = f"InstepCallback(schedule='backward', {together}clip=instep.ClipNorm({value}, mode='two_pass'))"
        undo = f"InstepCallback(schedule='backward', clip=instep.ClipNorm({value}), undo=True)"
        return f"in place of gradient_clip_val {twice}: backward runs twice{cost}; {undo}"

    def _refuse_backward(self, module: LightningModule) -> None:
        own = type(module).backward is not LightningModule.backward or "backward" in vars(module)
        if (self._together or self._has_two_passes) and own:
            option = "together=True" if self._together else "ClipNorm(mode='two_pass')"
            raise AttachError(
                f"{type(module).__name__} has a backward() of its own, and InstepCallback({option}) runs backward in "
                f"its place. Leave out {option}, or that method"
            )

    def _refuse_iterator(self, trainer: Trainer, module: LightningModule) -> None:
        """A ``training_step`` that takes its batches itself: Lightning has fetched the next one when it asks whether
        this one is the last of a window, and this callback is told of another number than Lightning steps by."""
        if "dataloader_iter" not in signature(module.training_step).parameters:
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # which Lightning puts there
        by_epoch = [c.scheduling.values() for c in callbacks if isinstance(c, GradientAccumulationScheduler)]
        count = max(trainer.accumulate_grad_batches, *chain.from_iterable(by_epoch), 1)
        if self._writes_in_backward and count > 1:
            raise AttachError(
                f"accumulate_grad_batches={count} with training_step(dataloader_iter): "
                "which backward is a step's last is not known before it runs, and schedule='backward' steps in it. "
                "Use InstepCallback(schedule='forward') or InstepCallback(schedule='backward', undo=True)"
            )


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _is_sharded(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy, ModelParallelStrategy)


def _leaves_out_step(trainer: Trainer) -> bool:
    """Whether Lightning leaves out ``optimizer.step()`` after this backward, so that gradients add up. After the last
    backward of an epoch Lightning steps, however many there were."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    last = trainer.is_last_batch or ready == trainer.num_training_batches
    return ready % trainer.accumulate_grad_batches != 0 and not last


def fabric_backward(fabric: Fabric, overlap: Attachment, loss: Tensor, *, more: bool = False) -> None:
    """``overlap.backward(loss, more=more)`` where Fabric expects ``fabric.backward(loss)``: for several micro-batches
    with one backward (``more``), and for ``ClipNorm(mode="two_pass")``.

    Args:
        fabric: that has set up the model and the optimizer.
        overlap: what ``instep.attach`` has returned for both.
        loss: a tensor of one number.
        more: whether it is of a micro-batch that is not the last of its step.

    Raises:
        AttachError: Fabric scales the loss (``precision="16-mixed"``), which ``undo=True`` and ``"forward"`` take.
    """
    if getattr(fabric.strategy.precision, "scaler", None) is not None:
        raise AttachError(
            "Fabric scales the loss (precision='16-mixed'), and fabric_backward() runs a backward that updates weights "
            "before the scaler has seen the gradients. Use fabric.backward(loss) with attach(…, undo=True) or "
            "schedule='forward', or precision='bf16-mixed'"
        )
    # Fabric calls ``backward`` of what it is given, when it has noted that this is its own.
    given: Any = SimpleNamespace(backward=partial(overlap.backward, loss, more=more))
    fabric.backward(given)
