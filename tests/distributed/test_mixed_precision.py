"""``attach(mixed_precision=)``. The oracle is a plain loop of the same arithmetic, written out by hand: a module that
casts its parameters in its own forward, under plain DDP with a hook that sends in ``reduce_dtype``."""

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError, InstepError
from instep_tools.harness import first_difference, training_state
from tests import net, own_precision
from tests.cases import Blocks, Checkpointed, Sometimes, Tied, batch
from tests.devices import here, on_cpu_only
from tests.distributed.casting import DTYPES, CastByHand, send_as
from tests.distributed.pool import RankPool


class Buffers(nn.Module):
    """A running mean, a buffer that is added to activations, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 12)
        self.norm = nn.BatchNorm1d(12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.outer = nn.Linear(12, 10)
        self.register_buffer("shift", torch.linspace(-1, 1, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(x))
        return self.outer(self.frozen(hidden) + self.shift.to(hidden.dtype))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.outer = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.lstm(x.view(-1, 4, 4))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Blocks": Blocks,
    "Buffers": Buffers,
    "Tied": Tied,
    "Sometimes": Sometimes,
    "Checkpointed": Checkpointed,
    "Recurrent": Recurrent,
}


def _loss(model: nn.Module, kind: str, seed: int) -> torch.Tensor:
    device = next(model.parameters()).device
    if kind == "Tied":
        tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(seed), device="cpu").to(device)
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    x, y = (t.to(device) for t in batch(seed))
    out = model(x, seed % 2 if dist.is_initialized() else None) if kind == "Sometimes" else model(x)
    return nn.functional.cross_entropy(out.float(), y)


def unwrapped(model: nn.Module) -> nn.Module:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return inner.inner if isinstance(inner, CastByHand) else inner


def compare(
    kind: str, param: str, reduce: str | None, options: dict[str, Any] | None, micro_batches: int = 1, steps: int = 4
) -> str | None:
    """``options``: of DDP; ``None``: one device."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[param], reduce_dtype=DTYPES[reduce])

    def build(attach: bool) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        # functional_call ends before a checkpointed segment is run again.
        inner = MODELS["Blocks" if kind == "Checkpointed" and not attach else kind]()
        inner = inner if options is None else inner.to(here())
        model: Any = inner if attach else CastByHand(inner, DTYPES[param])
        if options is not None:
            model = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)
        trained = [p for p in model.parameters() if p.requires_grad]
        opt = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, foreach=True)
        if attach:
            instep.attach(model, opt, mixed_precision=policy, schedule="backward")
        elif options is not None:
            model.register_comm_hook(DTYPES[reduce] or DTYPES[param], send_as)
        return model, opt

    pairs = [build(False), build(True)]
    overlap = instep.attached(pairs[1][0])
    assert overlap is not None
    for i in range(steps):
        for model, opt in pairs:
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                attached = instep.attached(model)
                hold = contextlib.nullcontext() if last else attached.accumulate() if attached else model.no_sync()
                with hold:
                    _loss(model, kind, 1000 * rank + micro_batches * i + micro).backward()
            opt.step()
            opt.zero_grad()
        states = (training_state(unwrapped(model), opt) for model, opt in pairs)
        difference = first_difference(*states)
        if difference is not None:
            return f"after step {i + 1}: {difference}"
    assert {p.dtype for p in pairs[1][0].parameters()} == {torch.float32}
    assert overlap.step_count == steps
    overlap.detach()
    return None


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("param", "reduce"), [("bf16", None), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "bf16"), (None, "bf16")]
)
def test_every_pair_of_dtypes(three_ranks: RankPool, param: str, reduce: str | None, view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    assert three_ranks.run(compare, "Blocks", param or "fp32", reduce, options) == [None] * 3


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model(three_ranks: RankPool, kind: str, view: bool) -> None:
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": kind == "Sometimes"}
    assert three_ranks.run(compare, kind, "bf16", None, options) == [None] * 3


@pytest.mark.parametrize("static", [False, True])
def test_accumulation(three_ranks: RankPool, static: bool) -> None:
    options = {"gradient_as_bucket_view": True, "static_graph": static}
    assert three_ranks.run(compare, "Blocks", "bf16", "bf16", options, micro_batches=1 if static else 3) == [None] * 3


@pytest.mark.parametrize("param", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", MODELS)
def test_one_device(kind: str, param: str) -> None:
    assert compare(kind, param, None, None) is None


def test_parameters_are_low_inside_the_forward_only() -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Watched(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, self.outer.weight.dtype))
            return super().forward(x)

    model = Watched()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, mixed_precision=policy, schedule="backward"):
        out = model(batch(0)[0])
        assert seen == [(torch.bfloat16, torch.bfloat16)]
        assert out.dtype == torch.float32
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(3, 5))
        assert all(p is before[name] for name, p in model.named_parameters())
        # A part that is called by itself.
        assert model.outer(torch.randn(2, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert model.outer.weight.dtype == torch.float32
    assert model(batch(0)[0]).dtype == torch.float32
    assert not model._forward_hooks
    assert not model.outer._forward_pre_hooks


def attached_low(model: nn.Module, **options: Any) -> tuple[instep.Attachment, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options)
    return instep.attach(model, optimizer, mixed_precision=policy, schedule="backward"), optimizer


def test_a_forward_that_was_interrupted() -> None:
    """torch calls no hook on Ctrl-C: the copies would stay, and train in the parameters' place."""
    interrupted = [True]

    class Interrupted(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            if interrupted.pop():
                raise KeyboardInterrupt
            interrupted.append(False)
            return out

    model = Interrupted()
    before = dict(model.named_parameters())
    overlap, _ = attached_low(model)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0)[0])
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32}
    interrupted.append(True)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0)[0])
    interrupted.append(False)
    assert model(batch(0)[0]).dtype == torch.bfloat16
    assert all(p is before[name] for name, p in model.named_parameters())
    interrupted.append(True)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0)[0])
    overlap.detach()
    assert all(p is before[name] for name, p in model.named_parameters())


