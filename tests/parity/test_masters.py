"""``instep.masters``: weights, masters and state are, bit for bit, those of a loop that keeps masters by hand.

That loop: gradients of the half-precision weights are cast into the masters' ``.grad``, an ordinary optimizer steps the
masters, and they are copied into the weights.
"""

import abc
import copy
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW

import instep
from instep import master_weights
from instep._optim.kernels import MastersCall
from instep._optim.proved import is_proved
from instep.errors import AttachError, StaleMasterError
from tests.devices import here, on_cpu_only

HALF, HALVES = torch.bfloat16, (torch.bfloat16, torch.float16)
SMALL = 700
"""Bytes of a bucket: several in the model."""
WAYS: dict[str, dict[str, Any] | None] = {
    "not attached": None,
    "default": {},
    "backward": {"schedule": "backward", "bucket_bytes": SMALL},
    "beside": {"schedule": "backward", "defer": True, "bucket_bytes": SMALL},
    "undo": {"schedule": "backward", "undo": True, "bucket_bytes": SMALL},
    "deferred": {"schedule": "forward", "defer": True, "bucket_bytes": SMALL},
}
in_every_way = pytest.mark.parametrize("way", WAYS)


class Net(nn.Module):
    """With a tied weight, one that is never used, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.tied = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.middle, self.outer = nn.Linear(16, 16), nn.Linear(16, 4, bias=False)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(16, 16)
        self.tied.weight = self.middle.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x.to(self.inner.weight.dtype)))
        y = self.norm(y.to(self.norm.weight.dtype)).to(y.dtype)
        y = torch.tanh(self.tied(torch.tanh(self.middle(self.frozen(y)))))
        return self.outer(y).float()


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    x: torch.Tensor = torch.randn(6, 8, generator=torch.Generator().manual_seed(i))
    return model(x.to(here())).square().mean() * 4.0


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        fp32: parts of the model that are in fp32.
        wide: whether gradients of half-precision weights are.
        groups: two, with other settings.
        micro: backwards of a step.
    """

    cls: Any = AdamW
    settings: Mapping[str, Any] = field(default_factory=dict)
    half: torch.dtype = HALF
    fp32: Sequence[str] = ()
    groups: bool = False
    scheduler: bool = False
    micro: int = 1
    matrices: bool = False
    wide: bool = False
    steps: int = 5


def build(run: Run) -> Net:
    torch.manual_seed(1)
    model = Net().to(here(), run.half)
    for name in run.fp32:
        model.get_submodule(name).float()
    if run.matrices:
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p.ndim == 2)
    return model


class Lane:
    """A run of a loop.

    Attributes:
        held: what the optimizer holds in the place of each trained parameter.
    """

    def __init__(self, run: Run, *, by_hand: bool = False, options: Mapping[str, Any] | None = None) -> None:
        self.run, self.by_hand = run, by_hand
        self.model = build(run)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.held = self.trained
        cls = run.cls if by_hand else instep.masters(run.cls, gradients="float32" if run.wide else None)
        for p in self.trained if by_hand and run.wide else ():
            if p.dtype in HALVES:
                vars_of: Any = p
                vars_of.grad_dtype = torch.float32
        if by_hand:
            self.held = [nn.Parameter(p.detach().float()) if p.dtype in HALVES else p for p in self.trained]
        groups: list[dict[str, Any]] = [{"params": self.held}]
        if run.groups:
            groups = [
                {"params": [p for p in self.held if p.ndim > 1]},
                {"params": [p for p in self.held if p.ndim < 2], "lr": 3e-2},
            ]
        self.optimizer: Any = cls(groups, **{"lr": 1e-2, **run.settings})
        self.scheduler = (
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (1 + k)) if run.scheduler else None
        )
        self.overlap: Any = None
        if options is not None:
            more: dict[str, Any] = (
                {"accumulation_steps": run.micro} if options.get("schedule") == "backward" and run.micro > 1 else {}
            )
            self.overlap = instep.attach(self.model, self.optimizer, **options, **more)

    def learn(self, i: int) -> None:
        for k in range(self.run.micro):
            (loss_of(self.model, i * self.run.micro + k) / self.run.micro).backward()
        if self.by_hand:
            for p, m in self.pairs():
                m.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        if self.by_hand:
            for p, m in self.pairs():
                with torch.no_grad():
                    p.copy_(m)
                p.grad = None
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((p, m) for p, m in zip(self.trained, self.held, strict=True) if p is not m)

    def values(self) -> dict[str, Any]:
        """Weights, masters and state by name."""
        found: dict[str, Any] = {}
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        for name, p, m in zip(names, self.trained, self.held, strict=True):
            found[name] = p.detach().clone()
            state = self.optimizer.state.get(m, {})
            if self.by_hand and p is not m and not self._is_lazy(p):  # without a gradient it has no master yet
                state = {**state, "master": m}
            found |= {f"{name}, {k}": copy.deepcopy(v) for k, v in state.items()}
        return found

    def _is_lazy(self, p: torch.Tensor) -> bool:
        return any(p is q for q in self.model.unused.parameters())

    def end(self) -> None:
        if self.overlap is not None:
            self.overlap.detach()


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    if a.keys() != b.keys():
        return f"{a.keys() ^ b.keys()}"
    for name, value in a.items():
        other = b[name]
        if isinstance(value, torch.Tensor):
            if value.dtype != other.dtype or not torch.equal(value, other):
                return name
        elif value != other:
            return name
    return None


