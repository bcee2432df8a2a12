"""Test sessions on an accelerator, the emulated one or this machine's: those whose ``-m`` asks for it.

The emulated device has to be there before the first backward of the process, and changes what torch takes for the
accelerator. So it is loaded when such a session starts, in each of its processes, and never in another session.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _pytest.mark.expression import Expression

from tests.accelerator import ACCELERATOR, EMULATED, building
from tests.accelerator.recording import recorded

BODIES = ("tests/parity/", "tests/distributed/", "tests/functional/", "tests/checkpoint/test_ranks.py")
"""Tests of other folders whose bodies run on the device: what they make without naming a device is there."""
OF_THE_CPU = {
    "tests/parity/test_interrupted_step.py": "Ctrl-C at every point, those of torch's default device among them",
    "tests/parity/test_interrupts.py": "the same",
    "tests/parity/test_interrupted_backward.py": "the same: no Ctrl-C comes to a thread of the engine",
    "tests/distributed/test_recording.py": "recorded are the host's times",
    "tests/distributed/test_step_ranks.py": "what ranks say to one another is in host memory, and in the store",
    "tests/functional/test_torch_shipped.py": "torch's own tests, which name their devices",
}
OF_THE_EMULATION = (
    "tests/distributed/test_fsdp_interrupts.py",
    "tests/distributed/test_interrupted_lines_on_ranks.py",
    "tests/distributed/test_torn_names_on_ranks.py::test_each_parameter_of_fsdp_is_what_its_list_says",
)
"""Their ranks have pools of their own, without a default device. The emulated one takes the host's tensors, too."""

OF_ANY_DEVICE = (
    "tests/accelerator/test_cuda.py",
    "tests/accelerator/test_one_device.py",
    "tests/accelerator/test_offload.py::test_models_and_optimizers",
    "tests/accelerator/test_offload.py::test_what_happens_and_who_reads_next",
    "tests/accelerator/test_offload.py::test_clips",
    "tests/accelerator/test_offload.py::test_a_scaler",
)
"""Of this folder, what runs on a device that is not the emulated one, too. The others ask the emulation."""

_PASSED = pytest.StashKey[bool]()


def asked_for(config: pytest.Config) -> bool:
    """Whether ``-m`` selects what is marked with nothing but ``accelerator``, and not what has no mark."""
    expression = Expression.compile(config.option.markexpr or "not accelerator")

    def only(names: set[str]) -> bool:
        return expression.evaluate(lambda name, /, **_: name in names)

    return only({"accelerator"}) and not only(set())


def start(config: pytest.Config) -> None:
    config.pluginmanager.register(_Session(), "accelerator")
    if ACCELERATOR != EMULATED:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its numbers; ranks inherit it
    elif building.why_not() is None:
        from tests.accelerator.device import load

        load()


def why_not() -> str | None:
    """The reason why the device is not here, if it isn't."""
    if ACCELERATOR == EMULATED:
        return building.why_not()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None and found.type == ACCELERATOR:
        return None
    return f"INSTEP_TEST_ACCELERATOR={ACCELERATOR}: torch finds {'no accelerator' if found is None else found.type}"


def on_device(item: pytest.Item) -> Iterator[torch.device]:
    """For a fixture: the device, recorded. What nothing orders fails a test that has passed up to then."""
    with _repeatable(), recorded() as log:
        yield torch.device(ACCELERATOR, 0)
    if item.stash.get(_PASSED, False):
        log.assert_ordered()


def ranks(config: pytest.Config) -> dict[str, Any]:
    """For a pool of ranks: what its bodies run on."""
    if not asked_for(config):
        return {}
    backend = {EMULATED: EMULATED, "cuda": "cpu:gloo,cuda:nccl"}.get(ACCELERATOR, "gloo")
    return {"backend": backend, "around": recorded_on_device}


@contextmanager
def recorded_on_device(ordered: bool = True) -> Iterator[None]:
    """What is made here without naming a device is on the accelerator, and whatever it does must be ``ordered``."""
    with torch.device(ACCELERATOR), _repeatable(), recorded() as log:
        yield
    if ordered:
        log.assert_ordered()


@contextmanager
def _repeatable() -> Iterator[None]:
    """Two plain loops have the same numbers, which a GPU's kernels leave to chance by default."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or ACCELERATOR != EMULATED)
    yield
    torch.use_deterministic_algorithms(before)


def _is_body(item: pytest.Item) -> bool:
    if "device" in getattr(item, "fixturenames", ()):
        return False  # asks for the device itself
    return item.nodeid.startswith(BODIES) and item.nodeid.partition("::")[0] not in OF_THE_CPU


def mark(items: list[pytest.Item]) -> None:
    """Bodies run on the device, but for those that are ``nightly`` by now: by hand, or as a case beyond the few."""
    reason = why_not()
    for item in items:
        if _is_body(item) and item.get_closest_marker("nightly") is None:
            item.add_marker(pytest.mark.accelerator)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif ACCELERATOR != EMULATED and _asks_the_emulation(item):
            item.add_marker(pytest.mark.skip(reason="of the emulated accelerator"))
        elif "two devices" in item.name.replace("_", " ") and torch.accelerator.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="one device is here"))


def _asks_the_emulation(item: pytest.Item) -> bool:
    of_any = not item.nodeid.startswith("tests/accelerator/") or item.nodeid.startswith(OF_ANY_DEVICE)
    return not of_any or item.nodeid.startswith(OF_THE_EMULATION)


class _Session:
    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[Any]:
        if not _is_body(pyfuncitem):
            result = yield
            pyfuncitem.stash[_PASSED] = True
            return result
        with recorded_on_device(ordered=pyfuncitem.get_closest_marker("races") is None):
            result = yield
        return result
