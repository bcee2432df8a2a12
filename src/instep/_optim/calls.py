"""What one call of an optimizer can step of a bucket."""

from collections.abc import Hashable, Sequence

import torch

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.parts import LocalShard
from instep._optim.shadow import alias_of
from instep._optim.stepper import Stepper


class OptimizerCall:
    """Parameters that one call of their optimizer can step, in the form in which it is given them.

    Attributes:
        tensors: to be stepped, with their gradients: the parameters, or aliases of this rank's shards of them.
        parameters: the optimizer's own.
        shards: of those that are stepped by their shard.
        elsewhere: the optimizer's parameters that another rank steps.
    """

    __slots__ = ("elsewhere", "parameters", "shards", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.parameters: list[torch.Tensor] = []
        self.shards: list[LocalShard | None] = []
        self.elsewhere: list[torch.Tensor] = []

    def step(self, stepper: Stepper) -> None:
        """Update them."""
        for parameter in self.elsewhere:
            stepper.optimizer().state.setdefault(parameter, {})  # all ranks have the same keys
            torch.autograd.graph.increment_version(parameter)
        if self.tensors:
            stepper.step(self.tensors, self.parameters, self.shards if any(self.shards) else None)


def shard_of_gradient(attached: AttachedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
    """This rank's shard of ``gradient``; ``None`` where the whole is stepped, for which ranks may have to communicate:
    the gradient or the state is spread in another way than the parameter."""
    shard = attached.shard
    if shard is None or not shard.fits(attached.stepper.optimizer().state.get(attached.get(), {})):
        return None
    return shard.of(gradient)


def calls_of(
    bucket: Sequence[AttachedParameter], gradients: Sequence[torch.Tensor], *, alias: bool
) -> list[OptimizerCall]:
    """Divide a bucket, of one optimizer, into what can be stepped in one call: all of it, where every parameter is a
    plain tensor or can be stepped by its shard.

    Args:
        gradients: the one to apply of each: that which is in its ``.grad``.
        alias: step aliases even of parameters that are stepped as they are, so that their ``.grad`` is left alone.
    """
    bucket = AttachedParameters.of(bucket)
    if bucket.are_plain:
        return [_plain_call(bucket.tensors(), gradients, alias=alias)] if bucket else []
    found: dict[Hashable, OptimizerCall] = {}
    for attached, gradient in zip(bucket, gradients, strict=True):
        parameter, shard = attached.get(), attached.shard
        local = shard_of_gradient(attached, gradient)
        if shard is not None and not shard.is_owner:
            found.setdefault(None, OptimizerCall()).elsewhere.append(parameter)
            continue
        if shard is not None and local is not None:
            whole = shard.of(parameter)
            assert whole is not None, "a shard is made for its parameter's own layout"
            tensor, mesh = alias_of(whole, local), None
        else:
            tensor, mesh, shard = alias_of(parameter, gradient) if alias else parameter, attached.mesh, None
        call = found.setdefault(mesh, OptimizerCall())
        call.tensors.append(tensor)
        call.parameters.append(parameter)
        call.shards.append(shard)
    return list(found.values())


def _plain_call(parameters: list[torch.Tensor], gradients: Sequence[torch.Tensor], *, alias: bool) -> OptimizerCall:
    call = OptimizerCall()
    call.parameters = parameters
    call.tensors = list(map(alias_of, parameters, gradients)) if alias else parameters
    return call
