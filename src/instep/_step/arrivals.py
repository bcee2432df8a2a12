"""What a foreign optimizer's update would find in backward, where gradients arrive, and what ``step()`` finds after it.

A step that is judged is taken after backward (``judging.py``), where all is there that hooks of the backward write: the
squares of single samples that a library puts on parameters, the statistics of a layer. In backward some of it is the
last step's still, and no comparison after backward can show it.
"""

from collections.abc import Iterable

import torch

from instep._optim.belongings import Found
from instep._optim.own_object import Beside, Tables
from instep._optim.shadow import GroupLayout
from instep._optim.stepper import Stepper


class Arrivals:
    """What there is as the first gradient arrives, and what is kept of each parameter as its own does."""

    def __init__(self, stepper: Stepper) -> None:
        optimizer = stepper.optimizer()
        self._found = Found(optimizer, with_state=True)
        self._tables = Tables(optimizer)
        self._beside = Beside(stepper.name)
        self._beside.begin(optimizer, GroupLayout(stepper.name, optimizer.param_groups))

    def come(self, parameters: Iterable[torch.Tensor]) -> None:
        """Their gradients have arrived."""
        self._found.note(parameters)

    def differ(self) -> str | None:
        """``step()`` is called. What it finds otherwise, in words; ``None``: nothing."""
        what = self._found.changed() or self._beside.changed()
        if what is None and (self._beside.wrote_unseen() or self._tables.have_changed()):
            what = "a module to which it refers"
        return None if what is None else f"{what} is written in backward, after gradients that arrive before"
