"""Small training programs, drawn at random: a model, an optimizer, a loop. Each is run plain and attached."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

import instep
from instep import ClipNorm, ClipValue
from instep._torch.versions import memory_of
from instep.errors import InstepError
from instep.sources.fsdp.modules import put_shards_in_place
from instep_tools.harness import first_difference, training_state
from tests.cases import optimizer_cases
from tests.devices import here
from tests.parity.edits import EDITS
from tests.parity.keyed import SEED, Langevin, LangevinByKeys
from tests.parity.made import Made, Recipe
from tests.parity.outputs import OUTPUTS
from tests.parity.zoo import into_training, maker

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {name: (cls, kwargs) for name, cls, kwargs in optimizer_cases()}
DRAWING = "Langevin"
"""It draws: attached with ``random="keyed"``, and in the plain loop by keys that it makes itself."""
OPTIMIZERS[DRAWING] = Langevin, {"lr": 0.05}


@dataclass(frozen=True)
class Step:
    """One optimizer step: which layers each micro-batch runs, what is frozen meanwhile, and what else happens.

    Attributes:
        overflow: an infinite loss.
        event: ``"skip"``: the loop leaves out ``optimizer.step()``. Between the step and the next: ``"evaluate"``,
            ``"read"`` or ``"write"`` weights, ``"reload"`` model and optimizer.
        edits: at which moment the loop does what to its optimizer, gradients or weights (``edits.py``).
    """

    micro_batches: tuple[tuple[bool, ...], ...]
    frozen: frozenset[int] = frozenset()
    overflow: bool = False
    event: str | None = None
    edits: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Program:
    """A model, an optimizer, a loop.

    Attributes:
        recipe: of a hand-written optimizer, in place of the one named.
        call: how the loop calls the model (``CALLS``), ``"pipeline"``: all forwards before all backwards.
        output: what the model returns (``outputs.py``).
        closure: whether ``step()`` is given the forward and backward.
        scale: of the loss, and so of all gradients.
        leave_out: whether the optimizer is built without the last parameter, for an edit to add.
        every: whether the loops are compared after every step, which finishes all updates, or after the last.
        no_sync: under DDP, whether all micro-batches are in ``no_sync()``.
        autocast: around which parts of the loop: ``"backward"``, ``"step"``, both (``"all"``), or none (``""``).
    """

    optimizer: str
    width: int
    depth: int
    steps: tuple[Step, ...]
    bias: bool = True
    residual: bool = False
    tied: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    groups: tuple[float, ...] = (1.0,)
    decay: float | None = None
    bucket_bytes: int = 1
    seed: int = 0
    way: str = "backward"
    clip: str | None = None
    limit: float = 0.1
    accumulate: str = "hold"
    scaler: str | None = None
    give_scaler: bool = True
    clear: str = "none"
    recipe: Recipe | None = None
    call: str = "whole"
    output: str = "tensor"
    closure: bool = False
    nonfinite: str = "allow"
    scale: float = 1.0
    leave_out: bool = False
    every: bool = True
    no_sync: bool = False
    autocast: str = ""
    offload: bool = False


WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "two_pass": {"schedule": "backward"},
    "beside": {"schedule": "backward", "defer": True},
    "late beside": {"schedule": "backward", "defer": True},  # as "late"
    "forward": {"schedule": "forward", "defer": True},
    "late": {"schedule": "forward", "defer": True},  # no update runs before somebody waits for it
    "shard_state": {"schedule": "backward", "shard_state": True},
    "undo": {"schedule": "backward", "undo": True},
    "undo on the host": {"schedule": "backward", "undo": "host"},
}
BESIDE = ("beside", "late beside")
SPENDING = ("backward", "two_pass", "shard_state", *BESIDE)
RIGHT = ("backward", "two_pass", "beside", "forward", "undo", "undo on the host")


@st.composite
def programs(draw: Any, ways: tuple[str, ...] = RIGHT) -> Program:
    optimizer = draw(st.sampled_from(tuple(OPTIMIZERS)))
    # torch's SGD in bfloat16 is left out of two forms. Fused on CPU: parameters stay unwritten and momentum
    # uninitialised, so that two plain loops differ. Foreach: in a step where one parameter gets its first momentum,
    # all others are updated with other kernels, which differ in the last bit in bfloat16 (docs/limits.md).
    coupled = optimizer.startswith("SGD") and not optimizer.endswith("for-loop")
    dtypes = [torch.float32, torch.float64] if coupled else [torch.float32, torch.float64, torch.bfloat16]
    depth = draw(st.integers(1, 6))
    layers = st.tuples(*[st.sampled_from([True, True, True, False])] * depth)
    way = draw(st.sampled_from(ways))
    if way in BESIDE and optimizer == DRAWING:
        way = "backward"
    # During backward the gradients are spent, and the loop has to call step() after each.
    free = way not in SPENDING
    anywhere = [None, "norm", "value", "norm in the loop", "value in the loop"]
    clips: dict[str, list[str | None]] = {
        "backward": [None, "value"],
        "two_pass": ["norm"],
        **{beside: [None] for beside in BESIDE},
    }
    clip = clips.get(way, anywhere)
    between = [None, None, "evaluate", "read", "write", "reload"]
    step = st.builds(
        Step,
        st.lists(layers, min_size=1, max_size=4).map(tuple),
        st.frozensets(st.integers(0, depth - 1), max_size=2),
        st.sampled_from([False, False, True]) if free else st.just(False),
        st.sampled_from([*between, "skip"] if free else between),
    )
    # Fused SGD leaves its momentum uninitialised when its first step is skipped: two plain loops differ.
    scaled = free and optimizer not in ("SGD-1-fused", "SGD-2-fused") and draw(st.booleans())
    if scaled:
        dtypes = dtypes[:1]
    return Program(
        way=way,
        clip=draw(st.sampled_from(clip)),
        limit=draw(st.sampled_from([1e-3, 0.1, 10.0, 1e4])),
        accumulate=draw(st.sampled_from(["hold", "micro_batches", *(["plain"] if free else [])])),
        scaler=draw(st.sampled_from(["step", "unscale"])) if scaled else None,
        give_scaler=draw(st.booleans()),
        # A step that GradScaler skips is not clipped by instep: infinite gradients are left for who does not clear.
        clear=draw(st.sampled_from(["none", "zeros"] + ["never"] * (not scaled))) if free else "none",
        optimizer=optimizer,
        width=draw(st.integers(1, 8)),
        depth=depth,
        steps=tuple(draw(st.lists(step, min_size=1, max_size=5))),
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        tied=tuple(draw(st.lists(st.integers(0, depth - 1), max_size=2))),
        dtype=draw(st.sampled_from(dtypes)),
        groups=tuple(draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3))),
        decay=draw(st.sampled_from([None, 0.5, 0.9])),
        bucket_bytes=draw(st.sampled_from([1, 64, 512, 25_000_000])),
        seed=draw(st.integers(0, 3)),
        offload=here().type != "cpu" and way not in ("shard_state", *BESIDE) and draw(st.booleans()),
    )


class Net(nn.Module):
    stored: torch.Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.residual = program.residual
        self.wrap, self.take = OUTPUTS[program.output]
        self.layers = nn.ModuleList(
            nn.Linear(program.width, program.width, bias=program.bias) for _ in range(program.depth)
        )
        for layer in program.tied:
            self.layers[layer].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor, run: tuple[bool, ...]) -> Any:
        return self.wrap(self, self.parts(x, run))

    def parts(self, x: torch.Tensor, run: tuple[bool, ...], call: Callable[..., Any] = lambda m, x: m(x)) -> Any:
        for layer, runs in zip(self.layers, run, strict=True):
            if runs:
                y = torch.tanh(call(layer, x))
                x = x + y if self.residual else y
        return x


def _functional(loop: "Loop", x: torch.Tensor, run: tuple[bool, ...]) -> Any:
    named = dict(loop.model.named_parameters())
    return loop.net.take(loop.net, torch.func.functional_call(loop.model, named, (x, run)))


def _checkpointed(loop: "Loop", x: torch.Tensor, run: tuple[bool, ...]) -> Any:
    return loop.net.take(loop.net, torch.utils.checkpoint.checkpoint(loop.model, x, run, use_reentrant=False))


# The model; its forward alone; its layers; not even these.
CALLS: dict[str, Callable[["Loop", torch.Tensor, tuple[bool, ...]], Any]] = {
    "whole": lambda loop, x, run: loop.net.take(loop.net, loop.model(x, run)),
    "twice": lambda loop, x, run: sum(loop.net.take(loop.net, loop.model(x * i, run)) for i in (1, 2)),
    "forward": lambda loop, x, run: loop.net.take(loop.net, loop.model.forward(x, run)),
    "parts": lambda loop, x, run: loop.net.parts(x, run),
    "pipeline": lambda loop, x, run: loop.net.parts(x, run),
    "weights": lambda loop, x, run: loop.net.parts(x, run, lambda m, x: linear(x, m.weight, m.bias)),
    "functional": _functional,
    "checkpointed": _checkpointed,
}


class Loop:
    """A program's loop, plain or attached. ``wrap`` may put the model into DistributedDataParallel."""

    def __init__(self, program: Program, attach: bool, wrap: Any = lambda model: model, rank: int = 0) -> None:
        torch.manual_seed(program.seed)
        self.program = program
        self.attaches = attach
        self.rank = rank
        self.number = 0
        self.seen: torch.Tensor | None = None
        self.net: Net = Net(program).to(program.dtype)
        self.model: Any = wrap(self.net)
        self.left_out: list[Any] = []
        self.optimizer = self._make_optimizer()
        self.scheduler = None if program.decay is None else ExponentialLR(self.optimizer, program.decay)
        # Odd, and of few steps: neither power of two nor out of the way.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_factor=1.5, growth_interval=2)
        self.norm: torch.Tensor | None = None
        self.returned: Any = None
        self.attached_in = -1
        self.at: Callable[[str], object] = lambda moment: None
        self._local = wrap is unwrapped
        self.overlap = self._attach() if attach else None

    def _make_optimizer(self) -> Any:
        program = self.program
        named = list(self.model.named_parameters())
        if program.leave_out and len(named) > 1:
            self.left_out = [named.pop()[1]]
        own = OPTIMIZERS.get(program.optimizer)
        rate = own[1]["lr"] if own else 0.01
        count = len(program.groups)
        groups: list[dict[str, Any]] = [
            {"params": named[i::count], "lr": rate * scale} for i, scale in enumerate(program.groups) if named[i::count]
        ]
        if program.recipe is not None:
            return Made(groups, rate, program.recipe)
        unnamed = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        if own is None:
            optimizer = maker(program.optimizer)(unnamed)
            into_training(optimizer)
            return optimizer
        if program.optimizer == DRAWING and not self.attaches:
            names = {id(p): name.removeprefix("module.") for name, p in self.model.named_parameters()}
            return LangevinByKeys(unnamed, names, **own[1])
        return own[0](unnamed, **own[1])

    def _attach(self) -> instep.Attachment:
        program = self.program
        options = dict(WAYS[program.way])
        if self._local:
            options["bucket_bytes"] = program.bucket_bytes
        if program.clip == "norm":
            options["clip"] = ClipNorm(program.limit, mode="two_pass" if program.way == "two_pass" else "exact")
        elif program.clip == "value":
            options["clip"] = ClipValue(program.limit)
        if program.scaler is not None and program.give_scaler:
            options["scaler"] = self.scaler
        if program.nonfinite != "allow":
            options["nonfinite"] = program.nonfinite
        if program.optimizer == DRAWING and program.recipe is None:
            options |= {"random": "keyed", "seed": SEED}
        if program.offload:
            options["offload"] = "host"
        return instep.attach(self.model, self.optimizer, **options)

    def attach_again(self) -> None:
        self.norm = None  # a new attachment has taken no step
        self.attached_in = self.number
        if isinstance(self.optimizer, LangevinByKeys):
            self.optimizer.number = 0
        if self.overlap is not None:
            self.overlap.detach()
            self.overlap = self._attach()

    def step(self, number: int) -> None:
        step = self.program.steps[number]
        self.number = number
        put_shards_in_place(self.model)
        seed_everything(number)
        for i, layer in enumerate(self.net.layers):
            layer.requires_grad_(i not in step.frozen)
        self._at("begin")
        if self.program.closure:
            with self._autocast("step"):
                self._step(lambda: self._forward_and_backward(step))
        else:
            with self._autocast("backward"):
                self._forward_and_backward(step)
            if step.event != "skip":
                with self._autocast("step"):
                    self._step()
        if step.event != "skip" and self.scheduler is not None:
            self.scheduler.step()
        self._at("step")
        if step.event == "skip" or self.program.clear != "never":
            self.optimizer.zero_grad(set_to_none=step.event == "skip" or self.program.clear == "none")
        self._at("end")
        self._between(step.event)

    def _autocast(self, part: str) -> AbstractContextManager[Any]:
        if self.program.autocast in (part, "all"):
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    def _at(self, moment: str) -> None:
        put_shards_in_place(self.model)  # as who looks at the plain loop's weights does; torch may leave gathered ones
        self.at(moment)
        for when, edit in self.program.steps[self.number].edits:
            if when == moment:
                EDITS[edit](self)
                self.at(moment)

    def _forward_and_backward(self, step: Step) -> torch.Tensor | None:
        loss: torch.Tensor | None = None
        forwards: Iterable[tuple[int, Any]] = enumerate(step.micro_batches)
        if self._by_the_verb(step):
            return self._micro_batches(step)
        if self.program.call == "pipeline":
            losses = [self._loss(step, *batch) for batch in forwards]
            forwards = enumerate(losses)
        for micro, given in forwards:
            with self._hold(micro == len(step.micro_batches) - 1):
                loss = given if isinstance(given, torch.Tensor) else self._loss(step, micro, given)
                if micro == len(step.micro_batches) - 1:
                    self._at("forward")
                if loss.requires_grad:
                    self._backward(loss)
        self._at("backward")
        return None if loss is None else loss.detach()

    def _micro_batches(self, step: Step) -> torch.Tensor | None:
        """By the verb."""
        assert self.overlap is not None

        def loss_of(given: tuple[int, tuple[bool, ...]]) -> torch.Tensor:
            loss = self._loss(step, *given)
            return loss if self.program.scaler is None else self.scaler.scale(loss)

        losses = self.overlap.micro_batches(loss_of, list(enumerate(step.micro_batches)))
        self._at("forward")
        self._at("backward")
        return losses[-1]

    def _by_the_verb(self, step: Step) -> bool:
        """Whether the attached loop runs this step by ``micro_batches()``, where each of them has a graph, and no
        gradient is left of the step before."""
        graphs = (any(p.requires_grad for p in self._used(run)) for run in step.micro_batches)
        asked = self.program.accumulate == "micro_batches" and self.program.clear == "none"
        return asked and self.overlap is not None and all(graphs)

    def _used(self, run: tuple[bool, ...]) -> Iterator[nn.Parameter]:
        return (p for layer, runs in zip(self.net.layers, run, strict=True) if runs for p in layer.parameters())

    def _loss(self, step: Step, micro: int, run: tuple[bool, ...]) -> torch.Tensor:
        generator = torch.Generator(here()).manual_seed(1000 * self.rank + 10 * self.number + micro)
        x = torch.randn(3, self.program.width, generator=generator, dtype=torch.float64).to(self.program.dtype)
        loss: torch.Tensor = CALLS[self.program.call](self, x, run).square().sum()
        if self.program.scale != 1.0:
            loss = loss * self.program.scale
        return loss * float("inf") if step.overflow else loss

    def _backward(self, loss: torch.Tensor) -> None:
        if self.program.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.overlap is None:
            loss.backward()
        else:
            self.overlap.backward(loss)

    def _step(self, *closure: Callable[[], Any]) -> None:
        program = self.program
        in_the_loop = program.clip is not None and program.clip.endswith("in the loop")
        # What attach clips is what it is attached to: a parameter in no optimizer has a gradient, too.
        parameters = list(self.model.parameters()) if in_the_loop else self._optimized()
        clips = program.clip is not None and (self.overlap is None or in_the_loop)
        if program.scaler == "unscale" or (program.scaler and clips):
            self.scaler.unscale_(self.optimizer)
        if self._left_out() and not in_the_loop:
            return
        if clips and str(program.clip).startswith("norm"):
            self.norm = torch.nn.utils.clip_grad_norm_(parameters, program.limit)
        elif clips:
            torch.nn.utils.clip_grad_value_(parameters, program.limit)
        if self._left_out():
            return
        if program.scaler is None:
            self.returned = self.optimizer.step(*closure)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _left_out(self) -> bool:
        """Whether the plain loop leaves a step out for a gradient that is not finite."""
        if self.program.nonfinite == "allow" or self.overlap is not None:
            return False
        gradients = [p.grad for p in self._optimized() if p.grad is not None]
        return not all(bool(_of_all_ranks(g).isfinite().all()) for g in gradients)

    def _optimized(self) -> list[torch.Tensor]:
        """The model's parameters, in its order, that the optimizer has."""
        found = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [p for p in self.model.parameters() if id(p) in found]

    @torch.no_grad()
    def _between(self, event: str | None) -> None:
        layer: Any = self.net.layers[-1]
        if event == "evaluate":
            self.seen = self.net.take(self.net, self.net(*self.example()))
        elif event == "read":
            self.seen = layer.weight.sum()
        elif event == "write":
            layer.weight.mul_(0.75)
        elif event == "reload":
            self.net.load_state_dict(copy.deepcopy(self.net.state_dict()))
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def _hold(self, last: bool) -> Any:
        if self.program.no_sync and not self._local:
            return self.model.no_sync()
        if last or self.program.accumulate == "plain":
            return nullcontext()
        if self.overlap is not None:
            return self.overlap.accumulate()
        return without_reduction(self.model) if isinstance(self.model, FSDPModule) else self._no_sync()

    def _no_sync(self) -> AbstractContextManager[Any]:
        return getattr(self.model, "no_sync", nullcontext)()

    def state(self) -> Iterator[tuple[str, Any]]:
        """Of what is spread over ranks this rank's part."""
        if self.overlap is not None:
            self.overlap.synchronize()
        yield from (
            (name, memory_of(value) if isinstance(value, torch.Tensor) else value) for name, value in self._all()
        )

    def _all(self) -> Iterator[tuple[str, Any]]:
        yield from self.trained()
        yield "torch's generator", torch.get_rng_state()
        kind: Any
        keys: Any
        kind, keys, *rest = np.random.get_state()
        yield "NumPy's generator", (kind, keys.tobytes(), *rest)
        yield "Python's generator", random.getstate()
        yield "read", self.seen
        if self.program.nonfinite != "skip":  # the plain loop does not call step() where instep leaves out what it does
            yield "what step() returned", self.returned
        # What was applied before it was attached is not in the norm of an attachment.
        has_norm = self.program.way not in SPENDING or self.attached_in != self.number
        if (
            self.program.clip == "norm"
            and self.program.scaler is None
            and self.program.nonfinite == "allow"
            and has_norm
        ):
            yield "norm", self.norm if self.overlap is None else self.overlap.grad_norm
        if self.program.way not in SPENDING:
            for name, parameter in self.model.named_parameters():
                yield f"gradient of {name}", parameter.grad

    def example(self) -> tuple[torch.Tensor, tuple[bool, ...]]:
        """Something to call the model with."""
        return torch.ones(1, self.program.width, dtype=self.program.dtype), (True,) * self.program.depth

    def trained(self) -> Iterator[tuple[str, Any]]:
        """What training changes."""
        if self.program.way == "shard_state":  # the optimizer's own is this rank's part
            yield from self.model.named_parameters()
        else:
            for name, value in training_state(self.model, self.optimizer):
                yield from _opened(name, value)
        if isinstance(self.optimizer, Made):
            yield from self.optimizer.outside()
        yield "scale", self.scaler.get_scale()


