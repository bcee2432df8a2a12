"""torch's Adam, AdamW and SGD, called without the optimizer's own Python around them: fused kernels, and the functions
of ``torch.optim`` that call foreach kernels, or go from tensor to tensor.

``AdamW(fused=True).step()`` on 1,000 small tensors spends much of its time outside of its kernel: in a loop over the
parameters that gathers the kernel's lists, in grouping those by device and dtype, and in adding a number to each step
counter, which on a CPU makes a tensor of the number each time. Here the lists are gathered by passes in C, and nothing
is grouped: a kernel on a CPU takes tensor after tensor by itself, and one on an accelerator is called here only for
lists that make one group. On a CPU the counters are added a tensor that is there. Every element is computed by the same
kernel from the same values: the bits are the same.

The fused kernels have no public name (``torch._fused_adamw_``; ``torch.optim`` calls them so). All are called for what
is known of them alone, exactly torch's classes with torch's own ``step`` and what that calls, plain tensors, state that
is there and settings that are plain numbers; everything else is left to ``step()``. ``tests/unit/test_kernels.py``
compares each with ``step()``, and fails where torch changes what it hands to them.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.guards import FoundState, Places, StateLayout, at_places
from instep._optim.kinds import class_of_update, replaced_step
from instep._optim.local_shard import LocalShard
from instep._optim.shadow import GroupLayout, without_autocast
from instep._optim.values import is_immutable
from instep._torch.engine import AS_IT_IS, is_captured
from instep._torch.hooks import is_torchs
from instep._torch.versions import PLAIN, are_plain
from instep.master_weights import HALF, MASTER, Masters, copy_back, wide

Tensors = list[torch.Tensor]
GRADIENT: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")
Settings = Mapping[str, Any]
_DEVICE, _DTYPE, _LAYOUT = map(attrgetter, ("device", "dtype", "layout"))
_STRIDED = frozenset({torch.strided})
_NUMBERS = frozenset({bool, int, float})
_REQUIRES_GRAD = attrgetter("requires_grad")
_OF_COUNTERS = frozenset({torch.float32, torch.float64})
_MOMENTS = ("exp_avg", "exp_avg_sq")
_DECOUPLED = "decoupled_weight_decay"
# torch 2.6 has another class for it, and ignores this in a group, as it may come with a checkpoint of a newer torch.
_READS_DECOUPLED = _DECOUPLED in inspect.signature(torch.optim.Adam).parameters


def kernel_of(optimizer: Optimizer) -> "Kernel | None":
    """What the optimizer's ``step()`` calls; ``None``: that is not known, or it is another ``step()`` than torch's."""
    cls = class_of_update(optimizer)
    made = _KERNELS.get(cls)
    known = made is not None and replaced_step(optimizer) is None and is_torchs(cls.step)
    return made(of_masters=isinstance(optimizer, Masters)) if made is not None and known else None


class KernelCall(NamedTuple):
    """One call of a kernel, over what one group holds of a bucket. It waits for the gradients.

    Attributes:
        function: the kernel, which takes parameters, gradients, and then these:
        lists: of the state, each with one tensor for each parameter; an empty one where it needs none.
        options: the kernel's numbers.
        tensors: the parameters.
        in_bucket: where they stand in the bucket; ``None``: they are all of it, in its order.
        counters: those of ``lists`` that count steps: ``step()`` adds 1 to each before the kernel runs.
        is_fused: whether it is a kernel; else it is a function of Python's, which divides the lists by itself.
    """

    function: Callable[..., None]
    lists: Sequence[Tensors]
    options: Settings
    tensors: Tensors
    in_bucket: list[int] | None
    counters: Tensors
    is_fused: bool = True

    @property
    def is_one_group(self) -> bool:
        """Whether ``step()`` would call the kernel once, with these lists: on an accelerator it takes no others."""
        counted = self.lists[:-1] if self.counters else self.lists  # a counter has a dtype of its own
        every, alike = chain(self.tensors, *self.lists), chain(self.tensors, *counted)
        return len(set(map(_DEVICE, every))) == 1 and len(set(map(_DTYPE, alike))) == 1

    def run(self, gradients: Tensors) -> None:
        """``gradients``: of the bucket."""
        # A kernel has no derivative: autograd records nothing of it, in a backward with create_graph either.
        counters = self.counters
        if counters and counters[0].is_cpu:
            # A list: torch goes through one a quarter as long as through the counters with a single number or tensor.
            torch._foreach_add_(counters, [_one(counters[0].dtype)] * len(counters))
        elif counters:
            torch._foreach_add_(counters, 1)
        mine = gradients if self.in_bucket is None else [gradients[i] for i in self.in_bucket]
        self.function(self.tensors, mine, *self.lists, **self.options)


class MastersCall(NamedTuple):
    """A call of a kernel over the masters of half-precision parameters, with the two casts around it.

    Attributes:
        inner: the call, over all of ``tensors``.
        lists: of the state, with the masters at the end.
        tensors: the parameters.
        in_bucket: as that of ``KernelCall``.
    """

    inner: KernelCall
    lists: Sequence[Tensors]
    tensors: Tensors
    in_bucket: list[int] | None

    def run(self, gradients: Tensors) -> None:
        """``gradients``: of the bucket."""
        mine = gradients if self.in_bucket is None else [gradients[i] for i in self.in_bucket]
        # The casts have derivatives.
        with torch.no_grad() if torch.is_grad_enabled() else AS_IT_IS:
            self.inner.run(wide(mine))
            copy_back(self.tensors, self.inner.tensors)


def are_usual(tensors: Sequence[torch.Tensor], gradients: Tensors) -> bool:
    """Whether a kernel can be called with these: plain tensors, dense gradients of the parameters' dtypes."""
    return (
        PLAIN.issuperset(map(type, chain(tensors, gradients)))
        and _STRIDED.issuperset(map(_LAYOUT, gradients))
        and list(map(_DTYPE, gradients)) == list(map(_DTYPE, tensors))
    )


