"""Which optimizers are torch's own, and which of those update every element of a parameter by itself."""

import torch
from torch.optim import Optimizer

from instep._optim.patched import replaced_step
from instep._optim.waiting import class_of

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the optimizer is exactly one of ``torch.optim``: what its update reads and writes is known."""
    return type(optimizer).__module__.startswith("torch.optim.") and replaced_step(optimizer) is None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer updates each element of a parameter from that element's gradient and state alone, so that
    a shard of a parameter may be stepped by itself. Classes of others that inherit from these may do otherwise."""
    return class_of(optimizer) in _ELEMENTWISE and replaced_step(optimizer) is None


def takes_hooks(optimizer: Optimizer) -> bool:
    """Whether torch calls hooks around its ``step()``: not where a wrapper of another optimizer has left out
    ``Optimizer.__init__``."""
    return all(name in vars(optimizer) for name in _HOOKS)


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)
