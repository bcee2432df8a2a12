"""One optimizer for each parameter, run when the parameter's gradient is final: no ``step()``, no ``zero_grad()``.

``apply_optimizer_in_backward`` records the optimizers on the parameter, and puts one hook there (``_hook``). Without a
wrapper, and under FSDP, the hook steps the parameter. Under DDP a communication hook does, once the gradient is
reduced (``_set_up_ddp``), and the parameter's own hook does nothing. ``fully_shard`` replaces parameters, and the
optimizers follow (``_moved_by_fully_shard``). DDP and FSDP2 have no hook for these two moments, so instep stands in
for a function of each (``_install``).
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from instep._arguments import require_model
from instep._optim.contents import digest_of_value
from instep._torch.hooks import UntracedHook
from instep.attachment import attached_parameters
from instep.errors import AttachError, UnsupportedOptimizerError
from instep.functional.comm_hooks import (
    OPTIMIZERS,
    NotCopied,
    apply_optim_in_backward_hook,
    has_in_backward_optimizers,
    step_in_backward,
    stepping_hooks,
)
from instep.sources.ddp.instance import bucket_parameters, refuse_delayed_all_reduce
from instep.sources.fsdp.modules import fsdp1_of, instances_of

param_to_optim_hook_handle_map: Any = WeakTensorKeyDictionary()
"""By parameter: one handle for each registration. After ``remove()`` of all of them the parameter's hook does nothing.
The optimizers stay on the parameter until its next registration: DDP, FSDP or the caller may run them."""
_hooks: Any = WeakTensorKeyDictionary()
"""By parameter: the handle of its one hook; ``None``: it was registered with ``register_hook=False``. A parameter that
is in here is instep's, and not one of torch's own function."""
_reduced_by: Any = WeakTensorKeyDictionary()
"""By parameter: a weak reference to the DDP instance that reduces it, and steps it where backward ends."""


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[torch.Tensor],
    optimizer_kwargs: Mapping[str, Any],
    register_hook: bool = True,
) -> None:
    """Step each of ``params`` with an optimizer of its own as soon as its gradient is final, and free the gradient.

    After ``backward()`` the parameters are updated and their ``.grad`` is ``None``. Every backward is a step of its
    own; to accumulate, use DDP's or FSDP's means of it (``no_sync``). Several optimizers of one parameter run in the
    order of the calls. Under ``DistributedDataParallel``, wrapped before or after this call, a parameter is stepped
    once it is reduced; under FSDP, once its shard is. With ``fully_shard`` after this call, the optimizers move to the
    sharded parameters. Frozen parameters are stepped once they are unfrozen.

    A parameter whose step raises loses its gradient; what was stepped before stays stepped. One that reentrant
    checkpointing visits twice in a backward is stepped twice: use ``use_reentrant=False``. ``instep.attach`` is for
    those who need more: one optimizer with its groups, a step that is whole or reported as torn.

    The method is that of ``torch/distributed/optim/apply_optimizer_in_backward.py``.

    Args:
        optimizer_class: called with ``([param], **optimizer_kwargs)`` for each parameter.
        params: leaf tensors, each once.
        optimizer_kwargs: keyword arguments of ``optimizer_class``, without ``params``.
        register_hook: ``False`` only records the optimizers, for DDP or FSDP to run.

    Raises:
        AttachError: something about ``params``, or where they are. Nothing was registered.
        UnsupportedOptimizerError: the optimizer's step needs more than one gradient.

    Since 0.1.0.

    Example:
        ```python
        instep.apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-3})
        for batch in loader:
            model(batch).backward()  # steps every parameter, and frees its gradient
        ```
    """
    parameters = _require_parameters(params, optimizer_class)
    _install()
    # All that is refused is refused before anything is registered.
    ddps = _started_ddps_of(parameters)
    for ddp in ddps:
        _refuse_hook(ddp)
    try:
        optimizers = [optimizer_class([parameter], **optimizer_kwargs) for parameter in parameters]
    except TypeError as error:
        raise AttachError(f"optimizer_kwargs={optimizer_kwargs!r} do not fit: {error}") from error
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        _forget_removed(parameter)
        # On the parameter, where DDP and FSDP look for it. The lists are freed with the parameter: by the collector,
        # since optimizers refer to parameters.
        for name, value in zip(_RECORDS, (optimizer, type(optimizer), optimizer_kwargs), strict=True):
            vars(parameter).setdefault(name, []).append(value)
        _hooks.setdefault(parameter, None)
        if register_hook:
            param_to_optim_hook_handle_map.setdefault(parameter, []).append(_Handle(optimizer))
            _hook(parameter)
    for ddp in ddps:
        _set_up_ddp(ddp)


def get_in_backward_optimizers(module: nn.Module) -> list[Optimizer]:
    """The optimizers that ``apply_optimizer_in_backward`` made for the parameters of ``module``, in their order.

    For checkpoints and schedulers; their ``step`` and ``zero_grad`` are not for the caller.

    Since 0.1.0.

    Example:
        ```python
        instep.apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-3})
        for batch in loader:
            model(batch).backward()
            for one in instep.get_in_backward_optimizers(model):
                one.param_groups[0]["lr"] *= 0.9
        ```
    """
    require_model(module, AttachError, "module")
    return [optimizer for parameter in module.parameters() for optimizer in getattr(parameter, OPTIMIZERS, ())]


def _require_parameters(params: Iterable[torch.Tensor], optimizer_class: Any) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        raise AttachError("params must be an iterable of parameters, not one tensor: give [param]")
    if not isinstance(params, Iterable):
        raise AttachError(f"params must be an iterable of parameters, not {params!r}: give model.parameters()")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise AttachError(f"optimizer_class must be a class of torch.optim.Optimizer, not {optimizer_class!r}")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "LBFGS evaluates the loss again within a step, which backward cannot do. Call it after backward"
        )
    parameters = list(params)
    if not parameters:
        raise AttachError("params is empty: there is nothing to step")
    _refuse_parameters(parameters)
    return parameters


def _refuse_parameters(parameters: Sequence[Any]) -> None:
    """Refuse what ``attach`` refuses of an optimizer's parameters. Without a model a parameter has no name but its
    position."""
    taken = attached_parameters()
    seen: dict[int, int] = {}
    for position, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise AttachError(
                f"params[{position}] is a {type(parameter).__name__}: give the parameters alone, and one call for each "
                "group of them"
            )
        where = f"params[{position}], of shape {tuple(parameter.shape)},"
        if not parameter.is_leaf:
            raise AttachError(f"{where} is not a leaf: autograd gives it no final gradient")
        if id(parameter) in seen:
            raise AttachError(f"{where} is params[{seen[id(parameter)]}] again: it would be stepped twice")
        if id(parameter) in taken:
            raise AttachError(f"{where} is already attached ({taken[id(parameter)]!r}): detach() first")
        seen[id(parameter)] = position


_RECORDS = (OPTIMIZERS, "_optimizer_classes", "_optimizer_kwargs")
"""The attributes of a parameter in which torch's own function keeps its optimizers, their classes and arguments."""


