"""Who else has the memory of a tensor: torch's private count, and what is known of those who hold it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from instep._optim import owners
from instep._optim.owners import BY_THEMSELVES, entries_are_kept, have_other_owners, state_is_kept


class Trained:
    """Two parameters, with gradients and state."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def found(self) -> tuple[list[bool], list[bool], list[bool]]:
        """Of parameters, gradients and state: whether others have them."""
        gradients: list[Any] = [p.grad for p in self.parameters]
        entries = [self.optimizer.state[p] for p in self.parameters]
        in_state = [one or state_is_kept(self.optimizer) for one in entries_are_kept(entries)]
        return have_other_owners(self.parameters), have_other_owners(gradients), in_state


def _gradient(trained: Trained) -> torch.Tensor:
    assert trained.model.weight.grad is not None
    return trained.model.weight.grad


NOBODY, FIRST, ALL = [False, False], [True, False], [True, True]
Take = Callable[[Trained], Any]
TAKEN: dict[str, tuple[Take, tuple[list[bool], list[bool], list[bool]]]] = {
    "nothing": (lambda t: None, (NOBODY, NOBODY, NOBODY)),
    "the parameter itself": (lambda t: t.model.weight, (NOBODY, NOBODY, NOBODY)),
    "detach": (lambda t: t.model.weight.detach(), (FIRST, NOBODY, NOBODY)),
    "data": (lambda t: t.model.weight.data, (FIRST, NOBODY, NOBODY)),
    "a view": (lambda t: t.model.weight.data[0], (FIRST, NOBODY, NOBODY)),
    "a NumPy array": (lambda t: t.model.weight.detach().numpy(), (FIRST, NOBODY, NOBODY)),
    "the storage": (lambda t: t.model.weight.untyped_storage(), (FIRST, NOBODY, NOBODY)),
    "state_dict": (lambda t: t.model.state_dict(), (ALL, NOBODY, NOBODY)),
    "the gradient itself": (lambda t: t.model.weight.grad, (NOBODY, NOBODY, NOBODY)),
    "an alias of the gradient": (lambda t: _gradient(t).data, (NOBODY, FIRST, NOBODY)),
    "an entry of the state": (lambda t: t.optimizer.state[t.model.weight], (NOBODY, NOBODY, FIRST)),
    "a tensor of the state": (lambda t: t.optimizer.state[t.model.weight]["exp_avg"], (NOBODY, NOBODY, FIRST)),
    "an alias in the state": (lambda t: t.optimizer.state[t.model.weight]["step"].numpy(), (NOBODY, NOBODY, FIRST)),
    "the optimizer's state_dict": (lambda t: t.optimizer.state_dict(), (NOBODY, NOBODY, ALL)),
    "the state": (lambda t: t.optimizer.state, (NOBODY, NOBODY, ALL)),
}


@pytest.mark.parametrize("taken", TAKEN)
def test_who_has_taken_something_is_known(taken: str) -> None:
    take, expected = TAKEN[taken]
    trained = Trained()
    assert trained.found() == (NOBODY, NOBODY, NOBODY)
    kept = take(trained)
    assert trained.found() == expected
    del kept


@pytest.mark.parametrize(
    "taken", ["detach", "a view", "state_dict", "an alias of the gradient", "the optimizer's state_dict"]
)
def test_nobody_has_it_once_it_was_let_go_of(taken: str) -> None:
    take, _ = TAKEN[taken]
    trained = Trained()
    kept = take(trained)
    del kept
    assert trained.found() == (NOBODY, NOBODY, NOBODY)


def test_memory_that_is_not_torch_s() -> None:
    numpy = pytest.importorskip("numpy")
    assert have_other_owners([torch.from_numpy(numpy.zeros(3)), torch.zeros(3)]) == FIRST


def test_memory_that_other_processes_may_have() -> None:
    assert have_other_owners([torch.zeros(3).share_memory_(), torch.zeros(3)]) == FIRST


def test_parameters_of_one_memory_know_each_other() -> None:
    whole = torch.zeros(6)
    parts = [whole[:3], whole[3:]]
    assert have_other_owners(parts) == ALL  # ``whole``
    del whole
    bases = [part._base for part in parts]
    assert have_other_owners(parts) == ALL  # their common base is no part
    del bases


def test_torch_still_counts_the_owners_of_a_storage() -> None:
    """Private: ``instep._optim.owners`` is the one place that asks."""
    tensor = torch.zeros(3)
    storage = tensor.untyped_storage()  # kept: torch 2.6 counts the Python object that another call makes
    alone = owners._OWNERS(storage._cdata)
    alias = tensor.detach()
    assert owners._OWNERS(storage._cdata) == alone + 1
    del alias
    assert owners._OWNERS(storage._cdata) == alone
    assert BY_THEMSELVES.of(3) == 3
