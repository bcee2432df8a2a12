"""Ranks that have the emulated device, and the backend of its collectives."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size, backend="emu")
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_emulated_ranks() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_emulated_ranks() -> Iterator[RankPool]:
    """For meshes of two dimensions, and groups of fewer ranks."""
    yield from _pool(4)
