"""One device: the attached loop beside the plain one, bit for bit, after every step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import instep
from instep.errors import AttachError
from tests.cases import Blocks, OptimizerCase, Rotations, Tied, batch, optimizer_cases, two_groups
from tests.devices import default_device

SMALL = 2_000  # bytes: several buckets even in these models


def assert_equal(build: Callable[[], Any], steps: int = 5, **options: Any) -> None:
    found = instep.verify(build, steps=steps, **{"schedule": "backward", "bucket_bytes": SMALL, **options})
    assert found.equal, found.difference
    assert found.tensors > 0


def loop(
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int], torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> Callable[[], Any]:
    """A loop with a scheduler, as a user would write it; on torch's default device unless told."""
    device = device or default_device()

    def cross_entropy(model: nn.Module, i: int) -> torch.Tensor:
        x, y = batch(i)
        return nn.functional.cross_entropy(model(x.to(device)), y.to(device))

    def build() -> Any:
        model = make().to(device)
        opt = optimizer(model)
        scheduler = LambdaLR(opt, lambda e: 1 / (1 + e))

        def step(i: int) -> None:
            (loss or cross_entropy)(model, i).backward()
            opt.step()
            opt.zero_grad()
            scheduler.step()

        return model, opt, step

    return build


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)


@pytest.mark.parametrize("case", list(optimizer_cases()), ids=lambda case: case[0])
def test_every_optimizer_with_two_groups_and_a_scheduler(case: OptimizerCase, device: torch.device) -> None:
    _, cls, kwargs = case
    assert_equal(loop(Blocks, lambda model: cls(two_groups(model), **kwargs), device=device))


def test_tied_weights(device: torch.device) -> None:
    def loss(model: nn.Module, i: int) -> torch.Tensor:
        tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(i), device="cpu").to(device)
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    assert_equal(loop(Tied, adamw, loss, device))


def test_a_thawed_parameter_is_stepped_in_backward_again() -> None:
    model = Blocks()
    model.inner.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        assert "inner.weight" not in str(overlap.plan)
        model.inner.requires_grad_(True)
        model(batch(0)[0]).sum().backward()
        assert "SpentGradient" in repr(model.inner.weight.grad)
        optimizer.step()


def test_local_accumulation() -> None:
    def build() -> Any:
        model = Blocks()
        optimizer = adamw(model)

        def step(i: int) -> None:
            overlap = instep.attached(model)
            for micro in range(3):
                x, y = batch(3 * i + micro)
                if overlap is not None and micro < 2:
                    with overlap.accumulate():
                        nn.functional.cross_entropy(model(x), y).backward()
                else:
                    nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    assert_equal(build)


def test_bfloat16_parameters(device: torch.device) -> None:
    def loss(model: nn.Module, i: int) -> torch.Tensor:
        x, y = batch(i)
        return nn.functional.cross_entropy(model(x.to(device, torch.bfloat16)).float(), y.to(device))

    assert_equal(loop(lambda: Blocks().to(torch.bfloat16), adamw, loss, device))


def test_complex_parameters() -> None:
    assert_equal(loop(Rotations, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_sparse_gradients(cls: Callable[..., torch.optim.Optimizer]) -> None:
    def loss(model: nn.Module, i: int) -> torch.Tensor:
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(i), device="cpu").to(
            default_device()
        )
        return model(tokens).square().mean()

    def words() -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 8, sparse=True))

    assert_equal(loop(words, lambda model: cls(model.parameters(), 0.1), loss))


@pytest.mark.parametrize("outside", [True, False], ids=["head outside", "all inside"])
def test_reentrant_checkpointing_that_visits_a_parameter_once(outside: bool) -> None:
    def loss(model: Any, i: int) -> torch.Tensor:
        x, y = batch(i)
        x = x.requires_grad_()
        for part in (model.inner, *model.blocks) if outside else (model.inner, *model.blocks, model.outer):
            x = checkpoint(part, x, use_reentrant=True)
        return nn.functional.cross_entropy(model.outer(x) if outside else x, y)

    assert_equal(loop(Blocks, adamw, loss))


