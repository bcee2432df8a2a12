"""The settings with which the buckets of a step were updated, to be found unchanged by ``optimizer.step()``."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.attributes import read_by_update, shared_by_updates
from instep._optim.changes import Snapshot
from instep._optim.switches import switched, switches
from instep.errors import HyperparameterChangedError

Look = tuple[str, Snapshot, Mapping[Any, Any]]
"""Where settings are, in words; what they were; and what they are."""


class UsedSettings:
    """The settings of one optimizer as the updates of the running step found them: groups, attributes, what ``state``
    holds beside parameters, and torch's switches.

    Args:
        name: of the optimizer.
        read: its attributes that an update may read.
        shared: what its ``state`` holds beside parameters.
    """

    def __init__(self, name: str, read: Mapping[str, Any], shared: Mapping[Any, Any]) -> None:
        self._name = name
        self._switches = switches()
        self._groups: dict[int, Snapshot] = {}
        self._attributes = Snapshot(read)
        self.shared = Snapshot(shared)

    def use(self, index: int, group: Mapping[str, Any], *, for_members: bool) -> Snapshot | None:
        """A bucket is about to be stepped with ``group``. The settings, which all buckets must find alike; ``None``:
        no bucket has had members in this group.

        Raises:
            HyperparameterChangedError: an earlier bucket found other ones.
        """
        used = self._groups.get(index)
        if used is not None:
            self._require_same(f"param_groups[{index}]", used, group)
        elif for_members:
            used = self._groups[index] = Snapshot(group)
        return used

    def looks_at(self, optimizer: Optimizer) -> list[Look]:
        """Everything to compare in ``optimizer.step()``, torch's switches aside."""
        return [
            *((f"param_groups[{index}]", used, optimizer.param_groups[index]) for index, used in self._groups.items()),
            ("attribute ", self._attributes, read_by_update(optimizer)),
            ("state", self.shared, shared_by_updates(optimizer)),
        ]

    def require_same(self, looks: list[Look]) -> None:
        for where, before, now in looks:
            self._require_same(where, before, now)

    def require_same_switches(self) -> None:
        if (difference := switched(self._switches)) is not None:
            raise HyperparameterChangedError(
                f"{difference}, in {self._name}.step(), after backward had already stepped parameters under what it "
                "was. Call backward() and optimizer.step() under the same, or use undo=True or schedule='forward'"
            )

    def _require_same(self, where: str, before: Snapshot, now: Mapping[str, Any]) -> None:
        difference = before.difference(now)
        if difference is not None:
            raise HyperparameterChangedError(
                f"{where}{difference} in {self._name} after backward had already stepped parameters with what it was. "
                "Change hyper-parameters (and call the scheduler) after optimizer.step() or before backward(), not in "
                "between"
            )


class WrittenOnDevice:
    """Writes of small tensors on an accelerator, of which the host would have to wait to know: compared there in one
    step, and read in the next."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._flags: list[tuple[str, torch.Tensor]] = []

    def require_none(self, looks: list[Look]) -> None:
        """Compare on the device, and raise ``HyperparameterChangedError`` for what was found in the step before."""
        flags, self._flags = self._flags, []
        self._flags = list(_flags(looks))
        told = torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist() if flags else []
        for (name, _), written in zip(flags, told, strict=True):
            if written:
                raise HyperparameterChangedError(
                    f"{name} in {self._name} was written, in the step before, after backward had already stepped "
                    "parameters with what it was. Change hyper-parameters after optimizer.step() or before backward()"
                )


def _flags(looks: list[Look]) -> Iterator[tuple[str, torch.Tensor]]:
    for where, before, now in looks:
        for key, flag in before.flags(now):
            yield f"{where}[{key!r}]", flag
