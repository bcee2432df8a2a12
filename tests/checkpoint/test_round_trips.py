"""Training that is saved, thrown away and loaded is, bit for bit, training that went on."""

import copy
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import instep
from instep.errors import CheckpointError
from tests.cases import Blocks, Rotations, Tied, attachment_of, batch, optimizer_cases, two_groups
from tests.checkpoint.loops import adamw, everything, learn, load_from, loss_of, made, require_same
from tests.late import late_updates

CASES = {case[0]: case for case in optimizer_cases()}
BACKWARD = {"schedule": "backward"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": BACKWARD,
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
}


def resumed(path: Path, make: Any, options: Mapping[str, Any] | None, seed: int = 1, build: Any = Blocks) -> None:
    """Two steps, a checkpoint, two more; and the same two by others that load it. ``options``: attached with them."""
    first = made(make, build=build)
    if options is not None:
        instep.attach(*first, **options)
    learn(*first, range(2))
    step: dict[str, Any] = {"step": 2} if options is None else {}
    instep.save(path, *first, **step)
    saved = list(everything(*first))
    learn(*first, range(2, 4))
    then = made(make, seed, build=build)
    attachment = None if options is None else instep.attach(*then, **options)
    found = instep.load(path, *then)
    assert found is not None
    assert (found.step, found.world_size, found.extra) == (2, 1, None)
    require_same(saved, then, "loaded")
    learn(*then, range(2, 4))
    for one in (first, then):
        if options is not None:
            attachment_of(one[0]).synchronize()
            attachment_of(one[0]).detach()
    require_same(first, then, "two steps later")
    assert attachment is None or attachment.step_count == 4


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer(tmp_path: Path, name: str) -> None:
    _, cls, kwargs = CASES[name]
    options = [None, *WAYS.values()][list(CASES).index(name) % 4]
    resumed(tmp_path, lambda model: cls(two_groups(model), **kwargs), options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["AdamW-0-foreach", "Adafactor-0-foreach"])
def test_every_way(tmp_path: Path, way: str, name: str) -> None:
    _, cls, kwargs = CASES[name]
    resumed(tmp_path, lambda model: cls(two_groups(model), **kwargs), WAYS[way])


def test_optimi(tmp_path: Path) -> None:
    optimi = pytest.importorskip("optimi")
    resumed(tmp_path, lambda model: optimi.Lion(two_groups(model), lr=1e-3), BACKWARD)


