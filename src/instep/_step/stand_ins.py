"""``schedule="forward"``: the tensors that stand in ``.grad`` for gradients that are still to be applied."""

import sys
from collections.abc import Callable, Sequence

import torch

from instep._autograd.placeholders import BeforeUse, HeldGradient


class StandIns:
    """One for each parameter, used again step after step: to make one takes as long as a small update.

    Args:
        before_use: what a ``HeldGradient`` is given.
    """

    def __init__(self, before_use: Callable[[], BeforeUse | None]) -> None:
        self._before_use = before_use
        self._idle: dict[int, HeldGradient] = {}  # by the id of the parameter
        self._lent: dict[int, HeldGradient] = {}

    def lend(self, parameter: torch.Tensor, gradient: torch.Tensor) -> HeldGradient:
        """The tensor to put into ``.grad`` of ``parameter`` until ``take_back``."""
        key = id(parameter)
        stand_in = self._idle.pop(key, None)
        if stand_in is None or not stand_in.stand_for(gradient):
            stand_in = HeldGradient(gradient, self._before_use)
        self._lent[key] = stand_in
        return stand_in

    def take_back(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of ``parameters`` were applied, or never will be, and none of ``.grad`` is a stand-in."""
        for parameter in parameters:
            key = id(parameter)
            stand_in = self._lent.pop(key, None)
            # Somebody else who has it, as a loop that has kept .grad in a variable, goes on to find this gradient.
            if stand_in is not None and not _is_shared(stand_in):
                stand_in.let_go()
                self._idle[key] = stand_in


def _is_shared(stand_in: HeldGradient) -> bool:
    """Whether anybody but the caller of this function, in one variable, refers to ``stand_in``: in Python, or in C++ by
    torch's private count. Where torch does not tell, it may be so."""
    return _references(stand_in) > _ALONE or _COUNT is None or _COUNT(stand_in) > 1


def _references(held: object) -> int:
    return sys.getrefcount(held)


def _alone() -> int:
    """``_references`` of an object in one variable of a caller's caller, as this Python counts: some versions count
    what a call is given once more."""

    def asked_for(held: object) -> int:
        return _references(held)

    held = object()
    return asked_for(held)


# Of the references to a tensor from C++, by torch (torch/csrc/autograd/python_variable.cpp). All of Python is one.
_COUNT: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)
_ALONE = _alone()
