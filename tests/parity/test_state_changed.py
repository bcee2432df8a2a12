"""``optimizer.state`` read, written, popped and replaced by hand, between backward and step and while steps are due."""

import copy
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import instep
from instep.errors import HyperparameterChangedError, UncommittedStepError
from tests.cases import Blocks, batch, two_groups
from tests.late import late_updates
from tests.parity.changes import first, pop, put_another_tensor
from tests.parity.lockstep import SMALL, UNDO, Contender, Refused, lockstep, loss_of

CHANGED = Refused(HyperparameterChangedError, "torn")
PUT_BACK = Refused(HyperparameterChangedError, "open", match="put back")
in_forward = pytest.mark.parametrize("way", ["forward", "late"])
LATE = Refused(UncommittedStepError, "torn", match="overlap.synchronize()")


def build() -> Any:
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2)


def delete(optimizer: Any) -> None:
    del optimizer.state[first(optimizer)]


def put_another_entry(optimizer: Any) -> None:
    shape = first(optimizer).shape
    zeros = {"exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}
    optimizer.state[first(optimizer)] = {"step": torch.tensor(0.0), **zeros}


def clear(optimizer: Any) -> None:
    optimizer.state.clear()


def put_another_mapping(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def write_a_tensor(optimizer: Any) -> None:
    optimizer.state[first(optimizer)]["exp_avg"].zero_()


def clear_an_entry(optimizer: Any) -> None:
    optimizer.state[first(optimizer)].clear()


def reset_a_count(optimizer: Any) -> None:
    optimizer.state[first(optimizer)]["step"] = torch.tensor(1.0)


OF_THE_MAPPING = [pop, delete, put_another_entry, clear, put_another_mapping]
OF_AN_ENTRY = [put_another_tensor, write_a_tensor, clear_an_entry, reset_a_count]
Change = Callable[[Any], None]


def iteration(change: Change, when: str, lane: Contender, i: int) -> Any:
    lane.backward(loss_of(lane.model(batch(i)[0]), batch(i)[1]))
    if i in (1, 3) and when == "before step":
        change(lane.optimizer)
    lane.step()
    if i in (1, 3) and when == "while due":
        change(lane.optimizer)
    lane.zero_grad()


@pytest.mark.parametrize("change", [*OF_THE_MAPPING, *OF_AN_ENTRY])
@pytest.mark.parametrize("way", ["backward", *UNDO])
def test_state_changed_between_backward_and_step(way: str, change: Change) -> None:
    refused = {"backward": CHANGED} | ({"undo": PUT_BACK} if change in (put_another_entry, *OF_AN_ENTRY) else {})
    name = "undo" if way in UNDO else way
    lockstep(name, build, lambda lane, i: iteration(change, "before step", lane, i), 5, refused, **UNDO.get(way, {}))


@pytest.mark.parametrize("change", [lambda entry: entry["exp_avg"].zero_(), dict.clear])
@pytest.mark.parametrize("fused", [True, False])
def test_the_state_of_any_bucket_is_looked_at(fused: bool, change: Callable[[Any], Any]) -> None:
    for number in range(len(list(Blocks(depth=1).parameters()))):
        model = Blocks(depth=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL)
        for i in range(3):
            loss_of(model(batch(i)[0]), batch(i)[1]).backward()
            if i == 2:
                change(optimizer.state[list(model.parameters())[number]])
                with pytest.raises(HyperparameterChangedError, match="state of AdamW was written"):
                    optimizer.step()
                break
            optimizer.step()
            optimizer.zero_grad()
        assert overlap.state == "torn"
        overlap.detach()


def move_to_the_next(optimizer: Any) -> None:
    """The values stay the same, one after the other, and are in another entry, as old ones."""
    (_, one), (_, next_one) = list(optimizer.state.items())[:2]
    for name in list(one):
        next_one[f"old {name}"] = one.pop(name)


def move_to_the_one_before(optimizer: Any) -> None:
    (_, one), (_, next_one) = list(optimizer.state.items())[:2]
    for name in list(next_one):
        one[f"old {name}"] = next_one.pop(name)


def rename(optimizer: Any) -> None:
    for entry in optimizer.state.values():
        for name in list(entry):
            entry[f"old {name}"] = entry.pop(name)


@pytest.mark.parametrize("change", [move_to_the_next, move_to_the_one_before, rename])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["backward", "undo"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_state_moved_or_renamed_between_backward_and_step(cls: Any, way: str, fused: bool, change: Change) -> None:
    """With each parameter in its own bucket, and in its own group."""

    def build() -> Any:
        model = Blocks(depth=1)
        more = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        return model, cls([{"params": [p]} for p in model.parameters()], lr=1e-2, fused=fused, **more)

    torch.manual_seed(0)
    model, optimizer = build()
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=1, undo=way == "undo")
    for i in range(3):
        loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        if i == 2:
            change(optimizer)
            with pytest.raises(HyperparameterChangedError, match=r"state of .* was written"):
                optimizer.step()
            break
        optimizer.step()
        optimizer.zero_grad()
    assert overlap.state == ("torn" if way == "backward" else "open")
    overlap.detach()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["backward", "undo"])
def test_state_given_to_an_empty_entry_between_backward_and_step(way: str, fused: bool) -> None:
    """Under its own name: of all entries together, one after the other, nothing is changed."""
    torch.manual_seed(0)
    model = Blocks(depth=1)
    first, *others = model.parameters()
    groups = [{"params": [first], "momentum": 0.9}, {"params": others, "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1e-2, fused=fused)
    entries = [optimizer.state[p] for p in (first, *others)]
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=1, undo=way == "undo")
    for i in range(3):
        loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        if i == 2:
            entries[1]["momentum_buffer"] = entries[0].pop("momentum_buffer")
            with pytest.raises(HyperparameterChangedError, match=r"state of SGD was written"):
                optimizer.step()
            break
        optimizer.step()
        optimizer.zero_grad()
    overlap.detach()


@pytest.mark.parametrize("share", [lambda one: one, lambda one: one.view_as(one)], ids=["one tensor", "a view"])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("way", ["backward", "undo"])
def test_two_parameters_with_a_value_of_state_in_common(way: str, name: str, share: Any) -> None:
    """It looks written. Fused kernels do not count what they write."""
    torch.manual_seed(0)
    model = Blocks(depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=1, undo=way == "undo")
    for i in range(3):
        loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        if i == 2:
            with pytest.raises(HyperparameterChangedError, match=r"state of AdamW was written"):
                optimizer.step()
            break
        optimizer.step()
        optimizer.zero_grad()
        if i == 1:
            shapes = [entry["exp_avg"].shape for entry in optimizer.state.values()]
            again = next(i for i, shape in enumerate(shapes) if shape in shapes[:i])
            entries = list(optimizer.state.values())
            entries[again][name] = share(entries[shapes.index(shapes[again])][name])
    overlap.detach()


@pytest.mark.parametrize("when", ["before step", "while due"])
@pytest.mark.parametrize("change", [*OF_THE_MAPPING, *OF_AN_ENTRY])
@in_forward
def test_state_changed_around_a_step_that_is_put_off(way: str, change: Change, when: str) -> None:
    lockstep(way, build, lambda lane, i: iteration(change, when, lane, i))


READERS: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda o: o.state[first(o)]["exp_avg"],
    "all": lambda o: torch.stack([entry["exp_avg"].sum() for entry in o.state.values()]),
    "its length": lambda o: torch.tensor(len(o.state)),
    "a copy": lambda o: torch.stack([e["exp_avg"].sum() for e in copy.deepcopy(o).state.values()]),
    "a shallow copy": lambda o: torch.stack([e["exp_avg"].sum() for e in copy.copy(o).state.values()]),
    "getattr": lambda o: getattr(o, "state")[first(o)]["exp_avg"],  # noqa: B009
}


@pytest.mark.parametrize("read", READERS)
@in_forward
def test_state_read_right_after_the_step(way: str, read: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        lane.backward(loss_of(lane.model(batch(i)[0]), batch(i)[1]))
        lane.step()
        lane.zero_grad()
        return READERS[read](lane.optimizer).clone()

    lockstep(way, build, step)


def test_an_optimizer_is_of_its_own_class_when_nothing_is_due() -> None:
    model, optimizer = build()
    with late_updates(), instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        for i in range(3):
            assert type(optimizer) is torch.optim.AdamW
            loss_of(model(batch(i)[0]), batch(i)[1]).backward()
            assert type(optimizer) is torch.optim.AdamW
            optimizer.step()
            assert "pending" in repr(overlap)
            assert isinstance(optimizer, torch.optim.AdamW)
            assert (type(optimizer).__name__, type(optimizer).__module__) == ("AdamW", torch.optim.AdamW.__module__)
            if i == 1:
                assert len(optimizer.state) == len(list(model.parameters()))
                assert "pending" not in repr(overlap)
            optimizer.zero_grad()
            overlap.synchronize()
    assert type(optimizer) is torch.optim.AdamW


def test_a_subclass_that_counts_its_subclasses_has_none_more() -> None:
    class Registers(torch.optim.AdamW):
        found: list[type] = []  # noqa: RUF012

        def __init_subclass__(cls) -> None:
            Registers.found.append(cls)

    Registers.__module__ = torch.optim.AdamW.__module__  # taken for torch's own
    model = Blocks(depth=1)
    optimizer = Registers(model.parameters())
    with late_updates(), instep.attach(model, optimizer, schedule="forward", defer=True) as overlap:
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        assert "pending" in repr(overlap)
        overlap.synchronize()
    assert Registers.found == []


@pytest.mark.parametrize(
    "change",
    [
        lambda state, entry: state.clear(),
        lambda state, entry: state.popitem(),
        lambda state, entry: entry.clear(),
        lambda state, entry: entry.update(exp_avg=torch.zeros_like(entry["exp_avg"])),
        lambda state, entry: entry["exp_avg"].zero_(),
        lambda state, entry: entry.update(step=torch.tensor(0.0)),
    ],
)
def test_state_written_through_an_older_reference_after_a_step(change: Any) -> None:
    """Nobody is asked for what was read before: such a step is taken at once."""

    def step(lane: Contender, i: int) -> Any:
        lane.backward(loss_of(lane.model(batch(i)[0]), batch(i)[1]))
        state = lane.optimizer.state
        entry = state.get(first(lane.optimizer))
        lane.step()
        if i == 2:
            change(state, entry)
        lane.zero_grad()

    lockstep("late", build, step)


@pytest.mark.races
@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(exp_avg=torch.zeros_like(entry["exp_avg"])),
        lambda entry: entry["exp_avg"].zero_(),
        lambda entry: entry.update(step=torch.tensor(0.0)),
    ],
)
def test_state_written_behind_the_property_while_a_step_is_due(change: Any) -> None:
    """The attribute is taken from the object's own dict: nobody is asked, and nobody else had the state before."""

    def step(lane: Contender, i: int) -> Any:
        lane.backward(loss_of(lane.model(batch(i)[0]), batch(i)[1]))
        lane.step()
        if i == 2:
            change(vars(lane.optimizer)["state"][first(lane.optimizer)])
        lane.zero_grad()

    lockstep("late", build, step, refused={"late": LATE})


