"""Code written for torch's private names runs with only the import changed."""

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel

import instep
from tests import own_precision
from tests.cases import Blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.distributed.optim compiles with torch.jit, which is deprecated
    from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap
    from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks, optimizer_overlap_hooks
    from torch.distributed.optim import apply_optimizer_in_backward

PAIRS: list[tuple[str, Callable[..., Any]]] = [
    ("apply_optimizer_in_backward", apply_optimizer_in_backward._apply_optimizer_in_backward),
    ("get_in_backward_optimizers", apply_optimizer_in_backward._get_in_backward_optimizers),
    ("register_overlapped", optimizer_overlap.register_overlapped),
    ("OverlappedOptimizer", optimizer_overlap.OverlappedOptimizer),
    ("as_overlapped_optim", optimizer_overlap._as_overlapped_optim),
    ("OptimizerHookState", optimizer_overlap_hooks._OptimizerHookState),
    ("hook_then_optimizer", optimizer_overlap_hooks._hook_then_optimizer),
    ("OptimInBackwardHookState", optimizer_overlap_hooks._OptimInBackwardHookState),
    ("apply_optim_in_backward_hook", optimizer_overlap_hooks._apply_optim_in_backward_hook),
    ("AllreduceUpcastHookState", mixed_precision_hooks._AllreduceUpcastHookState),
    ("reducer_allreduce_and_upcast_hook", mixed_precision_hooks._reducer_allreduce_and_upcast_hook),
]


@pytest.mark.parametrize(("name", "theirs"), PAIRS, ids=[name for name, _ in PAIRS])
def test_the_same_call_signature(name: str, theirs: Callable[..., Any]) -> None:
    """What instep adds stands behind, and has a default."""
    expected = list(inspect.signature(theirs).parameters.values())
    ours = list(inspect.signature(getattr(instep, name)).parameters.values())
    assert [(p.name, p.kind) for p in ours[: len(expected)]] == [(p.name, p.kind) for p in expected]
    assert [p.default is p.empty for p in ours[: len(expected)]] == [p.default is p.empty for p in expected]
    assert all(p.default is not p.empty for p in ours[len(expected) :])


def test_what_instep_stands_in_for_is_still_there() -> None:
    """Where DDP looks for in-backward optimizers, and where FSDP2 replaces a parameter."""
    model = Blocks()
    instep.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    set_up = DistributedDataParallel._setup_in_backward_optimizers
    assert set_up.__module__ == "instep.functional.in_backward"
    assert "self._setup_in_backward_optimizers()" in inspect.getsource(DistributedDataParallel._lazy_init)
    init: Any = FSDPParam._init_sharded_param
    assert init.__module__ == "instep.functional.in_backward"
    source = inspect.getsource(FSDPParam.__init__)
    assert "self._init_sharded_param(" in source


def test_parameters_of_torchs_own_function_are_left_to_torch() -> None:
    """DDP asks instep first, once any parameter anywhere is instep's."""
    theirs = Blocks()
    instep.apply_optimizer_in_backward(torch.optim.SGD, Blocks().parameters(), {"lr": 0.1})
    apply_optimizer_in_backward._apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": 0.1})
    asked: list[Any] = []

    class Instance(SimpleNamespace):
        """DDP takes a weak reference to itself."""

        __hash__ = object.__hash__  # type: ignore[assignment]  # SimpleNamespace has none

    ddp: Any = Instance(
        _module_parameters=list(theirs.parameters()),
        gradient_as_bucket_view=False,
        reducer=SimpleNamespace(_set_optimizer_in_backward=lambda: None),
        register_comm_hook=lambda state, hook: asked.append(hook),
    )
    with own_precision.constructor():  # torch's hook makes a stream, too
        DistributedDataParallel._setup_in_backward_optimizers(ddp)
    assert [hook.func.__module__ for hook in asked] == [optimizer_overlap_hooks.__name__]