@cache
def _one(dtype: torch.dtype) -> torch.Tensor:
    # Whoever steps first may be inside of inference_mode(), or of torch.device("meta").
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.ones((), dtype=dtype)


_Asked = tuple[Settings, Sequence[str]]
"""What a group asks for: the kernel's numbers, and what it reads of each entry of state."""


class Part(NamedTuple):
    """Those of a bucket that one group has.

    Attributes:
        group: its number.
        names: what is read of each entry.
        in_bucket: where they stand there; ``None``: they are all of it, and the order does not matter: a kernel takes
            one after the other.
        columns: for each of the names, gets the values from all of the state.
    """

    group: int
    names: Sequence[str]
    in_bucket: list[int] | None
    columns: Sequence[Callable[[Sequence[Any]], Sequence[Any]]]


class Placed(NamedTuple):
    """Where a bucket's parameters stand in the groups and in the state. It refers to no tensor.

    Attributes:
        groups: as long as they are laid out like this,
        state: and this too, it is so.
        places: of their state.
        parts: by group.
    """

    groups: GroupLayout
    state: StateLayout
    places: Places
    parts: list[Part]


class Placing:
    """Keeps, for one bucket, what was found out about its places by an earlier step."""

    __slots__ = ("placed",)

    def __init__(self) -> None:
        self.placed: Placed | None = None

    @property
    def places(self) -> Places | None:
        """Of its parameters' state, where a kernel steps it."""
        return None if self.placed is None else self.placed.places


class InBucket(NamedTuple):
    """What one optimizer has in a bucket.

    Attributes:
        tensors: to step: parameters, or aliases of them.
        owned: the optimizer's own parameter for each.
        shards: for each the shard that is stepped in the parameter's place; ``None``: all are stepped whole.
    """

    tensors: Sequence[torch.Tensor]
    owned: Sequence[torch.Tensor]
    placing: Placing
    shards: Sequence[LocalShard | None] | None = None


