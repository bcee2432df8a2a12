"""What tests look at inside of an attachment: one place knows where it is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

import instep


def schedule_of(overlap: instep.Attachment) -> Any:
    """The schedule, with its step."""
    return overlap._parts.schedule


def source_of(overlap: instep.Attachment) -> Any:
    """The one source of gradients."""
    (source,) = overlap._parts.sources
    return source


def trial_of(overlap: instep.Attachment) -> Any:
    """What decides whether steps are put off, or updates run beside backward."""
    schedule = schedule_of(overlap)
    return schedule._beside._deferring if hasattr(schedule, "_beside") else schedule._deferring


def before_forward(overlap: instep.Attachment) -> None:
    """What instep does before the model's forward, and nothing of what others do there."""
    model = overlap._parts.refs.model()
    assert model is not None
    overlap._parts.hooks.before_forward(model, ())


@contextmanager
def before_updates(look: Callable[[list[torch.Tensor]], None], of: str = "sgd") -> Iterator[None]:
    """``look`` is given the parameters of each update of torch's own SGD, or Adam, that is not fused, before it runs:
    wherever it runs. It may raise."""
    with _around_updates(look, lambda parameters: None, of):
        yield


@contextmanager
def after_updates(look: Callable[[list[torch.Tensor]], None], of: str = "sgd") -> Iterator[None]:
    """The same, when it has written."""
    with _around_updates(lambda parameters: None, look, of):
        yield


@contextmanager
def _around_updates(
    before: Callable[[list[torch.Tensor]], None], after: Callable[[list[torch.Tensor]], None], of: str
) -> Iterator[None]:
    module = sys.modules[f"torch.optim.{of}"]
    update = getattr(module, of)

    @wraps(update)
    def told(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if parameters:
            before(parameters)
        update(parameters, *args, **kwargs)
        if parameters:
            after(parameters)

    with patch.object(module, of, told):
        yield
