"""All stream code. On CPU there are no streams, and everything here does nothing.

A bucket is stepped on a side stream, which first waits for all streams that were seen to make gradients: its own may
be of several. The loop goes on on the stream that is current where backward ends, or where ``optimizer.step()`` was
called, and that one, and those, wait for the side stream.

Gradients that are freed go back to the stream that they were allocated on, whose next tensor may get their memory
while the side stream still reads it. ``record_stream`` would keep that memory from everybody until the device has come
so far. The host is ahead of the device, though, and would ask for new memory meanwhile: nothing would be saved. So
gradients are held here until the streams that make them wait for the side stream, which costs one bucket.

While a CUDA graph is recorded, buckets are stepped on the stream that made their gradients. The graph may wait for
nothing that is not in it: not for the side stream, which has been waited for before, and not for a stream of before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from instep._torch.engine import AS_IT_IS, is_captured, on_stream


class Mark(NamedTuple):
    """What the side stream of a device held at some time.

    Attributes:
        number: later ones have higher numbers.
    """

    event: torch.Event
    device: torch.device
    number: int

    def order(self, *streams: torch.Stream) -> None:
        """Have these streams wait for it."""
        for stream in set(streams):
            stream.wait_event(self.event)


class ProducerStreams:
    """The streams of each device that make gradients, and use weights: on which a forward, a gradient's own hook, the
    end of a backward or a step was seen. torch does not say on which of them a gradient was made or allocated, so to
    wait means to wait for all of them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, set[torch.Stream]] = {}

    def note_current(self, device: torch.device) -> None:
        """The device's current stream is one of them."""
        if device.type != "cpu":
            self.note(torch.accelerator.current_stream(device))

    def note(self, stream: torch.Stream) -> None:
        self._streams.setdefault(stream.device, set()).add(stream)

    def of(self, device: torch.device) -> Set[torch.Stream]:
        """Those of ``device``; while a CUDA graph is recorded, those that are in it."""
        streams = self._streams.get(device, _NONE)
        return streams if not is_captured(device) else {stream for stream in streams if _is_captured(stream)}

    def gather(self, device: torch.device) -> None:
        """Have the device's current stream wait for all of them."""
        if producers := self.of(device):
            current = torch.accelerator.current_stream(device)
            for stream in producers - {current}:
                current.wait_stream(stream)


_NONE: Set[torch.Stream] = frozenset()


def _is_captured(stream: torch.Stream) -> bool:
    with on_stream(stream):
        return is_captured(stream.device)


class _Side:
    """The side stream of one device."""

    def __init__(self, stream: torch.Stream, producers: ProducerStreams) -> None:
        self.stream = stream
        self._producers = producers
        self.ordered: Mark | None = None  # the latest that the producers have waited for
        self._marks = 0
        self.held: tuple[Mark, Sequence[torch.Tensor]] | None = None

    def mark(self) -> Mark:
        self._marks += 1
        return Mark(self.stream.record_event(), self.stream.device, self._marks)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        self.let_go()
        self.held = self.mark(), tensors

    def let_go(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held[0].order(*self.producers)

    @property
    def producers(self) -> Set[torch.Stream]:
        return self._producers.of(self.stream.device)


class StepStreams:
    """One side stream per accelerator device, on which buckets are stepped: for its device the one that is ``given``.

    Attributes:
        readers: the streams, beside the one that is current, on which parameters are about to be read.
    """

    def __init__(self, given: torch.Stream | None = None) -> None:
        self.readers: Callable[[], Iterable[torch.Stream]] = lambda: ()
        self.producers = ProducerStreams()
        self._sides: dict[torch.device, _Side] = {}
        if given is not None and given.device.type != "cpu":
            self._sides[given.device] = _Side(given, self.producers)

    def see(self, device: torch.device) -> None:
        """A forward was on the current streams of this device, and of the others that were stepped."""
        for seen in {device, *self._sides}:
            self.producers.note_current(seen)

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Make the device's side stream current, ordered after all that the device's current stream holds now, and
        those that make gradients: the gradients, and every kernel that still reads an old weight."""
        return AS_IT_IS if device.type == "cpu" else self._on(device)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        if is_captured(device):
            self.producers.gather(device)
            yield
            recorded = torch.accelerator.current_stream(device)
            for stream in self.producers.of(device) - {recorded}:  # the memory of gradients is theirs again
                stream.wait_stream(recorded)
            return
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = _Side(torch.Stream(device), self.producers)
        current = torch.accelerator.current_stream(device)
        if current == side.stream:
            yield
            return
        self.producers.note(current)
        for stream in side.producers:
            side.stream.wait_stream(stream)
        with on_stream(side.stream):
            yield

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep alive ``tensors``, which the side stream of their device has used, until the stream that was current
        before has waited for that: up to the next call, or to ``join``."""
        if not self._sides:
            return
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        for device, of_device in by_device.items():
            if (side := self._sides.get(device)) is not None and not is_captured(device):
                side.hold(of_device)

    def let_go(self, device: torch.device) -> None:
        """Have the stream that was current before wait for the side stream at once: an update has given back memory
        that it has read, and the next tensor that is made there may get it."""
        if (side := self._sides.get(device)) is not None and not is_captured(device):
            side.mark().order(*side.producers)

    def mark(self, device: torch.device) -> Mark:
        """All that the side stream of this device, which is none of the CPU's, holds by now."""
        return self._sides[device].mark()

    def wait(self, mark: Mark) -> None:
        """Order after what was marked: the device's current stream, which is about to read; ``readers``; and the
        producers, whose later reads call no hook. The memory of gradients that were handed over is theirs, too."""
        side = self._sides[mark.device]
        readers = (stream for stream in self.readers() if stream.device == mark.device)
        mark.order(torch.accelerator.current_stream(mark.device), *readers, *side.producers)
        if side.ordered is None or side.ordered.number < mark.number:
            side.ordered = mark

    def follow(self) -> None:
        """Order the current streams after what the producers have waited for."""
        for device, side in self._sides.items():
            if side.ordered is not None and not is_captured(device):
                torch.accelerator.current_stream(device).wait_event(side.ordered.event)

    def join(self) -> None:
        """Backward ends: order the current stream of each device, which is the loop's, and those that make gradients,
        after everything stepped."""
        for device, side in self._sides.items():
            if is_captured(device):
                continue  # nothing of this step is on the side stream
            self.producers.note_current(device)
            for stream in side.producers:
                stream.wait_stream(side.stream)
            side.held = None

    def join_all(self) -> None:
        """The same at any other time, when the current stream need not be one that makes gradients."""
        for device, side in self._sides.items():
            if is_captured(device):
                continue
            for stream in {torch.accelerator.current_stream(device), *side.producers}:
                stream.wait_stream(side.stream)
            side.held = None

    def finish(self) -> None:
        """Return when the device has done everything stepped. An error leaves the loop on a stream that nobody knows:
        whatever it does next is ordered after this. Not after other streams: a collective there may wait for a rank
        that does not come."""
        for device, side in self._sides.items():
            if is_captured(device):
                continue  # the error ends the recording, too
            side.stream.synchronize()
            side.held = None
