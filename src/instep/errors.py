"""Every error instep raises on purpose. Each message names what was found and what to do."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = [
    "AccumulationError",
    "AttachError",
    "CheckpointError",
    "ConcurrentBackwardError",
    "HyperparameterChangedError",
    "InstepError",
    "NonFiniteGradientError",
    "SpentGradientError",
    "StaleAttachmentError",
    "StaleMasterError",
    "StepMismatchError",
    "TornStepError",
    "UncommittedStepError",
    "UnsupportedOptimizerError",
]


def class_name(of: object, *, in_full: bool = False) -> str:
    """The class of an object, or a class, as a message names it.

    Args:
        in_full: with its module; else only where the name is that of a class of torch's, and means another.
    """
    cls = of if isinstance(of, type) else type(of)
    misleads = any(hasattr(module, cls.__name__) for module in (torch, torch.nn, torch.optim))
    if cls.__module__.partition(".")[0] in ("builtins", "torch") or not (in_full or misleads):
        return cls.__name__
    return f"{cls.__module__}.{cls.__qualname__}"


class InstepError(RuntimeError):
    """Base of all errors below.

    Since 0.1.0.
    """


class AttachError(InstepError, ValueError):
    """The model, the optimizer or an option cannot be attached as given. Nothing was changed.

    Since 0.1.0.
    """


class UnsupportedOptimizerError(AttachError):
    """The optimizer's update couples parameters, or the object wraps another optimizer.

    Raised by ``attach`` where the class says so; by ``optimizer.step()`` where the first updates leave what nobody can
    put back; at the first step in which two buckets disagree about a value they share, or parts of a later step come
    out otherwise than the whole. That step is then torn.

    Since 0.1.0.
    """


class AccumulationError(InstepError):
    """A second backward reached a parameter that this step has already consumed.

    Wrap all but the last micro-batch in ``overlap.accumulate()`` (or DDP's ``no_sync``).

    Since 0.1.0.
    """


class UncommittedStepError(AccumulationError):
    """A forward found that backward has already updated the weights, but ``step()`` never came.

    The plain loop would still see the old weights here.

    Since 0.1.0.
    """


class CheckpointError(InstepError):
    """A checkpoint does not fit the attachment that it is loaded into. Nothing of that was changed.

    Since 0.1.0.
    """


class SpentGradientError(InstepError):
    """A gradient was used after it had been applied and freed during backward; or changed when others had been, clipped
    by a norm that it is part of.

    Since 0.1.0.
    """


class StaleAttachmentError(InstepError):
    """A parameter was replaced, moved to another device or converted after ``attach``.

    Since 0.1.0.
    """


class StaleMasterError(InstepError):
    """A half-precision weight was written between steps, and its fp32 master (``instep.masters``) was not.

    Nothing of the step is written. Call ``optimizer.renew_masters()`` after such a write.

    Since 0.1.0.
    """


class HyperparameterChangedError(InstepError):
    """A hyper-parameter changed between the backward that used it and ``optimizer.step()``; or ``step()`` was called in
    an autocast block that changes its update.

    Since 0.1.0.
    """


class ConcurrentBackwardError(InstepError):
    """Two threads train one model at the same time. Nothing was written for the second one.

    Since 0.1.0.
    """


class StepMismatchError(InstepError):
    """Ranks are not at the same step, or do not train the same model in the same way.

    Since 0.1.0.
    """


class NonFiniteGradientError(InstepError):
    """A gradient holds NaN or infinity, and ``nonfinite="raise"`` was given.

    Attributes:
        parameter: the name of the first such parameter on this rank, ``None`` if all gradients here are finite.
        rank: the first rank that has such a gradient; with ``schedule="backward"``, where nobody is asked, this one.

    Since 0.1.0.
    """

    def __init__(self, message: str, parameter: str | None, rank: int) -> None:
        self.parameter = parameter
        self.rank = rank
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.parameter, self.rank)


class TornStepError(InstepError):
    """A step was applied to some of the parameters only, or on some of the ranks only.

    Of a sharded parameter the lists say what has become of this rank's part.

    Attributes:
        step: the number of the step, counted from 1.
        applied: names of the parameters that already hold the new value.
        pending: names of the parameters whose gradient was final but that were not updated.
        unsure: names of the parameters that may hold the old value, the new one or neither: their update raised or was
            interrupted.
        rank: this process's rank, 0 without ``torch.distributed``.
        cause: what stopped the step, when it is known. Also the ``__cause__``.

    Since 0.1.0.
    """

    def __init__(
        self,
        step: int,
        applied: Sequence[str],
        pending: Sequence[str],
        rank: int,
        cause: BaseException | None,
        unsure: Sequence[str] = (),
    ) -> None:
        self.step = step
        self.applied = tuple(applied)
        self.pending = tuple(pending)
        self.unsure = tuple(unsure)
        self.rank = rank
        self.cause = self.__cause__ = cause
        said = str(cause).split(". ")[0] if isinstance(cause, InstepError) else cause  # the rest is what to do instead
        reason = "backward raised" if cause is None else f"{type(cause).__name__}: {said}"
        # Of those that have had no final gradient yet nobody knows whether they are of the step.
        left = f" and {len(self.pending)} were left ({_some(self.pending)})" if self.pending else ""
        neither = f", and {len(self.unsure)} may have been updated or not ({_some(self.unsure)})" if unsure else ""
        # In a process of its own there are no ranks to tell apart.
        has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        where = f" on rank {rank}" if rank or has_ranks else ""
        super().__init__(
            f"step {step} is torn{where}: {len(self.applied)} parameters were updated "
            f"({_some(self.applied)}){left}{neither}, because "
            f"{reason}. Load model and optimizer from a checkpoint and call accept_torn(), or call "
            "accept_torn() alone to train on from these weights"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.step, self.applied, self.pending, self.rank, self.cause, self.unsure)


def _some(names: Sequence[str], limit: int = 4) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, …"
