"""The modules that hold attached parameters themselves, and read them where their forward runs."""

import functools
import sys
from collections.abc import Sequence

import torch
from torch import nn

from instep._autograd.engine import graph_task
from instep._autograd.hooks import BoundHook
from instep._life.weak import weakly
from instep._optim.parameters import AttachedParameter
from instep._step.backward_schedule import BackwardSchedule
from instep._step.forward_schedule import ForwardSchedule
from instep._step.reading import ReadHook
from instep._wiring.held import Handles
from instep._wiring.hooks import BackwardHooks
from instep._wiring.late import Owner
from instep.sources.fsdp.wrappers import BeforeFSDP1Gathers


class CheckedReaders:
    """``schedule="backward"``: a part of the model that runs by itself may read what an open step has written."""

    def __init__(self, schedule: BackwardSchedule, backwards: BackwardHooks, on_trial: bool) -> None:
        self._schedule = schedule
        self._backwards = backwards
        self._on_trial = on_trial

    def watch(self, model: nn.Module, owners: Sequence[Owner], handles: Handles) -> None:
        for owner, mine in owners:
            if owner is not model:
                hook = BoundHook(functools.partial(self._before_read, mine))
                handles.append(owner.register_forward_pre_hook(hook))

    def watch_fsdp1(self, wrapper: nn.Module, mine: Sequence[AttachedParameter], handles: Handles) -> None:
        """The model's own forward has been asked."""

    def _before_read(self, mine: Sequence[AttachedParameter], module: nn.Module, args: object) -> None:
        schedule = self._schedule
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        schedule.streams.makers.saw(mine[0].spec.device)
        if self._backwards.in_forward:
            return  # the model's own, in which this has been asked already
        if any(map(schedule.is_applied, mine)):
            schedule.before_forward()
        if self._on_trial and torch.is_grad_enabled():
            self._see_backward_of(module)

    def _see_backward_of(self, part: nn.Module) -> None:
        """A backward may begin at what ``part``, which runs by itself, is about to return, and go through weights that
        an earlier one has written on trial."""

        def see(part: nn.Module, args: object, output: object) -> None:
            once.remove()
            see_backward_from(output)

        see_backward_from = weakly(self._backwards.see_backward_from)
        once = part.register_forward_hook(BoundHook(see))


class WaitingReaders:
    """``schedule="forward"``: a module waits for the buckets that it reads."""

    def __init__(self, schedule: ForwardSchedule) -> None:
        self._schedule = schedule

    def watch(self, model: nn.Module, owners: Sequence[Owner], handles: Handles) -> None:
        schedule = self._schedule
        # torch.compile runs the hooks of what it wraps only once, when it traces. Its own wrapper's run each time.
        compiled = _compiled_in(model)
        inside = {module for wrapper in compiled for module in wrapper.modules()}
        for wrapper in compiled:
            below = {id(p) for p in wrapper.parameters()}
            mine = [a for a in schedule.parameters if id(a.get()) in below]
            handles.append(wrapper.register_forward_pre_hook(BoundHook(ReadHook(mine, schedule.before_read))))
        for owner, mine in owners:
            if owner not in inside:
                schedule.readers.append(ReadHook(mine, schedule.before_read))
                handles.append(owner.register_forward_pre_hook(BoundHook(schedule.readers[-1])))

    def watch_fsdp1(self, wrapper: nn.Module, mine: Sequence[AttachedParameter], handles: Handles) -> None:
        before_read = BoundHook(functools.partial(self._schedule.before_read, mine))
        handles.append(BeforeFSDP1Gathers(wrapper, before_read))


class NoReaders:
    """``INSTEP_DISABLE=1``: weights are written in ``optimizer.step()`` alone."""

    def watch(self, model: nn.Module, owners: Sequence[Owner], handles: Handles) -> None: ...

    def watch_fsdp1(self, wrapper: nn.Module, mine: Sequence[AttachedParameter], handles: Handles) -> None: ...


def _compiled_in(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that ``torch.compile`` has wrapped."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: not used
    if dynamo is None:
        return []
    return [module for module in model.modules() if isinstance(module, dynamo.OptimizedModule)]
