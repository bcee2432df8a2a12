"""Who has drawn from the generators that all threads share."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from instep._optim.random_numbers import Generators
from tests import net


@contextmanager
def thread_that_waits() -> Iterator[Callable[[], None]]:
    """A thread that draws when it is told to, and is there until the end of the block."""
    draw, drawn, end = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        draw.wait(net.SECONDS)
        torch.rand(1000)
        drawn.set()
        end.wait(net.SECONDS)

    def draws() -> None:
        draw.set()
        assert drawn.wait(net.SECONDS)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield draws
    finally:
        draw.set()
        end.set()
        thread.join()


def test_what_another_thread_draws_does_not_count() -> None:
    with thread_that_waits() as draws:
        generators = Generators(())
        draws()
        assert not generators.drawn()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread has run")
def test_what_is_drawn_while_another_thread_rests_counts() -> None:
    def is_seen() -> bool:
        time.sleep(0.001)  # the thread may just have begun: it rests soon
        generators = Generators(())
        assert not generators.drawn()
        torch.rand(1)
        return generators.drawn()

    with thread_that_waits():
        assert any(is_seen() for _ in range(1000))


def test_all_that_a_generator_keeps_is_put_back() -> None:
    """NumPy's older one draws normally distributed numbers by twos, and keeps the second for the next draw."""
    generator = np.random.RandomState(0)
    generator.randn()
    generators = Generators((), [generator])
    drawn = generator.randn(3)
    generators.restore()
    assert (generator.randn(3) == drawn).all()