def require_equal(run: Run, options: Mapping[str, Any] | None) -> Lane:
    hand, lane = Lane(run, by_hand=True), Lane(run, options=options)
    for i in range(run.steps):
        hand.learn(i)
        lane.learn(i)
        assert difference(hand.values(), lane.values()) is None, i
    assert not [p for p in lane.trained if p.grad is not None]
    if options == WAYS["backward"]:
        assert "left to" not in repr(lane.overlap)  # it is stepped in backward
    lane.end()
    return lane


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD, nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD, fused": ("SGD", {"momentum": 0.9, "fused": True}),
    "Adam": ("Adam", {"amsgrad": True, "foreach": False}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, foreach": ("AdamW", {"foreach": True}),
    "AdamW, for-loop": ("AdamW", {"foreach": False}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "Adadelta": ("Adadelta", {}),
    "Adamax": ("Adamax", {}),
    "ASGD": ("ASGD", {}),
    "Rprop": ("Rprop", {}),
    "Adafactor": ("Adafactor", {}),
    "Muon": ("Muon", {}),
    "pytorch_optimizer.Lion": ("Lion", {}),
    "pytorch_optimizer.Lamb": ("Lamb", {}),
    "pytorch_optimizer.AdaBelief": ("AdaBelief", {}),
}


def run_of(name: str) -> Run:
    cls, settings = OPTIMIZERS[name]
    module = pytest.importorskip("pytorch_optimizer") if name.startswith("pytorch_optimizer") else torch.optim
    if not hasattr(module, cls):
        pytest.skip(f"no {cls} in this torch")
    return Run(getattr(module, cls), settings, matrices=cls == "Muon")


@in_every_way
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, way: str) -> None:
    require_equal(run_of(name), WAYS[way])


LOOPS = {
    "two groups and a scheduler": Run(groups=True, scheduler=True, settings={"fused": True}),
    "micro-batches, summed in half": Run(micro=4),
    "fp16": Run(half=torch.float16, settings={"fused": True}),
    "a norm in fp32": Run(fp32=("norm",), cls=SGD, settings={"momentum": 0.9}),
    "all in fp32": Run(half=torch.float32),
}


@in_every_way
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop(loop: str, way: str) -> None:
    require_equal(LOOPS[loop], WAYS[way])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
@pytest.mark.parametrize("way", ["default", "undo", "deferred"])
def test_the_norm_of_fp32_gradients_of_which_some_are_of_fp32_parameters(way: str) -> None:
    """torch takes the norm of their norms in another order than that of gradients of two dtypes."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(6))
            self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + norm(layer(x.bfloat16()).float())
            return x

    norms: list[list[torch.Tensor]] = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = instep.masters(SGD, gradients="float32")(model.parameters(), lr=0.01)
        options = WAYS[way] or {}
        overlap = instep.attach(model, optimizer, clip=instep.ClipNorm(0.5), **options) if attach else None
        norms.append([])
        for _ in range(20):
            model(torch.randn(8, 32)).square().mean().backward()
            norm = None if overlap is not None else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if overlap is not None:
                overlap.synchronize()
                norm = overlap.grad_norm
            assert norm is not None
            norms[-1].append(norm)
    assert all(map(torch.equal, *norms))


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}])
def test_a_kernel_steps_the_masters(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[MastersCall] = []
    run = MastersCall.run

    def counted(self: MastersCall, gradients: list[torch.Tensor]) -> None:
        called.append(self)
        run(self, gradients)

    monkeypatch.setattr(MastersCall, "run", counted)
    require_equal(Run(settings=settings, groups=True), WAYS["backward"])
    assert len(called) > Run().steps


@in_every_way
def test_no_weight_is_compared_by_value_in_a_regular_loop(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions tell that nobody has written: instep's own writes count as none of the loop's."""

    def compared(half: torch.Tensor, master: torch.Tensor) -> bool:
        raise AssertionError

    monkeypatch.setattr(master_weights, "_is_rounding", compared)
    require_equal(Run(), WAYS[way])
    require_equal(Run(settings={"fused": True}), WAYS[way])  # beside backward, too
    require_equal(Run(torch.optim.RMSprop), WAYS[way])


@pytest.mark.skipif(here().type == "cpu", reason="of an accelerator")
@pytest.mark.parametrize("name", ["AdamW, fused", "RMSprop"])
def test_masters_in_the_hosts_memory(name: str) -> None:
    run = run_of(name)
    options = {"schedule": "backward", "offload": "host", "bucket_bytes": SMALL}
    hand, lane = Lane(run, by_hand=True), Lane(run, options=options)
    for i in range(run.steps):
        hand.learn(i)
        lane.learn(i)
        lane.overlap.synchronize()
        assert lane.optimizer.state[lane.trained[0]]["master"].device.type == "cpu"
        found, wanted = ({k: torch.as_tensor(v).cpu() for k, v in each.values().items()} for each in (lane, hand))
        assert difference(wanted, found) is None, i
    lane.end()


def test_attach_takes_nothing_where_instep_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_DISABLE", "1")
    require_equal(Run(), WAYS["backward"])


