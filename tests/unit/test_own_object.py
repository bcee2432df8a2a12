"""A foreign optimizer steps a bucket as itself: for that moment its groups hold the bucket's parameters alone. Nobody
else sees it: no other thread, no handler of a signal, no hook, no method that needs all parameters."""

import copy
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import instep
from instep.errors import UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests import net
from tests.judged import own_steps_are_judged

LAYERS = 4
BUCKETED: dict[str, Any] = {"schedule": "backward", "bucket_bytes": 300}
"""A bucket of each layer."""


class Momentum(torch.optim.Optimizer):
    """Calls ``inside`` in the middle of each update."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def inside(self, group: dict[str, Any]) -> None:
        """In the middle of ``step()``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        some = False
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    some = True
                    state = self.state[p]
                    state["m"] = p.grad.clone() if "m" not in state else state["m"].mul_(0.9).add_(p.grad)
                    p.sub_(state["m"], alpha=group["lr"])
            self.inside(group)
        self.calls += some


class Waits(Momentum):
    """Stops in the middle of the first bucket of a backward, until it is told to go on."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        WAITS[id(self)] = (threading.Event(), threading.Event(), threading.Event())

    def inside(self, group: dict[str, Any]) -> None:
        armed, came, may_go = WAITS[id(self)]
        if armed.is_set():
            armed.clear()
            came.set()
            assert may_go.wait(net.SECONDS)


WAITS: dict[int, tuple[threading.Event, threading.Event, threading.Event]] = {}
"""Aside, so that the optimizer can be pickled."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))


class Loop:
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], model: nn.Module | None = None) -> None:
        self.model = layers() if model is None else model
        self.optimizer = make(self.model.parameters())

    def backward(self, i: int) -> None:
        torch.manual_seed(i)
        self.model(torch.randn(4, 8)).square().mean().backward()

    def step(self, i: int, *, zeroes: bool = True) -> None:
        self.backward(i)
        self.optimizer.step()
        if zeroes:
            self.optimizer.zero_grad()

    def require_equal(self, other: "Loop") -> None:
        difference = first_difference(
            training_state(self.model, self.optimizer), training_state(other.model, other.optimizer)
        )
        assert difference is None, difference


