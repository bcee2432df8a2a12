"""torch's fused kernels, called on lists that instep has gathered, compute what torch's ``step()`` computes."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import instep
from instep._optim.guards import FoundState
from instep._optim.kernels import InBucket, KernelCall, Placing, _as_in_step, kernel_of
from instep._optim.shadow import GroupLayout
from instep.errors import HyperparameterChangedError
from instep_tools.harness import first_difference, training_state
from tests.late import late_updates

WAYS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam, coupled decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam, amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "betas": (0.7, 0.9)}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw, maximize": (torch.optim.AdamW, {"lr": 1e-2, "maximize": True, "eps": 1e-4, "weight_decay": 0.3}),
    "adamw, amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "sgd, momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd, nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd, dampening": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
}
if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters:  # since torch 2.7
    WAYS["adam, decoupled"] = torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
ADAM: Any = import_module("torch.optim.adam")  # which torch.optim does not name
CALLS = "instep._optim.kernels.KernelCall.run"


class Loop:
    """A model with parameters of several dtypes and shapes, in two groups."""

    def __init__(self, way: str, dtype: torch.dtype = torch.float32, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1)).to(dtype)
        self.dtype = dtype
        cls, options = WAYS[way]
        first, *rest = self.model.children()
        groups: list[dict[str, Any]] = [
            {"params": list(first.parameters())},
            {"params": [p for one in rest for p in one.parameters()], "lr": 3e-2},
        ]
        self.optimizer = cls(groups, **{"fused": True, **options, **more})

    def step(self, i: int) -> None:
        torch.manual_seed(i)
        x = torch.randn(4, 5).to(self.dtype)
        (self.model(x).float() - 1).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def difference(self, other: "Loop") -> str | None:
        return first_difference(
            training_state(self.model, self.optimizer), training_state(other.model, other.optimizer)
        )


class Counted:
    """How many calls of kernels were made."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> "Counted":
        run = KernelCall.run

        def counted(call: KernelCall, gradients: list[torch.Tensor]) -> None:
            self.calls += 1
            run(call, gradients)

        self._patch = patch(CALLS, counted)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Two plain loops differ there: torch's fused SGD leaves parts of a bfloat16 momentum buffer as its memory was found.
NOT_DETERMINISTIC = {(way, torch.bfloat16) for way, (_, options) in WAYS.items() if "momentum" in options}


@pytest.mark.parametrize(
    "how", [{"fused": True}, {"fused": None, "foreach": True}, {"fused": None}], ids=["fused", "foreach", "loop"]
)
@pytest.mark.parametrize(
    ("way", "dtype"), [pair for way in WAYS for dtype in DTYPES if (pair := (way, dtype)) not in NOT_DETERMINISTIC]
)
def test_a_kernel_computes_what_step_computes(way: str, dtype: torch.dtype, how: dict[str, Any]) -> None:
    plain, other = Loop(way, dtype, **how), Loop(way, dtype, **how)
    with instep.attach(other.model, other.optimizer, schedule="backward", bucket_bytes=1), Counted() as counted:
        for i in range(5):
            plain.step(i)
            other.step(i)
            assert (found := plain.difference(other)) is None, f"step {i}: {found}"
    parameters = len(list(plain.model.parameters()))
    makes_no_state = WAYS[way][1].get("momentum", 0) == 0 and way.startswith("sgd")
    # The first step makes the state, in torch's own way; from then on there is a call for each bucket.
    assert counted.calls == parameters * (5 if makes_no_state else 4)


def trained(way: str = "adamw") -> tuple[Loop, instep.Attachment]:
    """A loop whose next step calls kernels, and which has just run backward."""
    loop = Loop(way)
    overlap = instep.attach(loop.model, loop.optimizer, schedule="backward", bucket_bytes=1)
    for i in range(2):
        loop.step(i)
    return loop, overlap