# Checkpoints.


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(run: Run, lane: Lane, options: Mapping[str, Any] | None, save: str) -> Lane:
    other = Lane(replace(run, settings={**run.settings, "lr": 1.0}), options=options)
    if save == "DCP":
        found = through_a_file(get_optimizer_state_dict(lane.model, lane.optimizer))
        # Torch asks for the state of all, and one has none.
        set_optimizer_state_dict(other.model, other.optimizer, found, options=StateDictOptions(strict=False))
    else:
        other.optimizer.load_state_dict(through_a_file(lane.optimizer.state_dict()))
    other.model.load_state_dict(through_a_file(lane.model.state_dict()))
    return other


@pytest.mark.parametrize("way", ["not attached", "backward", "undo"])
@pytest.mark.parametrize("save", ["torch.save", "DCP"])
@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, nesterov", "Adafactor", "pytorch_optimizer.Lion"])
def test_a_run_goes_on_from_a_checkpoint(name: str, save: str, way: str) -> None:
    run = run_of(name)
    hand, lane = Lane(run, by_hand=True), Lane(run, options=WAYS[way])
    for i in range(2):
        hand.learn(i)
        lane.learn(i)
    lane.end()
    other = resumed(run, lane, WAYS[way], save)
    for i in range(2, 5):
        hand.learn(i)
        other.learn(i)
        values = {k: v for k, v in other.values().items() if "unused" not in k}  # DCP makes state of all
        assert difference({k: v for k, v in hand.values().items() if "unused" not in k}, values) is None, i
    other.end()


def test_hooks_around_a_load_find_what_is_loaded() -> None:
    lane, other = Lane(Run()), Lane(Run())
    lane.learn(0)
    seen: list[torch.dtype] = []
    p = other.trained[0]
    other.optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[p]["exp_avg"].dtype))
    other.optimizer.register_load_state_dict_pre_hook(
        lambda o, found: {**found, "state": lane.optimizer.state_dict()["state"]}
    )
    other.optimizer.load_state_dict({**lane.optimizer.state_dict(), "state": {}})
    assert seen == [torch.float32]
    assert torch.equal(other.optimizer.state[p]["master"], lane.optimizer.state[lane.trained[0]]["master"])


def test_a_checkpoint_without_masters(caplog: pytest.LogCaptureFixture) -> None:
    model = build(Run())
    plain = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loss_of(model, 0).backward()
    plain.step()
    lane = Lane(Run())
    with caplog.at_level(logging.WARNING, "instep"):
        lane.optimizer.load_state_dict(plain.state_dict())
    (said,) = caplog.messages
    assert "masters(AdamW): the checkpoint has no masters of 8 parameters (param_groups[0]['params'][0]" in said
    assert all(v.dtype is torch.float32 for v in lane.optimizer.state[lane.trained[0]].values())
    lane.model.load_state_dict(model.state_dict())
    lane.learn(1)  # made of the weights that were loaded after the optimizer
    state = lane.optimizer.state[lane.trained[0]]
    assert torch.equal(state["master"].to(HALF), lane.trained[0])
    assert not torch.equal(state["master"], lane.trained[0].float())


def test_a_checkpoint_of_masters_in_the_class_alone() -> None:
    lane = Lane(Run())
    lane.learn(0)
    model = build(Run())
    plain = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    plain.load_state_dict(lane.optimizer.state_dict())  # torch makes all of it half
    with pytest.raises(AttachError, match=r"AdamW has loaded a checkpoint of masters\(AdamW\).*\.pop\('master'\)"):
        instep.attach(model, plain)
    for p in plain.state:
        plain.state[p].pop("master")
    instep.attach(model, plain).detach()


def test_a_checkpoint_of_masters_in_a_model_of_fp32() -> None:
    lane = Lane(Run())
    lane.learn(0)
    other = Lane(Run(half=torch.float32))
    other.optimizer.load_state_dict(lane.optimizer.state_dict())
    assert "master" not in other.optimizer.state[other.trained[0]]
    other.learn(0)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_made_fp32(way: str) -> None:
    """Its parameters have masters from before: they are stepped as any of fp32."""
    hand, lane = Lane(Run()), Lane(Run())
    for each in (hand, lane):
        each.learn(0)
        each.model.float()
    options = WAYS[way]
    overlap = None if options is None else instep.attach(lane.model, lane.optimizer, **options)
    plain = AdamW(hand.trained, lr=1e-2)
    plain.load_state_dict(hand.optimizer.state_dict())
    hand.optimizer = plain
    for i in range(1, 4):
        hand.learn(i)
        lane.learn(i)
        assert difference(hand.values(), lane.values()) is None, i
    if overlap is not None:
        overlap.detach()
    lane.model.to(HALF)
    with pytest.raises(StaleMasterError):
        lane.learn(4)


def test_a_checkpoint_of_masters_in_the_class_alone_over_fp32() -> None:
    """Nothing of it was rounded."""
    lane, model = Lane(Run()), build(Run(half=torch.float32))
    lane.learn(0)
    plain = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    plain.load_state_dict(lane.optimizer.state_dict())
    instep.attach(model, plain, schedule="backward").detach()


# Weights that were written.


