"""What a test asks of torch that some versions have not got."""

from collections.abc import Iterable
from importlib.util import find_spec

import pytest
import torch
from torch._dynamo import callback
from torch.torch_version import TorchVersion

# Since torch 2.7 or so.
_FSDP2_ON_CPU = torch.cuda.is_available() or hasattr(torch.cpu.Stream, "record_event")
_GLOO_SENDS_COMPLEX = TorchVersion(torch.__version__) >= "2.7"
_COUNTS_ON_DEFAULT_DEVICE = TorchVersion(torch.__version__) < "2.13"
_TELLS_OF_BACKWARD = hasattr(callback, "CallbackTrigger")
_ACCELERATORS_ARE_NEW = TorchVersion(torch.__version__) < "2.7"
_LOADS_PARTIAL_STATE = TorchVersion(torch.__version__) >= "2.7"
_TRITON_WITHOUT_GPU = find_spec("triton") is not None and not torch.cuda.is_available()

# All of it but for cases of FSDP1.
_OF_FSDP2 = (
    "test_fsdp2.py",
    "test_meshes.py",
    "test_fsdp_errors.py",
    "test_sharded_corners.py",
    "test_sharded_checkpoints.py",
    "test_fsdp_interrupts.py",
    "sharded_model",
    "readers_of_shards",
    "in_any_wrapper",
    "of_four_ranks",
    "of_eight_ranks",
    "differ_on_a_mesh",
    "test_neighbours",
    "test_shards_of_two",
    "training_of_shards",
)
# On an accelerator that is not CUDA.
_BESIDE_CUDA = ("test_two_devices", "test_divided_state", "test_fsdp_has_no_more", "test_replicated_has_a_few")
# What is said of gradients that compiled code hands over; other tests of that code find none, and run.
_HANDED_OVER = (
    "test_a_model_that_was_compiled_before",
    "test_groups_that_are_handed_over_are_buckets",
    "test_compiled_whole.py::test_gradients_are_freed_in_backward",
    "test_a_pass_of_the_users_own",
    "test_compiled_code_is_kept_apart",
    "test_nothing_is_asked_of_the_compiler",
    "test_the_compiler_has_the_names",
)
_COMPLEX = ("complex", "Rotations")
_ON_ONE_DEVICE = ("tests/parity/", "tests/checkpoint/", "on_one_device")


def from_torch(nodeid: str) -> str | None:
    """Why a test cannot run with this torch; by its name, or that of its file or case."""
    if not _FSDP2_ON_CPU and _names(nodeid, ("fsdp2", *_OF_FSDP2)) and "fsdp1" not in nodeid:
        return "this torch's fully_shard records events, of which its CPU has none"
    if not _GLOO_SENDS_COMPLEX and _names(nodeid, _COMPLEX) and not _names(nodeid, _ON_ONE_DEVICE):
        return "this torch's gloo does not send complex parameters"
    if _ACCELERATORS_ARE_NEW and _names(nodeid, _BESIDE_CUDA):
        return "this torch's collectives record streams, and its optimizers make state on the default device"
    if _COUNTS_ON_DEFAULT_DEVICE and _names(nodeid, ("test_two_devices",)):
        return "this torch's optimizers count steps on the default device, and take no parameters of another"
    if not _LOADS_PARTIAL_STATE and _names(nodeid, ("mends_an_update_that_failed", "pytorch_optimizer.Lion-DCP")):
        return "this torch's set_state_dict raises KeyError where some parameters have state, and others have none"
    if not _TELLS_OF_BACKWARD and _names(nodeid, _HANDED_OVER):
        return "this torch does not tell when it compiles a backward, so that no gradient is handed over"
    if not _TELLS_OF_BACKWARD and _names(nodeid, ("test_compiled_autograd_is_an_error",)):
        return "this torch's compiled autograd refuses callbacks, with an error of its own"
    if _TRITON_WITHOUT_GPU and _names(nodeid, ("StableAdamW",)):
        return "optimi's StableAdamW asks the triton that came with this torch for a GPU"
    return None


def _names(nodeid: str, words: Iterable[str]) -> bool:
    return any(word in nodeid for word in words)


def skip(items: list[pytest.Item]) -> None:
    for item in items:
        reason = from_torch(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
