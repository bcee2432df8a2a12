"""``fully_shard``: bit for bit what FSDP2 does in the plain loop, on two ranks."""

import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import instep
from instep.attachment import attachments
from instep.errors import AccumulationError, AttachError, SpentGradientError, UncommittedStepError
from tests import net
from tests.cases import Blocks, Tied, batch, grad_of, optimizer_cases, two_groups
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import WAYS, Loop, both, in_every_way, local_of, loss_of, mesh, nested, sampled, whole

warnings.filterwarnings("ignore", message=".*returned a view tensor.*")

# These raise on DTensors in the plain loop already (torch 2.13): there is nothing to be equal to.
PLAIN_FAILS = (
    "SGD-0-fused",
    "SGD-1-fused",
    "SGD-2-fused",
    "Adagrad-0-fused",
    "Rprop-0-for-loop",
    "Rprop-0-foreach",
    "Adafactor-0-for-loop",
    "Adafactor-0-foreach",
)
CASES = {case[0]: case for case in optimizer_cases() if case[0] not in PLAIN_FAILS}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, **{"foreach": True, **options})


def one_optimizer(way: str, cls: Any, kwargs: Any) -> None:
    loop = both(way, nested, lambda model: cls(two_groups(model), **kwargs), steps=4)
    for state in loop.optimizer.state.values():
        for key, value in state.items():
            assert isinstance(value, DTensor) == (key not in ("step", "eta", "mu", "mu_product")), key


@pytest.mark.parametrize(("name", "way"), sampled(CASES, 10))
def test_every_optimizer(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_optimizer, way, *CASES[name][1:])


def unlike_plain(cls: Any, kwargs: Any, way: str) -> None:
    """The oracle: the same optimizer over the local tensors."""
    torch.manual_seed(0)
    model = nested(Blocks())
    optimizer = cls(model.parameters(), **kwargs)
    torch.manual_seed(0)
    plain = nested(Blocks())
    locals_ = [local_of(p).detach().requires_grad_() for p in plain.parameters()]
    other = cls(locals_, **kwargs)
    with instep.attach(model, optimizer, **WAYS[way]) as overlap:
        for i in range(4):
            Loop(model, optimizer).learn(i)
            Loop(plain, None).backward(i)
            for p, local in zip(plain.parameters(), locals_, strict=True):
                local.grad = local_of(grad_of(p))
                p.grad = None
            other.step()
            overlap.synchronize()
            for p, local in zip(model.parameters(), locals_, strict=True):
                assert torch.equal(local_of(p), local), f"step {i}"


@pytest.mark.parametrize("way", ["backward", "forward"])
@pytest.mark.parametrize("name", [name for name in PLAIN_FAILS if not name.startswith("Adafactor")])
def test_optimizers_whose_kernels_dtensor_lacks(two_ranks: RankPool, way: str, name: str) -> None:
    case = next(case for case in optimizer_cases() if case[0] == name)
    two_ranks.run(unlike_plain, *case[1:], way)


# Everything else about a model and how it is sharded.


