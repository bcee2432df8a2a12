"""``masters``: an optimizer class whose state holds an fp32 copy of each half-precision parameter, which it steps.

Parameters and groups stay those of the model. For the length of the inner class's ``step()`` the groups hold the
masters, and the state the masters' entries; then the weights are copied back. Whatever looks at an optimizer from
outside (schedulers, checkpoints, wrappers of distributed training) finds the model's parameters at any other time.
"""

import copyreg
import functools
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from instep._torch.engine import AS_IT_IS, not_traced
from instep._torch.versions import PLAIN, memory_of, versions_of
from instep.errors import StaleMasterError, class_name

Tensors = list[torch.Tensor]
MASTER = "master"
"""The name of a parameter's master in its entry of the state."""
IN_GROUPS = "masters"
"""The key by which a group, and so a checkpoint, says that its parameters have masters."""
NOTES = "_instep_masters"
"""The attribute with the notes of an optimizer: see ``Notes``."""
LOOKED = "_instep_looked"
"""The attribute of a shadow: who steps with it has looked whether weights were written."""
HALF = frozenset({torch.bfloat16, torch.float16})
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_logger = logging.getLogger("instep")
_Class = TypeVar("_Class", bound=type[Optimizer])


def masters(cls: _Class) -> _Class:
    """The optimizer class ``cls`` with fp32 masters of half-precision parameters.

    Each ``step()`` casts the gradients to fp32, steps the fp32 masters with ``cls``, and copies them into the weights:
    bit for bit an ordinary ``cls`` over fp32 copies of the weights. So small updates add up that half-precision weights
    would round away (mixed precision training, arXiv:1710.03740). It needs no ``attach``; with one the masters are
    stepped in backward.

    Parameters of bfloat16 and float16 have masters, and their state is in fp32: ``state[p]`` has the entries of ``cls``
    and ``"master"``, made in the first step that finds a gradient. Parameters of any other dtype are stepped as ``cls``
    steps them. With AdamW a parameter takes 14 bytes at rest: 2 for the weight, 12 for master and moments. A ``step()``
    that is not taken in backward needs 6 more, for the gradient and its fp32 copy.

    The class is the same each time, a subclass of ``cls``, and takes the arguments of ``cls``. Its objects also have
    ``renew_masters()``: masters of weights that were written between steps (a clamp, weights that were loaded) follow
    these. Without that call the next ``step()`` raises.

    Args:
        cls: a class of ``torch.optim``, or another whose ``step()`` updates the parameters of its groups.

    Raises:
        TypeError: ``cls`` is no such class; or, when an object is made, it keeps tensors, modules or optimizers of its
            own, or a parameter is of a tensor class with memory of its own (quantized weights).
        ValueError: when an object is made: ``differentiable=True``, or a parameter is of complex32.
        StaleMasterError: in ``step()``: a weight was written since the last one. Nothing of the step is written.

    Since 0.1.0.

    Example:
        ```python
        model = model.to(torch.bfloat16)
        optimizer = instep.masters(torch.optim.AdamW)(model.parameters(), lr=3e-4)
        for batch in loader:
            model(batch.to(torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    if not isinstance(cls, type):
        name = class_name(cls) if isinstance(cls, Optimizer) else "AdamW"
        raise TypeError(f"masters() takes a class, and was given an object: write masters({name})(parameters, …)")
    if not issubclass(cls, Optimizer):
        raise TypeError(f"masters() takes a class of optimizers, and {class_name(cls)} is no torch.optim.Optimizer")
    if issubclass(cls, torch.optim.LBFGS):
        raise TypeError(
            f"masters({cls.__name__}): it evaluates the loss again within a step, where the weights are those of the "
            "model, and not the masters. Use fp32 weights, in an autocast block"
        )
    if issubclass(cls, Masters):
        return cls
    inside: Any = cls
    made: Any = _made_of(inside)
    return made  # type: ignore[no-any-return]


@functools.cache
def _made_of(cls: type[Optimizer]) -> type[Optimizer]:
    name = f"masters({cls.__name__})"
    kind: Any = _Made if type(cls) is type else type(cls)
    made: type[Optimizer] = kind(name, (Masters, cls), {"__module__": __name__, "__doc__": cls.__doc__, "inside": cls})
    return made


class _Made(type):
    """The class of the classes that ``masters`` makes, none of which ``pickle`` finds by its name."""


def _reduce(cls: type) -> Any:
    inside = vars(cls).get("inside")
    return cls.__qualname__ if inside is None else (masters, (inside,))


copyreg.pickle(_Made, _reduce)


def class_inside(cls: type[Optimizer]) -> type[Optimizer]:
    """The class that steps the masters; of a class without, itself. A class that inherits from one with masters may do
    more than that one."""
    inside: type[Optimizer] | None = vars(cls).get("inside") if issubclass(cls, Masters) else None
    if inside is None or _undecorated(cls) is not Masters.step:
        return cls
    return inside


def _undecorated(cls: type[Optimizer]) -> Callable[..., Any]:
    """``cls.step`` without the wrapper in which torch calls the step hooks: they have been called."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


