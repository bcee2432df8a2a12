"""What torch's compiler, inductor, is asked for: compiled code that hands over each gradient once it is computed.

``torch.compile`` of a whole model makes one backward graph, which returns all gradients at its end. ``HandOver`` is a
pass over that graph: behind the last kernel that can read a weight it puts a call of ``instep::hand_over`` with the
weight's gradient, and returns a stand-in (``instep::stand_ins``) in the gradient's place, of its form and without its
memory. What the call does, and what becomes of the stand-in, is for ``handing_over`` to say.

Everything here that is private to torch is named where it is used, and looked at by ``tests/unit/test_inductor.py``.
This module imports inductor: it is imported once something is compiled that may want it.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch import config as saving
from torch._guards import TracingContext
from torch._inductor import config, custom_graph_pass

from instep._torch.handing_over import SMALL, WORTH

NAME, STAND_INS = "hand_over", "stand_ins"

_library = torch.library.Library("instep", "DEF")
_TAGS = ("needs_fixed_stride_order", "cudagraph_unsafe")
# Inductor may not move a reader of a weight behind the call, nor a writer before it, since the call is said to write
# the weights. It returns nothing: before torch 2.12 inductor takes no operator that both writes and returns tensors.
# A CUDA graph must end before it: Python runs in it.
_library.define(
    f"{NAME}(Tensor[] gradients, int[] edges, int[] outputs, int[] counts, Tensor(a!)[] weights) -> ()",
    tags=[getattr(torch.Tag, tag) for tag in _TAGS if hasattr(torch.Tag, tag)],
)
torch.library.register_fake(f"instep::{NAME}", lambda *_: None, lib=_library)
_library.define(f"{STAND_INS}(str forms) -> Tensor[]")


def stand_in(dtype: torch.dtype, device: torch.device, shape: Sequence[int]) -> torch.Tensor:
    """One number that stands for all of a gradient's, since nobody reads them. Autograd looks at the form."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _written(gradient: torch.Tensor) -> str:
    """The form of ``gradient``, for code that may be kept on disk."""
    return f"{gradient.dtype} {gradient.device} {' '.join(map(str, gradient.shape))}".removeprefix("torch.")


def _read(forms: str) -> list[torch.Tensor]:
    parts = (form.split() for form in forms.split(","))
    return [
        stand_in(getattr(torch, dtype), torch.device(device), tuple(map(int, shape))) for dtype, device, *shape in parts
    ]


torch.library.register_fake(f"instep::{STAND_INS}", _read, lib=_library)
_HAND_OVER, _STAND_INS = torch.ops.instep.hand_over.default, torch.ops.instep.stand_ins.default
fx.node.has_side_effect(_HAND_OVER)


def define(function: Callable[[Sequence[torch.Tensor], Sequence[int], Sequence[int], Sequence[int]], object]) -> None:
    """``function`` is what a call does, on each device."""

    def call(
        gradients: Sequence[torch.Tensor],
        edges: Sequence[int],
        outputs: Sequence[int],
        counts: Sequence[int],
        _: object,
    ) -> None:
        function(gradients, edges, outputs, counts)

    known = cache(_read)  # numbers that nobody reads

    def stand_ins(forms: str) -> list[torch.Tensor]:
        return [one.detach() for one in known(forms)]  # each a tensor of its own: autograd may note what it is of

    _library.impl(NAME, call, "CompositeExplicitAutograd")
    _library.impl(STAND_INS, stand_ins, "CompositeExplicitAutograd")


class Wanted(NamedTuple):
    """What is to be done to the backward graph of a forward that is being compiled.

    Attributes:
        bucket_bytes: gradients are handed over in groups of so many bytes.
        memories: of the parameters among the inputs, attached or not, as inductor's stand-ins have them. Code may be
            run for another model, of which more is attached.
    """

    bucket_bytes: int
    memories: frozenset[int]