def both(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> tuple[Loop, Loop, instep.Attachment]:
    plain, attached = Loop(make), Loop(make)
    return plain, attached, instep.attach(attached.model, attached.optimizer, **{**BUCKETED, **options})


# Other threads.


@contextmanager
def in_the_window(loop: Loop, i: int) -> Iterator[Callable[[], None]]:
    """The step of iteration ``i`` has stopped in the middle of a bucket, on another thread. Yields what lets it go."""
    armed, came, may_go = WAITS[id(loop.optimizer)]
    armed.set()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            loop.step(i)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert came.wait(net.SECONDS)
        yield may_go.set
    finally:
        may_go.set()
        thread.join(net.SECONDS)
        came.clear()
        may_go.clear()
    assert not errors, errors


def called_in_the_window(loop: Loop, i: int, action: Callable[[], Any]) -> Any:
    """What ``action`` returns, on a thread of its own: it may wait until the bucket is stepped."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    with in_the_window(loop, i) as go_on:
        thread.start()
        thread.join(0.02)  # what waits has begun to
        go_on()
    thread.join(net.SECONDS)
    (result,) = found
    return result


@pytest.fixture
def stopped() -> Iterator[Loop]:
    """A loop of which two steps are taken."""
    loop = Loop(Waits)
    with instep.attach(loop.model, loop.optimizer, **BUCKETED):
        for i in range(2):
            loop.step(i)
        yield loop
    WAITS.clear()


READERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "for": lambda params: [p for p in params],  # noqa: C416
    "index": lambda params: [params[index] for index in range(len(params))],
    "slice": lambda params: params[:],
    "reversed": lambda params: list(reversed(params))[::-1],
    "copy": lambda params: params.copy(),
    "add": lambda params: params + [],  # noqa: RUF005
    "add to another": lambda params: [] + params,  # noqa: RUF005
    "star": lambda params: [*params],
    "list()": list,
    "tuple()": lambda params: list(tuple(params)),  # noqa: C414
    "extend": lambda params: extended([], params),
    "repeat": lambda params: params * 1,
    "sorted": lambda params: sorted(params, key=lambda p: order_of(params, p)),
    "enumerate": lambda params: [p for _, p in enumerate(params)],
    "map": lambda params: list(map(lambda p: p, params)),  # noqa: C417
}


def extended(found: list[Any], params: list[Any]) -> list[Any]:
    found.extend(params)
    return found


def order_of(params: list[Any], wanted: Any) -> int:
    return next(place for place, p in enumerate(params) if p is wanted)


@pytest.mark.parametrize("how", READERS)
def test_another_thread_reads_whole_groups(stopped: Loop, how: str) -> None:
    whole = list(stopped.model.parameters())

    with in_the_window(stopped, 2):
        (group,) = stopped.optimizer.param_groups
        found = READERS[how](group["params"])
        number, is_in = len(group["params"]), whole[0] in set(group["params"])
    assert list(map(id, found)) == list(map(id, whole))
    assert number == len(whole)
    assert is_in


def test_another_thread_counts_and_compares_whole_groups(stopped: Loop) -> None:
    whole = list(stopped.model.parameters())
    with in_the_window(stopped, 2):
        params = stopped.optimizer.param_groups[0]["params"]
        assert params.index(whole[0]) == 0
        assert params.count(None) == 0
        assert params == whole
        assert bool(params)
        assert whole[0] in params


ACTIONS: dict[str, Callable[[Loop], Any]] = {
    "state_dict": lambda loop: loop.optimizer.state_dict(),
    "deepcopy": lambda loop: copy.deepcopy(loop.optimizer).state_dict(),
    "pickle": lambda loop: pickle.loads(pickle.dumps(loop.optimizer)).state_dict(),
    "groups": lambda loop: [{"params": [*group["params"]]} for group in loop.optimizer.param_groups],
}


@pytest.mark.parametrize(("name", "way"), [*((name, "judged") for name in ACTIONS), ("groups", "undo")])
def test_another_thread_copies_a_whole(name: str, way: str) -> None:
    """While an update is judged. In backward reading raises; on trial only the loop's thread may."""
    attached, expected = Loop(Waits), Loop(Waits)
    with own_steps_are_judged() if way == "judged" else nullcontext():
        overlap = instep.attach(attached.model, attached.optimizer, **BUCKETED, undo=way == "undo")
    with overlap:
        attached.step(0)
        found = called_in_the_window(attached, 1, lambda: ACTIONS[name](attached))
        for i in range(2):
            expected.step(i)
        attached.require_equal(expected)
        require_whole(attached)
        groups = found["param_groups"] if isinstance(found, dict) else found
        assert len(groups[0]["params"]) == 2 * LAYERS
        if isinstance(found, dict):
            assert len(found["state"]) == 2 * LAYERS
            attached.optimizer.load_state_dict(found)  # it can be loaded


def test_what_another_thread_writes_into_the_window_is_no_silent_loss() -> None:
    """It is taken for what the update has written: buckets disagree, which is said."""
    _, attached, overlap = both(Waits)
    attached.step(0)
    armed, came, may_go = WAITS[id(attached.optimizer)]

    def write() -> None:
        assert came.wait(net.SECONDS)
        attached.optimizer.param_groups[0]["lr"] = 0.01
        may_go.set()

    armed.set()
    thread = threading.Thread(target=write)
    thread.start()
    with pytest.raises(UnsupportedOptimizerError, match=r"param_groups\[0\]\['lr'\]"):
        attached.step(1)
    thread.join(net.SECONDS)
    overlap.accept_torn()
    overlap.detach()


def test_a_setting_that_another_thread_writes_while_a_part_is_judged_is_taken_back_and_said() -> None:
    """A known limit: nobody can tell it from what the update has written."""
    attached = Loop(Waits)
    with own_steps_are_judged():
        overlap = instep.attach(attached.model, attached.optimizer, **BUCKETED)
    with overlap:
        attached.step(0)  # beside the first step nothing stands
        with in_the_window(attached, 1):
            attached.optimizer.param_groups[0]["lr"] = 0.01
        assert attached.optimizer.param_groups[0]["lr"] == 0.05
        assert "param_groups[0]['lr']" in overlap.plan.judged[0]


def test_a_group_that_another_thread_adds_is_kept(stopped: Loop) -> None:
    more = nn.Parameter(torch.zeros(2))
    called_in_the_window(stopped, 2, lambda: stopped.optimizer.add_param_group({"params": [more]}))
    assert [len(group["params"]) for group in stopped.optimizer.param_groups] == [2 * LAYERS, 1]
    assert stopped.optimizer.param_groups[1]["params"][0] is more


# Handlers of signals.


@pytest.mark.parametrize("way", ["judged", "backward", "undo"])
def test_a_handler_sees_the_whole(way: str) -> None:
    reads_state = way != "backward"  # in which that raises, as with any optimizer
    seen: list[tuple[int, int]] = []

    class Signals(Momentum):
        def inside(self, group: dict[str, Any]) -> None:
            signal.raise_signal(signal.SIGUSR1)

    def handle(number: int, frame: Any) -> None:
        params = attached.optimizer.param_groups[0]["params"]
        state = attached.optimizer.state_dict()["param_groups"][0]["params"] if reads_state else params
        seen.append((len(state), len(params)))

    with own_steps_are_judged() if way == "judged" else nullcontext():
        plain, attached, overlap = both(Signals, undo=way == "undo")
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with overlap:
            for i in range(2):
                plain.step(i)
                attached.step(i)
                plain.require_equal(attached)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(seen) == {(2 * LAYERS, 2 * LAYERS)}
    assert len(seen) > 4
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_timer_whose_handler_looks_sees_the_whole() -> None:
    seen: list[int] = []
    _, attached, overlap = both(Momentum)

    def handle(number: int, frame: Any) -> None:
        seen.append(len(attached.optimizer.param_groups[0]["params"]))

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
    try:
        with overlap:
            for i in range(200):
                attached.step(i)
                if len(seen) > 40:
                    break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(seen) == {2 * LAYERS}


def test_a_handler_that_raises_leaves_the_whole() -> None:
    class InterruptedError(Exception):
        pass

    def handle(number: int, frame: Any) -> None:
        raise InterruptedError

    class Signals(Momentum):
        def inside(self, group: dict[str, Any]) -> None:
            if self.calls == 1:
                signal.raise_signal(signal.SIGUSR1)

    _, attached, overlap = both(Signals)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        attached.step(0)
        with pytest.raises((InterruptedError, instep.errors.InstepError)):
            attached.step(1)
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, before)
    require_whole(attached)
    overlap.accept_torn()
    overlap.detach()