def test_settings_changed_between_backward_and_step_are_found() -> None:
    for number in range(2):
        loop, overlap = trained()
        loop.model(torch.ones(4, 5)).sum().backward()
        loop.optimizer.param_groups[number]["lr"] = 0.5
        with pytest.raises(HyperparameterChangedError, match=rf"param_groups\[{number}\]\['lr'\] changed to 0.5"):
            loop.optimizer.step()
        assert overlap.state == "torn"
        overlap.detach()


def test_settings_changed_within_backward_are_found() -> None:
    loop, overlap = trained()

    def change(*_: object) -> None:
        loop.optimizer.param_groups[1]["lr"] = 0.5

    loop.model[2].register_full_backward_pre_hook(change)  # the last layer's bucket has been updated
    with pytest.raises(HyperparameterChangedError, match=r"param_groups\[1\]\['lr'\]"):
        loop.step(2)
    overlap.detach()


def test_autograd_counts_what_a_kernel_writes() -> None:
    """A weight that was saved for a later node is known to have been written."""
    loop, overlap = trained()
    before = [p._version for p in loop.model.parameters()]
    loop.step(2)
    assert all(now._version > then for now, then in zip(loop.model.parameters(), before, strict=True))
    overlap.detach()


def both(way: str, change: Callable[[Loop], object], at: int = 3, **more: Any) -> tuple[int, str | None]:
    """Trains a plain loop and an attached one, with ``change`` made in both before step ``at``.

    Returns:
        How many kernels were called from then on, and the first difference.
    """
    plain, other = Loop(way, **more), Loop(way, **more)
    with instep.attach(other.model, other.optimizer, schedule="backward", bucket_bytes=1), Counted() as counted:
        for i in range(6):
            if i == at:
                change(plain), change(other)
                counted.calls = 0
            plain.step(i)
            other.step(i)
            if (found := plain.difference(other)) is not None:
                return counted.calls, f"step {i}: {found}"
    return counted.calls, None


def test_a_list_of_betas_is_written_in_place() -> None:
    def make_lists(loop: Loop) -> None:
        for group in loop.optimizer.param_groups:
            group["betas"] = list(group["betas"])

    def write(loop: Loop) -> None:
        make_lists(loop) if isinstance(loop.optimizer.param_groups[0]["betas"], tuple) else None
        for group in loop.optimizer.param_groups:
            group["betas"][0] -= 0.1

    plain, other = Loop("adamw"), Loop("adamw")
    with instep.attach(other.model, other.optimizer, schedule="backward", bucket_bytes=1), Counted() as counted:
        for i in range(6):
            for loop in (plain, other):
                if i in (2, 4, 5):
                    write(loop)
                loop.step(i)
            assert (found := plain.difference(other)) is None, f"step {i}: {found}"
    assert counted.calls == 5 * len(list(plain.model.parameters()))


@pytest.mark.parametrize("way", ["sgd, momentum", "sgd", "adamw"])
def test_a_group_that_asks_for_foreach_too(way: str) -> None:
    """torch's SGD takes foreach then, and its Adam the fused kernel."""
    calls, found = both(way, lambda loop: [g.update(foreach=True) for g in loop.optimizer.param_groups])
    assert found is None
    assert calls > 0


@contextmanager
def nothing_replaced() -> Iterator[None]:
    """What a test replaces of torch's is put back."""
    with (
        patch.object(torch.optim.Adam, "_init_group", torch.optim.Adam._init_group),
        patch.object(ADAM, "adam", ADAM.adam),
        patch.object(ADAM, "_fused_adam", ADAM._fused_adam),
    ):
        yield


