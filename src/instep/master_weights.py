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
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from instep._torch.engine import AS_IT_IS, not_traced
from instep._torch.hooks import is_in_torch_optim, undecorated_step
from instep._torch.versions import PLAIN, memory_of, versions_of
from instep.errors import StaleMasterError, class_name

Tensors = list[torch.Tensor]
MASTER = "master"
"""The name of a parameter's master in its entry of the state."""
NOTES = "_instep_masters"
"""The attribute with the notes of an optimizer: see ``Notes``."""
LOOKED = "_instep_looked"
"""The attribute of a shadow: who steps with it has looked whether weights were written."""
_GIVEN = "_instep_given"
"""The attribute with the ``state_dict`` that is being loaded."""
HALF = frozenset({torch.bfloat16, torch.float16})
KEEPS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether a parameter can say of which dtype its gradients are: since torch 2.10."""
_INSTEAD = "Use fp32 weights, in an autocast block"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_logger = logging.getLogger("instep")
_Class = TypeVar("_Class", bound=type[Optimizer])


def masters(cls: _Class, *, gradients: Literal["float32"] | None = None) -> _Class:
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
        gradients: ``"float32"``: backward casts gradients of half-precision parameters to fp32 before they are added
            up (the optimizer sets ``grad_dtype`` of its parameters). Sums over micro-batches, clipping and
            ``GradScaler`` are those of the masters then, for 2 bytes a parameter more while a gradient is alive. It
            needs torch 2.10, and does not go with DDP and FSDP2.

    Raises:
        TypeError: ``cls`` is no such class; or, when an object is made, it keeps tensors, modules or optimizers of its
            own, or a parameter is of a tensor class with memory of its own (quantized weights).
        ValueError: when an object is made: ``differentiable=True``; a parameter that is to have fp32 gradients has
            another one. When ``step()`` or backward finds such a parameter. ``gradients`` is another word, or torch is
            older.
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
            f"model, and not the masters. {_INSTEAD}"
        )
    if gradients not in (None, "float32"):
        raise ValueError(f"masters(gradients=…) takes 'float32' or None, and was given {gradients!r}")
    if gradients is not None and not KEEPS_GRAD_DTYPE:
        raise ValueError(
            f"masters(gradients='float32') needs torch 2.10 or newer (grad_dtype), and this is {torch.__version__}. "
            f"{_INSTEAD}"
        )
    has_wide = gradients is not None
    if issubclass(cls, Masters):
        if has_wide and not cls.has_wide_gradients:
            raise TypeError(f"{cls.__name__} has masters: write masters({cls.inside.__name__}, gradients='float32')")
        return cls
    # No table of classes: one that is made in a function may refer to the model, and lives no longer than that.
    form = {"inside": cls, "has_wide_gradients": has_wide}
    known = (made for made in cls.__subclasses__() if vars(made).items() >= form.items())
    space = {"__module__": __name__, "__doc__": cls.__doc__, **form}
    name = f"masters({cls.__name__}, gradients='float32')" if has_wide else f"masters({cls.__name__})"
    kind: Any = type(cls)
    made: Any = next(known, None) or _kind(kind)(name, (Masters, cls), space)
    return made  # type: ignore[no-any-return]


@functools.cache
def _kind(kind: type) -> Any:
    """The class of such classes, none of which ``pickle`` would find under its name."""
    made = type(kind.__name__, (kind,), {})
    copyreg.pickle(made, _reduce)
    return made


def _reduce(cls: Any) -> Any:
    inside = vars(cls).get("inside")
    if inside is None:
        return cls.__qualname__  # a class that inherits has a name
    return functools.partial(masters, gradients="float32") if cls.has_wide_gradients else masters, (inside,)


def class_inside(cls: type[Optimizer]) -> type[Optimizer]:
    """The class that steps the masters; of a class without, itself. A class that inherits from one with masters may do
    more than that one."""
    inside: type[Optimizer] | None = vars(cls).get("inside") if issubclass(cls, Masters) else None
    return cls if inside is None or undecorated_step(cls) is not Masters.step else inside


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
        lists: each group, its list of parameters, and the list that stands in for it.
        halves: the parameters whose masters stand there,
        masters: and these.
        state: for the inner class.
    """

    lists: list[tuple[dict[str, Any], list[Any], list[Any]]]
    halves: Tensors
    masters: Tensors
    state: "defaultdict[Any, Any]"