class Kernel:
    """What one optimizer's ``step()`` hands to its kernel, class by class.

    Args:
        of_masters: whether it steps the masters of its parameters.

    Attributes:
        settings: the names of what a group says to the kernel.
    """

    settings: tuple[str, ...]

    def __init__(self, *, of_masters: bool = False) -> None:
        self._of_masters = of_masters
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
        cls: Any = class_of_update(optimizer) if self._of_masters else type(optimizer)
        module = sys.modules[cls.step.__module__]
        name = module.__name__.rpartition(".")[2]  # "adam", which has adam(), and _fused_adam()
        names = name, f"_fused_{name}", f"_multi_tensor_{name}", f"_single_tensor_{name}"
        functions = [cls._init_group, *map(vars(module).get, names)]
        if functions != self._functions:
            self._functions, self._are_torchs = functions, all(map(is_torchs, functions))
        return self._are_torchs

    def calls(
        self, optimizer: Optimizer, buckets: Sequence[InBucket], groups: GroupLayout, found: FoundState
    ) -> list[list[KernelCall | MastersCall] | None]:
        """For each bucket, what to call in place of its update; ``None``: the optimizer's own ``step()``."""
        # GradScaler says there what the kernel is to do with its scale.
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return [None] * len(buckets)
        return [self._calls_of(optimizer, bucket, groups, found) for bucket in buckets]

    def _calls_of(
        self, optimizer: Optimizer, bucket: InBucket, groups: GroupLayout, found: FoundState
    ) -> list[KernelCall | MastersCall] | None:
        tensors, owned, placing, shards = bucket
        on_cpu, placed = tensors[0].is_cpu, placing.placed
        if shards is not None:
            return None
        if not on_cpu and is_captured(tensors[0].device):
            return None  # step() asks whether it may be recorded
        if placed is None or placed.groups is not groups or placed.state is not found.layout:
            placed = placing.placed = self._place(optimizer, owned, groups, found.layout)
            if placed is None:
                return None
        calls: list[KernelCall | MastersCall] = []
        for number, names, in_bucket, columns in placed.parts:
            group = optimizer.param_groups[number]
            request = self._asked_of(number, group)
            if request is None or request[1] != names:
                placing.placed = None  # as it is asked for now
                return None if request is None else self._calls_of(optimizer, bucket, groups, found)
            lists = [[*column(found.values)] for column in columns]
            if not found.are_plain and not are_plain(chain.from_iterable(lists)):
                return None
            some = [*tensors] if in_bucket is None else [tensors[i] for i in in_bucket]
            if self._of_masters:
                call = self._call(lists[-1], None, lists[:-1], request[0], group)
            else:
                call = self._call(some, in_bucket, lists, request[0], group)
            if call is None or not (on_cpu or not call.is_fused or call.is_one_group):
                return None
            calls.append(MastersCall(call, lists, some, in_bucket) if self._of_masters else call)
        return calls

    def _place(
        self, optimizer: Optimizer, owned: Sequence[torch.Tensor], groups: GroupLayout, state: StateLayout
    ) -> Placed | None:
        """``None``: ``step()`` must be asked, or an entry lacks what it reads, as before the first step."""
        # A weight that has been made fp32 since still has a master in its entry.
        if self._of_masters and not all(p.dtype in HALF for p in owned):
            return None
        entries = state.entries_of(owned)
        parts, read = list[Part](), list[int]()
        for number, (mine, _) in enumerate(groups.members_of(owned)):
            if not mine:
                continue
            asked, is_all = self._asked_of(number, optimizer.param_groups[number]), len(mine) == len(owned)
            if asked is None:
                return None
            own = entries if is_all else [entries[i] for i in mine]
            columns = [at for name in asked[1] if (at := state.column(own, name)) is not None]
            if len(columns) < len(asked[1]):
                return None
            read += chain.from_iterable(columns)
            parts.append(Part(number, asked[1], None if is_all else mine, [*map(at_places, columns)]))
        return Placed(groups, state, Places(entries, at_places(read)), parts)

    def _asked_of(self, number: int, group: Settings) -> _Asked | None:
        """``None``: a setting is no plain number: tensors are read, or sent to a device, by ``step()``."""
        if group.get("differentiable") or group.get("capturable"):
            return None
        given = self._read(group)
        known = self._known.get(number)
        if known is not None and all(map(is_, known[0], given)):
            return known[1]
        options = self._options(dict(zip(self.settings, given, strict=True)))
        if not _NUMBERS.issuperset(map(type, options.values())):
            return None
        columns = self._columns(options)
        request = options, (*columns, MASTER) if self._of_masters else columns
        if all(map(is_immutable, given)):  # a list of betas may be written in place
            self._known[number] = given, request
        return request

    def _options(self, settings: dict[str, Any]) -> Settings:
        return settings

    def _columns(self, options: Settings) -> Sequence[str]:
        """What it reads of each entry."""
        raise NotImplementedError

    def _call(
        self, tensors: Tensors, in_bucket: list[int] | None, columns: list[Tensors], options: Settings, group: Settings
    ) -> KernelCall | None:
        """``columns``: one for each of ``_columns``."""
        raise NotImplementedError

    def _of_function(
        self,
        tensors: Tensors,
        in_bucket: list[int] | None,
        lists: Sequence[Tensors],
        options: Settings,
        group: Settings,
    ) -> KernelCall:
        """The function of ``torch.optim``, which ``step()`` calls under ``no_grad``, and outside of autocast."""
        options = {**options, "foreach": group.get("foreach"), "fused": group.get("fused")}
        function = partial(_as_in_step, self._functions[1], tensors[0].device.type)
        return KernelCall(function, lists, options, tensors, in_bucket, [], is_fused=False)