class _Handle:
    """The handle of one registration of one parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.removed = False

    def remove(self) -> None:
        """The hook no longer runs for this registration. Safe to call twice."""
        self.removed = True


def _registered(parameter: torch.Tensor) -> bool:
    return any(not handle.removed for handle in param_to_optim_hook_handle_map.get(parameter, ()))


def _forget_removed(parameter: torch.Tensor) -> None:
    """Drop the optimizers whose registration was removed: a registration after a removal starts anew."""
    handles = param_to_optim_hook_handle_map.get(parameter, [])
    removed = [handle.optimizer() for handle in handles if handle.removed]
    kept = [i for i, o in enumerate(getattr(parameter, OPTIMIZERS, ())) if not any(o is r for r in removed)]
    for name in _RECORDS if removed and has_in_backward_optimizers(parameter) else ():
        records = getattr(parameter, name)
        records[:] = [records[i] for i in kept]
    handles[:] = [handle for handle in handles if not handle.removed and handle.optimizer() is not None]


def _hook(parameter: torch.Tensor) -> None:
    """Give ``parameter`` its hook, unless it has one: one hook runs all of its optimizers."""
    if _hooks[parameter] is not None or not (parameter.is_floating_point() or parameter.is_complex()):
        return
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook on a frozen tensor, but keeps one that is there
    # The hook finds all it needs on the parameter, and keeps nothing alive.
    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(UntracedHook(_accumulated))
    if frozen:
        parameter.requires_grad_(False)


def _accumulated(parameter: torch.Tensor) -> None:
    """The hook: autograd has accumulated the gradient of ``parameter``, which is final unless DDP reduces it."""
    ddp = _reduced_by.get(parameter)
    # The gradient is this rank's own while DDP is still to reduce it: apply_optim_in_backward_hook steps it then.
    if (ddp is not None and ddp() is not None) or not _registered(parameter):
        return
    if not has_in_backward_optimizers(parameter):
        return
    try:
        step_in_backward(parameter)
    finally:
        # Also when the step raised: the next backward would add to this gradient.
        parameter.grad = None


_started_ddps: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()
"""The DDP instances whose first forward has begun: DDP does not look for in-backward optimizers again."""


def _started_ddps_of(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """The DDP instances of any of ``parameters`` that have begun their first forward."""
    if any(wrapper._is_root is not None for wrapper in fsdp1_of(parameters)):
        raise AttachError(
            "FullyShardedDataParallel decides at its first forward whether parameters are stepped in backward, and "
            "this one has run: call apply_optimizer_in_backward before it"
        )
    ours = {id(parameter) for parameter in parameters}
    return [ddp for ddp in _started_ddps if any(id(p) in ours for p in ddp._module_parameters)]


def _set_up_ddp(ddp: DistributedDataParallel) -> bool:
    """Have ``ddp`` step its parameters once they are reduced. ``False``: it has none that is instep's, and nothing was
    done."""
    recorded = [p for p in ddp._module_parameters if has_in_backward_optimizers(p)]
    ours = [p for p in recorded if p in _hooks]
    if not ours:
        return False
    if len(ours) < len(recorded):
        raise AttachError(
            "some parameters of this DistributedDataParallel were given to torch's own _apply_optimizer_in_backward "
            "and some to instep's. Give them all to instep's"
        )
    _refuse_hook(ddp)
    if not ddp._comm_hooks:
        ddp.register_comm_hook(_DDPReference(ddp), apply_optim_in_backward_hook(ddp.gradient_as_bucket_view))
    in_buckets = bucket_parameters(ddp)  # DDP does not reduce the others: they are stepped in their own hooks
    for parameter in ours:
        if id(parameter) in in_buckets:
            _reduced_by[parameter] = weakref.ref(ddp)
    return True


def _refuse_hook(ddp: DistributedDataParallel) -> None:
    """Refuse a DDP instance that would not call instep's communication hook, or not in time."""
    refuse_delayed_all_reduce(ddp)
    for hook, _ in ddp._comm_hooks:
        if hook not in stepping_hooks:
            raise AttachError(
                f"this DistributedDataParallel already has the communication hook {hook.__qualname__!r}, and DDP takes "
                "only one. Register apply_optim_in_backward_hook(gradient_as_bucket_view, comm_hook=(state, hook)) "
                "with weakref.ref(ddp) as its state instead: it runs that hook before the step. In place of DDP's own "
                "mixed_precision, register reducer_allreduce_and_upcast_hook with "
                "AllreduceUpcastHookState(…, mixed_precision=policy)"
            )


