"""Parameters that DDP takes for unused, where one backward follows several forwards.

``find_unused_parameters=True`` looks in each forward, from its outputs, for what backward will come to, with the
reducer's own method: torch has no public one. ``tests/distributed/test_micro_batches_on_ranks.py`` fails clearly when
torch changes it.
"""

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel


def look_from(ddp: DistributedDataParallel, losses: Sequence[torch.Tensor]) -> None:
    """Have ``ddp`` look once more, from all ``losses`` of the next backward, after its last forward."""
    if ddp.find_unused_parameters:
        ddp.reducer.prepare_for_backward(list(losses))