def test_state_written_through_data_is_not_seen() -> None:
    """The limit that docs/limits.md names: no version tells."""

    def train(attach: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model, optimizer = build()
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL) if attach else nullcontext():
            for i in range(2):
                loss_of(model(batch(i)[0]), batch(i)[1]).backward()
                if i:
                    vars(optimizer)["state"][first(optimizer)]["exp_avg"].data.zero_()
                optimizer.step()
                optimizer.zero_grad()
        found: torch.Tensor = optimizer.state[first(optimizer)]["exp_avg"]
        return found

    assert not torch.equal(train(True), train(False))


class KeepsLists(torch.optim.Optimizer):
    """State that is no tensor, and a value that all parameters share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    norms = self.state[p].setdefault("norms", [])
                    norms.append(float(p.grad.norm()))
                    p.sub_(p.grad, alpha=group["lr"] * sum(norms) * self.state.get("factor", 1.0))  # type: ignore[call-overload]  # a name


@pytest.mark.parametrize(
    ("change", "undone"),
    [(lambda o: o.state[first(o)]["norms"].append(1.0), PUT_BACK), (lambda o: o.state.update(factor=0.5), None)],
)
@pytest.mark.parametrize("way", ["backward", "forward", "late", *UNDO])
def test_lists_in_state_and_state_of_no_parameter(way: str, change: Change, undone: Refused | None) -> None:
    def lists() -> Any:
        model = Blocks(depth=2)
        return model, KeepsLists(two_groups(model))

    refused = {"backward": CHANGED} | ({"undo": undone} if undone else {})
    name = "undo" if way in UNDO else way
    lockstep(name, lists, lambda lane, i: iteration(change, "before step", lane, i), 5, refused, **UNDO.get(way, {}))
