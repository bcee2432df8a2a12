"""``hook_then_optimizer`` and ``apply_optim_in_backward_hook``. The oracle is plain DDP with the inner hook."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError, InstepError
from tests import own_precision
from tests.cases import Blocks, batch
from tests.devices import here, let_go, sparse_collectives
from tests.distributed.comm_hooks import HOOKS
from tests.distributed.pool import RankPool
from tests.functional.cases import SOME, Functional, hook_parity, loss


def then_optimizer(hook: str | None) -> Any:
    assert hook is not None
    make_state, function = HOOKS[hook]

    def hooked(ddp: nn.Module, functional: tuple[Functional, Any]) -> tuple[Any, Any]:
        return make_state(), instep.hook_then_optimizer(function, instep.OptimizerHookState(*functional))

    return hooked


def then_in_backward(hook: str | None) -> Any:
    def hooked(ddp: Any, functional: tuple[Functional, Any]) -> tuple[Any, Any]:
        mine, chosen = functional
        instep.apply_optimizer_in_backward(mine.cls, ddp.parameters() if chosen is None else chosen, mine.kwargs)
        comm_hook = None if hook is None else (HOOKS[hook][0](), HOOKS[hook][1])
        view = ddp.gradient_as_bucket_view
        return weakref.ref(ddp), instep.apply_optim_in_backward_hook(view, comm_hook=comm_hook)

    return hooked


def parity(which: str, hook: str | None, optimizer: str, kind: str = "Blocks", **how: Any) -> str | None:
    hooked = then_optimizer(hook) if which == "hook_then_optimizer" else then_in_backward(hook)
    plain = None if hook is None else (HOOKS[hook][0](), HOOKS[hook][1])
    return hook_parity(hooked, plain, optimizer, kind, **how)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("hook", [name for name in HOOKS if "PowerSGD" not in name and name != "post_localSGD"])
@pytest.mark.parametrize("which", ["hook_then_optimizer", "apply_optim_in_backward_hook"])
def test_any_inner_hook(three_ranks: RankPool, which: str, hook: str, view: bool) -> None:
    how = {"options": {"gradient_as_bucket_view": view}}
    assert three_ranks.run(parity, which, hook, "AdamW-0-foreach", **how) == [None] * 3


def power_sgd(which: str) -> str | None:
    # One bucket: see tests/distributed/test_comm_hooks.py.
    return parity(which, "PowerSGD", "SGD-1-for-loop", steps=5, options={"bucket_cap_mb": 25})


@pytest.mark.parametrize("which", ["hook_then_optimizer", "apply_optim_in_backward_hook"])
def test_power_sgd(three_ranks: RankPool, which: str) -> None:
    assert three_ranks.run(power_sgd, which) == [None] * 3


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("optimizer", SOME)
@pytest.mark.parametrize("which", ["hook_then_optimizer", "apply_optim_in_backward_hook"])
def test_some_parameters_or_all(three_ranks: RankPool, which: str, optimizer: str, subset: bool) -> None:
    assert three_ranks.run(parity, which, "allreduce", optimizer, subset=subset) == [None] * 3


@pytest.mark.parametrize("view", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["Tied", "Sometimes", "Rotations", "channels_last"])
@pytest.mark.parametrize("which", ["hook_then_optimizer", "apply_optim_in_backward_hook"])
def test_every_kind_of_model(three_ranks: RankPool, which: str, kind: str, view: bool) -> None:
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": kind == "Sometimes"}
    assert three_ranks.run(parity, which, "allreduce", "AdamW-0-foreach", kind, options=options) == [None] * 3


@sparse_collectives
@pytest.mark.parametrize("which", ["hook_then_optimizer", "apply_optim_in_backward_hook"])
def test_sparse_gradients(three_ranks: RankPool, which: str) -> None:
    assert three_ranks.run(parity, which, "allreduce", "sparse SGD", "SparseWords") == [None] * 3


@pytest.mark.parametrize("which", ["hook_then_optimizer", "apply_optim_in_backward_hook"])
def test_no_sync(three_ranks: RankPool, which: str) -> None:
    assert three_ranks.run(parity, which, "allreduce", "AdamW-0-foreach", micro_batches=3) == [None] * 3


@pytest.mark.parametrize("by_initial", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_uneven_inputs(three_ranks: RankPool, view: bool, by_initial: bool) -> None:
    """DDP's own mean, with the divisor that ``join`` asks for."""
    how = {
        "options": {"gradient_as_bucket_view": view},
        "join": {"divide_by_initial_world_size": by_initial},
        "steps": 5,
    }
    assert three_ranks.run(parity, "apply_optim_in_backward_hook", None, "SGD-0-for-loop", **how) == [None] * 3


