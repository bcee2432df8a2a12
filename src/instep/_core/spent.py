"""The gradient that is left in ``.grad`` after its update was applied inside backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from instep._core.engine import graph_task
from instep.errors import AccumulationError, InstepError, SpentGradientError


class SpentGradient(torch.Tensor):
    """A tensor of the gradient's shape, dtype and device without storage: any use of its values raises.

    ``None`` in its place would let ``clip_grad_norm_`` return 0 and a second backward accumulate into nothing.
    """

    _of: str
    _on_misuse: Callable[[InstepError], None]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str, on_misuse: Callable[[InstepError], None]) -> "SpentGradient":
        spent: SpentGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        spent._of = name
        spent._on_misuse = on_misuse
        return spent

    def __init__(self, parameter: torch.Tensor, name: str, on_misuse: Callable[[InstepError], None]) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"SpentGradient(of {self._of!r}: applied during backward, and freed)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub types the disabled default
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        spent = _find([*args, *(kwargs or {}).values()])
        assert spent is not None
        operation = func.overloadpacket.__name__
        error: InstepError
        if graph_task() is not None:
            error = AccumulationError(
                f"the gradient of {spent._of!r} arrived again before optimizer.step(), but this step has already "
                "applied it. Wrap all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync(); "
                "losses that share a graph: add them and call backward() once). A parameter that reentrant "
                "checkpointing visits twice needs use_reentrant=False"
            )
            spent._on_misuse(error)
        elif "unscale" in operation:
            error = SpentGradientError(
                f"GradScaler found the gradient of {spent._of!r} already applied, still scaled: this step's "
                "weights are wrong. A loss scale cannot be undone once backward has stepped; train in bfloat16 "
                "without a scaler, or detach() before using GradScaler"
            )
            spent._on_misuse(error)
        else:
            error = SpentGradientError(
                f"{operation} was called on the gradient of {spent._of!r}, which was applied during backward and "
                "freed. Between backward() and optimizer.step() there is nothing left to read, clip or change: "
                "detach() to use plain steps, or move the operation into a gradient hook"
            )
        raise error


def _find(values: Sequence[Any]) -> SpentGradient | None:
    for value in values:
        if isinstance(value, SpentGradient):
            return value
        if isinstance(value, (list, tuple)) and (found := _find(value)) is not None:
            return found
    return None
