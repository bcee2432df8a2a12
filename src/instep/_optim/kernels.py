"""torch's fused kernels, called without the optimizer's own Python around them.

``AdamW(fused=True).step()`` on 1,000 small tensors spends much of its time outside of its kernel: in a loop over the
parameters that gathers the kernel's lists, in grouping those by device and dtype, and in adding a number to each step
counter, which on a CPU makes a tensor of the number each time. Here the lists are gathered by passes in C, and nothing
is grouped: a kernel on a CPU takes tensor after tensor by itself, and one on an accelerator is called here only for
lists that make one group. On a CPU the counters are added a tensor that is there. Every element is computed by the same
kernel from the same values: the bits are the same.

The kernels have no public name (``torch._fused_adamw_``; ``torch.optim`` calls them so). They are called for what is
known of them alone, exactly torch's classes with torch's own ``step`` and what that calls, plain tensors, state that is
there and settings that are plain numbers; everything else is left to ``step()``. ``tests/unit/test_kernels.py``
compares each with ``step()``, and fails where torch changes what it hands to them.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.guards import Entries
from instep._optim.kinds import replaced_step
from instep._optim.shadow import Members
from instep._optim.values import is_immutable
from instep._torch.engine import is_captured
from instep._torch.versions import are_plain

Tensors = list[torch.Tensor]
Settings = Mapping[str, Any]
_GRADIENT, _DEVICE, _DTYPE, _LAYOUT = map(attrgetter, ("grad", "device", "dtype", "layout"))
_STRIDED = frozenset({torch.strided})
_NUMBERS = frozenset({bool, int, float})
_REQUIRES_GRAD = attrgetter("requires_grad")
_OF_COUNTERS = frozenset({torch.float32, torch.float64})
_MOMENTS = ("exp_avg", "exp_avg_sq")
_DECOUPLED = "decoupled_weight_decay"
# torch 2.6 has another class for it, and ignores this in a group, as it may come with a checkpoint of a newer torch.
_READS_DECOUPLED = _DECOUPLED in inspect.signature(torch.optim.Adam).parameters


def kernel_of(optimizer: Optimizer) -> "Kernel | None":
    """The kernel that the optimizer's ``step()`` calls with ``fused=True``; ``None``: none is known, or it is another
    ``step()`` than torch's."""
    made = _KERNELS.get(type(optimizer))
    known = made is not None and replaced_step(optimizer) is None and _is_torchs(type(optimizer).step)
    return made() if made is not None and known else None


def _is_torchs(step: Any) -> bool:
    """Whether a function, and all that it wraps, is in a file of torch's: anybody may replace a method of a class of
    torch's, and torch.compile itself wraps the functions that call a fused kernel."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or _TORCH not in Path(code.co_filename).parents:
            return False
        step = getattr(step, "__wrapped__", None)
    return True


_TORCH = Path(torch.__file__).parent


class KernelCall(NamedTuple):
    """One call of a kernel, over what one group holds of a bucket.

    Attributes:
        function: the kernel.
        lists: of tensors, each with one for each parameter.
        counters: of steps, one for each parameter, that ``step()`` adds 1 to before the kernel runs.
        options: the kernel's numbers.
        written: those of the lists that are state, which the kernel writes without counting it.
    """

    function: Callable[..., None]
    lists: Sequence[Tensors]
    counters: Tensors
    options: Settings
    written: Sequence[Tensors]

    @property
    def is_one_group(self) -> bool:
        """Whether ``step()`` would call the kernel once, with these lists: on an accelerator it takes no others."""
        counted = self.lists[:-1] if self.counters else self.lists  # a counter has a dtype of its own
        every, alike = chain.from_iterable(self.lists), chain.from_iterable(counted)
        return len(set(map(_DEVICE, every))) == 1 and len(set(map(_DTYPE, alike))) == 1

    def run(self) -> None:
        # A kernel has no derivative: autograd records nothing of it, in a backward with create_graph either.
        counters = self.counters
        if counters and counters[0].device.type == "cpu":
            # A list: torch goes through one a quarter as long as through the counters with a single number or tensor.
            torch._foreach_add_(counters, [_one(counters[0].dtype)] * len(counters))
        elif counters:
            torch._foreach_add_(counters, 1)
        self.function(*self.lists, **self.options)


@cache
def _one(dtype: torch.dtype) -> torch.Tensor:
    # Whoever steps first may be inside of inference_mode(), or of torch.device("meta").
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.ones((), dtype=dtype)


_Asked = tuple[Settings, Sequence[str]]
"""What a group asks for: the kernel's numbers, and what it reads of each entry of state."""


