"""Buckets of a foreign optimizer that are prepared before the first one of a step: equal to the plain loop whatever is
changed between steps, and what one pass cannot tell is looked at in full."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._optim import proved
from instep._optim.beside import Beside
from instep._optim.own_object import OwnObject
from instep.errors import HyperparameterChangedError, UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.devices import on_cpu_only
from tests.parity.lockstep import loss_of

SETTLED = 3


class Signs(torch.optim.Optimizer):
    """Counts in its groups and attributes, and replaces state, as many optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})
        self.updates = 0
        self.table: dict[Any, Any] = {"scale": 0.5, "names": ("a", "b")}
        self.powers = [1.0, 2.0]

    def begin(self) -> None:
        self.updates += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def of(self, group: dict[str, Any], p: Any) -> None:
        entry, scale = self.state[p], self.table["scale"] * self.powers[1]
        average = entry.get("average", torch.zeros_like(p))
        entry["average"] = average * group["beta"] + p.grad * (1 - group["beta"])
        entry["count"] = entry.get("count", 0) + 1
        p.add_(entry["average"].sign(), alpha=-group["lr"] * scale / group["step"] ** 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.of(group, p)


class Loop:
    def __init__(self, cls: Callable[..., Any] = Signs) -> None:
        torch.manual_seed(0)
        self.model = Blocks(depth=2)
        self.optimizer = cls(two_groups(self.model))
        self.overlap: instep.Attachment | None = None

    def attach(self) -> "Loop":
        self.overlap = instep.attach(self.model, self.optimizer, schedule="backward", bucket_bytes=1)
        return self

    def backward(self, i: int) -> None:
        inputs, targets = batch(i)
        loss_of(self.model(inputs), targets).backward()

    def step(self, i: int) -> None:
        self.backward(i)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def held(self) -> dict[str, Any]:
        left_out = {"param_groups", "state"}
        return {k: v for k, v in vars(self.optimizer).items() if k not in left_out and not k.startswith("_")}


def require_equal(plain: Loop, attached: Loop) -> None:
    states = [training_state(one.model, one.optimizer) for one in (plain, attached)]
    assert first_difference(*states) is None
    assert repr(plain.held) == repr(attached.held)
    assert [group["step"] for group in plain.optimizer.param_groups] == [
        group["step"] for group in attached.optimizer.param_groups
    ]


def require_equal_steps(cls: type[Signs], count: int) -> None:
    plain, attached = Loop(cls), Loop(cls).attach()
    for i in range(count):
        plain.step(i)
        attached.step(i)
        require_equal(plain, attached)
    assert attached.overlap is not None
    attached.overlap.detach()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One for each time that all values were looked at."""
    found: list[Any] = []
    changed = Beside._changed

    def counted(self: Beside) -> list[Any]:
        found.append(changed(self))
        return found[-1]

    monkeypatch.setattr(Beside, "_changed", counted)
    return found


def test_every_bucket_is_prepared_and_one_is_looked_at_in_full(prepared: list[bool], looks: list[Any]) -> None:
    plain, attached = Loop(), Loop().attach()
    for i in range(6):
        plain.step(i)
        del prepared[:], looks[:]
        attached.step(i)
        require_equal(plain, attached)
    assert attached.overlap is not None
    assert prepared == [True] * len(attached.overlap.plan.buckets)
    # A bucket of each kind: with parameters of the first group, of the second one, of both. Then the commit.
    assert len(looks) <= 4
    own = attached.overlap._parts.refs.steppers[0].own_object
    assert own is not None
    assert not own.beside.was_set
    attached.overlap.detach()


def rate(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5


def beta(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["beta"] = 0.5


def number(loop: Loop) -> None:
    loop.optimizer.updates = 100


def item(loop: Loop) -> None:
    loop.optimizer.table["scale"] = 0.25


def part_of_a_list(loop: Loop) -> None:
    loop.optimizer.powers[1] = 3.0


def another_dict(loop: Loop) -> None:
    loop.optimizer.table = dict(loop.optimizer.table, scale=0.125)


def new_attribute(loop: Loop) -> None:
    loop.optimizer.note = torch.ones(3)


def reload(loop: Loop) -> None:
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def no_state(loop: Loop) -> None:
    loop.optimizer.state.clear()


def frozen(loop: Loop) -> None:
    first = next(loop.model.parameters())
    first.requires_grad_(not first.requires_grad)


def group_of_its_own(loop: Loop) -> None:
    groups = loop.optimizer.param_groups
    groups.append({**groups[0], "params": [groups[0]["params"].pop()]})


CHANGES = [
    rate, beta, number, item, part_of_a_list, another_dict, new_attribute, reload, no_state, frozen, group_of_its_own
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps(change: Callable[[Loop], None], prepared: list[bool]) -> None:
    plain, attached = Loop(), Loop().attach()
    for i in range(8):
        for loop in (plain, attached):
            if i == SETTLED:
                change(loop)
            loop.step(i)
        require_equal(plain, attached)
    assert True in prepared
    assert attached.overlap is not None
    attached.overlap.detach()


def early_of(model: nn.Module) -> nn.Parameter:
    *_, early = model.parameters()
    return early


@pytest.mark.parametrize(
    "change", [rate, beta, number, item, part_of_a_list, another_dict, new_attribute], ids=lambda call: call.__name__
)
def test_what_a_hook_changes_between_buckets(change: Callable[[Loop], None]) -> None:
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    first = next(loop.model.parameters())
    handle = early_of(loop.model).register_post_accumulate_grad_hook(
        lambda _: change(loop) if first.grad is None else None
    )
    with pytest.raises(HyperparameterChangedError, match=r"was changed|changed to"):
        loop.step(SETTLED)
    handle.remove()
    assert loop.overlap.state == "torn"
    loop.overlap.detach()


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_group_that_a_hook_changes_before_a_bucket_of_another_one(is_flat: bool) -> None:
    """It is not lost."""
    loop = Loop(Signs if is_flat else NoisyWithMore).attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    every = list(loop.model.parameters())
    of_group = {id(p): group for group in loop.optimizer.param_groups for p in group["params"]}
    first = of_group[id(every[0])]  # that of the last bucket
    other = next(group for group in loop.optimizer.param_groups if group is not first)

    def change(_: object) -> None:
        other["lr"] = 0.5

    handle = every[0].register_hook(change)  # when all of the other group's are stepped
    with pytest.raises(HyperparameterChangedError, match=r"'lr'"):
        loop.step(SETTLED)
    handle.remove()
    assert loop.overlap.state == "torn"
    loop.overlap.accept_torn()
    loop.overlap.detach()


class EndsWarmUp(Signs):
    """Replaces what was a list, or a dict, by what is none."""

    def begin(self) -> None:
        super().begin()
        for group in self.param_groups:
            group.setdefault("rates", [0.1, 0.2])
            if self.updates > SETTLED:
                group["rates"] = None
        if self.updates == SETTLED + 1:
            self.powers: Any = tuple(self.powers)
            self.table = dict(self.table)
            self.extra: Any = [1.0]
        elif self.updates == SETTLED + 2:
            self.powers, self.extra = (1.0, 3.0), 0.0
        elif self.updates == SETTLED + 3:
            self.powers, self.extra = (1.0, 2.0), [2.0]
        elif self.updates == SETTLED + 5:
            self.powers = [1.0, 2.0]
        elif self.updates == SETTLED + 7:
            self.powers = (1.0, 2.5)


def test_lists_that_an_update_replaces_by_numbers() -> None:
    require_equal_steps(EndsWarmUp, 12)


class Averages(Signs):
    """Writes a tensor of its own in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.average = torch.zeros(3000)

    def begin(self) -> None:
        super().begin()
        self.average.mul_(0.9).add_(self.updates)


@on_cpu_only  # another one is known by how often it was written
def test_a_tensor_that_is_written_in_place() -> None:
    """Put back after each bucket, it is written once more: it is compared by what it holds."""
    plain, attached = Loop(Averages), Loop(Averages).attach()
    for i in range(5):
        plain.step(i)
        attached.step(i)
        require_equal(plain, attached)
        assert torch.equal(plain.optimizer.average, attached.optimizer.average)
    assert attached.overlap is not None
    attached.overlap.detach()


class Later(Signs):
    """Begins to do something else in the step after ``SETTLED``, when one pass is what tells."""

    def begin(self) -> None:
        super().begin()
        if self.updates > SETTLED:
            self.later()

    def later(self) -> None: ...


class CountsElements(Later):
    def later(self) -> None:
        for group in self.param_groups:
            group["seen"] = sum(p.numel() for p in group["params"])


class OfOne(Later):
    """What it leaves in a list tells of the parameter whose gradient is the last to come."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.address = self.param_groups[0]["params"][0].data_ptr()
        self.powers[0] = 2.0

    def later(self) -> None:
        self.powers[0] = self.left(self.address in [p.data_ptr() for g in self.param_groups for p in g["params"]])

    def left(self, is_there: bool) -> float:
        return float(self.updates + is_there)


class OfAnotherType(OfOne):
    """``4``, or ``4.0``, which is equal."""

    def left(self, is_there: bool) -> float:
        return self.updates if is_there else float(self.updates)


class LeavesATensor(OfOne):
    """A tensor of two elements compares itself to any number, and is then neither true nor false."""

    def left(self, is_there: bool) -> Any:
        return torch.ones(2) if is_there else float(self.updates)


class CountsInADict(Later):
    def later(self) -> None:
        self.table["scale"] = 0.5 + sum(p.numel() for group in self.param_groups for p in group["params"])


class KeepsByParameter(Signs):
    """In a dict that holds numbers alone until the fourth step."""

    def of(self, group: dict[str, Any], p: Any) -> None:
        if self.updates > SETTLED:
            self.table[p] = self.table.get(p, 0) + 1
        super().of(group, p)


def first_error(loop: Loop, count: int = 6) -> type[BaseException] | None:
    try:
        for i in range(count):
            loop.step(i)
    except Exception as error:
        return type(error)
    finally:
        assert loop.overlap is not None
        loop.overlap.accept_torn()
        loop.overlap.detach()
    return None


@pytest.mark.parametrize("cls", [CountsElements, OfOne, OfAnotherType, LeavesATensor, CountsInADict])
def test_what_two_buckets_leave_otherwise_is_refused(cls: type[Signs]) -> None:
    assert first_error(Loop(cls).attach()) is UnsupportedOptimizerError


class Moves(Later):
    """An item from one list to the next: together they hold the same, in the same order."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.done: list[float] = []
        self.due = [0.5, 0.25, 0.125] * 20

    def later(self) -> None:
        self.done.append(self.due.pop(0))

    def of(self, group: dict[str, Any], p: Any) -> None:
        super().of(group, p)
        p.add_(self.due[0], alpha=1e-3)


def test_an_item_that_moves_from_one_list_to_the_next() -> None:
    require_equal_steps(Moves, 8)


class Renames(Later):
    """The last value of a dict comes under another name, at the same place."""

    def later(self) -> None:
        name = "other" if "names" in self.table else "names"
        _, value = self.table.popitem()
        self.table[name] = value

    def of(self, group: dict[str, Any], p: Any) -> None:
        super().of(group, p)
        p.mul_(0.9 if "names" in self.table else 0.8)


def test_a_value_that_comes_under_another_name() -> None:
    require_equal_steps(Renames, 8)


class CountsInItsState(Later):
    """Under a name."""

    def later(self) -> None:
        total = self.state["all"]  # type: ignore[index]  # torch's is a dict
        total["steps"] = total.get("steps", 0) + 1

    def of(self, group: dict[str, Any], p: Any) -> None:
        super().of(group, p)
        held: Any = self.state  # torch's type has tensors for keys
        p.mul_(1 - 0.1 * held.get("all", {}).get("steps", 0))


def test_state_under_a_name_that_comes_later() -> None:
    require_equal_steps(CountsInItsState, 6)


def test_state_that_a_hook_writes_after_its_bucket() -> None:
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    early, first = early_of(loop.model), next(loop.model.parameters())
    handle = first.register_post_accumulate_grad_hook(lambda _: loop.optimizer.state[early].update(count=0))
    loop.backward(SETTLED)
    handle.remove()
    with pytest.raises(HyperparameterChangedError, match="state of Signs was written"):
        loop.optimizer.step()
    loop.overlap.accept_torn()
    loop.overlap.detach()


def test_what_is_kept_by_a_parameter_in_a_dict_of_numbers() -> None:
    """It is equal, or refused."""
    plain, attached = Loop(KeepsByParameter), Loop(KeepsByParameter).attach()
    assert attached.overlap is not None
    for i in range(8):
        plain.step(i)
        try:
            attached.step(i)
        except (UnsupportedOptimizerError, HyperparameterChangedError):
            assert i >= SETTLED
            attached.overlap.accept_torn()
            break
        require_equal_weights(plain, attached)
    attached.overlap.detach()


def require_equal_weights(plain: Loop, attached: Loop) -> None:
    for p, q in zip(plain.model.parameters(), attached.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_a_hook_keeps_on_a_parameter_after_its_bucket() -> None:
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    early, first = early_of(loop.model), next(loop.model.parameters())

    def keep(_: object) -> None:
        if early.grad is not None:
            early.noted = 1.0  # type: ignore[attr-defined]

    handle = first.register_post_accumulate_grad_hook(keep)
    loop.backward(SETTLED)
    handle.remove()
    assert vars(early)
    with pytest.raises(HyperparameterChangedError, match="'noted'"):
        loop.optimizer.step()
    loop.overlap.accept_torn()
    loop.overlap.detach()


class Noisy(Signs):
    """Draws once it is told to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.noise = 0.0

    def of(self, group: dict[str, Any], p: Any) -> None:
        super().of(group, p)
        if self.noise or group.get("noise"):
            p.add_(torch.randn_like(p), alpha=1e-3)


def proved_class(monkeypatch: pytest.MonkeyPatch, cls: type[Signs]) -> None:
    settings = proved.settings_of(Loop(cls).optimizer)
    proof = {"distribution": "torch", "version": "1", "settings": [settings]}
    monkeypatch.setattr(proved, "_proved", lambda: {f"{__name__}.{cls.__name__}": proof})
    monkeypatch.setattr(proved, "_version_of", {"torch": "1"}.get)


def noisy_attribute(loop: Loop) -> None:
    loop.optimizer.noise = 1.0


def noisy_group(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["noise"] = True


class NoisyWithMore(Noisy):
    """It holds more than numbers: nobody knows at once whether that is what it was."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.more = torch.ones(2)


@pytest.mark.parametrize(("cls", "is_proved"), [(Noisy, True), (Noisy, False), (NoisyWithMore, True)])
@pytest.mark.parametrize("change", [noisy_attribute, noisy_group])
def test_draws_that_begin_later(
    change: Callable[[Loop], None], cls: type[Noisy], is_proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_proved:
        proved_class(monkeypatch, cls)
    watched: list[bool] = []
    begin = OwnObject.begin

    def noted(self: OwnObject, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        watched.append(self._draws.generators is not None)

    monkeypatch.setattr(OwnObject, "begin", noted)
    plain, attached = Loop(cls), Loop(cls).attach()
    assert attached.overlap is not None
    for i in range(SETTLED):
        plain.step(i)
        attached.step(i)
        require_equal(plain, attached)
    assert watched == [not is_proved or cls is NoisyWithMore] * SETTLED
    change(attached)
    with pytest.raises(UnsupportedOptimizerError, match="draws random numbers"):
        attached.step(SETTLED)
    attached.overlap.accept_torn()
    attached.overlap.detach()


class Makes(Signs):
    """What it makes is on the loop's default device."""

    def begin(self) -> None:
        super().begin()
        self.updates = torch.empty(()).device.type  # type: ignore[assignment]


class CountsAnew(Makes):
    def begin(self) -> None:
        self.updates = 0
        super().begin()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_loops_default_device(device: str) -> None:
    loops = Loop(CountsAnew), Loop(CountsAnew).attach()
    for i in range(6):
        for loop in loops:
            if i == SETTLED:
                torch.set_default_device(device)
            inputs, targets = (x.cpu() for x in batch_on_cpu(i))
            loss_of(loop.model(inputs), targets).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            torch.set_default_device(None)
        assert loops[0].optimizer.updates == loops[1].optimizer.updates
        require_equal_weights(*loops)
    assert loops[1].overlap is not None
    loops[1].overlap.detach()


def batch_on_cpu(i: int) -> Iterable[torch.Tensor]:
    with torch.device("cpu"):
        return batch(i)


def test_nothing_of_a_step_is_kept_that_refers_to_the_model() -> None:
    gc.collect()
    gc.disable()
    try:
        loop = Loop().attach()
        for i in range(SETTLED):
            loop.step(i)
        overlap, seen = loop.overlap, weakref.ref(next(loop.model.parameters()))
        del loop
        assert seen() is None
        assert overlap is not None
    finally:
        gc.enable()


class Counts(torch.optim.Optimizer):
    """In its attributes and groups: where it finds a gradient alone, or always."""

    def __init__(self, params: Any, *, always: bool) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.count, self.always = 0, always

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += self.always or any(p.grad is not None for g in self.param_groups for p in g["params"])
        for group in self.param_groups:
            group["count"] += self.always or any(p.grad is not None for p in group["params"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / (group["count"] + self.count))


@pytest.mark.parametrize("unused", [(), (0,), (0, 1, 2)], ids=["all stepped", "a part of a group", "a group"])
@pytest.mark.parametrize("again", [False, True], ids=["detached", "attached again"])
@pytest.mark.parametrize("always", [True, False])
def test_a_count_where_the_loop_detaches_between_backward_and_step(
    *, always: bool, again: bool, unused: Sequence[int]
) -> None:
    """``step()`` is still to come, and moves what it moves by itself. Of layers that are not used in the last backward
    a gradient of another one is there: no bucket of theirs is full."""

    def train(*, attached: bool) -> list[Any]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        optimizer = Counts([{"params": layers[:3].parameters()}, {"params": layers[3:].parameters()}], always=always)
        options: Any = {"schedule": "backward", "bucket_bytes": 1}
        overlap = instep.attach(layers, optimizer, **options) if attached else None
        for i in range(5):
            x = torch.rand(2, 4)
            for number, layer in enumerate(layers):
                x = x if i == 3 and number in unused else layer(x)
            x.square().sum().backward()
            if i == 3:
                for number in unused:
                    layers[number].get_parameter("weight").grad = torch.ones(4, 4)
            if overlap is not None and i == 3:
                overlap.detach()
                overlap = instep.attach(layers, optimizer, **options) if again else None
            optimizer.step()
            optimizer.zero_grad()
        if overlap is not None:
            overlap.detach()
        counts = [optimizer.count, *(group["count"] for group in optimizer.param_groups)]
        return [*counts, *(p.detach() for p in layers.parameters())]

    plain, ours = train(attached=False), train(attached=True)
    assert ours[:3] == plain[:3]
    assert all(map(torch.equal, plain[3:], ours[3:]))
