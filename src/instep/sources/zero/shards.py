"""Which rank has which part of a parameter under ZeRO-1, and how parts are sent.

Where the update is elementwise each rank has some rows of every parameter, divided as ``DTensor``'s ``Shard(0)``
divides them: a ``RowShard``. Otherwise (Muon, Adafactor, optimizers of others) each parameter is one rank's, all of it:
an ``OwnedParameter``. ``StateShards`` sends the gradients of each part to its rank (``ScatteredGradients``), and the
stepped parts to all (``GatheredShards``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import grad_mode
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
        size: how many rows each rank has, as long as there are enough.
        numel: how many elements these are: each rank's place in a communication has room for them.
        is_empty: whether this rank has no row.
        is_shared: whether other ranks have rows of the same parameter.
    """

    is_owner = True

    def __init__(self, parameter: torch.Tensor, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._rank = mesh.get_local_rank()
        self._ranks = mesh.size()
        self.shape = parameter.shape
        self._divided = parameter.dim() > 0
        whole = _with_rows(parameter.detach())
        self._stride = whole.stride() if self._divided else ()
        self._whole = whole.shape
        self.size = -(-whole.shape[0] // self._ranks)
        self.numel = self.size * (whole[:1].numel())
        start, stop = self.range(self._rank)
        self.is_empty = stop == start
        self.is_shared = stop - start < self._whole[0]

    def range(self, rank: int) -> tuple[int, int]:
        """The number of the first row of ``rank``, and of the first one after its rows."""
        rows = self._whole[0]
        if not self._divided:
            return 0, 1
        return min(rank * self.size, rows), min((rank + 1) * self.size, rows)

    def rows(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of ``rank`` of a plain tensor, in the same memory."""
        start, stop = self.range(rank)
        return _with_rows(tensor.detach())[start:stop]

    def pairs(self, by_rank: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All ranks' rows in ``by_rank`` (ranks, numel), each beside the same ones of a plain tensor, as views."""
        if self._divided and self._whole[0] == self._ranks * self.size:
            shape = (self._ranks, self.size, *self._whole[1:])
            yield by_rank.view(shape), tensor.detach().view(shape)
            return
        for rank, flat in enumerate(by_rank):
            rows = self.rows(tensor, rank)
            yield flat[: rows.numel()].view(rows.shape), rows

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if isinstance(tensor, DTensor):
            return tensor._local_tensor
        return self.rows(tensor, self._rank) if self._divided else tensor.detach()

    def of_state(self, value: Any) -> Any:
        return value._local_tensor if isinstance(value, DTensor) else value

    def as_state(self, value: Any) -> Any:
        start, stop = self.range(self._rank)
        if not isinstance(value, torch.Tensor) or value.shape != (stop - start, *self._whole[1:]):
            return value
        return self.spread(value)

    def spread(self, rows: torch.Tensor) -> DTensor:
        """This rank's rows as a part of the whole."""
        with torch.no_grad():
            if not self._divided:
                return DTensor.from_local(rows.view(()), self._mesh, [Replicate()], run_check=False)
            return DTensor.from_local(
                rows, self._mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self._stride
            )

    def take(self, entry: dict[Any, Any]) -> None:
        """Keep of the plain optimizer's entry what belongs to these rows."""
        for key, value in entry.items():
            if self._divided and type(value) is torch.Tensor and value.shape == self.shape:
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
        is_owner: whether that is this rank.
    """

    def __init__(self, owner: int, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.owner = owner
        self.is_owner = mesh.get_local_rank() == owner
        self.is_shared = self.is_empty = not self.is_owner

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
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
        return OwnedParameter(owner, self.mesh)

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
        device = gradients[0].device
        scattered = ScatteredGradients(parts, self._rank)
        for owner, owned in _by_owner(gradients, parts):
            sent = torch.empty(sum(g.numel() for g in owned), dtype=dtype, device=device)
            _copy(_in_line(sent, owned))
            sent.mul_(1.0 / divisor)  # before the sum, as DDP's reducer does
            work: Any = dist.reduce(sent, self._global(owner), group=self.group, async_op=True)
            scattered.expect(work, sent)
            if owner == self._rank:
                scattered.whole = sent
        rows = [(g, part) for g, part in zip(gradients, parts, strict=True) if isinstance(part, RowShard)]
        if rows:  # after the others: rows may be received where the gradients are
            sent = torch.empty(self.world_size, sum(part.numel for _, part in rows), dtype=dtype, device=device)
            _copy(_in_rows(sent, rows))
            sent.mul_(1.0 / divisor)
            received = _in_room(room, sent, sent.shape if self._is_gloo else sent.shape[1:])
            if self._is_gloo:
                work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
            else:
                reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                work = reduce_scatter(received, sent, group=self.group, async_op=True)
            scattered.expect(work, sent)
            scattered.rows = received
        return scattered

    def gather(self, parameters: Sequence[AttachedParameter], room: torch.Tensor | None = None) -> "GatheredShards":
        """Send this rank's parts of ``parameters``, which were stepped, to all others. All ranks must call this with
        the same parameters, in the same order of calls.

        Args:
            room: where rows may be received: memory that is not needed any more.

        Returns:
            The communication. Nothing is written before it is told to.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, Any]]] = {}
        for attached in parameters:
            parameter = attached.get()
            kinds.setdefault((parameter.device, parameter.dtype), []).append((parameter.detach(), attached.shard))
        gathered = GatheredShards(self.group)
        with torch.no_grad():
            for members in kinds.values():
                rows = [(tensor, part) for tensor, part in members if isinstance(part, RowShard)]
                if rows:
                    gathered.expect(*self._gather_rows(rows, room))
                    room = None
                for owner, owned in _by_owner(*zip(*members, strict=True)):
                    gathered.expect(*self._gather_whole(owner, owned))
        return gathered

    def _gather_rows(self, members: Sequence[tuple[torch.Tensor, RowShard]], room: torch.Tensor | None) -> "_Arriving":
        tensors = [tensor for tensor, _ in members]
        numel = sum(part.numel for _, part in members)
        received = _in_room(room, tensors[0], torch.Size([self.world_size, numel]))
        sent = received[self._rank]
        own, offset = [], 0
        for tensor, part in members:
            rows = part.rows(tensor, self._rank)
            own.append((sent[offset : offset + rows.numel()].view(rows.shape), rows))
            offset += part.numel
        _copy(own)
        if self._is_gloo:
            work: Any = dist.all_gather(list(received), sent, group=self.group, async_op=True)
        else:
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = gather(received, sent, group=self.group, async_op=True)

        return work, tensors, [(rows, flat) for flat, rows in _in_rows(received, members)]

    def _gather_whole(self, owner: int, tensors: Sequence[torch.Tensor]) -> "_Arriving":
        sent = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        if owner == self._rank:
            _copy(_in_line(sent, tensors))
        work: Any = dist.broadcast(sent, self._global(owner), group=self.group, async_op=True)

        return work, tensors if owner != self._rank else [], [(own, flat) for flat, own in _in_line(sent, tensors)]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


