"""The rounds of a save or a load: every rank does its work, and tells the others whether it failed, and the result.

A round that failed on one rank raises on all ranks, so that none goes on alone and waits for ever. Results are bytes,
which travel in tensors: nothing that was sent is unpickled.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from instep.errors import CheckpointError, DamagedCheckpointError, InstepError

_DONE, _FAILED, _DAMAGED = b"+", b"-", b"!"
_LONGEST_ERROR = 4000


class Collective:
    """All ranks of the default process group, this one among them; without one, a single rank."""

    def __init__(self) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1

    def attempt(self, what: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's ``work``, and tell the others what it returns. All ranks must call this.

        Returns:
            The result of each rank, in rank order.

        Raises:
            DamagedCheckpointError: on every rank, if the work of one raised it.
            CheckpointError: on every rank, if the work of one failed otherwise. A rank whose own work failed raises
                its own error, unless that is an ``OSError``.
        """
        # Not BaseException: Ctrl-C ends this rank here, and the others by the timeout of the process group.
        error: Exception | None = None
        try:
            told = _DONE + work()
        except Exception as caught:
            error = caught
            kind = _DAMAGED if isinstance(error, DamagedCheckpointError) else _FAILED
            told = kind + _described(error).encode("utf-8", "backslashreplace")
        try:
            everyone = self._exchange(told)
            # Damage first: ``load`` goes on to an earlier checkpoint after it, and must do so on all ranks.
            for kind, raised in ((_DAMAGED, DamagedCheckpointError), (_FAILED, CheckpointError)):
                failed = [(rank, told) for rank, told in enumerate(everyone) if told[:1] == kind]
                if not failed:
                    continue
                if error is not None and told[:1] == kind and not isinstance(error, OSError):
                    raise error
                rank, told = failed[0]
                where = "" if self.size == 1 else f"rank {rank}: "
                raise raised(f"{what}: {where}{told[1:].decode()}") from error
            return [told[1:] for told in everyone]
        finally:
            del error  # or it would refer to itself, by way of this frame

    def _exchange(self, mine: bytes) -> list[bytes]:
        """The bytes that each rank gave, in rank order. All ranks must call this."""
        if self.size == 1:
            return [mine]
        # gloo and MPI take tensors in host memory. Another backend, or several in one group ("cpu:gloo,cuda:nccl"),
        # takes those of the accelerator.
        by_host = dist.get_backend() in ("gloo", "mpi")
        device = None if by_host else torch.accelerator.current_accelerator()
        length = torch.tensor([len(mine)], dtype=torch.int64, device=device)
        gathered = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(gathered, length)
        lengths = [int(one) for one in gathered]
        # All ranks send as many bytes as the longest has: all_gather takes tensors of one shape.
        sent = torch.frombuffer(bytearray(mine.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(device)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        return [one[:size].cpu().numpy().tobytes() for one, size in zip(received, lengths, strict=True)]


def _described(error: Exception) -> str:
    """The message for other ranks. Errors that were not written for the user's eyes have their class before it."""
    text = str(error) if isinstance(error, (InstepError, OSError)) else f"{type(error).__name__}: {error}"
    return text[:_LONGEST_ERROR]
