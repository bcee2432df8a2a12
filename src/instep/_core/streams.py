"""All stream code. On CPU there are no streams, and everything here does nothing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class StepStreams:
    """One side stream per accelerator device, on which buckets are stepped.

    Args:
        given: the stream to use on its device.
    """

    def __init__(self, given: torch.Stream | None = None) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        if given is not None and given.device.type != "cpu":
            self._streams[given.device] = given

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Make the device's side stream current, ordered after all that the device's current stream holds now:
        the gradient, and every kernel that still reads the old weight."""
        if device.type == "cpu":
            yield
            return
        current = torch.accelerator.current_stream(device)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.Stream(device)
        side.wait_stream(current)
        torch.accelerator.set_stream(side)
        try:
            yield
        finally:
            torch.accelerator.set_stream(current)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tell the caching allocator that the side stream still reads ``tensors``, so they may be dropped now."""
        if not self._streams:
            return
        for tensor in tensors:
            side = self._streams.get(tensor.device)
            if side is not None:
                for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                    part.record_stream(side)

    def mark(self, device: torch.device) -> torch.Event | None:
        """All that the device's side stream holds by now; ``None`` on CPU."""
        side = self._streams.get(device)
        return None if side is None else side.record_event()

    def wait(self, mark: torch.Event) -> None:
        """Order the device's current stream after what was marked."""
        torch.accelerator.current_stream(mark.device).wait_event(mark)

    def join(self) -> None:
        """Order the current stream of each device after everything stepped so far."""
        for device, side in self._streams.items():
            torch.accelerator.current_stream(device).wait_stream(side)
