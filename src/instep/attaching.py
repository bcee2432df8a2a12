"""``attach``: the optimizer's step moves behind other work, and the loop stays as it is."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from instep._arguments import models_of, optimizers_of, torchs_of, unlike_torchs
from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import Policy
from instep.attachment import Attachment, attached_parameters, replaceable
from instep.errors import AttachError
from instep.options import BY_ENVIRONMENT, Communication, Defer, Offload, Options, Schedules, pipeline_of
from instep.sources.ddp.reducer import CommHook
from instep.target import Target

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    schedule: Schedules = "forward",
    defer: Defer = "auto",
    bucket_bytes: int | None = None,
    clip: ClipNorm | ClipValue | float | None = None,
    accumulation_steps: int = 1,
    scaler: GradScaler | None = None,
    undo: bool | Literal["host"] = False,
    nonfinite: Policy = "allow",
    comm_hook: CommHook | None = None,
    mixed_precision: "MixedPrecisionPolicy | None" = None,
    shard_state: bool = False,
    offload: Offload | None = None,
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

    What the options decide, in the order in which they are described below:

    - When it steps: ``schedule``, ``defer``, ``bucket_bytes``, ``pipeline``.
    - What happens to gradients: ``clip``, ``accumulation_steps``, ``scaler``, ``undo``, ``nonfinite``.
    - Ranks: ``comm_hook``, ``mixed_precision``, ``shard_state``.
    - Memory and safety: ``offload``, ``random``, ``seed``.

    Args:
        model: what the loop calls, already on its device and in its dtype.
            Any module; a ``DistributedDataParallel``; a ``Replicated``; a model under ``fully_shard``,
            ``FullyShardedDataParallel(use_orig_params=True)`` or tensor parallelism. Or a list of modules that the loop
            calls one by one: ``"0.weight"`` is a parameter of the first.
        optimizer: one ``torch.optim.Optimizer`` or several, of parameters of ``model``.
            Frozen parameters are left alone until unfrozen. What accelerate or Fabric has prepared is taken, too.
        schedule: when a bucket steps; by default ``"forward"``: after ``optimizer.step()``, behind the next forward.
            On a CPU that hides the step of fused optimizers and torch's Muon. ``"backward"``: as soon as the bucket's
            gradients are final.
        defer: whether a step of ``schedule="forward"`` is put off; by default ``"auto"``: where that is faster.
            ``Attachment.advice`` says what was found. ``True``: wherever possible. ``False``: ``optimizer.step()``
            steps at once. With ``schedule="backward"``, on a CPU: whether a thread updates full buckets beside backward
            (fused optimizers and Muon, without options that take part in an update), with two more buckets of gradients
            alive.
        bucket_bytes: the most bytes of gradient in a bucket; by default a twentieth of all, on a CPU 16 MiB at most,
            and one parameter more where less than half of that is full. One parameter may be larger. Backward frees all
            but one bucket (on an accelerator two: one fills, one is stepped). Refused with DDP and ``replicate``
            (``bucket_cap_mb`` decides) and FSDP (its groups do). A stage of a pipeline is one bucket by default, since
            all of its gradients are there when it is stepped.
        pipeline: the schedule of ``torch.distributed.pipelining`` that trains ``model``; by default ``None``.
            ``model`` is then the module of this rank's stage, or a list for several. With ``schedule="backward"`` a
            stage is stepped in the bubble behind its last backward, once torch has scaled its gradients. ``ClipNorm``
            and ``nonfinite`` go by the gradients of all stages.
        clip: clips the gradients of all attached parameters before they are applied; by default ``None``: nothing is.
            A number is that of ``ClipNorm``.
        accumulation_steps: how many backwards make a step; by default 1.
            The others only add up, under DDP in ``no_sync``. For loops without ``with overlap.accumulate():``.
        scaler: the ``torch.amp.GradScaler`` of the loop; by default ``None``, which is enough for ``"forward"``.
            ``schedule="backward"`` needs it, and ``undo``, to apply gradients without the scale.
        undo: whether backward steps on trial, until ``optimizer.step()``; by default ``False``.
            For ``schedule="backward"``. Keeps all gradients, and copies of parameters and state from before the step
            (``"host"``: in host memory). Whatever shows that the plain loop would differ (clipping, an infinite
            gradient, a step left out, a gradient or weight used in between, an error) puts the trial back bit for bit,
            and ``optimizer.step()`` is the plain one.
        nonfinite: what becomes of a step with NaN or infinity in a gradient; by default ``"allow"``: as in plain torch.
            ``"skip"``, with ``"forward"`` or ``undo``: all ranks leave it out, and parameters, state and groups stay
            bit for bit. ``"raise"``: ``optimizer.step()`` raises ``NonFiniteGradientError``, and nothing is applied;
            with ``"backward"`` and no ``undo``, ``backward()`` raises: the bucket at fault is not applied, others are,
            and the step is torn.
        comm_hook: ``(state, hook)``, which reduces each bucket of DDP; by default ``None``: DDP's own mean.
            In place of ``register_comm_hook``: DDP takes one hook. The result of ``hook(state, bucket)``, a future, is
            stepped. The hook stays after ``detach()``.
        mixed_precision: a ``MixedPrecisionPolicy`` of ``torch.distributed.fsdp``; by default ``None``.
            Forward and backward use copies of all parameters, frozen ones too, in ``param_dtype``; DDP's mean is
            computed and sent in ``reduce_dtype`` (else ``param_dtype``). Parameters, gradients and step stay as they
            are, usually float32; so do buffers and batch normalization. Floating-point inputs are cast to
            ``param_dtype`` unless ``cast_forward_inputs=False``, outputs to ``output_dtype`` if given.
        shard_state: whether each of N ranks keeps 1/N of the state, and of the step (ZeRO-1); by default ``False``.
            Under DDP: a rank has the state of its rows of every parameter, steps these, and gets the others. Where the
            update is not known to be elementwise, each parameter is one rank's. All ranks must call
            ``optimizer.state_dict()``, which is the plain one, and ``detach()``, which makes the optimizer plain.
        offload: ``"host"`` keeps optimizer state in pinned host memory; by default ``None``: on its device.
            ``optimizer`` steps on the accelerator, with the plain loop's numbers, and there the state of two buckets at
            most. ``optimizer.state`` and ``state_dict()`` have it in host memory until ``detach()``. Where a step
            ends the host waits for the copies. ``schedule="forward"`` always puts off.
        random: ``"keyed"`` is for optimizers that draw random numbers, and needs ``seed``; by default ``None``.
            For stochastic rounding, say. Each parameter is stepped alone, while torch's default generators are seeded
            with ``instep.draw_key(seed, step, name)``. So draws depend neither on buckets, schedule nor number of
            ranks, are not those of the plain loop, and leave the loop's own as if the optimizer drew none. torch's own
            optimizers draw nothing, and are stepped as ever.
        seed: a number from 0 to 2**63 - 1, the same on all ranks, for ``random``; by default ``None``.

    Returns:
        The attachment. It lives as long as the model does, or any of several, whether or not it is kept.

    Raises:
        AttachError: something about the arguments, named in the message; a ``ValueError``. No hook was left behind.
            Parameters that are attached already are such a thing, unless both calls ask for nothing but
            ``schedule="forward"``: then the earlier attachment is detached, and a warning says so.
        UnsupportedOptimizerError: the optimizer's update couples parameters, or it wraps another optimizer.

    With ``INSTEP_DISABLE=1`` in the environment the same training runs without overlap, and a warning says so: torch
    takes each step, and gradients are clipped and looked at where ``optimizer.step()`` begins. What cannot be had that
    way is refused: ``comm_hook``, ``mixed_precision``, and ``random`` where an
    optimizer is not torch's own.

    Since 0.1.0.

    Example:
        ```python
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        instep.attach(model, optimizer, schedule="backward")
        for batch in loader:
            model(batch).backward()  # updates each parameter, and frees its gradient, as soon as that is final
            optimizer.step()  # steps what is left, and commits
            optimizer.zero_grad()
        ```
    """
    models = models_of(model, AttachError)
    if isinstance(scaler, GradScaler) and not scaler.is_enabled():
        scaler = None
    if isinstance(clip, (int, float)):
        try:
            clip = ClipNorm(clip)
        except AttachError as error:
            raise AttachError(f"clip={clip!r}: {error}") from None
    options = Options(
        schedule,
        defer,
        bucket_bytes,
        clip,
        accumulation_steps,
        scaler,
        undo,
        nonfinite,
        Communication(comm_hook, mixed_precision, shard_state, pipeline_of(pipeline)),
        offload,
        random,
        seed,
        left_to_torch=BY_ENVIRONMENT if os.environ.get("INSTEP_DISABLE", "") not in ("", "0") else None,
    )
    unlike = unlike_torchs(optimizer) if options.takes_any_loop else None
    optimizers = optimizers_of(optimizer, AttachError) if unlike is None else torchs_of(optimizer)
    earlier = replaceable(optimizers) if options.asks_for_nothing else []
    others = {key: attachment for key, attachment in attached_parameters().items() if attachment not in earlier}
    return Attachment(Target(models, optimizers, others, unlike, as_it_is=options.disabled), options, earlier)


def attach_stepping_itself(model: nn.Module, optimizer: Optimizer) -> Attachment:
    """Attach so that nobody has to call ``optimizer.step()``: it is called where each backward ends.

    Gradients that were applied are ``None`` afterwards, and no ``zero_grad()`` is needed. ``model`` may also be one
    that ``fully_shard`` has been applied to, or a ``FullyShardedDataParallel`` with ``use_orig_params=True``.

    Raises as ``attach`` does.
    """
    return Attachment(Target([model], [optimizer], attached_parameters()), Options("backward", steps_itself=True))
