"""``as_overlapped_optim``, ``register_overlapped``, ``OverlappedOptimizer``: DDP, FSDP1 and FSDP2."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError
from tests.cases import Blocks, attachment_of, batch
from tests.devices import let_go
from tests.distributed.pool import RankPool
from tests.functional.cases import FSDP_CASES, OPTIMIZERS, SOME, loss, overlapped_parity, wrap

DENSE = [name for name in OPTIMIZERS if name != "sparse SGD"]


@pytest.mark.parametrize("optimizer", [pytest.param(n, marks=() if n in SOME else pytest.mark.nightly) for n in DENSE])
def test_every_optimizer_under_ddp(two_ranks: RankPool, optimizer: str) -> None:
    assert two_ranks.run(overlapped_parity, "ddp", optimizer) == [None] * 2


@pytest.mark.parametrize("kind", ["Tied", "Sometimes", "Rotations", "channels_last"])
def test_ddp_with_every_kind_of_model(three_ranks: RankPool, kind: str) -> None:
    options = {"find_unused_parameters": kind == "Sometimes"}
    assert three_ranks.run(overlapped_parity, "ddp", "AdamW-0-foreach", kind, options=options) == [None] * 3


@pytest.mark.parametrize(("optimizer", "low"), FSDP_CASES)
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_fsdp(three_ranks: RankPool, wrapper: str, optimizer: str, low: bool) -> None:
    assert three_ranks.run(overlapped_parity, wrapper, optimizer, low=low) == [None] * 3


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_accumulation(two_ranks: RankPool, wrapper: str) -> None:
    assert two_ranks.run(overlapped_parity, wrapper, "AdamW-0-foreach", micro_batches=2) == [None] * 2


def static(view: bool) -> list[bool]:
    torch.manual_seed(0)
    inner = Blocks()
    plain, ddp = (
        DistributedDataParallel(copy.deepcopy(inner), static_graph=True, gradient_as_bucket_view=view) for _ in range(2)
    )
    opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    instep.as_overlapped_optim(torch.optim.AdamW, None, lr=1e-2).register_ddp(ddp)
    equal = []
    for i in range(3):
        for model in (plain, ddp):
            loss(model, "Blocks", 1000 * dist.get_rank() + i).backward()
        opt.step()
        opt.zero_grad()
        equal.append(all(map(torch.equal, plain.parameters(), ddp.parameters())))
    attachment_of(ddp).detach()
    return equal


@pytest.mark.parametrize("view", [False, True])
def test_the_first_backward_of_a_static_graph_is_a_step(two_ranks: RankPool, view: bool) -> None:
    """DDP reduces that one's buckets in a callback of its own, where backward ends."""
    assert two_ranks.run(static, view) == [[True] * 3] * 2


