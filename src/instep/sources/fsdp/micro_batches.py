"""One backward of several forwards of an FSDP2 model: each group is gathered once, and its gradients reduced once.

FSDP2 puts a node into the graph of each forward of a group, before the group's inputs. Where backward comes to the
node, FSDP2 takes the group's backward to be over: it reduces the gradients and frees the gathered weights. In one
backward of several forwards only the last of a group's nodes may do so. At the others FSDP2 is told, by its public
switches, neither to reduce nor to free.

Each private name of torch's that is used has a sentence; ``tests/distributed/test_micro_batches_fsdp2.py`` fails
clearly when torch changes one.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import Node

from instep.errors import AccumulationError
from instep.sources.fsdp.modules import defers_all_reduce, fsdp2_groups, fsdp2_in, set_reduces
from instep.sources.fsdp.recovery import forget_forwards, noted_forwards

END = "RegisterPostBackwardFunctionBackward"
"""What FSDP2's node is called. Its ``param_group`` is the group."""


_INSTEAD = "Use overlap.accumulate(), or schedule='forward'"


class OneBackward:
    """The FSDP2 groups of a model in one backward of several forwards.

    Args:
        model: the attached model; ``None``: it is gone.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else fsdp2_in(model)
        names = {} if model is None else {module: name for name, module in model.named_modules()}
        self._states = [cast(Any, module)._get_fsdp_state() for module in modules]
        # FSDP2's groups, each with the module whose switches it follows, and with a name for it.
        self._groups: dict[Any, tuple[Any, str]] = {}
        for module, state in zip(modules, self._states, strict=True):
            for group in fsdp2_groups(state):
                self._groups.setdefault(group, (module, repr(names[module] or "the outermost")))
        self._noted: list[tuple[Any, int]] | None = None  # when the first forward had run
        # Of each leaf that is a gathered parameter: its group, and FSDP2's notes of it.
        self._leaves: dict[torch.Tensor, tuple[Any, Any]] = {}
        self._switches: list[_Switches] = []

    def begin(self) -> None:
        """The first forward is about to run. FSDP2 notes each, and gathers ahead in backward what was noted: earlier
        ones, which no backward may have followed, are forgotten."""
        forget_forwards((state, 0) for state, count in noted_forwards(self._states) if count)

    def ran(self) -> None:
        """A forward has run. All but the first are forgotten, or backward would gather groups again that are done.

        Raises:
            AccumulationError: HSDP is to reduce each micro-batch over the shards, and only the last over the replicas.
        """
        if self._noted is None:
            self._noted = noted_forwards(self._states)
        else:
            forget_forwards(self._noted)
        if any(map(defers_all_reduce, self._groups)):
            raise AccumulationError(
                "set_requires_all_reduce(False) has HSDP reduce each micro-batch over the shards, and here one "
                "backward reduces all of them once, over shards and replicas. Leave it out (with backward(more=True) "
                "set_requires_gradient_sync(False) is in its place), or use schedule='forward'"
            )

    def join(
        self,
        count: int,
        nodes: Iterable[tuple[int, Node]],
        edges: Iterable[tuple[int, Node, torch.Tensor]],
    ) -> None:
        """Have the last of each group's nodes end the group's backward.

        Args:
            count: of micro-batches.
            nodes: of all graphs, each with the number of its micro-batch.
            edges: those that lead to a leaf: the number of the micro-batch, the node, the leaf.

        Raises:
            AccumulationError: the plain loop does not reduce this once.
        """
        ends: dict[Any, list[list[Node]]] = {group: [[] for _ in range(count)] for group in self._groups}
        for number, node in nodes:
            if node.name() == END:
                group = cast(Any, node).param_group
                if group not in ends:
                    raise AccumulationError(
                        "the losses depend on a model that fully_shard was applied to, and that is not attached: "
                        "micro_batches() would have to reduce its gradients, too. Attach both: "
                        "attach([model, other], …)"
                    )
                ends[group][number].append(node)
        gathered = ((group, p) for group in self._groups for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
        self._leaves = {parameter._unsharded_param: (group, parameter) for group, parameter in gathered}
        uses: defaultdict[tuple[Any, int], list[int]] = defaultdict(list)
        for number, node, leaf in edges:
            uses[self.group_of(leaf), number].append(node._sequence_nr())
        for group, (module, name) in self._groups.items():
            # Before torch 2.8 or so FSDP2 does not reduce what earlier micro-batches have left in a group that the last
            # one does not use. The list of groups came later than that.
            reduces_unused = hasattr(module._get_fsdp_state(), "_fsdp_param_groups")
            last_use = [min(uses[group, number], default=None) for number in range(count)]
            _require_one_reduction(name, ends[group], last_use, reduces_unused=reduces_unused)
            of_group = [node for each in ends[group] for node in each]
            if len(of_group) > 1:
                self._switches.append(switches := _Switches(module, group, len(of_group)))
                for node in of_group:
                    node.register_prehook(switches.before)
                    node.register_hook(switches.after)

    def group_of(self, leaf: torch.Tensor) -> object:
        """FSDP2's group that ``leaf`` was gathered with; ``None``: it is in none."""
        return self._leaves.get(leaf, (None, None))[0]

    def ended_by(self, node: Node) -> object:
        """FSDP2's group whose backward ends with ``node``; ``None``: of none."""
        return cast(Any, node).param_group if self._groups and node.name() == END else None

    def wide(self, leaf: torch.Tensor, uses: Sequence[int]) -> "WideGradient | None":
        """How FSDP2 adds up the gradient of ``leaf``; ``None``: as autograd does.

        Args:
            uses: of each micro-batch, how many edges of its graph lead to it.

        Raises:
            AccumulationError: there is one from before, or the uses of a micro-batch are not added up in one dtype.
        """
        if leaf not in self._leaves:
            return None
        group, parameter = self._leaves[leaf]
        name = f"of shape {tuple(leaf.shape)} in FSDP2's group {self._groups[group][1]}"
        if leaf.grad is not None or parameter.unsharded_accumulated_grad is not None:
            raise AccumulationError(
                f"a parameter {name} has a gradient from an earlier backward, which is not reduced yet: "
                "micro_batches() runs all micro-batches of a step. Run the step with overlap.accumulate()"
            )
        # In reduce_dtype, or since torch 2.14 or so in what the leaf's grad_dtype says. To a narrower one autograd
        # itself casts each gradient there.
        casts = _has_grad_dtype(parameter)
        dtype: torch.dtype | None = parameter.unsharded_grad_dtype if casts else parameter.reduce_dtype
        if dtype is None or dtype == leaf.dtype or (casts and dtype.itemsize < leaf.dtype.itemsize):
            return None
        if casts and max(uses) > 1:
            raise AccumulationError(
                f"a parameter {name} is used several times in a micro-batch, with mixed precision: autograd adds these "
                f"gradients in {dtype} in the first micro-batch, and in {leaf.dtype} in the others. {_INSTEAD}"
            )
        return WideGradient(parameter, dtype)

    def restore(self) -> None:
        """Set the switches to what was found: an error may have come between two hooks of a node."""
        for switches in self._switches:
            switches.restore()