def require_whole(loop: Loop) -> None:
    (group,) = loop.optimizer.param_groups
    assert type(group["params"]) is list
    assert list(map(id, group["params"])) == list(map(id, loop.model.parameters()))
    assert (
        not {"state_dict", "add_param_group", "zero_grad", "__getstate__", "load_state_dict"}
        & vars(loop.optimizer).keys()
    )


# Hooks.


class CallsSuper(torch.optim.AdamW):
    """Whose own ``step()`` calls torch's, which torch wraps in calls of the same hooks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += any(p.grad is not None for group in self.param_groups for p in group["params"])
        return super().step(closure)


@pytest.mark.parametrize("make", [Momentum, CallsSuper])
def test_hooks_of_the_user_run_as_often_as_in_the_plain_loop(make: Any) -> None:
    plain, attached, overlap = both(make)
    seen: dict[int, list[tuple[str, int, int]]] = {id(plain.optimizer): [], id(attached.optimizer): []}

    def note(name: str) -> Callable[..., None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            if id(optimizer) in seen:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                seen[id(optimizer)].append((name, len(params), len(optimizer.state)))

        return hook

    for loop in (plain, attached):
        loop.optimizer.register_step_pre_hook(note("before"))
        loop.optimizer.register_step_post_hook(note("after"))
    everywhere: list[Any] = []
    try:
        with overlap:
            for i in range(6):
                if i == 4:  # super().step() calls these: from here on nothing is stepped in backward
                    assert not overlap.plan.judged or "left to" not in str(overlap.plan.judged)
                    everywhere.append(register_optimizer_step_pre_hook(note("before, everywhere")))
                    everywhere.append(register_optimizer_step_post_hook(note("after, everywhere")))
                plain.step(i)
                attached.step(i)
                plain.require_equal(attached)
            assert "step hooks are registered for all optimizers" in str(overlap.plan.judged)
    finally:
        for handle in everywhere:
            handle.remove()
    mine, theirs = seen.values()
    assert [name for name, _, _ in mine] == [name for name, _, _ in theirs]
    assert {number for _, number, _ in theirs} == {2 * LAYERS}


# A step that raises.


@pytest.mark.parametrize("at", range(1, LAYERS + 1))
def test_a_step_that_raises_leaves_groups_attributes_and_hooks(at: int) -> None:
    class BreaksError(Exception):
        pass

    left = [0]

    class Breaks(Momentum):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            for group in self.param_groups:
                group["lr"] = 0.01
            self.late = 1
            left[0] -= 1
            if not left[0]:
                raise BreaksError
            return super().step(closure)

    loop = Loop(Breaks)
    loop.optimizer.register_step_pre_hook(lambda *args: None)
    hooks = dict(loop.optimizer._optimizer_step_pre_hooks)
    overlap = instep.attach(loop.model, loop.optimizer, **BUCKETED)
    hooks_attached = dict(loop.optimizer._optimizer_step_pre_hooks)
    attributes = vars(loop.optimizer).keys()
    left[0] = at
    with pytest.raises((BreaksError, instep.errors.InstepError)):
        loop.step(0)
    require_whole(loop)
    optimizer: Any = loop.optimizer
    assert optimizer.calls == 0
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert vars(optimizer).keys() == attributes
    assert dict(optimizer._optimizer_step_pre_hooks) == hooks_attached
    overlap.accept_torn()
    overlap.detach()
    assert dict(optimizer._optimizer_step_pre_hooks) == hooks


# Methods that need all parameters, called by the update itself.


def test_the_update_itself_asks_for_its_state() -> None:
    numbers: list[int] = []

    class Asks(Momentum):
        def inside(self, group: dict[str, Any]) -> None:
            numbers.append(len(self.state_dict()["param_groups"][0]["params"]))

    plain, attached, overlap = both(Asks)
    with overlap:
        for i in range(3):
            plain.step(i)
            attached.step(i)
            plain.require_equal(attached)
    assert set(numbers) == {2 * LAYERS}


def test_a_group_that_the_update_itself_adds_is_refused_and_taken_out() -> None:
    more = nn.Parameter(torch.zeros(2))

    class Adds(Momentum):
        def inside(self, group: dict[str, Any]) -> None:
            if len(self.param_groups) == 1:
                self.add_param_group({"params": [more]})

    _, attached, overlap = both(Adds)
    with pytest.raises(UnsupportedOptimizerError, match="its list of param_groups"):
        attached.step(0)
    assert [len(group["params"]) for group in attached.optimizer.param_groups] == [2 * LAYERS]
    overlap.accept_torn()
    overlap.detach()


# Settings of single parameters, names, schedulers, loss scales, groups, parameters of all kinds.


class ByPlace(Momentum):
    """An update that looks up each parameter by its name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.5 if name == "2.bias" else group["lr"])


