"""The settings and switches with which a step is updated bucket by bucket: they are those of ``optimizer.step()``."""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import STEPPED_WHOLE, beside_parameters, read_by_update, shared_by_updates
from instep._optim.values import PER_PARAMETER, Snapshot, is_immutable, private, same
from instep.errors import HyperparameterChangedError, UnsupportedOptimizerError

# Switches of torch, for the whole process, that an update may read: it needs those of ``optimizer.step()``.


DEFAULT_DTYPE = "torch.get_default_dtype()"
MKLDNN = "torch.backends.mkldnn.enabled"


def switches() -> dict[str, Any]:
    """As they are now, by what tells them. Not among them: whether algorithms are deterministic. A loop may have a
    backward that is not, and no optimizer is known to use such an algorithm."""
    return {
        DEFAULT_DTYPE: torch.get_default_dtype(),
        MKLDNN: torch.backends.mkldnn.enabled,
        "torch.get_float32_matmul_precision()": _precision_of_products(),
    }


def switched(then: dict[str, Any], *, but: Container[str] = ()) -> str | None:
    """The first that is not as it was, in words.

    Args:
        but: those that do not count.
    """
    for name, now in switches().items():
        if now != then[name] and name not in but:
            return f"{name} was {then[name]} and is {now}"
    return None


@contextmanager
def as_then(then: dict[str, Any]) -> Iterator[None]:
    """The default dtype and mkldnn as they were. Only while nobody else can ask for them: they are the whole
    process's."""
    before = switches()
    _set(then, before)
    try:
        yield
    finally:
        _set(before, then)


@contextmanager
def in_threads(count: int) -> Iterator[None]:
    """With so many of torch's threads on a CPU. Each thread of Python has a number of its own: some kernels divide a
    sum by that number, and each pool of threads wants the cores."""
    before = torch.get_num_threads()  # in a new thread this also makes torch limit the libraries below it
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    if wanted[DEFAULT_DTYPE] != found[DEFAULT_DTYPE]:
        torch.set_default_dtype(wanted[DEFAULT_DTYPE])
    if wanted[MKLDNN] != found[MKLDNN]:
        torch.backends.mkldnn.enabled = wanted[MKLDNN]


def _precision_of_products() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # some were set by the newer names, of which there is one for each backend
        return None


# Settings that ``optimizer.step()`` may write, to be restored when the step turns out to be left out.


def remember_settings(optimizer: Optimizer) -> Callable[[], None]:
    """Copy the values that ``step()`` may write outside of parameters and their own state.

    Returns:
        A function that restores them: in the groups, in ``state`` and on the optimizer itself.
    """
    places: list[tuple[Any, dict[Any, Any]]] = [
        (group, {key: private(value) for key, value in group.items() if key not in PER_PARAMETER})
        for group in optimizer.param_groups
    ]
    places.append((optimizer.state, {key: private(v) for key, v in beside_parameters(optimizer.state).items()}))
    places.append((vars(optimizer), {key: private(value) for key, value in _attributes(optimizer).items()}))
    known = [set(place) for place, _ in places]

    def restore() -> None:
        for (place, before), names in zip(places, known, strict=True):
            for key in place.keys() - names:
                if place is not vars(optimizer) or _may_be_setting(key):
                    del place[key]
            for key, value in before.items():
                _restore(place, key, value)

    return restore


def _restore(place: dict[Any, Any], key: Any, value: Any) -> None:
    """A tensor is written into, as far as it fits: others may refer to it."""
    now = place.get(key)
    if not _holds(now, value):
        place[key] = value
    elif not same(now, value):
        place[key].detach().copy_(value)


def _holds(now: Any, value: Any) -> bool:
    """Whether ``now`` is a tensor into which ``value`` can be written."""
    tensors = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
    return tensors and now.shape == value.shape and now.dtype == value.dtype


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers and tensors that a loop may set on an optimizer beside its groups."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if _may_be_setting(name) and (isinstance(value, torch.Tensor) or is_immutable(value))
    }


def _may_be_setting(name: str) -> bool:
    # The underscore is torch's own; the two names are GradScaler's, for the duration of a fused step.
    return not name.startswith("_") and name not in ("grad_scale", "found_inf")


# What the updates of a step write beside parameters and their own state: in groups, in ``state``, on the optimizer.


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


# The settings with which the buckets of a step were updated, to be found unchanged by ``optimizer.step()``.


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
