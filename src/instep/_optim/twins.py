"""A copy of an optimizer over other tensors, to be stepped beside it."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.attributes import beside_parameters
from instep._optim.calling import step_whole, without_autocast
from instep._optim.overrides import MANAGER, moved, same_places
from instep._optim.parts import memory_of
from instep._optim.shadow import shadow_of

_LIVE = ("param_groups", "state", "step")


def twin_of(
    optimizer: Optimizer,
    groups: Iterable[dict[str, Any]],
    state: Mapping[Any, Any],
    stand_ins: Mapping[int, torch.Tensor],
) -> Optimizer:
    """The same optimizer over copies of ``groups`` and ``state``, with copies of its attributes.

    Args:
        groups: with the parameters to step.
        stand_ins: by ``id`` of a tensor, what stands in its place in the copies.
    """
    groups = list(groups)
    ids = ((key, id(tensor)) for key, tensor in stand_ins.items())
    overrides = moved(optimizer, same_places(groups), ids)
    twin = shadow_of(optimizer, [], defaultdict(dict))
    if overrides is not None:
        setattr(twin, MANAGER, overrides)
    memo: dict[int, Any] = {**stand_ins, id(optimizer): twin, id(twin): twin}
    attributes = {
        name: value for name, value in vars(twin).items() if name not in _LIVE and not name.startswith("_optimizer_")
    }
    vars(twin).update(copy.deepcopy(attributes, memo))
    twin.param_groups = [
        {key: value if key == "params" else copy.deepcopy(value, memo) for key, value in group.items()}
        for group in groups
    ]
    twin.state.update(copy.deepcopy(dict(state), memo))
    return twin


def step_plainly(twin: Optimizer, *closure: Callable[[], torch.Tensor], autocast: torch.dtype | None = None) -> Any:
    """Call its ``step()``, as the plain loop does, without any step hooks. Returns what that returns.

    Args:
        autocast: that of the block in which the loop calls it; ``None``: it calls it outside.
    """
    first = next(parameters_of(twin), None)
    kind = "cpu" if first is None else first.device.type
    with torch.no_grad(), without_autocast(kind) if autocast is None else torch.autocast(kind, autocast):
        return step_whole(twin, *closure)


def parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    """All of them, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """The items of its state that are not the entries of parameters."""
    return beside_parameters(optimizer.state)


def different(a: Any, b: Any) -> bool:
    """Whether two values differ, tensors in any bit but that NaN equals NaN; of what is spread over ranks, this rank's
    part. Objects of unknown kinds do not count."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return not _same_bits(memory_of(a), memory_of(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() != b.keys() or any(different(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) != len(b) or any(map(different, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a != b and not (a != a and b != b)
    if isinstance(a, _PLAIN) or isinstance(b, _PLAIN):
        return type(a) is not type(b) or bool(a != b)
    return type(a) is not type(b)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor, set, frozenset)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    numbers = a.is_floating_point() or a.is_complex()
    return numbers and bool(torch.all((a == b) | ((a != a) & (b != b))))