@on_cpu_only
def test_a_second_thread_is_refused() -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            done.wait(net.SECONDS)
            return super().forward(x)

    model = Slow()
    overlap, _ = attached_low(model)
    first = threading.Thread(target=lambda: model(batch(0)[0]))
    first.start()
    assert inside.wait(net.SECONDS / 2)
    with pytest.raises(InstepError, match="a second thread called Slow"):
        model(batch(0)[0])
    done.set()
    first.join()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    overlap.detach()


def test_a_parameter_that_the_forward_writes_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 8, max_norm=0.1), nn.Linear(8, 2))
    overlap, _ = attached_low(model)
    with pytest.raises(InstepError, match=r"wrote to its parameter '0\.weight'"):
        model(torch.arange(4))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    overlap.detach()


def test_a_part_by_itself_and_what_the_forward_is_given() -> None:
    class Losses(Blocks):
        def forward(  # type: ignore[override]  # of a model of its own
            self, x: torch.Tensor, losses: list[torch.Tensor], more: dict[str, Any]
        ) -> torch.Tensor:
            out = super().forward(x + more["shift"])
            losses.append(out.sum())
            return out

    model = Losses()
    overlap, _ = attached_low(model)
    losses: list[torch.Tensor] = []
    more: dict[str, Any] = {"shift": torch.zeros(1), "name": "zero"}
    assert model(batch(0)[0], losses, more).dtype == torch.bfloat16
    assert len(losses) == 1
    assert more["shift"].dtype == torch.float32
    # Its inputs are cast as the model's are.
    assert model.outer(torch.randn(2, 24)).dtype == torch.bfloat16
    overlap.detach()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 8, sparse=True), nn.Linear(8, 2))
    with pytest.raises(AttachError, match="sparse=True of the module '0'"):
        attached_low(model)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    model = copy.deepcopy(plain)
    overlaps = [attached_low(m) for m in (plain, model)]
    compiled: Any = torch.compile(model, backend="aot_eager")
    for i in range(2):
        for m, (_, opt) in zip((plain, compiled), overlaps, strict=True):
            nn.functional.cross_entropy(m(batch(i)[0]).float(), batch(i)[1]).backward()
            opt.step()
            opt.zero_grad()
        assert all(map(torch.equal, plain.parameters(), model.parameters()))
    for overlap, _ in overlaps:
        overlap.detach()


def test_the_copies_are_freed_by_backward() -> None:
    model = Blocks()
    made: list[StorageWeakRef] = []

    def remember(module: nn.Module, args: object) -> None:
        made.extend(StorageWeakRef(p.untyped_storage()) for p in module._parameters.values() if p is not None)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, mixed_precision=policy, schedule="backward"):
        model.outer.register_forward_pre_hook(remember)
        loss = model(batch(0)[0]).float().sum()
        # The bias is not needed by backward.
        assert [ref.expired() for ref in made] == [False, True]
        loss.backward()
        assert all(ref.expired() for ref in made)


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (torch.bfloat16, "must be a torch.distributed.fsdp.MixedPrecisionPolicy"),
        (MixedPrecisionPolicy(param_dtype=torch.int8), "param_dtype=torch.int8 is not a floating-point"),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), "nothing is reduced"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, found: str) -> None:
    model = Blocks()
    with pytest.raises(AttachError, match=found):
        instep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), mixed_precision=policy, schedule="backward")
    assert instep.attached(model) is None


def refused_under_ddp() -> list[str]:
    texts = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    each: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {"mixed_precision": policy, "comm_hook": (torch.float32, send_as)}),
        ({"mixed_precision": torch.nn.parallel.distributed._MixedPrecision(torch.float16)}, {}),
    )
    for options, kwargs in each:
        with own_precision.constructor():
            ddp = DistributedDataParallel(Blocks(), **options)
        with pytest.raises(AttachError) as caught:
            instep.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), schedule="backward", **kwargs)
        texts.append(str(caught.value))
    return texts


@own_precision.needs_it
def test_what_does_not_go_together_is_refused(two_ranks: RankPool) -> None:
    for first, second in two_ranks.run(refused_under_ddp):
        assert "does not go with comm_hook" in first
        assert "give the policy to attach" in second
