"""Switches of torch, for the whole process, that an update may read: it needs those of ``optimizer.step()``."""

from typing import Any

import torch

_MKLDNN = "torch.backends.mkldnn.enabled"


def switches() -> dict[str, Any]:
    """As they are now, by what tells them. Not among them: whether algorithms are deterministic. A loop may have a
    backward that is not, and no optimizer is known to use such an algorithm."""
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        _MKLDNN: torch.backends.mkldnn.enabled,
        "torch.get_float32_matmul_precision()": _precision_of_products(),
    }


def switched(then: dict[str, Any], *, in_export: bool = False) -> str | None:
    """The first that is not as it was, in words.

    Args:
        in_export: torch.export may be what waits: it switches mkldnn off meanwhile.
    """
    for name, now in switches().items():
        if now != then[name] and not (in_export and name == _MKLDNN):
            return f"{name} was {then[name]} and is {now}"
    return None


def _precision_of_products() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # some were set by the newer names, of which there is one for each backend
        return None
