"""What an update reads, changed by the loop between backward and step, or while a step is due: the plain loop's result,
or an error that names it."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep.errors import HyperparameterChangedError, TornStepError, UnsupportedOptimizerError
from tests.cases import Blocks, assign, batch, two_groups
from tests.devices import on_cpu_only
from tests.parity.changes import Compared, Plain, configured, move_one, through_data
from tests.parity.lockstep import SMALL, UNDO, Contender, Refused, lockstep, loss_of

CHANGED = Refused(HyperparameterChangedError, "torn")
WAYS: dict[str, dict[str, Any]] = {"backward": {"schedule": "backward"}, "forward": {}, "late": {}, **UNDO}
in_these_ways = pytest.mark.parametrize("way", WAYS)
WHEN = pytest.mark.parametrize("when", ["before step", "while due"])
Change = Callable[[Any, int], Any]


def compare(
    way: str, build: Any, change: Change, when: str = "before step", refused: Refused | None = CHANGED
) -> Contender:
    """Change something in iterations 1 and 3."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        lane.backward(loss)
        if when == "before step" and i in (1, 3):
            change(lane.optimizer, i)
        lane.step()
        if when == "while due" and i in (1, 3):
            change(lane.optimizer, i)
        lane.zero_grad()
        return loss.detach()

    expected = {"backward": refused} if refused is not None and when == "before step" else None
    return lockstep("undo" if way in UNDO else way, build, step, 5, expected, **WAYS[way])


# Groups: who is in which.


def adamw() -> Any:
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2)


def remove_and_add(optimizer: Any, i: int) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.1})


def replace_the_list(optimizer: Any, i: int) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = [*first["params"], second["params"][0]], second["params"][1:]


def reorder_groups(optimizer: Any, i: int) -> None:
    optimizer.param_groups.reverse()


def reorder_equal_groups(optimizer: Any, i: int) -> None:
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"]
    optimizer.param_groups.reverse()


def reorder_parameters(optimizer: Any, i: int) -> None:
    optimizer.param_groups[0]["params"].reverse()


MOVES = [move_one, remove_and_add, replace_the_list, reorder_groups, reorder_equal_groups, reorder_parameters]


@WHEN
@pytest.mark.parametrize("move", MOVES)
@in_these_ways
def test_parameters_moved_within_the_groups(way: str, move: Change, when: str) -> None:
    compare(way, adamw, move, when)