@in_every_way
def test_a_weight_that_was_written(way: str) -> None:
    lane = Lane(Run(), options=WAYS[way])
    lane.learn(0)
    before = copy.deepcopy(lane.optimizer.state[lane.trained[2]])
    with torch.no_grad():
        lane.model.norm.weight.mul_(0.5)
        lane.model.outer.weight.add_(0.0)  # as it was: nothing is lost
    written = {name: p.clone() for name, p in lane.model.named_parameters()}
    with pytest.raises(StaleMasterError, match=r"\['params'\]\[2\] was written.*renew_masters\(\)"):
        lane.learn(1)
    assert all(torch.equal(p, written[name]) for name, p in lane.model.named_parameters())  # nothing of the step
    assert all(torch.equal(v, before[k]) for k, v in lane.optimizer.state[lane.trained[2]].items())
    lane.optimizer.zero_grad()
    if lane.overlap is not None:
        lane.overlap.accept_torn()
    lane.optimizer.renew_masters()
    assert torch.equal(lane.optimizer.state[lane.model.norm.weight]["master"], lane.model.norm.weight.float())
    lane.learn(1)
    lane.learn(2)
    lane.end()


@pytest.mark.parametrize("way", ["backward", "beside"])
@pytest.mark.parametrize("cls", [AdamW, torch.optim.NAdam])
def test_a_weight_that_a_hook_of_backward_writes(cls: Any, way: str) -> None:
    """Before its own update: the step is torn, and nothing is lost without a word."""
    lane = Lane(Run(cls, {"fused": True} if cls is AdamW else {}), options=WAYS[way])
    lane.learn(0)
    lane.learn(1)

    def write(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            lane.model.inner.bias.mul_(0.5)

    handle = lane.model.norm.weight.register_hook(write)  # others have been stepped
    with pytest.raises(StaleMasterError):
        lane.learn(2)
    handle.remove()
    lane.overlap.accept_torn()
    lane.end()


def test_the_name_of_a_weight_that_was_written() -> None:
    model = build(Run())
    optimizer = instep.masters(AdamW)(model.named_parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    with torch.no_grad():
        model.outer.weight.clamp_(-0.01, 0.01)
    with pytest.raises(StaleMasterError, match=r"'outer\.weight'"):
        optimizer.step()


def test_a_weight_that_was_put_back() -> None:
    """As averaged weights are, for an evaluation."""
    hand, lane = Lane(Run(), by_hand=True), Lane(Run())
    for i in range(3):
        hand.learn(i)
        lane.learn(i)
        kept = copy.deepcopy(lane.model.state_dict())
        with torch.no_grad():
            for p in lane.trained:
                p.zero_()
        lane.model.load_state_dict(kept)
    assert difference(hand.values(), lane.values()) is None


def test_renewed_masters_keep_what_was_not_written() -> None:
    lane = Lane(Run())
    lane.learn(0)
    p = lane.model.inner.weight
    before = lane.optimizer.state[p]["master"].clone()
    with torch.no_grad():
        p[0].fill_(1.0)
    lane.optimizer.renew_masters()
    after = lane.optimizer.state[p]["master"]
    assert torch.equal(after[0], torch.ones(8))
    assert torch.equal(after[1:], before[1:])
    assert not torch.equal(before[1:], before[1:].to(HALF).float())


def test_masters_are_renewed_after_an_update_that_is_due() -> None:
    hand, lane = Lane(Run(), by_hand=True), Lane(Run(), options=WAYS["deferred"])
    for i in range(3):
        hand.learn(i)
        lane.learn(i)
        lane.optimizer.renew_masters()
    assert difference(hand.values(), lane.values()) is None
    lane.end()


def test_a_model_that_is_loaded_before_the_first_step() -> None:
    lane, other = Lane(Run()), build(replace(Run()))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    lane.model.load_state_dict(other.state_dict())
    lane.learn(0)
    assert torch.equal(lane.optimizer.state[lane.trained[0]]["master"].to(HALF), lane.trained[0])


# What an optimizer is.


class Own(AdamW):
    """None of torch's."""


def test_a_class_of_ones_own_is_judged_and_stepped_in_backward() -> None:
    require_equal(Run(Own, steps=6), WAYS["backward"])


def test_a_step_that_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for where the masters are stepped, and judged from then on."""
    hand, lane = Lane(Run(), by_hand=True), Lane(Run(), options=WAYS["backward"])
    real = AdamW.step

    def step(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sign_()
        return real(self, closure)

    for i in range(7):
        if i == 2:
            monkeypatch.setattr(AdamW, "step", step)
        hand.learn(i)
        lane.learn(i)
        assert difference(hand.values(), lane.values()) is None, i
    lane.end()


def test_a_class_is_proved_with_masters_where_it_is_without() -> None:
    lion = pytest.importorskip("pytorch_optimizer").Lion
    parameters = [nn.Parameter(torch.ones(2, dtype=HALF))]
    assert is_proved(instep.masters(lion)(parameters)) == is_proved(
        lion([nn.Parameter(p.detach().float()) for p in parameters])
    )
    assert not is_proved(instep.masters(Own)(parameters))


class OfAnotherKind(AdamW, metaclass=abc.ABCMeta):
    """As those of packages are, which have abstract methods."""


class Inherits(instep.masters(AdamW)):  # type: ignore[misc]
    """A class of its own, which may do more."""


def test_classes_are_pickled() -> None:
    """As whatever starts processes does with what it hands to them."""
    for cls in (instep.masters(AdamW), instep.masters(OfAnotherKind), Inherits):
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert copy.deepcopy(cls) is cls
    optimizer = Inherits([nn.Parameter(torch.ones(2, dtype=HALF))])
    assert type(pickle.loads(pickle.dumps(optimizer))) is Inherits


def test_a_class_that_inherits() -> None:
    lane = Lane(Run())
    lane.optimizer = Inherits(lane.trained, lr=1e-2)
    hand = Lane(Run(), by_hand=True)
    with instep.attach(lane.model, lane.optimizer, schedule="backward", bucket_bytes=SMALL):
        for i in range(4):
            hand.learn(i)
            lane.learn(i)
            assert difference(hand.values(), lane.values()) is None, i


def test_a_class_lives_no_longer_than_what_uses_it() -> None:
    def made() -> list[weakref.ref[Any]]:
        class Local(AdamW):
            model = nn.Linear(2, 2)

        cls = instep.masters(Local)
        assert instep.masters(Local) is cls
        return [weakref.ref(cls), weakref.ref(Local), weakref.ref(Local.model)]

    kept = made()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_the_class() -> None:
    cls = instep.masters(AdamW)
    assert instep.masters(AdamW) is cls
    assert instep.masters(cls) is cls
    assert issubclass(cls, AdamW)
    lane = Lane(Run())
    assert isinstance(lane.optimizer, AdamW)
    assert isinstance(lane.optimizer, master_weights.Masters)
    assert repr(lane.optimizer).startswith("masters(AdamW) (\nParameter Group 0")
    assert repr(lane.optimizer).endswith("with fp32 masters of 10 half-precision parameters")


@in_every_way
def test_hooks_run_once_a_step(way: str) -> None:
    class Calling(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)  # torch would run them again here

    lane = Lane(Run(Calling), options=WAYS[way])
    seen: list[Any] = []
    lane.optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0]))
    lane.optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0]))
    lane.learn(0)
    assert len(seen) == 2
    assert all(p is lane.trained[0] for p in seen)
    lane.end()


@in_every_way
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_copies(how: Callable[[Any], Any], way: str) -> None:
    lane = Lane(Run(), options=WAYS[way])
    lane.learn(0)
    model, optimizer = how((lane.model, lane.optimizer))
    assert type(optimizer) is instep.masters(AdamW)
    lane.learn(1)
    loss_of(model, 1).backward()
    optimizer.step()
    if lane.overlap is not None:
        lane.overlap.synchronize()
    assert all(map(torch.equal, model.parameters(), lane.model.parameters()))
    masters = [entry["master"] for entry in lane.optimizer.state.values()]
    assert all(torch.equal(a["master"], b) for a, b in zip(optimizer.state.values(), masters, strict=True))
    lane.end()


def test_a_closure() -> None:
    lane, other = Lane(Run()), Lane(Run())
    calls: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        assert lane.optimizer.param_groups[0]["params"][0] is lane.trained[0]
        lane.optimizer.zero_grad()
        calls.append(loss_of(lane.model, 0))
        calls[-1].backward()
        return calls[-1]

    assert lane.optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    lane.optimizer.zero_grad()
    other.learn(0)
    assert difference(other.values(), lane.values()) is None


def test_a_group_that_is_added() -> None:
    lane = Lane(Run())
    lane.learn(0)
    p = nn.Parameter(torch.ones(4, dtype=HALF))
    lane.optimizer.add_param_group({"params": [p], "lr": 0.1})
    p.grad = torch.ones_like(p)
    lane.learn(1)
    assert torch.equal(lane.optimizer.state[p]["master"].to(HALF), p)
    with pytest.raises(ValueError, match="differentiable=True"):
        lane.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "differentiable": True})
    assert len(lane.optimizer.param_groups) == 2


@on_cpu_only
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
def test_a_compiled_step() -> None:
    """As that of the loop by hand, and not compiled anew for each parameter."""
    if not hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        pytest.skip("this torch does not tell")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        hand, lane = Lane(Run(cls=SGD), by_hand=True), Lane(Run(cls=SGD))
        for each in (hand, lane):
            each.optimizer.step = torch.compile(each.optimizer.step, backend="eager")
        for i in range(3):
            hand.learn(i)
            lane.learn(i)
            assert difference(hand.values(), lane.values()) is None, i


class Untouched(dict[Any, Any]):
    """A state that nobody is to ask for."""


def _refuse(*args: Any) -> Any:
    raise AssertionError


for _name in ("__getitem__", "__iter__", "__contains__", "get", "items", "values", "update"):
    setattr(Untouched, _name, _refuse)


def test_a_step_without_gradients_asks_for_no_state() -> None:
    """Updates that are under way may be writing it."""
    lane = Lane(Run())
    lane.learn(0)
    lane.optimizer.state = Untouched(lane.optimizer.state)
    lane.optimizer.step()


def test_a_parameter_without_gradient_keeps_its_entry() -> None:
    """Another's update may be under way."""
    lane = Lane(Run())
    lane.learn(0)
    p, q = lane.trained[:2]
    entry = lane.optimizer.state[p]
    seen: list[bool] = []
    real = lane.optimizer.inside.step.__wrapped__

    def step(self: Any, *args: Any) -> Any:
        seen.append("master" in entry)
        return real(self, *args)

    lane.optimizer.inside = type("Seeing", (AdamW,), {"step": step, "__module__": "torch.optim.seeing"})
    q.grad = torch.ones_like(q)
    lane.optimizer.step()
    assert seen == [True]


class Ageing(torch.optim.Optimizer):
    """Writes the state of parameters without a gradient, too."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                elif p in state:
                    state[p]["sum"].mul_(0.5)
                    p.mul_(0.9)
        state["all"] = {"steps": state.get("all", {}).get("steps", 0) + 1}


def test_a_class_that_steps_parameters_without_gradients() -> None:
    hand, lane = Lane(Run(Ageing), by_hand=True), Lane(Run(Ageing))
    for i in range(4):
        for each in (hand, lane):
            loss_of(each.model, i).backward()
            if i > 1:
                each.model.outer.weight.grad = None
            if each.by_hand:
                for p, m in each.pairs():
                    m.grad = None if p.grad is None else p.grad.float()
            each.optimizer.step()
            if each.by_hand:
                for p, m in each.pairs():
                    p.data.copy_(m)
            each.model.zero_grad()
        assert difference(hand.values(), lane.values()) is None, i
    assert lane.optimizer.state["all"] == {"steps": 4}


def test_clipping_in_two_passes() -> None:
    """By the norm of the half-precision gradients, as ``clip_grad_norm_`` of the model's parameters does."""
    plain, lane = Lane(Run()), Lane(Run())
    clip = instep.ClipNorm(0.05, mode="two_pass")
    with instep.attach(lane.model, lane.optimizer, schedule="backward", bucket_bytes=SMALL, clip=clip) as overlap:
        for i in range(4):
            loss_of(plain.model, i).backward()
            nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05)
            plain.optimizer.step()
            plain.optimizer.zero_grad()
            overlap.backward(loss_of(lane.model, i))
            lane.optimizer.step()
            lane.optimizer.zero_grad()
            assert difference(plain.values(), lane.values()) is None, i


def test_a_step_that_raises() -> None:
    """State and groups are the model's again."""

    class Raising(AdamW):
        raises = False

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.raises:
                raise ZeroDivisionError

    lane = Lane(Run(Raising))
    lane.learn(0)
    lane.optimizer.raises = True
    names = list(lane.optimizer.state[lane.trained[0]])
    with pytest.raises(ZeroDivisionError):
        lane.learn(1)
    assert all(p is q for p, q in zip(lane.optimizer.param_groups[0]["params"], lane.trained, strict=True))
    assert all(type(p) is nn.Parameter for p in lane.optimizer.state)
    entry = lane.optimizer.state[lane.trained[0]]
    assert list(entry) == names == [*names[:-1], "master"]
    assert entry["master"].grad is None
    assert not entry["master"].requires_grad


# Loss scales.


def scaled(lane: Lane, scaler: Any, i: int) -> None:
    boost = 1e30 if i == 2 else 1.0
    scaler.scale(loss_of(lane.model, i) * boost).backward()
    if lane.by_hand:
        for p, m in lane.pairs():
            m.grad = None if p.grad is None else p.grad.float()
        scaler.unscale_(lane.optimizer)
    scaler.step(lane.optimizer)
    scaler.update()
    if lane.by_hand:
        for p, m in lane.pairs():
            with torch.no_grad():
                p.copy_(m)
            p.grad = None
    lane.optimizer.zero_grad()


def test_a_fused_optimizer_with_grad_scaler() -> None:
    """Its kernel takes the scale off, of the masters' gradients."""
    run = Run(half=torch.float16, settings={"fused": True})
    hand, lane = Lane(run, by_hand=True), Lane(run)
    first, second = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2))
    for i in range(5):
        scaled(hand, first, i)
        scaled(lane, second, i)
        assert difference(hand.values(), lane.values()) is None, i
    assert first.state_dict() == second.state_dict()