class Notes:
    """Which version each half-precision weight had when it was made the rounding of its master.

    It is an attribute of the optimizer, and no part of its state: versions mean nothing in another process. A shadow
    that steps for the optimizer shares it. torch.compile, which may trace ``step()``, would compile it anew for each
    version.
    """

    def __init__(self) -> None:
        # By the id of the master: an alias of the parameter, which shares its version, has the same master. An id that
        # was given again does no harm: the values decide.
        self._versions: dict[int, int] = {}

    @not_traced
    def take(self, halves: Sequence[torch.Tensor], masters: Iterable[torch.Tensor]) -> None:
        self._versions.update(zip(map(id, masters), versions_of(halves), strict=True))

    @not_traced
    def written(self, halves: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> list[int]:
        """Which of these weights are not the rounding of their master any more. Mostly the versions tell that none is;
        where they do not, the values are compared: a weight that was put back, or loaded with its master, is fine."""
        noted = list(map(self._versions.get, map(id, masters)))
        now = versions_of(halves)
        if noted == now:
            return []
        pairs = zip(halves, masters, noted, now, strict=True)
        return [i for i, (p, m, a, b) in enumerate(pairs) if a != b and not _is_rounding(p, m)]


def _is_rounding(half: torch.Tensor, master: torch.Tensor) -> bool:
    p, m = memory_of(half).detach(), memory_of(master).detach()
    # By bits: NaN is NaN.
    return p.shape == m.shape and torch.equal(p.view(torch.int16), m.to(p.device, p.dtype).view(torch.int16))


class _Swap(NamedTuple):
    """What a step puts in the places of the model's parameters.

    Attributes:
        lists: each group, with its parameters.
        halves: the parameters with a gradient that have masters,
        masters: and these,
        resting: of a class that is not torch's, masters without a gradient, each with its parameter.
        state: for the inner class.
        is_whole: whether that has all other entries, too.
    """

    lists: list[tuple[dict[str, Any], Any]]
    halves: Tensors
    masters: Tensors
    resting: list[tuple[torch.Tensor, torch.Tensor]]
    state: "defaultdict[Any, Any]"
    is_whole: bool

    @property
    def all(self) -> tuple[Tensors, Tensors]:
        """The parameters whose masters stand in a group, and these."""
        return [*self.halves, *(p for p, _ in self.resting)], [*self.masters, *(m for _, m in self.resting)]


class Masters(Optimizer):
    """What ``masters(cls)`` puts before ``cls``. For ``isinstance``, and for types: ``masters`` makes the classes."""

    inside: type[Optimizer]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refuse_belongings()
        self._widen_first_state()

    # The step.

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """One step of the masters, which the weights follow.

        Args:
            closure: evaluates the loss, once and before the step.

        Raises:
            StaleMasterError: a weight was written since the last step.
        """
        loss = None
        if closure is not None:  # it runs a backward, which adds to the gradients of the model's parameters
            with torch.enable_grad():
                loss = closure()
        none_is_due = _is_torchs(self.inside) and all(p.grad is None for g in self.param_groups for p in g["params"])
        # Whoever asks for the state may have to wait for updates that are under way.
        with torch.no_grad(), AS_IT_IS if none_is_due else self._with_masters():
            returned = _undecorated(self.inside)(self, *args, **kwargs)
        return returned if closure is None else loss

    @contextmanager
    def _with_masters(self) -> Iterator[None]:
        """The groups hold the masters of parameters that have a gradient, and the state theirs."""
        swap, state, hooks = self._swap(), self.state, {name: vars(self).get(name) for name in _HOOKS}
        try:
            self.state = swap.state
            for group, params in swap.lists:
                group["params"] = params[1]
            vars(self).update((name, OrderedDict()) for name in _HOOKS)  # of the loop's call, which has called them
            _lend(swap, state)
            versions = versions_of([m for _, m in swap.resting])
            yield
            # Some classes write parameters without a gradient, too.
            now = versions_of([m for _, m in swap.resting])
            also = [pair for pair, a, b in zip(swap.resting, versions, now, strict=True) if a != b]
            halves, made = [*swap.halves, *(p for p, _ in also)], [*swap.masters, *(m for _, m in also)]
            copy_back(halves, made)
            notes_of(self).take(halves, made)
        finally:
            for group, params in swap.lists:
                group["params"] = params[0]
            self.state = state
            vars(self).update(hooks)
            _put_back(swap, state)

    def _swap(self) -> _Swap:
        state, inner = self.state, defaultdict[Any, Any](dict)
        # torch's own ask for the entries of the parameters that they are given, and for no others.
        swap = _Swap([], [], [], [], inner, is_whole=not _is_torchs(self.inside))
        for group in self.param_groups:
            params = list(group["params"])
            swap.lists.append((group, (group["params"], params)))
            for i, p in enumerate(params):
                if p.grad is None and not swap.is_whole:
                    continue  # torch's own pass it over: it is not touched, for its update may be under way elsewhere
                if p.dtype in HALF:
                    params[i] = self._stand_in(swap, p)
                elif p in state:
                    inner[p] = state[p]
        if LOOKED not in vars(self):
            require_unwritten(self, *swap.all)
        if swap.is_whole:
            mine = set(map(id, swap.all[0]))
            inner.update((key, entry) for key, entry in state.items() if id(key) not in mine)
        return swap

    def _stand_in(self, swap: _Swap, p: torch.Tensor) -> torch.Tensor:
        """The master of ``p``, which is made if there is none; without a gradient it is none, and ``p`` stays."""
        entry = self.state.get(p)
        master: torch.Tensor | None = None if entry is None else entry.get(MASTER)
        if p.grad is None:
            if master is not None:
                swap.resting.append((p, master))
            return p if master is None else master
        if master is None:
            master = p.detach().to(torch.float32)
            notes_of(self).take([p], [master])
        swap.halves.append(p)
        swap.masters.append(master)
        return master

    # Weights that were written.

    @torch.no_grad()
    def renew_masters(self) -> None:
        """Weights were written: their masters follow. An element that is still the rounding of its master's keeps that
        one, with all of its bits. Masters that are to be made are made of the weights in any case."""
        self.state  # noqa: B018 (whoever asks for it waits for updates that are due)
        halves, made = pairs_of(self)
        for p, m in zip(map(memory_of, halves), map(memory_of, made), strict=True):
            here = m.to(p.device)  # it may be in the host's memory
            m.copy_(torch.where(here.to(p.dtype) == p, here, p.to(m.dtype)))
        notes_of(self).take(halves, made)

    # Groups, checkpoints and copies.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _refuse_group(self.inside, group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        group.setdefault(IN_GROUPS, "float32")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but that state of half-precision parameters stays in fp32. Without masters in it (a checkpoint of
        ``cls`` alone) they are made of the weights, in the next step, which a warning says."""
        # torch casts floating-point state to the parameter's dtype: it finds none, and gets it afterwards. The last of
        # the hooks, for others may put another state_dict in the place of this one.
        loading = _Loading(self)
        handle = self.register_load_state_dict_pre_hook(loading.before)
        vars(self)[_LOADING] = loading
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            vars(self).pop(_LOADING, None)
        loading.warn()

    def __setstate__(self, state: dict[str, Any]) -> None:
        loading = vars(self).get(_LOADING)  # before the hooks that follow a load
        if loading is not None:
            loading.fill(state)
        super().__setstate__(state)
        vars(self).pop(NOTES, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        if vars(cls).get("inside") is None:  # of a class that can be found by its name
            return super().__reduce_ex__(protocol)
        return _bare, (self.inside,), self.__getstate__()

    def __repr__(self) -> str:
        counted = [p.dtype for group in self.param_groups for p in group["params"] if p.dtype in HALF]
        kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in counted})) or "half-precision"
        return f"{super().__repr__()} with fp32 masters of {len(counted)} {kinds} parameters"

    # What cannot be.

    def _refuse_belongings(self) -> None:
        """Refuse what the constructor keeps of the parameters: it would be that of the half-precision ones."""
        for name, value in vars(self).items():
            if name in ("param_groups", "state", NOTES):
                continue
            kept = next((v for v in _kept_in(value) if not _is_number(v)), None)
            if isinstance(kept, Optimizer):
                raise TypeError(
                    f"{type(self).__name__}: it holds another optimizer ({name}: {class_name(kept)}), whose parameters "
                    f"it would go on to step. Give the masters to that one: {self.inside.__name__}(masters("
                    f"{class_name(kept)})(…), …), and call its renew_masters() where the wrapper writes weights"
                )
            if kept is not None:
                raise TypeError(
                    f"{type(self).__name__}: its constructor keeps {class_name(kept)}s in {name!r}, made of the "
                    "half-precision parameters, and step() would use them beside the masters. Use fp32 weights, in an "
                    "autocast block"
                )

    def _widen_first_state(self) -> None:
        """Of torch's, Adagrad makes state in its constructor: the same as it would make of fp32 parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                tensors = [v for v in self.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
                if p.dtype not in HALF or not any(v.dtype in HALF for v in tensors):
                    continue
                if self.inside is not torch.optim.Adagrad:
                    raise TypeError(
                        f"{type(self).__name__}: its constructor makes state of the half-precision parameters, which "
                        "is not that of fp32 ones. Use fp32 weights, in an autocast block"
                    )
                first = group["initial_accumulator_value"]
                with torch.no_grad():
                    self.state[p]["sum"] = torch.full_like(p, first, dtype=torch.float32, requires_grad=False)