def test_names_stand_beside_their_parameters() -> None:
    def make(model: nn.Module) -> Loop:
        return Loop(lambda _: ByPlace(model.named_parameters()), model)

    plain, attached = make(layers()), make(layers())
    with instep.attach(attached.model, attached.optimizer, **BUCKETED):
        for i in range(3):
            plain.step(i)
            attached.step(i)
            plain.require_equal(attached)
    names = attached.optimizer.param_groups[0]["param_names"]
    assert names == [name for name, _ in attached.model.named_parameters()]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=8, cycle_momentum=False
    ),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
}


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, undo: bool) -> None:
    plain, attached, overlap = both(Momentum, undo=undo)
    with overlap, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter")  # which torch 2.6 gives to its own scheduler
        loops = [(loop, SCHEDULERS[name](loop.optimizer)) for loop in (plain, attached)]
        for i in range(4):
            for loop, scheduler in loops:
                loop.step(i)
                scheduler.step()
            plain.require_equal(attached)


def test_a_loss_scale() -> None:
    plain, attached = Loop(Momentum), Loop(Momentum)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2) for _ in range(2)]
    options = {**BUCKETED, "undo": True, "scaler": scalers[1]}
    with instep.attach(attached.model, attached.optimizer, **options) as overlap:
        for i in range(5):
            for loop, scaler in zip((plain, attached), scalers, strict=True):
                torch.manual_seed(i)
                loss = loop.model(torch.randn(4, 8)).square().mean() * (float("inf") if i == 2 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(loop.optimizer)
                scaler.update()
                loop.optimizer.zero_grad()
            plain.require_equal(attached)
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert overlap.step_count + overlap.skip_count >= 4


class Odd(nn.Module):
    """Frozen, tied, and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_frozen_tied_and_unused_parameters_in_groups(groups: int, undo: bool) -> None:
    def make() -> Loop:
        torch.manual_seed(0)
        model = Odd()
        parameters = list(model.parameters())
        split = [{"params": parameters[number::groups], "lr": 0.05 / (1 + number)} for number in range(groups)]
        return Loop(lambda _: Momentum(split), model)

    plain, attached = make(), make()
    with instep.attach(attached.model, attached.optimizer, **BUCKETED, undo=undo):
        for i in range(4):
            plain.step(i)
            attached.step(i)
            plain.require_equal(attached)
    assert vars(plain.optimizer)["calls"] == vars(attached.optimizer)["calls"] == 4


# What a process has after an optimizer was judged, or refused.

PROGRAM = """
import hashlib, logging, random, sys, warnings
import numpy, torch
from torch import nn
logging.getLogger("instep").setLevel(logging.CRITICAL)

class Update(torch.optim.Optimizer):
    def __init__(self, params, how):
        super().__init__(params, {"lr": 0.05})
        self.how = how
        self.far = torch.compile(lambda p, g: p.sub_(g, alpha=0.05), dynamic=False, backend="eager")
        self.calls = iter(range(10**6)) if how == "refused" else None

    @torch.no_grad()
    def step(self, closure=None):
        there = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 1.0
        if self.how == "coupled":
            scale = 1 / (1 + sum(p.grad.norm().item() for p in there))
        if self.how == "draws":
            scale = torch.rand(()).item() + random.random() + float(numpy.random.rand())
        if self.how == "refused":
            scale = 1 / (1 + next(self.calls))
        for p in there:
            if self.how == "compiled":
                self.far(p, p.grad)
            if self.how == "warns":
                warnings.warn("once for each place")
            p.sub_(p.grad, alpha=0.05 * scale)

for how in ("nothing", "coupled", "draws", "refused", "compiled", "warns"):
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = Update(model.parameters(), how)
    if sys.argv[1] == "attached":
        import instep
        overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=300)
    with warnings.catch_warnings(record=True) as told:
        for i in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(how, list(map(str, told)))
    print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
    print(torch.rand(2).tolist(), random.random(), numpy.random.rand())
    counters = torch._dynamo.utils.counters
    print({name: dict(counters[name]) for name in ("stats", "frames", "graph_break", "recompiles")})
    print(sorted(map(str, globals().get("__warningregistry__", {}))))
    if sys.argv[1] == "attached":
        print(how, overlap.plan.judged, file=sys.stderr)
        overlap.detach()
"""


def test_a_process_goes_on_as_without() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, way], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for way in ("plain", "attached")
    ]
    (plain, _), (attached, said) = (process.communicate(timeout=2 * net.SECONDS) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert plain.splitlines() == attached.splitlines(), said
    assert said.count("left to optimizer.step()") == 3, said