def test_torch_does_not_unscale_gradients_of_fp16() -> None:
    lane = Lane(Run(half=torch.float16))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaled(lane, torch.amp.GradScaler("cpu"), 0)


# Gradients in fp32.

of_wide_gradients = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
WIDE = {
    "AdamW, fused": Run(wide=True, groups=True, scheduler=True, settings={"fused": True}),
    "AdamW, foreach": Run(wide=True, settings={"foreach": True}),
    "SGD": Run(SGD, {"momentum": 0.9}, wide=True),
    "RMSprop": Run(torch.optim.RMSprop, wide=True),
    "micro-batches": Run(wide=True, micro=4, settings={"fused": True}),
    "fp16": Run(half=torch.float16, wide=True),
    "a norm in fp32": Run(fp32=("norm",), wide=True),
}


@of_wide_gradients
@in_every_way
@pytest.mark.parametrize("loop", WIDE)
def test_gradients_in_fp32(loop: str, way: str) -> None:
    lane = require_equal(WIDE[loop], WAYS[way])
    loss_of(lane.model, 0).backward()
    of_gradient = {p.dtype: p.grad.dtype for p in lane.trained if p.grad is not None}
    assert set(of_gradient.values()) == {torch.float32}


@of_wide_gradients
def test_a_kernel_steps_from_gradients_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[torch.dtype] = []
    run = MastersCall.run

    def counted(self: MastersCall, gradients: list[torch.Tensor]) -> None:
        called.extend(gradient.dtype for gradient in gradients)
        run(self, gradients)

    monkeypatch.setattr(MastersCall, "run", counted)
    require_equal(Run(wide=True, settings={"fused": True}), WAYS["backward"])
    assert len(called) > Run().steps
    assert set(called) == {torch.float32}