class Lora(nn.Module):
    """A frozen layer beside a small one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(24, 24).requires_grad_(False)
        self.down, self.up = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Model(Blocks):
    """Blocks with something odd."""

    def __init__(self, oddity: str = "") -> None:
        super().__init__()
        self.oddity = oddity
        if oddity == "lora":
            self.blocks = nn.ModuleList(Lora() for _ in range(3))
            self.inner.requires_grad_(False)
        elif oddity == "frozen":
            self.blocks[1].requires_grad_(False)
        elif oddity == "unused":
            self.spare = nn.Parameter(torch.ones(3, 3))
            self.blocks[0].register_parameter("spare", nn.Parameter(torch.ones(3, 3)))
        elif oddity == "bfloat16":
            self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.oddity == "bfloat16":
            x = x.to(torch.bfloat16)
        x = self.inner(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False) if self.oddity == "checkpoint" else x + block(x)
            if self.oddity == "twice":
                x = x + block(x)
        return self.outer(x).float()


def root_only(model: Any) -> nn.Module:
    return fully_shard(model)


def with_ignored(model: Any) -> nn.Module:
    # Replicated by hand, as ignored parameters are: the same gradient on all ranks.
    ignored = set(model.outer.parameters())
    fully_shard(model, ignored_params=ignored)
    for p in ignored:
        p.register_hook(lambda g: torch.ones_like(g) * 0.01)
    return model


def compiled(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return nested(model)


def divided(model: Any) -> nn.Module:
    nested(model)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def by_columns(model: nn.Module) -> nn.Module:
    return nested(model, shard_placement_fn=lambda p: Shard(1 if p.dim() > 1 else 0))


def prefetching(model: Any) -> nn.Module:
    nested(model)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    return model


def grouped(model: Any) -> nn.Module:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.inner, model.outer])
    return fully_shard(model)


low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHAPES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "root only": (Model, root_only),
    "resharded after forward": (Model, partial(nested, reshard_after_forward=True)),
    "not resharded after forward": (Model, partial(nested, reshard_after_forward=False)),
    "bf16, reduced in fp32": (Model, partial(nested, mp_policy=low)),
    "bf16, reduced in bf16": (Model, partial(nested, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
    "bf16 parameters": (partial(Model, "bfloat16"), nested),
    "offloaded": (Model, partial(nested, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "divide factor": (Model, divided),
    "ignored": (Model, with_ignored),
    "frozen": (partial(Model, "frozen"), nested),
    "lora": (partial(Model, "lora"), nested),
    "unused": (partial(Model, "unused"), nested),
    "used twice": (partial(Model, "twice"), nested),
    "checkpointed": (partial(Model, "checkpoint"), nested),
    "compiled": (Model, compiled),
    "sharded by columns": (Model, by_columns),
    "prefetched": (Model, prefetching),
    "grouped": (Model, grouped),
}


def one_shape(name: str, way: str) -> None:
    build, shard = SHAPES[name]
    both(way, shard, partial(adamw, foreach=name != "ignored"), build=build)


@pytest.mark.parametrize(("name", "way"), sampled(SHAPES, 5))
def test_models_and_how_they_are_sharded(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_shape, name, way)


def tied(way: str) -> None:
    def step(loop: Loop, i: int) -> None:
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator(here()).manual_seed(i))
        loss_of(loop.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    def shard(model: Any) -> nn.Module:
        fully_shard(model.middle)
        return fully_shard(model)

    both(way, shard, adamw, step, Tied)


@in_every_way
def test_tied_weights(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(tied, way)


# What a loop may do.


def micro_batches(loop: Loop, i: int) -> None:
    for last in (False, False, True):
        loop.model.set_requires_gradient_sync(last)
        loop.backward(3 * i + last)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def held(loop: Loop, i: int) -> None:
    """What ``accumulate()`` is in the plain loop."""
    for number in range(3):
        if loop.overlap is None:
            loop.model.set_requires_gradient_sync(number == 2)
            loop.backward(3 * i + number)
        elif number < 2:
            with loop.overlap.accumulate():
                loop.backward(3 * i + number)
        else:
            loop.backward(3 * i + number)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def counted(loop: Loop, i: int) -> None:
    """What ``accumulation_steps=3`` is in the plain loop."""
    for number in range(3):
        if loop.overlap is None:
            loop.model.set_requires_gradient_sync(number == 2)
        loop.backward(3 * i + number)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def two_losses(loop: Loop, i: int) -> None:
    """Two forwards, one backward."""
    (loop.loss(2 * i) + loop.loss(2 * i + 1)).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def evaluated(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    with torch.no_grad():
        return loop.loss(1000 + i)


def unsharded_by_hand(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    handle = loop.model.blocks[1].unshard(async_op=i % 2 == 0)
    loop.model.unshard()
    if handle is not None:
        handle.wait()
    value = loop.model.blocks[1][1].weight.detach().clone()
    loop.model.blocks[1].reshard()
    return value


def read_whole(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    return loop.model.blocks[0][1].weight.full_tensor()


def read_local(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    with torch.no_grad():
        return loop.model.blocks[0][1].weight.to_local().clone()


def saved(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    return loop.model.state_dict()["blocks.2.3.weight"].to_local().clone()


def kept_gradients(loop: Loop, i: int) -> torch.Tensor:
    """Gradients are read after the step, and zeroed in place."""
    loop.backward(i)
    loop.optimizer.step()
    seen = next(loop.model.parameters()).grad.to_local().clone()
    loop.optimizer.zero_grad(set_to_none=False)
    return seen


def clipped_by_hand(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return whole(norm)


def scheduled(loop: Loop, i: int) -> None:
    loop.learn(i)
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.7


def skipped(loop: Loop, i: int) -> None:
    """A step that is left out."""
    loop.backward(i)
    loop.optimizer.zero_grad()
    loop.learn(i + 100)


def written_between(loop: Loop, i: int) -> None:
    loop.learn(i)
    with torch.no_grad():
        next(loop.model.blocks[0].parameters()).mul_(0.5)


ANY: dict[str, tuple[Callable[[Loop, int], Any], dict[str, Any]]] = {
    "micro-batches": (micro_batches, {}),
    "accumulate()": (held, {}),
    "accumulation_steps": (counted, {"accumulation_steps": 3}),
    "two forwards, one backward": (two_losses, {}),
    "evaluated": (evaluated, {}),
    "unshard()": (unsharded_by_hand, {}),
    "full_tensor() after the step": (read_whole, {}),
    "to_local() after the step": (read_local, {}),
    "state_dict() after the step": (saved, {}),
    "scheduled": (scheduled, {}),
    "written after the step": (written_between, {}),
}
EXACT: dict[str, tuple[Callable[[Loop, int], Any], dict[str, Any]]] = {
    "gradients read after the step": (kept_gradients, {}),
    "clipped by the loop": (clipped_by_hand, {}),
    "a step left out": (skipped, {}),
}


def one_loop(name: str, way: str) -> None:
    step, options = {**ANY, **EXACT}[name]
    both(way, nested, adamw, step, **options)


@pytest.mark.parametrize(("name", "way"), sampled(ANY, 3))
def test_loops(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_loop, name, way)


def test_a_saved_shard_is_that_of_the_step(two_ranks: RankPool) -> None:
    """Of a step that was put off: who reads a shard waits for its update, which looks at the shard itself."""
    two_ranks.run(one_loop, "state_dict() after the step", "forward")


def in_layers(model: Any) -> nn.Module:
    """The root has no parameters of its own: FSDP2 gathers for its layers alone."""
    for layer in (model.inner, *model.blocks, model.outer):
        fully_shard(layer)
    return fully_shard(model)


def evaluated_and_trained(way: str) -> None:
    def step(loop: Loop, i: int) -> Any:
        with torch.no_grad():
            found = loop.model(batch(50 + i)[0])
        loop.learn(i)
        with torch.inference_mode():
            loop.model(batch(60 + i)[0])
        return found

    loop = both(way, in_layers, adamw, step)
    assert loop.overlap.redo_count == 0


@in_every_way
def test_evaluated_before_and_after_steps(two_ranks: RankPool, way: str) -> None:
    """FSDP2 would gather for the evaluation's layers at the end of the next backward, which has stepped them."""
    two_ranks.run(evaluated_and_trained, way)


