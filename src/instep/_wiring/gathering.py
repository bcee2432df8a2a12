"""An ``AttachedParameter`` is made of each parameter that the model and an optimizer have."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep._autograd.placeholders import SpentGradient
from instep._life.weak import weakly
from instep._optim.dtensor import is_sharded, local_numel, mesh_of, shard_of
from instep._optim.keyed import KeyedDraws
from instep._optim.parameters import AttachedParameter, Attribute
from instep._optim.parts import LocalShard
from instep._optim.plan import ParameterSpec
from instep._optim.stepper import Stepper
from instep._wiring.held import Held
from instep.errors import InstepError
from instep.naming import parameters_of
from instep.target import Names, Target

if TYPE_CHECKING:
    from instep.sources.zero.source import Zero

ErrorForUse = Callable[[ParameterSpec, str], InstepError | None]


class Gathering:
    """
    Args:
        zero: with ``shard_state``: knows the rows of this rank.
        draws: with ``random="keyed"``: are told the parameters' names.
        error_for_use: what the use of a gradient that was applied raises; ``None``: nothing is put in its place.
    """

    def __init__(
        self,
        target: Target,
        held: Held,
        zero: "Zero | None",
        draws: KeyedDraws | None,
        error_for_use: ErrorForUse | None,
    ) -> None:
        self._held = held
        self._groups = target.groups
        self._in_fsdp1 = bool(target.fsdp1)
        self._zero = zero
        self._draws = draws
        self._error_for_use = error_for_use

    def gather(
        self, optimizers: Sequence[Optimizer], names: Names, first_index: int = 0
    ) -> tuple[AttachedParameter, ...]:
        """Those of ``names`` that one of the attached ``optimizers`` has, numbered from ``first_index``."""
        if self._draws is not None and (model := self._held.model()) is not None:
            for named in parameters_of(model):
                self._draws.name(named.tensor, named.name)
        owner = {
            id(p): stepper
            for optimizer, stepper in zip(optimizers, self._held.steppers, strict=True)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        mine = (
            (parameter, places)
            for parameter, places in names.values()
            if id(parameter) in owner and not is_lazy(parameter)  # those are left to torch, whole
        )
        return tuple(
            self._attached(parameter, places, index, owner[id(parameter)])
            for index, (parameter, places) in enumerate(mine, first_index)
        )

    def _attached(
        self, parameter: torch.Tensor, places: tuple[Attribute, ...], index: int, stepper: Stepper
    ) -> AttachedParameter:
        name = places[0].name
        nbytes = local_numel(parameter) * parameter.element_size()
        group = next((n for n, g in enumerate(self._groups) if id(parameter) in g.members), None)
        spec = ParameterSpec(index, name, parameter.shape, parameter.dtype, parameter.device, nbytes, group)
        spent = None
        if self._error_for_use is not None:
            spent = SpentGradient(parameter, name, weakly(self._error_for_use, spec))
        # A sharded model puts other tensors in the parameters' places while it computes.
        held = () if self._in_fsdp1 or (group is not None and is_sharded(parameter)) else places
        shard = self._shard(parameter, stepper)
        return AttachedParameter(parameter, spec, held, stepper, spent, shard, mesh_of(parameter))

    def _shard(self, parameter: torch.Tensor, stepper: Stepper) -> LocalShard | None:
        if self._zero is not None and id(parameter) in self._zero.reduced:
            return self._zero.shards.shard_of(parameter, stepper.optimizer())
        return shard_of(parameter, stepper.optimizer())