_LOADING = "_instep_loading"


def _bare(inside: type[Optimizer]) -> Optimizer:
    """An object of ``masters(inside)``, for ``pickle`` and ``copy`` to fill."""
    cls = masters(inside)
    return cls.__new__(cls)


def _is_torchs(cls: type[Optimizer]) -> bool:
    return f"{cls.__module__}.".startswith("torch.optim.")


def notes_of(optimizer: Optimizer) -> Notes:
    notes: Notes = vars(optimizer).setdefault(NOTES, Notes())
    return notes


def _state_of(optimizer: Optimizer) -> Any:
    """Past whoever watches it: updates that are under way write no entry of another parameter, and asking the optimizer
    would wait for them."""
    found = vars(optimizer).get("state")
    return optimizer.state if found is None else found


def pairs_of(optimizer: Optimizer, some: Iterable[torch.Tensor] | None = None) -> tuple[Tensors, Tensors]:
    """The half-precision parameters that have masters, in the order of the groups, or of ``some``; and the masters."""
    halves, made, state = Tensors(), Tensors(), _state_of(optimizer)
    every = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for p in every if some is None else some:
        entry = state.get(p)
        if entry and MASTER in entry and p.dtype in HALF:
            halves.append(p)
            made.append(entry[MASTER])
    return halves, made


