"""The device "emu" in this process, and ``torch.emu``."""

import atexit
import contextlib
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from tests.accelerator.building import build

DEVICES = 2
_SECONDS_OF_ENGINE = 0.05


def load() -> None:
    """Make the device. Must be called before the first backward of the process.

    torch's autograd engine makes its threads, one for each device, at the first backward; the backward here fails if
    that one has been. With the device loaded, torch takes it for the machine's accelerator, in all that asks for one.
    """
    if hasattr(torch, "emu"):
        return
    library = build()
    # In the engine's threads, which are made below, as in the loop's: kernels that share their work out among several
    # may round otherwise.
    torch.set_num_threads(1)
    rename_privateuse1_backend("emu")
    torch.ops.load_library(str(library))
    module = _module()
    torch._register_device_module("emu", module)
    sys.modules["torch.emu"] = module
    generate_methods_for_privateuse1_backend(for_storage=True)
    _seed_with_torch(module)
    torch.random._fork_rng_warned_already = True  # of two devices, which tests take for an error
    # torch's own threads drop what a backward has left after it has returned: a process that ends meanwhile aborts.
    atexit.register(time.sleep, _SECONDS_OF_ENGINE)
    try:
        torch.ones((), device="emu", requires_grad=True).backward()
    except RuntimeError as error:
        raise RuntimeError("load() must be called before the first backward of the process") from error


def emu() -> Any:
    """``torch.emu``, of which torch's annotations do not know. Needs ``load()``."""
    return torch.get_device_module("emu")


def _seed_with_torch(module: types.ModuleType) -> None:
    """``torch.manual_seed`` seeds the device, too; without the other kinds of devices, as in tests/__init__.py."""

    def manual_seed(seed: int) -> torch.Generator:
        module.manual_seed_all(int(seed))
        return torch.default_generator.manual_seed(int(seed))

    module.manual_seed_all(torch.initial_seed())
    torch.manual_seed = manual_seed


def _index(device: Any = None) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return torch.accelerator.current_device_index() if index is None or index < 0 else int(index)


def _module() -> types.ModuleType:
    """``torch.emu``: what torch asks of a device's module, and what ``torch.cuda`` has that loops use."""
    module = types.ModuleType("torch.emu")
    for part in (_devices(), _streams(), _random_numbers(), _memory()):
        vars(module).update(part)
    return module


def _devices() -> dict[str, Any]:
    @contextlib.contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(_index(chosen))
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    return {
        "device": device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
    }


def _streams() -> dict[str, Any]:
    @contextlib.contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        with device(chosen.device):
            before = torch.accelerator.current_stream(chosen.device)
            torch.accelerator.set_stream(chosen)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    device = _devices()["device"]

    def new_stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device("emu", _index(device)), priority=priority)

    def new_event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event("emu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def default_stream(device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE)

    return {
        "Stream": new_stream,
        "Event": new_event,
        "stream": stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "default_stream": default_stream,
        "set_stream": torch.accelerator.set_stream,
    }


_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1


def _random_numbers() -> dict[str, Any]:
    generators = tuple(torch.ops.emu.default_generator(index) for index in range(DEVICES))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def seed_all() -> None:
        manual_seed_all(generators[0].seed())

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generators[_index(device)].set_state(state)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return {
        "default_generators": generators,
        "manual_seed": lambda seed: generators[_index()].manual_seed(seed) and None,
        "manual_seed_all": manual_seed_all,
        "seed": lambda: generators[_index()].seed() and None,
        "seed_all": seed_all,
        "initial_seed": lambda: generators[_index()].initial_seed(),
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
    }


def _memory() -> dict[str, Any]:
    return {
        "memory_allocated": lambda device=None: torch.ops.emu.bytes_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: torch.ops.emu.peak_of_bytes(_index(device)),
        "memory_reserved": lambda device=None: torch.ops.emu.bytes_allocated(_index(device)),
        "max_memory_reserved": lambda device=None: torch.ops.emu.peak_of_bytes(_index(device)),
        "reset_peak_memory_stats": lambda device=None: torch.ops.emu.reset_peak(_index(device)),
        "empty_cache": lambda: None,
    }