class Kernel:
    """What one optimizer's ``step()`` hands to its kernel, class by class.

    Attributes:
        settings: the names of what a group says to the kernel.
    """

    settings: tuple[str, ...]

    def __init__(self) -> None:
        self._read = itemgetter(*self.settings)
        self._functions: list[Any] = []  # that step() goes through, as they were found last
        self._are_torchs = False
        # By the number of a group: the settings that it had, and what these ask for, which is dear to make.
        self._known: dict[int, tuple[tuple[Any, ...], _Asked]] = {}

    def is_called_by(self, optimizer: Optimizer) -> bool:
        """Whether ``step()`` comes to the kernel by functions of torch's alone: anybody may have replaced one since.
        To be asked in each step."""
        if "_init_group" in vars(optimizer):
            return False
        cls: Any = type(optimizer)
        module = sys.modules[cls.step.__module__]
        name = module.__name__.rpartition(".")[2]  # "adam", which has adam() and _fused_adam()
        functions = [cls._init_group, *map(vars(module).get, (name, f"_fused_{name}"))]
        if functions != self._functions:
            self._functions, self._are_torchs = functions, all(map(_is_torchs, functions))
        return self._are_torchs

    def calls(
        self,
        optimizer: Optimizer,
        tensors: Sequence[torch.Tensor],
        entries: Entries,
        members: Sequence[Members],
    ) -> list[KernelCall] | None:
        """What to call in place of the update of ``tensors``; ``None``: the optimizer's own ``step()``.

        Args:
            entries: of their state.
            members: by group, where they stand.
        """
        device = tensors[0].device
        on_cpu = device.type == "cpu"
        if (
            # GradScaler says there what the kernel is to do with its scale.
            getattr(optimizer, "grad_scale", None) is not None
            or getattr(optimizer, "found_inf", None) is not None
            or (not on_cpu and is_captured(device))  # step() asks whether it may be recorded
        ):
            return None
        gradients: Tensors = list(map(_GRADIENT, tensors))
        if not (are_plain(chain(tensors, gradients)) and _STRIDED.issuperset(map(_LAYOUT, gradients))):
            return None
        if list(map(_DTYPE, gradients)) != list(map(_DTYPE, tensors)):
            return None
        calls: list[KernelCall] = []
        for number, (in_bucket, _) in enumerate(members):
            if not in_bucket:
                continue
            group = optimizer.param_groups[number]
            request = self._asked_of(number, group)
            if request is None or (columns := entries.columns(request[1])) is None:
                return None
            lists = [[*tensors], gradients, *columns]
            if len(in_bucket) < len(tensors):  # else the order does not matter: a kernel takes one after the other
                lists = [[column[i] for i in in_bucket] for column in lists]
            call = self._call(lists, request[0], group)
            if call is None or not (on_cpu or call.is_one_group):
                return None
            calls.append(call)
        return calls

    def _asked_of(self, number: int, group: Settings) -> _Asked | None:
        """``None``: the kernel is not asked for, or a setting is no plain number: tensors are read, or sent to a
        device, by ``step()``."""
        if not group.get("fused") or group.get("differentiable") or group.get("capturable"):
            return None
        given = self._read(group)
        known = self._known.get(number)
        if known is not None and all(map(is_, known[0], given)):
            return known[1]
        options = self._options(dict(zip(self.settings, given, strict=True)))
        if not _NUMBERS.issuperset(map(type, options.values())):
            return None
        request = options, self._columns(options)
        if all(map(is_immutable, given)):  # a list of betas may be written in place
            self._known[number] = given, request
        return request

    def _options(self, settings: dict[str, Any]) -> Settings:
        return settings

    def _columns(self, options: Settings) -> Sequence[str]:
        """What it reads of each entry."""
        raise NotImplementedError

    def _call(self, lists: list[Tensors], options: Settings, group: Settings) -> KernelCall | None:
        """``lists``: of parameters, of gradients, and one for each of ``_columns``."""
        raise NotImplementedError


class _Adam(Kernel):
    """``torch.optim.adam._fused_adam``, once there is state."""

    settings = ("amsgrad", "betas", "lr", "weight_decay", "eps", "maximize")
    is_decoupled = False  # where the group does not say it

    def _options(self, settings: dict[str, Any]) -> Settings:
        beta1, beta2 = settings.pop("betas")
        return {**settings, "beta1": beta1, "beta2": beta2}

    def _columns(self, options: Settings) -> Sequence[str]:
        return (*_MOMENTS, "max_exp_avg_sq", "step") if options["amsgrad"] else (*_MOMENTS, "step")

    def _call(self, lists: list[Tensors], options: Settings, group: Settings) -> KernelCall | None:
        decoupled = group.get(_DECOUPLED, self.is_decoupled) if _READS_DECOUPLED else self.is_decoupled
        tensors, gradients, first, second, *largest, counters = lists
        dtypes = set(map(_DTYPE, counters))
        # step() refuses some dtypes of counters, and adds to those that require a gradient all the same.
        if len(dtypes) != 1 or not _OF_COUNTERS.issuperset(dtypes) or any(map(_REQUIRES_GRAD, counters)):
            return None
        given = (tensors, gradients, first, second, *(largest or [[]]), counters)
        return KernelCall(torch._fused_adamw_ if decoupled else torch._fused_adam_, given, counters, options, lists[2:])


class _AdamW(_Adam):
    """``torch.optim.adamw._fused_adamw`` up to torch 2.6, and the same as Adam's since."""

    is_decoupled = True


class _SGD(Kernel):
    """``torch.optim.sgd._fused_sgd``, from the second step on."""

    settings = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")

    def _options(self, settings: dict[str, Any]) -> Settings:
        return {**settings, "is_first_step": False}

    def _columns(self, options: Settings) -> Sequence[str]:
        return ("momentum_buffer",) if options["momentum"] != 0 else ()

    def _call(self, lists: list[Tensors], options: Settings, group: Settings) -> KernelCall | None:
        if group.get("foreach"):  # which torch asks first, and of Adam last
            return None
        tensors, gradients, *buffers = lists
        given = (tensors, gradients, *(buffers or [[]]))
        return KernelCall(torch._fused_sgd_, given, [], options, buffers)


_KERNELS: dict[type[Optimizer], type[Kernel]] = {
    torch.optim.Adam: _Adam,
    torch.optim.AdamW: _AdamW,
    torch.optim.SGD: _SGD,
}