@pytest.mark.parametrize("where", ["instance", "Adam._init_group", "adam.adam", "adam._fused_adam"])
def test_somebody_replaces_what_step_calls(where: str) -> None:
    """No kernel is called from then on; and again, once it is put back."""
    called: list[str] = []

    def replaced(of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            called.append(where)
            return of(*args, **options)

        return call

    def change(loop: Loop) -> None:
        optimizer: Any = loop.optimizer
        if where == "instance":
            optimizer._init_group = replaced(optimizer._init_group)
        elif where == "Adam._init_group":
            torch.optim.Adam._init_group = replaced(torch.optim.Adam._init_group)  # type: ignore[method-assign]
        else:
            name = where.rpartition(".")[2]
            setattr(ADAM, name, replaced(getattr(ADAM, name)))

    with nothing_replaced():
        calls, found = both("adam", change)
    assert (calls, found) == (0, None)
    assert called
    calls, found = both("adam", lambda loop: None)
    assert found is None
    assert calls > 0


def test_what_torch_compile_wraps_is_torchs() -> None:
    """It wraps what calls a fused kernel once anything is compiled."""
    with nothing_replaced():
        for name in ("adam", "_fused_adam"):
            setattr(ADAM, name, torch.compiler.disable(getattr(ADAM, name)))
        calls, found = both("adam", lambda loop: None)
    assert found is None
    assert calls > 0


def test_a_scale_that_the_class_has() -> None:
    """GradScaler puts it on the object, and torch reads it wherever it is."""

    class Scaled(torch.optim.Adam):
        grad_scale = torch.tensor(2.0)

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    entry = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    plain, scaled = torch.optim.Adam([weight], fused=True), Scaled([weight], fused=True)
    kernel = kernel_of(plain)
    assert kernel is not None
    found, groups = FoundState.of({weight: entry}, None), GroupLayout("Adam", plain.param_groups)
    buckets = [InBucket([weight], [weight], Placing())]
    assert kernel.calls(plain, buckets, groups, found) != [None]
    assert kernel.calls(scaled, buckets, groups, found) == [None]


def test_momentum_in_groups_of_which_one_is_fused() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        first, _, last = model
        groups: list[dict[str, Any]] = [{"params": list(first.parameters())}, {"params": list(last.parameters())}]
        groups[1]["fused"] = False
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)

    loops = [build(), build()]
    with instep.attach(*loops[1], schedule="backward", bucket_bytes=1):
        for i in range(4):
            for model, optimizer in loops:
                model(torch.full((3, 4), 1.0 + i)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            plain, other = (training_state(*loop) for loop in loops)
            assert first_difference(plain, other) is None


def test_a_count_that_is_no_tensor_is_left_to_torch() -> None:
    loop, overlap = trained("adam")
    for entry in loop.optimizer.state.values():
        entry["step"] = 3
    with pytest.raises(RuntimeError, match="state_steps"):
        loop.step(2)
    overlap.detach()


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's, once
def test_a_kernel_is_no_part_of_a_graph() -> None:
    plain, (other, overlap) = Loop("adamw"), trained()
    for i in range(2):
        plain.step(i)
    with Counted() as counted:
        for loop in (plain, other):
            loop.model(torch.ones(4, 5)).sum().backward(create_graph=True)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert plain.difference(other) is None
    assert counted.calls == len(list(other.model.parameters()))
    assert all(p.grad_fn is None and p.is_leaf for p in other.model.parameters())
    overlap.detach()


def test_one_bucket_of_two_groups_is_two_calls() -> None:
    plain, other = Loop("adamw"), Loop("adamw")
    with instep.attach(other.model, other.optimizer, schedule="backward", bucket_bytes=1 << 20), Counted() as counted:
        for i in range(4):
            plain.step(i)
            other.step(i)
    assert plain.difference(other) is None
    assert counted.calls == 2 * 3


def test_what_is_put_off_is_done_by_kernels_too() -> None:
    plain, other = Loop("adamw"), Loop("adamw")
    with instep.attach(other.model, other.optimizer, defer=True) as overlap, Counted() as counted:
        for i in range(4):
            plain.step(i)
            other.step(i)
        overlap.synchronize()
        assert counted.calls == 2 * 3
        assert plain.difference(other) is None


def scheduled(loop: Loop) -> Any:
    return torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1, gamma=0.5)


