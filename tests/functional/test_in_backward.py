"""``apply_optimizer_in_backward``: one device, then DDP, FSDP1 and FSDP2, before and after wrapping."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import AccumulationError, AttachError, UnsupportedOptimizerError
from instep.functional import param_to_optim_hook_handle_map
from tests.cases import Blocks, Tied, batch
from tests.devices import sparse_collectives
from tests.distributed.pool import RankPool
from tests.functional.cases import FSDP_CASES, OPTIMIZERS, SOME, in_backward_parity, loss, wrap

SPARSE = "sparse SGD"


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != SPARSE])
def test_every_optimizer_on_one_device(optimizer: str) -> None:
    assert in_backward_parity("none", optimizer, before=True) is None


@pytest.mark.parametrize("kind", ["Tied", "Sometimes", "Rotations", "channels_last"])
def test_every_kind_of_model_on_one_device(kind: str) -> None:
    assert in_backward_parity("none", "AdamW-0-foreach", kind, before=True) is None


def test_sparse_gradients_on_one_device() -> None:
    assert in_backward_parity("none", SPARSE, "SparseWords", before=True) is None


def test_bfloat16_on_one_device() -> None:
    assert in_backward_parity("none", "AdamW-0-foreach", before=True, dtype=torch.bfloat16) is None


def test_an_optimizer_that_is_not_torchs() -> None:
    _require_plain(pytest.importorskip("optimi").Lion, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("optimizer", SOME)
def test_ddp(three_ranks: RankPool, optimizer: str, view: bool, when: str) -> None:
    options = {"gradient_as_bucket_view": view}
    how = {"before": when == "before", "late": when == "late", "options": options}
    assert three_ranks.run(in_backward_parity, "ddp", optimizer, **how) == [None] * 3


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("kind", ["Tied", "Sometimes", "Rotations", "channels_last"])
def test_ddp_with_every_kind_of_model(three_ranks: RankPool, kind: str, view: bool) -> None:
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": kind == "Sometimes"}
    assert (
        three_ranks.run(in_backward_parity, "ddp", "AdamW-0-foreach", kind, before=True, options=options) == [None] * 3
    )


@sparse_collectives
def test_ddp_with_sparse_gradients(three_ranks: RankPool) -> None:
    assert three_ranks.run(in_backward_parity, "ddp", SPARSE, "SparseWords", before=True) == [None] * 3


@pytest.mark.parametrize("static", [False, True])
def test_ddp_no_sync(three_ranks: RankPool, static: bool) -> None:
    options = {"static_graph": static, "gradient_as_bucket_view": True}
    micro = 1 if static else 3
    answers = three_ranks.run(
        in_backward_parity, "ddp", "AdamW-0-fused", before=False, micro_batches=micro, options=options
    )
    assert answers == [None] * 3


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("optimizer", "low"), FSDP_CASES)
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_fsdp(three_ranks: RankPool, wrapper: str, optimizer: str, low: bool, before: bool) -> None:
    if wrapper == "fsdp1" and optimizer.startswith("Adagrad"):
        before = False  # its constructor makes state of the parameter's shape, which FSDP1 changes afterwards
    assert three_ranks.run(in_backward_parity, wrapper, optimizer, before=before, low=low) == [None] * 3


def test_late_on_one_device() -> None:
    assert in_backward_parity("none", "AdamW-0-fused", before=False, late=True) is None


@pytest.mark.parametrize("low", [False, True])
def test_late_with_fsdp2(three_ranks: RankPool, low: bool) -> None:
    answers = three_ranks.run(in_backward_parity, "fsdp2", "AdamW-0-fused", before=False, late=True, low=low)
    assert answers == [None] * 3


def late_with_fsdp1() -> str:
    model = wrap(Blocks(), "fsdp1")
    loss(model, "Blocks", 0).backward()
    with pytest.raises(AttachError) as caught:
        instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return str(caught.value)


def test_late_with_fsdp1_is_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(late_with_fsdp1):
        assert "before it" in said


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_fsdp_accumulation(two_ranks: RankPool, wrapper: str) -> None:
    answers = two_ranks.run(in_backward_parity, wrapper, "AdamW-0-foreach", before=True, micro_batches=2)
    assert answers == [None] * 2


def thawed(frozen_at: str) -> str | None:
    """What is in DDP's buckets was decided when DDP was constructed, whatever is frozen at the first forward."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    inner = Blocks()
    pair = []
    for functional in (False, True):
        made = copy.deepcopy(inner)
        if functional:
            instep.apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})
        made.blocks[0].requires_grad_(frozen_at != "construction")
        pair.append(wrap(made, "ddp", find_unused_parameters=True))
    plain, model = pair
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for i in range(4):
        for m in pair:
            m.get_submodule("module.blocks.0").requires_grad_(i >= 1 if frozen_at == "first forward" else True)
            loss(m, "Blocks", 1000 * rank + i).backward()
        opt.step()
        opt.zero_grad()
        if not all(map(torch.equal, plain.parameters(), model.parameters())):
            return f"after step {i + 1}"
        if any(p.grad is not None for p in model.parameters()):
            return f"after step {i + 1}: a gradient was left"
    return None


