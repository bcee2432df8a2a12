"""``offload="host"``: optimizer state that lives in pinned host memory, and is on the device while it is stepped."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.local_shard import LocalShard, shard_of_entry
from instep._optim.stages import Stage, Update
from instep._optim.values import reachable_values, storage_of
from instep._torch.engine import is_captured, on_stream
from instep._torch.versions import is_pinned, versions_of
from instep.errors import UnsupportedOptimizerError, class_name

# What is in the state of a bucket, and moves between host memory and the device.


Entry = dict[Any, Any]
"""The state of one parameter."""


def _leaves(value: Any, key: Any = "") -> Iterator[tuple[Any, Any]]:
    """What state holds in dicts, lists and tuples, each with the key that it has in the innermost dict."""
    if type(value) is dict:
        for name, item in value.items():
            yield from _leaves(item, name)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _leaves(item, key)
    else:
        yield key, value


def is_at_home(tensor: torch.Tensor) -> bool:
    """A tensor of one element stays where the optimizer has made it: some count steps on the host, others on the
    device."""
    return tensor.device.type == "cpu" and tensor.numel() > 1


def _large_tensors_in(entries: Sequence[Entry | None]) -> list[torch.Tensor]:
    """Those of more than one element, each once."""
    large = [v for _, v in _leaves(entries) if isinstance(v, torch.Tensor) and v.numel() > 1]
    return list({id(tensor): tensor for tensor in large}.values())


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


class _Lent(NamedTuple):
    """Tensors of state that live in host memory, with copies of them that are on the device, or on their way there.

    While an update runs, the tensors themselves refer to the copies: whatever holds one finds it on the device.

    Attributes:
        versions: of the tensors, when they were copied.
        homes: other tensors of the same memory of the host.
        there: when the copies are on the device.
    """

    tensors: list[torch.Tensor]
    versions: list[int]
    homes: list[torch.Tensor]
    copies: list[torch.Tensor]
    there: torch.Event

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, and nobody has written one since."""
        return list(map(id, self.tensors)) == list(map(id, tensors)) and versions_of(tensors) == self.versions

    def put_there(self) -> None:
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.data = copy

    @torch.no_grad()
    def take_back(self, *, written: bool) -> None:
        """``written``: the copies were: they are copied to the host, on the current stream."""
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            if _form_of(tensor) == _form_of(home):  # else the update has made another one of it
                if written:
                    home.copy_(tensor, non_blocking=True)
                tensor.data = home


def _move_home(
    optimizer: str,
    device: torch.device,
    entries: Sequence[Entry | None],
    known: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor],
    used: list[torch.Tensor],
) -> None:
    """Have tensors of state that are on ``device`` live in pinned memory from now on, to which they are copied on the
    current stream.

    Args:
        optimizer: its name.
        known: live in host memory already.
        others: whose memory no state may share.
        used: to which tensors of the memory that they have had on the device are added: it is being read.

    Raises:
        UnsupportedOptimizerError: there is state that cannot live in host memory.
    """
    ids, memory = set(map(id, known)), set(map(storage_of, others))
    for key, value in _leaves(entries):
        if isinstance(value, torch.Tensor) and (value.numel() <= 1 or id(value) in ids):
            continue
        if (fault := _fault_of(value, device, memory)) is not None:
            raise UnsupportedOptimizerError(
                f"offload='host' keeps plain tensors of optimizer state in host memory, each with memory of its own, "
                f"and state[…][{key!r}] of {optimizer} {fault}. Attach without offload"
            )
        if isinstance(value, torch.Tensor):
            ids.add(id(value))
            memory.add(storage_of(value))
            used.append(value.detach())
            with torch.no_grad():
                home = torch.empty_like(value, device="cpu", pin_memory=True)
                value.data = home.copy_(value, non_blocking=True)


def _fault_of(value: Any, device: torch.device, memory: Container[int]) -> str | None:
    """Why what the optimizer has put into its state cannot live in host memory, in words; ``None``: it can.

    Args:
        memory: of other tensors.
    """
    if not isinstance(value, torch.Tensor):
        holds = any(isinstance(held, torch.Tensor) and held.numel() > 1 for held in reachable_values([value]))
        return f"holds tensors in a {type(value).__name__}" if holds else None
    if value.device != device:
        return f"is on {value.device}, where the optimizer itself has put it"
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
        return f"is a {type(value).__name__}" + f" ({value.layout})" * value.is_sparse
    if storage_of(value) in memory or value.untyped_storage().nbytes() != value.nbytes:
        return "shares memory with another tensor"
    return None


