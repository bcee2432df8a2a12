"""bitsandbytes' optimizers with settings of single parameters, as the Hugging Face Trainer gives them to embeddings."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep_tools.harness import first_difference, training_state
from tests.devices import here
from tests.parity.lockstep import WAYS

STEPS = 4
MIN_8BIT_SIZE = 16


class Words(nn.Module):
    """Two embeddings among other layers, one of them in the last group."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.places = nn.Embedding(8, 16)
        self.outer = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.inner:
            y = y + torch.tanh(layer(y))
        return self.outer(y.mean(1))


class Manager:
    """As bitsandbytes' ``GlobalOptimManager`` is found to be."""

    def __init__(self) -> None:
        self.pid2config: dict[int, Any] = {}
        self.index2config: dict[tuple[int, int], Any] = {}
        self.module_weight_config_triple: list[tuple[nn.Module, str, Any]] = []

    def register_module_override(self, module: nn.Module, name: str, config: Mapping[str, Any]) -> None:
        self.module_weight_config_triple.append((module, name, config))


class ByPlace(torch.optim.Optimizer):
    """Momentum, whose settings of single parameters are found as bitsandbytes' are: in the first step, by place."""

    manager = Manager()

    def __init__(self, params: Any, lr: float) -> None:
        self.mng = type(self).manager
        self.initialized = False
        super().__init__(params, {"lr": lr})

    def check_overrides(self) -> None:
        for module, name, config in self.mng.module_weight_config_triple:
            for number, group in enumerate(self.param_groups):
                for at, p in enumerate(group["params"]):
                    if p is getattr(module, name):
                        self.mng.pid2config[id(p)] = config
                        self.mng.index2config[number, at] = config

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if not self.initialized:
            self.check_overrides()
            self.initialized = True
        for number, group in enumerate(self.param_groups):
            for at, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                config = {"lr": group["lr"], "keeps": 0.9, **self.mng.index2config.get((number, at), {})}
                state = self.state[p]
                state["momentum"] = config["keeps"] * state.get("momentum", torch.zeros_like(p)) + p.grad
                p.sub_(config["lr"] * state["momentum"])


def groups_of(model: Words) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]


def assert_equal(
    build: Callable[[Words], torch.optim.Optimizer], manager: Any, config: Mapping[str, Any], options: Any
) -> None:
    loops: list[tuple[Words, torch.optim.Optimizer]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Words()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", dict(config))
        loops.append((model, build(model)))
    with instep.attach(*loops[1], bucket_bytes=2_000, **options) as overlap:
        for i in range(STEPS):
            x = torch.randint(0, 40, (6, 8), generator=torch.Generator(here()).manual_seed(i))
            for model, optimizer in loops:
                nn.functional.cross_entropy(model(x), x[:, 0] % 5).backward()
                optimizer.step()
                optimizer.zero_grad()
            overlap.synchronize()
            states = [training_state(model, optimizer) for model, optimizer in loops]
            assert first_difference(*states) is None, first_difference(*states)


@contextmanager
def fresh(manager: Any) -> Iterator[Any]:
    """The manager is one of the process: nothing of other tests, and nothing for them."""
    names = ("pid2config", "index2config", "module_weight_config_triple")
    kept = {name: getattr(manager, name) for name in names}
    for name in names:
        setattr(manager, name, type(kept[name])())
    try:
        yield manager
    finally:
        for name, value in kept.items():
            setattr(manager, name, value)


OPTIONS: dict[str, Any] = {**{way: options for way, options in WAYS.items() if way != "two_pass"}}


@pytest.mark.parametrize("way", list(OPTIONS))
def test_settings_of_single_parameters(way: str) -> None:
    with fresh(ByPlace.manager) as manager:
        assert_equal(lambda m: ByPlace(groups_of(m), lr=0.1), manager, {"lr": 0.01, "keeps": 0.5}, OPTIONS[way])
        assert {0.01} == {config["lr"] for config in manager.index2config.values()}
        assert set(manager.index2config) == {(0, 0), (0, 5)}


def names() -> list[str]:
    """Those of bitsandbytes; the test skips where it is not installed."""
    kinds = ("Adam", "AdamW", "SGD", "Lion", "Adagrad", "RMSprop", "LAMB", "LARS", "AdEMAMix")
    bits = ("", "8bit", "32bit")
    paged = [f"Paged{kind}{bit}" for kind in ("Adam", "AdamW", "Lion", "AdEMAMix") for bit in bits]
    return [f"{kind}{bit}" for kind in kinds for bit in bits] + paged


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
@pytest.mark.parametrize("name", names())
def test_the_package_itself(name: str, way: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kind = getattr(bitsandbytes.optim, name, None)
    if kind is None:
        pytest.skip(f"this version has no {name}")
    more = {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
    more |= {"min_8bit_size": MIN_8BIT_SIZE}

    def build(model: Words) -> Any:
        return kind(groups_of(model), lr=1e-2, **more)

    try:
        plain = Words()
        optimizer = build(plain)
        plain(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        optimizer.step()
    except Exception as error:
        pytest.skip(f"it does not run on this device: {type(error).__name__}: {error}")
    with fresh(bitsandbytes.optim.GlobalOptimManager.get_instance()) as manager:
        assert_equal(build, manager, {"optim_bits": 32}, OPTIONS[way])
