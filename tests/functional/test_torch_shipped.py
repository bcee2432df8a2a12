"""The tests that torch ships for its private functions, over instep's, by two ranks on the CPU."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed.pool import RankPool
from tests.functional.shipped import (
    APPLY_IN_BACKWARD,
    AS_OVERLAPPED,
    HOOK_STATE,
    HOOK_THEN_OPTIMIZER,
    IN_BACKWARD_HOOK,
    UPCAST_HOOK,
    UPCAST_STATE,
    Case,
    Replacement,
    run_shipped,
)

PARITY = "test_ddp_hook_with_optimizer_parity"
ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}
SGD = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}

# The whole overlapped optimizer; and torch's, over instep's hook and its state.
OVERLAPPED: dict[str, tuple[Replacement, ...]] = {"": (AS_OVERLAPPED,), "_hook": (HOOK_STATE, HOOK_THEN_OPTIMIZER)}

IN_BACKWARD = [
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
]

MIXED_PRECISION = [
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
]

# Tests of DDP itself: its gradients must be the same with the hook there and nothing to step.
WITH_IDLE_HOOK = [
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_ignore_params_arg",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_uneven_input_join_disable",
    "test_different_graph_across_ranks",
    "test_invalid_static_graph",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
]

# The same, where torch's own hook fails: it does not know join(). It divides by the number of all ranks, and cannot be
# called outside of backward, as a rank that has joined calls it.
WITH_IDLE_HOOK_IN_JOIN = [
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_uneven_inputs",
]

# Tests with hooks of their own, which must do the same in hook_then_optimizer with nothing to step.
WITH_HOOK = ["test_ddp_hook_parity_allreduce", "test_ddp_hook_parity_post_localSGD", "test_ddp_hook_parity_powerSGD"]

# The same, where torch's own fails: it drops what the hook's future holds, and takes the bucket for the result.
WITH_HOOK_THAT_COPIES = [
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
]


BOTH = (True, False)


def _parity() -> Iterator[Case]:
    """Torch has the method, and its cases in a comment."""
    for (suffix, replacements), view, static, subset in itertools.product(OVERLAPPED.items(), BOTH, BOTH, BOTH):
        name = f"{PARITY}_adamw_grad_as_bucket_view_{view}_static_graph_{static}_optimize_subset_{subset}{suffix}"
        yield _parity_case(name, (view, static, torch.optim.AdamW, subset), ADAM, replacements)
    for (suffix, replacements), subset in itertools.product(OVERLAPPED.items(), [True, False]):
        for cls, keywords in ((torch.optim.Adam, ADAM), (torch.optim.SGD, SGD)):
            name = f"{PARITY}_{cls.__name__.lower()}_optimize_subset_{subset}{suffix}"
            yield _parity_case(name, (True, False, cls, subset), keywords, replacements)


def _parity_case(
    name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], replacements: tuple[Replacement, ...]
) -> Case:
    return Case(name, f"_{PARITY}", arguments, tuple(keywords.items()), replacements, exact=True)


def _cases() -> Iterator[Case]:
    for name in IN_BACKWARD:
        yield Case(name, name, replacements=(APPLY_IN_BACKWARD,), exact=True)
    yield from _parity()
    for name in MIXED_PRECISION:
        yield Case(name, name, replacements=(UPCAST_STATE, UPCAST_HOOK), ddp_streams=True, exact=True)
    name = "test_ddp_native_mixed_precision_ignored_params"  # no backward, so no call of the hook
    yield Case(name, name, replacements=(UPCAST_STATE,), exact=True)
    for name in WITH_IDLE_HOOK + WITH_IDLE_HOOK_IN_JOIN:
        yield Case(name, name, idle=IN_BACKWARD_HOOK)
    for name in WITH_HOOK + WITH_HOOK_THAT_COPIES:
        yield Case(name, name, idle=HOOK_THEN_OPTIMIZER)


# The twelve cases of the parity test a second time, over another pair of functions, and every other one of the rest.
AGAIN = f"{PARITY}_.*_hook"
CASES = [
    pytest.param(case, id=case.name, marks=pytest.mark.nightly if re.fullmatch(AGAIN, case.name) or n % 2 else ())
    for n, case in enumerate(_cases())
]
TORCHS_OWN_FAILS = {*WITH_IDLE_HOOK_IN_JOIN, *WITH_HOOK_THAT_COPIES}


@pytest.mark.parametrize("case", CASES)
def test_over_instep(two_ranks: RankPool, case: Case) -> None:
    for calls in two_ranks.run(run_shipped, case):
        assert case.must_be_called <= calls.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("case", [case for case in CASES if case.id not in TORCHS_OWN_FAILS])
def test_over_torchs_own(two_ranks: RankPool, case: Case) -> None:
    """What fails here too is the harness's fault, or torch's."""
    for calls in two_ranks.run(run_shipped, case, "torch"):
        assert case.must_be_called <= calls.keys()