class GroupStep(torch.optim.Optimizer):
    """Keeps its step count in the group, in a non-parameter state entry, and on itself, as some optimizers do.

    It counts a step of a group in which something has a gradient: after backward that is none.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "history": []})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        stepped = [g for g in self.param_groups if any(p.grad is not None for p in g["params"])]
        self.calls += bool(stepped)
        self.state["total"] = self.state.get("total", 0) + bool(stepped)  # type: ignore[index, call-overload]  # a name
        for group in stepped:
            group["count"] += 1
            group["history"].append(group["count"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["count"])


def test_state_kept_outside_of_the_parameters() -> None:
    assert_equal(loop(Blocks, lambda model: GroupStep([{**g, "history": []} for g in two_groups(model)])), steps=6)
    model = Blocks()
    optimizer = GroupStep(model.parameters())
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"):
        for i in range(3):
            model(batch(i)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.calls == optimizer.state["total"] == 3  # type: ignore[index]  # a name


def test_state_is_created_in_the_order_of_the_plain_step() -> None:
    orders = []
    for attach in (False, True):
        model = Blocks()
        optimizer = adamw(model)
        if attach:
            instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward")
        model(batch(0)[0]).sum().backward()
        optimizer.step()
        orders.append(list(optimizer.state_dict()["state"]))
    assert orders[0] == orders[1]


def test_step_hooks_fire_once_per_step() -> None:
    model = Blocks()
    optimizer = adamw(model)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    everywhere = register_optimizer_step_post_hook(lambda *_: fired.append("global"))
    try:
        with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward") as overlap:
            assert len(overlap.plan.buckets) > 3
            model(batch(0)[0]).sum().backward()
            assert fired == []
            optimizer.step()
    finally:
        everywhere.remove()
    assert fired == ["pre", "post", "global"]


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.AdamW])
def test_backward_inside_an_autocast_block(cls: Callable[..., torch.optim.Optimizer]) -> None:
    def build() -> Any:
        model = Blocks()
        optimizer = cls(model.parameters(), lr=1e-2)

        def step(i: int) -> None:
            x, y = batch(i)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                nn.functional.cross_entropy(model(x).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    assert_equal(build)


def test_an_object_in_a_group() -> None:
    marker = object()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "marker": marker}], lr=0.1)

    assert_equal(loop(Blocks, optimizer))


def test_requires_grad_toggled_inside_forward() -> None:
    class Alternating(Blocks):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.inner.requires_grad_(self.calls % 2 == 0)
            return super().forward(x)

    assert_equal(loop(Alternating, adamw), bucket_bytes=1)


def test_a_compiled_model() -> None:
    def build() -> Any:
        return torch.compile(Blocks(), backend="aot_eager")

    assert_equal(loop(build, adamw), steps=3)


def test_buckets_follow_the_order_in_which_gradients_arrive() -> None:
    """A model whose modules are registered in the reverse of the order they run in."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)))

    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, bucket_bytes=1, schedule="backward") as overlap:
        names = [bucket.parameters[0].name for bucket in overlap.plan.buckets]
        assert names[0].startswith("first")
        for i in range(2):
            model(batch(i)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        names = [bucket.parameters[0].name for bucket in overlap.plan.buckets]
        assert names[0].startswith("last")


def test_only_the_largest_bucket_of_gradients_is_ever_alive() -> None:
    model = Blocks(width=64, depth=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, bucket_bytes=20_000, schedule="backward") as overlap:
        alive: list[int] = []

        def count(_: torch.Tensor) -> None:
            real = [p.grad for p in model.parameters() if p.grad is not None and "Spent" not in repr(p.grad)]
            alive.append(sum(g.nbytes for g in real))

        for i in range(2):
            handles = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()] if i else []
            model(batch(i)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        largest = max(bucket.nbytes for bucket in overlap.plan.buckets)
        assert max(alive) <= largest < overlap.plan.nbytes / 3
        for handle in handles:
            handle.remove()


def training(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def at_a_rate_of_0(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=0.0)
    training(model, optimizer)


NOTHING: dict[str, Callable[[Any, Any], object]] = {
    "no step": lambda model, optimizer: model(torch.ones(2, 3)).sum().backward(),
    "a rate of 0": at_a_rate_of_0,
    "all frozen": lambda model, optimizer: (model.requires_grad_(False), optimizer.step()),
    "another model": lambda model, optimizer: (nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward(), optimizer.step()),
}


@pytest.mark.parametrize("name", ["training", *NOTHING])
def test_verify_says_that_a_step_trains_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step = NOTHING.get(name, training)

    def build() -> Any:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, lambda i: step(model, optimizer)

    found = instep.verify(build, steps=2)
    assert found.equal
    assert found.trained == (name == "training")
    said = [record.message for record in caplog.records if "has changed no parameter in 2 steps" in record.message]
    assert len(said) == (name != "training")


def test_verify_needs_two_models() -> None:
    model = Blocks(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match=r"build returned parameter 'inner\.weight' twice"):
        instep.verify(lambda: (model, optimizer, lambda i: None), schedule="backward")
    with pytest.raises(AttachError, match="same optimizer twice"):
        instep.verify(lambda: (Blocks(depth=1), optimizer, lambda i: None), schedule="backward")
