"""What is not saved, and what is not loaded: each is named, and nothing is changed."""

import itertools
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import instep
from instep.errors import CheckpointError, TornStepError, UncommittedStepError
from tests.cases import Blocks, Tied, batch, two_groups
from tests.checkpoint.loops import adamw, everything, learn, loss_of, made, require_same

NOTHING: Any = None

# Between steps alone.


def test_in_the_middle_of_a_step(tmp_path: Path) -> None:
    each: tuple[dict[str, Any], ...] = ({"schedule": "backward"}, {"schedule": "backward", "undo": True})
    for options in each:
        loop = made()
        with instep.attach(*loop, **options) as overlap:
            learn(*loop, range(1))
            loss_of(loop[0](batch(1)[0]), batch(1)[1]).backward()
            with pytest.raises(UncommittedStepError, match="step 2 is under way"):
                instep.save(tmp_path, *loop)
            loop[1].step()
            loop[1].zero_grad()
            overlap.require_committed()
    assert list(tmp_path.iterdir()) == []


def test_at_every_point_of_a_backward(tmp_path: Path) -> None:
    """Nothing is saved in backward itself, whichever buckets have been stepped."""
    loop = made()
    with instep.attach(*loop, bucket_bytes=1, schedule="backward"):
        found: list[bool] = []

        def save(*_: object) -> None:
            try:
                instep.save(tmp_path, *loop)
                found.append(True)
            except UncommittedStepError:
                found.append(False)

        handles = [p.register_post_accumulate_grad_hook(save) for p in loop[0].parameters()]
        learn(*loop, range(1))
        for handle in handles:
            handle.remove()
        first = found.index(False)
        assert first <= 1, "before the first gradient nothing has begun"
        assert not any(found[first:])
        assert len(found) == len(handles)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_torn_step(tmp_path: Path) -> None:
    loop = made()
    with instep.attach(*loop, bucket_bytes=1, schedule="backward"):
        learn(*loop, range(1))
        broken = loop[0].blocks[0].register_full_backward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(loop[0](batch(1)[0]), batch(1)[1]).backward()
        broken.remove()
        with pytest.raises(TornStepError):
            instep.save(tmp_path, *loop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"schedule": "backward"}, {"schedule": "forward", "defer": True}], ids=str)
def test_a_step_that_raised(tmp_path: Path, options: Any) -> None:
    """Half of the update was written: it shows when the save waits for it, if not before."""
    loop = made(lambda model: torch.optim.SGD(two_groups(model), lr=0.1, momentum=0.9, foreach=False))
    with instep.attach(*loop, **options):
        learn(*loop, range(1))
        loop[1].state[loop[0].blocks[1][1].weight]["momentum_buffer"] = torch.zeros(1, 2)
        with pytest.raises(RuntimeError, match="size of tensor"):  # noqa: PT012
            loss_of(loop[0](batch(1)[0]), batch(1)[1]).backward()
            loop[1].step()
            instep.save(tmp_path, *loop)
        with pytest.raises(TornStepError):
            instep.save(tmp_path, *loop)
    assert list(tmp_path.iterdir()) == []


def test_between_micro_batches(tmp_path: Path) -> None:
    each: tuple[dict[str, Any], ...] = ({"schedule": "backward"}, {"schedule": "backward", "accumulation_steps": 2})
    for options in each:
        loop = made()
        with instep.attach(*loop, **options) as overlap:
            held = torch.enable_grad() if options else overlap.accumulate()
            with held:
                loss_of(loop[0](batch(0)[0]), batch(0)[1]).backward()
                with pytest.raises(UncommittedStepError):
                    instep.save(tmp_path, *loop)
    assert list(tmp_path.iterdir()) == []


# Arguments.


def changed(name: str, value: Any) -> Callable[[Any, Path], Any]:
    return lambda loop, path: instep.save(path, *loop, **{"step": 1, name: value})


