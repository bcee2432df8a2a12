"""A model that FSDP, 1 or 2, has divided into groups: hooks before a group is gathered, and after errors."""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from instep._autograd.engine import graph_task
from instep._autograd.hooks import BoundHook
from instep._life.weak import weakly
from instep._optim.parameters import AttachedParameter
from instep._step.schedule import Schedule
from instep._wiring.held import Handles
from instep._wiring.late import Readers
from instep.sources.fsdp.after_errors import AfterErrors
from instep.sources.local.parts import ForwardCounts
from instep.target import Target


class Sharding:
    """
    Args:
        uses: told of each group's forwards.

    Attributes:
        in_fsdp1: whether it is FSDP1.
    """

    def __init__(self, target: Target, schedule: Schedule, uses: ForwardCounts) -> None:
        self._groups = target.groups
        self.in_fsdp1 = bool(target.fsdp1)
        self._schedule = schedule
        self._uses = uses
        self._after_errors = AfterErrors(target.model)

    def connect(self, readers: Readers, handles: Handles) -> None:
        for number, group in enumerate(self._groups):
            module = group.module()
            assert module is not None
            mine = [a for a in self._schedule.parameters if a.spec.group == number]
            if self.in_fsdp1:
                readers.watch_fsdp1(module, mine, handles)
            else:
                before = BoundHook(functools.partial(self._before_gather, number, mine))
                handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.extend(self._after_errors.connect(weakly(self._schedule.let_go_of_backwards)))

    def reduces_once(self) -> None:
        """The next backward reduces each group's gradients once, however many forwards it is of."""
        self._uses.clear()

    def backward_failed(self) -> None:
        self._after_errors.backward_failed()

    def _before_gather(self, number: int, mine: Sequence[AttachedParameter], module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        if torch.is_grad_enabled():
            self._uses.ran(number)
        self._schedule.before_gather(mine)