# In ``optimizer.state`` every tensor of more than one element is a host tensor. A bucket is stepped with copies of its
# tensors on the device. While it is stepped, the state of the bucket that was stepped after it in the last step is
# copied to the device, and that of the one before is copied back: so state of two buckets is there at most.
#
# A tensor that is copied in is allocated on the stream of copies in, used on the stream that steps, and copied out on
# the stream of copies out. Its memory goes back to the first of these. So whatever came last is waited for there before
# the tensor is let go: the next one that is copied in gets the same memory, and no more than that.


Part = tuple[torch.Tensor, LocalShard | None]


class Copies:
    """Copies of state between pinned host memory and one accelerator, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.Stream(device)
        self._out = torch.Stream(device)
        self._are_under_way = False  # the host has to wait before it reads or writes what they read or write
        self._returning: list[tuple[torch.Event, Sequence[torch.Tensor]]] = []  # held until they are copied out
        self._ahead: _Lent | None = None  # before it is needed
        # Of each bucket the tensors that live in host memory, in the order in which the last step has stepped them, and
        # the running one.
        self._last: list[list[weakref.ref[torch.Tensor]]] = []
        self._now: list[list[weakref.ref[torch.Tensor]]] = []
        # Tensors of the loop's that were stepped. Nobody knows which stream their memory goes back to: they stay until
        # the host has waited.
        self._others: list[torch.Tensor] = []

    def lend(self, entries: Sequence[Entry | None]) -> _Lent:
        """Have the tensors of ``entries``, the state of a bucket, be on the device, for a step on the current stream.

        Raises:
            UnsupportedOptimizerError: a CUDA graph is recorded.
        """
        if is_captured(self._device):
            raise UnsupportedOptimizerError(
                "a CUDA graph is recorded, and offload='host' copies optimizer state on streams of its own. Attach "
                "without offload, or call optimizer.step() outside of the graph"
            )
        self._let_go()
        large = _large_tensors_in(entries)
        tensors = [tensor for tensor in large if is_at_home(tensor)]
        self._others += [tensor.detach() for tensor in large if not is_at_home(tensor)]
        ahead, self._ahead = self._ahead, None
        # What was brought ahead for this call, if nobody has written it since.
        lent = ahead if ahead is not None and ahead.is_of(tensors) else self._bring(tensors)
        self._bring_next(tensors)
        torch.accelerator.current_stream(self._device).wait_event(lent.there)
        lent.put_there()
        return lent

    def _let_go(self) -> None:
        """Free on the device what is on its way out. The current stream has made some of it."""
        returning, self._returning = self._returning, []
        for there, _ in returning:
            self._in.wait_event(there)
            torch.accelerator.current_stream(self._device).wait_event(there)

    @torch.no_grad()
    def _bring(self, tensors: list[torch.Tensor]) -> _Lent:
        self._are_under_way = True
        homes, versions = [tensor.detach() for tensor in tensors], versions_of(tensors)
        with on_stream(self._in):
            copies = [torch.empty_like(t, device=self._device).copy_(t, non_blocking=True) for t in tensors]
            return _Lent(tensors, versions, homes, copies, self._in.record_event())

    def _bring_next(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy to the device what was stepped after these in the last step."""
        number = len(self._now)
        if number + 1 < len(self._last) and [id(ref()) for ref in self._last[number]] == list(map(id, tensors)):
            self._ahead = self._bring([t for ref in self._last[number + 1] if (t := ref()) is not None])

    def take_back(
        self, lent: _Lent, optimizer: str, entries: Sequence[Entry | None], beside: Sequence[torch.Tensor]
    ) -> None:
        """The current stream has stepped what was lent: have all tensors of ``entries`` live in host memory.

        Args:
            optimizer: its name.
            beside: parameters and gradients, whose memory no state may share.

        Raises:
            UnsupportedOptimizerError: there is state that cannot live in host memory.
        """
        used = [tensor.detach() for tensor in lent.tensors]  # there, before they are at home again
        self._are_under_way = True
        self._out.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with on_stream(self._out):
            try:
                lent.take_back(written=True)
                known = filter(is_at_home, lent.tensors)
                _move_home(optimizer, self._device, entries, known, [*beside, *used], used)
            finally:
                self._returning.append((self._out.record_event(), used))
        self._now.append(list(map(weakref.ref, _large_tensors_in(entries))))

    def finish(self) -> None:
        """Return when all copies have been made: the host may read and write all state."""
        self._ahead = None
        if self._are_under_way:
            self._out.wait_stream(self._in)
            self._out.synchronize()
            self._returning, self._are_under_way = [], False
        self._others.clear()
        if self._now:
            self._last, self._now = self._now, []


class HostState(dict[torch.device, Copies]):
    """The state of all optimizers of one attachment, by device."""

    def __missing__(self, device: torch.device) -> Copies:
        return self.setdefault(device, Copies(device))


