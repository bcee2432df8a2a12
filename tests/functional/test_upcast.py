"""DDP's own mixed precision over instep's hook, beside the same arithmetic written out by hand, bit for bit.

By hand: full-precision parameters; low-precision copies that run forward and backward; their local gradients cast to
the reduce dtype, multiplied by one over the number of ranks and summed by ``dist.all_reduce``; cast up; stepped by the
same torch optimizers. With three ranks the order of gloo's sum depends on an element's place in the tensor, so the
flat tensors are put together in the order of DDP's buckets, which a spy around the hook writes down.
"""

import contextlib
import copy
import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from instep.errors import AttachError
from instep.functional import upcast
from instep.functional.upcast import AllreduceUpcastHookState, reducer_allreduce_and_upcast_hook
from tests import own_precision
from tests.cases import grad_of
from tests.devices import here, let_go, of_torch_unordered
from tests.distributed.pool import RankPool

pytestmark = own_precision.needs_it
STEPS = 6
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-fp32": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float16),
}


class Case(NamedTuple):
    dtypes: str = "bf16"
    view: bool = False
    in_backward: bool = False
    static: bool = False
    micro_batches: int = 1
    cap: float = 25
    model: str = "Layers"
    used_on: tuple[int, ...] = (0, 1, 2)  # the ranks that use the layer ``sometimes``
    batched: bool = False


class LeftAlone(nn.Module):
    """Its parameter stays in full precision, and DDP ignores it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift.to(x.dtype)


IGNORED = "left_alone.shift"


class Layers(nn.Module):
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 12)
        self.sometimes = nn.Linear(12, 12)
        self.never_trained = nn.Linear(12, 12).requires_grad_(False)
        self.register_buffer("shift", torch.randn(12))
        self.left_alone = LeftAlone(12)
        self.last = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.left_alone(torch.tanh(self.first(x)))
        if use:
            x = torch.tanh(self.sometimes(x))
        return self.last(torch.tanh(self.never_trained(x + self.shift)))


class Strided(nn.Module):
    """Parameters in channels_last, transposed, and transposed with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out
        self.turned = nn.Parameter(torch.randn(12, 6).t())
        self.gaps = nn.Parameter(torch.randn(20, 12)[::2].t())
        self.left_alone = LeftAlone(10)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.conv(x.view(-1, 2, 2, 4)).mean((2, 3))
        return self.left_alone(torch.tanh(x @ self.turned) @ self.gaps)


MODELS = {"Layers": Layers, "Strided": Strided}


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(here()).manual_seed(seed)
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 10, (8,), generator=generator)
    return x.to(here()), y.to(here())


def _loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), y)


class _NoEvent:
    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


@contextlib.contextmanager
def ddp_forward() -> Iterator[None]:
    """DDP's own forward hooks ask for events and streams, which a CPU has not. Nothing else runs under this."""
    if here().type != "cpu":
        yield
        return
    with (
        mock.patch.object(torch, "Event", _NoEvent),
        mock.patch.object(torch.accelerator, "current_stream", return_value=None),
    ):
        yield


class Native:
    """A DDP instance that has mixed precision, with instep's hook in place of torch's."""

    def __init__(self, net: nn.Module, param: torch.dtype, reduce: torch.dtype | None, **options: Any) -> None:
        self.net: Any = net
        self.layout = layout = list[list[str]]()
        names = {id(parameter): name for name, parameter in net.named_parameters()}

        def spy(state: AllreduceUpcastHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                layout.clear()
            layout.append([names[id(parameter)] for parameter in bucket.parameters()])
            return reducer_allreduce_and_upcast_hook(state, bucket)

        logging.getLogger("torch.nn.parallel.distributed").setLevel(logging.ERROR)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [IGNORED])
        with (
            mock.patch.object(mixed_precision_hooks, "_AllreduceUpcastHookState", AllreduceUpcastHookState),
            mock.patch.object(mixed_precision_hooks, "_reducer_allreduce_and_upcast_hook", spy),
        ):
            policy = _MixedPrecision(param, reduce, param)
            with own_precision.constructor():
                self.ddp = DistributedDataParallel(net, mixed_precision=policy, **options)
        # It would register a second hook, for parameters that have an optimizer.
        self.ddp._setup_in_backward_optimizers = lambda: None  # type: ignore[method-assign]  # of this object alone

    def loss(self, seed: int, use: bool = True) -> torch.Tensor:
        x, y = _batch(seed)
        with ddp_forward():
            output = self.ddp(x, use)
        return _loss(output, y)


