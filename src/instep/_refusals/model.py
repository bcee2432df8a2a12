"""What ``attach`` refuses of the model: modules without hooks, wrappers that were built in a way that instep cannot
follow, and parameters that cannot be stepped, or not by these optimizers, or not here.

Each function is a rule. Most of them refuse what plain torch trains: there the default leaves the step to torch, as
``rules.py`` says. An option beside a kind of model is a row of ``pairs.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.torch_version import TorchVersion

from instep._optim.dtensor import is_sharded
from instep._torch.placeholders import dtype_of_gradient
from instep._torch.versions import share_versions
from instep.errors import AttachError, class_name
from instep.options import Options
from instep.sources.fsdp.modules import instances_of
from instep.sources.replicate.source import Replicated, living
from instep.target import Target, Wrapped

# Modules.


def scripted(target: Target, options: Options) -> None:
    """A compiled module runs without Python, and so without hooks of Python."""
    for name, module in target.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AttachError(
                f"{name or 'the model'!r} is a torch.jit module ({type(module).__name__}): Python hooks do not run in "
                "it, so instep cannot tell when its parameters are read. Use the module it was made from, or "
                "torch.compile"
            )


_ONLY_WITH_HOOKS = TorchVersion("2.11") <= torch.__version__ < TorchVersion("2.15")
"""Whether torch compiles a module of its own classes whose ``compile()`` was called only if that has a hook: what it
computes changes its last bits when ``attach`` adds one. Tried: not 2.6 and 2.10, which never compile such a module, nor
2.15, which always does; 2.13. (``tests/parity/test_compiled_calls.py`` asks the torch that is there.)"""


def compiled_only_with_hooks(target: Target, options: Options) -> None:
    modules = dict.fromkeys(target.called)
    if options.schedule == "forward" or options.undo:  # with hooks on parts of the model
        modules |= dict.fromkeys(target.model.modules())
    for module in modules if _ONLY_WITH_HOOKS else ():
        hooks = (*module._forward_pre_hooks, *module._forward_hooks, *module._backward_hooks)
        is_torchs = type(module).forward.__module__.startswith("torch.nn.modules.")
        if getattr(module, "_compiled_call_impl", None) is not None and is_torchs and not hooks:
            raise AttachError(
                f"compile() was called on a {class_name(module)}, a class of torch's: torch {torch.__version__} "
                "compiles it only if it has a hook, as attach() gives it, and then it computes other last bits. Write "
                "module.register_forward_pre_hook(lambda *_: None), with which torch compiles it in the plain loop, "
                "too; or torch.compile(module)"
            )


def sharded_among_several(target: Target, options: Options) -> None:
    if len(target.called) > 1 and options.communication.pipeline is None and (target.fsdp1 or target.fsdp2):
        raise AttachError(
            "model is a list, and FSDP shards one of its modules: it gathers and reduces for the module that the loop "
            "calls. Attach each sharded module with an optimizer of its own, or the module that holds them all"
        )


def other_than_the_stages(target: Target, options: Options) -> None:
    if (pipeline := options.communication.pipeline) is None:
        return
    stages = list(pipeline.stages.values())
    stranger = next((called for called in target.called if not any(called is stage for stage in stages)), None)
    if stranger is not None or len(target.called) < len(stages):
        why = f"model is {len(target.called)}" if stranger is None else f"{type(stranger).__name__} is none of them"
        give = "stage.submod" if len(stages) == 1 else "[stage.submod for stage in stages]"
        raise AttachError(
            f"pipeline= has {len(stages)} {'stage' if len(stages) == 1 else 'stages'} on this rank, and {why}: the "
            f"loop calls these modules. Give {give} as model, and their optimizers together"
        )


# Wrappers: how they were built, and where they are.


def fsdp1_with_flat_parameters(target: Target, options: Options) -> None:
    if not all(wrapper._use_orig_params for wrapper in target.fsdp1):
        raise AttachError(
            "FullyShardedDataParallel(use_orig_params=True) is needed: without, its parameters are flat ones that "
            "no optimizer of the model's own parameters can step"
        )


def ddp_with_mixed_precision(target: Target, options: Options) -> None:
    if any(getattr(wrapper, "mixed_precision", None) is not None for wrapper in target.wrapped):
        raise AttachError(
            "DistributedDataParallel(mixed_precision=…) changes the parameters' dtype within a step and has a "
            "communication hook of its own. Build it without, and give the policy to attach(…, mixed_precision=…)"
        )


def ddp_with_delayed_reductions(target: Target, options: Options) -> None:
    if any(ddp._delay_all_reduce_params for ddp in target.ddps):
        raise AttachError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) reduces those parameters after their "
            "gradient hooks have run. Build it without, and attach again"
        )


def ddp_around_the_model(target: Target, options: Options) -> None:
    """A module does not show a wrapper that is around it, so that all living wrappers are asked for its parameters."""
    inside = set(target.model.modules())
    everywhere: list[Wrapped] = [*instances_of(DistributedDataParallel), *living]
    for wrapper in everywhere:
        if wrapper in inside or not any(id(p) in target.names for p in wrapper.parameters()):
            continue
        kind = kind_of(wrapper)
        if target.wrapped:
            raise AttachError(
                f"{type(target.called[0]).__name__} shares parameters with another {kind}, which is not attached. "
                "Where the loop calls both, attach both: attach([first, second], optimizer). Where one is from before, "
                "drop it: nothing may refer to it"
            )
        raise AttachError(
            f"{type(target.model).__name__} is wrapped in a {kind}: its own gradients are those of this rank "
            f"alone. Attach the {kind} instead"
        )


def kind_of(wrapper: Wrapped) -> str:
    """The class of the wrapper, as its users know it: DDP's subclasses are DDP."""
    return "Replicated" if isinstance(wrapper, Replicated) else "DistributedDataParallel"