class ScatteredGradients:
    """The communication of a bucket whose parts go to the ranks that update them: several works, in the terms of a
    communication hook's future.

    Attributes:
        rows: will hold this rank's rows of all divided parameters: one line for each rank, if these are still to be
            added up.
        whole: will hold the gradients of the parameters that are this rank's own.
    """

    def __init__(self, parts: Sequence[ZeroShard], rank: int) -> None:
        self._parts = parts
        self._rank = rank
        self._works: list[Any] = []
        self._sent: list[torch.Tensor] = []  # alive until they have been sent
        self.rows: torch.Tensor | None = None
        self.whole: torch.Tensor | None = None

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
        rows = self.rows
        if rows is not None and rows.dim() == 2:  # of gloo: not added up yet
            rows, *others = rows
            for other in others:
                rows += other
            self.rows = rows
        gradients, next_row, next_whole = [], 0, 0
        for parameter, part in zip(parameters, self._parts, strict=True):
            if isinstance(part, RowShard):
                assert rows is not None
                shape = part.rows(parameter, self._rank).shape
                gradients.append(part.spread(rows[next_row : next_row + shape.numel()].view(shape)))
                next_row += part.numel
            elif self.whole is not None and part.is_owner:
                end = next_whole + parameter.numel()
                gradients.append(part.spread(self.whole[next_whole:end].view(parameter.shape)))
                next_whole = end
            else:
                gradients.append(part.spread(torch.zeros_like(parameter, memory_format=torch.contiguous_format)))
        return gradients