class Masters(Optimizer):
    """What ``masters(cls)`` puts before ``cls``. For ``isinstance``, and for types: ``masters`` makes the classes."""

    inside: type[Optimizer]
    has_wide_gradients = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in vars(self).items():
            if name not in ("param_groups", "state"):
                _refuse_kept(self.inside, value, f"in {name!r}")
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
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        none_is_due = is_in_torch_optim(self.inside) and all(p.grad is None for p in parameters)
        # Whoever asks for the state may have to wait for updates that are under way.
        with torch.no_grad(), AS_IT_IS if none_is_due else self._with_masters():
            returned = undecorated_step(self.inside)(self, *args, **kwargs)
        return returned if closure is None else loss

    @contextmanager
    def _with_masters(self) -> Iterator[None]:
        """The groups hold the masters of parameters that have a gradient, and the state theirs."""
        swap, state, hooks = self._swap(), self.state, {name: vars(self).get(name) for name in _HOOKS}
        try:
            self.state = swap.state
            for group, _, standing_in in swap.lists:
                group["params"] = standing_in
            vars(self).update((name, OrderedDict()) for name in _HOOKS)  # of the loop's call, which has called them
            _lend(swap, state)
            versions = versions_of(swap.masters)
            yield
            # Some classes write parameters without a gradient, too. Fused kernels, which count no write, do not.
            every = zip(swap.halves, swap.masters, versions, versions_of(swap.masters), strict=True)
            stepped = [(p, m) for p, m, then, now in every if p.grad is not None or then != now]
            halves, made = [p for p, _ in stepped], [m for _, m in stepped]
            copy_back(halves, made)
            notes_of(self).take(halves, made)
        finally:
            for group, own, _ in swap.lists:
                group["params"] = own
            self.state = state
            vars(self).update(hooks)
            _put_back(swap, state)

    @not_traced
    def _swap(self) -> _Swap:
        state, swap = self.state, _Swap([], [], [], defaultdict(dict))
        # torch's own ask for the entries of parameters that have a gradient, and for no others: these are not touched,
        # for their updates may be under way elsewhere.
        is_whole = not is_in_torch_optim(self.inside)
        for group in self.param_groups:
            params = list(group["params"])
            swap.lists.append((group, group["params"], params))
            for i, p in enumerate(params):
                if p.grad is None and not is_whole:
                    continue
                master = self._master_of(p) if p.dtype in HALF else None
                if master is not None:
                    params[i] = master
                    swap.halves.append(p)
                    swap.masters.append(master)
                elif p in state:
                    swap.state[p] = state[p]
        if LOOKED not in vars(self):
            require_unwritten(self, swap.halves, swap.masters)
            require_wide(self, swap.halves)
        if is_whole:
            mine = set(map(id, swap.halves))
            swap.state.update((key, entry) for key, entry in state.items() if id(key) not in mine)
        return swap

    @not_traced
    def _master_of(self, p: torch.Tensor) -> torch.Tensor | None:
        """It is made if there is none, and a gradient to step it with."""
        master: torch.Tensor | None = self.state[p].get(MASTER) if p in self.state else None
        if master is None and p.grad is not None:
            master = p.detach().to(torch.float32)
            notes_of(self).take([p], [master])
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
        try:
            _refuse_group(self.inside, self.param_groups[-1])
            self._widen_gradients(self.param_groups[-1]["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but that state of half-precision parameters stays in fp32. Without masters in it (a checkpoint of
        ``cls`` alone) they are made of the weights, in the next step, which a warning says."""
        # torch casts floating-point state to the parameter's dtype. The last of the hooks, for others may put another
        # state_dict in the place of this one.
        handle = self.register_load_state_dict_pre_hook(lambda _, given: vars(self).update({_GIVEN: given}))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            vars(self).pop(_GIVEN, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (given := vars(self).pop(_GIVEN, None)) is not None:  # before the hooks that follow a load
            self._widen(state, given)
        super().__setstate__(state)
        vars(self).pop(NOTES, None)
        for group in self.param_groups:  # copies of parameters do without
            self._widen_gradients(p for p in group["params"] if p.grad is None)

    def _widen_gradients(self, parameters: Iterable[Any]) -> None:
        """From now on backward casts the gradients of these."""
        for p in parameters if self.has_wide_gradients else ():
            if p.dtype not in HALF or p.grad_dtype is torch.float32:
                continue
            if p.grad is not None:
                raise ValueError(
                    f"{type(self).__name__}: a parameter of shape {tuple(p.shape)} has a gradient of {p.grad.dtype} "
                    "already, and torch adds the next one to it. Make the optimizer before the first backward, or "
                    "clear the gradients: model.zero_grad()"
                )
            p.grad_dtype = torch.float32

    def _widen(self, state: dict[str, Any], given: Mapping[str, Any]) -> None:
        """``state``, as torch has read it from the ``given`` one, gets fp32 entries of half-precision parameters."""
        without = []
        saved = chain.from_iterable(group["params"] for group in given["param_groups"])
        own = chain.from_iterable(group["params"] for group in state["param_groups"])
        for key, p in zip(saved, own, strict=True):
            entry = state["state"].get(p)
            if not isinstance(entry, dict) or not entry:
                continue
            if p.dtype not in HALF:
                entry.pop(MASTER, None)  # it is the parameter that counts
                continue
            for name, value in given["state"][key].items():
                if name != "step" and next(_kept_in(value), None) is not None:
                    entry[name] = _on_device_of(p, value)
            if MASTER not in entry:
                without.append(p)
        if without:
            _logger.warning(
                f"{type(self).__name__}: the checkpoint has no masters of {len(without)} parameters "
                f"({_place_of(self, without[0])} is the first), as that of another class. They are made of the "
                "half-precision weights in the next step"
            )

    def __repr__(self) -> str:
        count = sum(p.dtype in HALF for group in self.param_groups for p in group["params"])
        return f"{super().__repr__()} with fp32 masters of {count} half-precision parameters"

    # What cannot be.

    def _widen_first_state(self) -> None:
        """Of torch's, Adagrad makes state in its constructor: the same as it would make of fp32 parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                entry = self.state.get(p, {}) if p.dtype in HALF else {}
                if not any(isinstance(value, torch.Tensor) and value.dtype in HALF for value in entry.values()):
                    continue
                if self.inside is not torch.optim.Adagrad:
                    raise TypeError(
                        f"{type(self).__name__}: its constructor makes state of the half-precision parameters, which "
                        f"is not that of fp32 ones. {_INSTEAD}"
                    )
                entry["sum"] = torch.full_like(p.detach(), group["initial_accumulator_value"], dtype=torch.float32)


def notes_of(optimizer: Optimizer) -> Notes:
    notes: Notes = vars(optimizer).setdefault(NOTES, Notes())
    return notes


def _state_of(optimizer: Optimizer) -> Any:
    """Past whoever watches it: updates that are under way write no entry of another parameter, and asking the optimizer
    would wait for them."""
    found = vars(optimizer).get("state")
    return optimizer.state if found is None else found


def pairs_of(
    optimizer: Optimizer,
    some: Sequence[torch.Tensor] | None = None,
    aliases: Sequence[torch.Tensor] | None = None,
) -> tuple[Tensors, Tensors]:
    """The half-precision parameters that have masters, and these: in the order of the groups, or of ``some``, for each
    of which there may be an alias, to be returned in its place."""
    halves, made, state = Tensors(), Tensors(), _state_of(optimizer)
    own = [p for group in optimizer.param_groups for p in group["params"]] if some is None else some
    for p, alias in zip(own, own if aliases is None else aliases, strict=True):
        entry = state.get(p)
        if entry and MASTER in entry and p.dtype in HALF:
            halves.append(alias)
            made.append(entry[MASTER])
    return halves, made


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


def require_wide(optimizer: "Masters", some: Iterable[torch.Tensor]) -> None:
    """Raise ``ValueError`` if a gradient is not in fp32, and was to be: sums of it were rounded."""
    for p in some if optimizer.has_wide_gradients else ():
        if p.dtype in HALF and p.grad is not None and p.grad.dtype is not torch.float32:
            raise ValueError(
                f"{type(optimizer).__name__}: {_place_of(optimizer, p)} has a gradient of {p.grad.dtype}, for its "
                "grad_dtype was changed, or lost with a copy of the parameter. Before the first forward: p.grad_dtype "
                "= torch.float32 for each of the optimizer's half-precision parameters"
            )


def _place_of(optimizer: Optimizer, parameter: torch.Tensor) -> str:
    places = (
        (n, i, g) for n, g in enumerate(optimizer.param_groups) for i, p in enumerate(g["params"]) if p is parameter
    )
    number, position, group = next(places)
    name = f" ({group['param_names'][position]!r})" if "param_names" in group else ""
    return f"param_groups[{number}]['params'][{position}]{name}"


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
    """The weights follow their masters. Of a DTensor its part: torch has no strategy for ``_foreach_copy_``."""
    if halves:
        torch._foreach_copy_([*map(memory_of, halves)], [*map(memory_of, made)])


def _lend(swap: _Swap, state: Any) -> None:
    """The masters get their entries, and their gradients."""
    for p, m in zip(swap.halves, swap.masters, strict=True):
        entry = state.get(p)
        if entry is not None and entry.keys() - {MASTER}:  # classes fill an entry that they find empty
            swap.state[m] = entry
            entry.pop(MASTER, None)
    due = [(m, p.grad) for p, m in zip(swap.halves, swap.masters, strict=True) if p.grad is not None]
    for (m, _), gradient in zip(due, wide([gradient for _, gradient in due]), strict=True):
        m.requires_grad = True  # some classes pass over what requires none
        m.grad = gradient


def _put_back(swap: _Swap, state: Any) -> None:
    """What the step has made of the state."""
    for p, m in zip(swap.halves, swap.masters, strict=True):
        m.grad = None
        m.requires_grad = False
        made = swap.state.pop(m, None)
        entry = state[p] = state.get(p, {}) if made is None else made
        entry[MASTER] = m  # the last one, in each step
    state.update(swap.state)


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


def _refuse_kept(inside: type[Optimizer], value: Any, place: str) -> None:
    """What the constructor keeps of the parameters would be that of the half-precision ones. A learning rate, a beta or
    a count may be a tensor."""
    for kept in _kept_in(value):
        if isinstance(kept, Optimizer):
            raise TypeError(
                f"masters({inside.__name__}): it holds another optimizer ({place}: {class_name(kept)}), whose "
                f"parameters it would go on to step. Give the masters to that one: {inside.__name__}(masters("
                f"{class_name(kept)})(…), …), and call its renew_masters() where the wrapper writes weights"
            )
        if not isinstance(kept, torch.Tensor) or kept.numel() > 1 or isinstance(kept, nn.Parameter):
            raise TypeError(
                f"masters({inside.__name__}): its constructor keeps a {class_name(kept)} {place}, which step() would "
                f"use beside the masters, and which may be made of the half-precision parameters. {_INSTEAD}"
            )


def _refuse_group(inside: type[Optimizer], group: Mapping[str, Any]) -> None:
    if group.get("differentiable", False):
        raise ValueError(
            f"masters({inside.__name__}): differentiable=True keeps the step in the autograd graph, and the weights "
            "are copied from the masters outside of it. Use differentiable=False, or fp32 weights"
        )
    for key, value in group.items():
        if key != "params":
            _refuse_kept(inside, value, f"in a group, under {key!r}")
    for position, p in enumerate(group["params"]):
        if p.dtype in HALF and hasattr(type(p), "__tensor_flatten__") and not hasattr(p, "_local_tensor"):
            raise TypeError(
                f"masters({inside.__name__}): parameter {position} of a group is a {class_name(p)}, whose values are "
                f"not simply of {p.dtype}: there is no fp32 copy to round. Leave it out, or step it without masters"
            )
