"""Which rank has which part of a parameter under ZeRO-1, and how parts are sent.

Where the update is elementwise each rank has some rows of every parameter, divided as ``DTensor``'s ``Shard(0)``
divides them: a ``RowShard``. Otherwise (Muon, Adafactor, optimizers of others) each parameter is one rank's, all of it:
an ``OwnedParameter``. ``StateShards`` sends the gradients of each part to its rank (``ScatteredGradients``), and the
stepped parts to all (``GatheredShards``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._optim.kinds import is_elementwise
from instep._optim.parameters import AttachedParameter
from instep._ranks.collectives import broadcast_entries
from instep._ranks.process_groups import communicating
from instep.errors import AttachError


class _Part:
    """What a rank has of one parameter. Nobody else makes state for it."""

    state_is_sharded = True

    def fits(self, entry: Mapping[Any, Any]) -> bool:
        return True

    def of_state(self, value: Any) -> Any:
        return value

    def as_state(self, value: Any) -> Any:
        return value


class RowShard(_Part):
    """This rank's rows of one parameter. A parameter without dimensions is not divided: every rank steps it.

    Attributes:
        own: the shape of these rows.
        numel: how many elements each rank's place in a communication has room for.
        is_empty: whether this rank has no row.
        is_shared: whether other ranks have rows of the same parameter.
    """

    is_owner = True
    owner = None

    def __init__(self, parameter: torch.Tensor, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._rank = mesh.get_local_rank()
        self._ranks = mesh.size()
        self._shape, self._stride = parameter.shape, parameter.stride()
        self._divided = parameter.dim() > 0
        # Rows of each rank, as long as there are enough.
        self._size = -(-parameter.shape[0] // self._ranks) if self._divided else 1
        self.numel = self.rows(parameter, 0).numel()
        self.own = self.rows(parameter, self._rank).shape
        self.is_empty = self._divided and self.own[0] == 0
        self.is_shared = self.own != self._shape

    def rows(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of ``rank`` of a plain tensor, in the same memory."""
        return tensor.detach()[rank * self._size : (rank + 1) * self._size] if self._divided else tensor.detach()

    def pairs(self, by_rank: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All ranks' rows in ``by_rank`` (ranks, numel), each beside the same ones of a plain tensor, as views."""
        if self._divided and self._shape[0] == self._ranks * self._size:
            shape = (self._ranks, self._size, *self._shape[1:])
            yield by_rank.view(shape), tensor.detach().view(shape)
            return
        for rank, flat in enumerate(by_rank):
            rows = self.rows(tensor, rank)
            yield flat[: rows.numel()].view(rows.shape), rows

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor._local_tensor if isinstance(tensor, DTensor) else self.rows(tensor, self._rank)

    def of_state(self, value: Any) -> Any:
        return value._local_tensor if isinstance(value, DTensor) else value

    def as_state(self, value: Any) -> Any:
        is_divided = self._divided and isinstance(value, torch.Tensor) and value.shape == self.own
        return self.spread(value) if is_divided else value

    def spread(self, rows: torch.Tensor) -> DTensor:
        """This rank's rows as a part of the whole."""
        placements = [Shard(0) if self._divided else Replicate()]
        with torch.no_grad():
            return DTensor.from_local(
                rows, self._mesh, placements, run_check=False, shape=self._shape, stride=self._stride
            )

    def take(self, entry: dict[Any, Any]) -> None:
        """Keep of the plain optimizer's entry what belongs to these rows."""
        for key, value in entry.items():
            if self._divided and type(value) is torch.Tensor and value.shape == self._shape:
                entry[key] = self.spread(self.rows(value, self._rank).clone())

    def give(self, entry: Mapping[Any, Any] | None) -> dict[Any, Any] | None:
        """The plain optimizer's entry for one that was kept. All ranks must call this."""
        if entry is None:
            return None
        return {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in entry.items()}


class OwnedParameter(_Part):
    """One parameter that one rank steps whole, and sends to the others.

    Its gradient is a ``DTensor`` of ``Partial`` placement, which is the sum over ranks, and zero on all ranks but the
    owner: so norms are right.

    Attributes:
        owner: the rank that steps it.
        own: its shape.
        is_owner: whether that is this rank.
    """

    def __init__(self, parameter: torch.Tensor, owner: int, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.owner = owner
        self.own, self.numel = parameter.shape, parameter.numel()
        self.is_owner = mesh.get_local_rank() == owner
        self.is_shared = self.is_empty = not self.is_owner

    def pairs(self, flat: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The place of a plain tensor in ``flat``, beside it."""
        yield flat.view(self.own), tensor.detach()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()

    def spread(self, gradient: torch.Tensor) -> DTensor:
        """The owner's gradient, and the others' zeros, as the whole."""
        with torch.no_grad():
            return DTensor.from_local(gradient, self._mesh, [Partial()], run_check=False)

    def take(self, entry: dict[Any, Any]) -> None:
        """Keep the plain optimizer's entry on the owner. On other ranks an empty entry says that there is state
        elsewhere."""
        if not self.is_owner:
            entry.clear()

    def give(self, entry: Mapping[Any, Any] | None) -> dict[Any, Any] | None:
        """The plain optimizer's entry, which the owner alone knows: some optimizers keep none. All ranks must call
        this, also those that have no entry."""
        return broadcast_entries(entry, self._mesh.get_group(), self.owner)


ZeroShard = RowShard | OwnedParameter


class StateShards:
    """Divides parameters among ranks, sends the gradients of each part to the rank that steps it, and the stepped parts
    to all.

    gloo has no reduce-scatter of its own (torch 2.13 makes one of whole all-reduces), nor a gather into one tensor:
    there each rank gets its rows from all others, and adds them up in the order of ranks.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup = ddp.process_group
        try:
            self.mesh = DeviceMesh.from_group(self.group, ddp.device_type)
        except KeyError as error:  # torch.distributed asks for the group's ranks
            raise AttachError(
                "shard_state=True is for a process group of torch.distributed (init_process_group, new_group), and "
                f"that of this DistributedDataParallel, a {type(self.group).__name__}, is not known there. Leave out "
                "shard_state"
            ) from error
        self.world_size = dist.get_world_size(self.group)
        self._rank = dist.get_rank(self.group)
        self._is_gloo = dist.get_backend(self.group) == "gloo"
        self._owned = [0] * self.world_size  # elements of the parameters that each rank updates alone

    def shard_of(self, parameter: torch.Tensor, optimizer: Optimizer) -> ZeroShard:
        """This rank's part. All ranks must ask for the same parameters in the same order."""
        if is_elementwise(optimizer):
            return RowShard(parameter, self.mesh)
        owner = self._owned.index(min(self._owned))
        self._owned[owner] += parameter.numel()
        return OwnedParameter(parameter, owner, self.mesh)

    def scatter(
        self,
        gradients: Sequence[torch.Tensor],
        parts: Sequence[ZeroShard],
        divisor: int,
        dtype: torch.dtype,
        room: torch.Tensor | None = None,
    ) -> "ScatteredGradients":
        """Send each rank its part of the mean of ``gradients`` over all ranks, computed and sent in ``dtype``.

        Args:
            room: where rows may be received: the memory of ``gradients``, if it is not needed afterwards.
        """
        scattered = ScatteredGradients(parts, room)
        for owner, members in _together(gradients, parts):
            numel = sum(part.numel for _, part in members)
            shape = (self.world_size, numel) if owner is None else (numel,)
            sent = torch.empty(shape, dtype=dtype, device=members[0][0].device)
            _copy(_places(sent, members))
            sent.mul_(1.0 / divisor)  # before the sum, as DDP's reducer does
            if owner is None:
                scattered.expect(self._scatter_rows(scattered, sent, members), sent)
            else:
                work: Any = dist.reduce(sent, self._global(owner), group=self.group, async_op=True)
                scattered.expect(work, sent)
                if owner == self._rank:
                    scattered.own.update(_own_places(sent, members))
        return scattered

    def _scatter_rows(self, scattered: "ScatteredGradients", sent: torch.Tensor, members: "_Members") -> Any:
        if self._is_gloo:
            received = scattered.to_add_up = _in_room(scattered.room, sent, sent.shape)
            scattered.own.update(_own_places(received[0], members))
            return dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        received = _in_room(scattered.room, sent, sent.shape[1:])
        scattered.own.update(_own_places(received, members))
        reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce_scatter(received, sent, group=self.group, async_op=True)

    def gather(self, parameters: Sequence[AttachedParameter], room: torch.Tensor | None = None) -> "GatheredShards":
        """Send this rank's parts of ``parameters``, which were stepped, to all others. All ranks must call this with
        the same parameters, in the same order of calls.

        Args:
            room: where rows may be received: memory that is not needed any more.

        Returns:
            The communication. Nothing is written before it is told to.
        """
        # Not ``detach()``: the step has counted as a write of the parameter already, and ``.data`` counts none.
        tensors = [attached.get().data for attached in parameters]
        parts: list[Any] = [attached.shard for attached in parameters]
        gathered = GatheredShards(self.group)
        with torch.no_grad():
            for owner, members in _together(tensors, parts):
                numel = sum(part.numel for _, part in members)
                shape = torch.Size([self.world_size, numel] if owner is None else [numel])
                received = _in_room(room if owner is None else None, members[0][0], shape)
                own = received[self._rank] if owner is None else received
                if owner in (None, self._rank):
                    places = _own_places(own, members)
                    _copy((places[part], part.of(tensor)) for tensor, part in members)
                if owner is None:
                    work, room = self._gather_rows(received, own), None
                else:
                    work = dist.broadcast(own, self._global(owner), group=self.group, async_op=True)
                arrive = [(tensor, place) for place, tensor in _places(received, members) if owner != self._rank]
                gathered.expect(work, arrive)
        return gathered

    def _gather_rows(self, received: torch.Tensor, own: torch.Tensor) -> Any:
        if self._is_gloo:
            return dist.all_gather(list(received), own, group=self.group, async_op=True)
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(received, own, group=self.group, async_op=True)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


class ScatteredGradients:
    """The communication of a bucket whose parts go to the ranks that update them: several works, in the terms of a
    communication hook's future.

    Attributes:
        room: memory in which rows are received.
        own: where the gradient of each of this rank's parts will be.
        to_add_up: one line for each rank, if these are still to be added up into the first.
    """

    def __init__(self, parts: Sequence[ZeroShard], room: torch.Tensor | None) -> None:
        self.room = room
        self.own: dict[ZeroShard, torch.Tensor] = {}
        self.to_add_up: torch.Tensor | None = None
        self._parts = parts
        self._works: list[Any] = []
        self._sent: list[torch.Tensor] = []  # alive until they have been sent

    def expect(self, work: Any, sent: torch.Tensor) -> None:
        self._works.append(work)
        self._sent.append(sent)

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self.done():  # an accelerator may not have come so far: then it still reads the memory that is sent
            self._works, self._sent = [], []

    def free_if_done(self) -> bool:
        """Free the memory that was sent, if it is not read any more. Whether that is so."""
        done = self.done()
        if done:
            with suppress(Exception):  # raised again where the gradients are waited for
                self.wait()
        return done

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[DTensor]:
        """This rank's parts of the gradients of ``parameters``, once the communication is done."""
        if self.to_add_up is not None:
            total, *others = self.to_add_up
            self.to_add_up = None
            for other in others:
                total += other
        gradients = []
        for parameter, part in zip(parameters, self._parts, strict=True):
            own = self.own.get(part)
            if own is None:  # another rank's
                own = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            gradients.append(part.spread(own))
        return gradients


class GatheredShards:
    """The communication of updated parts of parameters, from the ranks that have stepped them to all others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._expected: list[tuple[Any, Sequence[tuple[torch.Tensor, torch.Tensor]]]] = []

    def expect(self, work: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """A work, and pairs of one dtype: once the work is done, the second of each goes into the first."""
        self._expected.append((work, pairs))

    def wait(self) -> None:
        """Return when all have arrived, for the current stream. Nothing is written: one that does not arrive must not
        leave parameters with the parts of some ranks."""
        with communicating(self._group):
            for work, _ in self._expected:
                work.wait()

    @torch.no_grad()
    def write(self) -> None:
        for _, pairs in self._expected:
            if pairs:
                _copy(pairs)


# How parts lie in one flat tensor of a communication.


_Members = Sequence[tuple[torch.Tensor, Any]]  # with their parts
_Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


def _together(tensors: Sequence[torch.Tensor], parts: Sequence[ZeroShard]) -> list[tuple[int | None, _Members]]:
    """What one communication sends: for each rank those that it owns, and with ``None`` those that are divided. These
    come last: rows may be received where the others are read."""
    kinds: dict[tuple[int | None, torch.device, torch.dtype], list[tuple[torch.Tensor, Any]]] = {}
    for tensor, part in zip(tensors, parts, strict=True):
        kinds.setdefault((part.owner, tensor.device, tensor.dtype), []).append((tensor, part))
    return sorted(((kind[0], members) for kind, members in kinds.items()), key=lambda kind: kind[0] is None)


def _places(flat: torch.Tensor, members: _Members) -> _Pairs:
    """The place of each tensor in ``flat``, beside the tensor. Of what is divided ``flat`` has a line for each rank."""
    offset = 0
    for tensor, part in members:
        yield from part.pairs(flat[..., offset : offset + part.numel], tensor)
        offset += part.numel


def _own_places(line: torch.Tensor, members: _Members) -> dict[ZeroShard, torch.Tensor]:
    """The place of each part of this rank in its ``line``."""
    places, offset = dict[ZeroShard, torch.Tensor](), 0
    for _, part in members:
        places[part] = line[offset : offset + part.own.numel()].view(part.own)
        offset += part.numel
    return places


def _in_room(room: torch.Tensor | None, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Memory for a tensor of this shape, in ``room`` if it fits there; of the dtype and on the device of ``like``."""
    if room is None or room.dtype != like.dtype or room.numel() < shape.numel():
        return like.new_empty(shape)
    return room.detach()[: shape.numel()].view(shape)


def _copy(pairs: _Pairs) -> None:
    """Copy into the first of each pair. One call costs less than one each."""
    into, source = zip(*pairs, strict=True)
    torch._foreach_copy_(into, source)
