"""``offload="host"``: optimizer state that lives in pinned host memory, and is on the device while it is stepped."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from instep._optim.local_shard import LocalShard, shard_of_entry, whole_of_entry
from instep._optim.stages import Stage, Update
from instep._optim.values import reachable_values, storage_of
from instep._torch.engine import is_captured, on_stream
from instep._torch.versions import is_pinned, version_of
from instep.errors import UnsupportedOptimizerError, class_name

# Copies between pinned host memory and one accelerator, on two streams of their own: in and out.
#
# A tensor that is copied in is allocated on the stream of copies in, used on the stream that steps, and copied out on
# the stream of copies out. Its memory goes back to the first of these. So whatever came last is waited for there before
# the tensor is let go: the next one that is copied in gets the same memory, and no more than that.


T = TypeVar("T")


class Copies:
    """Copies of state between pinned host memory and one accelerator, on a stream for each direction.

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


Entry = dict[Any, Any]
"""The state of one parameter."""

_CONTAINERS = (dict, list, tuple)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of state that live in host memory."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_at_home(value):
                yield value
        elif type(value) is dict:
            yield from tensors_in(value.values())
        elif type(value) in _CONTAINERS:
            yield from tensors_in(value)


def is_at_home(tensor: torch.Tensor) -> bool:
    """A tensor of one element stays where the optimizer has made it: some count steps on the host, others on the
    device."""
    return tensor.device.type == "cpu" and tensor.numel() > 1


class DeviceEntries:
    """Copies of ``entries`` on ``device``, made on the current stream.

    Args:
        optimizer: its name.

    Attributes:
        entries: the copies.
        used: tensors on the device that copies were made into, or from.
        others: tensors on the device that somebody else has put into the state.
    """

    def __init__(self, optimizer: str, entries: Sequence[Entry | None], device: torch.device) -> None:
        self.device = device
        self.used: list[torch.Tensor] = []
        self._optimizer = optimizer
        # By the id of what was lent: that, and what it is a copy of.
        self._homes: dict[int, tuple[Any, Any]] = {}
        self.others: list[torch.Tensor] = []
        self._made: dict[int, torch.Tensor] = {}  # by the id of the host tensor
        self._memory: set[int] = set()
        with torch.no_grad():
            self.entries: list[Entry | None] = [self._lent(entry) for entry in entries]
        self._made.clear()

    def _lent(self, value: Any) -> Any:
        copied: Any
        if isinstance(value, torch.Tensor):
            if not is_at_home(value):
                if value.numel() > 1:
                    self.others.append(value)
                return value
            if (copied := self._made.get(id(value))) is None:
                copied = torch.empty_like(value, device=self.device).copy_(value, non_blocking=True)
                self._made[id(value)] = copied
                self.used.append(copied)
        elif type(value) is dict:
            copied = {key: self._lent(item) for key, item in value.items()}
        elif type(value) in _CONTAINERS:
            copied = type(value)(map(self._lent, value))
        else:
            return value
        self._homes[id(copied)] = copied, value
        return copied

    def are_at_home(self, entries: Sequence[Entry | None]) -> None:
        """Pinned tensors in ``entries`` are not to be moved."""
        self._homes.update((id(t), (t, t)) for t in tensors_in(entries) if is_pinned(t))

    def take_back(self, stepped: Sequence[Entry | None], beside: Sequence[torch.Tensor]) -> list[Entry | None]:
        """Copy what was stepped to the host, on the current stream: lent tensors into those that they are copies of,
        new ones into new ones in pinned memory. Returns the entries, which are in host memory.

        Args:
            beside: parameters and gradients, whose memory no state may share.

        Raises:
            UnsupportedOptimizerError: there is state that cannot live in host memory.
        """
        self._memory = {storage_of(tensor) for tensor in (*beside, *self.used)}
        with torch.no_grad():
            return [self._back(entry, "") for entry in stepped]

    def _back(self, value: Any, key: Any) -> Any:
        lent, home = self._homes.get(id(value), (None, None))
        if isinstance(value, torch.Tensor):
            if lent is value and _form_of(value) == _form_of(home):
                return home if home is value else home.copy_(value, non_blocking=True)
            return self._moved(value, key)
        if type(value) is dict:
            items = {name: self._back(item, name) for name, item in value.items()}
            kept = value if lent is None else home
            for name in kept.keys() - items.keys():
                del kept[name]
            kept.update(items)
            return kept
        if type(value) in _CONTAINERS:
            kept, elements = value if lent is None else home, [self._back(item, key) for item in value]
            if type(value) is list:
                kept[:] = elements
            return kept if list(map(id, kept)) == list(map(id, elements)) else tuple(elements)
        if any(isinstance(held, torch.Tensor) and held.numel() > 1 for held in reachable_values([value])):
            raise self._refusal(key, f"holds tensors in a {type(value).__name__}")
        return value

    def _moved(self, value: torch.Tensor, key: Any) -> torch.Tensor:
        """A tensor that the update has made."""
        if value.numel() <= 1:
            return value
        if value.device != self.device:
            raise self._refusal(key, f"is on {value.device}, where the optimizer itself has put it")
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
            raise self._refusal(key, f"is a {type(value).__name__}" + f" ({value.layout})" * value.is_sparse)
        memory = value.untyped_storage()
        if memory.data_ptr() in self._memory or memory.nbytes() != value.numel() * value.element_size():
            raise self._refusal(key, "shares memory with another tensor")
        self._memory.add(memory.data_ptr())
        kept = torch.empty_like(value, device="cpu", pin_memory=True)
        self._homes[id(value)] = value, kept
        self.used.append(value)
        return kept.copy_(value, non_blocking=True)

    def _refusal(self, key: Any, fault: str) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"offload='host' keeps plain tensors of optimizer state in host memory, each with memory of its own, and "
            f"state[…][{key!r}] of {self._optimizer} {fault}. Attach without offload"
        )


