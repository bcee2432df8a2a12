"""What a message advises works when the loop does just that."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import instep
from instep.errors import AttachError, StaleAttachmentError, UnsupportedOptimizerError

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "defer": {"defer": True},
    "clipped": {"clip": instep.ClipNorm(1.0)},
}


class Loop:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.options = options
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        self.build()
        self.attach()
        self.step()

    def build(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def attach(self) -> None:
        self.overlap = instep.attach(self.model, self.optimizer, **self.options)

    def step(self) -> None:
        weight = self.model[0]._parameters.get("weight")
        dtype = torch.float32 if weight is None else weight.dtype
        self.model(torch.ones(2, 3, dtype=dtype)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# What goes wrong, and then what the message says.


def replaces(loop: Loop) -> None:
    loop.model[0].weight = nn.Parameter(torch.ones(3, 3))


def replaces_in_both(loop: Loop) -> None:
    old = loop.model[0].weight
    replaces(loop)
    for group in loop.optimizer.param_groups:
        group["params"] = [loop.model[0].weight if p is old else p for p in group["params"]]


def resizes_the_vocabulary(loop: Loop) -> None:
    """As for new words: the group and the state of a weight are moved along, and nobody keeps the old one."""
    old = loop.model.get_parameter("0.weight")
    replaces_in_both(loop)
    loop.optimizer.state[loop.model.get_parameter("0.weight")] = loop.optimizer.state.pop(old)
    del old
    gc.collect()


def converts(loop: Loop) -> None:
    loop.model.double()


def takes_one_out(loop: Loop) -> None:
    del loop.optimizer.param_groups[0]["params"][0]


def gives_one_twice(loop: Loop) -> None:
    loop.optimizer.param_groups.append({**loop.optimizer.param_groups[0], "params": [loop.model[0].weight]})


def prunes(loop: Loop) -> None:
    prune.random_unstructured(loop.model[0], "weight", 0.3)


def build_anew(loop: Loop) -> None:
    loop.overlap.detach()
    loop.build()
    loop.attach()


def attach_again(loop: Loop) -> None:
    loop.overlap.detach()
    loop.attach()


def take_it_out(loop: Loop) -> None:
    loop.optimizer.param_groups.pop()


ANEW = r"detach\(\), build the optimizer anew.*, and attach again"
STALE: dict[Callable[[Loop], None], tuple[str, Callable[[Loop], None]]] = {
    replaces: (ANEW, build_anew),
    resizes_the_vocabulary: (r"detach\(\), and attach again, with the same optimizer", attach_again),
    replaces_in_both: (r"detach\(\), and attach again, with the same optimizer", attach_again),
    converts: (ANEW, build_anew),
    takes_one_out: (r"detach\(\) before taking .* or now, and attach again after", attach_again),
    gives_one_twice: ("Take it out of the groups it has come into", take_it_out),
    prunes: (r"detach\(\), and attach again, with the same optimizer", attach_again),
}


@pytest.mark.parametrize("wrong", STALE, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_stale_attachment(way: str, wrong: Callable[[Loop], None]) -> None:
    said, followed = STALE[wrong]
    loop = Loop(WAYS[way])
    wrong(loop)
    with pytest.raises(StaleAttachmentError, match=said) as told:
        loop.step()
    assert "fully_shard" not in str(told.value)
    followed(loop)
    loop.step()
    loop.overlap.synchronize()
    loop.overlap.detach()


def test_an_optimizer_that_is_gone() -> None:
    loop = Loop({"schedule": "backward"})
    del loop.optimizer
    with pytest.raises(StaleAttachmentError, match=r"Call instep.attached\(model\).detach\(\), and attach another one"):
        loop.model(torch.ones(2, 3)).sum().backward()
    overlap = instep.attached(loop.model)
    assert overlap is not None
    overlap.detach()
    loop.build()
    loop.attach()
    loop.step()
    loop.overlap.detach()


# Of a loop that only defer=True refuses the message says that defer="auto" takes it.


class Holds(torch.optim.SGD):
    """It wraps another optimizer, and counts."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.SGD(parameters, lr=0.1)


class Couples(torch.optim.SGD):
    """Its update takes the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with_gradient = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        if with_gradient:
            norm = torch.stack([p.grad.norm() for p in with_gradient]).norm()
            for p in with_gradient:
                p.sub_(p.grad / (norm + 1), alpha=0.1)


class Draws(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad + torch.rand_like(p), alpha=0.1)


class Decays(torch.optim.SGD):
    """All parameters, with a gradient or without."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)
        return super().step()


class Counts(torch.optim.SGD):
    """In a value that it changes in place."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.counter = [0]

    def step(self, closure: Any = None) -> Any:
        self.counter[0] += 1
        return super().step()


class KeepsLists(torch.optim.SGD):
    """In place of dicts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p] = [p.grad.clone()]
                p.sub_(p.grad, alpha=0.1)


