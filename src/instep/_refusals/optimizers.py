"""Optimizers whose ``step()`` is more than an update of each parameter by itself."""

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from instep._optim.kinds import cannot_follow, replaced_step, takes_hooks
from instep.errors import AttachError, UnsupportedOptimizerError
from instep.options import Options
from instep.target import Target


def given_twice(target: Target, options: Options) -> None:
    optimizers = target.optimizers
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise AttachError(f"the same {type(optimizers[0]).__name__} is given twice in optimizer")


def unlike_torchs(target: Target, options: Options) -> None:
    if target.unlike is not None:
        raise AttachError(
            f"{target.unlike} is no torch.optim.Optimizer: torch tells nobody when it steps. Attach the optimizer of "
            "torch's kind that it holds, if it adds nothing to step()"
        )


def unsupported(target: Target, options: Options) -> None:
    """Where ``step()`` is called as it is, it may do what it likes."""
    for optimizer in target.optimizers if options.splits_steps else ():
        kind = type(optimizer).__name__
        for refuse in (_evaluates_again, _holds_another, _is_patched):
            refuse(optimizer, kind, options.taken_whole())
        _refuse_differentiable(optimizer, kind)


def asked_for_more(target: Target, options: Options) -> None:
    """``clip`` and ``nonfinite`` come before each update, and ``check_steps`` after: calls that torch tells of."""
    if options.clip is not None or options.nonfinite != "allow" or options.check_steps:
        for optimizer in target.optimizers:
            kind = type(optimizer).__name__
            _evaluates_again(optimizer, kind, options.taken_whole("clip", "nonfinite", "check_steps"))
            if not takes_hooks(optimizer):
                raise UnsupportedOptimizerError(
                    f"{kind} was made without torch.optim.Optimizer.__init__: torch calls no hook around its step(), "
                    "which clip, nonfinite and check_steps need. Leave them out, or clip in the loop"
                )


def _evaluates_again(optimizer: Optimizer, kind: str, otherwise: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            f"{kind} evaluates the loss again within a step, and every update depends on all parameters: no part of "
            f"the step can run apart from it. {otherwise}"
        )


def _holds_another(optimizer: Optimizer, kind: str, otherwise: str) -> None:
    inner = next(_inner_optimizers(optimizer), None)
    if inner is not None:
        attribute, wrapped = inner
        raise UnsupportedOptimizerError(
            f"{kind} holds another optimizer ({attribute}: {type(wrapped).__name__}), so its step is more than an "
            f"update per parameter. {otherwise}. Attach the inner optimizer only if the wrapper adds nothing to "
            "step()"
        )


def _inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state"):
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for candidate in values:
            if isinstance(candidate, Optimizer):
                yield attribute, candidate


def _is_patched(optimizer: Optimizer, kind: str, otherwise: str) -> None:
    patch = replaced_step(optimizer)
    if patch is not None and (reason := cannot_follow(optimizer)) is not None:
        raise UnsupportedOptimizerError(
            f"the step method of this {kind} object was replaced (by {getattr(patch, '__qualname__', patch)!r}), "
            f"and instep cannot tell what it does: {reason}. {otherwise}. Or attach before it is replaced"
        )


def _refuse_differentiable(optimizer: Optimizer, kind: str) -> None:
    if any(group.get("differentiable", False) for group in optimizer.param_groups):
        raise UnsupportedOptimizerError(
            f"{kind}(differentiable=True) keeps the step in the autograd graph, which backward is just leaving. "
            "Use differentiable=False, or no instep"
        )