def test_settings_change_from_step_to_step() -> None:
    plain, other = Loop("adamw"), Loop("adamw")
    schedulers = [scheduled(plain), scheduled(other)]
    with instep.attach(other.model, other.optimizer, schedule="backward"), Counted() as counted:
        for i in range(5):
            for loop, scheduler in zip((plain, other), schedulers, strict=True):
                loop.step(i)
                scheduler.step()
                loop.optimizer.param_groups[1]["betas"] = (0.9 - 0.1 * i, 0.95)
                loop.optimizer.param_groups[0]["weight_decay"] = 0.1 * i
            assert plain.difference(other) is None
    assert counted.calls == 2 * 4


def replaced_by_copies(loop: Loop) -> None:
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def without_one_entry(loop: Loop) -> None:
    del loop.optimizer.state[next(loop.model.parameters())]


def written_in_place(loop: Loop) -> None:
    for entry in loop.optimizer.state.values():
        entry["exp_avg"].mul_(0.5)
        entry["step"].fill_(7)


def moments_swapped(loop: Loop) -> None:
    for entry in loop.optimizer.state.values():
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"].abs()


@pytest.mark.parametrize("change", [replaced_by_copies, without_one_entry, written_in_place, moments_swapped])
def test_state_is_the_optimizers_in_each_step(change: Any) -> None:
    """Nothing of it is kept from one step to the next."""
    plain, other = Loop("adamw"), Loop("adamw")
    with instep.attach(other.model, other.optimizer, schedule="backward"):
        for i in range(5):
            for loop in (plain, other):
                loop.step(i)
                if i == 2:
                    change(loop)
            assert (found := plain.difference(other)) is None, f"step {i}: {found}"


class Capable(torch.optim.AdamW):
    """A class of the user's own: what else it does is not known."""


def tensor_rate(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])


def test_what_the_kernel_is_not_asked_for_is_left_to_step() -> None:
    plain, other = Loop("adamw"), Loop("adamw")
    for loop in (plain, other):
        tensor_rate(loop)
    with instep.attach(other.model, other.optimizer, schedule="backward"), Counted() as counted:
        for i in range(4):
            plain.step(i)
            other.step(i)
            assert plain.difference(other) is None
    assert counted.calls == 0


def test_a_class_of_somebody_elses_has_no_kernel() -> None:
    model = nn.Linear(2, 2)
    assert kernel_of(torch.optim.AdamW(model.parameters(), fused=True)) is not None
    assert kernel_of(Capable(model.parameters(), fused=True)) is None
    assert kernel_of(torch.optim.Adamax(model.parameters())) is None


def test_a_step_of_torchs_that_was_replaced_is_called() -> None:
    """Trainers patch a class, too. Theirs may wrap torch's own."""
    told: list[int] = []
    original = torch.optim.AdamW.step

    def step(self: Any, closure: Any = None) -> Any:
        told.append(len(self.param_groups))
        return original(self, closure)

    step.__wrapped__ = original  # type: ignore[attr-defined]
    with patch.object(torch.optim.AdamW, "step", step):
        assert kernel_of(torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)) is None
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert kernel_of(optimizer) is not None, "a scheduler's patch only counts the calls"


def test_a_loss_scale_that_the_kernel_takes_off_is_left_to_step() -> None:
    plain, other = Loop("adamw"), Loop("adamw")
    with instep.attach(other.model, other.optimizer, defer=True) as overlap, Counted() as counted:
        for i in range(4):
            for loop in (plain, other):
                loop.optimizer.grad_scale = torch.tensor(4.0) if i == 2 else None  # type: ignore[attr-defined]
                loop.optimizer.found_inf = torch.tensor(0.0) if i == 2 else None  # type: ignore[attr-defined]
                loop.step(i)
        overlap.synchronize()
        assert plain.difference(other) is None
    assert counted.calls == 2 * 2