class ByHand:
    def __init__(self, net: nn.Module, param: torch.dtype, reduce: torch.dtype) -> None:
        self.net: Any = net  # in full precision
        self.low = copy.deepcopy(net)
        for name, module in self.low.named_children():
            if name != "left_alone":
                module.to(param)
        found: Any = (self.low._parameters, self.low._buffers)
        for tensors in found:
            for tensor in tensors.values():
                tensor.data = tensor.to(param)
        self.dtype = reduce

    def loss(self, seed: int, use: bool = True) -> torch.Tensor:
        for low, full in zip(self.low.parameters(), self.net.parameters(), strict=True):
            low.data.copy_(full.data)
            if low.grad is None and full.grad is not None:
                low.grad = full.grad.to(low.dtype)  # DDP accumulates on what the last step left, in low precision
        x, y = _batch(seed)
        return _loss(self.low(x.to(next(self.low.parameters()).dtype), use), y)

    def reduce(self, layout: list[list[str]], divisor: int) -> None:
        low, full = dict(self.low.named_parameters()), dict(self.net.named_parameters())
        for names in layout:
            gradients = [low[name].grad for name in names]
            used = torch.tensor([g is not None for g in gradients], dtype=torch.int32)
            dist.all_reduce(used)
            pieces = [torch.zeros_like(low[name]) if g is None else g for name, g in zip(names, gradients, strict=True)]
            flat = torch.cat([_in_memory_order(piece) for piece in pieces]).to(self.dtype).mul_(1 / divisor)
            dist.all_reduce(flat)
            parts = flat.split([piece.numel() for piece in pieces])
            for name, piece, part, anywhere in zip(names, pieces, parts, used.tolist(), strict=True):
                if anywhere:
                    full[name].grad = torch.empty_like(piece, dtype=torch.float32)
                    _in_memory_order(grad_of(full[name])).copy_(part)
        for name, parameter in low.items():
            if name == IGNORED:
                full[name].grad = None if parameter.grad is None else parameter.grad.clone()
            parameter.grad = None


def _in_memory_order(dense: torch.Tensor) -> torch.Tensor:
    return dense.detach().as_strided((dense.numel(),), (1,))