Point = namedtuple("Point", "x y")
holds_itself: list[Any] = []
holds_itself.append(holds_itself)
NOT_SAVED: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "no step": (lambda loop, path: instep.save(path, *loop), "is not attached: give step="),
    "a negative step": (changed("step", -1), "step must be"),
    "a boolean step": (changed("step", True), "step must be"),
    "a step in words": (changed("step", "1"), "step must be"),
    "keeping none": (changed("keep", 0), "keep must be"),
    "keeping half": (changed("keep", 1.5), "keep must be"),
    "an object": (changed("extra", {"a": [1, object()]}), r"extra\['a'\]\[1\] is a builtins\.object"),
    "a function": (changed("extra", {"f": len}), r"extra\['f'\] is a builtins\.builtin_function_or_method"),
    "a class": (changed("extra", (int,)), r"extra\[0\] is a builtins\.type"),
    "a set": (changed("extra", {1}), "extra is a builtins.set"),
    "a namedtuple": (changed("extra", Point(1, 2)), "Point, which cannot be saved"),
    "an array": (changed("extra", numpy.zeros(2)), "torch.from_numpy"),
    "a model": (changed("extra", nn.Linear(1, 1)), r"state_dict\(\)"),
    "a tensor as a key": (changed("extra", {torch.zeros(1): 1}), "the key of extra"),
    "what holds itself": (changed("extra", holds_itself), "deep, or holds itself"),
    "a sparse tensor": (changed("extra", torch.eye(2).to_sparse()), "extra is a torch.sparse_coo"),
    "a meta tensor": (changed("extra", torch.empty(2, device="meta")), "extra is a meta tensor"),
    "no optimizer": (
        lambda loop, path: instep.save(path, loop[0], 3 * [NOTHING], step=1),
        "torch.optim.Optimizer",
    ),
    "no model": (lambda loop, path: instep.save(path, NOTHING, loop[1], step=1), "must be a torch.nn.Module"),
    "an optimizer twice": (lambda loop, path: instep.save(path, loop[0], 2 * [loop[1]], step=1), "given twice"),
    "another's parameters": (lambda loop, path: instep.save(path, Blocks(), loop[1], step=1), "not in the model"),
}