def clipped(lane: Lane, i: int) -> torch.Tensor:
    """The loop by hand, or the plain one, with the masters' norm."""
    loss_of(lane.model, i).backward()
    if lane.by_hand:
        for p, m in lane.pairs():
            m.grad = p.grad
    norm = nn.utils.clip_grad_norm_(lane.held, 0.05)
    lane.optimizer.step()
    if lane.by_hand:
        for p, m in lane.pairs():
            with torch.no_grad():
                p.copy_(m)
            m.grad = p.grad = None
    lane.optimizer.zero_grad()
    return norm


@of_wide_gradients
@pytest.mark.parametrize("way", ["not attached", "default", "undo", "deferred", "two_pass", "exact"])
def test_the_norm_is_that_of_the_masters(way: str) -> None:
    run = Run(wide=True, settings={"fused": True})
    hand = Lane(run, by_hand=True)
    in_backward = way in ("two_pass", "exact")
    lane = Lane(run, options=None if in_backward else WAYS[way])
    if in_backward:
        clip: Any = instep.ClipNorm(0.05, mode="two_pass") if way == "two_pass" else 0.05
        more: dict[str, Any] = {"undo": True} if way == "exact" else {}
        lane.overlap = instep.attach(
            lane.model, lane.optimizer, schedule="backward", bucket_bytes=SMALL, clip=clip, **more
        )
    for i in range(4):
        norm = clipped(hand, i)
        if in_backward:
            lane.overlap.backward(loss_of(lane.model, i))
            lane.optimizer.step()
            assert torch.equal(lane.overlap.grad_norm, norm)
            lane.optimizer.zero_grad()
        else:
            assert torch.equal(clipped(lane, i), norm)
        assert difference(hand.values(), lane.values()) is None, i
    lane.end()