def _optimizers(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Two, so that their order tells."""
    return [
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        torch.optim.AdamW(parameters, lr=0.01),
    ]


def _in_backward(net: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if p.requires_grad and name != IGNORED]


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def _states(optimizers: list[torch.optim.Optimizer], parameter: nn.Parameter) -> list[tuple[int, str, torch.Tensor]]:
    return [(i, k, v) for i, o in enumerate(optimizers) for k, v in sorted(o.state.get(parameter, {}).items())]


def _left_as_torch_leaves_it(net: nn.Module) -> str | None:
    parameter: Any
    for name, parameter in net.named_parameters():
        if name == IGNORED:
            if hasattr(parameter, "_fp_param"):
                return f"{name} has low precision"
        elif parameter.data_ptr() != parameter._fp_param.data_ptr() or parameter.dtype != torch.float32:
            return f"{name} is not its full-precision self"
        elif parameter.requires_grad and parameter._mp_param.untyped_storage().size() != 0:
            return f"the low-precision copy of {name} is still there"
        elif hasattr(parameter, "_ddp_mp_hook_state"):
            return f"{name} still has DDP's hook"
        elif parameter.grad is not None and parameter.grad.dtype != torch.float32:
            return f"the gradient of {name} is {parameter.grad.dtype}"
    return None


def _difference(native: Native, hand: ByHand, mine: list[Any], theirs: list[Any]) -> str | None:
    """Of parameters, buffers, gradients and optimizer state, where the two are not equal in every bit."""
    for (name, a), b in zip(native.net.named_parameters(), hand.net.parameters(), strict=True):
        if not _same(a.detach(), b.detach()):
            return f"parameter {name}"
        if not _same(a.grad, b.grad):
            return f"gradient of {name}: {a.grad} is not {b.grad}"
        optimizers = getattr(a, "_in_backward_optimizers", mine)
        state, expected = _states(optimizers, a), _states(theirs, b)
        if len(state) != len(expected):
            return f"optimizer state of {name}"
        for (_, key, x), (_, _, y) in zip(state, expected, strict=True):
            if not _same(x, y):
                return f"optimizer state {key} of {name}"
    for (name, buffer), other in zip(native.net.named_buffers(), hand.low.buffers(), strict=True):
        if not _same(buffer, other):
            return f"buffer {name}"
    return None


def compare(case: Case) -> str | None:
    """Run both loops on this rank. The first difference in words, with the step it was found in."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    param, reduce = DTYPES[case.dtypes]
    torch.manual_seed(0)
    net = MODELS[case.model]().to(here())
    hand = ByHand(copy.deepcopy(net), param, reduce)
    options: dict[str, Any] = {"batched_grad_copy": True} if case.batched else {}
    native = Native(
        net,
        param,
        reduce,
        gradient_as_bucket_view=case.view,
        static_graph=case.static,
        bucket_cap_mb=case.cap,
        **options,
    )
    stepped = _in_backward(net) if case.in_backward else []
    parameter: Any
    for parameter in stepped:
        parameter._in_backward_optimizers = _optimizers([parameter])
    mine = _optimizers([p for p in net.parameters() if all(p is not q for q in stepped)])
    theirs = _optimizers(list(hand.net.parameters()))
    stepped_by_hand = _in_backward(hand.net) if case.in_backward else []
    use = rank in case.used_on
    for i in range(STEPS):
        for micro in range(case.micro_batches):
            seed = 1000 * rank + 10 * i + micro
            last = micro == case.micro_batches - 1
            with contextlib.nullcontext() if last else native.ddp.no_sync():
                loss = native.loss(seed, use)
                loss.backward()
            expected = hand.loss(seed, use)
            expected.backward()
            if not _same(loss.detach(), expected.detach()):
                return f"step {i}: loss"
        hand.reduce(native.layout, ranks)
        wrong = _left_as_torch_leaves_it(net)
        if wrong is not None:
            return f"step {i}: {wrong}"
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
        for (name, _), full in zip(net.named_parameters(), hand.net.parameters(), strict=True):
            kept = None if any(full is p for p in stepped_by_hand) else full.grad
            if not _same(gradients[name], kept):
                return f"step {i}: gradient of {name}: {gradients[name]} is not {kept}"
        for optimizer in (*mine, *theirs):
            optimizer.step()
        for parameter in stepped_by_hand:
            parameter.grad = None
        difference = _difference(native, hand, mine, theirs)
        if difference is not None:
            return f"after step {i}: {difference}"
        native.ddp.zero_grad()
        hand.net.zero_grad()
    return None


def assert_equal_on_all(pool: RankPool, case: Case) -> None:
    assert pool.run(compare, case) == [None] * pool.world_size


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_two_ranks(two_ranks: RankPool, dtypes: str, view: bool, in_backward: bool) -> None:
    assert_equal_on_all(two_ranks, Case(dtypes, view, in_backward))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_several_buckets_on_three_ranks(three_ranks: RankPool, dtypes: str, view: bool, in_backward: bool) -> None:
    assert_equal_on_all(three_ranks, Case(dtypes, view, in_backward, cap=0.0005))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dtypes", ["bf16", "bf16-fp32"])
def test_no_sync(three_ranks: RankPool, dtypes: str, view: bool, in_backward: bool) -> None:
    """DDP adds a second hook to each parameter in the second forward, and by itself refuses this backward."""
    assert_equal_on_all(three_ranks, Case(dtypes, view, in_backward, micro_batches=3, cap=0.0005))


@pytest.mark.parametrize("used_on", [(0, 1, 2), (1,), ()])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_static_graph(three_ranks: RankPool, view: bool, in_backward: bool, used_on: tuple[int, ...]) -> None:
    """Used everywhere, on one rank, and nowhere: no rank may step, and no weight decay move, what no rank used."""
    assert_equal_on_all(three_ranks, Case("bf16", view, in_backward, static=True, used_on=used_on, cap=0.0005))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dtypes", ["bf16", "bf16-fp32"])
def test_parameters_with_strides_of_their_own(
    three_ranks: RankPool, dtypes: str, view: bool, micro_batches: int
) -> None:
    case = Case(dtypes, view, model="Strided", micro_batches=micro_batches)
    assert_equal_on_all(three_ranks, case)


@pytest.mark.skipif(
    "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters, reason="an option of torch 2.13"
)
@pytest.mark.parametrize("view", [False, True])
def test_batched_grad_copy(two_ranks: RankPool, view: bool) -> None:
    assert_equal_on_all(two_ranks, Case(view=view, batched=True))


def gradients_of_an_unused_parameter(view: bool) -> list[list[float]]:
    """Set by the user before every backward, on each rank to another value: what native and plain DDP make of it."""
    options: dict[str, Any] = {"gradient_as_bucket_view": view, "static_graph": True}
    native = Native(Layers().to(here()), torch.bfloat16, None, **options)
    plain = DistributedDataParallel(Layers().to(here()), **options)
    for i in range(4):
        for net in (native.net, plain.module):
            net.sometimes.weight.grad = torch.full_like(net.sometimes.weight, 2.0 + 2 * dist.get_rank())
        native.loss(i, use=False).backward()
        _loss(plain(_batch(i)[0], False), _batch(i)[1]).backward()
        assert _left_as_torch_leaves_it(native.net) is None
    return [net.sometimes.weight.grad.unique().tolist() for net in (native.net, plain.module)]


@of_torch_unordered
@pytest.mark.parametrize("view", [False, True])
def test_what_no_rank_used_keeps_the_gradient_that_plain_ddp_leaves(two_ranks: RankPool, view: bool) -> None:
    for native, plain in two_ranks.run(gradients_of_an_unused_parameter, view):
        assert native == plain


def _plain_and_native(view: bool = False, in_backward: bool = True) -> tuple[ByHand, Native]:
    torch.manual_seed(0)
    net = Layers().to(here())
    hand = ByHand(copy.deepcopy(net), torch.bfloat16, torch.bfloat16)
    native = Native(net, torch.bfloat16, None, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
    if in_backward:
        parameter: Any
        for parameter in _in_backward(net):
            parameter._in_backward_optimizers = _optimizers([parameter])
    return hand, native


def _step_both(hand: ByHand, native: Native, theirs: list[torch.optim.Optimizer], seed: int, divisor: int) -> None:
    native.loss(seed).backward()
    hand.loss(seed).backward()
    hand.reduce(native.layout, divisor)
    for optimizer in theirs:
        optimizer.step()
    for parameter in _in_backward(hand.net):
        parameter.grad = None


def _unchanged(net: nn.Module, before: dict[str, torch.Tensor]) -> str | None:
    for name, parameter in net.named_parameters():
        if not torch.equal(parameter.detach(), before[name]):
            return f"{name} was written"
        if name != IGNORED and parameter.grad is not None:
            return f"{name} has a gradient"
    return _left_as_torch_leaves_it(net)


def interrupted(where: str, view: bool) -> str | None:
    """The third backward fails on all ranks. What is wrong after it, or after one more step that is right again."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hand, native = _plain_and_native(view)
    theirs = _optimizers(_in_backward(hand.net))
    for i in range(2):
        _step_both(hand, native, theirs, 1000 * rank + i, ranks)
    before = {name: p.detach().clone() for name, p in native.net.named_parameters()}
    loss = native.loss(1000 * rank + 2)
    with _breaks(where, native.net), pytest.raises(Exception, match="unplugged"):
        loss.backward()
    let_go()
    wrong = _unchanged(native.net, before)
    if wrong is not None or where == "node":
        return wrong  # DDP itself does not survive a backward that raised between two buckets
    native.net.left_alone.shift.grad = None
    _step_both(hand, native, theirs, 1000 * rank + 3, ranks)
    native.net.left_alone.shift.grad = hand.net.left_alone.shift.grad
    return _difference(native, hand, [], theirs)


@contextlib.contextmanager
def _breaks(where: str, net: Any) -> Iterator[None]:
    def unplugged(*args: Any) -> Any:
        raise RuntimeError("unplugged")

    if where == "node":
        handle = net.first.weight.register_hook(unplugged)
        yield
        handle.remove()
        return
    sends = [0]

    def mean_allreduce(tensor: torch.Tensor, group: Any, divisor: int) -> torch.futures.Future[torch.Tensor]:
        sends[0] += 1
        future = real(tensor, group, divisor)
        return future if sends[0] == 1 else future.then(unplugged)

    real = upcast.mean_allreduce  # type: ignore[attr-defined]  # where it is looked up
    with mock.patch.object(upcast, "mean_allreduce", mean_allreduce):
        yield
    assert sends[0] > 1


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("where", ["communication", "node"])
def test_a_failure_writes_nothing(two_ranks: RankPool, where: str, view: bool) -> None:
    assert two_ranks.run(interrupted, where, view) == [None, None]


def refused_step() -> str | None:
    _, native = _plain_and_native()
    optimizer = mock.Mock()
    optimizer.step.side_effect = ValueError("no step")
    native.net.last.bias._in_backward_optimizers = [optimizer]
    loss = native.loss(dist.get_rank())
    with pytest.raises(ValueError, match="no step"):
        loss.backward()
    let_go()
    native.net.last.bias._in_backward_optimizers = []
    wrong = _left_as_torch_leaves_it(native.net)
    native.loss(dist.get_rank()).backward()
    return wrong or _left_as_torch_leaves_it(native.net)


def test_an_optimizer_that_raises_leaves_full_precision(two_ranks: RankPool) -> None:
    assert two_ranks.run(refused_step) == [None, None]


def joined(by_initial: bool, view: bool) -> list[torch.Tensor]:
    """Rank 0 has two batches, the others five. The parameters in the end."""
    rank = dist.get_rank()
    _, native = _plain_and_native(view)
    with native.ddp.join(divide_by_initial_world_size=by_initial):
        for i in range(2 if rank == 0 else 5):
            native.loss(1000 * rank + i).backward()
    assert _left_as_torch_leaves_it(native.net) is None
    return [p.detach().cpu() for p in _in_backward(native.net)]


def joined_by_hand(by_initial: bool, layouts: list[list[list[str]]]) -> list[torch.Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hand, _ = _plain_and_native()
    theirs = _optimizers(_in_backward(hand.net))
    for i in range(5):
        active = rank != 0 or i < 2
        if active:
            hand.loss(1000 * rank + i).backward()
        hand.reduce(layouts[min(i, 1)], ranks if by_initial or i < 2 else ranks - 1)
        for optimizer in theirs:
            optimizer.step()
        hand.net.zero_grad()
    return [p.detach().cpu() for p in _in_backward(hand.net)]


def layouts_of_two_steps() -> list[list[list[str]]]:
    _, native = _plain_and_native()
    layouts = []
    for i in range(2):
        native.loss(i).backward()
        layouts.append(copy.deepcopy(native.layout))
    return layouts


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("by_initial", [False, True])
def test_join(three_ranks: RankPool, by_initial: bool, view: bool) -> None:
    layouts = three_ranks.run(layouts_of_two_steps)[0]
    expected = three_ranks.run(joined_by_hand, by_initial, layouts)[0]
    for result in three_ranks.run(joined, by_initial, view):
        for mine, theirs in zip(result, expected, strict=True):
            assert torch.equal(mine, theirs)


def refusals() -> None:
    native = Native(Layers().to(here()), torch.bfloat16, None, find_unused_parameters=True)
    with pytest.raises(AttachError, match="find_unused_parameters"):
        native.loss(0)
    net = Layers()
    net.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(AttachError, match="waves is complex"):
        Native(net.to(here()), torch.float16, None)


def test_what_cannot_be_right_is_refused(two_ranks: RankPool) -> None:
    two_ranks.run(refusals)


def weakly_held() -> bool:
    native = Native(Layers().to(here()), torch.bfloat16, None)
    native.loss(0).backward()
    ddp = weakref.ref(native.ddp)
    del native.ddp._setup_in_backward_optimizers
    del native
    gc.collect()  # DDP's hooks on the module hold it in a cycle
    return ddp() is None


def test_the_state_does_not_keep_the_instance_alive(two_ranks: RankPool) -> None:
    assert two_ranks.run(weakly_held) == [True, True]