class OffloadedState(Stage):
    """The state of one optimizer lives in host memory, and an update finds copies of it on the device.

    Args:
        optimizer: the user's, which is held weakly.
        parts: the parameters whose state lives there, each with the shard that is stepped in its place, if one is.
        bucket_bytes: of parameters, whose state is lent together.
    """

    def __init__(
        self, state: HostState, optimizer: Optimizer, parts: Callable[[], Iterable[Part]], bucket_bytes: int
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._state = state
        self._optimizer = weakref.ref(optimizer)
        self._parts = parts

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        copies = self._state[update.owned[0].device]
        lent = copies.lend(list(map(update.state.get, update.tensors)))
        try:
            yield
        finally:
            if update.has_run:
                beside = [tensor for p in update.tensors for tensor in (p, p.grad) if tensor is not None]
                entries = list(map(update.state.get, update.tensors))
                copies.take_back(lent, self._name, entries, beside)
            else:
                lent.take_back(written=False)

    def portions_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
        """Divide what DDP, FSDP or ``optimizer.step()`` has stepped together."""
        start = nbytes = 0
        for number, tensor in enumerate(tensors):
            nbytes += tensor.nbytes
            if nbytes >= self._bucket_bytes or number + 1 == len(tensors):
                yield slice(start, number + 1)
                start, nbytes = number + 1, 0

    def finish(self) -> None:
        """Return when the host may read and write the state."""
        for copies in self._state.values():
            copies.finish()

    def take_in(self) -> None:
        """Move state that is on the device; ``UnsupportedOptimizerError``, if some cannot live in host memory."""
        for parameter, entry, shard in self._entries():
            stepped, device = shard_of_entry(entry, shard), parameter.device
            known = filter(is_pinned, _large_tensors_in([stepped]))
            _move_home(self._name, device, [stepped], known, [parameter], [])
            torch.accelerator.current_stream(device).synchronize()
            _spread(entry, shard)

    def pin(self) -> None:
        """Others have put tensors into the state, in host memory that no device can copy from by itself."""
        for _, entry, _ in self._entries():
            for tensor in filter(is_at_home, _large_tensors_in([entry])):
                if type(tensor) is torch.Tensor and not is_pinned(tensor):
                    tensor.data = tensor.pin_memory()

    def give_back(self) -> None:
        """Move the state to the device, where the optimizer's own ``step()`` finds it."""
        self.finish()
        for parameter, entry, shard in self._entries():
            for tensor in filter(is_at_home, _large_tensors_in([shard_of_entry(entry, shard)])):
                tensor.data = tensor.to(parameter.device, non_blocking=True)
            _spread(entry, shard)

    @property
    def _name(self) -> str:
        return class_name(self._optimizer())

    def _entries(self) -> Iterator[tuple[torch.Tensor, Entry, LocalShard | None]]:
        optimizer = self._optimizer()
        for parameter, shard in self._parts():
            if optimizer is not None and (entry := optimizer.state.get(parameter)):
                yield parameter, entry, shard


def _spread(entry: Entry, shard: LocalShard | None) -> None:
    """The parts of a parameter's state were moved: have the tensors that are spread over ranks say where theirs are."""
    if shard is not None:
        parts = ((key, value, shard.of_state(value)) for key, value in entry.items())
        entry.update([(key, shard.as_state(part)) for key, value, part in parts if part is not value])


# ``optimizer.load_state_dict`` where state lives in host memory.
#
# torch moves all state to the parameters' device, which may have no room for it. So torch does not see the tensors, and
# they are put into their places afterwards.


@dataclass(slots=True, eq=False)
class _Hidden:
    """Something that torch leaves as it is."""

    tensor: torch.Tensor

    def shown(self, parameter: torch.Tensor) -> torch.Tensor:
        """In the dtype that torch's ``load_state_dict`` gives it."""
        tensor = self.tensor
        if parameter.is_floating_point():
            tensor = tensor.to(parameter.dtype)
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


class HostLoading:
    """Hooks around ``load_state_dict`` of one optimizer."""

    def __init__(self, home: OffloadedState) -> None:
        self._home = home

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            return None  # it may look at the tensors
        state = dict(state_dict["state"])
        for key, entry in state.items():
            if type(entry) is dict:
                state[key] = {name: _Hidden(v) if _is_moved(name, v) else v for name, v in entry.items()}
        return {**state_dict, "state": state}

    def after(self, optimizer: Optimizer) -> None:
        for parameter, entry in optimizer.state.items():
            if isinstance(parameter, torch.Tensor) and isinstance(entry, dict):
                hidden = [(name, value) for name, value in entry.items() if isinstance(value, _Hidden)]
                entry.update((name, value.shown(parameter)) for name, value in hidden)
        self._home.take_in()


def _is_moved(name: object, value: Any) -> bool:
    """By torch: steps it puts on the host or on the device, as the optimizer counts them."""
    return name != "step" and type(value) is torch.Tensor and value.numel() > 1
