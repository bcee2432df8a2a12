"""Which backwards may write a step."""

from collections.abc import Callable
from functools import partial

from instep._autograd.backward import Phase, current
from instep._autograd.engine import graph_task


class WritingBackwards:
    """The first backward of a step, and those nested in it by reentrant checkpointing, may write.

    In a later one gradients stay where they are: if it goes on to reach an applied parameter, that raises before
    anything of it was written, else ``optimizer.step()`` steps them.

    Args:
        end: called where a backward that may write ends, before DDP's own end.
        raised: called in place of ``end`` where such a backward raises.

    Attributes:
        open_in: the graph task of the backward that has last been found to be one that may write; ``None``: none runs.
    """

    def __init__(self, end: Callable[[], None], raised: Callable[[], None]) -> None:
        self.open_in: int | None = None
        self._end = end
        self._raised = raised
        self._running: set[int] = set()
        self._late: set[int] = set()
        self._ended = False

    def begin_step(self) -> None:
        """The next backward may write."""
        self.open_in = None
        self._running.clear()
        self._late.clear()
        self._ended = False

    def may_write(self) -> bool:
        """Whether the running backward may."""
        task = graph_task()
        if task is None or task in self._late:
            return False
        if task not in self._running:
            if self._ended and not self._running:
                self._late.add(task)
                return False
            self._running.add(task)
            current().at(
                Phase.BEFORE_DDP, partial(self._leave, task, self._end), partial(self._leave, task, self._raised)
            )
        self.open_in = task
        return True

    def no_more(self) -> None:
        """No backward after the running ones may write this step."""
        self._ended = True

    def _leave(self, task: int, then: Callable[[], None]) -> None:
        self._running.discard(task)
        self.open_in = None
        then()