class HandOver(custom_graph_pass.CustomGraphPass):
    """The pass. It changes the backward graphs of forwards that have attached parameters among their inputs.

    Args:
        wanted: given a function that says whether the code that is being compiled takes a tensor: the bytes of a
            group; ``None``: nothing is to be done.
    """

    def __init__(self, wanted: Callable[[Callable[[torch.Tensor], bool]], int | None]) -> None:
        super().__init__()
        self._wanted = wanted
        # Backward may be compiled long after the forward, in the first backward, when torch has forgotten which tensor
        # was which input. What it keeps for then is its own note of the forward, by which this is kept, too.
        self._known: weakref.WeakKeyDictionary[TracingContext, Wanted | None] = weakref.WeakKeyDictionary()

    def uuid(self) -> str:
        """All that the pass decides by: torch keeps compiled code on disk under this and the graph."""
        context, wanted = TracingContext.try_get(), self.wanted()
        size = None if wanted is None else wanted.bucket_bytes
        metadata = None if context is None or size is None else context.fw_metadata
        # And by what torch's own code may overwrite, which is in no key of torch's: a program that keeps a hidden
        # state, or goes backward twice, would be given code that was made for one that does not.
        names = ("static_input_indices", "bw_donated_idxs")
        seen = [tuple(getattr(metadata, name, None) or ()) for name in names]
        return repr(("instep", _SOURCE, size, SMALL, WORTH, *seen))

    def wanted(self) -> Wanted | None:
        """What is to be done to the graph that is being compiled."""
        context = TracingContext.try_get()
        if context is None or context.fake_mode is None:
            return None
        if config.cpp_wrapper or not _saves_weights():  # the first is to call nothing in Python
            return None
        if context not in self._known:
            try:
                inputs = _Inputs(context.fake_mode)
            except AttributeError:  # another torch, which keeps them elsewhere
                return None
            size = self._wanted(inputs.has)
            self._known[context] = None if size is None else Wanted(size, inputs.memories())
        return self._known[context]

    def __call__(self, graph: fx.Graph) -> None:
        wanted, context = self.wanted(), TracingContext.try_get()
        if wanted is None or context is None or context.fw_metadata is None:
            return
        backward = BackwardGraph.of(graph, context.fw_metadata, wanted.memories)
        if backward is not None:
            backward.hand_over(wanted.bucket_bytes)


_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _saves_weights() -> bool:
    """Whether a forward saves the weights that its backward reads, and not views of them in their place. torch keeps
    code by what a backward does, and not by what it is given: a view of a weight is to it as any other tensor."""
    free_to_save = getattr(saving, "treat_parameters_as_free_to_save", False)
    return bool(free_to_save) and getattr(config, "custom_partitioner_fn", None) is None


class _Inputs:
    """The tensors that the code takes which is being compiled. torch has a stand-in for each, without values."""

    def __init__(self, fake_mode: Any) -> None:
        converter = fake_mode.fake_tensor_converter.meta_converter
        self._numbers, self._stand_ins = converter.describer.lookup_tensor, converter.tensor_memo

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of them."""
        return self._numbers.get(tensor) is not None

    def memories(self) -> frozenset[int]:
        """Of those that are leaves of autograd's."""
        leaves = (each for each in self._stand_ins.values() if each.requires_grad and each.is_leaf)
        return frozenset(map(_memory, leaves))


def open_for(hand_over: HandOver) -> Callable[[], None]:
    """Have inductor run the pass in all that it compiles until the function that this returns is called. The user's own
    passes in the same place of inductor's configuration run before it."""
    mine = config.post_grad_custom_post_pass
    every: Any = getattr(custom_graph_pass, "get_custom_graph_passes", None)
    if mine is not None and every is None:
        return lambda: None  # an earlier torch has a place for one alone, which the user has taken
    ours: Any = hand_over if mine is None else (*every(mine), hand_over)
    config.post_grad_custom_post_pass = ours

    def close() -> None:
        if config.post_grad_custom_post_pass is ours:
            config.post_grad_custom_post_pass = mine

    return close


