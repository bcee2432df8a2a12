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
