"""How long communication goes on when backward's own work is done, as DDP has measured it last.

DDP measures its first ten iterations, and then every hundredth. It has no public name for what it finds;
``tests/distributed/test_deferring.py`` fails clearly when torch changes the private one.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

_NANOSECONDS = 1e6  # in a millisecond


def exposed_communication(ddp: DistributedDataParallel) -> float | None:
    """In milliseconds; ``None``: DDP has measured nothing on this device."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()
    total, hidden = data.get("backward_comm_time", 0), data.get("backward_compute_comm_overlap_time", 0)
    return max(total - hidden, 0) / _NANOSECONDS if total > 0 else None
