"""On which device the tests of this process run."""

import torch


def here() -> torch.device:
    """The accelerator that this process uses, if there is one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator(), torch.accelerator.current_device_index())
