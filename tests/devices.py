"""On which device the tests of this process run."""

import ctypes

import pytest
import torch

from tests.accelerator import ACCELERATOR


def here() -> torch.device:
    """The accelerator that this session is about; of another session, the CPU, whatever the machine has."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != ACCELERATOR:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def default_device() -> torch.device:
    """Torch's own. In torch 2.6 ``get_default_device()`` does not know of ``torch.device`` as a context."""
    return torch.empty(0).device


def let_go() -> None:
    """After a backward that raised: an accelerator's thread of the engine lets go of it when the error has surfaced,
    and before that thread runs anything of another backward."""
    if here().type != "cpu":
        torch.ones((), device=here(), requires_grad=True).backward()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The values of a contiguous tensor. Of one on the emulated accelerator, which nobody hears of.

    NumPy gets a copy: a parameter whose own memory NumPy has had is stepped at once from then on, and not put off."""
    if tensor.device.type == "emu":
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).cpu().numpy().tobytes()


on_cpu_only = pytest.mark.skipif(here().type != "cpu", reason="of tensors in the host's memory")
in_dlpack = pytest.mark.skipif(here().type == "emu", reason="the emulated device has no number in DLPack")
sparse_collectives = pytest.mark.skipif(here().type != "cpu", reason="neither NCCL nor the emulated device has them")
of_torch_unordered = pytest.mark.skipif(
    here().type == "emu", reason="torch's own casts for a module that is not used are waited for by nobody"
)