def test_schedule_free(tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")

    def make(model: nn.Module) -> Any:
        optimizer = schedulefree.AdamWScheduleFree(two_groups(model), lr=1e-2, warmup_steps=3)
        optimizer.train()
        return optimizer

    resumed(tmp_path, make, BACKWARD)


def test_lbfgs_with_its_history(tmp_path: Path) -> None:
    first, then = (made(lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4), seed) for seed in (0, 1))
    x, y = batch(0)

    def learn_twice(model: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    learn_twice(*first)
    instep.save(tmp_path, *first, step=2)
    instep.load(tmp_path, *then)
    require_same(first, then, "loaded")
    learn_twice(*first)
    learn_twice(*then)
    require_same(first, then, "later")


@pytest.mark.parametrize(
    "build", [Tied, Rotations, lambda: Blocks().to(torch.bfloat16)], ids=["tied", "complex", "bf16"]
)
def test_models_with_something_odd(tmp_path: Path, build: Any) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        x = torch.arange(12).view(3, 4) if isinstance(model, Tied) else batch(0)[0]
        model(
            x.to(next(model.parameters()).dtype) if x.is_floating_point() and build is not Rotations else x
        ).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    first, then = made(sgd, build=build), made(sgd, seed=1, build=build)
    step(*first)
    instep.save(tmp_path, *first, step=1)
    instep.load(tmp_path, *then)
    require_same(first, then, "loaded")
    step(*first)
    step(*then)
    require_same(first, then, "later")


def test_buffers_strides_and_frozen_parameters(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out
        model[0].bias.requires_grad_(False)
        model.register_buffer("mask", torch.full((3,), float("-inf")))
        model.register_buffer("cache", torch.rand(2), persistent=False)
        return model

    first, then = made(build=build), made(build=build, seed=1)
    first[0](torch.randn(2, 4, 8, 8)).square().mean().backward()
    first[1].step()
    instep.save(tmp_path, *first, step=1)
    cache = then[0].cache.clone()
    instep.load(tmp_path, *then)
    assert torch.equal(then[0].cache, cache), "a buffer that is not persistent was written"
    first[0].cache.copy_(cache)
    require_same(first, then, "loaded")
    for one in (first, then):
        assert one[1].state[one[0][0].weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_element_of_any_stride_and_floats_of_eight_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        model.scales = nn.Parameter(torch.rand(4).to(dtype), requires_grad=False)
        return model

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    (model, optimizer), then = made(adam, build=build), made(adam, build=build, seed=1)
    model(torch.randn(2, 3)).square().mean().backward()
    optimizer.step()
    for entry in optimizer.state.values():
        entry["distance"] = torch.arange(30.0)[3::11][:1]
        assert entry["distance"].stride() == (11,)
    instep.save(tmp_path / "first", model, optimizer, step=1)
    instep.load(tmp_path / "first", *then)
    require_same((model, optimizer), then, "loaded")
    with torch.no_grad():
        model.scales[1] = float("nan")
    with pytest.raises(CheckpointError, match="'model/scales' is not finite"):
        instep.save(tmp_path / "second", model, optimizer, step=1)


def test_several_optimizers_given_in_another_order(tmp_path: Path) -> None:
    def two(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = Blocks()
        matrices, rest = (group["params"] for group in two_groups(model))
        return model, [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]

    first, (sgd, adam) = two(0)
    then, (sgd_then, adam_then) = two(1)
    loss_of(first(batch(0)[0]), batch(0)[1]).backward()
    sgd.step()
    adam.step()
    instep.save(tmp_path, first, [sgd, adam], step=1)
    instep.load(tmp_path, then, [adam_then, sgd_then])
    require_same((first, sgd), (then, sgd_then), "loaded")
    require_same((first, adam), (then, adam_then), "loaded")


def test_parameters_and_groups_in_another_order(tmp_path: Path) -> None:
    """torch's own load_state_dict gives momentum to whatever parameter stands in its place."""

    def other_order(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{**group, "params": group["params"][::-1]} for group in two_groups(model)]
        groups[0]["lr"], groups[1]["lr"] = 3e-3, 1e-2
        return torch.optim.AdamW([{**groups[1], "lr": 5.0}, {**groups[0], "lr": 7.0}], lr=1e-2, amsgrad=True)

    first, then = made(), made(other_order, seed=1)
    learn(*first, range(2))
    instep.save(tmp_path, *first, step=2)
    instep.load(tmp_path, *then)
    assert [group["lr"] for group in then[1].param_groups] == [3e-3, 1e-2]
    learn(*first, range(2, 4))
    learn(*then, range(2, 4))
    assert all(map(torch.equal, first[0].parameters(), then[0].parameters()))


def test_tied_weights_under_either_name(tmp_path: Path) -> None:
    class HeadFirst(Tied):
        def __init__(self) -> None:
            super().__init__()
            self._modules = dict(reversed(self._modules.items()))

    first, then = made(build=Tied), made(build=HeadFirst, seed=1)
    assert next(iter(dict(then[0].named_parameters()))) == "head.weight"
    instep.save(tmp_path, *first, step=0)
    instep.load(tmp_path, *then)
    assert torch.equal(first[0].embedding.weight, then[0].head.weight)


def test_wrapped_and_not(tmp_path: Path) -> None:
    first, then = made(), made(seed=1)
    learn(*first, range(2))
    compiled: Any = torch.compile(first[0], backend="eager")
    instep.save(tmp_path, compiled, first[1], step=2)
    instep.load(tmp_path, *then)
    require_same(first, then, "loaded")
    instep.load(tmp_path, nn.DataParallel(then[0]), then[1])


def test_with_and_without_instep(tmp_path: Path) -> None:
    plain, attached = made(), made(seed=1)
    learn(*plain, range(2))
    instep.save(tmp_path, *plain, step=2)
    with instep.attach(*attached, schedule="forward", defer=True) as overlap:
        instep.load(tmp_path, *attached)
        assert overlap.step_count == 2
        learn(*plain, range(2, 3))
        learn(*attached, range(2, 3))
        instep.save(tmp_path, *attached)
    other = made(seed=2)
    assert load_from(tmp_path, *other).step == 3
    require_same(plain, other, "from plain to attached and back")


def test_updates_that_are_still_due(tmp_path: Path) -> None:
    plain, late = made(), made()
    learn(*plain, range(2))
    with instep.attach(*late, schedule="forward", defer=True), late_updates():
        learn(*late, range(2))
        instep.save(tmp_path, *late)
        then = made(seed=1)
        instep.load(tmp_path, *then)
        require_same(plain, then, "saved while due")
        learn(*late, range(2, 4))
        instep.load(tmp_path, *late)
        require_same(plain, late, "loaded while due")


def test_the_norm_that_the_next_step_clips_by(tmp_path: Path) -> None:
    resumed(tmp_path, adamw, {**BACKWARD, "clip": instep.ClipNorm(1e-3, mode="previous_norm")})


def test_extra(tmp_path: Path) -> None:
    loop = made()
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        loop[1],
        [torch.optim.lr_scheduler.LinearLR(loop[1]), torch.optim.lr_scheduler.MultiStepLR(loop[1], [3, 3, 5])],
        [2],
    )
    extra = {
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "position": {1: (2, [3.5, None, True]), ("a", 0): "b", None: b"\0\xff"},
        "floats": [float("inf"), float("-inf"), -0.0, 5e-324, 1.7976931348623157e308],
        "long": 2**200,
        "text": 'é\n"\ud800',
        "average": OrderedDict(loop[0].state_dict()),
        "counter": Counter("aab"),
        "empty": [{}, [], (), "", torch.empty(0, 3), torch.tensor(True)],
        "wide": torch.randn(3, 5).t()[:, ::2],
        "complex": torch.randn(2, dtype=torch.complex128).conj(),
    }
    expected = copy.deepcopy(extra)
    instep.save(tmp_path, *loop, step=3, extra=extra)
    found = load_from(tmp_path, *loop).extra
    require_equal(expected, found, "extra")
    scheduler.load_state_dict(found["scheduler"])
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    instep.save(tmp_path, *loop, step=3, extra=float("nan"))
    assert str(load_from(tmp_path, *loop).extra) == "nan"


def require_equal(expected: Any, found: Any, where: str) -> None:
    assert type(expected) is type(found), where
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == found.dtype, where
        assert torch.equal(expected, found), where
    elif isinstance(expected, dict):
        assert list(expected) == list(found), where
        for key in expected:
            require_equal(expected[key], found[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found), where
        for number, pair in enumerate(zip(expected, found, strict=True)):
            require_equal(*pair, f"{where}[{number}]")
    else:
        assert repr(expected) == repr(found), where


def test_tensor_learning_rates(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)

    resumed(tmp_path, make, BACKWARD)


def test_a_value_that_the_checkpoint_lacks_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer of a later version has a new one."""
    loop = made()
    instep.save(tmp_path, *loop, step=0)
    loop[1].param_groups[0]["new"] = 3
    with caplog.at_level(logging.WARNING, "instep"):
        instep.load(tmp_path, *loop)
    assert loop[1].param_groups[0]["new"] == 3
    assert "param_groups[0]['new'] are not in the checkpoint" in caplog.text


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    loop = made()
    path = instep.save(tmp_path, *loop, step=0)
    found = load_file(path / "rank-00000.safetensors")
    for name, parameter in loop[0].named_parameters():
        assert torch.equal(found[f"model/{name}"], parameter)


def test_nothing_yet(tmp_path: Path) -> None:
    loop = made()
    before = list(everything(*loop))
    assert instep.load(tmp_path, *loop) is None
    assert instep.load(tmp_path / "not there", *loop) is None
    require_same(before, loop, "nothing to load")


def test_what_is_kept(tmp_path: Path) -> None:
    loop = made()
    for step in (1, 2, 3, 3):
        path = instep.save(tmp_path, *loop, step=step)
    assert path.name == "step-000000000003.1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000000002", "step-000000000003.1"]
    (tmp_path / ".saving-4-00000000").mkdir()
    (tmp_path / ".saving-4-00000000" / "rank-00000.safetensors").write_bytes(b"half")
    assert load_from(tmp_path, *loop).path == path
    instep.save(tmp_path, *loop, step=4, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000004"]
    assert load_from(tmp_path / "step-000000000004", *loop).step == 4


def test_after_a_torn_or_open_step(tmp_path: Path) -> None:
    """Loading is the way out, without ``accept_torn()``."""
    expected = made()
    learn(*expected, range(2))
    for options in WAYS.values():
        loop = made()
        overlap = instep.attach(*loop, **options)
        learn(*loop, range(2))
        instep.save(tmp_path, *loop)
        learn(*loop, range(2, 3))
        loss_of(loop[0](batch(3)[0]), batch(3)[1]).backward()  # and no step
        assert load_from(tmp_path, *loop).step == overlap.step_count == 2
        assert all(p.grad is None for p in loop[0].parameters())
        if options == BACKWARD:
            broken = loop[0].blocks[1].register_full_backward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(loop[0](batch(3)[0]), batch(3)[1]).backward()
            broken.remove()
        require_loads(tmp_path, expected, loop)
        overlap.detach()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def require_loads(path: Path, expected: Any, loop: Any) -> None:
    instep.load(path, *loop)
    require_same(expected, loop, "loaded")
    then = made(seed=1)
    instep.load(path, *then)
    learn(*then, range(2, 4))
    learn(loop[0], loop[1], range(2, 4))
    attachment_of(loop[0]).synchronize()
    require_same(then, loop, "and trained on")
