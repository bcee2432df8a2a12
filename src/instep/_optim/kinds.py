"""Which optimizers are torch's own, and which of those update every element of a parameter by itself."""

from collections.abc import Callable
from functools import cache

import torch
from torch.optim import Optimizer

from instep._optim.calling import undecorated_step
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
    return is_in_torch_optim(type(optimizer)) and replaced_step(optimizer) is None


def is_in_torch_optim(made_by: Callable[..., Optimizer]) -> bool:
    """Whether ``made_by`` is a class of ``torch.optim``. Some of these name a file in ``__module__``, others the
    package itself."""
    return f"{made_by.__module__}.".startswith("torch.optim.")


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer updates each element of a parameter from that element's gradient and state alone, so that
    a shard of a parameter may be stepped by itself. Classes of others that inherit from these may do otherwise."""
    return class_of(optimizer) in _ELEMENTWISE and replaced_step(optimizer) is None


def refuses_dense_gradients(optimizer: Optimizer) -> bool:
    """Whether its ``step()`` raises at a gradient that is not sparse."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def fused_counts_writes(optimizer: Optimizer) -> bool:
    """Whether the fused kernel of one of torch's own optimizers counts a write of each parameter, as other kernels do.
    It is tried, once for each class: torch does not say, and up to 2.15 none does."""
    return _fused_counts_writes(class_of(optimizer).__name__)


@cache
def _fused_counts_writes(name: str) -> bool:
    # Whoever asks may be inside of inference_mode(), whose tensors count nothing, or of torch.device("meta").
    with torch.inference_mode(False), torch.device("cpu"):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
        parameter.grad = torch.ones_like(parameter)
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1, fused=True)
        before = parameter._version
        with torch.no_grad():
            undecorated_step(type(optimizer))(optimizer)
        return parameter._version > before


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


def steps_as_tested(optimizer: Optimizer) -> bool:
    """Whether its ``step()`` is torch's own, or that of a package whose optimizers the tests compare with the plain
    loop. Any other may do what only ``step()`` itself is expected to: raise, log, look at the loop."""
    if replaced_step(optimizer) is not None:
        return False
    module: str = undecorated_step(class_of(optimizer)).__module__
    return module.partition(".")[0] in _TESTED


_TESTED = frozenset({"torch", "bitsandbytes", "optimi", "pytorch_optimizer", "schedulefree", "transformers"})