def note_writes(optimizer: Optimizer, parameters: Sequence[torch.Tensor], owned: Sequence[torch.Tensor]) -> None:
    """Whoever steps for the optimizer has stepped these, or counts a write of them before: from here on it counts as
    none of the loop's.

    Args:
        parameters: or aliases of them.
        owned: the optimizer's own.
    """
    entries = map(_state_of(optimizer).get, owned)
    pairs = [(p, e[MASTER]) for p, e in zip(parameters, entries, strict=True) if e and MASTER in e and p.dtype in HALF]
    notes_of(optimizer).take([p for p, _ in pairs], [m for _, m in pairs])


def require_unwritten(optimizer: Optimizer, halves: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
    """Raise ``StaleMasterError`` if one of these weights was written since it was made the rounding of its master."""
    written = notes_of(optimizer).written(halves, made)
    if written:
        places = [_place_of(optimizer, halves[i]) for i in written]
        some = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        raise StaleMasterError(
            f"{type(optimizer).__name__}: {some} was written since the last step (a clamp, averaged weights, a model "
            "that was loaded?): the weight is not the rounding of its fp32 master any more, and the step would lose "
            "what was written. Call optimizer.renew_masters() after the write. To go on with the masters instead: "
            "p.copy_(optimizer.state[p]['master']) for each"
        )


def _place_of(optimizer: Optimizer, parameter: torch.Tensor) -> str:
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if p is parameter:
                names = group.get("param_names")
                name = f" ({names[position]!r})" if names and position < len(names) else ""
                return f"param_groups[{number}]['params'][{position}]{name}"
    return f"a parameter of shape {tuple(parameter.shape)}"


# The two casts.


def wide(gradients: Sequence[torch.Tensor]) -> Tensors:
    """The gradients in fp32: those that are, as they are."""
    if not PLAIN.issuperset(map(type, gradients)) or any(g.layout is not torch.strided for g in gradients):
        return [g.to(torch.float32) for g in gradients]
    cast = [g if g.dtype is torch.float32 else torch.empty_like(g, dtype=torch.float32) for g in gradients]
    pairs = [(new, g) for new, g in zip(cast, gradients, strict=True) if new is not g]
    if pairs:  # a foreach function refuses empty lists
        torch._foreach_copy_([new for new, _ in pairs], [g for _, g in pairs])
    return cast


def copy_back(halves: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
    if halves:
        # Of a DTensor its part: torch has no strategy for _foreach_copy_.
        torch._foreach_copy_([*map(memory_of, halves)], [*map(memory_of, made)])


def _lend(swap: _Swap, state: Any) -> None:
    """The masters get their entries, and their gradients."""
    for p, m in zip(*swap.all, strict=True):
        entry = state.get(p)
        if entry is not None and entry.keys() - {MASTER}:  # classes fill an entry that they find empty
            swap.state[m] = entry
            entry.pop(MASTER, None)
    for m, gradient in zip(swap.masters, wide([p.grad for p in swap.halves if p.grad is not None]), strict=True):
        m.requires_grad = True  # some classes pass over what requires none
        m.grad = gradient


def _put_back(swap: _Swap, state: Any) -> None:
    """What the step has made of the state."""
    inner = swap.state
    for p, m in zip(*swap.all, strict=True):
        m.grad = None
        m.requires_grad = False
        entry = state.get(p)
        made = inner.pop(m, entry)
        if entry is None:
            entry = state[p] = {} if made is None else made
        elif made is not entry:
            entry.clear()
            entry.update(made)
        entry.pop(MASTER, None)
        entry[MASTER] = m  # the last one, in each step
    if swap.is_whole:
        for key in [key for key in state if key not in inner and not isinstance(key, torch.Tensor)]:
            del state[key]
    state.update(inner)


# Loading.


class _Loading:
    """One ``load_state_dict()``: tensors of half-precision parameters' state pass by torch, which would cast them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: dict[Any, Any] = {}  # by the key of the checkpoint
        self._parameters: dict[Any, torch.Tensor] = {}
        self._lacks: list[Any] = []

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self._parameters = dict(zip(saved, own, strict=False))  # torch says what does not fit
        state = dict(state_dict["state"])
        for key, p in self._parameters.items():
            entry = state.get(key)
            if not isinstance(entry, dict):
                continue
            if p.dtype in HALF:
                self._tensors[key] = {
                    k: v for k, v in entry.items() if k != "step" and next(_kept_in(v), None) is not None
                }
                if entry and MASTER not in entry:
                    self._lacks.append(key)
            # Of a parameter that is fp32 by now it is the parameter that counts.
            state[key] = {k: v for k, v in entry.items() if k != MASTER and k not in self._tensors.get(key, ())}
        return {**state_dict, "state": state}

    def fill(self, state: dict[str, Any]) -> None:
        """``state``: that the optimizer is about to get, as torch has read it."""
        for key, tensors in self._tensors.items():
            p = self._parameters[key]
            entry = state["state"][p]
            entry.update((name, _on_device_of(p, value)) for name, value in tensors.items())
            if MASTER in entry:
                entry[MASTER] = entry.pop(MASTER)
        for group in state["param_groups"]:
            group.setdefault(IN_GROUPS, "float32")

    def warn(self) -> None:
        if self._lacks:
            place = _place_of(self._optimizer, self._parameters[self._lacks[0]])
            _logger.warning(
                "%s: the checkpoint has no masters of %d parameters (%s is the first): it is one of the class without "
                "them. They are made of the half-precision weights in the next step",
                type(self._optimizer).__name__,
                len(self._lacks),
                place,
            )


def _on_device_of(parameter: torch.Tensor, value: Any) -> Any:
    """State of a half-precision parameter: half-precision tensors are those of a class without masters."""
    if isinstance(value, torch.Tensor):
        return value.to(parameter.device, torch.float32 if value.dtype in HALF else value.dtype)
    if isinstance(value, dict):
        return {key: _on_device_of(parameter, one) for key, one in value.items()}
    return type(value)(_on_device_of(parameter, one) for one in value) if isinstance(value, (list, tuple)) else value


# Refusals.


def _kept_in(value: Any) -> Iterator[Any]:
    """The tensors, modules and optimizers that a value holds."""
    if isinstance(value, (torch.Tensor, nn.Module, Optimizer)):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _kept_in(one)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _kept_in(one)


def _is_number(value: Any) -> bool:
    """A learning rate, a beta or a count may be a tensor."""
    return isinstance(value, torch.Tensor) and value.numel() <= 1 and not isinstance(value, nn.Parameter)


def _refuse_group(inside: type[Optimizer], group: Mapping[str, Any]) -> None:
    if group.get("differentiable", False):
        raise ValueError(
            f"masters({inside.__name__}): differentiable=True keeps the step in the autograd graph, and the weights "
            "are copied from the masters outside of it. Use differentiable=False, or fp32 weights"
        )
    for key, value in group.items():
        if key != "params" and not all(map(_is_number, _kept_in(value))):
            raise TypeError(
                f"masters({inside.__name__}): a group has tensors under {key!r}, which were made for the "
                "half-precision parameters. Use fp32 weights, in an autocast block"
            )
    for position, p in enumerate(group["params"]):
        where = f"masters({inside.__name__}): parameter {position} of a group"
        if p.dtype is torch.complex32:
            raise ValueError(f"{where} is of complex32, of which there are no masters. Use complex64")
        if p.dtype in HALF and hasattr(type(p), "__tensor_flatten__") and not hasattr(p, "_local_tensor"):
            raise TypeError(
                f"{where} is a {class_name(p)}, whose values are not simply of {p.dtype}: there is no fp32 copy to "
                "round. Leave such weights out, or step them with the class alone"
            )