SCALES: dict[str, Callable[[int], tuple[float | None, float | None]]] = {
    "always": lambda i: (4.0, None),
    "a scale": lambda i: (4.0 if i == 2 else None, None),
    "a scale that is no power of two": lambda i: (3.0 if i == 2 else None, None),
    "an infinity": lambda i: (None, 1.0 if i == 2 else None),
}
BETWEEN = "set or written between backward"


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "backward"}, BETWEEN),
        ({"schedule": "backward", "undo": True}, None),
        ({"defer": True}, None),
        ({}, None),
    ],
)
def test_a_loss_scale_that_the_loop_gives_the_kernel(options: dict[str, Any], message: str | None, scales: str) -> None:
    """Once for all steps, or between backward and ``step()``, as GradScaler does, and without GradScaler."""
    plain, other = Loop("adamw"), Loop("adamw")

    def tell(loop: Loop, i: int) -> None:
        for name, value in zip(("grad_scale", "found_inf"), SCALES[scales](i), strict=True):
            if value is not None or scales != "always":
                setattr(loop.optimizer, name, None if value is None else torch.tensor(value))

    with instep.attach(other.model, other.optimizer, **options) as overlap:
        for loop in (plain, other) if scales == "always" else ():
            tell(loop, 0)
        for i in range(4):
            for loop in (plain, other):
                torch.manual_seed(i)
                (loop.model(torch.randn(4, 5)) - 1).square().mean().backward()
                if scales != "always":
                    tell(loop, i)
                if loop is other and message is not None and scales != "always" and i == 2:
                    with pytest.raises(HyperparameterChangedError, match=message):
                        loop.optimizer.step()
                    return
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            overlap.synchronize()
            assert plain.difference(other) is None, i


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("options", [{"schedule": "backward"}, {"schedule": "backward", "undo": True}])
def test_a_loss_scale_that_is_written_in_place(options: dict[str, Any], name: str) -> None:
    plain, other = Loop("adamw"), Loop("adamw")
    for loop in (plain, other):
        setattr(loop.optimizer, name, torch.tensor(float(name == "grad_scale")))
    with instep.attach(other.model, other.optimizer, **options):
        for i in range(4):
            for loop in (plain, other):
                torch.manual_seed(i)
                (loop.model(torch.randn(4, 5)) - 1).square().mean().backward()
                if i == 2:
                    getattr(loop.optimizer, name).fill_(1.0 if name == "found_inf" else 4.0)
                if i == 2 and loop is other and "undo" not in options:
                    with pytest.raises(HyperparameterChangedError, match="set or written between backward"):
                        loop.optimizer.step()
                    return
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            assert plain.difference(other) is None, i


COUNTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": torch.Tensor.double,
    "int64": torch.Tensor.long,
    "float16": torch.Tensor.half,
    "one element": lambda counter: counter.view(1),
}


@pytest.mark.parametrize("kind", COUNTERS)
@pytest.mark.parametrize("options", [{"schedule": "backward"}, {"schedule": "backward", "undo": True}])
def test_counters_of_another_kind(options: dict[str, Any], kind: str) -> None:
    """As a checkpoint may bring them. torch refuses some."""
    ends: list[str | None] = []
    loops = Loop("adamw"), Loop("adamw")
    for number, loop in enumerate(loops):
        for i in range(2):
            loop.step(i)
        for entry in loop.optimizer.state.values():
            entry["step"] = COUNTERS[kind](entry["step"])
        overlap = instep.attach(loop.model, loop.optimizer, **options) if number else None
        try:
            for i in range(2, 4):
                loop.step(i)
            ends.append(None)
        except RuntimeError as error:
            ends.append(str(error).partition("\n")[0])
        if overlap is not None:
            overlap.detach()
    plain, found = ends
    assert (plain is None) == (found is None), (plain, found)
    assert plain is not None or loops[0].difference(loops[1]) is None