@pytest.mark.parametrize("way", ["forward", "late", "undo"])
@pytest.mark.parametrize("name", list(EXACT))
def test_loops_that_use_gradients(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_loop, name, way)


# Clipping and loss scaling.


def clips(clip: Any, loop: Loop, i: int, change: Callable[[Any], object] = id) -> torch.Tensor:
    loop.backward(i)
    change(next(loop.model.parameters()))
    if loop.overlap is None:
        if isinstance(clip, instep.ClipValue):
            nn.utils.clip_grad_value_(loop.model.parameters(), clip.clip_value)
            norm = torch.zeros(())
        else:
            norm = whole(nn.utils.clip_grad_norm_(loop.model.parameters(), clip.max_norm, clip.norm_type))
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    if loop.overlap is not None:
        norm = loop.overlap.grad_norm if isinstance(clip, instep.ClipNorm) else torch.zeros(())
        assert type(norm) is torch.Tensor
    return norm


def clipped(way: str, clip: Any, foreach: bool) -> None:
    loop = both(way, nested, partial(adamw, foreach=foreach), partial(clips, clip), clip=clip)
    if way == "undo" and isinstance(clip, instep.ClipNorm) and clip.max_norm < 3:
        assert loop.overlap.redo_count >= 1


@pytest.mark.parametrize("foreach", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "clip",
    [
        instep.ClipNorm(0.3),
        instep.ClipNorm(3.0),
        instep.ClipNorm(1.0, norm_type=1.0),
        instep.ClipNorm(0.01, norm_type=float("inf")),
        instep.ClipValue(0.01),
    ],
    ids=repr,
)
@pytest.mark.parametrize("way", ["forward", "late", "undo"])
def test_clipping(two_ranks: RankPool, way: str, clip: Any, foreach: bool) -> None:
    two_ranks.run(clipped, way, clip, foreach)


def multiplied(weight: Any) -> None:
    weight.grad.mul_(3.0)


