"""``DistributedDataParallel(mixed_precision=…)`` on a CPU: torch's own, which is made for accelerators."""

import contextlib
import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

needs_it = pytest.mark.skipif(
    "torch.cuda.Stream()" in inspect.getsource(DistributedDataParallel.__init__) and not torch.cuda.is_available(),
    reason="this torch's DistributedDataParallel(mixed_precision=…) makes a CUDA stream in its constructor",
)


def constructor() -> AbstractContextManager[Any]:
    """Around the constructor, which makes a stream: where torch is built for an accelerator that is not there it cannot
    be made. The CPU's does as well."""
    if torch.accelerator.is_available():
        return contextlib.nullcontext()
    return mock.patch.object(torch, "Stream", functools.partial(torch.Stream, device="cpu"))
