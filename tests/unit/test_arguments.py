"""Every public verb with wrong arguments: each is refused by an error of instep's that names the argument."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from typer.testing import CliRunner

import instep
from instep.errors import AttachError, InstepError, UnsupportedOptimizerError
from instep_tools.cli import app
from instep_tools.output import CannotRunError
from instep_tools.planning.model import options_of


class Given:
    """A model, its optimizer, and a directory."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = nn.Linear(3, 3)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.directory = directory

    def build(self) -> tuple[Any, Any, Callable[[int], None]]:
        return self.model, self.optimizer, lambda i: None

    def attach(self, **options: Any) -> instep.Attachment:
        return instep.attach(self.model, self.optimizer, **{"schedule": "backward", **options})


class StepsNothing:
    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None: ...

    @classmethod
    def state(cls) -> Any:
        return instep.OptimizerHookState(cls())


@pytest.fixture
def given(tmp_path: Path) -> Iterator[Given]:
    made = Given(tmp_path)
    yield made
    overlap = instep.attached(made.model)
    if overlap is not None:
        overlap.detach()


Value = Callable[[Given], Any]
NOTHING: dict[str, Value] = {
    "None": lambda g: None,
    "a number": lambda g: 3,
    "a string": lambda g: "adam",
    "bytes": lambda g: b"adam",
    "a function": lambda g: lambda x: x,
    "NaN": lambda g: float("nan"),
    "a huge number": lambda g: 10**400,
    "a complex number": lambda g: 1j,
    "a tensor": lambda g: torch.ones(2),
    "a class": lambda g: torch.optim.SGD,
    "a class of models": lambda g: nn.Linear,
    "a scheduler": lambda g: g.scheduler,
    "a dict": lambda g: {"a": g.optimizer},
    "a set": lambda g: {3},
    "an empty list": lambda g: [],
    "a mixed list": lambda g: [g.optimizer, g.model],
    "a list of nothing": lambda g: [None],
    "parameters": lambda g: list(g.model.parameters()),
    "a generator of parameters": lambda g: g.model.parameters(),
    "the model": lambda g: g.model,
    "the optimizer": lambda g: g.optimizer,
    "a negative number": lambda g: -1,
    "a fraction": lambda g: 1.5,
    "a flag": lambda g: True,
}
FLAGS = {"a flag"}
Verb = Callable[[Given, Any], Any]
# The argument as messages name it, the verb, and the values that are right.
VERBS: dict[str, tuple[str, Verb, set[str]]] = {
    "attach model": ("model", lambda g, v: instep.attach(v, g.optimizer, schedule="backward"), {"the model"}),
    "attach optimizer": ("optimizer", lambda g, v: instep.attach(g.model, v, schedule="backward"), {"the optimizer"}),
    "attached": ("model", lambda g, v: instep.attached(v), {"the model"}),
    "record model": ("model", lambda g, v: instep.record(v, g.optimizer), {"the model"}),
    "record optimizer": ("optimizer", lambda g, v: instep.record(g.model, v), {"the optimizer"}),
    "record steps": ("steps", lambda g, v: instep.record(g.model, g.optimizer, v), {"a number", "a huge number"}),
    "replicate": ("model", lambda g, v: instep.replicate(v), {"the model"}),
    "verify build": ("build", lambda g, v: instep.verify(v, schedule="backward"), {"a function"}),
    "verify, what build returns": ("build", lambda g, v: instep.verify(lambda: v, schedule="backward"), set()),
    "verify, the model": (
        "model",
        lambda g, v: instep.verify(lambda: (v, *g.build()[1:]), schedule="backward"),
        {"the model"},
    ),
    "verify, the optimizer": (
        "optimizer",
        lambda g, v: instep.verify(lambda: (g.model, v, print), schedule="backward"),
        {"the optimizer"},
    ),
    "verify steps": (
        "steps",
        lambda g, v: instep.verify(g.build, v, schedule="backward"),
        {"a number", "a huge number"},
    ),
    "ClipNorm": ("max_norm", lambda g, v: instep.ClipNorm(v), {"a number", "a fraction"}),
    "ClipNorm norm_type": ("norm_type", lambda g, v: instep.ClipNorm(1.0, v), {"a number", "a fraction"}),
    "ClipNorm error_if_nonfinite": (
        "error_if_nonfinite",
        lambda g, v: instep.ClipNorm(1.0, error_if_nonfinite=v),
        FLAGS,
    ),
    "ClipNorm mode": ("mode", lambda g, v: instep.ClipNorm(1.0, mode=v), set()),
    "ClipValue": ("clip_value", lambda g, v: instep.ClipValue(v), {"a number", "a fraction"}),
    "apply_optimizer_in_backward, the class": (
        "optimizer_class",
        lambda g, v: instep.apply_optimizer_in_backward(v, nn.Linear(2, 2).parameters(), {"lr": 0.1}),
        {"a class"},
    ),
    "apply_optimizer_in_backward, the parameters": (
        "params",
        lambda g, v: instep.apply_optimizer_in_backward(torch.optim.SGD, v, {"lr": 0.1}),
        {"parameters", "a generator of parameters"},
    ),
    "apply_optimizer_in_backward, the options": (
        "optimizer_kwargs",
        lambda g, v: instep.apply_optimizer_in_backward(torch.optim.SGD, nn.Linear(2, 2).parameters(), v),
        set(),
    ),
    "get_in_backward_optimizers": ("module", lambda g, v: instep.get_in_backward_optimizers(v), {"the model"}),
    "as_overlapped_optim": (
        "torch.optim.Optimizer class",
        lambda g, v: instep.as_overlapped_optim(v, None),
        {"a class"},
    ),
    "register_overlapped": ("optim_cls", lambda g, v: instep.register_overlapped(v), {"a class", "a class of models"}),
    "AllreduceUpcastHookState": (
        "ddp_weakref",
        lambda g, v: instep.AllreduceUpcastHookState(v, torch.Stream(device="cpu")),
        set(),
    ),
    "OptimizerHookState": ("functional_optim", lambda g, v: instep.OptimizerHookState(v), set()),
    "hook_then_optimizer, the hook": (
        "hook must be",
        lambda g, v: instep.hook_then_optimizer(v, StepsNothing.state()),
        {"a function", "a class", "a class of models", "the model"},
    ),
    "hook_then_optimizer, the optimizer": (
        "optimizer_state",
        lambda g, v: instep.hook_then_optimizer(cast(Any, print), v),
        set(),
    ),
    "apply_optim_in_backward_hook": (
        "gradient_is_bucket_view",
        lambda g, v: instep.apply_optim_in_backward_hook(v),
        FLAGS,
    ),
    "apply_optim_in_backward_hook, the hook": (
        "comm_hook",
        lambda g, v: instep.apply_optim_in_backward_hook(False, comm_hook=v),
        {"None"},
    ),
    "backward": ("loss", lambda g, v: g.attach(undo=True).backward(v), {"a tensor"}),
    "Attachment.record": ("steps", lambda g, v: g.attach(undo=True).record(v), {"a number", "a huge number"}),
    "recorder": (
        "recorder",
        lambda g, v: setattr(g.attach(undo=True), "recorder", v),
        {"None", "a function", "a class", "a class of models", "the model"},
    ),
    "resync_from": ("resync_from", lambda g, v: g.attach(undo=True).resync_from(v), set()),
}
OF_AN_ATTACHMENT = ("backward", "Attachment.record", "recorder", "resync_from")
OPTIONS: dict[str, set[str]] = {
    "schedule": set(),
    "bucket_bytes": {"None", "a number", "a huge number"},
    "clip": {"None"},
    "accumulation_steps": {"a number", "a huge number"},
    "scaler": {"None"},
    "undo": FLAGS,
    "nonfinite": set(),
    "comm_hook": {"None"},
    "mixed_precision": {"None"},
    "shard_state": set(),
}
VERBS |= {
    f"attach {name}": (name, lambda g, v, name=name: g.attach(**{name: v}), right)  # type: ignore[misc]
    for name, right in OPTIONS.items()
}