class Gradient(NamedTuple):
    """A gradient that can be handed over.

    Attributes:
        position: the number of the last node that must have been computed before.
        node: computes it.
        output: its number among the graph's outputs.
        edge: the number of the parameter among those that get a gradient: of the edges of autograd's node.
        weight: the parameter's readers in the graph, and its aliases.
    """

    position: int
    node: fx.Node
    output: int
    edge: int
    weight: list[fx.Node]


class BackwardGraph:
    """A backward graph as inductor has it before it makes kernels of it.

    The outputs are the gradients of the forward's inputs, in their order: ``None`` where an input needs none. Those
    that need one are the edges of autograd's node, in the same order.
    """

    def __init__(self, graph: fx.Graph, metadata: Any, memories: frozenset[int]) -> None:
        self._graph = graph
        self._memories = memories
        self._nodes = list(graph.nodes)
        self._order = {node: number for number, node in enumerate(self._nodes)}
        self._inputs = [node for node in self._nodes if node.op == "placeholder"]
        self._end = self._nodes[-1]
        self._outputs: list[Any] = list(self._end.args[0])
        self._static = set(metadata.static_input_indices or ())
        self._needed = [number for number, info in enumerate(metadata.input_info) if info.requires_grad]
        self._settled = self._settle()

    @staticmethod
    def of(graph: fx.Graph, metadata: Any, memories: frozenset[int]) -> "BackwardGraph | None":
        """``None``: it is no backward graph, or one whose outputs are not what is said above: of effects, or of
        subclasses of tensors, which torch takes apart."""
        if not any(node.op == "placeholder" and node.name.startswith("tangents_") for node in graph.nodes):
            return None
        if not all(hasattr(metadata, name) for name in _OF_METADATA) or metadata.tokens:
            return None
        if any(type(kind).__name__ != "PlainTensorMeta" for kind in metadata.subclass_inp_meta):
            return None
        found = BackwardGraph(graph, metadata, memories)
        return found if len(found._outputs) == len(metadata.input_info) else None

    def hand_over(self, bucket_bytes: int) -> None:
        """Put calls into the graph, each with gradients of ``bucket_bytes`` in the order in which they are computed. A
        graph that has few of them is left as it is: all are freed soon enough at its end."""
        found = sorted(self._gradients(), key=lambda gradient: gradient.position)
        if sum(map(_nbytes, (gradient.node for gradient in found))) < WORTH * bucket_bytes:
            return
        group: list[Gradient] = []
        for gradient in found:
            group.append(gradient)
            if sum(_nbytes(member.node) for member in group) >= _ENOUGH * bucket_bytes:
                self._call(group)
                group = []
        if group:
            self._call(group)
        self._return_stand_ins(found)
        # Inductor would give a stand-in the strides of what stood there, and with them memory.
        if _STRIDED in self._end.meta:
            handed = {gradient.output for gradient in found}
            self._end.meta[_STRIDED] = [number for number in self._end.meta[_STRIDED] if number not in handed]
        self._end.args = (type(self._end.args[0])(self._outputs),)

    def _call(self, group: Sequence[Gradient]) -> None:
        weights = dict.fromkeys(weight for gradient in group for weight in gradient.weight)
        gradients, edges = [gradient.node for gradient in group], [gradient.edge for gradient in group]
        outputs, counts = [gradient.output for gradient in group], [len(self._needed), len(self._outputs)]
        with self._graph.inserting_after(self._nodes[group[-1].position]):
            call = self._graph.call_function(_HAND_OVER, (gradients, edges, outputs, counts, list(weights)))
        call.meta["val"] = None

    def _return_stand_ins(self, gradients: Sequence[Gradient]) -> None:
        values = [gradient.node.meta["val"] for gradient in gradients]
        with self._graph.inserting_before(self._end):
            call = self._graph.call_function(_STAND_INS, (",".join(map(_written, values)),))
            call.meta["val"] = [value.new_zeros(()).expand(value.shape) for value in values]
            for number, gradient in enumerate(gradients):
                found = self._graph.call_function(getitem, (call, number))
                found.meta["val"] = call.meta["val"][number]
                self._outputs[gradient.output] = found

    def _gradients(self) -> Iterator[Gradient]:
        for edge, output in enumerate(self._needed):
            node = self._outputs[output]
            if output not in self._static or not isinstance(node, fx.Node) or not self._is_its_own(node):
                continue
            weight = self._aliases_of(output, node)
            if weight is None:
                continue
            position = max([self._order[node], *(self._last_read(alias) for alias in weight)])
            if position < self._order[self._end]:
                yield Gradient(position, node, output, edge, [alias for alias in weight if alias.op == "placeholder"])

    def _is_its_own(self, node: fx.Node) -> bool:
        """Whether nobody in the graph but its output has this gradient, of a size that is known, or its memory."""
        if node.op == "placeholder" or self._outputs.count(node) > 1 or _nbytes(node) < SMALL:
            return False
        while len(node.users) == 1:
            shared = [user for user in node.all_input_nodes if _is_alias(user, node)]
            if not shared:
                return True
            node = shared[0]
        return False

    def _aliases_of(self, number: int, gradient: fx.Node) -> list[fx.Node] | None:
        """Everything in the graph that has the memory of the forward's input ``number``; ``None``: it is not known."""
        own = next((node for node in self._inputs if node.name == f"primals_{number + 1}"), None)
        if own is None:  # backward does not read it, unless the forward has saved a view, of one weight or another
            return None if any(self._is_view(node, _nbytes(gradient)) for node in self._inputs) else []
        memory = _memory(own.meta["val"])
        return [node for node in self._nodes if _memory(node.meta.get("val")) == memory]

    def _is_view(self, saved: fx.Node, nbytes: int) -> bool:
        """Whether ``saved`` is a view, or a part, of a parameter that has so many bytes."""
        value = saved.meta["val"]
        return (
            not saved.name.startswith("primals_")
            and _memory(value) in self._memories
            and value.untyped_storage().nbytes() >= nbytes
        )

    def _last_read(self, alias: fx.Node) -> int:
        """The number of the last node whose kernel can read what ``alias`` has."""
        readers = [user for user in alias.users if not _is_alias(alias, user)]
        return max((self._settled[reader] for reader in readers), default=0)

    def _settle(self) -> dict[fx.Node, int]:
        """Of each node the number of that behind which no kernel computes it. Inductor computes what is pointwise again
        in each kernel that uses it, until one of torch's own needs it in memory."""
        settled, last = dict[fx.Node, int](), self._order[self._end]
        for node in reversed(self._nodes):
            if _is_extern(node):
                settled[node] = self._order[node]
            elif node is self._end or self._end in node.users:
                settled[node] = last
            else:
                stored = [self._order[user] for user in node.users if _is_extern(user)]
                first = min(stored, default=last)
                inside = [settled[user] for user in node.users if not _is_extern(user) and self._order[user] < first]
                settled[node] = max([*inside, first] if stored else inside or [last])
        return settled


