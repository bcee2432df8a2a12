"""Kinds of optimizers: torch's own and others, whose ``step()`` each runs, and what it holds beside its groups."""

import weakref
from collections.abc import Callable, Mapping
from functools import cache, wraps
from itertools import repeat
from operator import methodcaller
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.overrides import is_manager
from instep._optim.values import is_fake
from instep._torch.hooks import is_in_torch_optim, undecorated_step
from instep._torch.watch import plain_type
from instep.master_weights import NOTES, Masters, class_inside

# An optimizer object whose ``step`` was replaced, as diffusion trainers do it: beside that stands a method that steps
# one parameter, and that the trainer calls in hooks.


STEPS_ONE = ("step_param", "step_parameter")
"""The methods ``step_param(p, group)`` and ``step_parameter(p, group, index)``, with the index in the group."""


def replaced_step(optimizer: Optimizer) -> Any:
    """The function that this object has in place of its class's ``step``; ``None``: it has none of its own. A learning
    rate scheduler's only counts the calls."""
    patch: Any = vars(optimizer).get("step")
    while getattr(patch, "_wrapped_by_lr_sched", False) or getattr(patch, "_told_by_instep", False):
        patch = patch.__wrapped__
    own = getattr(patch, "__func__", patch) is type(optimizer).step  # put back by who had replaced it: accelerate
    return None if own else patch


def steps_one(optimizer: Optimizer) -> Callable[[Any, dict[str, Any], int], None] | None:
    """What steps one parameter of a patched object, given the parameter, its group and its index there. ``None``: the
    object is not patched in that way."""
    if replaced_step(optimizer) is None:
        return None
    method, with_index = map(vars(optimizer).get, STEPS_ONE)
    return with_index if method is None else lambda parameter, group, index: method(parameter, group)


class ToldStep:
    """Torch calls the step hooks in a wrapper of the class's ``step``: a function of the object's own needs one, too.

    Args:
        optimizer: whose ``step`` was replaced. It is held weakly.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        before = optimizer.step

        @wraps(before)
        def step(told: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs)

        step._told_by_instep = True  # type: ignore[attr-defined]
        hooked: Any = Optimizer.profile_hook_step(step)
        self._optimizer = weakref.ref(optimizer)
        self._hooked = weakref.ref(hooked)  # which refers to the optimizer
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put back what was there. Who has wrapped the method since keeps it, and no hooks are left to be called."""
        optimizer = self._optimizer()
        told: Any = None if optimizer is None else vars(optimizer).get("step")
        if optimizer is not None and told is not None and getattr(told, "__func__", None) is self._hooked():
            optimizer.step = told.__wrapped__.__wrapped__  # type: ignore[method-assign]


STEPPED_WHOLE = "Use schedule='forward' with defer='auto', which calls step() as it is"
"""What to do with an optimizer whose update cannot be split."""
ONLY_DEFER = "Only defer=True refuses it: with defer='auto' instep takes the loop"
"""What to do where nothing but that option splits the update, or puts the step off."""


# Which optimizers are torch's own, and which of those update every element of a parameter by itself.


_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the optimizer is exactly one of ``torch.optim``, or steps masters by one, and nobody has replaced its
    ``step()``, or what that calls: what its update reads and writes is known. Any other may do what only ``step()``
    itself is expected to: raise, log, look at the loop."""
    cls: Any = class_of_update(optimizer)
    if not is_in_torch_optim(cls) or replaced_step(optimizer) is not None or "_init_group" in vars(optimizer):
        return False
    step, init = undecorated_step(cls), getattr(cls, "_init_group", cls.step)
    return step.__module__.startswith("torch.") and init.__module__.startswith("torch.")


def class_of_update(optimizer: Optimizer) -> type[Optimizer]:
    """The class whose update it is: its own, or of one with masters the class that steps these."""
    cls = plain_type(optimizer)
    return class_inside(cls) if issubclass(cls, Masters) else cls


def has_usual_parameters(optimizer: Optimizer) -> bool:
    """Whether all parameters are tensors of torch's own classes, or of such that change nothing of what torch does with
    them. A class with operations of its own (quantized weights, say) may draw, or round, in each update."""
    return all(map(_is_usual, _types_of_memory(optimizer)))


def has_values(optimizer: Optimizer) -> bool:
    """Whether its parameters have values that an update may change: those of a plan have none."""
    return not any(map(is_fake, _types_of_memory(optimizer)))


def _types_of_memory(optimizer: Optimizer) -> set[type[torch.Tensor]]:
    return {_type_of_memory(p) for group in optimizer.param_groups for p in group["params"]}


def _type_of_memory(parameter: torch.Tensor) -> type[torch.Tensor]:
    """Of a DTensor: its local tensor's. It is read past whoever watches the parameter: who applies an update that is
    due asks this, and a use of another parameter would apply that one's update in the middle of it."""
    kind = plain_type(parameter)
    local = getattr(kind, "_local_tensor", None)  # where the class keeps it
    return kind if local is None else plain_type(local.__get__(parameter))