@of_wide_gradients
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_micro_batches_are_summed_in_fp32(to_none: bool, waits: bool) -> None:
    """Those whose gradients are freed one by one, too."""
    run = Run(wide=True, micro=3, settings={"fused": True})
    hand, lane = Lane(run, by_hand=True), Lane(replace(run, micro=1), options=WAYS["backward"])
    halves = Lane(replace(run, wide=False), by_hand=True)
    for i in range(4):
        for each in (hand, halves):
            each.learn(i)
        numbers = [i * 3, i * 3 + 1, i * 3 + 2]
        if waits:
            for k in numbers:
                lane.overlap.backward(loss_of(lane.model, k) / 3, more=k < numbers[-1])
        else:
            lane.overlap.micro_batches(lambda k, lane=lane: loss_of(lane.model, k) / 3, numbers)
        lane.optimizer.step()
        lane.optimizer.zero_grad(set_to_none=to_none)
        if to_none or i == 0:  # zeros are gradients of what is not used then
            assert difference(hand.values(), lane.values()) is None, i
        assert all(p.grad is None or p.grad.dtype is torch.float32 for p in lane.trained)
    assert difference(hand.values(), halves.values()) is not None
    lane.end()


@of_wide_gradients
@pytest.mark.parametrize("way", ["not attached", "default", "undo", "deferred"])
def test_a_loss_scale_over_gradients_in_fp32(way: str) -> None:
    run = Run(half=torch.float16, wide=True)
    hand, lane = Lane(run, by_hand=True), Lane(run)
    first, second = (torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2))
    options = WAYS[way]
    if options is not None:
        scaler: dict[str, Any] = {"scaler": second} if "undo" in options else {}
        lane.overlap = instep.attach(lane.model, lane.optimizer, **options, **scaler)
    for i in range(5):
        scaled(hand, first, i)
        scaled(lane, second, i)
        assert difference(hand.values(), lane.values()) is None, i
    assert first.state_dict() == second.state_dict()
    lane.end()


@of_wide_gradients
def test_a_class_with_gradients_in_fp32() -> None:
    cls = instep.masters(AdamW, gradients="float32")
    assert cls is instep.masters(AdamW, gradients="float32")
    assert cls is instep.masters(cls)
    assert cls is not instep.masters(AdamW)
    assert instep.masters(AdamW) is instep.masters(AdamW)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert cls.__qualname__ == "masters(AdamW, gradients='float32')"
    with pytest.raises(TypeError, match=r"write masters\(AdamW, gradients='float32'\)"):
        instep.masters(instep.masters(AdamW), gradients="float32")
    with pytest.raises(ValueError, match="takes 'float32' or None, and was given 'float16'"):
        instep.masters(AdamW, gradients="float16")  # type: ignore[arg-type]


@of_wide_gradients
def test_copies_have_gradients_in_fp32() -> None:
    """torch copies a parameter without its ``grad_dtype``."""
    lane = Lane(Run(wide=True))
    lane.learn(0)
    model, optimizer = copy.deepcopy((lane.model, lane.optimizer))
    lane.learn(1)
    loss_of(model, 1).backward()
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), lane.model.parameters()))
    p: Any = nn.Parameter(torch.ones(4, dtype=HALF))
    optimizer.add_param_group({"params": [p]})
    assert p.grad_dtype is torch.float32


@of_wide_gradients
@in_every_way
def test_a_gradient_that_is_not_in_fp32(way: str) -> None:
    lane = Lane(Run(wide=True), options=WAYS[way])
    lane.learn(0)
    before = lane.values()
    weight: Any = lane.model.outer.weight
    weight.grad_dtype = None  # any
    weight.grad = torch.ones_like(weight)

    def step() -> None:
        if way in ("backward", "beside", "undo"):
            loss_of(lane.model, 1).backward()
        lane.optimizer.step()

    with pytest.raises(ValueError, match=r"\['params'\]\[\d\] has a gradient of torch.bfloat16"):
        step()
    if way != "backward":
        assert difference(before, lane.values()) is None