def multiplied_through_another_reference(weight: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # as one that a hook has kept: ``.grad`` is not asked for again
        gradient = weight.grad
    gradient.mul_(3.0)


def replaced(weight: Any) -> None:
    weight.grad = torch.full_like(weight, 0.1)


def cleared(weight: Any) -> None:
    weight.grad = None


def added_to_by_a_backward_of_the_weight_alone(weight: Any) -> None:
    weight.square().sum().backward()


def clipped_after(way: str, change: Callable[[Any], object], max_norm: float) -> None:
    clip = instep.ClipNorm(max_norm)
    both(way, nested, adamw, partial(clips, clip, change=change), clip=clip)


@pytest.mark.parametrize("max_norm", [0.3, 1e6])
@pytest.mark.parametrize(
    "change",
    [multiplied, multiplied_through_another_reference, replaced, cleared, added_to_by_a_backward_of_the_weight_alone],
)
@pytest.mark.parametrize("way", ["forward", "late", "undo"])
def test_a_gradient_changed_after_it_was_measured(two_ranks: RankPool, way: str, change: Any, max_norm: float) -> None:
    """On several ranks norms are taken in backward, with ``forward`` and ``late``, too."""
    two_ranks.run(clipped_after, way, change, max_norm)


def test_clip_value_in_backward(two_ranks: RankPool) -> None:
    two_ranks.run(clipped, "backward", instep.ClipValue(0.01), True)


def scaled(way: str) -> None:
    def step(loop: Loop, i: int) -> torch.Tensor:
        scaler = scalers[loop.model]
        loss = scaler.scale(loop.loss(i))
        if i == 2:
            loss = loss * torch.inf
        loss.backward()
        scaler.unscale_(loop.optimizer)
        norm = whole(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3))
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        return norm.nan_to_num()

    scalers: Any = {}

    def build() -> nn.Module:
        model = Model()
        scalers[model] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        return model

    torch.manual_seed(0)
    plain = nested(build())
    torch.manual_seed(0)
    model = nested(build())
    optimizers = [adamw(plain), adamw(model)]
    scaler = {"scaler": scalers[model]} if way == "undo" else {}
    with instep.attach(model, optimizers[1], **WAYS[way], **scaler) as overlap:
        for i in range(5):
            assert torch.equal(step(Loop(plain, optimizers[0]), i), step(Loop(model, optimizers[1]), i))
            overlap.synchronize()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(local_of(p), local_of(q)), f"step {i}"


