"""``random="keyed"``: the update of each parameter draws from generators that are seeded for it, and for the step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from instep._autograd.tracing import is_captured
from instep._optim.draw_keys import draw_key
from instep._optim.dtensor import drawn_by_part, shard_index
from instep._optim.generators import TorchGenerators
from instep._optim.parts import memory_of
from instep.errors import UnsupportedOptimizerError

_Place = tuple[str, int | None]


class KeyedDraws:
    """What the updates of one attachment draw from.

    Args:
        seed: the user's.
        committed: how many steps the attachment has committed.
        places: by ``id``, the names of the parameters, each with the shard that this rank has.

    Attributes:
        earlier: steps that count, and that the attachment does not count among its own: what a checkpoint was loaded
            from had taken them.
    """

    def __init__(self, seed: int, committed: Callable[[], int], places: dict[int, _Place] | None = None) -> None:
        self.seed = seed
        self.earlier = 0
        self._committed = committed
        self._places: dict[int, _Place] = {} if places is None else places

    @property
    def number(self) -> int:
        """Of the running step, counted from 0."""
        return self._committed() + self.earlier

    def name(self, parameter: torch.Tensor, name: str) -> None:
        """The bare model knows ``parameter`` by ``name``."""
        self._places[id(parameter)] = name, shard_index(parameter)

    def of_this_step(self) -> "KeyedDraws":
        """The same, for an update of the running step that comes later."""
        return KeyedDraws(self.seed, partial(int, self.number), self._places)

    @contextmanager
    def drawing(self, optimizer: str, parameter: torch.Tensor) -> Iterator[None]:
        """Around the update of ``parameter``: torch's default generators are seeded for it, and put back.

        Raises:
            UnsupportedOptimizerError: a CUDA graph is being recorded.
        """
        name, shard = self._places[id(parameter)]
        device = memory_of(parameter).device
        if is_captured(device):
            raise UnsupportedOptimizerError(
                f"random='keyed' seeds a generator for each update of {optimizer}, and a CUDA graph that is being "
                "recorded would draw the same numbers in each replay. Capture forward and backward without "
                "optimizer.step(), or leave out random and seed"
            )
        generators = TorchGenerators({device})
        try:
            generators.seed(draw_key(self.seed, self.number, name, shard))
            with drawn_by_part(parameter):
                yield
        finally:
            generators.restore()
