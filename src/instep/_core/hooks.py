"""Hooks that stay with the model they were registered on."""

from collections.abc import Callable
from typing import Any


class BoundHook:
    """A callable for torch's hook tables whose copies do nothing.

    A deep copy or an unpickled copy of a model carries its hooks along; bound to the original's state they would
    step the original from the copy's gradients.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BoundHook":
        return BoundHook(None)

    def __reduce__(self) -> tuple[type["BoundHook"], tuple[None]]:
        return BoundHook, (None,)
