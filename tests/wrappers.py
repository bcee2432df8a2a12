"""Tensors of wrapper classes, as those in which some optimizers keep quantized state."""

from typing import Any

import torch


class Scaled(torch.Tensor):
    """A wrapper as those of quantized state: it has neither ``clone`` nor ``equal``, nor ``copy_``."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, factor: float = 1.0) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, factor: float = 1.0) -> None:
        self.codes, self.scale, self.factor = codes, scale, factor

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["codes", "scale"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: float, *size: Any) -> "Scaled":
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Closed(Scaled):
    """A wrapper that does not tell what it holds."""

    __tensor_flatten__ = None  # type: ignore[assignment]
