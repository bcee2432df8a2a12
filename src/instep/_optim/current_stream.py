"""Which stream of an accelerator is current: the one that kernels are launched on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make ``stream`` current on its device, and its device, which may not be the loop's."""
    before = torch.accelerator.current_stream(stream.device)
    index = torch.accelerator.current_device_index()
    try:
        torch.accelerator.set_stream(stream)
        yield
    finally:
        try:
            _go_on(before, index)
        except BaseException:  # Ctrl-C: the loop is to go on where it was
            _go_on(before, index)
            raise


def _go_on(stream: torch.Stream, device_index: int) -> None:
    """Make ``stream`` current on its device, and that device current."""
    torch.accelerator.set_stream(stream)
    if device_index != stream.device.index:
        torch.accelerator.set_device_index(device_index)
