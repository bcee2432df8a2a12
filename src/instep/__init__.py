"""instep runs the optimizer step inside backward, with numbers bit for bit those of the plain loop."""

import importlib
from typing import TYPE_CHECKING, Any

from instep._version import __version__ as __version__

if TYPE_CHECKING:
    from instep._gradients.clipping import ClipNorm as ClipNorm
    from instep._gradients.clipping import ClipValue as ClipValue
    from instep._optim.random_numbers import draw_key as draw_key
    from instep.attaching import attach as attach
    from instep.attachment import Attachment as Attachment
    from instep.attachment import attached as attached
    from instep.attachment import record as record
    from instep.functional import AllreduceUpcastHookState as AllreduceUpcastHookState
    from instep.functional import OptimInBackwardHookState as OptimInBackwardHookState
    from instep.functional import OptimizerHookState as OptimizerHookState
    from instep.functional import OverlappedOptimizer as OverlappedOptimizer
    from instep.functional import apply_optim_in_backward_hook as apply_optim_in_backward_hook
    from instep.functional import apply_optimizer_in_backward as apply_optimizer_in_backward
    from instep.functional import as_overlapped_optim as as_overlapped_optim
    from instep.functional import get_in_backward_optimizers as get_in_backward_optimizers
    from instep.functional import hook_then_optimizer as hook_then_optimizer
    from instep.functional import reducer_allreduce_and_upcast_hook as reducer_allreduce_and_upcast_hook
    from instep.functional import register_overlapped as register_overlapped
    from instep.master_weights import masters as masters
    from instep.replication import replicate as replicate
    from instep.sources.replicate.source import Replicated as Replicated
    from instep_tools.verification import Verification as Verification
    from instep_tools.verification import verify as verify

_ROOMS = {
    "ClipNorm": "instep._gradients.clipping",
    "ClipValue": "instep._gradients.clipping",
    "draw_key": "instep._optim.random_numbers",
    "masters": "instep.master_weights",
    "Attachment": "instep.attachment",
    "attach": "instep.attaching",
    "attached": "instep.attachment",
    "record": "instep.attachment",
    "Replicated": "instep.sources.replicate.source",
    "replicate": "instep.replication",
    "Verification": "instep_tools.verification",
    "verify": "instep_tools.verification",
    "AllreduceUpcastHookState": "instep.functional",
    "OptimInBackwardHookState": "instep.functional",
    "OptimizerHookState": "instep.functional",
    "OverlappedOptimizer": "instep.functional",
    "apply_optim_in_backward_hook": "instep.functional",
    "apply_optimizer_in_backward": "instep.functional",
    "as_overlapped_optim": "instep.functional",
    "get_in_backward_optimizers": "instep.functional",
    "hook_then_optimizer": "instep.functional",
    "reducer_allreduce_and_upcast_hook": "instep.functional",
    "register_overlapped": "instep.functional",
    "errors": "instep.errors",
    "comm_hooks": "instep.comm_hooks",
    "functional": "instep.functional",
}
__all__ = [
    "AllreduceUpcastHookState",
    "Attachment",
    "ClipNorm",
    "ClipValue",
    "OptimInBackwardHookState",
    "OptimizerHookState",
    "OverlappedOptimizer",
    "Replicated",
    "Verification",
    "apply_optim_in_backward_hook",
    "apply_optimizer_in_backward",
    "as_overlapped_optim",
    "attach",
    "attached",
    "draw_key",
    "get_in_backward_optimizers",
    "hook_then_optimizer",
    "masters",
    "record",
    "reducer_allreduce_and_upcast_hook",
    "register_overlapped",
    "replicate",
    "verify",
]


def __getattr__(name: str) -> Any:
    # On first use: `instep --help` should not wait for torch.
    if name not in _ROOMS:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    room = importlib.import_module(_ROOMS[name])
    return room if _ROOMS[name] == f"instep.{name}" else getattr(room, name)


def __dir__() -> list[str]:
    return sorted({*_ROOMS, *(name for name in globals() if name.startswith("__"))})