@of_wide_gradients
def test_a_gradient_of_before() -> None:
    model = nn.Linear(2, 2).to(HALF)
    model(torch.ones(1, 2, dtype=HALF)).sum().backward()
    with pytest.raises(ValueError, match=r"a gradient of torch.bfloat16 already.*model.zero_grad\(\)"):
        instep.masters(AdamW, gradients="float32")(model.parameters())


def test_gradients_in_fp32_need_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_weights, "KEEPS_GRAD_DTYPE", False)
    with pytest.raises(ValueError, match=r"needs torch 2\.10 or newer"):
        instep.masters(AdamW, gradients="float32")


@of_wide_gradients
@in_every_way
def test_gradients_in_fp32_without_masters(way: str) -> None:
    """A loop may say so itself, of an optimizer that takes them."""
    lanes = [build(Run()) for _ in range(2)]
    optimizers = [SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, foreach=False) for model in lanes]
    for p in (p for model in lanes for p in model.parameters()):
        of_any: Any = p
        of_any.grad_dtype = torch.float32
    overlap = None if WAYS[way] is None else instep.attach(lanes[1], optimizers[1], **(WAYS[way] or {}))
    for i in range(4):
        for model, optimizer in zip(lanes, optimizers, strict=True):
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, lanes[0].parameters(), lanes[1].parameters())), i
    if overlap is not None:
        overlap.detach()


@in_every_way
@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, SGD, torch.optim.Adagrad])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients(cls: Any, way: str) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True).to(HALF)
    master = nn.Parameter(table.weight.detach().float())
    hand, optimizer = cls([master], lr=0.1), instep.masters(cls)(table.parameters(), lr=0.1)
    other = copy.deepcopy(table)
    options = WAYS[way]
    overlap = None if options is None else instep.attach(table, optimizer, **options)
    for i in range(3):
        for each in (table, other):
            each(torch.tensor([1, 2, 2 + i])).float().square().sum().backward()
        assert other.weight.grad is not None
        master.grad = other.weight.grad.float()
        hand.step()
        with torch.no_grad():
            other.weight.copy_(master)
        other.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(table.weight, other.weight)
    if overlap is not None:
        overlap.detach()


# What is refused.


class Keeps(AdamW):
    """What is made of the parameters in the constructor is of the half-precision ones."""

    def __init__(self, params: Any, what: str, **settings: Any) -> None:
        super().__init__(params, **settings)
        parameters = self.param_groups[0]["params"]
        if what == "attribute":
            self.averages = {"of": [p.detach().clone() for p in parameters]}
        elif what == "state":
            self.state[parameters[0]]["average"] = torch.zeros_like(parameters[0])
        elif what == "group":
            self.param_groups[0]["average"] = torch.zeros_like(parameters[0])
            self.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=HALF))], "average": torch.ones(3)})


class Wraps(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


def test_an_optimizer_around_one_with_masters() -> None:
    """That steps the masters, whatever torch has loaded into the other."""
    lane = Lane(Run())
    lane.learn(0)
    around = Wraps(lane.optimizer)
    around.load_state_dict(lane.optimizer.state_dict())
    assert around.state[lane.trained[0]]["master"].dtype is HALF
    instep.attach(lane.model, around).detach()


def quantized() -> nn.Parameter:
    class Quantized(torch.Tensor):
        @staticmethod
        def __new__(cls, values: torch.Tensor) -> Any:
            return torch.Tensor._make_subclass(cls, values, True)

        def __tensor_flatten__(self) -> Any:
            return [], None

    values: Any = Quantized(torch.ones(2, dtype=HALF))
    return values


def some() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=HALF))]


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "LBFGS": (lambda: instep.masters(torch.optim.LBFGS), TypeError, r"masters\(LBFGS\): it evaluates the loss again"),
    "an object": (
        lambda: instep.masters(AdamW(some())),  # type: ignore[type-var]
        TypeError,
        r"takes a class, and was given an object: write masters\(AdamW\)\(parameters, …\)",
    ),
    "another class": (lambda: instep.masters(nn.Linear), TypeError, "Linear is no torch.optim.Optimizer"),  # type: ignore[type-var]
    "differentiable": (
        lambda: instep.masters(AdamW)(some(), differentiable=True),
        ValueError,
        r"masters\(AdamW\): differentiable=True",
    ),
    "quantized": (lambda: instep.masters(SGD)([quantized()], lr=0.1), TypeError, "Quantized, whose values are not"),
    "tensors in an attribute": (
        lambda: instep.masters(Keeps)(some(), "attribute"),
        TypeError,
        r"masters\(Keeps\): its constructor keeps a Tensor in 'averages'",
    ),
    "tensors in state": (lambda: instep.masters(Keeps)(some(), "state"), TypeError, "its constructor makes state"),
    "tensors in a group": (
        lambda: instep.masters(Keeps)(some(), "group"),
        TypeError,
        "keeps a Tensor in a group, under 'average'",
    ),
    "a wrapper": (
        lambda: instep.masters(Wraps)(AdamW(some())),
        TypeError,
        r"Give the masters to that one: Wraps\(masters\(AdamW\)\(…\), …\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    make, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        make()


def test_numbers_may_be_tensors() -> None:
    run = Run(settings={"lr": torch.tensor(1e-2), "foreach": False})
    require_equal(run, None)
