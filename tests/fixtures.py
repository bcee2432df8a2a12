"""Fixtures for all tests: the device, the pools of ranks, and the guard against leaks. ``conftest.py`` loads them."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

import tests.manual_seed  # noqa: F401

# Nothing here may import tests.devices, which asks for the device: an accelerator is loaded in pytest_configure.
from instep._optim import random_numbers
from instep._refusals import rules
from instep._step.in_backward import BucketSink
from instep._torch import lifetime as life
from instep._torch.worker import NAME
from instep.attachment import attachments
from tests import missing, net, selection
from tests.accelerator import ACCELERATOR, sessions
from tests.distributed.pool import RankPool
from tests.judged import own_steps_are_proved

# By default an example may take 0.2 s, and drawing them 1 s or so: on a busy machine neither says anything.
settings.register_profile("instep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("instep")


def pytest_configure(config: pytest.Config) -> None:
    if sessions.asked_for(config):
        sessions.start(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    if "device" in metafunc.fixturenames and not any("device" in mark.args[0] for mark in marks):
        metafunc.parametrize("device", _devices(metafunc.config), indirect=True)


def _devices(config: pytest.Config) -> list[Any]:
    if sessions.asked_for(config):
        return [pytest.param(ACCELERATOR, marks=pytest.mark.accelerator)]
    return ["cpu"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing.skip(items)
    if not sessions.asked_for(config):
        selection.mark(config, items, "cpu")
        return
    selection.mark(config, items, "accelerator")
    sessions.mark(items)
    selection.mark_on_accelerator(config, items)


def pytest_collection_finish() -> None:
    """What is loaded by now stays. The garbage collector, which many tests call, need not look at it each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class NeverDraw(tuple[str, ...]):
    """Names of threads: those that it holds, and the one in which a test's timeout is waited for."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).startswith("pytest_timeout ")


@pytest.fixture(scope="session", autouse=True)
def _timeouts_never_draw() -> Iterator[None]:
    """That thread begins with each test, and on a busy machine it is still beginning while the test draws numbers: it
    would be taken for one that may have drawn them."""
    with patch.object(random_numbers, "_NEVER_DRAW", NeverDraw(random_numbers._NEVER_DRAW)):
        yield


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == ACCELERATOR:
        yield from sessions.on_device(request.node)
    else:
        yield torch.device(request.param)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """No attachment, step that is due, thread or process group outlives the test that made it."""
    threads = set(threading.enumerate())
    rules._said.clear()  # what is logged once is logged in each test
    yield
    if attachments():
        gc.collect()  # slow with torch loaded, so only where something is left
    assert not attachments(), "a model is still attached: detach it, or drop it"
    patience = time.monotonic() + net.SECONDS / 10
    while life._unsettled and time.monotonic() < patience:
        time.sleep(0.001)  # a thread applies the updates of a model that was dropped
    assert not life._unsettled, "a step is still due, of which the loop has let go"
    left = {thread for thread in set(threading.enumerate()) - threads if not _is_of_torch(thread)}
    for thread in left:
        if thread.name == NAME:
            thread.join(net.SECONDS)  # of a model that was dropped: it ends when it has done what it was given
    left = {thread for thread in left if thread.is_alive()}
    assert not left, "a thread was left running"
    assert not dist.is_initialized(), "a process group was left in this process"


def _is_of_torch(thread: threading.Thread) -> bool:
    """torch.compile shows progress with tqdm where that is installed, which keeps one thread; torch 2.6 keeps one that
    reads what its compiling processes say, and torch 2.13 those of a pool that compiles. An accelerator's own thread of
    backward is one as soon as a hook asks. What has saved a checkpoint beside training ends soon after its result."""
    of_backward = isinstance(thread, threading._DummyThread)
    compiles = thread.name in ("tqdm_monitor", "InductorSubproc", "subproc_worker_timer")
    compiles = compiles or thread.name.endswith("(_read_thread)")
    return of_backward or compiles or thread.name.startswith(("ThreadPoolExecutor", "AsyncCheckpointExecutor"))


def _pool(config: pytest.Config, world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size, **sessions.ranks(config))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    yield from _pool(pytestconfig, 2)


@pytest.fixture(scope="session")
def three_ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """With two ranks every sum commutes and halving is exact; only three tell the right order of both."""
    yield from _pool(pytestconfig, 3)


@pytest.fixture(scope="session")
def four_ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """For meshes of two dimensions."""
    yield from _pool(pytestconfig, 4)


@pytest.fixture(scope="session")
def eight_ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """For meshes of three dimensions."""
    yield from _pool(pytestconfig, 8)


@pytest.fixture(autouse=True, scope="session")
def own_steps_count_as_proved() -> Iterator[None]:
    """Until ``own_steps_are_judged``."""
    with own_steps_are_proved():
        yield


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each bucket that was prepared whether it was stepped so."""
    found: list[bool] = []
    step = BucketSink.step_prepared

    def counted(self: BucketSink, *args: Any, **kwargs: Any) -> bool:
        found.append(step(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(BucketSink, "step_prepared", counted)
    return found
