"""Modules in which no hook runs."""

import torch

from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def scripted(target: Target, options: Options) -> None:
    for name, module in target.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AttachError(
                f"{name or 'the model'!r} is a torch.jit module ({type(module).__name__}): Python hooks do not run in "
                "it, so instep cannot tell when its parameters are read. Use the module it was made from, or "
                "torch.compile"
            )


def sharded_among_several(target: Target, options: Options) -> None:
    if len(target.called) > 1 and (target.fsdp1 or target.fsdp2):
        raise AttachError(
            "model is a list, and FSDP shards one of its modules: it gathers and reduces for the module that the loop "
            "calls. Attach each sharded module with an optimizer of its own, or the module that holds them all"
        )


def cast_among_several(target: Target, options: Options) -> None:
    if len(target.called) > 1 and options.communication.mixed_precision is not None:
        raise AttachError(
            "mixed_precision casts inside the forward of one model, and model is a list. Attach each module with an "
            "optimizer of its own, or the module that holds them all"
        )
