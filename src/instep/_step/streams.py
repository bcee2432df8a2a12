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
        self.known(stream.device).add(stream)

    def known(self, device: torch.device) -> set[torch.Stream]:
        """All of ``device`` that were seen so far, and will be."""
        return self._streams.setdefault(device, set())

    def of(self, device: torch.device) -> Set[torch.Stream]:
        """Those of ``device``; while a CUDA graph is recorded, those that are in it."""
        streams = self.known(device)
        return streams if not is_captured(device) else {stream for stream in streams if _is_captured(stream)}

    def gather(self, device: torch.device) -> None:
        """Have the device's current stream wait for all of them."""
        if producers := self.of(device):
            current = torch.accelerator.current_stream(device)
            for stream in producers - {current}:
                current.wait_stream(stream)


def _is_captured(stream: torch.Stream) -> bool:
    with on_stream(stream):
        return is_captured(stream.device)


class Side:
    """The side stream of one device. Never while a CUDA graph is recorded there.

    Two events serve all buckets. A wait is for what its event held when it was asked for: an event can be recorded
    again at once.
    """

    def __init__(self, stream: torch.Stream, producers: ProducerStreams) -> None:
        self.stream = stream
        self.ordered: Mark | None = None  # the latest that the producers have waited for
        self._index = stream.device_index
        self._producers = producers.known(stream.device)
        self._marks = 0
        self._before, self._after = torch.Event(stream.device), torch.Event(stream.device)
        self._held: Sequence[torch.Tensor] = ()

    @property
    def producers(self) -> Set[torch.Stream]:
        return self._producers

    def enter(self) -> tuple[torch.Stream, int]:
        """Make it current, ordered after all that the producers hold by now: the gradients, and every kernel that still
        reads an old weight. Returns what was current, and the index of the device that was."""
        index, current = torch.accelerator.current_device_index(), torch.accelerator.current_stream(self._index)
        if current != self.stream:
            self._producers.add(current)
            for stream in self._producers:
                self._before.record(stream)
                self.stream.wait_event(self._before)
            torch.accelerator.set_stream(self.stream)
        return current, index

    def leave(self, stream: torch.Stream, index: int) -> None:
        """Make what was current before ``enter`` current again."""
        if stream != self.stream:
            torch.accelerator.set_stream(stream)
        if index != self._index:
            torch.accelerator.set_device_index(index)

    def mark(self) -> Mark:
        self._marks += 1
        return Mark(self.stream.record_event(), self.stream.device, self._marks)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep ``tensors``, which this stream has used, until the next ones are held: the memory of those that were
        held so far is the producers' again, which wait for this stream's use of it."""
        if self._held:
            for stream in self._producers:
                stream.wait_event(self._after)
        self._after.record(self.stream)
        self._held = tensors

    def join(self, streams: Iterable[torch.Stream]) -> None:
        """Have these, and the producers are among them, wait for all that this stream holds."""
        for stream in streams:
            stream.wait_stream(self.stream)
        self._held = ()

    def finish(self) -> None:
        self.stream.synchronize()
        self._held = ()


class StepStreams:
    """One side stream per accelerator device, on which buckets are stepped: for its device the one that is ``given``.

    Attributes:
        readers: the streams, beside the one that is current, on which parameters are about to be read.
    """

    def __init__(self, given: torch.Stream | None = None) -> None:
        self.readers: Callable[[], Iterable[torch.Stream]] = lambda: ()
        self.producers = ProducerStreams()
        self._sides: dict[torch.device, Side] = {}
        if given is not None and given.device.type != "cpu":
            self._sides[given.device] = Side(given, self.producers)

    def see(self, device: torch.device) -> None:
        """A forward was on the current streams of this device, and of the others that were stepped."""
        for seen in {device, *self._sides}:
            self.producers.note_current(seen)

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Make the device's side stream current, ordered after all that the device's current stream holds now, and
        those that make gradients: the gradients, and every kernel that still reads an old weight."""
        return AS_IT_IS if device.type == "cpu" else self._on(device)

    def side(self, device: torch.device) -> Side:
        """That of an accelerator on which no CUDA graph is recorded."""
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = Side(torch.Stream(device), self.producers)
        return side

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        if is_captured(device):
            self.producers.gather(device)
            yield
            recorded = torch.accelerator.current_stream(device)
            for stream in self.producers.of(device) - {recorded}:  # the memory of gradients is theirs again
                stream.wait_stream(recorded)
            return
        side = self.side(device)
        before = side.enter()
        try:
            yield
        finally:
            side.leave(*before)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep alive ``tensors``, which the side stream of their device has used, until the producers have waited for
        that: up to the next call, or to ``join``."""
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
            side.join(side.producers)

    def join_all(self) -> None:
        """The same at any other time, when the current stream need not be one that makes gradients."""
        for device, side in self._sides.items():
            if is_captured(device):
                continue
            side.join({torch.accelerator.current_stream(device), *side.producers})

    def finish(self) -> None:
        """Return when the device has done everything stepped. An error leaves the loop on a stream that nobody knows:
        whatever it does next is ordered after this. Not after other streams: a collective there may wait for a rank
        that does not come."""
        for device, side in self._sides.items():
            if is_captured(device):
                continue  # the error ends the recording, too
            side.finish()