@cache
def _is_usual(kind: type[torch.Tensor]) -> bool:
    function, usual, of_parameters = (
        getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
        for cls in (kind, torch.Tensor, torch.nn.Parameter)
    )
    dispatches = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not is_fake(kind)
    return not dispatches and function in (usual, of_parameters)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer updates each element of a parameter from that element's gradient and state alone, so that
    a shard of a parameter may be stepped by itself. Classes of others that inherit from these may do otherwise."""
    return plain_type(optimizer) in _ELEMENTWISE and replaced_step(optimizer) is None


def runs_beside(optimizer: Optimizer) -> bool:
    """Whether updates of parameters in host memory gain anything from a thread of their own: those of torch's whose
    time is in kernels, which leave Python to the loop. A loop over parameters would take turns with it."""
    return is_torchs_own(optimizer) and (is_fused(optimizer) or multiplies_matrices(optimizer))


def is_fused(optimizer: Optimizer) -> bool:
    return all(map(_FUSED, optimizer.param_groups))


_FUSED = methodcaller("get", "fused")


def multiplies_matrices(optimizer: Optimizer) -> bool:
    """Whether the update of one of torch's own optimizers does, in which it reads torch's switches for products."""
    return class_of_update(optimizer).__name__ == "Muon"


def can_be_put_off(optimizer: Optimizer) -> bool:
    """Whether updates may run after ``step()`` has returned: torch's own that write nothing but parameters and their
    own state, and that nobody waits for in ``step()``."""
    keeps_graph = any(group.get("differentiable", False) for group in optimizer.param_groups)
    return is_torchs_own(optimizer) and not isinstance(optimizer, torch.optim.LBFGS) and not keeps_graph


def takes_hooks(optimizer: Optimizer) -> bool:
    """Whether torch calls hooks around its ``step()``: not where a wrapper of another optimizer has left out
    ``Optimizer.__init__``."""
    return all(name in vars(optimizer) for name in STEP_HOOKS if not name.endswith("_dict_post_hooks"))


# What an optimizer object holds beside its groups and the state of parameters.


STEP_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
OF_EVERY_OPTIMIZER = ("param_groups", "state", "defaults", *STEP_HOOKS)
# What torch's fused SGD and Adagrad write in the first update that they see: whichever bucket that is.
CHECKED_ONCE = "_need_device_dtype_check_for_fused"
# By which GradScaler tells a fused kernel of a loss scale.
SCALES = ("grad_scale", "found_inf")
# Which torch itself, its schedulers and GradScaler write on any optimizer, at any time.
OF_SCHEDULERS = ("_opt_called", "_step_count")
_WRITTEN_BY_TORCH = (*OF_SCHEDULERS, "_warned_capturable_if_run_uncaptured", CHECKED_ONCE, *SCALES)
NO_SETTINGS = frozenset((*OF_EVERY_OPTIMIZER, *_WRITTEN_BY_TORCH, *STEPS_ONE, NOTES, "step")) - {"defaults"}


def read_by_update(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an update may read. torch's own optimizers read none; others may read all but those that
    stand in for a method."""
    if is_torchs_own(optimizer):
        return {}
    return {"defaults": optimizer.defaults} | {
        name: value
        for name, value in vars(optimizer).items()
        if name not in NO_SETTINGS
        and name != "defaults"
        and not callable(getattr(type(optimizer), name, None))
        and not is_manager(value)
    }


def classes_of(optimizer: Optimizer) -> list[type]:
    """Those that it is of, torch's and Python's aside."""
    return [cls for cls in type(optimizer).__mro__ if not f"{cls.__module__}.".startswith(_NOT_ITS_OWN)]


_NOT_ITS_OWN = ("torch.", "builtins.", "typing.", "abc.")


def beside_parameters(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The items of an optimizer's ``state`` whose key is no parameter."""
    if all(map(isinstance, state, repeat(torch.Tensor))):  # as mostly, and asked for in each step
        return {}
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
