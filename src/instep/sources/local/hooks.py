"""The post-accumulate-grad hooks of a ``LocalSource``."""

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from instep._autograd.hooks import UntracedHook
from instep._optim.parameters import AttachedParameter


class GradientHooks:
    """
    Attributes:
        parameters: those with a hook, by index: a hook must not hold its parameter.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, AttachedParameter] = {}
        self._handles: list[RemovableHandle] = []

    def add(self, attached: AttachedParameter, call: Callable[[torch.Tensor], None]) -> None:
        """Have ``call`` called with the parameter whenever a backward has accumulated its gradient. For parameters
        without a hook."""
        self._handles.append(attached.get().register_post_accumulate_grad_hook(UntracedHook(call)))
        self.parameters[attached.spec.index] = attached

    def remove(self) -> None:
        """All of them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.parameters.clear()