@pytest.mark.parametrize("move", MOVES)
def test_groups_moved_in_the_first_step(move: Change) -> None:
    """State is made in it, in the order of the groups."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x), y))
        if i == 0:
            move(lane.optimizer, i)
        lane.step()
        lane.zero_grad()
        names = {id(p): name for name, p in lane.model.named_parameters()}
        if lane.overlap is not None:
            lane.overlap.synchronize()
        return torch.tensor([list(names.values()).index(names[id(p)]) for p in lane.optimizer.state])

    lockstep("undo", adamw, step)
    lockstep("forward", adamw, step)


def test_an_error_for_moved_parameters_names_what_was_done() -> None:
    model, optimizer = adamw()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"):
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        move_one(optimizer, 0)
        with pytest.raises(HyperparameterChangedError, match="moved within its param_groups"):
            optimizer.step()
        with pytest.raises(TornStepError):
            optimizer.step()


# Values that are written without a version, and settings inside of objects.


@dataclass
class Settings:
    lr: float = 0.05
    more: Any = None


@dataclass(slots=True)
class Slotted:
    lr: float = 0.05
    more: Any = None


class Private(Compared):
    """Slots, and a name that Python changes."""

    __slots__ = ("__lr", "more")

    def __init__(self, lr: float = 0.05, more: Any = None) -> None:
        self.__lr, self.more = lr, more

    @property
    def lr(self) -> float:
        return self.__lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.__lr = value


Pair = namedtuple("Pair", "inside other")


@dataclass
class Cyclic:
    lr: float = 0.05
    itself: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.itself = self


def in_groups(make: Callable[[], Any]) -> Callable[[Any], None]:
    def give(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["cfg"] = make()

    return give


def as_attribute(make: Callable[[], Any], name: str = "cfg") -> Callable[[Any], None]:
    return lambda optimizer: setattr(optimizer, name, make())


def set_lr(found: Any, i: int) -> None:
    found.lr = 0.01 / i


CFG = {"a dataclass": Settings, "a slotted dataclass": Slotted, "an object": Plain, "slots": Private, "a cycle": Cyclic}
IN_OBJECTS: dict[str, tuple[Callable[[], Any], Change]] = {
    f"{name} in {where}": (
        configured(lambda o, g: g["cfg"].lr, in_groups(make))
        if where == "groups"
        else configured(lambda o, g: o.cfg.lr, as_attribute(make)),
        (lambda o, i: [assign(g["cfg"], "lr", 0.01 / i) for g in o.param_groups])
        if where == "groups"
        else (lambda o, i: set_lr(o.cfg, i)),
    )
    for name, make in CFG.items()
    for where in ("groups", "an attribute")
}
IN_OBJECTS |= {
    "an object in an object": (
        configured(lambda o, g: o.cfg.more.lr, as_attribute(lambda: Plain(more=Slotted()))),
        lambda o, i: set_lr(o.cfg.more, i),
    ),
    "an object in a namedtuple": (
        configured(lambda o, g: o.cfg.inside.lr, as_attribute(lambda: Pair(Plain(), 1))),
        lambda o, i: set_lr(o.cfg.inside, i),
    ),
    "a namedtuple in a group": (
        configured(lambda o, g: g["cfg"].inside, in_groups(lambda: Pair(0.05, 1))),
        lambda o, i: o.param_groups[0].update(cfg=Pair(0.01 / i, 1)),
    ),
    "a list": (configured(lambda o, g: o.cfg[0], as_attribute(lambda: [0.05])), lambda o, i: o.cfg.insert(0, 0.01 / i)),
    "a private list": (
        configured(lambda o, g: o._cfg[0], as_attribute(lambda: [0.05], "_cfg")),
        lambda o, i: o._cfg.insert(0, 0.01 / i),
    ),
    "a private number": (
        configured(lambda o, g: o._lr, as_attribute(lambda: 0.05, "_lr")),
        lambda o, i: setattr(o, "_lr", 0.01 / i),
    ),
    "a dict in a dict": (
        configured(lambda o, g: o.cfg["a"]["lr"], as_attribute(lambda: {"a": {"lr": 0.05}})),
        lambda o, i: o.cfg["a"].update(lr=0.01 / i),
    ),
    "a list of objects in a group": (
        configured(lambda o, g: g["cfg"][0].lr, in_groups(lambda: [Plain()])),
        lambda o, i: [assign(g["cfg"][0], "lr", 0.01 / i) for g in o.param_groups],
    ),
    "a NumPy array": (
        configured(lambda o, g: o.cfg[0], as_attribute(lambda: np.full(3, 0.05, np.float32))),
        lambda o, i: o.cfg.fill(0.01 / i),
    ),
    "an object that was replaced": (
        configured(lambda o, g: o.cfg.lr, as_attribute(Plain)),
        lambda o, i: setattr(o, "cfg", Plain(0.01 / i)),
    ),
    "a setting that was removed": (
        configured(lambda o, g: g.get("cfg", 0.01), in_groups(lambda: 0.05)),
        lambda o, i: o.param_groups[0].pop("cfg", None),
    ),
    "the defaults": (
        configured(lambda o, g: o.defaults["lr"], lambda o: o.defaults.update(lr=0.05)),
        lambda o, i: o.defaults.update(lr=0.01 / i),
    ),
}


@WHEN
@pytest.mark.parametrize("name", IN_OBJECTS)
@in_these_ways
def test_settings_inside_of_objects(way: str, name: str, when: str) -> None:
    compare(way, *IN_OBJECTS[name], when)


def through_numpy(lr: torch.Tensor, value: float) -> None:
    lr.detach().numpy().fill(value)


def through_set(lr: torch.Tensor, value: float) -> None:
    lr.set_(torch.tensor(value))  # type: ignore[call-overload]


def by_other_data(lr: torch.Tensor, value: float) -> None:
    lr.data = torch.tensor(value)


def in_place(lr: torch.Tensor, value: float) -> None:
    lr.fill_(value)


def with_tensor_lr() -> Any:
    model = Blocks(depth=2)
    groups = [{**group, "lr": torch.tensor(0.02)} for group in two_groups(model)]
    return model, torch.optim.AdamW(groups, foreach=False)


# Of a tensor on an accelerator the step after it raises.
WRITES = [
    *(pytest.param(write, marks=on_cpu_only) for write in (through_data, through_numpy)),
    through_set,
    by_other_data,
    in_place,
]


def with_a_parameter_for_lr() -> Any:
    model = Blocks(depth=2)
    groups = [{**group, "lr": nn.Parameter(torch.tensor(0.02), requires_grad=False)} for group in two_groups(model)]
    return model, torch.optim.AdamW(groups, foreach=False)


def write_lr(write: Callable[[torch.Tensor, float], object], optimizer: Any, i: int) -> None:
    for group in optimizer.param_groups:
        write(group["lr"], 0.01 / i)


@WHEN
@in_these_ways
def test_a_rate_that_is_a_parameter(way: str, when: str) -> None:
    compare(way, with_a_parameter_for_lr, partial(write_lr, in_place), when)


@WHEN
@pytest.mark.parametrize("write", WRITES)
@in_these_ways
def test_a_tensor_hyperparameter_written_in_any_way(way: str, write: Any, when: str) -> None:
    compare(way, with_tensor_lr, partial(write_lr, write), when)


@WHEN
@pytest.mark.parametrize("write", WRITES)
@in_these_ways
def test_a_tensor_in_an_attribute_written_in_any_way(way: str, write: Any, when: str) -> None:
    build = configured(lambda o, g: o.cfg, as_attribute(lambda: torch.tensor(0.05)))
    compare(way, build, lambda o, i: write(o.cfg, 0.01 / i), when)


class Boosted(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2, "note": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] * group.get("boost", 1.0))


def exchange(optimizer: Any, i: int) -> None:
    group = optimizer.param_groups[0]
    there = "note" if "note" in group else "boost"
    del group[there]
    group["boost" if there == "note" else "note"] = 2.0 if there == "note" else None


@in_these_ways
@WHEN
def test_a_setting_of_none_that_makes_room_for_another(way: str, when: str) -> None:
    """The group has as many settings as before, and one that is not there reads as ``None``."""

    def build() -> Any:
        model = Blocks(depth=1)
        return model, Boosted(two_groups(model))

    compare(way, build, exchange, when)


@on_cpu_only  # on an accelerator nobody waits for the value, and a write that is counted is one
def test_a_value_that_is_written_again_has_not_changed() -> None:
    compare("backward", with_tensor_lr, lambda o, i: write_lr(lambda lr, _: lr.fill_(lr.item()), o, i), refused=None)


def test_an_update_that_counts_in_an_object_of_its_group_is_refused() -> None:
    """Bucket by bucket it would count once per bucket."""

    def read(optimizer: Any, group: dict[str, Any]) -> float:
        group["cfg"].lr *= 0.9
        return 0.1

    model, optimizer = configured(read, in_groups(Plain))()
    match = r"updates param_groups\[.\]\['cfg'\] in a way that depends on which parameters step together"
    with (
        pytest.raises(UnsupportedOptimizerError, match=match),
        instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"),
    ):
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()


def test_a_function_in_an_object_that_gives_way_to_another() -> None:
    class Holder:
        def __init__(self) -> None:
            self.rate = lambda: 0.05

    def change(optimizer: Any, i: int) -> None:
        optimizer.cfg.rate = lambda: 0.01  # which encloses as much as the other

    compare("backward", configured(lambda o, g: o.cfg.rate(), as_attribute(Holder)), change)


def test_modules_and_long_lists_are_not_looked_into() -> None:
    """The bound that docs/limits.md names."""

    class Holder:
        def __init__(self) -> None:
            self.module = nn.Linear(2, 2)
            self.long = [0.05] * 5000

    def change(optimizer: Any, i: int) -> None:
        optimizer.cfg.module.extra = i
        optimizer.cfg.long[1] = i

    compare("backward", configured(lambda o, g: o.cfg.long[0], as_attribute(Holder)), change, refused=None)


# On an accelerator the host waits for no value in backward: it is compared there, when step() is called.


def test_a_value_that_the_host_cannot_read_is_compared_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep._optim.values._can_be_read", lambda tensor, most=0: False)
    model, optimizer = with_tensor_lr()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward") as overlap:
        for i in range(2):
            loss_of(model(batch(i)[0]), batch(i)[1]).backward()
            if i == 0:
                optimizer.step()
                optimizer.zero_grad()
        write_lr(through_data, optimizer, 1)
        with pytest.raises(HyperparameterChangedError, match=r"'lr'\] was written"):
            optimizer.step()
        assert "torn" in repr(overlap)