def test_counters_that_require_a_gradient_while_a_step_is_put_off() -> None:
    """Whoever waits for it may be in a forward, and autograd takes no such write of a leaf."""
    plain, other = Loop("adamw"), Loop("adamw")
    for loop in (plain, other):
        for i in range(2):
            loop.step(i)
        for entry in loop.optimizer.state.values():
            entry["step"] = nn.Parameter(entry["step"])
    with instep.attach(other.model, other.optimizer, defer=True) as overlap, late_updates():
        for i in range(2, 4):
            plain.step(i)
            other.step(i)
        overlap.synchronize()
        assert plain.difference(other) is None


def test_a_decay_that_this_torch_does_not_know_in_a_group() -> None:
    """As in a checkpoint of a newer torch's. The key tells one class of torch from the other since 2.7."""
    plain, other = Loop("adam, coupled decay"), Loop("adam, coupled decay")
    with instep.attach(other.model, other.optimizer, schedule="backward"):
        for i in range(3):
            for loop in (plain, other):
                for group in loop.optimizer.param_groups:
                    group["decoupled_weight_decay"] = True
                loop.step(i)
        assert plain.difference(other) is None


def test_torch_hands_the_kernel_what_instep_hands_it() -> None:
    """A new argument, or a new list, in torch: then ``kernels.py`` lacks it."""
    for way, name in (("adam", "_fused_adam_"), ("adamw", "_fused_adamw_"), ("sgd, momentum", "_fused_sgd_")):
        seen: list[tuple[list[list[tuple[int, ...]]], dict[str, Any]]] = []
        kernel = getattr(torch, name)

        def told(*lists: Any, _kernel: Any = kernel, _seen: Any = seen, **options: Any) -> None:
            given = {key: value for key, value in options.items() if value is not None}
            _seen.append(([[tuple(t.shape) for t in one] for one in lists], given))
            _kernel(*lists, **options)

        loop, attached = Loop(way), Loop(way)
        for i in range(2):  # state is there from the second on
            loop.step(i)
            attached.step(i)
        overlap = instep.attach(attached.model, attached.optimizer, schedule="backward", bucket_bytes=1 << 20)
        with overlap, patch.object(torch, name, told):
            loop.step(2)
            by_torch = sorted(seen, key=repr)
            seen.clear()
            attached.step(2)
            by_instep = sorted(seen, key=repr)
        assert len(by_torch) == 2
        assert [options for _, options in by_torch] == [options for _, options in by_instep]
        assert [list(map(sorted, lists)) for lists, _ in by_torch] == [
            list(map(sorted, lists)) for lists, _ in by_instep
        ]


def test_a_function_runs_as_in_step() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(*lists: object, **options: object) -> None:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", torch.bfloat16):
        _as_in_step(function, "cpu", [], lr=1.0)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert seen == [(False, False)]


@pytest.mark.parametrize("foreach", [True, False])
def test_complex_parameters(foreach: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3, dtype=torch.complex64)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)

    loops = build(), build()
    with instep.attach(*loops[1], schedule="backward", bucket_bytes=1), Counted() as counted:
        for i in range(4):
            for model, optimizer in loops:
                model(torch.full((2, 3), 1.0 + i, dtype=torch.complex64)).abs().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            plain, other = (training_state(*loop) for loop in loops)
            assert first_difference(plain, other) is None
    assert counted.calls > 0


@pytest.mark.parametrize("made_by", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_no_fused_kernel_counts_a_write(made_by: Any) -> None:
    """Where one does, ``_SwitchesAtStep.counts_writes`` is to say so: a graph that has saved the old weights refuses to
    run after the plain loop's step, and after one that is put off then, too."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones_like(parameter)
    made_by([parameter], lr=0.1, fused=True).step()
    assert parameter.item() != 0
    assert parameter._version == 0
