"""``schedule="forward"``: the tensors that stand in ``.grad`` for gradients that are still to be applied."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

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

    def lent(self) -> list[HeldGradient]:
        """Those that stand in ``.grad`` now, or that somebody has."""
        return list(self._lent.values())

    def take_back(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of ``parameters`` were applied, or never will be, and none of ``.grad`` is a stand-in."""
        for parameter in parameters:
            key = id(parameter)
            found = [self._lent.pop(key, None)]
            # Somebody else who has it, as a loop that has kept .grad in a variable, goes on to find this gradient.
            if found[0] is not None and not _is_shared(found):
                found[0].let_go()
                self._idle[key] = found[0]


def _is_shared(found: Sequence[HeldGradient | None]) -> bool:
    """Whether anybody but this sequence refers to the stand-in that it holds: in Python, or in C++ by torch's private
    count. Where torch does not tell, it may be so."""
    return next(map(sys.getrefcount, found)) > _ALONE or _COUNT is None or _COUNT(found[0]) > 1


# Of the references to a tensor from C++, by torch (torch/csrc/autograd/python_variable.cpp). All of Python is one.
_COUNT: Callable[[Any], int] | None = getattr(torch.Tensor, "_use_count", None)
# No variable refers to it, and no call of Python's: these count in one way or another, by version and by what was
# called before.
_ALONE = next(map(sys.getrefcount, [object()]))
