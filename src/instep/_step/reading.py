"""``schedule="forward"``: in which order the model reads its parameters, and under which of torch's switches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from instep._autograd.engine import graph_task
from instep._life.weak import WeakMethod
from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.plan import Bucket, fill_buckets
from instep._optim.switches import DEFAULT_DTYPE, switched, switches


class ReadHook:
    """The forward pre-hook of a module that reads parameters.

    Attributes:
        parameters: those that its forward reads.
        traced: whether it was compiled together with the module: then it does not run, and cannot wait.
    """

    def __init__(self, parameters: Sequence[AttachedParameter], before_read: Callable[..., None]) -> None:
        self.parameters = tuple(parameters)
        self.traced = False
        self._before_read = WeakMethod(before_read)  # its owner has this in a list

    def __call__(self, module: object, args: object) -> None:
        if torch.compiler.is_compiling():
            self.traced = True
        elif graph_task() is None and (before_read := self._before_read()) is not None:
            before_read(self.parameters)


class Reading:
    """
    Attributes:
        hooks: of the modules that read parameters.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.hooks: list[ReadHook] = []
        self._bucket_bytes = bucket_bytes
        self._order: dict[int, None] = {}  # indices of parameters, as forwards have come to them
        self._switches: dict[str, Any] | None = None
        # The last answer of ``members_of_buckets``. The order only grows: its length tells whether it has changed.
        self._asked_of = AttachedParameters()
        self._asked = (0, False)
        self._members: list[AttachedParameters] = []

    def forward_begins(self) -> None:
        self._switches = switches()

    def reads(self, parameters: Iterable[AttachedParameter]) -> None:
        for attached in parameters:
            self._order.setdefault(attached.spec.index)

    def is_alike(self) -> bool:
        """Whether the last forward, behind whose next run an update would be, is under the switches of now."""
        return self._switches is None or switched(self._switches, but=(DEFAULT_DTYPE,)) is None

    def unseen(self) -> set[int]:
        """The indices of parameters whose modules were compiled with their hooks: nothing waits before they run."""
        return {a.spec.index for hook in self.hooks if hook.traced for a in hook.parameters}

    def members_of_buckets(self, parameters: AttachedParameters, *, as_read: bool) -> list[AttachedParameters]:
        """The members of ``buckets_of``. Kept for the last ``parameters``, which are the same in most steps."""
        asked = (len(self._order), as_read)
        if parameters is not self._asked_of or asked != self._asked:
            by_index = {attached.spec.index: attached for attached in parameters}
            self._members = [
                AttachedParameters(by_index[spec.index] for spec in bucket.parameters)
                for bucket in self.buckets_of(parameters, as_read=as_read)
            ]
            self._asked_of, self._asked = parameters, asked
        return self._members

    def buckets_of(self, parameters: Iterable[AttachedParameter], *, as_read: bool) -> tuple[Bucket, ...]:
        """In the order in which forwards read them; those not read yet in the model's order.

        Args:
            as_read: ``False``: in the model's order, which is the same on all ranks. They may read in another one.
        """
        place = {index: number for number, index in enumerate(self._order)} if as_read else {}
        ordered = sorted(parameters, key=lambda a: place.get(a.spec.index, len(place) + a.spec.index))
        return fill_buckets("forward", (attached.spec for attached in ordered), self._bucket_bytes)
