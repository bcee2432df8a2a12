"""Gradients that are lent to an update on trial: some optimizers write or replace the gradient in their ``step()``."""

import torch

from instep._optim.changes import same_bits


class Lent:
    """A copy that stands in a parameter's ``.grad`` while it is updated, and what the update makes of it."""

    __slots__ = ("_given", "_like", "_parameter", "_version")

    def __init__(self, parameter: torch.Tensor, like: torch.Tensor) -> None:
        self._parameter = parameter
        self._like = like
        self._given = parameter.grad = like.detach().clone()
        self._version = self._given._version

    @property
    def given(self) -> torch.Tensor:
        return self._given

    def outcome(self) -> "Outcome | None":
        """``None``: the update left it as it was."""
        now = self._parameter.grad
        written = self._given._version != self._version or not _is_known_equal(self._given, self._like)
        if now is self._given and not written:
            return None
        return Outcome(self._given if written else None, now is not self._given, now)


class Outcome:
    """What an update made of its gradient: what it wrote into it, and what it put in its place."""

    __slots__ = ("_now", "_replaced", "_values")

    def __init__(self, values: torch.Tensor | None, replaced: bool, now: torch.Tensor | None) -> None:
        self._values = values
        self._replaced = replaced
        self._now = now

    @torch.no_grad()
    def of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What the plain loop has in ``.grad`` after the step, given its ``gradient`` of before. May be asked twice."""
        if self._values is not None:
            gradient.copy_(self._values)
        return self._now if self._replaced else gradient


def _is_known_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether nothing was written through ``.data``. On an accelerator the host would have to wait for the answer."""
    plain = type(a) is torch.Tensor and a.layout is torch.strided and a.device.type == "cpu"
    return plain and same_bits(a, b)