# In ``optimizer.state`` every tensor of more than one element is a host tensor. A bucket is stepped with copies of its
# tensors on the device. While it is stepped, the state of the bucket that was stepped after it in the last step is
# copied to the device, and that of the one before is copied back: so state of two buckets is there at most.


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


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
        copied: the host tensors, with their versions when they were copied.
    """

    call: _Call
    lent: DeviceEntries
    there: torch.Event
    copied: Sequence[tuple[torch.Tensor, int]]


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
    ) -> DeviceEntries:
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
        self, lent: DeviceEntries, stepped: Sequence[Entry | None], beside: Sequence[torch.Tensor]
    ) -> list[Entry | None]:
        """The entries that were lent have been stepped: copy them to the host. Returns them there. For the arguments
        see ``DeviceEntries``."""
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
        name = class_name(call.optimizer())
        copied = [(tensor, version_of(tensor)) for tensor in tensors_in(entries)]
        lent, there = self._copies_of(device).bring(lambda: DeviceEntries(name, entries, device))
        return _Ahead(call, lent, there, copied)

    def _taken(self, call: _Call, entries: Sequence[Entry | None]) -> _Ahead | None:
        """What was brought ahead for this call, if nobody has written it since."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.call.parameters != call.parameters:
            return None
        now = list(tensors_in(entries))
        if len(now) != len(ahead.copied) or any(
            tensor is not then or version_of(tensor) != version
            for tensor, (then, version) in zip(now, ahead.copied, strict=True)
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
        parameters, optimizer = self._parameters_of(following), following.optimizer()
        if optimizer is not None and parameters and parameters[0].device == device:
            entries: list[Entry | None] = list(map(optimizer.state.get, parameters))
            if following.shards is not None:
                entries = [shard_of_entry(entry, shard) for entry, shard in zip(entries, following.shards, strict=True)]
            self._ahead = self._bring(following, entries, device)

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
        state = update.state
        kept: Sequence[Entry | None] = update.entries or list(map(update.optimizer.state.get, update.owned))
        lent = self._state.lend(self._optimizer, update.owned, update.shards, kept)
        state.update((p, entry) for p, entry in zip(update.tensors, lent.entries, strict=True) if entry is not None)
        try:
            yield
        finally:
            if update.has_run:
                beside = [tensor for p in update.tensors for tensor in (p, p.grad) if tensor is not None]
                kept = self._state.take_back(lent, list(map(state.get, update.tensors)), beside)
            state.update((p, entry) for p, entry in zip(update.tensors, kept, strict=True) if entry is not None)

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
        self._state.finish()

    def take_in(self) -> None:
        """Move state that is on the device; ``UnsupportedOptimizerError``, if some cannot live in host memory."""
        for parameter, entry, shard in self._entries():
            stepped = shard_of_entry(entry, shard)
            lent = DeviceEntries(self._name, (), parameter.device)
            lent.are_at_home([stepped])
            (kept,) = lent.take_back([stepped], [parameter])
            torch.accelerator.current_stream(parameter.device).synchronize()
            self._put(entry, kept, shard)

    def pin(self) -> None:
        """Others have put tensors into the state, in host memory that no device can copy from by itself."""
        for _, entry, _ in self._entries():
            kept = {key: value for key, value in entry.items() if type(value) is torch.Tensor and is_at_home(value)}
            entry.update((key, value.pin_memory()) for key, value in kept.items() if not is_pinned(value))

    def give_back(self) -> None:
        """Move the state to the device, where the optimizer's own ``step()`` finds it."""
        self.finish()
        for parameter, entry, shard in self._entries():
            lent = DeviceEntries(self._name, [shard_of_entry(entry, shard)], parameter.device)
            self._put(entry, lent.entries[0], shard)

    @property
    def _name(self) -> str:
        return class_name(self._optimizer())

    def _entries(self) -> Iterator[tuple[torch.Tensor, Entry, LocalShard | None]]:
        optimizer = self._optimizer()
        for parameter, shard in self._parts():
            if optimizer is not None and (entry := optimizer.state.get(parameter)):
                yield parameter, entry, shard

    def _put(self, entry: Entry, kept: Entry | None, shard: LocalShard | None) -> None:
        assert kept is not None
        if shard is not None:
            whole_of_entry(kept, entry, shard)
        else:
            entry.update(kept)


# ``optimizer.load_state_dict`` where state lives in host memory.
#
# torch moves all state to the parameters' device, which may have no room for it. So torch does not see the tensors, and
# they are put into their places afterwards.


class _Hidden:
    """Something that torch leaves as it is."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class HostLoading:
    """Hooks around ``load_state_dict`` of one optimizer."""

    def __init__(self, home: OffloadedState) -> None:
        self._home = home

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            return None  # it may look at the tensors
        state = {
            key: {name: _hidden(name, value) for name, value in entry.items()} if type(entry) is dict else entry
            for key, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def after(self, optimizer: Optimizer) -> None:
        for parameter, entry in optimizer.state.items():
            if isinstance(parameter, torch.Tensor) and isinstance(entry, dict):
                entry.update((name, _shown(value, parameter)) for name, value in entry.items())
        self._home.take_in()


def _hidden(name: object, value: Any) -> Any:
    is_steps = name == "step"  # which torch puts on the host or on the device, as the optimizer counts them
    return value if is_steps or type(value) is not torch.Tensor or value.numel() <= 1 else _Hidden(value)


def _shown(value: Any, parameter: torch.Tensor) -> Any:
    """In the dtype that torch's ``load_state_dict`` gives it."""
    if not isinstance(value, _Hidden):
        return value
    tensor = value.tensor
    if parameter.is_floating_point():
        tensor = tensor.to(parameter.dtype)
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
