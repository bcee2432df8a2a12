"""Loads ``tests.fixtures`` in the processes that run tests. The one that hands them out needs no torch, which takes
seconds to import, and the others wait for it."""

import gc
from importlib import import_module

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("dsession"):  # of pytest-xdist
        gc.disable()  # until all tests are collected
        pytest.register_assert_rewrite("tests.fixtures")
        config.pluginmanager.register(import_module("tests.fixtures"), "tests.fixtures")
