"""What a loop may do to its optimizer, gradients and weights at any moment of an iteration."""

from collections.abc import Callable
from typing import Any

import torch

Edit = Callable[[Any], None]
EDITS: dict[str, Edit] = {}
MOMENTS = ("begin", "forward", "backward", "step", "end")
"""Before the first forward, after the last, after the last backward, after ``step()``, after ``zero_grad()``."""


def _edit(name: str) -> Callable[[Edit], Edit]:
    def add(edit: Edit) -> Edit:
        EDITS[name] = edit
        return edit

    return add


def _rates(loop: Any) -> list[torch.Tensor]:
    return [g["lr"] for g in loop.optimizer.param_groups if isinstance(g.get("lr"), torch.Tensor)]


def _last(loop: Any) -> Any:
    return list(loop.net.parameters())[-1]


# Settings.


@_edit("value")
def _value(loop: Any) -> None:
    for group in loop.optimizer.param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0.5


@_edit("another value")
def _another_value(loop: Any) -> None:
    for group in loop.optimizer.param_groups:
        if isinstance(group.get("weight_decay"), float):
            group["weight_decay"] += 0.125


@_edit("tensor in place")
def _tensor_in_place(loop: Any) -> None:
    for rate in _rates(loop):
        rate.mul_(0.5)


@_edit("tensor through data")
def _tensor_through_data(loop: Any) -> None:
    for rate in _rates(loop):
        rate.data.mul_(0.5)


@_edit("tensor through NumPy")
def _tensor_through_numpy(loop: Any) -> None:
    for rate in _rates(loop):
        rate.detach().numpy()[...] *= 0.5


@_edit("inside an object")
def _inside_an_object(loop: Any) -> None:
    places = [*loop.optimizer.param_groups, vars(loop.optimizer)]
    for settings in [place[key] for place in places for key in ("cfg", "settings") if key in place]:
        settings.lr *= 0.5


@_edit("a new key")
def _a_new_key(loop: Any) -> None:
    loop.optimizer.param_groups[0]["a key of the loop"] = loop.number


# Membership.


@_edit("move")
def _move(loop: Any) -> None:
    first, *others = loop.optimizer.param_groups
    if others and len(others[0]["params"]) > 1:
        first["params"].append(others[0]["params"].pop())
        if "param_names" in first:
            first["param_names"].append(others[0]["param_names"].pop())


@_edit("remove")
def _remove(loop: Any) -> None:
    group = loop.optimizer.param_groups[-1]
    if len(group["params"]) > 1:
        group["params"].pop()
        if "param_names" in group:
            group["param_names"].pop()


@_edit("add")
def _add(loop: Any) -> None:
    if loop.left_out:
        loop.optimizer.add_param_group({"params": loop.left_out, "lr": 0.01})
        loop.left_out = []


@_edit("other order")
def _other_order(loop: Any) -> None:
    group = loop.optimizer.param_groups[0]
    group["params"].reverse()
    if "param_names" in group:
        group["param_names"].reverse()


@_edit("new lists")
def _new_lists(loop: Any) -> None:
    loop.optimizer.param_groups = [{**group, "params": list(group["params"])} for group in loop.optimizer.param_groups]


# State.


@_edit("pop state")
def _pop_state(loop: Any) -> None:
    loop.optimizer.state.pop(_last(loop), None)


@_edit("replace state")
def _replace_state(loop: Any) -> None:
    state = loop.optimizer.state
    if _last(loop) in state:
        state[_last(loop)] = {
            key: value * 0.5 if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() else value
            for key, value in state[_last(loop)].items()
        }


@_edit("clear state")
def _clear_state(loop: Any) -> None:
    loop.optimizer.state.clear()


@_edit("write state")
def _write_state(loop: Any) -> None:
    for value in loop.optimizer.state.get(_last(loop), {}).values():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            value.mul_(0.5)


@_edit("replace a state tensor")
def _replace_a_state_tensor(loop: Any) -> None:
    entry = loop.optimizer.state.get(_last(loop), {})
    for key, value in list(entry.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            entry[key] = value * 0.5


@_edit("load the optimizer")
def _load_the_optimizer(loop: Any) -> None:
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


# Gradients and weights.


@_edit("write a gradient")
def _write_a_gradient(loop: Any) -> None:
    if _last(loop).grad is not None:
        _last(loop).grad.mul_(0.5)


@_edit("replace a gradient")
def _replace_a_gradient(loop: Any) -> None:
    if _last(loop).grad is not None:
        _last(loop).grad = _last(loop).grad * 0.5


@_edit("set a gradient")
def _set_a_gradient(loop: Any) -> None:
    _last(loop).grad = torch.ones(_last(loop).shape, dtype=_last(loop).dtype)


@_edit("drop a gradient")
def _drop_a_gradient(loop: Any) -> None:
    _last(loop).grad = None


@_edit("clear")
def _clear(loop: Any) -> None:
    loop.optimizer.zero_grad()


@_edit("write a weight")
def _write_a_weight(loop: Any) -> None:
    with torch.no_grad():
        _last(loop).mul_(0.75)


@_edit("write a weight through data")
def _write_a_weight_through_data(loop: Any) -> None:
    _last(loop).data.mul_(0.75)


@_edit("replace the data")
def _replace_the_data(loop: Any) -> None:
    _last(loop).data = _last(loop).data * 0.75


@_edit("freeze")
def _freeze(loop: Any) -> None:
    _last(loop).requires_grad_(False)


@_edit("attach again")
def _attach_again(loop: Any) -> None:
    loop.attach_again()
