"""Which parameters step together, and in what order: values to print, compare and test."""

from collections import Counter
from collections.abc import Iterable
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
        unproven: of each optimizer that may not be one that updates each parameter by itself, what could not be tried.
    """

    buckets: tuple[Bucket, ...]
    unproven: tuple[str, ...] = ()

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
        return "\n".join([*(line.rstrip() for line in lines), *self.unproven])


def _span(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"


def fill_buckets(source: str, parameters: Iterable[ParameterSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut ``parameters`` into buckets, in the order given.

    A bucket is closed by the parameter that brings it to ``bucket_bytes`` or more, so none is split. Parameters
    of different devices never share one: each device steps on a stream of its own. Those of one group always do.
    """
    done: list[list[ParameterSpec]] = []
    filling: dict[tuple[torch.device, int | None], list[ParameterSpec]] = {}
    held: Counter[tuple[torch.device, int | None]] = Counter()
    for parameter in parameters:
        kind = parameter.device, parameter.group
        bucket = filling.get(kind)
        if bucket is None:
            bucket = filling[kind] = []
            done.append(bucket)
        bucket.append(parameter)
        held[kind] += parameter.nbytes
        if parameter.group is None and held[kind] >= bucket_bytes:
            del filling[kind], held[kind]
    return tuple(Bucket(source, tuple(bucket)) for bucket in done)
