"""Versions: how often autograd has counted a write of a tensor, by which instep knows that somebody has written it.

torch keeps one counter for a tensor and its views, under the private name ``_version``; nothing else in instep reads
that name. Not counted: writes through ``.data`` or a NumPy array, by torch's fused kernels (whoever runs one calls
``torch.autograd.graph.increment_version``), and all writes of inference tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch.autograd import grad_mode

from instep._torch.placeholders import Placeholder
from instep._torch.watch import plain_type

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""torch's own two classes of tensors."""
VERSION: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Of a plain tensor whose writes are counted. ``RuntimeError`` for an inference tensor."""


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory: of a ``DTensor`` its local tensor."""
    if type(tensor) in PLAIN or isinstance(tensor, Placeholder):  # which would be used by what comes next
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether its memory is pinned. A torch that is built for the CPU alone knows without asking the tensor; any other
    asks its class, and ``DTensor`` knows nothing of it, nor need another one."""
    if tensor.device.type != "cpu":
        return False
    try:
        return tensor.is_pinned() if type(tensor) is torch.Tensor else memory_of(tensor).is_pinned()
    except NotImplementedError:
        return False


def version_of(tensor: torch.Tensor) -> int:
    """What changes with every write that autograd counts. A ``DTensor`` counts those through itself, and those through
    its local tensor, or an alias of that, are counted there."""
    if tensor.is_inference():
        return 0  # none is counted
    # Read past whoever watches the parameter: to ask for a version is no use of the values.
    slot = None if type(tensor) in PLAIN else getattr(plain_type(tensor), "_local_tensor", None)
    memory = tensor if slot is None else slot.__get__(tensor)
    return VERSION(tensor) if memory is tensor else VERSION(tensor) + VERSION(memory)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The ``version_of`` each. There may be thousands, which are seldom anything but plain."""
    # Some may be watched: to ask for a version is no use of the values, and nobody is to wait or be told.
    with torch._C.DisableTorchFunctionSubclass():
        if PLAIN.issuperset(map(type, tensors)):
            try:
                return list(map(VERSION, tensors))
            except RuntimeError:  # one is an inference tensor
                pass
        return list(map(version_of, tensors))


def are_plain(values: Iterable[object]) -> bool:
    """Whether all are tensors of torch's own two classes."""
    return PLAIN.issuperset(map(type, values))


def are_counted(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are plain tensors of whose writes torch keeps count."""
    return are_plain(tensors) and not any(map(torch.Tensor.is_inference, tensors))


def share_versions(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write of one counts as a write of the other. torch does not tell: one is counted, and taken back."""
    before = version_of(b)
    with grad_mode._unsafe_preserve_version_counter(a):
        torch.autograd.graph.increment_version(a)
        return version_of(b) != before
