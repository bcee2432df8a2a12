"""Makes ``torch.manual_seed`` quick in a process that runs tests: pytest's own, and the ranks that it starts."""

import torch

if not torch.accelerator.is_available():
    # torch.manual_seed() formats the stack once for each kind of device that is not there, which took a sixth of the
    # time of the one-device tests. This is what is left of it on CPU.
    torch.manual_seed = torch.default_generator.manual_seed