_OF_METADATA = ("input_info", "static_input_indices", "subclass_inp_meta", "tokens")
_STRIDED = "user_visible_output_idxs"  # of an output node's meta: those outputs that keep their strides
_ENOUGH = 1.25  # buckets: compiled code is fast, and each call of Python costs it as much as another one
_EXTERN = frozenset(
    (
        "addmm",
        "baddbmm",
        "bmm",
        "convolution",
        "convolution_backward",
        "mm",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)
"""Operators that inductor calls, or makes a kernel of by itself: their inputs are in memory by then."""


def _is_extern(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", None)  # of an operator; a function of Python's has none
    return node.op == "call_function" and name in _EXTERN


def _is_alias(one: fx.Node, other: fx.Node) -> bool:
    memory = _memory(one.meta.get("val"))
    return memory is not None and memory == _memory(other.meta.get("val"))


def _memory(value: object) -> Any:
    """What tells the memory of a stand-in; ``None``: there is none."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _nbytes(node: fx.Node) -> int:
    """Of a gradient of a size that is known when it is compiled."""
    value: torch.Tensor = node.meta["val"]
    sizes: Iterable[object] = value.shape  # to ask a symbol how large it is would have torch compile for each size
    return value.numel() * value.element_size() if all(isinstance(size, int) for size in sizes) else 0
