"""The gradient that is left in ``.grad`` after its update was applied inside backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from instep.errors import InstepError

CONVERSION = "_to_copy"
"""What ``model.to()`` does to each gradient. It needs no values, only the new dtype and device."""

Explain = Callable[[str], InstepError | None]


class SpentGradient(torch.Tensor):
    """A tensor of the gradient's shape, dtype and device without storage: any use of its values raises.

    It stays until ``zero_grad()``. ``None`` in its place would be silently wrong: ``clip_grad_norm_`` would return 0,
    a second backward would accumulate into nothing, and so would the next step's in a loop that never clears its
    gradients.

    Args:
        like: the parameter whose gradient it stands for, or another spent gradient.
        name: of the parameter, for its ``repr``.
        explain: makes the error to raise from the name of the operation that was tried; ``None`` lets a
            conversion pass.
    """

    _of: str
    _explain: Explain

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        name: str,
        explain: Explain,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> "SpentGradient":
        spent: SpentGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device
        )
        spent._of = name
        spent._explain = explain
        return spent

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"SpentGradient(of {self._of!r}: applied during backward, and freed)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """These reach for the storage, or put another one in its place, without passing through the dispatcher."""
        moved = func == _SET_DATA and isinstance(args[1], SpentGradient)  # model.to() does so
        if func in _ON_STORAGE and not moved:
            spent = _find(args)
            assert spent is not None
            error = spent._explain(getattr(func, "__name__", str(func)))
            assert error is not None
            raise error
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub types the disabled default
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        spent = _find([*args, *kwargs.values()])
        assert spent is not None
        error = spent._explain(func.overloadpacket.__name__)
        if error is not None:
            raise error
        return SpentGradient(spent, spent._of, spent._explain, kwargs.get("dtype"), kwargs.get("device"))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ON_STORAGE = (
    _SET_DATA,
    torch.Tensor.share_memory_,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
)


def _find(values: Sequence[Any]) -> SpentGradient | None:
    for value in values:
        if isinstance(value, SpentGradient):
            return value
        if isinstance(value, (list, tuple)) and (found := _find(value)) is not None:
            return found
    return None
