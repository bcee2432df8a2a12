"""Parameters that cannot be stepped, or not by these optimizers, or not here."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.parameter import is_lazy

from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


@dataclass(frozen=True, slots=True)
class _Given:
    """One parameter of an optimizer.

    Attributes:
        where: its place in the optimizer.
        name: of the model's; ``None``: the model has no such parameter.
    """

    parameter: torch.Tensor
    where: str
    name: str | None

    @property
    def known(self) -> str:
        if self.name is not None:
            return self.name
        return "without a shape yet" if is_lazy(self.parameter) else f"of shape {tuple(self.parameter.shape)}"


# What is wrong in itself.


def none_at_all(target: Target, options: Options) -> None:
    if target.unlike is None and next(target.optimized(), None) is None:
        raise AttachError("the optimizer has no parameters")


def derived(target: Target, options: Options) -> None:
    for given in _given(target):
        if not given.parameter.is_leaf:
            raise AttachError(
                f"{given.where}, parameter {given.known!r}, is not a leaf: autograd gives it no final gradient. "
                "Optimize the parameter it was computed from"
            )


def taken(target: Target, options: Options) -> None:
    for given in _given(target):
        if id(given.parameter) in target.taken:
            raise AttachError(
                f"parameter {given.name!r} is already attached ({target.taken[id(given.parameter)]!r}). Call "
                "instep.attached(model).detach() first; several optimizers go into one call: "
                "attach(model, [first, second])"
            )


# What plain torch trains, and nobody else can: by default it is left to torch.


def strangers(target: Target, options: Options) -> None:
    """Where the model has some of an optimizer's parameters, and nothing is asked for, ``optimizer.step()`` steps the
    others, at once and by itself."""
    given = list(_given(target))
    knows_some = any(one.name is not None for one in given)
    stranger = next((one for one in given if one.name is None), None)
    if stranger is None or (knows_some and options.asks_for_nothing):
        return
    advice = [
        "Attach the model that owns it, or the module that holds both models",
        "If the parameter was replaced since, build the optimizer anew on the model's parameters, then attach",
    ]
    if target.fsdp1 or target.fsdp2:
        advice.append("Sharding replaces all of them: shard first, then build the optimizer, then attach")
    if not options.takes_any_loop:
        advice.append(f"schedule='forward' without further options leaves {'it' if knows_some else 'all'} to torch")
    raise AttachError(f"{stranger.where}, {stranger.known}, is not a parameter of the model. {'. '.join(advice)}")


def unmade(target: Target, options: Options) -> None:
    for given in _given(target):
        if is_lazy(given.parameter):
            raise AttachError(
                f"parameter {given.name or given.where!r} has no shape yet (lazy module). Run one forward before the "
                "optimizer is built, then attach"
            )


def on_meta(target: Target, options: Options) -> None:
    for given in _given(target):
        if given.parameter.is_meta:
            raise AttachError(
                f"parameter {given.name or given.where!r} is on the meta device: it has no values to be stepped. Make "
                "them (model.to_empty(device=…), or load a checkpoint with assign=True), build the optimizer on them, "
                "then attach"
            )


def in_two_places(target: Target, options: Options) -> None:
    seen: dict[int, str] = {}
    for given in _given(target):
        if id(given.parameter) in seen:
            raise AttachError(
                f"parameter {given.name!r} is at {seen[id(given.parameter)]} and again at {given.where}: it would be "
                "stepped twice. Give it to one optimizer, once"
            )
        seen[id(given.parameter)] = given.where


def stepped_in_backward(target: Target, options: Options) -> None:
    for given in _given(target):
        if getattr(given.parameter, "_in_backward_optimizers", None):
            raise AttachError(
                f"parameter {given.name!r} has optimizers of its own (apply_optimizer_in_backward): it would be "
                "stepped twice. Attach a model without them"
            )


def gradients_of_another_dtype(target: Target, options: Options) -> None:
    """What stands in ``.grad`` beside the gradient itself, and the aliases that later updates write, have the
    parameter's dtype."""
    if options.undo or (options.schedule == "forward" and options.defer is False):
        return
    for given in (one for one in _given(target) if one.parameter.is_leaf):
        dtype, of_gradient = given.parameter.dtype, getattr(given.parameter, "grad_dtype", given.parameter.dtype)
        if of_gradient != dtype:
            raise AttachError(
                f"parameter {given.name or given.where!r} has grad_dtype={of_gradient}, and is {dtype}: its update "
                "runs in step() alone. Use schedule='forward' with defer=False, or undo=True"
            )


def all_frozen(target: Target, options: Options) -> None:
    given = list(_given(target))
    if not options.asks_for_nothing and not any(one.parameter.requires_grad for one in given):
        raise AttachError(
            f"all {len(given)} parameters of the optimizer are frozen ({given[0].name!r} and so on): none will get a "
            "gradient. Set requires_grad before attach"
        )


def _given(target: Target) -> Iterator[_Given]:
    for optimizer in target.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                where = f"{type(optimizer).__name__}.param_groups[{number}]['params'][{position}]"
                found = target.names.get(id(parameter))
                yield _Given(parameter, where, None if found is None else found[1][0].name)


def shared_memory(target: Target, options: Options) -> None:
    """Two parameters of one memory are updated one after the other; which first decides what the second reads."""
    if options.steps_itself:
        return
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for parameter, name in _in_memory(target):
        size = parameter.element_size()
        first = int(parameter.storage_offset()) * size
        reach = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        last = first + size * (1 + int(reach))
        storage = parameter.device, parameter.untyped_storage().data_ptr()
        spans.setdefault(storage, []).append((first, last, name))
    for found in spans.values():
        for (_, end, one), (start, _, other) in pairwise(sorted(found)):
            if start < end:
                raise AttachError(
                    f"parameters {one!r} and {other!r} share memory (weight.data = …): their updates would depend on "
                    "which comes first. Make them one parameter: b.weight = a.weight"
                )


def _in_memory(target: Target) -> Iterator[tuple[torch.Tensor, str]]:
    """The optimizers' parameters that have elements in memory of this process."""
    mine = {id(p) for p in target.optimized()}
    for key, (parameter, places) in target.names.items():
        plain = parameter.layout is torch.strided and not parameter.is_meta and type(parameter.data) is torch.Tensor
        if key in mine and parameter.numel() > 0 and plain:
            yield parameter, places[0].name