class _DDPReference(NotCopied, weakref.ref):  # type: ignore[type-arg]
    """The state of a hook that is registered for the user."""


def _moved_by_fully_shard(parameter: torch.Tensor, sharded: torch.Tensor) -> None:
    """``fully_shard`` has put ``sharded`` in the place of ``parameter``: make its optimizers anew, for ``sharded``."""
    if not has_in_backward_optimizers(parameter) or parameter not in _hooks:
        return
    for optimizer, kwargs in zip(getattr(parameter, OPTIMIZERS), parameter._optimizer_kwargs, strict=True):  # type: ignore[attr-defined]
        kind = type(optimizer)
        # A new optimizer of its class has the state that this one had before its first step.
        if digest_of_value(optimizer.state) != digest_of_value(kind([parameter], **kwargs).state):
            raise AttachError(
                f"the {kind.__name__} of a parameter of shape {tuple(parameter.shape)} has already stepped it, and its "
                "state cannot be sharded. Call fully_shard before training"
            )
        apply_optimizer_in_backward(kind, [sharded], kwargs, _registered(parameter))


@cache
def _install() -> None:
    """Stand in for the two functions, once. Both do what torch's own do, unless a parameter is instep's.
    ``tests/functional/test_names.py`` fails clearly when torch changes them."""
    _started_ddps.update(ddp for ddp in instances_of(DistributedDataParallel) if ddp._lazy_init_ran)
    torchs_set_up: Any = DistributedDataParallel._setup_in_backward_optimizers

    def _setup_in_backward_optimizers(self: DistributedDataParallel) -> None:
        # Before the first forward DDP looks for in-backward optimizers. Its own way of stepping them fails on CPU.
        if not _set_up_ddp(self):
            torchs_set_up(self)
        _started_ddps.add(self)

    DistributedDataParallel._setup_in_backward_optimizers = _setup_in_backward_optimizers  # type: ignore[method-assign]
    if not dist.is_available():
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # not needed before

    torchs_init: Any = FSDPParam._init_sharded_param

    def _init_sharded_param(self: FSDPParam, param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torchs_init(self, param, *args, **kwargs)
        _moved_by_fully_shard(param, self.sharded_param)

    FSDPParam._init_sharded_param = _init_sharded_param  # type: ignore[method-assign]