class Averages(torch.optim.SGD):
    """The weights, in a module of its own."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.average: Any = nn.BatchNorm1d(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.average.running_mean.add_(p.mean())


class Needs(torch.optim.SGD):
    """A gradient, at least one."""

    def step(self, closure: Any = None) -> Any:
        max(float(p.grad.max()) for p in self.param_groups[0]["params"] if p.grad is not None)
        return super().step()


def is_patched(parameters: Any) -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)
    return optimizer


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1)


REFUSED: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (lbfgs, Holds, is_patched)
JUDGED: dict[Callable[[Any], torch.optim.Optimizer], str] = {
    Couples: "gets other values when it is stepped without the others",
    Draws: "draws random numbers in step()",
    Decays: "changes parameters that have no gradient",
    KeepsLists: "keeps the state of a parameter as a list",
    Needs: "raises when no parameter has a gradient (ValueError",
}
ONLY = "Only defer=True refuses it: with defer='auto' instep takes the loop"


def trained(make: Callable[[Any], torch.optim.Optimizer], options: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = make(model.parameters())
    overlap = None if options is None else instep.attach(model, optimizer, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        if make is lbfgs:
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if overlap is not None:
        overlap.detach()
    return found


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_only_defer_true_refuses_is_taken_by_auto(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    with pytest.raises(UnsupportedOptimizerError) as told:
        trained(make, {"defer": True})
    assert ONLY in str(told.value)
    plain, found = trained(make, None), trained(make, {"defer": "auto"})
    assert all(torch.equal(plain[name], found[name]) for name in plain)


@pytest.mark.parametrize("make", [*JUDGED, Counts, Averages], ids=lambda make: make.__name__)
def test_what_nobody_can_split_is_no_matter_of_defer(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Its ``step()`` runs where the loop calls it."""
    plain, found = trained(make, None), trained(make, {"defer": True})
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_what_cannot_be_put_back_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedOptimizerError) as told:
        trained(Averages, {"schedule": "backward"})
    assert "They were written, and are not put back. Update them in the loop, after optimizer.step()" in str(told.value)
    assert "Use schedule='forward' with defer='auto'" in str(told.value)


@pytest.mark.parametrize("wrong", STALE, ids=lambda wrong: wrong.__name__)
def test_a_loop_that_only_defer_true_refuses_goes_on_with_auto(wrong: Callable[[Loop], None]) -> None:
    loop = Loop({"defer": True})
    wrong(loop)
    with pytest.raises(StaleAttachmentError) as told:
        loop.step()
    assert str(told.value).count(ONLY) == 1
    loop.overlap.detach()
    loop = Loop({"defer": "auto"})
    wrong(loop)
    if wrong is converts:
        loop.optimizer.state.clear()
    loop.step()
    loop.overlap.detach()
    clipped = Loop({"clip": instep.ClipNorm(1.0), "defer": True})
    wrong(clipped)
    with pytest.raises(StaleAttachmentError) as told:
        clipped.step()
    assert ONLY not in str(told.value)
    clipped.overlap.detach()


# Options that do not go together: the message names others, with which the same loop is taken.


def attach_it(**options: Any) -> instep.Attachment:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    return instep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def refusal(**options: Any) -> str:
    with pytest.raises(AttachError) as told:
        attach_it(**options)
    return str(told.value)


@pytest.mark.parametrize("scaled", [False, True])
def test_ways_to_clip_exactly(scaled: bool) -> None:
    scaler: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu")} if scaled else {}
    said = refusal(schedule="backward", clip=instep.ClipNorm(1.0), **scaler)
    ways: dict[str, dict[str, Any]] = {
        "schedule='forward'": {"schedule": "forward", "clip": instep.ClipNorm(1.0)},
        "undo=True": {"schedule": "backward", "undo": True, "clip": instep.ClipNorm(1.0)},
        "mode='two_pass'": {"schedule": "backward", "clip": instep.ClipNorm(1.0, mode="two_pass")},
    }
    for name, options in ways.items():
        if name in said:
            attach_it(**options, **scaler).detach()
        else:
            assert scaled
            refusal(**options, **scaler)


def test_options_of_shard_state_are_not_advised_against_each_other() -> None:
    """``undo`` and ``two_pass`` do not go with it."""
    shard: dict[str, Any] = {"schedule": "backward", "shard_state": True}
    for option in ({"clip": instep.ClipNorm(1.0)}, {"nonfinite": "skip"}, {"scaler": torch.amp.GradScaler("cpu")}):
        said = refusal(**shard, **option)
        assert "undo" not in said
        assert "two_pass" not in said
        assert "schedule='forward'" in said


def test_shard_state_without_a_wrapper_speaks_of_the_wrapper() -> None:
    said = refusal(shard_state=True)
    assert "fully_shard" not in said
    assert said.endswith("Leave it out, or wrap the model in one")


def test_a_parameter_of_another_model() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(AttachError, match="is not a parameter of the model") as told:
        instep.attach(model, optimizer, schedule="backward")
    assert "fully_shard" not in str(told.value)
    assert "schedule='forward' without further options leaves all to torch" in str(told.value)
    instep.attach(model, optimizer).detach()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(AttachError, match="schedule='forward' without further options leaves it to torch"):
        instep.attach(model, optimizer, schedule="backward")
    instep.attach(model, optimizer).detach()
