"""Which parameter is in which bucket."""

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.plan import Bucket, fill_buckets

_REQUIRES_GRAD = attrgetter("requires_grad")


class LocalLayout:
    """Buckets of about ``bucket_bytes``, and FSDP2's groups.

    Buckets first follow the model's order backwards; after the first step, the order in which gradients arrived.

    Attributes:
        trainable: the parameters that require a gradient.
        buckets: the plan.
        members: the parameters of each bucket.
        bucket_of: by index of a parameter: the number of its bucket. A parameter that was unfrozen within the running
            forward has none yet.
        observed: the parameters whose gradients have arrived in this step, in that order.
        follows_observed: whether the buckets follow the order in which gradients arrived.
    """

    def __init__(self, parameters: Sequence[AttachedParameter], bucket_bytes: int) -> None:
        self.trainable = AttachedParameters()
        self.observed: list[AttachedParameter] = []
        self.follows_observed = False
        self._parameters = AttachedParameters(parameters)
        self._requires_grad: list[bool] = []  # as it was found for each parameter
        self._bucket_bytes = bucket_bytes
        self._fill([])

    def adopt(self, parameters: Sequence[AttachedParameter]) -> None:
        """Take in more parameters."""
        self._parameters = AttachedParameters((*self._parameters, *parameters))

    def refresh(self) -> bool:
        """Whether a parameter was frozen, unfrozen or taken in since the last call: the buckets are new then."""
        requires_grad = list(map(_REQUIRES_GRAD, self._parameters.tensors()))
        if requires_grad == self._requires_grad:
            return False
        self._requires_grad = requires_grad
        self.trainable = AttachedParameters(compress(self._parameters, requires_grad))
        self.follows_observed = False
        self._fill(reversed(self.trainable))
        return True

    def follow_observed(self) -> None:
        """Lay out the buckets in the order in which the gradients of the last step have arrived."""
        seen = set(self.observed)
        self.follows_observed = True
        self._fill([*self.observed, *(a for a in reversed(self.trainable) if a not in seen)])

    @property
    def all_observed(self) -> bool:
        """Whether the buckets follow the order of arrival, and every gradient of this step has arrived."""
        return self.follows_observed and len(self.observed) == len(self.trainable)

    def last_of_each(self) -> dict[int, AttachedParameter]:
        """By number of a bucket: the parameter of it whose gradient has arrived last in this step."""
        return {self.bucket_of[attached.spec.index]: attached for attached in self.observed}

    def _fill(self, order: Iterable[AttachedParameter]) -> None:
        attached = {a.spec.index: a for a in order}
        self.buckets: tuple[Bucket, ...] = fill_buckets(
            "local", (a.spec for a in attached.values()), self._bucket_bytes
        )
        self.members = [AttachedParameters(attached[s.index] for s in bucket.parameters) for bucket in self.buckets]
        self.bucket_of = {a.spec.index: number for number, members in enumerate(self.members) for a in members}