class _Switches:
    """The switches of one group: whether FSDP2 reduces its gradients where its backward ends, and frees its weights.

    Args:
        count: how many of its nodes backward comes to.
    """

    def __init__(self, module: Any, group: Any, count: int) -> None:
        self._module = module
        self._group = group
        self._count = self._left = count
        self._before: tuple[bool, bool] | None = None

    def before(self, gradients: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = self._count  # the next backward of the same graphs
            return
        # FSDP2 has a public way to set them, and none to ask for them.
        self._before = self._group.reduce_grads, self._group.reshard_after_backward
        self._set(False, False)

    def after(self, inputs: object, outputs: object) -> None:
        self.restore()

    def restore(self) -> None:
        if self._before is not None:
            switches, self._before = self._before, None
            self._set(*switches)

    def _set(self, reduces: bool, frees: bool) -> None:
        set_reduces(self._module, reduces)
        self._module.set_reshard_after_backward(frees, recurse=False)


def _require_one_reduction(
    name: str,
    ends: Sequence[Sequence[Node]],
    last_use: Sequence[int | None],
    *,
    reduces_unused: bool,
) -> None:
    """Raise unless the plain loop reduces a group's gradients once, with those of all micro-batches.

    Args:
        ends: of each micro-batch, the nodes at which FSDP2 ends the group's backward; none if no input of the group
            needs a gradient, and FSDP2 ends it with the whole backward.
        last_use: of each micro-batch, the number of the last node that computes a gradient of the group. Backward comes
            to higher numbers first.
    """
    if last_use[-1] is None and not reduces_unused and any(use is not None for use in last_use):
        raise AccumulationError(
            f"FSDP2's group {name} is not used in the last micro-batch, and was in one before: FSDP2 of this torch "
            f"leaves its gradients unreduced. {_INSTEAD}; a later torch reduces them"
        )
    if not any(ends):
        return
    if len(ends[-1]) > 1:
        raise AccumulationError(
            f"FSDP2's group {name} runs {len(ends[-1])} times in the last micro-batch: the plain loop reduces its "
            f"gradients as many times, in parts. {_INSTEAD}"
        )
    for number, (nodes, use) in enumerate(zip(ends, last_use, strict=True), 1):
        if use is not None and use < min((node._sequence_nr() for node in nodes), default=use + 1):
            raise AccumulationError(
                f"gradients of FSDP2's group {name} are computed in micro-batch {number} after FSDP2 has reduced them: "
                "its weights are used outside of its forward, or in a forward whose inputs need no gradient, beside "
                f"one whose inputs do. {_INSTEAD}"
            )


class WideGradient(NamedTuple):
    """A gradient that FSDP2 adds up over micro-batches in another dtype than its parameter's: with mixed precision.

    Attributes:
        parameter: FSDP2's own notes of it.
        dtype: of the sum.
    """

    parameter: Any
    dtype: torch.dtype

    def keep(self, total: torch.Tensor) -> None:
        """Put the sum where FSDP2 reduces it from."""
        if _has_grad_dtype(self.parameter):
            self.parameter._unsharded_param.grad = total
        else:  # beside .grad, which has the parameter's dtype
            self.parameter.unsharded_accumulated_grad = total


def _has_grad_dtype(parameter: Any) -> bool:
    return hasattr(type(parameter), "unsharded_grad_dtype")
