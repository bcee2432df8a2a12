"""Which parameters step together, and in what order: values to print, compare and test."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What a plan says of one parameter.

    Attributes:
        index: position among the attached parameters, in the model's order.
        name: the name in ``model.named_parameters()``, the first one for a tied parameter.
        nbytes: size of its gradient; of this rank's part, where it is spread over ranks.
        group: FSDP's number of the parameters that it is communicated with; ``None``: it has no such group.
    """

    index: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are stepped in one call of the optimizer."""

    source: str
    parameters: tuple[ParameterSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)


@dataclass(frozen=True, slots=True)
class Plan:
    """The buckets, in the order in which backward is expected to complete them.

    Attributes:
        judged: of optimizers that are not torch's own, how many steps are still compared with their parts, or why every
            step is left to ``optimizer.step()``; of compiled code, why it keeps gradients until its backward ends.
    """

    buckets: tuple[Bucket, ...]
    judged: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buckets)

    def __str__(self) -> str:
        rows = [("bucket", "source", "parameters", "MiB", "names")]
        for number, bucket in enumerate(self.buckets):
            rows.append(
                (
                    str(number),
                    bucket.source,
                    str(len(bucket.parameters)),
                    f"{bucket.nbytes / MIB:.2f}",
                    _span([p.name for p in bucket.parameters]),
                )
            )
        total = sum(len(b.parameters) for b in self.buckets)
        rows.append(("total", "", str(total), f"{self.nbytes / MIB:.2f}", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        aligned = (str.ljust, str.ljust, str.rjust, str.rjust, str.ljust)
        lines = (
            "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True))
            for row in rows
        )
        return "\n".join([*(line.rstrip() for line in lines), *self.judged])


def _span(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"


_LARGEST, _SMALLEST, _SHARE = 16 * MIB, 48 * 1024, 20
_ENOUGH = 0.4
"""Of a bucket's size, where ``attach`` is not told it. Between two large matrices there are often a few small tensors,
such as biases, which would be buckets of their own: from a quarter to half of all buckets. ``benchmarks/
default_bucket.py`` saves as much memory with them in the bucket of the next matrix, or more."""


def bucket_bytes_for(parameters: Iterable[ParameterSpec]) -> int:
    """The bytes of a bucket, where ``attach`` is not told: a twentieth of all gradients, and on a CPU 16 MiB at most.

    What a bucket holds is not freed before it is full, so that a twentieth of what can be saved is not; smaller ones
    would save hardly more, and each costs the host its time: on a CPU little beside the update of 16 MiB. An
    accelerator updates those in some microseconds, while the host takes hundreds for any bucket, and then the device
    waits for the host. See ``benchmarks/default_bucket.py``, and ``benchmarks/results`` for a GPU.
    """
    total, on_cpu = 0, True
    for spec in parameters:
        total += spec.nbytes
        on_cpu = on_cpu and spec.device.type in ("cpu", "meta")
    share = total // _SHARE
    return max(_SMALLEST, min(_LARGEST, share) if on_cpu else share)


def default_buckets(source: str, parameters: Sequence[ParameterSpec]) -> tuple[Bucket, ...]:
    """``parameters`` in buckets, where ``attach`` is not told their size."""
    size = bucket_bytes_for(parameters)
    return fill_buckets(source, parameters, size, enough=int(size * _ENOUGH))


def fill_buckets(
    source: str, parameters: Iterable[ParameterSpec], bucket_bytes: int, *, enough: int = 0
) -> tuple[Bucket, ...]:
    """Cut ``parameters`` into buckets, in the order given.

    None holds more than ``bucket_bytes``, but that of a single parameter, which is never split; and one that holds less
    than ``enough`` takes the next parameter whatever its size. Parameters of different devices never share one: each
    device steps on a stream of its own. Those of one group always do.
    """
    done: list[list[ParameterSpec]] = []
    filling: dict[tuple[torch.device, int | None], list[ParameterSpec]] = {}
    held: Counter[tuple[torch.device, int | None]] = Counter()
    for parameter in parameters:
        kind = parameter.device, parameter.group
        bucket = filling.get(kind)
        is_full = parameter.group is None and held[kind] >= enough and held[kind] + parameter.nbytes > bucket_bytes
        if bucket is None or is_full:
            held[kind] = 0
            bucket = filling[kind] = []
            done.append(bucket)
        bucket.append(parameter)
        held[kind] += parameter.nbytes
        if parameter.group is None and held[kind] >= bucket_bytes:
            del filling[kind], held[kind]
    return tuple(Bucket(source, tuple(bucket)) for bucket in done)
