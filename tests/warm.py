"""What a rank would import by itself, imported once: by the process that ranks are forked from (``tests.forking``)."""

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel

import tests.distributed.pool
import tests.distributed.sharded
import tests.faults.rank  # noqa: F401

_weight = torch.nn.Parameter(torch.zeros(2))
_weight.grad = torch.zeros(2)
# The first step of an optimizer imports torch's compiler. So small a step starts no thread.
torch.optim.AdamW([_weight], fused=True).step()
