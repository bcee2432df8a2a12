"""One rank's model and optimizers on all ranks of a replicated model. Collective, and public torch."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from instep._ranks.agreement import broadcast
from instep._ranks.messages import broadcast_entries, sendable


def resync(model: nn.Module, optimizers: Iterable[Optimizer], group: dist.ProcessGroup, source: int) -> None:
    """Take parameters, buffers, optimizer state and groups from the group's rank ``source``.

    Values of a group that are neither numbers, strings, tensors nor lists of such stay this rank's own.
    """
    broadcast([*model.parameters(), *model.buffers()], group, source)
    for optimizer in optimizers:
        for settings in optimizer.param_groups:
            mine = {key: value for key, value in settings.items() if key != "params" and sendable(value)}
            settings.update(_as_here(broadcast_entries(mine, group, source) or {}, settings))
            for parameter in settings["params"]:
                entry = optimizer.state.get(parameter, None)
                received = broadcast_entries(entry, group, source)
                if received is None:
                    optimizer.state.pop(parameter, None)
                else:
                    optimizer.state[parameter] = received


def _as_here(received: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Lists that are tuples here."""
    return {k: tuple(v) if isinstance(settings.get(k), tuple) else v for k, v in received.items()}