@pytest.mark.parametrize("frozen_at", ["construction", "first forward"])
def test_ddp_with_thawed_parameters(two_ranks: RankPool, frozen_at: str) -> None:
    assert two_ranks.run(thawed, frozen_at) == [None, None]


def copied() -> tuple[bool, bool]:
    model = Blocks()
    instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = wrap(model, "ddp")
    loss(ddp, "Blocks", 0).backward()
    before = [p.detach().clone() for p in ddp.parameters()]
    twin = copy.deepcopy(ddp)
    loss(twin, "Blocks", 1).backward()
    pickle.dumps(ddp)
    plain = all(p.grad is not None for p in twin.parameters())
    return all(map(torch.equal, before, ddp.parameters())), plain


def test_a_copy_of_ddp_is_a_plain_one(two_ranks: RankPool) -> None:
    assert two_ranks.run(copied) == [(True, True)] * 2


def shared_by_two() -> str:
    shared = nn.Linear(16, 16)
    instep.apply_optimizer_in_backward(torch.optim.SGD, shared.parameters(), {"lr": 0.1})
    first, second = wrap(shared, "ddp"), wrap(shared, "ddp")
    with pytest.raises(AccumulationError) as caught:
        (first(batch(0)[0]).sum() + second(batch(1)[0]).sum()).backward()
    return str(caught.value)


def test_a_parameter_that_two_ddp_instances_reduce_is_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(shared_by_two):
        assert "two gradients in one backward" in said


def test_integer_parameters_are_left_alone() -> None:
    weight, codes = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    instep.apply_optimizer_in_backward(torch.optim.SGD, [weight, codes], {"lr": 0.1})
    (weight * codes).sum().backward()
    assert torch.equal(weight, torch.full((2,), 0.9))


# What torch's does too, and what it gets wrong.


def _train(model: nn.Module, seed: int = 0) -> None:
    x, y = batch(seed)
    nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y).backward()


def _require_plain(
    cls: Any,
    train: Callable[[nn.Module, int], None] = _train,
    steps: int = 3,
    *,
    scheduled: bool = False,
    frozen: bool = False,
    **kwargs: float,
) -> None:
    """A copy of the model that is stepped in backward is the model in the loop with ``step()``."""
    torch.manual_seed(0)
    plain = Blocks()
    plain.blocks.requires_grad_(not frozen)
    model = copy.deepcopy(plain)
    opt = cls(plain.parameters(), **kwargs)
    instep.apply_optimizer_in_backward(cls, model.parameters(), kwargs)
    optimizers = [opt, *instep.get_in_backward_optimizers(model)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers if scheduled]
    for i in range(steps):
        for m in (plain, model):
            train(m, i)
        opt.step()
        opt.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_several_optimizers_run_in_order_of_registration() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    model = copy.deepcopy(plain)
    first, second = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.01)
    instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    instep.apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    for i in range(3):
        for m in (plain, model):
            _train(m, i)
        first.step()
        second.step()
        first.zero_grad()
        assert all(map(torch.equal, plain.parameters(), model.parameters()))
    names = [type(o).__name__ for o in instep.get_in_backward_optimizers(model)[:4]]
    assert names == ["SGD", "AdamW", "SGD", "AdamW"]


def test_the_records_are_those_of_torch() -> None:
    model = Tied()
    kwargs = {"lr": 0.5}
    instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), kwargs, register_hook=False)
    parameter: Any
    for parameter in model.parameters():
        assert parameter._optimizer_classes == [torch.optim.SGD]
        assert parameter._optimizer_kwargs == [kwargs]
        assert [o.param_groups[0]["lr"] for o in parameter._in_backward_optimizers] == [0.5]
        assert not parameter._post_accumulate_grad_hooks
    # Recorded only: nothing steps, and the gradient stays.
    before = model.middle.weight.detach().clone()
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert torch.equal(model.middle.weight, before)
    assert model.middle.weight.grad is not None
    # The tied weight once.
    assert len(instep.get_in_backward_optimizers(model)) == 3