def _opened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of a package holds that has no equality of its own."""
    if hasattr(value, "__dict__") and type(value).__eq__ is cast(Any, object.__eq__) and not callable(value):
        for key, item in vars(value).items():
            yield from _opened(f"{name}.{key}", item)
    else:
        yield name, value


def _of_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def unwrapped(model: nn.Module) -> nn.Module:
    return model


def run(program: Program) -> None:
    """Fail at the first difference between the two loops."""
    _lockstep(program, Loop(program, False, unwrapped), Loop(program, True, unwrapped))


def run_on_this_rank(program: Program, view: bool) -> None:
    """The same under DistributedDataParallel."""
    rank = torch.distributed.get_rank()
    program, wrap = on_this_rank(program, view, find_unused=True)
    _lockstep(program, Loop(program, False, wrap, rank), Loop(program, True, wrap, rank))


def on_this_rank(program: Program, view: bool, find_unused: bool) -> tuple[Program, Callable[[nn.Module], nn.Module]]:
    """What DistributedDataParallel can run, which takes no freezing after it is built, and how to build it.

    With ``find_unused`` layers but the first are used or not, differently on each rank; without, all are used.
    """
    rank = torch.distributed.get_rank()

    def used(run: tuple[bool, ...]) -> tuple[bool, ...]:
        return (True, *run[1 + rank :], *run[1 : 1 + rank]) if find_unused else (True,) * len(run)

    steps = tuple(
        replace(step, micro_batches=tuple(map(used, step.micro_batches)), frozen=frozenset()) for step in program.steps
    )

    def wrap(net: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            net,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=view,
            bucket_cap_mb=program.bucket_bytes / 2**20,
        )

    return replace(program, steps=steps), wrap


def sharded(net: Any, nested: bool) -> nn.Module:
    """With FSDP2: each layer by itself, and the rest; or all together."""
    for layer in net.layers if nested else ():
        fully_shard(layer)
    return fully_shard(net)


@contextmanager
def without_reduction(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _lockstep(program: Program, plain: Loop, attached: Loop) -> None:
    assert attached.overlap is not None
    try:
        for number in range(len(program.steps)):
            try:
                plain.step(number)
            except (TypeError, AssertionError, RuntimeError):
                # torch's fused SGD fails on a parameter whose first gradient comes later than another's; GradScaler
                # and clip_grad_value_ where there are no gradients.
                return
            try:
                attached.step(number)
            except TypeError:
                # The same of fused SGD, met by the trial step of a step that the plain loop leaves out.
                assert program.optimizer in ("SGD-1-fused", "SGD-2-fused")
                assert program.steps[number].event == "skip"
                return
            difference = first_difference(plain.state(), attached.state())
            assert difference is None, f"after step {number + 1}: {difference}"
    except InstepError as error:
        raise AssertionError(f"refused a program that is right: {error!r}") from error
    finally:
        attached.overlap.detach()