def unsynced(how: str) -> tuple[bool, bool]:
    """Backward calls that DDP does not reduce are no steps: the weights stay, and gradients add up."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain, ddp = (DistributedDataParallel(Blocks(), bucket_cap_mb=0.002) for _ in range(2))
    ddp.load_state_dict(plain.state_dict())
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    instep.as_overlapped_optim(torch.optim.SGD, None, lr=0.1).register_ddp(ddp)
    before = [p.detach().clone() for p in ddp.parameters()]
    stayed = []
    for model in (plain, ddp):
        with model.no_sync():
            first = loss(model, "Blocks", 1000 * rank)
            if how == "grad of the input":
                first.backward()
        if how == "grad of the input":
            x = batch(1)[0].requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        else:
            first.backward()
        stayed.append(all(map(torch.equal, before, model.parameters())))
        loss(model, "Blocks", 1000 * rank + 1).backward()
        if model is plain:
            opt.step()
    attachment_of(ddp).detach()
    return all(stayed), all(map(torch.equal, plain.parameters(), ddp.parameters()))


@pytest.mark.parametrize("how", ["grad of the input", "forward in no_sync"])
def test_only_what_ddp_reduces_is_a_step(two_ranks: RankPool, how: str) -> None:
    assert two_ranks.run(unsynced, how) == [(True, True)] * 2


def half_sharded() -> str:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    wrap(model[0], "fsdp2")
    with pytest.raises(AttachError) as caught:
        instep.as_overlapped_optim(torch.optim.SGD, None, lr=0.1).register_fsdp(model)
    return str(caught.value)


def test_a_half_sharded_model_is_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(half_sharded):
        assert "'1.weight' is not sharded" in said


class Mine(torch.optim.SGD):
    pass


class Recorded(instep.OverlappedOptimizer):
    def __init__(self, optim_cls: type, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optim_cls)
        self.arguments = (params, args, kwargs)

    def register_ddp(self, ddp: Any) -> None:
        raise NotImplementedError

    def register_fsdp(self, fsdp: Any) -> None:
        raise NotImplementedError


def test_the_registry_goes_by_mro(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(instep.functional.overlapped_optim._registered)
    monkeypatch.setattr(instep.functional.overlapped_optim, "_registered", registry)

    class Child(Mine):
        pass

    assert instep.register_overlapped(Mine)(Recorded) is Recorded
    made = instep.as_overlapped_optim(Child, None, 0.1, momentum=0.9)
    assert isinstance(made, Recorded)
    assert made.optim_cls is Child
    assert made.arguments == (None, (0.1,), {"momentum": 0.9})
    with pytest.raises(ValueError, match=r"Mine is already registered with Recorded, so .* with Recorded"):
        instep.register_overlapped(Mine)(Recorded)
    # Its parent's, for a class without its own.
    plain = instep.as_overlapped_optim(torch.optim.NAdam, None)
    assert not isinstance(plain, Recorded)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear is no torch\.optim\.Optimizer"):
        instep.as_overlapped_optim(torch.nn.Linear, None)


def test_wrong_arguments_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        instep.as_overlapped_optim(torch.optim.SGD, None, lr=-1)
    with pytest.raises(TypeError, match="no_such_option"):
        instep.as_overlapped_optim(torch.optim.SGD, None, no_such_option=1)


def test_without_parameters_there_is_no_optimizer_yet() -> None:
    overlapped = instep.as_overlapped_optim(torch.optim.SGD, None, lr=0.1)
    with pytest.raises(AttachError, match="params=None"):
        overlapped.param_groups  # type: ignore[attr-defined]  # noqa: B018


def test_what_is_not_wrapped_is_refused() -> None:
    overlapped = instep.as_overlapped_optim(torch.optim.SGD, None, lr=0.1)
    with pytest.raises(AttachError, match="takes a DistributedDataParallel, not tests"):
        overlapped.register_ddp(Blocks())  # type: ignore[arg-type]  # the mistake
    with pytest.raises(AttachError, match="is not sharded"):
        overlapped.register_fsdp(Blocks())


def registered_twice() -> tuple[str, str]:
    ddp = DistributedDataParallel(Blocks())
    first, second = (instep.as_overlapped_optim(torch.optim.SGD, None, lr=0.1) for _ in range(2))
    first.register_ddp(ddp)
    with pytest.raises(AttachError) as caught:
        second.register_ddp(ddp)
    attachment_of(ddp).detach()
    fsdp = wrap(Blocks(), "fsdp1")
    loss(fsdp, "Blocks", 0).backward()
    with pytest.raises(AttachError) as late:
        second.register_fsdp(fsdp)
    return str(caught.value), str(late.value)


def test_registered_twice_or_late(two_ranks: RankPool) -> None:
    for twice, late in two_ranks.run(registered_twice):
        assert "already attached" in twice
        assert "before it, or use" in late


def dropped() -> bool:
    """The registration lives as long as the module, though nobody holds the overlapped optimizer."""
    ddp = DistributedDataParallel(Blocks())
    instep.as_overlapped_optim(torch.optim.SGD, None, lr=0.1).register_ddp(ddp)
    before = [p.detach().clone() for p in ddp.parameters()]
    for i in range(2):
        torch.nn.functional.cross_entropy(ddp(batch(i)[0]), batch(i)[1]).backward()
    attachment_of(ddp).detach()
    return not any(map(torch.equal, before, ddp.parameters()))


def test_nobody_has_to_keep_it(two_ranks: RankPool) -> None:
    assert two_ranks.run(dropped) == [True, True]


def failed_step() -> list[str]:
    ddp = DistributedDataParallel(Blocks(), bucket_cap_mb=0.002)
    overlapped = instep.as_overlapped_optim(torch.optim.SGD, ddp.parameters(), lr=0.1)
    overlapped.register_ddp(ddp)
    said = []
    for i in range(3):
        if i == 1:
            broken = [p.detach().clone() for p in ddp.parameters()]
            ddp.module.inner.weight.register_hook(_raise)
        try:
            loss(ddp, "Blocks", i).backward()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            let_go()
            attachment_of(ddp).synchronize()  # on an accelerator what is left to do waits for a call of instep
            assert all(map(torch.equal, broken, ddp.parameters()))
            assert all(p.grad is None for p in ddp.parameters())
    attachment_of(ddp).detach()
    return said


def _raise(gradient: torch.Tensor) -> None:
    raise KeyError("the model is broken")


def test_a_backward_that_raises_writes_nothing(two_ranks: RankPool) -> None:
    for said in two_ranks.run(failed_step):
        assert said[0] == "KeyError: 'the model is broken'"