def parameters_without_shards(target: Target, options: Options) -> None:
    """Each parameter in DDP's buckets is divided among the ranks, and the rank that has a row must step the row."""
    if not options.communication.shard_state:
        return
    (ddp,) = target.ddps
    given = set(map(id, target.optimized))
    for name, parameter in ddp.module.named_parameters():
        if parameter.is_complex():
            raise AttachError(f"shard_state=True does not take complex parameters, and {name!r} is one")
        if id(parameter) in target.in_buckets and id(parameter) not in given:
            raise AttachError(
                f"shard_state=True takes parameters that an attached optimizer updates, and {name!r}, whose gradient "
                "DistributedDataParallel reduces, is in none. Freeze it (requires_grad_(False)) before "
                "DistributedDataParallel is made, give it to an optimizer, or attach without shard_state"
            )


# Parameters.


@dataclass(frozen=True, slots=True)
class _Given:
    """One parameter of an optimizer, as messages name it.

    Attributes:
        where: its place in the optimizer.
        name: of the model's; ``None``: the model has no such parameter.
    """

    parameter: torch.Tensor
    where: str
    name: str | None

    @property
    def description(self) -> str:
        """The name in the model, or else the shape."""
        if self.name is not None:
            return self.name
        return "without a shape yet" if is_lazy(self.parameter) else f"of shape {tuple(self.parameter.shape)}"


