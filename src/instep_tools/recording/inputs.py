"""What forwards are given, in words."""

import torch

from instep._torch.hooks import tensors_in


def described(inputs: object) -> set[str]:
    """Return the shapes and dtypes of the tensors in ``inputs``, and the dtype that autocast computes in."""
    device, found = "cpu", set()
    for tensor in tensors_in(inputs):
        device = tensor.device.type
        found.add(f"{tuple(tensor.shape)} {_dtype_name(tensor.dtype)}")
    if torch.is_autocast_enabled(device):
        found.add(f"autocast in {_dtype_name(torch.get_autocast_dtype(device))}")
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