def failing(which: str, bucket: int) -> tuple[str, list[bool], list[bool], bool]:
    """In the third backward the communication of one bucket fails. What changed in it, bucket by bucket, and whether
    the next backward is right."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Blocks(), bucket_cap_mb=0.002)
    functional = Functional(torch.optim.SGD, {"lr": 0.1})
    calls: list[list[torch.Tensor]] = []
    armed = [False]

    def hook(state: Any, grad_bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(grad_bucket.parameters())
        fails = armed[0] and grad_bucket.index() == bucket

        def answer(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if fails:
                if here().type != "cpu":
                    torch.accelerator.synchronize()  # DDP itself does not wait for a bucket that has failed
                raise ConnectionError("the cable was pulled")
            return future.value()

        return default_hooks.allreduce_hook(None, grad_bucket).then(answer)  # type: ignore[arg-type]  # it may be None

    if which == "hook_then_optimizer":
        ddp.register_comm_hook(None, instep.hook_then_optimizer(hook, instep.OptimizerHookState(functional)))
    else:
        instep.apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
        ddp.register_comm_hook(weakref.ref(ddp), instep.apply_optim_in_backward_hook(False, comm_hook=(None, hook)))
    for i in range(2):
        loss(ddp, "Blocks", i).backward()
    before: dict[torch.Tensor, torch.Tensor] = {p: p.detach().clone() for p in ddp.parameters()}
    calls.clear()
    armed[0] = True
    with pytest.raises(Exception, match="the cable was pulled") as caught:
        loss(ddp, "Blocks", 2).backward()
    let_go()
    changed = [any(not torch.equal(p, before[p]) for p in parameters) for parameters in calls]
    dropped = [p.grad is None for p in ddp.parameters()]
    armed[0] = False
    # Both ranks see the same data, so a plain local step is the mean's.
    local = Blocks()
    local.load_state_dict(ddp.module.state_dict())
    opt = torch.optim.SGD(local.parameters(), lr=0.1)
    for m in (local, ddp):
        loss(m, "Blocks", 3).backward()
    opt.step()
    right = all(torch.allclose(a, b) for a, b in zip(local.parameters(), ddp.parameters(), strict=True))
    return str(caught.value), changed, dropped, right


@pytest.mark.parametrize("bucket", [0, 2])
@pytest.mark.parametrize("which", ["hook_then_optimizer", "apply_optim_in_backward_hook"])
def test_a_failed_communication_is_never_stepped_from(two_ranks: RankPool, which: str, bucket: int) -> None:
    for _, changed, dropped, right in two_ranks.run(failing, which, bucket):
        assert len(changed) > 3
        assert not any(changed[bucket:]), "the failed bucket, or one after it, was stepped"
        assert all(dropped)
        assert right, "DDP is not usable after the failure, or an old gradient was added to"


def one_hook_for_two() -> str:
    state = instep.OptimizerHookState(Functional(torch.optim.SGD, {"lr": 0.1}))
    hook = instep.hook_then_optimizer(default_hooks.allreduce_hook, state)
    pair = [DistributedDataParallel(Blocks()) for _ in range(2)]
    for ddp in pair:
        ddp.register_comm_hook(None, hook)
    losses: list[Any] = [loss(ddp, "Blocks", 0) for ddp in pair]
    with pytest.raises(InstepError) as caught:
        sum(losses).backward()
    return str(caught.value)


def test_one_hook_for_two_instances_is_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(one_hook_for_two):
        assert "two instances share one communication hook" in said


def test_the_state_names_a_class_without_step_param() -> None:
    with pytest.raises(ValueError, match=r"must have a method step_param.*AdamW.* has none"):
        instep.OptimizerHookState(torch.optim.AdamW(Blocks().parameters()))


def with_a_hook_of_the_users() -> list[str]:
    said = []
    for early in (True, False):
        ddp = DistributedDataParallel(Blocks())
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if not early:
            loss(ddp, "Blocks", 0)
        try:
            instep.apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
            ddp(batch(0)[0])
        except AttachError as error:
            said.append(str(error))
    ddp = DistributedDataParallel(Blocks())
    ddp.register_comm_hook(None, instep.apply_optim_in_backward_hook(False))
    with pytest.raises(AttachError) as caught:
        loss(ddp, "Blocks", 0).backward()
    return [*said, str(caught.value)]


def test_a_hook_that_is_there_already_is_refused_before_anything_is_stepped(two_ranks: RankPool) -> None:
    for early, late, stateless in two_ranks.run(with_a_hook_of_the_users):
        assert "'fp16_compress_hook'" in early
        assert early == late
        assert "weakref" in stateless


def policies_missing_or_twice() -> list[str]:
    said = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    native = torch.nn.parallel.distributed._MixedPrecision(torch.bfloat16)
    for own, given in ((None, None), (native, policy)):
        with own_precision.constructor():
            ddp = DistributedDataParallel(Blocks(), mixed_precision=own)
        with pytest.raises(AttachError) as caught:
            instep.AllreduceUpcastHookState(weakref.ref(ddp), None, mixed_precision=given)
        said.append(str(caught.value))
    return said


@own_precision.needs_it
def test_upcast_needs_one_policy(two_ranks: RankPool) -> None:
    for neither, both in two_ranks.run(policies_missing_or_twice):
        assert "neither has one" in neither
        assert "both have one" in both


def test_upcast_needs_a_ddp_instance() -> None:
    plain = Blocks()
    for wrong in (plain, weakref.ref(plain)):
        with pytest.raises(AttachError, match=r"must be weakref\.ref\(ddp\)"):
            instep.AllreduceUpcastHookState(wrong, None)
