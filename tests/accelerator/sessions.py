"""Test sessions on the emulated accelerator: those whose ``-m`` asks for it.

The device has to be there before the first backward of the process, and changes what torch takes for the accelerator.
So it is loaded when such a session starts, in each of its processes, and never in another session.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _pytest.mark.expression import Expression

from tests.accelerator.building import why_not
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

_PASSED = pytest.StashKey[bool]()


def asked_for(config: pytest.Config) -> bool:
    """Whether ``-m`` selects what is marked with nothing but ``accelerator``, and not what has no mark."""
    expression = Expression.compile(config.option.markexpr or "not accelerator")

    def only(names: set[str]) -> bool:
        return expression.evaluate(lambda name, /, **_: name in names)

    return only({"accelerator"}) and not only(set())


def start(config: pytest.Config) -> None:
    config.pluginmanager.register(_Session(), "emulated accelerator")
    if why_not() is None:
        from tests.accelerator.device import load

        load()


def on_device(item: pytest.Item) -> Iterator[torch.device]:
    """For a fixture: the device, recorded. What nothing orders fails a test that has passed up to then."""
    with recorded() as log:
        yield torch.device("emu", 0)
    if item.stash.get(_PASSED, False):
        log.assert_ordered()


def ranks(config: pytest.Config) -> dict[str, Any]:
    """For a pool of ranks: what its bodies run on."""
    return {"backend": "emu", "around": recorded_on_device} if asked_for(config) else {}


@contextmanager
def recorded_on_device(ordered: bool = True) -> Iterator[None]:
    """What is made here without naming a device is on the emulated one, and whatever it does must be ``ordered``."""
    with torch.device("emu"), recorded() as log:
        yield
    if ordered:
        log.assert_ordered()


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
