"""Gradients that compiled code hands over while its backward node still runs: which, and what becomes of the others.

Code that ``inductor.HandOver`` was put into calls ``instep::hand_over`` with gradients in the order in which it
computes them, and returns a stand-in of each. The engine would have given each to the parameter's ``AccumulateGrad``
node, once all that leads there has run, and would have added up what comes from elsewhere. So a gradient is handed over
only where the graph says, before the backward begins, that nothing else leads to its parameter, and nobody listens who
would hear of it at the wrong time. A hook of the running node puts any other in the place of its stand-in, among what
the node returns: the engine does with it exactly what it does without instep. That is so, too, where nobody asks any
more: the same code runs for another model of the same class, and after ``detach()``.

What torch has no public name for: the running node; the hooks of a node, which tell whether there are others; and the
functions that torch.compile calls before and after it compiles (``tests/unit/test_inductor.py``).
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch._dynamo import callback
from torch._dynamo.callback import callback_handler

from instep._torch.engine import BeforeRuns, Run, graph_task, graph_task_number, untraced
from instep._torch.lifetime import weakly

SMALL = 16 * 1024
"""Bytes: a gradient that has fewer stays where it is. Together they are one in a hundred of all bytes, and they have
most of the readers that no extern kernel computes: norms, biases."""
WORTH = 4
"""Buckets, of which there are twenty: a graph whose gradients have fewer is left as it is."""
TELLS_OF_BACKWARD = hasattr(callback, "CallbackTrigger")
"""Whether torch tells before it compiles a backward, which it does in the first one: not in 2.6."""


class Receiver(Protocol):
    """Takes gradients while a backward runs."""

    @property
    def hands_over_bytes(self) -> int:
        """Of the gradients that are to be handed over together."""

    def receives(self, parameter: torch.Tensor) -> int | None:
        """The index of ``parameter``, if its gradient can be taken: now there is none, and nobody listens for it but
        the receiver."""

    def living(self) -> Iterable[torch.Tensor]:
        """All parameters whose gradients it takes."""

    def take(self, indices: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> bool:
        """Gradients of parameters that ``receives`` has named, whose memory is the compiled code's again once this
        returns. ``False``: it does not take any of them now."""


class HandedOver:
    """What compiled code hands over to one receiver, until ``stop``.

    Attributes:
        taken: indices of the parameters whose gradients were taken in the backward ``task``.
        has_taken_from: code that has handed over something, by class of its node.
        kept: by the ``id`` of each parameter whose gradient was not taken when it came last: why.
        is_met: whether there is code that would hand something over.
    """

    has_code = False
    """Whether there may be code that hands something over to anybody."""

    def __init__(self, receiver: Receiver) -> None:
        self.taken: set[int] = set()
        self.task: int | None = None
        self.has_taken_from: weakref.WeakSet[type] = weakref.WeakSet()
        self.kept: dict[int, str | None] = {}
        self.is_met = False
        self._receiver = weakref.ref(receiver)
        # By thread. Weakly: a run knows nodes, and the hooks of a node are called for as long as somebody keeps that.
        self._runs: dict[int, weakref.ref[Run]] = {}
        self._before = BeforeRuns(weakly(self._run_begins))
        _receiving.add(self)

    def stop(self) -> None:
        _receiving.discard(self)
        self._before.stop()
        self._runs.clear()

    def wanted(self, is_input: Callable[[torch.Tensor], bool]) -> int | None:
        """Something is compiled, and ``is_input`` says of a tensor whether it is given to that. The bytes that are to
        be handed over together; ``None``: nothing is."""
        receiver = self._receiver()
        if receiver is None or not [p for p in receiver.living() if is_input(p)]:
            return None
        self._meet()
        return receiver.hands_over_bytes

    def meet(self, parameters: set[int]) -> None:
        """Code was called that would hand over gradients of ``parameters``, given by ``id``."""
        receiver = self._receiver()
        if receiver is not None and not self.is_met and not parameters.isdisjoint(map(id, receiver.living())):
            self._meet()

    def _meet(self) -> None:
        if not self.is_met:
            self.is_met = True
            self._before.start()
            weakref.finalize(self, self._before.stop).atexit = False  # a model may be dropped without a word

    @untraced
    def _run_begins(self, run: Run) -> None:
        """The engine is about to run. Nothing is handed over in a run that is nested in another, whose graph it may be
        a part of, nor in that one any more."""
        if run.is_traced:
            return
        is_whole = run.accumulates and not run.creates_graph
        if graph_task() is None and is_whole and not torch.is_anomaly_enabled():  # which looks at what a node returns
            self._runs[threading.get_ident()] = weakref.ref(run)
        else:
            self._runs.pop(threading.get_ident(), None)

    def take_from(
        self, code: type, returned: "_Returned", places: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> set[int]:
        """The running node, of this class, hands over the ``gradients`` that it would return in these places. Returns
        the places of those that were taken."""
        ref, leaves = self._runs.get(threading.get_ident()), [returned.ends[place] for place in places]
        run = None if ref is None else ref()
        if run is None or returned.is_heard:  # the hooks of others are to find what the node gives without instep
            self._keep(leaves, _HEARD if returned.is_heard else _OTHER_RUN)
            return set()
        found: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            if run.inputs and id(getattr(leaf, "variable", None)) not in run.input_ids:
                continue  # no gradient is asked for
            index = self._receives(leaf) if run.reached[leaf] == 1 else None
            if index is None:
                self._keep([leaf], _LISTENED_TO if run.reached[leaf] == 1 else _REACHED_AGAIN)
            else:
                found[number] = index
        if not found:
            return set()
        if not self._take(tuple(found.values()), [gradients[number] for number in found]):
            self._keep([leaves[number] for number in found], _ADDED_UP)
            return set()
        self.has_taken_from.add(code)
        if self.kept:
            self._keep([leaves[number] for number in found], None)
        return {places[number] for number in found}

    def _keep(self, leaves: Iterable[Any], why: str | None) -> None:
        """``None``: they are not kept. Nothing is told of the first backward of code that nobody knew of before."""
        if self.is_met:
            self.kept |= {id(getattr(leaf, "variable", None)): why for leaf in leaves}

    def _receives(self, leaf: Any) -> int | None:
        """The index of the parameter whose gradient ``leaf`` waits for, if it may be taken."""
        receiver, parameter = self._receiver(), getattr(leaf, "variable", None)  # of an AccumulateGrad
        index = None if receiver is None or parameter is None else receiver.receives(parameter)
        if index is None or _has_others(leaf.register_prehook) or _has_others(leaf.register_hook):
            return None
        return index

    def _take(self, indices: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> bool:
        receiver = self._receiver()
        if receiver is None or not receiver.take(indices, gradients):
            return False
        if self.task != graph_task_number():
            self.task = graph_task_number()
            self.taken.clear()
        self.taken.update(indices)
        return True


_receiving: "weakref.WeakSet[HandedOver]" = weakref.WeakSet()
_RETURNED = "_instep_returned"
_HEARD = "the node of the compiled code has a hook"
_OTHER_RUN = "it is run by autograd.grad, with create_graph, in another, or while anomalies are looked for"
_REACHED_AGAIN = "something else in the graph leads there as well, or may"
_LISTENED_TO = "there is a hook on it, or a gradient in its .grad"
_ADDED_UP = "gradients are added up, or kept as the loop asks for"


def _has_others(register: Callable[[Callable[..., None]], Any]) -> bool:
    """Whether there are hooks of this kind: torch tells where it puts another one."""
    handle = register(_nothing)
    others = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return others > 0


def _nothing(*_: object) -> None: ...


# In the running node.


@untraced
def hand_over(
    gradients: Sequence[torch.Tensor], edges: Sequence[int], outputs: Sequence[int], counts: Sequence[int]
) -> None:
    """Compiled code has computed ``gradients``, and will use their memory for something else.

    Args:
        edges: their numbers among the gradients that the code was compiled to give.
        outputs: the same among all that it returns, with what is none.
        counts: of both.
    """
    node: Any = torch._C._current_autograd_node()
    task, returned = graph_task_number(), vars(node).get(_RETURNED)
    if returned is None or returned.task != task:
        returned = vars(node)[_RETURNED] = _Returned(node, task, counts)
    every = outputs if returned.edges is None else [returned.edges[edge] for edge in edges]
    # Some may be wanted no more: torch 2.10 runs code for parameters that were frozen since it was compiled.
    pairs = [(place, gradient) for place, gradient in zip(every, gradients, strict=True) if returned.ends[place]]
    places, gradients = [place for place, _ in pairs], [gradient for _, gradient in pairs]
    taken = set[int]().union(*(each.take_from(type(node), returned, places, gradients) for each in list(_receiving)))
    returned.gradients |= dict.fromkeys(every)
    returned.gradients |= {place: gradient.clone() for place, gradient in pairs if place not in taken}
    if not taken and _receiving:
        parameters = {id(getattr(end, "variable", None)) for end in returned.ends}
        for receiving in list(_receiving):
            receiving.meet(parameters)


class _Returned:
    """What a node is to return in the places of stand-ins: it is not known before, and torch puts nothing in the place
    of ``None``.

    Attributes:
        ends: the nodes to which it gives gradients, by place among all that it returns; ``None``: none is wanted.
        edges: the places of those that are wanted; ``None``: code has no other places than the node.
        is_heard: whether the node has hooks of others.
    """

    def __init__(self, node: Any, task: int, counts: Sequence[int]) -> None:
        edge_count, output_count = counts
        self.ends = [end for end, _ in node.next_functions]
        self.edges: list[int] | None = None
        if len(self.ends) != output_count:  # autograd has no edge for a number among the inputs
            self.edges = [place for place, end in enumerate(self.ends) if end is not None]
            if len(self.edges) != edge_count:
                raise RuntimeError(
                    f"compiled code has {edge_count} gradients to give, and autograd waits for {len(self.edges)}: run "
                    "with INSTEP_DISABLE=1 in the environment, and report it"
                )
        self.task = task
        self.gradients: dict[int, torch.Tensor | None] = {}
        self._handle = node.register_hook(self)
        # First, so that the others find what this returns. The engine calls hooks in the order in which they were put
        # in. To look for others before the node runs would have it keep what it is given until it has run.
        hooks: Any = self._handle.hooks_dict_ref()
        others = [(number, hook) for number, hook in hooks.items() if number != self._handle.id]
        self.is_heard = bool(others)
        for number, _ in others:
            del hooks[number]
        hooks.update(others)

    @untraced
    def __call__(self, given: Sequence[torch.Tensor | None], _: object) -> Any:
        self._handle.remove()
        gradients, self.gradients = self.gradients, {}
        if graph_task_number() != self.task:
            return None  # that backward has raised, and this is another one
        return tuple(
            _in_place_of(gradient, gradients[place]) if place in gradients else gradient
            for place, gradient in enumerate(given)
        )


class _InPlaceOf(torch.autograd.Function):
    """A gradient, in the graph of its stand-in: with ``create_graph`` that of compiled code raises, and may not be gone
    round."""

    @staticmethod
    def forward(ctx: object, stand_in: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _in_place_of(stand_in: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if stand_in is not None and gradient is not None and gradient.dtype is not stand_in.dtype:
        gradient = gradient.to(stand_in.dtype)  # as the engine has cast the stand-in, to the parameter's ``grad_dtype``
    if stand_in is None or gradient is None or not stand_in.requires_grad:
        return gradient
    with torch.enable_grad():
        found: torch.Tensor = _InPlaceOf.apply(stand_in, gradient)
        return found


# Around what is compiled.


_pass: Any = None
_take_out: Callable[[], None] | None = None


def open_for_compiling() -> None:
    """torch.compile is about to compile something, which may be of the parameters of a receiver."""
    global _pass, _take_out
    if _take_out is not None or not _receiving:
        return
    from instep._torch import inductor  # imports torch's compiler, which takes a while

    if _pass is None:
        inductor.define(hand_over)
        _pass = inductor.HandOver(_wanted)
    if _close not in callback_handler.end_callbacks:  # ``torch._dynamo.reset()`` lets go of it
        callback_handler.register_end_callback(_close)
    HandedOver.has_code = True
    _take_out = inductor.open_for(_pass)


@untraced  # as ``engine.told_of_compiling``
def _close(*_: object) -> None:
    global _take_out
    if _take_out is not None:
        _take_out()
    _take_out = None


def _wanted(is_input: Callable[[torch.Tensor], bool]) -> int | None:
    found = [size for receiving in list(_receiving) if (size := receiving.wanted(is_input)) is not None]
    return min(found, default=None)
