"""Optimizers, schedulers and hooks with something odd about them, plain and attached in every way, bit for bit."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import instep
from instep.errors import (
    HyperparameterChangedError,
    SpentGradientError,
    StaleAttachmentError,
    UncommittedStepError,
    UnsupportedOptimizerError,
)
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.judged import own_steps_are_judged
from tests.parity.lockstep import (
    CLIP,
    EXACT,
    SMALL,
    WAYS,
    Contender,
    Refused,
    in_every_way,
    in_exact_ways,
    learn,
    lockstep,
    loss_of,
    ways,
)

UNCOMMITTED = Refused(UncommittedStepError, "open")
CHANGED = Refused(HyperparameterChangedError, "torn")
MOMENTS = ("before forward", "before backward", "before step", "after step")
Make = Callable[[Any], Any]


def building(optimizer: Make, depth: int = 2) -> Callable[[], Any]:
    def build() -> Any:
        model = Blocks(depth=depth)
        return model, optimizer(model)

    return build


def adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(two_groups(model), **{"lr": 1e-2, **options})


def sgd(model: nn.Module, **options: Any) -> Any:
    return torch.optim.SGD(two_groups(model), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, **options})


blocks = building(adamw)


# Several optimizers, several attachments.


def muon_and_adamw(model: nn.Module) -> Any:
    matrices, rest = (group["params"] for group in two_groups(model))
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@in_every_way
def test_muon_and_adamw(way: str) -> None:
    lockstep(way, building(muon_and_adamw))


@in_every_way
def test_two_optimizers_that_step_and_clear_in_turn(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        lane.backward(loss)
        lane.clip()
        for optimizer in lane.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    lockstep(way, building(lambda m: [sgd(m.blocks), adamw(nn.ModuleList([m.inner, m.outer]))]), step)


class LastOneUnused(nn.Module):
    """The last bucket is never full: of one optimizer some gradients arrive, and no bucket is stepped in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(8))
        self.first, self.second, self.third = nn.Linear(16, 8), nn.Linear(8, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


@in_every_way
def test_two_optimizers_of_which_one_is_stepped_in_backward(way: str) -> None:
    """The calls of both are one step."""

    def build() -> Any:
        model = LastOneUnused()
        return model, [
            sgd(nn.ModuleList([model.second, model.third])),
            torch.optim.AdamW([model.unused, *model.first.parameters()]),
        ]

    lane = lockstep(way, build, steps=5)
    assert lane.overlap.step_count == 5


@in_every_way
def test_an_optimizer_that_steps_every_other_time(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        lane.backward(loss)
        for number, optimizer in enumerate(lane.optimizers):
            if i % (number + 1) == number:
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()

    build = building(lambda m: [sgd(m.blocks), adamw(nn.ModuleList([m.inner, m.outer]))])
    lockstep(way, build, step, steps=6, refused={"backward": UNCOMMITTED, "two_pass": UNCOMMITTED})


def gan() -> Any:
    pair = nn.ModuleDict({"g": nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), "d": Blocks(depth=1)})
    return pair, [adamw(pair["g"], betas=(0.5, 0.9)), sgd(pair["d"])]


def adversarial(lane: Contender, i: int) -> Any:
    """The generator's backward leaves gradients with the discriminator, which clears them when its turn comes."""
    x, y = batch(i)
    g, d = lane.model["g"], lane.model["d"]
    for_g, for_d = lane.optimizers
    for_d.zero_grad()
    d_loss = loss_of(d(x), y) + loss_of(d(g(x).detach()), 9 - y)
    d_loss.backward()
    for_d.step()
    for_g.zero_grad()
    g_loss = loss_of(d(g(x)), y)
    g_loss.backward()
    for_g.step()
    return d_loss.detach(), g_loss.detach()


@ways("backward", *EXACT)
def test_adversarial_training(way: str) -> None:
    lockstep(way, gan, adversarial, refused={"backward": UNCOMMITTED})


@in_every_way
def test_an_optimizer_that_steps_twice_and_finds_nothing_the_second_time(way: str) -> None:
    """While the other one owes its step."""

    def step(lane: Contender, i: int) -> Any:
        loss = loss_of(lane.model(batch(i)[0]), batch(i)[1])
        lane.backward(loss)
        lane.clip()
        first, second = lane.optimizers
        for optimizer in (first, first, second, second):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    lockstep(way, building(muon_and_adamw), step)


def test_an_optimizer_that_steps_twice_by_the_same_gradients_is_told_and_the_step_goes_on() -> None:
    lanes = []
    for _ in range(2):
        torch.manual_seed(0)
        lanes.append(building(muon_and_adamw)())
    plain, attached = lanes
    with instep.attach(*attached, schedule="backward"):
        for i in range(3):
            for model, optimizers in (plain, attached):
                loss_of(model(batch(i)[0]), batch(i)[1]).backward()
                optimizers[0].step()
                if model is attached[0]:
                    with pytest.raises(SpentGradientError, match=r"step\(\) was called twice"):
                        optimizers[0].step()
                optimizers[1].step()
                model.zero_grad()
            states = [training_state(model, optimizers) for model, optimizers in (plain, attached)]
            assert first_difference(*states) is None


@ways("backward", *EXACT)
def test_adversarial_training_with_two_attachments(way: str) -> None:
    lockstep(
        way,
        gan,
        adversarial,
        parts=lambda lane: [(lane.model[name], o) for name, o in zip("gd", lane.optimizers, strict=True)],
    )


@pytest.mark.parametrize("listed", [False, True])
@ways("backward", *EXACT)
def test_several_attachments_on_parts_of_one_model(way: str, listed: bool) -> None:
    """A ``ModuleList`` is never called itself."""

    def parts(lane: Contender) -> Any:
        model = lane.model
        blocks = [(model.blocks, lane.optimizers[1])] if listed else zip(model.blocks, lane.optimizers[1:], strict=True)
        return [(nn.ModuleList([model.inner, model.outer]), lane.optimizers[0]), *blocks]

    def optimizers(model: Any) -> Any:
        rest = adamw(nn.ModuleList([model.inner, model.outer]))
        return [rest, sgd(model.blocks)] if listed else [rest, *map(sgd, model.blocks)]

    lockstep(way, building(optimizers), parts=parts)


# Groups that change.


def growing(when: str, lane: Contender, i: int) -> Any:
    model, optimizer = lane.model, lane.optimizer

    def add(now: str) -> None:
        if now == when and i in (1, 3):
            optimizer.add_param_group({"params": list(model.blocks[i // 2].parameters()), "lr": 2e-2})

    add("before forward")
    x, y = batch(i)
    loss = loss_of(model(x), y)
    add("before backward")
    lane.backward(loss)
    add("before step")
    lane.step()
    add("after step")
    model.zero_grad()
    return loss.detach()


def two_of_four(model: Any) -> Any:
    return torch.optim.AdamW([*model.inner.parameters(), *model.outer.parameters()], lr=1e-2)


@pytest.mark.parametrize("when", MOMENTS)
@ways("backward", *EXACT)
def test_parameters_added_later(way: str, when: str) -> None:
    lockstep(way, building(two_of_four), partial(growing, when), steps=6)


@pytest.mark.parametrize("when", MOMENTS)
@in_exact_ways
def test_parameters_added_later_are_part_of_the_norm(way: str, when: str) -> None:
    lockstep(way, building(two_of_four), partial(growing, when), steps=6, clip=instep.ClipNorm(CLIP))


@pytest.mark.parametrize("when", ["before forward", "after step"])
def test_parameters_added_later_are_part_of_the_norm_of_two_passes(when: str) -> None:
    lockstep("two_pass", building(two_of_four), partial(growing, when), steps=6)


@in_every_way
def test_a_parameter_added_that_is_not_the_models(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        if i == 1:
            lane.extra = nn.Parameter(torch.ones(10))
            lane.optimizer.add_param_group({"params": [lane.extra]})
        x, y = batch(i)
        out = lane.model(x)
        lane.learn(loss_of(out if i < 1 else out * lane.extra, y))
        return None if i < 1 else lane.extra.detach().clone()

    if way == "two_pass":
        pytest.skip("clip= is for the attached parameters")
    lockstep(way, blocks, step)


GONE = {
    **dict.fromkeys(WAYS, Refused(StaleAttachmentError, "untouched")),
    "late": Refused(StaleAttachmentError, "pending"),
}


class OneIsKept(nn.Module):
    """Some parameters are stepped at once, since the loop has another tensor of their memory; others are put off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.kept = [self.first.weight.detach(), self.second.bias.detach()]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.second(self.first(nn.functional.one_hot(indices, 5).float())))


BEFORE_OTHERS = {"sparse": lambda: nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Linear(5, 5)), "kept": OneIsKept}


@pytest.mark.parametrize("first", BEFORE_OTHERS)
@ways("backward", *EXACT)
def test_state_is_in_the_order_of_the_plain_loop_where_some_are_stepped_at_once(way: str, first: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = BEFORE_OTHERS[first]()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(lane: Contender, i: int) -> Any:
        lane.learn(lane.model(torch.tensor([1, 2])).square().sum())
        return list(lane.optimizer.state_dict()["state"])

    lockstep(way, build, step)


@pytest.mark.parametrize("place", ["the same group", "a group of its own"])
@in_every_way
def test_a_parameter_that_comes_into_the_groups_a_second_time(way: str, place: str) -> None:
    """The plain loop steps it twice, and ``attach`` refuses it."""

    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        if i == 1:
            groups, again = lane.optimizer.param_groups, lane.optimizer.param_groups[0]["params"][0]
            if place == "the same group":
                groups[0]["params"].append(again)
            else:
                groups.append({**groups[0], "params": [again]})
        return loss

    lockstep(way, blocks, step, refused=GONE)


@in_every_way
def test_a_group_that_lets_parameters_go(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        if i == 1:
            del lane.optimizer.param_groups[0]["params"][0]
        lane.model.zero_grad()
        return loss

    lockstep(way, blocks, step, refused=GONE)


# Learning rates and other hyper-parameters.

SCHEDULERS: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "step": (adamw, lambda o: lr_scheduler.StepLR(o, 2, 0.5)),
    "tensor step": (partial(adamw, lr=torch.tensor(1e-2)), lambda o: lr_scheduler.StepLR(o, 2, 0.5)),
    "cosine": (adamw, lambda o: lr_scheduler.CosineAnnealingLR(o, 4)),
    "tensor cosine": (partial(adamw, lr=torch.tensor(1e-2)), lambda o: lr_scheduler.CosineAnnealingLR(o, 4)),
    "one cycle": (adamw, lambda o: lr_scheduler.OneCycleLR(o, [0.05, 0.02], total_steps=12)),
    "one cycle momentum": (sgd, lambda o: lr_scheduler.OneCycleLR(o, [0.05, 0.02], total_steps=12)),
    "cyclic": (sgd, lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2)),
    "plateau": (sgd, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5)),
    "sequence": (
        adamw,
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ),
}


def scheduled(name: str) -> Callable[[], Any]:
    def build() -> Any:
        make, scheduler = SCHEDULERS[name]
        model = Blocks(depth=2)
        optimizer = make(model)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"] = group["lr"].clone()
        optimizer.scheduler = [scheduler(optimizer)]
        return model, optimizer

    return build


def advance(scheduler: Any, loss: torch.Tensor) -> None:
    scheduler.step(*[loss] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", list(SCHEDULERS))
@in_every_way
def test_schedulers(way: str, name: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        advance(lane.optimizer.scheduler[0], loss)
        return loss

    lockstep(way, scheduled(name), step, steps=6)


@pytest.mark.filterwarnings("ignore:The epoch parameter", "ignore:Detected call of")
@pytest.mark.parametrize("name", ["tensor step", "one cycle momentum", "sequence"])
@in_every_way
def test_schedulers_called_between_backward_and_step(way: str, name: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        lane.backward(loss)
        advance(lane.optimizer.scheduler[0], loss.detach())
        lane.step()
        lane.zero_grad()
        return loss.detach()

    lockstep(way, scheduled(name), step, steps=6, refused={"backward": CHANGED, "two_pass": CHANGED})


CHANGES: dict[str, tuple[Make, Callable[[dict[str, Any], int], Any]]] = {
    "lr": (adamw, lambda group, i: group.update(lr=0.01 / (1 + i))),
    "tensor lr in place": (partial(adamw, foreach=False), lambda group, i: group["lr"].fill_(0.01 / (1 + i))),
    "tensor lr": (adamw, lambda group, i: group.update(lr=torch.tensor(0.01 / (1 + i)))),
    "betas": (adamw, lambda group, i: group.update(betas=(0.5 + 0.05 * i, 0.99))),
    "weight decay": (sgd, lambda group, i: group.update(weight_decay=0.1 * i)),
    "momentum": (sgd, lambda group, i: group.update(momentum=0.5 + 0.05 * i, nesterov=i % 2 == 0)),
    "maximize": (sgd, lambda group, i: group.update(maximize=i % 2 == 1)),
}


@pytest.mark.parametrize("when", ["before backward", "before step", "after step"])
@pytest.mark.parametrize("name", list(CHANGES))
@ways("backward", *EXACT)
def test_hyperparameters_changed_by_hand(way: str, name: str, when: str) -> None:
    make, change = CHANGES[name]

    def build() -> Any:
        model = Blocks(depth=2)
        optimizer = make(model)
        if name == "tensor lr in place":
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(0.02)
        return model, optimizer

    def step(lane: Contender, i: int) -> Any:
        def now(moment: str) -> None:
            if moment == when:
                for group in lane.optimizer.param_groups:
                    change(group, i)

        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        now("before backward")
        lane.backward(loss)
        now("before step")
        lane.step()
        now("after step")
        lane.zero_grad()
        return loss.detach()

    lockstep(way, build, step, refused={"backward": CHANGED} if when == "before step" else None)


# Closures.


@in_every_way
def test_closures(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)

        def closure() -> torch.Tensor:
            lane.zero_grad()
            loss = loss_of(lane.model(x), y)
            lane.backward(loss)
            lane.clip()
            return loss

        return lane.optimizer.step(closure).detach()

    lockstep(way, blocks, step)


# Optimizers of one's own, and other people's.


def by_closure(lane: Contender, i: int) -> Any:
    x, y = batch(i)

    def closure() -> torch.Tensor:
        lane.zero_grad()
        loss = loss_of(lane.model(x), y)
        loss.backward()
        return loss

    return lane.optimizer.step(closure).detach()


class Nested(torch.optim.AdamW):
    """Its ``step()`` calls its parent class's, where torch runs the step hooks a second time, and does more with what
    has a gradient before and after. Where ``again``, it calls the parent's twice."""

    again = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._shrink(0.99)
        super().step()
        if self.again:
            super().step()
        self._shrink(0.98)
        return loss

    def _shrink(self, factor: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(factor)


class NestedTwice(Nested):
    again = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def nested(cls: type[Nested]) -> Callable[[], Any]:
    torch.optim.AdamW([torch.zeros(1)])  # the first object of a class has torch wrap its step()
    Nested([torch.zeros(1)])
    return building(lambda model: cls(two_groups(model), lr=1e-2))


@pytest.mark.parametrize("cls", [Nested, NestedTwice])
@in_every_way
def test_a_step_that_calls_that_of_its_parent_class(way: str, cls: type[Nested]) -> None:
    lane = lockstep(way, nested(cls))
    assert lane.overlap.step_count == 5


@in_exact_ways
def test_a_step_that_calls_that_of_its_parent_class_with_a_closure(way: str) -> None:
    lockstep(way, nested(Nested), by_closure)


class SAM(torch.optim.Optimizer):
    """Holds another optimizer, as sharpness-aware minimization does."""

    def __init__(self, params: Any, base: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base_optimizer = base(self.param_groups, lr=0.1)


class KeepsIds(torch.optim.Optimizer):
    """State under the ids of parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            key: Any = id(p)
            if key not in self.state:
                self.state[key] = {"momentum": torch.zeros_like(p)}
            p.sub_(self.state[key]["momentum"].mul_(0.9).add_(p.grad), alpha=0.1)


class Averages(torch.optim.SGD):
    """Keeps an average of the weights, in a module; weights are drawn to it."""

    def __init__(self, model: nn.Module, lr: float, *, by_data: bool) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.origin = model
        self.by_data = by_data

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        mine = {id(p) for group in self.param_groups for p in group["params"] if p.grad is not None}
        for kept, now in zip(self.average.parameters(), self.origin.parameters(), strict=True):
            (kept.data if self.by_data else kept).lerp_(now, 0.1)
            if id(now) in mine:
                now.lerp_(kept, 0.5)
        return loss


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda m: SAM(m.parameters(), torch.optim.SGD), "holds another optimizer.*base_optimizer"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS"),
        (partial(sgd, differentiable=True), "differentiable=True"),
        (partial(adamw, differentiable=True), "differentiable=True"),
    ],
    ids=["wraps", "LBFGS", "SGD differentiable", "AdamW differentiable"],
)
@in_every_way
def test_what_is_refused_at_attach(way: str, make: Make, match: str) -> None:
    def everything(model: nn.Module, optimizer: Any) -> Any:
        hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
        hooks += [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
        return hooks, len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)

    model, optimizer = building(make)()
    weights = [p.detach().clone() for p in model.parameters()]
    before = everything(model, optimizer)
    with pytest.raises(UnsupportedOptimizerError, match=match):
        instep.attach(model, optimizer, **WAYS[way])
    assert instep.attached(model) is None
    assert everything(model, optimizer) == before
    assert all(map(torch.equal, weights, model.parameters()))


@in_every_way
def test_state_under_the_ids_of_parameters(way: str) -> None:
    """It is one thing to torch, and each update of a part leaves another one."""
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, optimizer = building(lambda m: KeepsIds(m.parameters()))()
        with own_steps_are_judged():
            overlap = instep.attach(model, optimizer, bucket_bytes=SMALL, **WAYS[way]) if attached else None
        lane = Contender(model, optimizer, WAYS[way])
        lane.overlap = overlap
        for i in range(5):
            learn(lane, i)
        found.append(
            [
                *(p.detach().clone() for p in model.parameters()),
                *(optimizer.state[id(p)]["momentum"] for p in model.parameters()),
            ]
        )
        if overlap is not None:
            assert bool(overlap.plan.judged) == (WAYS[way]["schedule"] == "backward")
            overlap.detach()
    assert all(map(torch.equal, *found))


@in_every_way
@pytest.mark.parametrize("by_data", [False, True])
def test_an_average_of_the_weights_in_a_module(way: str, by_data: bool) -> None:
    """What parts write in it is put back: every step is left whole."""

    def step(lane: Contender, i: int) -> Any:
        learn(lane, i)
        optimizer: Any = lane.optimizer
        return list(map(torch.clone, optimizer.average.parameters()))

    with own_steps_are_judged():
        lane = lockstep(way, building(lambda m: Averages(m, lr=0.1, by_data=by_data)), step)
    if WAYS[way]["schedule"] == "backward":
        assert "an average of the weights" in lane.overlap.plan.judged[0]


@pytest.mark.filterwarnings("ignore")
@in_every_way
def test_zero_redundancy_optimizer_is_refused(way: str, tmp_path: Path) -> None:
    zero = pytest.importorskip("torch.distributed.optim")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Blocks(depth=1)
        optimizer = zero.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        with pytest.raises(UnsupportedOptimizerError, match="ZeroRedundancyOptimizer holds another optimizer"):
            instep.attach(model, optimizer, **WAYS[way])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
@in_every_way
def test_schedule_free(way: str, name: str) -> None:
    schedulefree = pytest.importorskip("schedulefree")

    def step(lane: Contender, i: int) -> Any:
        lane.optimizer.train()
        loss = learn(lane, i)
        lane.optimizer.eval()
        with torch.no_grad():
            return loss, lane.model(batch(i)[0])

    lockstep(way, building(lambda m: getattr(schedulefree, name)(two_groups(m), lr=1e-2)), step)


# Step hooks.


@ways("backward", *EXACT)
def test_a_step_pre_hook_registered_between_backward_and_step(way: str) -> None:
    def clip(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.05)

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x), y))
        handle = lane.optimizer.register_step_pre_hook(clip)
        lane.step()
        handle.remove()
        lane.zero_grad()

    lockstep(way, blocks, step, refused={"backward": Refused(SpentGradientError, "open")})


@pytest.mark.parametrize("after_attach", [False, True])
@in_exact_ways
def test_step_hooks_that_read(way: str, after_attach: bool) -> None:
    def look(optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.seen += [p.detach().clone() for p in parameters]
        optimizer.seen += [None if p.grad is None else p.grad.clone() for p in parameters]

    def register(optimizer: Any) -> None:
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)

    def build() -> Any:
        model, optimizer = blocks()
        if not after_attach:
            register(optimizer)
        return model, optimizer

    def step(lane: Contender, i: int) -> Any:
        if after_attach and i == 0:
            register(lane.optimizer)
        lane.optimizer.seen = []
        learn(lane, i)
        return lane.optimizer.seen

    lockstep(way, build, step)


@pytest.mark.parametrize("after_attach", [False, True])
@pytest.mark.parametrize("what", ["clip", "add decay", "skip", "lr"])
@in_exact_ways
def test_step_hooks_that_write(way: str, what: str, after_attach: bool) -> None:
    def write(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            if what == "clip":
                nn.utils.clip_grad_norm_(group["params"], 0.05)
            elif what == "add decay":
                for p in group["params"]:
                    p.grad = p.grad + 0.1 * p.detach()
            elif what == "skip":
                group["params"][0].grad = None
            else:
                group["lr"] *= 0.9

    def build() -> Any:
        model, optimizer = blocks()
        if not after_attach:
            optimizer.register_step_pre_hook(write)
        return model, optimizer

    def step(lane: Contender, i: int) -> Any:
        if after_attach and i == 0:
            lane.optimizer.register_step_pre_hook(write)
        return learn(lane, i)

    lockstep(way, build, step)


# State that goes out and comes in.


def saved(lane: Contender) -> Any:
    return copy.deepcopy([lane.model.state_dict(), *(o.state_dict() for o in lane.optimizers)])


def load(lane: Contender, state: Any) -> None:
    lane.model.load_state_dict(state[0])
    for optimizer, one in zip(lane.optimizers, state[1:], strict=True):
        optimizer.load_state_dict(one)


def flat(state: Any) -> list[Any]:
    return [value for value in torch.utils._pytree.tree_leaves(state) if not isinstance(value, str)]


@in_every_way
def test_state_saved_and_loaded_between_steps(way: str) -> None:
    """Saved after each step, loaded right after another one: the two steps in between are undone."""

    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        if i in (1, 4):
            lane.extra = saved(lane)
        if i in (3, 5):
            load(lane, copy.deepcopy(lane.extra))
        return loss, *flat(lane.extra)

    lockstep(way, building(lambda m: [sgd(m.blocks), adamw(nn.ModuleList([m.inner, m.outer]))]), step, steps=8)


class Restarts(torch.optim.AdamW):
    """It restarts where the trial of ``attach`` does not come to."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, lr=1e-2)
        self.calls, self.how = 0, how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        restarts = self.calls % 16 == 0
        if restarts and self.how == "zeroed before":
            for entry in self.state.values():
                for value in entry.values():
                    value.zero_()
        if restarts and self.how == "cleared before":
            self.state.clear()
        super().step()
        for group in self.param_groups if restarts and self.how == "deleted after" else ():
            for parameter in (p for p in group["params"] if p.grad is not None):
                del self.state[parameter]


@pytest.mark.parametrize("options", [{}, {"undo": True}])
@pytest.mark.parametrize("how", ["zeroed before", "cleared before", "deleted after"])
def test_an_update_that_restarts_late(how: str, options: dict[str, Any]) -> None:
    """``step()`` finds no gradient, and restarts once more: what backward has made of the state is gone."""
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Blocks(depth=1)
        loops.append((model, Restarts(model.parameters(), how)))
    with instep.attach(*loops[1], schedule="backward", **options) as overlap:
        for i in range(18):
            for model, optimizer in loops:
                x, y = batch(i)
                loss_of(model(x), y).backward()
                if i == 15 and model is loops[1][0] and how != "deleted after":
                    with pytest.raises(UnsupportedOptimizerError, match="writes the state of parameters"):
                        optimizer.step()
                    assert repr(overlap).endswith("torn>")
                    return
                optimizer.step()
                optimizer.zero_grad()
            assert first_difference(training_state(*loops[0]), training_state(*loops[1])) is None, i


def test_a_method_of_torchs_that_one_object_has_replaced() -> None:
    """It is bound to that object: a copy that steps later would have it look for state there."""
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Blocks(depth=1)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer._init_group = partial(optimizer._init_group)
        loops.append((model, optimizer))
    with instep.attach(*loops[1], defer=True) as overlap:
        for i in range(4):
            for model, optimizer in loops:
                x, y = batch(i)
                loss_of(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            overlap.synchronize()
            assert first_difference(training_state(*loops[0]), training_state(*loops[1])) is None, i


@in_exact_ways
def test_one_backward_and_two_steps(way: str) -> None:
    """The second applies the same gradients again."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x), y))
        lane.step()
        lane.step()
        lane.zero_grad()

    lockstep(way, blocks, step)


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_second_step_is_refused_before_it_writes(form: dict[str, Any]) -> None:
    model, optimizer = building(partial(adamw, **form))()
    with instep.attach(model, optimizer, bucket_bytes=1, schedule="backward"):
        x, y = batch(0)
        loss_of(model(x), y).backward()
        optimizer.step()
        before = [(name, copy.deepcopy(value)) for name, value in training_state(model, optimizer)]
        with pytest.raises(SpentGradientError):
            optimizer.step()
        assert first_difference(iter(before), training_state(model, optimizer)) is None


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


DUPLICATES = pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_file])


@DUPLICATES
@pytest.mark.parametrize("when", MOMENTS)
@in_exact_ways
def test_copies_of_model_and_optimizer_at_any_time(way: str, when: str, duplicate: Callable[[Any], Any]) -> None:
    """The copies are plain, and what they hold, gradients too, is what the plain loop's would."""

    def step(lane: Contender, i: int) -> Any:
        seen: list[Any] = []

        def now(moment: str) -> None:
            if moment == when:
                model, optimizer = duplicate((lane.model, lane.optimizer))
                assert instep.attached(model) is None
                assert all(type(p) is nn.Parameter for p in model.parameters())
                twin = Contender(model, optimizer, {})
                seen.extend(flat([model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]]))
                learn(twin, 100 + i)
                seen.extend(flat([model.state_dict(), optimizer.state_dict()]))

        now("before forward")
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        now("before backward")
        lane.backward(loss)
        now("before step")
        lane.step()
        now("after step")
        lane.zero_grad()
        return seen

    lockstep(way, blocks, step, steps=4)