def _given(target: Target) -> Iterator[_Given]:
    """The parameters of all optimizers, in their order."""
    for place, optimizer in enumerate(target.optimizers):
        of = f" of optimizer {place + 1}" if len(target.optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                where = f"{type(optimizer).__name__}.param_groups[{number}]['params'][{position}]{of}"
                known = target.names.get(id(parameter))
                yield _Given(parameter, where, None if known is None else known[1][0].name)


def no_parameters(target: Target, options: Options) -> None:
    # An optimizer that is not torch's may have parameters: nobody can ask it.
    if target.unlike is None and not target.optimized:
        raise AttachError("the optimizer has no parameters")


def not_a_leaf(target: Target, options: Options) -> None:
    for given in _given(target):
        if not given.parameter.is_leaf:
            raise AttachError(
                f"{given.where}, parameter {given.description!r}, is not a leaf: autograd gives it no final gradient. "
                "Optimize the parameter it was computed from"
            )


def attached_already(target: Target, options: Options) -> None:
    for given in _given(target):
        if id(given.parameter) in target.taken:
            raise AttachError(
                f"parameter {given.name!r} is already attached ({target.taken[id(given.parameter)]!r}). Call "
                "instep.attached(model).detach() first; several optimizers go into one call: "
                "attach(model, [first, second])"
            )


def unknown_to_the_model(target: Target, options: Options) -> None:
    """Where the model has some of an optimizer's parameters, and nothing is asked for, ``optimizer.step()`` steps the
    others, at once and by itself."""
    given = list(_given(target))
    knows_some = any(entry.name is not None for entry in given)
    stranger = next((entry for entry in given if entry.name is None), None)
    if stranger is None or (knows_some and options.asks_for_nothing):
        return
    advice = [
        "Attach the model that owns it, or the module that holds both models",
        "If the parameter was replaced since, build the optimizer anew on the model's parameters, then attach",
    ]
    if target.fsdp1 or target.fsdp2:
        advice.append("Sharding replaces all of them: shard first, then build the optimizer, then attach")
    if options.communication.pipeline is not None:
        advice.append(
            "What is in no stage (a loss with parameters) has an optimizer of its own, which is left unattached"
        )
    elif not options.takes_any_loop:
        advice.append(f"schedule='forward' without further options leaves {'it' if knows_some else 'all'} to torch")
    raise AttachError(f"{stranger.where}, {stranger.description}, is not a parameter of the model. {'. '.join(advice)}")


def in_two_groups(target: Target, options: Options) -> None:
    seen: dict[int, str] = {}
    for given in _given(target):
        if id(given.parameter) in seen:
            raise AttachError(
                f"parameter {given.name!r} is at {seen[id(given.parameter)]} and again at {given.where}: it would be "
                "stepped twice. Give it to one optimizer, once"
            )
        seen[id(given.parameter)] = given.where


def without_a_shape(target: Target, options: Options) -> None:
    for given in _given(target):
        if is_lazy(given.parameter):
            raise AttachError(
                f"parameter {given.name or given.where!r} has no shape yet (lazy module). Run one forward before the "
                "optimizer is built, then attach"
            )


def stepped_in_backward(target: Target, options: Options) -> None:
    """torch's own way to step in backward leaves this attribute on each parameter that it steps."""
    for given in _given(target):
        if getattr(given.parameter, "_in_backward_optimizers", None):
            raise AttachError(
                f"parameter {given.name!r} has optimizers of its own (apply_optimizer_in_backward): it would be "
                "stepped twice. Attach a model without them"
            )


def on_meta(target: Target, options: Options) -> None:
    for given in _given(target):
        if given.parameter.is_meta:
            raise AttachError(
                f"parameter {given.name or given.where!r} is on the meta device: it has no values to be stepped. Make "
                "them (model.to_empty(device=…), or load a checkpoint with assign=True), build the optimizer on them, "
                "then attach"
            )


def gradients_of_another_dtype(target: Target, options: Options) -> None:
    """DDP reduces gradients in their parameters' dtypes, and raises in backward where one has another. FSDP2, which
    keeps that of a shard since torch 2.15, gives it to no gradient that instep puts there."""
    if not (target.wrapped or target.fsdp1 or target.fsdp2) or (
        options.schedule == "forward" and options.defer is False
    ):
        return
    for given in (given for given in _given(target) if given.parameter.is_leaf):
        dtype, of_gradient = given.parameter.dtype, dtype_of_gradient(given.parameter)
        is_fsdp2s = bool(target.fsdp2) and is_sharded(given.parameter)
        if of_gradient != dtype and not (options.undo and not is_fsdp2s):
            also = "" if is_fsdp2s else ", or undo=True"
            raise AttachError(
                f"parameter {given.name or given.where!r} has grad_dtype={of_gradient}, and is {dtype}: between ranks "
                f"its update runs in step() alone. Use schedule='forward' with defer=False{also}"
            )


def all_frozen(target: Target, options: Options) -> None:
    given = list(_given(target))
    # By default a loop may thaw them later. An option for a model that gets no gradient is a mistake.
    # On a rank of a pipeline it may be so for a while: the others train.
    waits = options.asks_for_nothing or options.communication.pipeline is not None
    if not waits and not any(entry.parameter.requires_grad for entry in given):
        raise AttachError(
            f"all {len(given)} parameters of the optimizer are frozen ({given[0].name!r} and so on): none will get a "
            "gradient. Set requires_grad before attach"
        )


def shared_memory(target: Target, options: Options) -> None:
    """Two parameters of one memory are updated one after the other; which first decides what the second reads."""
    if options.steps_itself:
        return
    # By device and storage: the first byte, the byte behind the last, and the name.
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str, torch.Tensor]]] = {}
    for parameter, name in _in_memory(target):
        size = parameter.element_size()
        first = int(parameter.storage_offset()) * size
        reach = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        last = first + size * (1 + int(reach))
        storage = parameter.device, parameter.untyped_storage().data_ptr()
        spans.setdefault(storage, []).append((first, last, name, parameter))
    for in_storage in spans.values():
        # Sorted by their first bytes, two that overlap anywhere have neighbors that do.
        for (_, end, name, a), (start, _, other, b) in pairwise(sorted(in_storage, key=itemgetter(0, 1, 2))):
            if start < end:
                raise AttachError(
                    f"parameters {name!r} and {other!r} share memory (weight.data = …): their updates would depend on "
                    "which comes first. Make them one parameter: b.weight = a.weight"
                )
            if options.schedule == "backward" and share_versions(a, b):
                raise AttachError(
                    f"parameters {name!r} and {other!r} are views of one tensor: to autograd a write of one is a write "
                    "of the other, whose backward may still be to come. Give each memory of its own, "
                    "nn.Parameter(view.clone()), or attach without schedule"
                )


def _in_memory(target: Target) -> Iterator[tuple[torch.Tensor, str]]:
    """The optimizers' parameters that have elements in memory of this process."""
    optimized = set(map(id, target.optimized))
    for key, (parameter, places) in target.names.items():
        plain = parameter.layout is torch.strided and not parameter.is_meta and type(parameter.data) is torch.Tensor
        if key in optimized and parameter.numel() > 0 and plain:
            yield parameter, places[0].name