@pytest.mark.parametrize("way", ["forward", "undo"])
def test_a_loss_scale(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(scaled, way)


# What a user may get wrong.


def said(error: type[Exception], do: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        do()
    return str(caught.value)


def mistakes() -> list[str]:
    model = nested(Model())
    optimizer = adamw(model)
    found = [
        said(AttachError, lambda: instep.attach(model, optimizer, bucket_bytes=1000, schedule="backward")),
        said(AttachError, lambda: instep.attach(model, optimizer, mixed_precision=low, schedule="backward")),
        said(
            AttachError,
            lambda: instep.attach(model, optimizer, clip=instep.ClipNorm(1.0, mode="two_pass"), schedule="backward"),
        ),
        said(
            AttachError,
            lambda: instep.attach(model, optimizer, comm_hook=(None, lambda state, bucket: state), schedule="backward"),
        ),
    ]
    early = Model()
    overlap = instep.attach(early, adamw(early), schedule="backward")
    nested(early)
    found.append(said(instep.errors.StaleAttachmentError, lambda: early(batch(0)[0])))
    overlap.detach()
    stale = Model()
    before = adamw(stale)
    nested(stale)
    found.append(said(AttachError, lambda: instep.attach(stale, before, schedule="backward")))
    return found


def test_mistakes_at_attach(two_ranks: RankPool) -> None:
    for found in two_ranks.run(mistakes):
        assert "bucket_bytes=1000 does not go with fully_shard" in found[0]
        assert "fully_shard(…, mp_policy=…)" in found[1]
        assert "'two_pass'" in found[2]
        assert "schedule='forward'" in found[2]
        assert "comm_hook does not go with a model that has no DistributedDataParallel" in found[3]
        assert "shard first, then build the optimizer, then attach" in found[4]
        assert "shard first, then build the optimizer, then attach" in found[5]


def other_dtypes() -> list[str]:
    """FSDP2 keeps ``grad_dtype`` since torch 2.15; before, it is there if it was set after ``fully_shard``."""
    model = nested(Model()).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ways = [WAYS["backward"], WAYS["undo"], WAYS["forward"]]
    found = [said(AttachError, partial(instep.attach, model, optimizer, **options)) for options in ways]
    instep.attach(model, optimizer, defer=False).detach()  # as the message says
    return found


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has none")
def test_gradients_of_another_dtype(two_ranks: RankPool) -> None:
    for found in two_ranks.run(other_dtypes):
        assert all(message.endswith("Use schedule='forward' with defer=False") for message in found)


def mistakes_in_the_loop() -> list[str]:
    found = []

    def fresh() -> Loop:
        model = nested(Model())
        loop = Loop(model, adamw(model))
        loop.overlap = instep.attach(model, loop.optimizer, schedule="backward")
        loop.learn(0)
        return loop

    loop = fresh()
    loop.backward(1)
    found.append(said(AccumulationError, lambda: loop.backward(2)))
    loop = fresh()
    loop.backward(1)
    found.append(said(SpentGradientError, lambda: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)))
    loop = fresh()
    loop.backward(1)
    found.append(said(UncommittedStepError, lambda: next(loop.model.parameters()).full_tensor()))
    loop = fresh()
    loop.backward(1)
    loop.optimizer.step()
    found.append(said(SpentGradientError, lambda: loop.backward(2)))
    for overlap in attachments():
        overlap.detach()
    return found


def test_mistakes_in_the_loop(two_ranks: RankPool) -> None:
    for found in two_ranks.run(mistakes_in_the_loop):
        assert "already updated the weights" in found[0] or "has updated" in found[0]
        assert "clip" in found[1]
        assert "was used between backward() and optimizer.step()" in found[2]
        assert "zero_grad()" in found[3]


def spent_as_a_dtensor() -> list[str]:
    model = nested(Model())
    loop = Loop(model, adamw(model))
    loop.overlap = instep.attach(model, loop.optimizer, schedule="backward")
    loop.backward(0)
    gradient: Any = next(model.parameters()).grad
    uses = (
        lambda: gradient.to_local(),
        lambda: gradient.full_tensor(),
        lambda: gradient.placements,
        lambda: gradient.device_mesh,
        lambda: gradient._local_tensor,
        lambda: gradient.redistribute(placements=()),
    )
    found = [said(SpentGradientError, use) for use in uses]
    assert not hasattr(gradient, "to_local")
    loop.optimizer.step()
    found.append(said(SpentGradientError, lambda: gradient.to_local()))
    loop.overlap.detach()
    return found


def test_a_spent_gradient_is_asked_as_a_dtensor(two_ranks: RankPool) -> None:
    for *found, after in two_ranks.run(spent_as_a_dtensor):
        assert all("was called on the gradient of" in one and "already" not in one for one in found)
        assert "DTensor.placements" in found[2]
        assert "from a step that is over" in after


def freed(replicas: int) -> tuple[int, int, int]:
    """The most groups whose gradients were alive at once, those alive after backward, and how many groups there are."""
    model: Any = nested(Model(), **({} if replicas == 1 else {"mesh": mesh(replicas, 1)}))
    optimizer = adamw(model)
    groups = [list(block.parameters()) for block in model.blocks]
    groups.append([*model.inner.parameters(), *model.outer.parameters()])
    alive: list[weakref.ref[torch.Tensor]] = []
    number_of: dict[int, int] = {id(p): n for n, group in enumerate(groups) for p in group}
    tensor_of: dict[int, int] = {}
    most = 0

    def look(parameter: torch.Tensor) -> None:
        nonlocal most
        local = local_of(grad_of(parameter))
        # All gradients of a group are views of what its reduction has put out.
        base = local._base if local._base is not None else local
        alive.append(weakref.ref(base))
        tensor_of[id(base)] = number_of[id(parameter)]
        most = max(most, len({tensor_of[id(ref())] for ref in alive if ref() is not None}))

    for parameter in model.parameters():  # before attach: before the last of a bucket is stepped
        parameter.register_post_accumulate_grad_hook(look)
    with instep.attach(model, optimizer, schedule="backward"):
        for i in range(2):
            Loop(model, optimizer).backward(i)
            # gloo's own thread lets go of what it has reduced a moment after that is done.
            patience = time.monotonic() + net.SECONDS / 10
            while (left := sum(ref() is not None for ref in alive)) and time.monotonic() < patience:
                time.sleep(0.001)
            optimizer.step()
            optimizer.zero_grad()
    return most, left, len(groups)


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_are_freed_group_by_group(two_ranks: RankPool, replicas: int) -> None:
    """Of HSDP FSDP2 has the last one's until its hooks are through."""
    at_a_time = 1 if here().type == "cpu" else 2  # on an accelerator one waits for the side stream
    assert two_ranks.run(freed, replicas) == [(at_a_time + (replicas > 1), 0, 4)] * 2
