"""What ranks tell one another while they save or load: bytes, in tensors. Nothing that travels is unpickled."""

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
        """Have every rank do its ``work``, and tell the others what it returns. All ranks must call this.

        Raises:
            DamagedCheckpointError: on every rank, if one raised it.
            CheckpointError: on every rank, if the work failed on one. Where it did, its own error is raised instead if
                it is not one of the operating system.
        """
        error: Exception | None = None
        try:
            told = _DONE + work()
        except Exception as caught:
            error = caught
            kind = _DAMAGED if isinstance(error, DamagedCheckpointError) else _FAILED
            told = kind + _described(error).encode("utf-8", "backslashreplace")
        try:
            everyone = self.exchange(told)
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

    def exchange(self, mine: bytes) -> list[bytes]:
        """What every rank gave, in rank order. All ranks must call this."""
        if self.size == 1:
            return [mine]
        by_host = dist.get_backend() in ("gloo", "mpi")
        device = None if by_host else torch.accelerator.current_accelerator()
        length = torch.tensor([len(mine)], dtype=torch.int64, device=device)
        gathered = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(gathered, length)
        lengths = [int(one) for one in gathered]
        sent = torch.frombuffer(bytearray(mine.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(device)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        return [one[:size].cpu().numpy().tobytes() for one, size in zip(received, lengths, strict=True)]


def _described(error: Exception) -> str:
    text = str(error) if isinstance(error, (InstepError, OSError)) else f"{type(error).__name__}: {error}"
    return text[:_LONGEST_ERROR]