class GatheredShards:
    """The communication of updated parts of parameters, from the ranks that have stepped them to all others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._expected: list[_Arriving] = []

    def expect(self, work: Any, tensors: Sequence[torch.Tensor], pairs: "_Pairs") -> None:
        """A work, the tensors that it is for, and pairs: once it is done, the second of each goes into the first."""
        self._expected.append((work, tensors, pairs))

    def wait(self) -> None:
        """Return when all have arrived, for the current stream. Nothing is written: one that does not arrive must not
        leave parameters with the parts of some ranks."""
        with communicating(self._group):
            for work, *_ in self._expected:
                work.wait()

    @torch.no_grad()
    def write(self) -> None:
        for _, tensors, pairs in self._expected:
            if tensors:
                # The step has counted as a write of the parameter already.
                with _uncounted(tensors):
                    _copy(pairs)


# How parts lie in one flat tensor of a communication.


_Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
_Arriving = tuple[Any, Sequence[torch.Tensor], _Pairs]


def _in_rows(by_rank: torch.Tensor, members: Iterable[tuple[torch.Tensor, RowShard]]) -> _Pairs:
    """The rows of every rank in ``by_rank`` (ranks, numel), each beside the same ones of their tensor."""
    offset = 0
    for tensor, part in members:
        yield from part.pairs(by_rank[:, offset : offset + part.numel], tensor)
        offset += part.numel


def _in_line(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> _Pairs:
    """Each tensor's place in ``flat``, beside the tensor."""
    offset = 0
    for tensor in tensors:
        yield flat[offset : offset + tensor.numel()].view(tensor.shape), tensor.detach()
        offset += tensor.numel()


def _by_owner(tensors: Sequence[torch.Tensor], parts: Sequence[ZeroShard]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """The tensors that one rank updates, for each such rank in order."""
    by_owner: dict[int, list[torch.Tensor]] = {}
    for tensor, part in zip(tensors, parts, strict=True):
        if isinstance(part, OwnedParameter):
            by_owner.setdefault(part.owner, []).append(tensor)
    yield from sorted(by_owner.items())


def _in_room(room: torch.Tensor | None, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Memory for a tensor of this shape, in ``room`` if it fits there; of the dtype and on the device of ``like``."""
    if room is None or room.dtype != like.dtype or room.numel() < shape.numel():
        return like.new_empty(shape)
    return room.detach()[: shape.numel()].view(shape)


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A view with a first dimension: of a tensor without dimensions, one row."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _copy(pairs: _Pairs) -> None:
    """Copy into the first of each pair. One call costs less than one each."""
    into, source = zip(*pairs, strict=True)
    torch._foreach_copy_(into, source)


def _uncounted(tensors: Iterable[torch.Tensor]) -> ExitStack:
    """Inside of this context autograd does not count writes to ``tensors``. They are given one by one: torch 2.6 takes
    one tensor in a call."""
    stack = ExitStack()
    for tensor in tensors:
        stack.enter_context(grad_mode._unsafe_preserve_version_counter(tensor))
    return stack
