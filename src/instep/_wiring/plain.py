"""``INSTEP_DISABLE=1``: what torch calls around a model that would be attached."""

import torch
from torch import nn

from instep._autograd.engine import graph_task
from instep._autograd.hooks import UntracedHook
from instep._autograd.outputs import nodes_of
from instep._life.weak import weakly
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.schedule import Schedule
from instep._wiring.held import Handles


class PlainHooks:
    """Micro-batches are counted, and backwards seen to begin."""

    def __init__(
        self, schedule: Schedule, accumulation: Accumulation, votes: StepVotes, handles: Handles, *, is_sharded: bool
    ) -> None:
        self._schedule = schedule
        self._votes = votes
        self._accumulation = accumulation
        self._handles = handles
        self._is_sharded = is_sharded

    def before_forward(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling() and graph_task() is None and torch.is_grad_enabled():
            self._votes.begin_forward()
            self._accumulation.decide()

    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling() and graph_task() is None:
            before_backward = UntracedHook(weakly(self._before_backward))
            for node in nodes_of(output):
                node.register_prehook(before_backward)

    def _before_backward(self, gradients: object) -> None:
        if self._handles and self._schedule.begin_backward() and self._is_sharded:
            self._accumulation.count()  # no hook of FSDP2's parameters is called while gradients only add up
