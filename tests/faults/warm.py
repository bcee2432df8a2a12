"""What a rank would import by itself, imported once: by the process that the ranks are forked from."""

import torch

import instep
import tests.faults.rank  # noqa: F401

instep.attach  # noqa: B018  # the names of instep are imported when they are asked for
_weight = torch.nn.Parameter(torch.zeros(2))
_weight.grad = torch.zeros(2)
# The first step of an optimizer imports torch's compiler.
torch.optim.AdamW([_weight], fused=True).step()
