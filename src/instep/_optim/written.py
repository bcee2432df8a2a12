"""What the updates of a step write beside parameters and their own state: in groups, in ``state``, on the optimizer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

from instep._optim.calling import STEPPED_WHOLE
from instep._optim.changes import same
from instep.errors import UnsupportedOptimizerError


class SharedWrites:
    """Values that the shadows of one step have in place of the optimizer's own. All shadows must have the same; the
    values are written into the optimizer when the step is committed.

    Args:
        name: of the optimizer.

    Attributes:
        in_place: whether an update has changed an object that all shadows share.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: dict[int, dict[Any, Any]] = {}
        self._state: dict[Any, Any] | None = None
        self._attributes: dict[str, Any] | None = None
        self.in_place = False

    def __bool__(self) -> bool:
        return bool(self._state or self._attributes or any(self._groups.values()))

    def in_group(self, index: int, changed: dict[Any, Any], live: Mapping[str, Any]) -> None:
        """An update has left its copy of a group with these values ``changed``; the optimizer has the ``live`` one.

        Raises:
            UnsupportedOptimizerError: another bucket's update left other values, or an object was changed in place.
        """
        first = self._groups.get(index)
        self._groups[index] = self._agreed(f"param_groups[{index}]", first, changed, live)

    def in_state(self, changed: dict[Any, Any], live: Mapping[Any, Any]) -> None:
        """As ``in_group``, for the items of ``state`` that are no parameter's."""
        self._state = self._agreed("state", self._state, changed, live)

    def in_attributes(self, changed: dict[str, Any]) -> None:
        """As ``in_group``, for the attributes of a shadow."""
        self._attributes = self._agreed("attribute", self._attributes, changed)

    def put_into(self, optimizer: Optimizer) -> None:
        for index, values in self._groups.items():
            if values:  # else the loop may have taken the group out since
                optimizer.param_groups[index].update(values)
        optimizer.state.update(self._state or {})
        vars(optimizer).update(self._attributes or {})

    def refuse_in_place(self, what: str) -> UnsupportedOptimizerError:
        """The error to raise when an update has changed ``what`` in place."""
        self.in_place = True
        return UnsupportedOptimizerError(
            f"{self._name} changes {what} in place in every step, which bucket by bucket would happen once per bucket. "
            f"{STEPPED_WHOLE}"
        )

    def _agreed(
        self,
        where: str,
        first: dict[Any, Any] | None,
        changed: dict[Any, Any],
        live: Mapping[Any, Any] = MappingProxyType({}),
    ) -> dict[Any, Any]:
        for key, value in changed.items():
            if value is live.get(key):  # an object that the shadows share
                raise self.refuse_in_place(f"{where}[{key!r}]")
        first = changed if first is None else first
        for key in first.keys() | changed.keys():
            if key not in first or key not in changed or not same(first[key], changed[key]):
                raise UnsupportedOptimizerError(
                    f"{self._name} cannot be stepped bucket by bucket: its update of {where} {key!r} depends on which "
                    f"parameters step together, so the result would differ from the plain loop. {STEPPED_WHOLE}"
                )
        return first
