"""``offload="host"``: optimizer state that lives in pinned host memory, and is on the device while it is stepped.

In ``optimizer.state`` every tensor of more than one element is a host tensor. A bucket is stepped with copies of its
tensors on the device. While it is stepped, the state of the bucket that was stepped after it in the last step is
copied to the device, and that of the one before is copied back: so state of two buckets is there at most.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from instep._autograd.tracing import is_captured
from instep._optim.host_copies import Copies
from instep._optim.lent_entries import Entry, LentEntries, is_at_home, tensors_in
from instep._optim.parts import LocalShard, shard_of_entry, version_of, whole_of_entry
from instep.errors import UnsupportedOptimizerError


class _Call(NamedTuple):
    """Parameters that are stepped together.

    Attributes:
        optimizer: that has their state, weakly.
        parameters: by ``id``.
    """

    optimizer: "weakref.ref[Optimizer]"
    parameters: tuple[int, ...]
    shards: tuple[LocalShard | None, ...] | None


class _Ahead(NamedTuple):
    """State that was copied to the device before it is needed.

    Attributes:
        found: the host tensors, with their versions when they were copied.
    """

    call: _Call
    lent: LentEntries
    there: torch.Event
    found: Sequence[tuple[torch.Tensor, int]]


Part = tuple[torch.Tensor, LocalShard | None]


class HostState:
    """The state of all optimizers of one attachment."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, Copies] = {}
        self._ahead: _Ahead | None = None
        self._last: list[_Call] = []  # of the last step, in order
        self._calls: list[_Call] = []  # of the running one
        # Tensors of the loop's that were stepped. Nobody knows which stream their memory goes back to: they stay until
        # the host has waited.
        self._others: list[torch.Tensor] = []
        self._parameters: dict[weakref.ref[Optimizer], dict[int, torch.Tensor]] = {}  # by id, while a step runs

    def lend(
        self,
        optimizer: "weakref.ref[Optimizer]",
        owned: Sequence[torch.Tensor],
        shards: Sequence[LocalShard | None] | None,
        entries: Sequence[Entry | None],
    ) -> LentEntries:
        """Copy ``entries``, the state of ``owned``, to the device, for a step on the current stream.

        Args:
            optimizer: the user's.
            shards: where this rank's shards are stepped, whose state ``entries`` are.

        Raises:
            UnsupportedOptimizerError: a CUDA graph is recorded.
        """
        device = owned[0].device
        if is_captured(device):
            raise UnsupportedOptimizerError(
                "a CUDA graph is recorded, and offload='host' copies optimizer state on streams of its own. Attach "
                "without offload, or call optimizer.step() outside of the graph"
            )
        copies = self._copies_of(device)
        copies.let_go()
        call = _Call(optimizer, tuple(map(id, owned)), None if shards is None else tuple(shards))
        ahead = self._taken(call, entries) or self._bring(call, entries, device)
        self._bring_next(call, device)
        torch.accelerator.current_stream(device).wait_event(ahead.there)
        return ahead.lent

    def take_back(
        self, lent: LentEntries, stepped: Sequence[Entry | None], beside: Sequence[torch.Tensor]
    ) -> list[Entry | None]:
        """The entries that were lent have been stepped: copy them to the host. Returns them there. See ``LentEntries``
        for the arguments."""
        self._others += lent.others
        return self._copies_of(lent.device).send(lambda: lent.take_back(stepped, beside), lent.used)

    def finish(self) -> None:
        """Return when the host may read and write all state."""
        self._ahead = None
        for copies in self._copies.values():
            copies.finish()
        self._others.clear()
        if self._calls:
            self._last, self._calls = self._calls, []
        self._parameters.clear()

    def _copies_of(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = Copies(device)
        return self._copies[device]

    def _bring(self, call: _Call, entries: Sequence[Entry | None], device: torch.device) -> _Ahead:
        name = type(call.optimizer()).__name__
        found = [(tensor, version_of(tensor)) for tensor in tensors_in(entries)]
        lent, there = self._copies_of(device).bring(lambda: LentEntries(name, entries, device))
        return _Ahead(call, lent, there, found)

    def _taken(self, call: _Call, entries: Sequence[Entry | None]) -> _Ahead | None:
        """What was brought ahead for this call, if nobody has written it since."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.call.parameters != call.parameters:
            return None
        now = list(tensors_in(entries))
        if len(now) != len(ahead.found) or any(
            tensor is not then or version_of(tensor) != version
            for tensor, (then, version) in zip(now, ahead.found, strict=True)
        ):
            return None
        return ahead

    def _bring_next(self, call: _Call, device: torch.device) -> None:
        """Copy to the device what was stepped after this call in the last step."""
        number = len(self._calls)
        self._calls.append(call)
        if number + 1 >= len(self._last) or self._last[number].parameters != call.parameters:
            return
        following = self._last[number + 1]
        parameters = self._parameters_of(following)
        if parameters and parameters[0].device == device:
            self._ahead = self._bring(following, _entries_of(following, parameters), device)

    def _parameters_of(self, call: _Call) -> list[torch.Tensor]:
        """Empty if one of them is in no group any more."""
        optimizer = call.optimizer()
        if optimizer is None:
            return []
        if call.optimizer not in self._parameters:
            groups = optimizer.param_groups
            self._parameters[call.optimizer] = {id(p): p for group in groups for p in group["params"]}
        known = self._parameters[call.optimizer]
        return [known[key] for key in call.parameters] if known.keys() >= set(call.parameters) else []


def _entries_of(call: _Call, parameters: Sequence[torch.Tensor]) -> list[Entry | None]:
    optimizer = call.optimizer()
    assert optimizer is not None
    entries: list[Entry | None] = list(map(optimizer.state.get, parameters))
    if call.shards is None:
        return entries
    return [shard_of_entry(entry, shard) for entry, shard in zip(entries, call.shards, strict=True)]


def _is_unpinned(value: object) -> bool:
    return type(value) is torch.Tensor and is_at_home(value) and not value.is_pinned()


class StateHome:
    """Where the state of one optimizer lives.

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

    def lend(
        self,
        owned: Sequence[torch.Tensor],
        shards: Sequence[LocalShard | None] | None,
        entries: Sequence[Entry | None],
    ) -> LentEntries:
        return self._state.lend(self._optimizer, owned, shards, entries)

    def take_back(
        self, lent: LentEntries, stepped: Sequence[Entry | None], beside: Sequence[torch.Tensor]
    ) -> list[Entry | None]:
        return self._state.take_back(lent, stepped, beside)

    def portions_of(self, parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
        """Divide what DDP, FSDP or ``optimizer.step()`` has stepped together."""
        start = nbytes = 0
        for number, parameter in enumerate(parameters):
            nbytes += parameter.nbytes
            if nbytes >= self._bucket_bytes or number + 1 == len(parameters):
                yield slice(start, number + 1)
                start, nbytes = number + 1, 0

    def finish(self) -> None:
        """Return when the host may read and write the state."""
        self._state.finish()

    def take_in(self) -> None:
        """Move state that is on the device.

        Raises:
            UnsupportedOptimizerError: there is state that cannot live in host memory.
        """
        for parameter, entry, shard in self._entries():
            stepped = shard_of_entry(entry, shard)
            lent = LentEntries(self._name, (), parameter.device)
            lent.are_at_home([stepped])
            (kept,) = lent.take_back([stepped], [parameter])
            torch.accelerator.current_stream(parameter.device).synchronize()
            self._put(entry, kept, shard)

    def pin(self) -> None:
        """Others have put tensors into the state, in host memory that no device can copy from by itself."""
        for _, entry, _ in self._entries():
            entry.update((key, value.pin_memory()) for key, value in entry.items() if _is_unpinned(value))

    def give_back(self) -> None:
        """Move the state to the device, where the optimizer's own ``step()`` finds it."""
        self.finish()
        for parameter, entry, shard in self._entries():
            lent = LentEntries(self._name, [shard_of_entry(entry, shard)], parameter.device)
            self._put(entry, lent.entries[0], shard)

    @property
    def _name(self) -> str:
        return type(self._optimizer()).__name__

    def _entries(self) -> Iterator[tuple[torch.Tensor, Entry, LocalShard | None]]:
        optimizer = self._optimizer()
        for parameter, shard in self._parts():
            if optimizer is not None and (entry := optimizer.state.get(parameter)):
                yield parameter, entry, shard

    def _put(self, entry: Entry, found: Entry | None, shard: LocalShard | None) -> None:
        assert found is not None
        if shard is not None:
            whole_of_entry(found, entry, shard)
        else:
            entry.update(found)
