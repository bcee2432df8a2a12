"""``attach(comm_hook=)``: the user's hook reduces, then the step. The oracle is plain DDP with the same hook."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, Rotations, Sometimes, batch
from tests.devices import here
from tests.distributed.comm_hooks import HOOKS, bf16
from tests.distributed.pool import RankPool

ONE_BUCKET = ("PowerSGD",)
"""Hooks that start collectives in callbacks: over gloo each rank runs these in an order of its own, so with several
buckets plain DDP itself mixes them up, and hangs or dies."""
MODELS = {"Blocks": Blocks, "Rotations": Rotations, "Sometimes": Sometimes}


def compare(hook: str, model: str, optimizer: str, options: dict[str, Any], steps: int = 5) -> str | None:
    rank = dist.get_rank()
    make_state, function = HOOKS[hook]

    def build(attach: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        cap = 25 if any(name in hook for name in ONE_BUCKET) else 0.002
        ddp = DistributedDataParallel(MODELS[model]().to(here()), bucket_cap_mb=cap, **options)
        opt: torch.optim.Optimizer
        if optimizer == "AdamW":
            opt = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
        else:
            opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        if attach:
            instep.attach(ddp, opt, comm_hook=(make_state(), function), schedule="backward")
        else:
            ddp.register_comm_hook(make_state(), function)
        return ddp, opt

    pairs = [build(False), build(True)]
    averagers = [PeriodicModelAverager(period=2, warmup_steps=2) for _ in pairs]
    for i in range(steps):
        x, y = (t.to(here()) for t in batch(1000 * rank + i))
        for (ddp, opt), averager in zip(pairs, averagers, strict=True):
            torch.manual_seed(i)
            out = ddp(x, rank % 2 if i % 2 else None) if model == "Sometimes" else ddp(x)
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
            if hook == "post_localSGD":
                averager.average_parameters(ddp.parameters())
            opt.zero_grad()
        difference = first_difference(training_state(*pairs[0]), training_state(*pairs[1]))
        if difference is not None:
            return f"after step {i + 1}: {difference}"
    overlap = instep.attached(pairs[1][0])
    assert overlap is not None
    assert overlap.step_count == steps
    overlap.detach()
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_the_hook_reduces_and_then_the_step(three_ranks: RankPool, hook: str, view: bool) -> None:
    optimizer = "AdamW" if view else "SGD"
    assert three_ranks.run(compare, hook, "Blocks", optimizer, {"gradient_as_bucket_view": view}) == [None] * 3


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", ["allreduce", "bf16", "to another tensor", "at once"])
def test_unused_and_complex_parameters(three_ranks: RankPool, hook: str, view: bool) -> None:
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": True}
    for model in ("Sometimes", "Rotations"):
        assert three_ranks.run(compare, hook, model, "SGD", options) == [None] * 3


def detached_and_attached_again() -> str | None:
    """The hook stays with the DDP instance: alone, and under a later attachment that gives none."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain, ddp = (DistributedDataParallel(Blocks()) for _ in range(2))
    ddp.load_state_dict(plain.state_dict())
    plain.register_comm_hook(None, bf16)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ddp))
    instep.attach(ddp, second, comm_hook=(None, bf16), schedule="backward").detach()
    for i in range(4):
        if i == 2:
            instep.attach(ddp, second, schedule="backward")
        x, y = batch(1000 * rank + i)
        for model, opt in ((plain, first), (ddp, second)):
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        difference = first_difference(training_state(plain, first), training_state(ddp, second))
        if difference is not None:
            return f"after step {i + 1}: {difference}"
    overlap = instep.attached(ddp)
    assert overlap is not None
    overlap.detach()
    with pytest.raises(AttachError, match="keeps the comm_hook of an earlier attach"):
        instep.attach(
            ddp, second, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16), schedule="backward"
        )
    return None


def test_the_hook_stays_when_detached(two_ranks: RankPool) -> None:
    assert two_ranks.run(detached_and_attached_again) == [None, None]


def failing_hook(failing: int) -> tuple[str, list[str], str]:
    """A hook whose ``failing``-th bucket of the third step fails, in its own callback."""
    ddp = DistributedDataParallel(Blocks(), bucket_cap_mb=0.002)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
    calls: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append(bucket.index())
        number = len([c for c in state if c == 0])

        def check(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if number == 3 and bucket.index() == failing:
                raise ConnectionError("the cable was pulled")
            return future.value()

        return default_hooks.allreduce_hook(None, bucket).then(check)  # type: ignore[arg-type]  # it may be None

    overlap = instep.attach(ddp, opt, comm_hook=(calls, hook), schedule="backward")
    for i in range(3):
        before = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
        try:
            nn.functional.cross_entropy(ddp(batch(i)[0]), batch(i)[1]).backward()
        except Exception as error:
            changed = [n for n, p in ddp.module.named_parameters() if not torch.equal(p, before[n])]
            text = str(error)
            state = repr(overlap)
            overlap.detach()
            return text, changed, state
        opt.step()
        opt.zero_grad()
    raise AssertionError("nothing was raised")


def test_a_hook_that_fails_is_never_stepped_from(two_ranks: RankPool) -> None:
    for text, changed, state in two_ranks.run(failing_hook, 0):
        assert "the cable was pulled" in text
        assert changed == []
        assert "idle" in state


def refused(comm_hook: Any) -> str:
    ddp = DistributedDataParallel(Blocks())
    with pytest.raises(AttachError) as caught:
        instep.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), comm_hook=comm_hook, schedule="backward")
    return str(caught.value)


def one_argument(bucket: dist.GradBucket) -> None: ...


@pytest.mark.parametrize(
    ("comm_hook", "found"),
    [
        (default_hooks.allreduce_hook, "must be a pair"),
        ((default_hooks.allreduce_hook, None), "must be a pair"),
        ((None, one_argument), "'one_argument' cannot be called with"),
    ],
)
def test_what_is_no_hook_is_refused(two_ranks: RankPool, comm_hook: Any, found: str) -> None:
    for text in two_ranks.run(refused, comm_hook):
        assert found in text


def test_a_hook_needs_ddp() -> None:
    model = Blocks()
    with pytest.raises(AttachError, match="has no DistributedDataParallel"):
        instep.attach(
            model,
            torch.optim.SGD(model.parameters()),
            comm_hook=(None, default_hooks.allreduce_hook),
            schedule="backward",
        )