def right_for(verb: str) -> set[str]:
    return VERBS[verb][2]


@pytest.mark.parametrize(
    ("verb", "value"), [(verb, value) for verb in VERBS for value in NOTHING if value not in right_for(verb)]
)
def test_a_wrong_argument_is_refused_by_name(given: Given, verb: str, value: str) -> None:
    named, call, _ = VERBS[verb]
    before = [p.clone() for p in given.model.parameters()]
    with pytest.raises(InstepError if verb in OF_AN_ATTACHMENT else AttachError, match=re.escape(named)):
        call(given, NOTHING[value](given))
    assert all(map(torch.equal, before, given.model.parameters()))
    assert list(given.directory.iterdir()) == []


def elsewhere(name: str, *bases: type, **methods: Any) -> Any:
    """A class of another library's, of this name."""
    return type(name, bases, {"__module__": "elsewhere.optim", **methods})


@pytest.mark.parametrize("schedule", ["backward", "forward"])
@pytest.mark.parametrize("name", ["Adam", "Optimizer", "Tensor", "Unlike"])
def test_a_class_of_another_library_is_named_with_its_module(given: Given, name: str, schedule: Any) -> None:
    options: dict[str, Any] = {"schedule": schedule, "defer": True} if schedule == "forward" else {"schedule": schedule}
    for methods in ({}, {"step": print, "zero_grad": print}):
        other = elsewhere(name, **methods)()
        with pytest.raises(AttachError, match=rf"not elsewhere\.optim\.{name}$"):
            instep.attach(given.model, other, **options)
    default = repr(instep.attach(given.model, other))
    assert f"elsewhere.optim.{name} is no torch.optim.Optimizer" in default