def _as_in_step(function: Callable[..., None], kind: str, *lists: Tensors, **options: Any) -> None:
    with torch.no_grad() if torch.is_grad_enabled() else AS_IT_IS, without_autocast(kind):
        function(*lists, **options)


class _Adam(Kernel):
    """``torch.optim.adam.adam``, once there is state."""

    settings = ("amsgrad", "betas", "lr", "weight_decay", "eps", "maximize")
    is_decoupled = False  # where the group does not say it

    def _options(self, settings: dict[str, Any]) -> Settings:
        beta1, beta2 = settings.pop("betas")
        return {**settings, "beta1": beta1, "beta2": beta2}

    def _columns(self, options: Settings) -> Sequence[str]:
        return (*_MOMENTS, "max_exp_avg_sq", "step") if options["amsgrad"] else (*_MOMENTS, "step")

    def _call(
        self, tensors: Tensors, in_bucket: list[int] | None, columns: list[Tensors], options: Settings, group: Settings
    ) -> KernelCall | None:
        decoupled = group.get(_DECOUPLED, self.is_decoupled) if _READS_DECOUPLED else self.is_decoupled
        first, second, *largest, counters = columns
        dtypes = set(map(_DTYPE, counters))
        # step() refuses some dtypes of counters, and adds to those that require a gradient all the same.
        if len(dtypes) != 1 or not _OF_COUNTERS.issuperset(dtypes) or any(map(_REQUIRES_GRAD, counters)):
            return None
        lists = first, second, *(largest or [[]]), counters
        if group.get("fused"):
            function = torch._fused_adamw_ if decoupled else torch._fused_adam_
            return KernelCall(function, lists, options, tensors, in_bucket, counters)
        options = {**options, "has_complex": any(map(torch.is_complex, tensors))}
        if _READS_DECOUPLED:
            options[_DECOUPLED] = decoupled
        return self._of_function(tensors, in_bucket, lists, options, group)


class _AdamW(_Adam):
    """``torch.optim.adamw.adamw`` up to torch 2.6, and the same as Adam's since."""

    is_decoupled = True


class _SGD(Kernel):
    """``torch.optim.sgd.sgd``, from the second step on."""

    settings = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")

    def _columns(self, options: Settings) -> Sequence[str]:
        return ("momentum_buffer",) if options["momentum"] != 0 else ()

    def _call(
        self, tensors: Tensors, in_bucket: list[int] | None, columns: list[Tensors], options: Settings, group: Settings
    ) -> KernelCall | None:
        if not group.get("fused") or group.get("foreach"):  # which torch asks first, and of Adam last
            return self._of_function(tensors, in_bucket, columns or [[]], options, group)
        options = {**options, "is_first_step": False}
        return KernelCall(torch._fused_sgd_, columns or [[]], options, tensors, in_bucket, [])


_KERNELS: dict[type[Optimizer], type[Kernel]] = {
    torch.optim.Adam: _Adam,
    torch.optim.AdamW: _AdamW,
    torch.optim.SGD: _SGD,
}
