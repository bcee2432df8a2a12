"""On which device the tests of this process run."""

import pytest
import torch


def here() -> torch.device:
    """The accelerator that this process uses, if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


on_cpu_only = pytest.mark.skipif(here().type != "cpu", reason="of tensors in the host's memory")
sparse_collectives = pytest.mark.skipif(here().type == "emu", reason="the emulated device has no sparse collectives")
