"""How long things take on this rank, in seconds: from this the order of buckets is made."""

from operator import add
from time import perf_counter


class Times:
    """
    Attributes:
        forward: what the fastest forward took; ``inf`` before the first one.
        nbytes: of each bucket of the running backward, in the order in which backward makes them.
        for_a_byte: what the link takes to send a byte.
    """

    def __init__(self) -> None:
        self.forward = float("inf")
        self.nbytes: list[int] = []
        self.for_a_byte = 0.0
        self._forward_began = self._backward_began = 0.0
        self._ready: list[float] = []
        # Backward makes its buckets beside communication, which takes a part of the core on CPU: one backward says
        # little. So these are sums over ``_backwards`` of them.
        self._ready_in_all: list[float] = []
        self._backwards = 0

    def forward_begins(self) -> None:
        self._forward_began = perf_counter()

    def backward_begins(self) -> None:
        self._backward_began = perf_counter()
        if self._forward_began:
            self.forward = min(self.forward, self._backward_began - self._forward_began)
            self._forward_began = 0.0

    def sent(self, nbytes: int, seconds: float) -> None:
        """The link was in use for so long, to send so much."""
        if nbytes:
            self.for_a_byte = seconds / nbytes

    def begin_buckets(self) -> None:
        """The running backward is about to make its first bucket."""
        self._ready, self.nbytes = [], []

    def bucket_is_ready(self, nbytes: int) -> None:
        self._ready.append(perf_counter() - self._backward_began)
        self.nbytes.append(nbytes)

    def end_buckets(self, *, repeats: bool) -> None:
        """The running backward has made its last bucket.

        Args:
            repeats: whether its buckets are those of the backward before; else earlier times say nothing of them.
        """
        if repeats:
            self._ready_in_all = list(map(add, self._ready_in_all, self._ready))
            self._backwards += 1
        else:
            self._ready_in_all, self._backwards = [0.0] * len(self._ready), 0

    def take_ready(self) -> list[float]:
        """When each bucket is ready, from the beginning of backward: the mean since this was last asked."""
        means = [total / self._backwards for total in self._ready_in_all]
        self._ready_in_all, self._backwards = [0.0] * len(means), 0
        return means
