"""Copies between pinned host memory and one accelerator, on two streams of their own: in and out.

A tensor that is copied in is allocated on the stream of copies in, used on the stream that steps, and copied out on the
stream of copies out. Its memory goes back to the first of these. So whatever came last is waited for there before the
tensor is let go: the next one that is copied in gets the same memory, and no more than that.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from instep._optim.current_stream import on_stream

T = TypeVar("T")


class Copies:
    """
    Attributes:
        is_under_way: whether the host has to wait for copies before it reads or writes what they read or write.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_under_way = False
        self._in = torch.Stream(device)
        self._out = torch.Stream(device)
        self._returning: list[tuple[torch.Event, Sequence[torch.Tensor]]] = []

    def bring(self, make: Callable[[], T]) -> tuple[T, torch.Event]:
        """What ``make`` returns, which copies in; and when it is there."""
        self.is_under_way = True
        with on_stream(self._in):
            return make(), self._in.record_event()

    def send(self, copy: Callable[[], T], used: Sequence[torch.Tensor]) -> T:
        """What ``copy`` returns, which copies out what the current stream has stepped.

        Args:
            used: tensors that were copied in, or are copied out: held until ``let_go``.
        """
        self.is_under_way = True
        self._out.wait_event(torch.accelerator.current_stream(self._out.device).record_event())
        with on_stream(self._out):
            try:
                return copy()
            finally:
                self._returning.append((self._out.record_event(), used))

    def let_go(self) -> None:
        """Free on the device what is on its way out. The current stream has made some of it."""
        returning, self._returning = self._returning, []
        for there, _ in returning:
            self._in.wait_event(there)
            torch.accelerator.current_stream(self._in.device).wait_event(there)

    def finish(self) -> None:
        """Return when all copies have been made."""
        if self.is_under_way:
            self._out.wait_stream(self._in)
            self._out.synchronize()
            self._returning, self.is_under_way = [], False
