"""What torch.compile is not to see of instep: its hooks, and what they call, where a compiled function calls them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from instep._torch.engine import untraced


def in_a_compiled_function(hook: Callable[..., Any]) -> tuple[int, int]:
    """How many graphs torch.compile makes of a function that calls ``hook``, and has a backward call it; and of how
    many frames it has tried to make one."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    weight = nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(hook)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        hook(y)
        (weight * y).sum().backward()
        return y * 3

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(step, backend=backend)(torch.ones(3))
    frames = torch._dynamo.utils.counters["frames"]["total"]
    torch._dynamo.reset()
    return len(graphs), frames


def test_as_torchs_own_way_to_say_so() -> None:
    """A frame of a hook that was traced would be a graph, or a frame, more."""

    def hook(tensor: torch.Tensor) -> None:
        assert not torch.compiler.is_compiling()
        tensor.detach() + 1

    disabled: Any = torch.compiler.disable(hook)
    in_a_compiled_function(disabled)  # the first of all imports much, some of which is traced
    assert in_a_compiled_function(untraced(hook)) == in_a_compiled_function(disabled)
    with pytest.raises(AssertionError):
        assert in_a_compiled_function(hook) == in_a_compiled_function(disabled)


def test_where_nothing_is_compiled_no_function_of_torchs_comes_between() -> None:
    called = [Path(frame.filename).name for frame in untraced(inspect.stack)()]
    assert "eval_frame.py" not in called
