"""``attach``: the optimizer's step moves behind other work, and the loop stays as it is."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from instep._arguments import models_of, optimizers_of, torchs_of, unlike_torchs
from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import Policy
from instep._refusals.rules import DISABLED, LEFT_TO_TORCH, MODEL, OPTIONS, PARAMETERS, left_to_torch, refuse
from instep.attachment import Attachment, attached_parameters, giving_way, register
from instep.errors import AttachError
from instep.options import BY_ENVIRONMENT, Communication, Defer, Offload, Options, Randomness, Schedules, pipeline_of
from instep.sources.ddp.reducer import CommHook
from instep.sources.fsdp.modules import put_shards_in_place
from instep.target import Target, as_one

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

_logger = logging.getLogger("instep")
_said: set[str] = set()
"""What was logged: a loop that attaches again and again, for each fold or epoch, is told once."""
_FEW_BYTES = 1024
"""As ``bucket_bytes``, fewer are meant as MiB, it seems; ``1`` is how to ask for a bucket for each parameter."""


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    schedule: Schedules = "forward",
    defer: Defer = "auto",
    bucket_bytes: int | None = None,
    clip: ClipNorm | ClipValue | None = None,
    accumulation_steps: int = 1,
    scaler: GradScaler | None = None,
    undo: bool | Literal["host"] = False,
    nonfinite: Policy = "allow",
    comm_hook: CommHook | None = None,
    mixed_precision: "MixedPrecisionPolicy | None" = None,
    cross_iteration: bool = False,
    shard_state: bool = False,
    offload: Offload | None = None,
    check_steps: int = 0,
    random: Literal["keyed"] | None = None,
    seed: int | None = None,
    pipeline: "PipelineScheduleSingle | PipelineScheduleMulti | None" = None,
) -> Attachment:
    """Step the parameters of ``model`` behind backward, or behind the next forward, with the user's ``optimizer``.

    The loop stays as it is. Parameters, optimizer state and ``param_groups`` are after each step bit for bit those of
    the plain loop. The optimizer object is neither replaced nor wrapped; schedulers, ``state_dict`` and checkpoints
    are the plain ones.

    With ``schedule="backward"``, on one device, a bucket is stepped as soon as its last gradient is accumulated, and
    its gradients are freed; under ``DistributedDataParallel`` DDP's own buckets are stepped as they arrive, while
    later ones are in flight. ``optimizer.step()`` steps what backward left (parameters whose gradient only DDP's end
    of backward knows, buckets that were not full) and commits the step.

    With ``schedule="forward"`` everything up to ``optimizer.step()`` is the plain loop, so gradients may be clipped,
    scaled and accumulated by the loop itself; ``step()`` returns at once, and each bucket is stepped before the module
    that reads it runs, or before anybody else uses one of its parameters in Python.

    Args:
        model: any module, already on its device and in its dtype; a ``DistributedDataParallel``; what
            ``instep.replicate`` returned; a model that ``fully_shard``, ``FullyShardedDataParallel`` (with
            ``use_orig_params=True``) or tensor parallelism was applied to. Or a list of modules, each of which the
            loop calls by itself, with parameters in one optimizer: ``"0.weight"`` is a parameter of the first.
        optimizer: one ``torch.optim.Optimizer`` or several, of parameters of ``model``. Frozen ones are left alone
            until they are unfrozen. What accelerate or Fabric has prepared is taken, too.
        schedule: when a bucket steps. ``"backward"``: as soon as its gradients are final. ``"forward"``: after
            ``optimizer.step()``, behind the next forward; on CPU that hides the step of fused optimizers, and of
            torch's Muon.
        defer: with ``schedule="forward"``, whether the step is put off. ``True``: wherever that is possible. ``False``:
            ``optimizer.step()`` steps at once, as in the plain loop. ``"auto"``: it is put off where that was found to
            be faster, see ``Attachment.advice``. With ``schedule="backward"``, on a CPU, whether a thread updates full
            buckets while backward goes on (fused optimizers and Muon, without options that have a part in an update);
            the gradients of two more buckets are alive then.
        bucket_bytes: the most bytes of gradient in a bucket; a single parameter may be larger. Unless told, a
            twentieth of all gradients that are stepped in buckets, and on a CPU 16 MiB at most: backward frees all but
            that twentieth (on an accelerator, where one fills while one is stepped, two). Not under DDP and
            ``replicate``, whose own ``bucket_cap_mb`` decides, nor with FSDP, whose groups are the buckets. In a
            pipeline a stage is one bucket, unless told: all of its gradients are there when it is stepped.
        clip: clip the gradients of all attached parameters before they are applied.
        accumulation_steps: every so many backwards step; the others only add to the gradients, under DDP in
            ``no_sync``. For loops that cannot be given ``with overlap.accumulate():``.
        scaler: the ``torch.amp.GradScaler`` of the loop. ``schedule="backward"`` needs it, and ``undo``, to apply
            gradients without the scale; ``"forward"`` does without.
        undo: with ``schedule="backward"``, keep all gradients, and copies of parameters and their state from before
            the step (``"host"``: in host memory), until ``optimizer.step()``. Backward then steps on trial. Whatever
            shows that the plain loop would have done otherwise (clipping, an infinite gradient, a step that is left
            out, a gradient or weight that is used in between, an error) has it put back bit for bit, and
            ``optimizer.step()`` steps as the plain loop does.
        nonfinite: what becomes of a step with a gradient that holds NaN or infinity. ``"allow"``: what the plain loop
            does. ``"skip"``: it is left out on all ranks, and parameters, state and groups stay bit for bit as they
            were; with ``schedule="forward"`` or ``undo``. ``"raise"``: ``NonFiniteGradientError``
            from ``optimizer.step()``, and nothing of the step is applied; with ``schedule="backward"`` and no
            ``undo`` from ``backward()``, and the bucket that holds it is not applied, but others are: the step is torn.
        comm_hook: under DDP, ``(state, hook)`` as for ``register_comm_hook``: ``hook(state, bucket)`` reduces each
            bucket, in place of DDP's own mean, and what its future holds is stepped. The two must be given here: DDP
            takes one hook. It stays after ``detach()``.
        mixed_precision: a ``torch.distributed.fsdp.MixedPrecisionPolicy``. The forward and backward of ``model`` then
            compute with copies of its parameters in ``param_dtype``, DDP's mean is computed and sent in
            ``reduce_dtype`` (``param_dtype`` unless told), and the parameters, their gradients and the step stay as
            they are, usually float32. Frozen parameters are cast too; buffers and batch normalization are not.
            Floating-point inputs of ``model`` are cast to ``param_dtype`` unless ``cast_forward_inputs=False``, its
            outputs to ``output_dtype`` if given.
        cross_iteration: with ``schedule="forward"`` under DDP, backward does not wait for communication: buckets are
            reduced and stepped while the next forward runs, each before the module that reads it, in an order that
            suits that. ``optimizer.step()`` takes over gradients that are still on their way; whoever uses one before
            waits for all of them. Needs ``gradient_as_bucket_view=True``. All ranks must attach: they make a process
            group of their own.
        shard_state: under DDP, each rank keeps the optimizer's state of its own rows of every parameter, steps those,
            and gets the others' from the other ranks: 1/N of state and step on N ranks (ZeRO-1). Where the update is
            not elementwise, or not known to be, each parameter is one rank's. ``optimizer.state_dict()`` is the plain
            optimizer's, and ``detach()`` makes the optimizer so again; all ranks must call them.
        offload: ``"host"``: optimizer state is in pinned host memory, and on the accelerator only while it is stepped:
            that of two buckets at most. It is stepped there, by ``optimizer``, with the numbers of the plain loop.
            ``optimizer.state`` and ``state_dict()`` have the tensors in host memory; ``detach()`` moves them back.
            Where a step ends the host waits for the copies. Steps of ``schedule="forward"`` are always put off.
        check_steps: so many of the first steps are taken twice: beside instep's own, copies of parameters and state are
            stepped by the optimizer's plain ``step()`` with the same gradients, and every parameter, every entry of
            state and every value of a group is compared bit for bit. For optimizers that ``overlap.plan`` calls
            unproven. In these steps the gradients and copies of parameters and state are held until
            ``optimizer.step()`` returns, which with ``schedule="forward"`` waits for the update. Forward and backward
            run once, and random numbers stay the loop's. ``UnsupportedOptimizerError`` from ``optimizer.step()`` names
            the first tensor that differs; the step is torn, or with ``undo`` put back.
        random: ``"keyed"``, with a ``seed``: for an optimizer that draws random numbers in its update (stochastic
            rounding). Each parameter is stepped by one call for it alone, for which torch's default generators are
            seeded with ``instep.draw_key(seed, step, name)`` and then put back. So the draws depend neither on buckets
            nor on the schedule or the number of ranks, and those of the loop stay as if the optimizer drew none. They
            are not the draws of the plain loop. torch's own optimizers draw nothing, and are stepped as ever.
        seed: a number from 0 to 2**63 - 1, the same on all ranks.
        pipeline: the schedule of ``torch.distributed.pipelining`` that trains ``model``, which is then the module of
            this rank's stage, or a list of those of all its stages. With ``schedule="backward"`` a stage is stepped
            when its last micro-batch is through and torch has scaled its gradients, in the bubble behind its last
            backward. ``clip=ClipNorm(…)`` takes the norm of the gradients of all stages, and ``nonfinite`` asks the
            ranks of all.

    Returns:
        The attachment. It lives as long as the model does, or any of several, whether or not it is kept.

    Raises:
        AttachError: something about the arguments, named in the message; a ``ValueError``. No hook was left behind.
            Parameters that are attached already are such a thing, unless both calls ask for nothing but
            ``schedule="forward"``: then the earlier attachment is detached, and a warning says so.
        UnsupportedOptimizerError: the optimizer's update couples parameters, or it wraps another optimizer.

    With ``INSTEP_DISABLE=1`` in the environment the same training runs without overlap, and a warning says so: torch
    takes each step, and gradients are clipped and looked at where ``optimizer.step()`` begins. What cannot be had that
    way is refused: ``ClipNorm(mode="per_bucket")``, ``comm_hook``, ``mixed_precision``, and ``random`` where an
    optimizer is not torch's own.
    """
    models = models_of(model, AttachError)
    if isinstance(scaler, GradScaler) and not scaler.is_enabled():
        scaler = None
    options = Options(
        schedule,
        defer,
        bucket_bytes,
        clip,
        accumulation_steps,
        scaler,
        undo,
        nonfinite,
        Communication(comm_hook, mixed_precision, cross_iteration, shard_state, pipeline_of(pipeline)),
        offload,
        check_steps,
        Randomness(random, seed),
        left_to_torch=BY_ENVIRONMENT if os.environ.get("INSTEP_DISABLE", "") not in ("", "0") else None,
    )
    unlike = unlike_torchs(optimizer) if options.takes_any_loop else None
    optimizers = optimizers_of(optimizer, AttachError) if unlike is None else torchs_of(optimizer)
    earlier = giving_way(optimizers) if options.asks_for_nothing else []
    others = {key: one for key, one in attached_parameters().items() if one not in earlier}
    return _attach(Target(as_one(models), optimizers, others, unlike), options, earlier)


def attach_stepping_itself(model: nn.Module, optimizer: Optimizer) -> Attachment:
    """Attach so that nobody has to call ``optimizer.step()``: it is called where each backward ends.

    Gradients that were applied are ``None`` afterwards, and no ``zero_grad()`` is needed. ``model`` may also be one
    that ``fully_shard`` has been applied to, or a ``FullyShardedDataParallel`` with ``use_orig_params=True``.

    Raises as ``attach`` does.
    """
    return _attach(Target(model, [optimizer], attached_parameters()), Options("backward", steps_itself=True))


def _attach(target: Target, options: Options, earlier: Sequence[Attachment] = ()) -> Attachment:
    refuse(OPTIONS, target, options)
    if not options.disabled:
        put_shards_in_place(target.model)
    if (why := left_to_torch(target, options)) is not None:
        refuse(LEFT_TO_TORCH, target, options)
        options = replace(options, left_to_torch=why)
        _say_once(logging.INFO, f"the step is taken at once: {why}")
    elif options.disabled:
        refuse(DISABLED, target, options)
        _say_once(logging.WARNING, f"INSTEP_DISABLE is set: {type(target.model).__name__} trains without overlap")
    else:
        refuse(MODEL, target, options)
        refuse(PARAMETERS, target, options)
    if options.bucket_bytes is not None and 1 < options.bucket_bytes < _FEW_BYTES:
        given = options.bucket_bytes
        _say_once(
            logging.WARNING,
            f"bucket_bytes={given} makes a bucket of every parameter: it counts bytes. For {given} MiB: "
            f"bucket_bytes={given} * 2**20",
        )
    for one in earlier:
        one.detach()
        _say_once(
            logging.WARNING,
            "an earlier instep.attach() of these parameters is detached: this call takes its place. Several optimizers "
            "go into one call: attach(model, [first, second])",
        )
    attachment = Attachment(target, options)
    register(target.called, attachment)
    return attachment


def _say_once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        _logger.log(level, message)
