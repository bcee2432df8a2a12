"""The order in which ``attach`` asks for refusals: the first that fits is the one that is raised.

A rule raises ``AttachError`` where it refuses, and changes nothing. It is a function of ``options.py``, ``model.py`` or
``optimizers.py``, or a row of the table in ``pairs.py``. ``attach`` goes through ``OPTIONS`` first. Where
nothing but the default was asked for, ``left_to_torch`` says whether torch has to take each step; then only
``LEFT_TO_TORCH`` is asked. With ``INSTEP_DISABLE=1`` it is ``DISABLED``, and else ``MODEL`` and ``PARAMETERS``.
"""

import logging
from collections.abc import Callable, Sequence

from instep._refusals import model, optimizers, options, pairs
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target

_logger = logging.getLogger("instep")
_said: set[str] = set()
"""What was logged: a loop that attaches again and again, for each fold or epoch, is told once."""
_FEW_BYTES = 1024
"""As ``bucket_bytes``, fewer are meant as MiB, it seems; ``1`` is how to ask for a bucket for each parameter."""
Rule = Callable[[Target, Options], None]
"""Raises ``AttachError`` where it refuses."""

OPTIONS: Sequence[Rule] = (
    optimizers.given_twice,
    options.invalid_value,
    options.random_or_seed_alone,
    *pairs.OF_OPTIONS.values(),
)
"""Each option by itself, and with the others: a row that compares values comes after those that look at each."""
MODEL: Sequence[Rule] = (
    # No other model or wrapper would help an optimizer that cannot be split.
    optimizers.unsupported,
    optimizers.without_calls_around_the_step,
    optimizers.keyed_without_hooks,
    model.other_than_the_stages,
    model.sharded_among_several,
    model.fsdp1_with_flat_parameters,
    model.ddp_with_mixed_precision,
    options.mixed_precision_without_floats,
    model.scripted,
    *pairs.OF_MODEL.values(),
    # A hook is looked at by itself where there is a model to call it, and DDP's buckets where there is one DDP.
    options.comm_hook_that_cannot_be_called,
    model.parameters_without_shards,
)
"""The model and its wrappers, with these options."""
_WRONG: Sequence[Rule] = (
    model.no_parameters,
    model.not_a_leaf,
    model.attached_already,
    model.compiled_only_with_hooks,
    optimizers.masters_lost,
)
"""Wrong in itself, whatever is asked for."""
_TORCH_ALONE: Sequence[Rule] = (
    model.unknown_to_the_model,
    model.in_two_groups,
    model.without_a_shape,
    model.stepped_in_backward,
)
"""What torch's own ``step()`` steps, or leaves alone, as any loop has it."""
PARAMETERS: Sequence[Rule] = (
    *_WRONG,
    *_TORCH_ALONE,
    model.on_meta,
    model.gradients_of_another_dtype,
    model.all_frozen,
    # From here on every parameter is known by its name, and can be stepped.
    model.ddp_with_delayed_reductions,
    model.ddp_around_the_model,
    model.shared_memory,
    *pairs.OF_PARAMETERS.values(),
)
"""The parameters."""
TORCHS: Sequence[Rule] = (
    optimizers.unlike_torchs,
    model.scripted,
    model.sharded_among_several,
    model.fsdp1_with_flat_parameters,
    model.ddp_with_mixed_precision,
    model.ddp_with_delayed_reductions,
    model.ddp_around_the_model,
    *_TORCH_ALONE,
    model.on_meta,
    model.gradients_of_another_dtype,
    model.shared_memory,
)
"""What is left to torch, whole, where nothing but the default was asked for."""
LEFT_TO_TORCH: Sequence[Rule] = _WRONG
"""Of such a model, in place of ``MODEL`` and ``PARAMETERS``."""
DISABLED: Sequence[Rule] = (
    optimizers.unsupported,
    model.other_than_the_stages,
    model.sharded_among_several,
    *pairs.OF_DISABLED.values(),
    *_WRONG,
    *_TORCH_ALONE,
    model.all_frozen,
)
"""With ``INSTEP_DISABLE=1``, in place of ``MODEL`` and ``PARAMETERS``."""


def ask_rules(target: Target, options: Options) -> str | None:
    """Raise what the first rule that refuses says. Log what is taken otherwise than it may have been meant.

    Returns:
        Why torch takes every step, as ``Options.left_to_torch`` says it; ``None``: it does not.
    """
    _ask(OPTIONS, target, options)
    if (why := left_to_torch(target, options)) is not None:
        _ask(LEFT_TO_TORCH, target, options)
        say_once(logging.INFO, f"the step is taken at once: {why}")
    elif options.disabled:
        _ask(DISABLED, target, options)
        why = options.left_to_torch
        say_once(logging.WARNING, f"INSTEP_DISABLE is set: {type(target.model).__name__} trains without overlap")
    else:
        _ask((*MODEL, *PARAMETERS), target, options)
    if (given := options.bucket_bytes) is not None and 1 < given < _FEW_BYTES:
        say_once(
            logging.WARNING,
            f"bucket_bytes={given} makes a bucket of every parameter: it counts bytes. For {given} MiB: "
            f"bucket_bytes={given} * 2**20",
        )
    return why


def left_to_torch(target: Target, options: Options) -> str | None:
    """Why nobody but torch can step this model; ``None``: somebody can, or more than the default was asked for."""
    if options.takes_any_loop:
        try:
            _ask(TORCHS, target, options)
        except AttachError as error:
            return str(error)
    return None


def _ask(rules: Sequence[Rule], target: Target, options: Options) -> None:
    for rule in rules:
        rule(target, options)


def say_once(level: int, message: str) -> None:
    """Log ``message``, unless it was logged before."""
    if message not in _said:
        _said.add(message)
        _logger.log(level, message)
