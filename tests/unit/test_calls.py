"""The guard around the call of a module: what torch does with the private name that it stands at."""

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from instep._torch.hooks import CALL, Around, GuardedCall


class Told:
    """What a guard was told, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, module: nn.Module) -> Around:
        return Around(self._say("begin"), self._say("end"), self._say("failed"))

    def _say(self, word: str) -> Callable[[], None]:
        return lambda: self.words.append(word)


class Raising(nn.Module):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.linear(x)


def called(module: nn.Module, told: Told) -> list[str]:
    """What is said of one call."""
    told.words.clear()
    with suppress(ValueError, KeyboardInterrupt, SystemExit):
        module(torch.ones(2))
    return told.words


def test_torch_calls_what_stands_in_its_place() -> None:
    module, told = Raising(), Told()
    guard = GuardedCall(module, told)
    module.register_forward_pre_hook(lambda *_: told.words.append("pre-hook"))
    module.register_forward_hook(lambda *_: told.words.append("hook"))
    assert called(module, told) == ["begin", "pre-hook", "hook", "end"]
    guard.remove()
    assert called(module, told) == ["pre-hook", "hook"]
    assert CALL not in vars(module)


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit()], ids=repr)
def test_every_way_out(error: BaseException) -> None:
    module, told = Raising(error), Told()
    GuardedCall(module, told)
    with pytest.raises(type(error)):
        module(torch.ones(2))
    assert told.words == ["begin", "failed"]


def test_an_error_of_the_guard_is_not_the_loops() -> None:
    module = Raising(ValueError("the loop's"))

    def failed() -> None:
        raise RuntimeError("the guard's")

    GuardedCall(module, lambda _: Around(lambda: None, lambda: None, failed))
    with pytest.raises(ValueError, match="the loop's"):
        module(torch.ones(2))


@pytest.mark.parametrize("first", [0, 1])
def test_two_guards(first: int) -> None:
    module, told = Raising(), [Told(), Told()]
    guards = [GuardedCall(module, one) for one in told]
    module(torch.ones(2))
    assert [one.words for one in told] == [["begin", "end"]] * 2
    guards[first].remove()
    module(torch.ones(2))
    assert len(told[first].words) == 2
    assert len(told[1 - first].words) == 4
    guards[1 - first].remove()
    assert CALL not in vars(module)
    module(torch.ones(2))
    assert len(told[1 - first].words) == 4


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_not_guarded(copied: Callable[[nn.Module], nn.Module]) -> None:
    """Nor does it call the original."""
    module, told = Raising(), Told()
    GuardedCall(module, told)
    other = copied(module)
    with torch.no_grad():
        module.linear.weight.fill_(7.0)
        other.get_submodule("linear").weight = nn.Parameter(torch.zeros(2, 2))
        other.get_submodule("linear").bias = nn.Parameter(torch.zeros(2))
    assert torch.equal(other(torch.ones(2)), torch.zeros(2))