def test_an_optimizer_with_the_name_of_one_of_torchs_is_named_with_its_module(given: Given) -> None:
    mine = elsewhere("LBFGS", torch.optim.LBFGS)(given.model.parameters())
    with pytest.raises(UnsupportedOptimizerError, match=r"^elsewhere\.optim\.LBFGS evaluates"):
        instep.attach(given.model, mine, schedule="backward")
    theirs = torch.optim.LBFGS(given.model.parameters())
    with pytest.raises(UnsupportedOptimizerError, match=r"^LBFGS evaluates"):
        instep.attach(given.model, theirs, schedule="backward")


@pytest.mark.parametrize(
    ("held", "advice"),
    [
        (lambda o: {"inner": o}, r"PyroOptim, which has an optimizer: give that one, PyroOptim\.inner"),
        (lambda o: {"of": {1: o}}, r"which holds several: pass the torch optimizers .* list\(optim\.of\.values\(\)\)$"),
        (lambda o: {"of": [o]}, r"which holds several: pass the torch optimizers that it holds, optim\.of$"),
        (lambda o: {"optim_objs": {}}, r"list\(optim\.optim_objs\.values\(\)\); .* attach after that"),
        (lambda o: {"of": []}, r"not elsewhere\.optim\.PyroOptim$"),
    ],
)
def test_what_holds_optimizers_is_told_how_to_give_them(given: Given, held: Any, advice: str) -> None:
    """As Pyro's, which makes one for each parameter, in the first step."""
    other = elsewhere("PyroOptim")()
    vars(other).update(held(given.optimizer))
    ways: list[dict[str, Any]] = [{}, {"schedule": "backward"}]
    for options in ways:
        with pytest.raises(AttachError, match=advice):
            instep.attach(given.model, other, **options)


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (
            lambda g: instep.attach(g.optimizer, g.model, schedule="backward"),
            "the model comes first, then its optimizer",
        ),
        (lambda g: instep.attach(g.model, g.model, schedule="backward"), "the model comes first, then its optimizer"),
        (
            lambda g: instep.attach(g.model, g.scheduler, schedule="backward"),
            r"StepLR, which has an optimizer: .*StepLR\.optimizer",
        ),
        (
            lambda g: instep.attach(g.model, cast(Any, torch.optim.SGD), schedule="backward"),
            r"the class SGD: make an object of it, SGD\(…\)",
        ),
        (
            lambda g: instep.attach(cast(Any, nn.Linear), g.optimizer, schedule="backward"),
            r"the class Linear: make an object of it, Linear\(…\)",
        ),
        (
            lambda g: instep.attach(g.model, g.model.parameters(), schedule="backward"),
            r"optimizer\[0\] must be .*, not Parameter: build an optimizer",
        ),
        (
            lambda g: instep.attach(g.model, [g.optimizer, g.model], schedule="backward"),
            r"optimizer\[1\] must be .*, not the model Linear",
        ),
        (
            lambda g: instep.attach(g.model, cast(Any, {"a": g.optimizer}), schedule="backward"),
            "dict: give its values as a list",
        ),
        (
            lambda g: instep.attach(g.model, g.optimizer, schedule="sideways"),  # type: ignore[arg-type]
            "schedule must be 'backward' or 'forward', not 'sideways'",
        ),
        (lambda g: instep.attach([], g.optimizer), "model is an empty list"),
        (
            lambda g: instep.attach(cast(Any, {"a": g.model}), g.optimizer),
            "model must be .*, not dict: give its values",
        ),
        (
            lambda g: instep.attach(cast(Any, lambda x: g.model(x)), g.optimizer),
            "model must be .*, not function: give the object itself",
        ),
        (
            lambda g: instep.attach(cast(Any, g.model.forward), g.optimizer),
            "model must be .*, not method: give the object itself",
        ),
        (
            lambda g: instep.attach([g.model, cast(Any, g.optimizer)], g.optimizer),
            r"model\[1\] must be a torch.nn.Module, not the optimizer SGD",
        ),
        (
            lambda g: instep.attach([nn.Linear(3, 3), g.model, g.model], g.optimizer),
            r"model\[1\] and model\[2\] are the same Linear",
        ),
        (
            lambda g: instep.attach([g.model, nn.Sequential(nn.ReLU(), g.model)], g.optimizer),
            r"model\[0\] is inside of model\[1\], as '1': give model\[1\] alone",
        ),
        (
            lambda g: instep.attach([nn.Linear(3, 3), nn.Linear(3, 3)], g.optimizer, schedule="backward"),
            r"SGD.param_groups\[0\]\['params'\]\[0\], of shape \(3, 3\), is not a parameter of the model",
        ),
        (
            lambda g: instep.attach(
                [g.model, nn.Linear(3, 3)],
                g.optimizer,
                mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            ),
            "mixed_precision does not go with a list of modules: casts are made inside the forward of one",
        ),
    ],
)
def test_the_usual_mistakes_get_advice(given: Given, call: Callable[[Given], Any], advice: str) -> None:
    with pytest.raises(AttachError, match=advice):
        call(given)


@pytest.mark.parametrize("opening", ["[", '{"instep":'])
def test_a_recording_that_is_nested_too_deeply(tmp_path: Path, opening: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(opening * 100_000)
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit)
    assert "is not a recording of instep's" in done.output


def test_a_recording_that_is_nested_within_what_it_holds(tmp_path: Path) -> None:
    """JSON can be read that is nested more deeply than Python prints."""
    path = tmp_path / "run.json"
    path.write_text('{"instep": {"format": ' + "[" * 900 + "]" * 900 + "}}")
    done = CliRunner().invoke(app, ["report", str(path)])
    assert isinstance(done.exception, SystemExit)
    assert "has format" in done.output


def test_an_option_of_a_plan_that_is_nested_too_deeply() -> None:
    with pytest.raises(CannotRunError, match="--option lr: its value is nested too deeply"):
        options_of(["lr=" + "-" * 100_000 + "1"])