@pytest.mark.parametrize("name", NOT_SAVED)
def test_what_is_not_saved(tmp_path: Path, name: str) -> None:
    loop = made()
    instep.save(tmp_path, *loop, step=0)
    call, message = NOT_SAVED[name]
    with pytest.raises(CheckpointError, match=message):
        call(loop, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000000"]


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for call in (
        lambda: instep.save(tmp_path / "file", *made(), step=1),
        lambda: instep.load(tmp_path / "file", *made()),
    ):
        with pytest.raises(CheckpointError, match="is a file"):
            call()


def test_a_later_checkpoint(tmp_path: Path) -> None:
    """The next load would take it, and not this one."""
    loop = made()
    for step in (1, 5):
        instep.save(tmp_path, *loop, step=step)
    with pytest.raises(CheckpointError, match="step-000000000005 is later than step 2"):
        instep.save(tmp_path, *loop, step=2)
    assert len(list(tmp_path.iterdir())) == 2


def test_modules_and_optimizers_with_state_of_their_own(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def get_extra_state(self) -> Any:
            return object()

    loop = made(build=lambda: nn.Sequential(Own(2, 2)))
    with pytest.raises(CheckpointError, match=r"module '0' \(Own\) keeps extra state"):
        instep.save(tmp_path, *loop, step=1)

    class Wrapper(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {}

    loop = made(lambda model: Wrapper(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="Wrapper has a state_dict"):
        instep.save(tmp_path, *loop, step=1)
    loop = made()
    loop[1].param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError, match=r"AdamW\.param_groups\[0\]\['hook'\] is a"):
        instep.save(tmp_path, *loop, step=1)
    loop = made()
    loop[1].state[loop[0].outer.bias]["made"] = object()
    with pytest.raises(CheckpointError, match=r"AdamW\.state of 'outer\.bias': \['made'\] is a"):
        instep.save(tmp_path, *loop, step=1)
    loop = made()
    optimizer, key = loop[1], id(loop[0].outer.bias)
    optimizer.state[key] = {"momentum": 0.5}
    with pytest.raises(CheckpointError, match=r"AdamW keeps the state of a parameter under its id\(\)"):
        instep.save(tmp_path, *loop, step=1)


# What does not fit.


def other_class(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(two_groups(model), lr=1e-2, amsgrad=True)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def three_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = two_groups(model)
    return torch.optim.AdamW([*groups[:1], *({"params": [p]} for p in groups[1]["params"])], lr=1e-2)


def moved(model: nn.Module) -> torch.optim.Optimizer:
    first, second = two_groups(model)
    second["params"].append(first["params"].pop())
    return torch.optim.AdamW([first, second], lr=1e-2)


def some(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model)[:1], lr=1e-2)


def four_betas(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.param_groups[0]["betas"] = (0.9, 0.9, 0.9)
    return optimizer


def other_shape(model: Any) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.state[model.outer.bias]["exp_avg"] = torch.zeros(3)
    return optimizer


Made = Callable[[], tuple[nn.Module, Any]]
NOT_LOADED: dict[str, tuple[Made, str]] = {
    "narrower": (lambda: made(build=lambda: Blocks(width=23)), r"'inner.weight' is \(24, 16\) .* and \(23, 16\)"),
    "deeper": (
        lambda: made(build=lambda: Blocks(depth=4)),
        r"'blocks\.3\.0\.weight'.* are not in the checkpoint, none are",
    ),
    "shallower": (
        lambda: made(build=lambda: Blocks(depth=2)),
        r"none are not in the checkpoint, 'blocks\.2\.0\.weight'",
    ),
    "another": (lambda: made(build=Tied), "is of another model"),
    "in half": (lambda: made(build=lambda: Blocks().half()), "torch.float32 in the checkpoint and .* torch.float16"),
    "another class": (lambda: made(other_class), "of torch.optim.adamw.AdamW, and Adam is torch.optim.adam.Adam"),
    "one group": (lambda: made(one_group), "no group in the checkpoint has just these"),
    "more groups": (lambda: made(three_groups), "no group in the checkpoint has just these"),
    "moved": (lambda: made(moved), "no group in the checkpoint has just these"),
    "fewer parameters": (lambda: made(some), "no optimizer in the checkpoint has the parameters of AdamW"),
    "other betas": (lambda: made(four_betas), r"param_groups\[0\]\['betas'\] is"),
    "other state": (lambda: made(other_shape), r"'exp_avg' of 'outer\.bias'"),
}


@pytest.mark.parametrize("name", NOT_LOADED)
def test_what_does_not_fit(tmp_path: Path, name: str) -> None:
    loop = made()
    learn(*loop, range(2))
    instep.save(tmp_path, *loop, step=2)
    build, message = NOT_LOADED[name]
    model, optimizer = build()
    before = list(everything(model, optimizer))
    with pytest.raises(CheckpointError, match=message):
        instep.load(tmp_path, model, optimizer)
    require_same(before, (model, optimizer), "a load that failed")


def test_weights_that_are_tied_in_one_alone(tmp_path: Path) -> None:
    tied, free = made(adam, build=Tied), made(adam, build=Tied)
    free[0].head.weight = nn.Parameter(free[0].head.weight.detach().clone())
    free = free[0], adam(free[0])
    for number, (first, then) in enumerate(itertools.permutations([tied, free])):
        instep.save(tmp_path / str(number), *first, step=0)
        with pytest.raises(CheckpointError, match="tied in one of the two alone"):
            instep.load(tmp_path / str(number), *then)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def test_fewer_optimizers(tmp_path: Path) -> None:
    model = Blocks()
    optimizers = [torch.optim.SGD(group["params"], lr=0.1) for group in two_groups(model)]
    instep.save(tmp_path, model, optimizers, step=1)
    with pytest.raises(CheckpointError, match="2 optimizers, and 1 were given"):
        instep.load(tmp_path, model, optimizers[:1])


def test_a_load_that_fails_leaves_a_torn_step_torn(tmp_path: Path) -> None:
    loop = made()
    learn(*loop, range(1))
    instep.save(tmp_path, *loop, step=1)
    other = made(other_class)
    with instep.attach(*other, bucket_bytes=1, schedule="backward"):
        broken = other[0].blocks[0].register_full_backward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(other[0](batch(1)[0]), batch(1)[1]).backward()
        broken.remove()
        with pytest.raises(CheckpointError, match=r"and Adam is torch\.optim"):
            instep.load(tmp_path, *other)
        with pytest.raises(TornStepError):
            other[0](batch(1)[0])
