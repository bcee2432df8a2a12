"""What ``attach`` refuses of the optimizers: those whose ``step()`` is more than an update of each parameter by itself,
or is called where no hook runs.

Each public function is a rule, apart from ``drawing_by_key``, which two rules and several rows of ``pairs.py`` ask. An
optimizer that none of these refuses may still be one that couples parameters: its first real updates tell
(``_step/judging.py``).
"""

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from instep._optim.kinds import is_torchs_own, replaced_step, steps_one, takes_hooks
from instep.errors import AttachError, UnsupportedOptimizerError, class_name
from instep.master_weights import HALF, MASTER, Masters
from instep.options import Options
from instep.target import Target


def masters_lost(target: Target, options: Options) -> None:
    """torch loads any state into any optimizer, and makes it half: masters tell by their dtype that it has."""
    for optimizer in target.optimizers:
        held = (inner for _, inner in _inner_optimizers(optimizer))  # ZeroRedundancyOptimizer loads all itself, too
        if any(isinstance(each, Masters) for each in (optimizer, *held)):
            continue
        masters = (entry.get(MASTER) for entry in getattr(optimizer, "state", {}).values() if isinstance(entry, dict))
        if any(m.dtype in HALF for m in masters if isinstance(m, torch.Tensor)):
            name = class_name(optimizer)
            raise AttachError(
                f"{name} has loaded a checkpoint of masters({name}): it does not step the fp32 masters, and torch has "
                f"rounded these and its state to the weights' dtype. Make it by instep.masters({name})(…) and load "
                f"again, or go on without masters: optimizer.state[p].pop({MASTER!r}) for each"
            )


def given_twice(target: Target, options: Options) -> None:
    optimizers = target.optimizers
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise AttachError(f"the same {class_name(optimizers[0])} is given twice in optimizer")


def unlike_torchs(target: Target, options: Options) -> None:
    if target.unlike is not None:
        raise AttachError(
            f"{target.unlike} is no torch.optim.Optimizer: torch tells nobody when it steps. Attach the optimizer of "
            "torch's kind that it holds, if it adds nothing to step()"
        )


def unsupported(target: Target, options: Options) -> None:
    """Updates that cannot run apart from ``step()``. Where ``step()`` is called as it is, it may do what it likes."""
    if not options.splits_steps:
        return
    for optimizer in target.optimizers:
        for refuse in (_refuse_second_evaluation, _refuse_wrapper, _refuse_replaced_step):
            refuse(optimizer, options.way_to_step_whole())
        _refuse_differentiable(optimizer)
        if options.schedule == "backward":
            # It may lack what every optimizer has (``state``, ``defaults``), too.
            otherwise = options.way_to_step_whole()
            _refuse_without_constructor(optimizer, f"by which instep knows that a step is complete. {otherwise}")


def without_calls_around_the_step(target: Target, options: Options) -> None:
    """``clip`` and ``nonfinite`` act before each update, in hooks that torch calls around ``step()``. A loss that is
    evaluated again within ``step()`` makes gradients that those hooks do not see."""
    if options.clip is not None or options.nonfinite != "allow":
        for optimizer in target.optimizers:
            _refuse_second_evaluation(optimizer, options.way_to_step_whole("clip", "nonfinite"))
            _refuse_without_constructor(optimizer, "which clip and nonfinite need. Leave them out, or clip in the loop")


def _refuse_second_evaluation(optimizer: Optimizer, otherwise: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            f"{class_name(optimizer)} evaluates the loss again within a step, and every update depends on all "
            f"parameters: no part of the step can run apart from it. {otherwise}"
        )


def _refuse_wrapper(optimizer: Optimizer, otherwise: str) -> None:
    # Lookahead, SAM, ZeroRedundancyOptimizer and their like.
    for attribute, wrapped in _inner_optimizers(optimizer):
        raise UnsupportedOptimizerError(
            f"{class_name(optimizer)} holds another optimizer ({attribute}: {class_name(wrapped)}), so its step is "
            f"more than an update per parameter. {otherwise}. Attach the inner optimizer only if the wrapper adds "
            "nothing to step()"
        )


def _inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state"):  # large, and of parameters alone
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for candidate in values:
            if isinstance(candidate, Optimizer) and candidate is not optimizer:
                yield attribute, candidate


def _refuse_replaced_step(optimizer: Optimizer, otherwise: str) -> None:
    # A patch that also steps single parameters can be followed, as fused optimizers of trainers have it.
    patch = replaced_step(optimizer)
    if patch is not None and steps_one(optimizer) is None:
        raise UnsupportedOptimizerError(
            f"the step method of this {class_name(optimizer)} object was replaced (by "
            f"{getattr(patch, '__qualname__', patch)!r}), and no method step_param(p, group) or step_parameter(p, "
            f"group, index) beside it steps one parameter. {otherwise}. Or attach before it is replaced"
        )


def _refuse_differentiable(optimizer: Optimizer) -> None:
    if any(group.get("differentiable", False) for group in optimizer.param_groups):
        raise UnsupportedOptimizerError(
            f"{class_name(optimizer)}(differentiable=True) keeps the step in the autograd graph, which backward is "
            "just leaving. Use differentiable=False, or no instep"
        )


def _refuse_without_constructor(optimizer: Optimizer, needed: str) -> None:
    """Nobody would be told of its ``step()``."""
    if not takes_hooks(optimizer):
        raise UnsupportedOptimizerError(
            f"{class_name(optimizer)} was made without torch.optim.Optimizer.__init__: torch calls no hook around its "
            f"step(), {needed}. If the class is yours, call super().__init__(params, defaults) in its constructor"
        )


def keyed_without_hooks(target: Target, options: Options) -> None:
    for optimizer in drawing_by_key(target, options):
        _refuse_without_constructor(optimizer, "where random='keyed' takes its place. Leave out random and seed")


def drawing_by_key(target: Target, options: Options) -> list[Optimizer]:
    """The optimizers that may draw by key. torch's own draw nothing, so that ``random`` changes nothing of theirs."""
    if options.random is None:
        return []
    return [optimizer for optimizer in target.optimizers if not is_torchs_own(optimizer)]
