"""When iterations, forwards and backwards of a model begin and end, by its hooks."""

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from instep._autograd.backward import Backward, Phase, current
from instep._autograd.outputs import nodes_of, tensors_in


class EndOfBackward(NamedTuple):
    """Attributes:
    nodes: when the last node of the graph had run.
    returned: when backward returned: what waits for communication waits between the two.
    """

    nodes: float
    returned: float
    thread: int


class Clock:
    """Watches a model until ``stop``. All times are ``perf_counter`` seconds.

    Args:
        forward_begins: called when an outermost forward is about to begin.

    Attributes:
        forwards: when each began and ended, and on which thread.
        given: shapes and dtypes of the tensors that forwards were given, and what autocast computes in: each once.
    """

    def __init__(self, model: nn.Module, forward_begins: Callable[[], None]) -> None:
        self.forwards: list[tuple[float, float, int]] = []
        self.backwards: list[EndOfBackward] = []
        self._forward_begins = forward_begins
        self._depth = 0
        self._began = 0.0
        self._backward: Backward | None = None  # the last one that was seen
        self.given: set[str] = set()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        if self._depth == 0:
            self._forward_begins()
            self._note((args, kwargs))
            self._began = perf_counter()
        self._depth += 1

    def _after_forward(self, module: nn.Module, inputs: object, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self.forwards.append((self._began, perf_counter(), threading.get_native_id()))
        for node in nodes_of(output):
            node.register_prehook(self._backward_runs)

    def _note(self, inputs: object) -> None:
        device = "cpu"
        for tensor in tensors_in(inputs):
            device = tensor.device.type
            self.given.add(f"{tuple(tensor.shape)} {_name(tensor.dtype)}")
        if torch.is_autocast_enabled(device):
            self.given.add(f"autocast in {_name(torch.get_autocast_dtype(device))}")

    def _backward_runs(self, gradients: object) -> None:
        if (backward := current()) is self._backward:
            return
        self._backward = backward
        nodes: list[float] = []
        backward.at(Phase.BEFORE_DDP, lambda: nodes.append(perf_counter()))
        backward.at(Phase.LAST, partial(self._backward_ended, nodes))

    def _backward_ended(self, nodes: list[float]) -> None:
        self.backwards.append(EndOfBackward(nodes[0], perf_counter(), threading.get_native_id()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