def test_a_scheduler_on_the_optimizers() -> None:
    _require_plain(torch.optim.SGD, scheduled=True, lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_survives_conversion(dtype: torch.dtype) -> None:
    def train(model: nn.Module, i: int) -> None:
        if i == 2:
            model.to(dtype)
        _train(model, i)

    _require_plain(torch.optim.SGD, train, 4, lr=0.1)


def test_frozen_parameters_step_once_they_are_unfrozen() -> None:
    def train(model: Any, i: int) -> None:
        model.blocks.requires_grad_(i >= 2)
        _train(model, i)

    _require_plain(torch.optim.AdamW, train, 4, frozen=True, lr=0.1)


def test_a_model_is_freed_with_its_optimizers() -> None:
    def once() -> list[Any]:
        model = Blocks()
        instep.apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {})
        _train(model)
        optimizers = instep.get_in_backward_optimizers(model)
        return [weakref.ref(model), weakref.ref(next(model.parameters())), *map(weakref.ref, optimizers)]

    kept = [ref for _ in range(3) for ref in once()]
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []


def test_registering_after_removal_does_not_stack() -> None:
    model = Blocks()
    weight: Any = model.outer.weight
    steps: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            super().step()

    for _ in range(200):
        instep.apply_optimizer_in_backward(Counting, [weight], {"lr": 0.1})
        for handle in list(param_to_optim_hook_handle_map[weight]):
            handle.remove()
            handle.remove()
    assert len(weight._in_backward_optimizers) == 1  # the last: for those who take the hooks off and step themselves
    _train(model)
    assert steps == []
    assert weight.grad is not None
    weight.grad = None
    instep.apply_optimizer_in_backward(Counting, [weight], {"lr": 0.1})
    _train(model)
    assert len(steps) == 1
    assert len(weight._post_accumulate_grad_hooks) == 1
    # Taking the attribute off is removal too.
    del weight._in_backward_optimizers
    instep.apply_optimizer_in_backward(Counting, [weight], {"lr": 0.1})
    _train(model)
    assert len(steps) == 2
    assert len(param_to_optim_hook_handle_map[weight]) == 1


def test_a_step_that_raises_leaves_no_gradient_behind() -> None:
    model = Blocks()
    failing = [True]

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if failing[0]:
                raise ValueError("no")
            super().step()

    others = [p for p in model.parameters() if p is not model.inner.weight]
    instep.apply_optimizer_in_backward(torch.optim.SGD, others, {"lr": 0.1})
    instep.apply_optimizer_in_backward(Fails, [model.inner.weight], {"lr": 0.1})
    with pytest.raises(ValueError, match="no"):
        _train(model)
    assert all(p.grad is None for p in model.parameters())
    failing[0] = False
    plain = copy.deepcopy(model)
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for m in (plain, model):
        _train(m, 1)
    opt.step()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_backward_inside_autocast_steps_as_outside() -> None:
    def train(model: nn.Module, i: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _train(model, i)

    _require_plain(torch.optim.SGD, train, lr=0.1, momentum=0.9)


def test_a_weight_that_was_saved_is_noticed_with_fused_kernels_too() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    earlier = nn.Parameter(torch.randn(4, 4))
    instep.apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1, "fused": True})
    hidden = torch.randn(4, 4) @ earlier
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ((hidden @ weight.detach()) + weight).sum().backward()


def test_a_copy_is_not_stepped() -> None:
    model = Blocks()
    instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    before = [p.detach().clone() for p in model.parameters()]
    _train(copy.deepcopy(model))
    assert all(map(torch.equal, before, model.parameters()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)


_WEIGHT = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ([], "params is empty"),
        (_WEIGHT, "not one tensor"),
        ([_WEIGHT, _WEIGHT], r"params\[1\], of shape \(2,\), is params\[0\] again"),
        ([_WEIGHT * 2], "is not a leaf"),
        ([{"params": [_WEIGHT]}], r"params\[0\] is a dict"),
        ([("weight", _WEIGHT)], r"params\[0\] is a tuple"),
    ],
)
def test_bad_params_are_refused(params: Any, found: str) -> None:
    with pytest.raises(AttachError, match=found):
        instep.apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})
    assert not hasattr(_WEIGHT, "_in_backward_optimizers")


def test_all_or_nothing() -> None:
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
    with pytest.raises((TypeError, ValueError)):
        instep.apply_optimizer_in_backward(torch.optim.SGD, [good, bad], {"lr": -1})
    assert not hasattr(good, "_in_backward_optimizers")
    assert not good._post_accumulate_grad_hooks


def test_lbfgs_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
        instep.apply_optimizer_in_backward(torch.optim.LBFGS, Blocks().parameters(), {})


def test_attached_and_in_backward_exclude_each_other() -> None:
    model = Blocks()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, opt, schedule="backward"), pytest.raises(AttachError, match="already attached"):
        instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    instep.apply_optimizer_in_backward(torch.optim.SGD, [model.outer.weight], {"lr": 0.1})
    with pytest.raises(AttachError, match=r"'outer\.weight' has optimizers of its own"):
        instep.attach(model, opt, schedule="backward")
