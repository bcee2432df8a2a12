"""What ``instep env`` prints: the versions, devices and settings that a report of a bug needs.

``report`` asks one small function for each fact. A fact that cannot be found out says why: where torch or a driver is
broken, that is what the report is about.
"""

import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from instep import __version__

PACKAGES = ("numpy", "transformers", "accelerate", "lightning", "pytorch-lightning")
# Each may change which numbers come out, or where the step runs. No other variable is printed.
VARIABLES = (
    "INSTEP_DISABLE",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "WORLD_SIZE",
)
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def report() -> str:
    """Return the lines to paste, one for each fact. This function never raises."""
    facts: dict[str, Callable[[], str]] = {
        "instep": lambda: __version__,
        "torch": _torch,
        "Python": lambda: f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform,
        "CPU": _cpu,
        "accelerators": _accelerators,
        "distributed backends": _backends,
        **{package: partial(_installed, package) for package in PACKAGES},
        "environment": _variables,
    }
    return "\n".join(f"{name + ':':<22}{_told(find)}" for name, find in facts.items())


def _told(find: Callable[[], str]) -> str:
    """Return the fact that ``find`` finds, or the first line of its error."""
    try:
        return find()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return f"unknown: {type(error).__name__}: {first}"


def _torch() -> str:
    # Each fact imports torch for itself: if the import fails, the other lines still stand.
    import torch

    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    kinds = [f"{name} {found}" for name, found in built.items() if found is not None]
    return f"{torch.__version__}, built for {' and '.join(kinds) or 'the CPU alone'}"


def _cpu() -> str:
    import torch

    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in torch"


def _accelerators() -> str:
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return "none"
    # Not every backend's module names its devices.
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    names = [f"{device.type}:{i}" for i in range(torch.accelerator.device_count())]
    return ", ".join(name if name_of is None else f"{name} {name_of(i)}" for i, name in enumerate(names))


def _backends() -> str:
    from torch import distributed

    if not distributed.is_available():
        return "none: this torch is built without torch.distributed"
    # Older versions of torch do not know every backend.
    found = [name for name in BACKENDS if getattr(distributed, f"is_{name}_available", bool)()]
    return ", ".join(found) or "none"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _variables() -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "nothing is set"
