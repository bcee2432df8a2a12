"""What ``attach`` refuses, before anything is changed. Each message names what was found and what to do."""

import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep._gradients.finite import Policy
from instep._gradients.policies import ClipNorm, ClipValue
from instep._optim.kinds import is_elementwise
from instep._optim.parameters import AttachedParameter, Place
from instep.errors import AttachError, UnsupportedOptimizerError
from instep.sources.ddp.reductions import bucket_parameters
from instep.sources.fsdp.wrappers import fsdp1_in, fsdp2_in, instances_of
from instep.sources.replicate.source import Replicated, living

Names = Mapping[int, tuple[torch.Tensor, tuple[Place, ...]]]
"""By ``id``: each parameter of a model, in order, with every place that holds it."""


def name_parameters(model: nn.Module) -> Names:
    """Name the parameters of ``model``; those inside a wrapper get the name the wrapped module knows them by."""
    names: dict[int, tuple[torch.Tensor, tuple[Place, ...]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = _plain_name(model, f"{prefix}.{attribute}" if prefix else attribute)
                _, places = names.get(id(parameter), (parameter, ()))
                names[id(parameter)] = (parameter, (*places, Place(module, attribute, name)))
    return names


def _plain_name(model: nn.Module, name: str) -> str:
    name = name.replace("_fsdp_wrapped_module.", "")
    return name.removeprefix("module.") if isinstance(model, (DistributedDataParallel, Replicated)) else name


def refuse_options(optimizers: Sequence[Optimizer], schedule: str, bucket_bytes: int | None) -> None:
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise AttachError(f"the same {type(optimizers[0]).__name__} is given twice in optimizer")
    if schedule not in ("backward", "forward"):
        raise AttachError(f"schedule={schedule!r} is not known: it is 'backward' or 'forward'")
    if bucket_bytes is not None and (
        isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1
    ):
        raise AttachError(f"bucket_bytes must be a positive number of bytes or None, not {bucket_bytes!r}")


def refuse_policies(schedule: str, clip: Any, accumulation_steps: Any, scaler: Any, undo: Any, nonfinite: Any) -> None:
    """What does not go together, or not with the schedule."""
    if clip is not None and not isinstance(clip, (ClipNorm, ClipValue)):
        raise AttachError(f"clip must be an instep.ClipNorm, an instep.ClipValue or None, not {clip!r}")
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
        raise AttachError(f"accumulation_steps must be a number of backwards, at least 1, not {accumulation_steps!r}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise AttachError(f"scaler must be a torch.amp.GradScaler or None, not {type(scaler).__name__}")
    if undo is not True and undo is not False and undo != "host":
        raise AttachError(f"undo must be True, False or 'host', not {undo!r}")
    if nonfinite not in get_args(Policy):
        raise AttachError(f"nonfinite must be one of {', '.join(get_args(Policy))}, not {nonfinite!r}")
    if nonfinite == "skip" and schedule == "backward" and not undo:
        raise AttachError(
            "nonfinite='skip' needs every gradient before the first update, and schedule='backward' updates during "
            "backward. Use schedule='forward', or undo=True, with which such a step is put back; or nonfinite='raise'"
        )
    if nonfinite == "skip" and isinstance(clip, ClipNorm) and clip.error_if_nonfinite:
        raise AttachError(
            "nonfinite='skip' leaves out the steps for which ClipNorm(error_if_nonfinite=True) raises. Leave one out"
        )
    mode = clip.mode if isinstance(clip, ClipNorm) else None
    if schedule == "forward":
        if undo:
            raise AttachError(
                f"undo={undo!r} is for schedule='backward': with schedule='forward' nothing is written before "
                "optimizer.step(). Leave it out"
            )
        if mode not in (None, "exact"):
            raise AttachError(
                f"ClipNorm(mode={mode!r}) is for schedule='backward': with schedule='forward' the norm is known before "
                "anything is written, and mode='exact' costs nothing. Leave it out"
            )
        return
    if mode == "exact" and not undo:
        raise AttachError(
            "ClipNorm(mode='exact') needs every gradient before the first update, and schedule='backward' updates "
            "during backward. Choose schedule='forward' (exact); undo=True (exact: a step that turns out to need "
            "clipping is put back and done again); ClipNorm(mode='two_pass') (exact: overlap.backward(loss) runs "
            "backward twice); or, as other algorithms, mode='per_bucket' or mode='previous_norm'"
        )
    if mode not in (None, "exact") and undo:
        raise AttachError(
            f"ClipNorm(mode={mode!r}) does not go with undo={undo!r}, with which mode='exact' does. Use that, or leave "
            "out undo"
        )
    if scaler is not None and not undo:
        raise AttachError(
            "scaler: with schedule='backward' weights are updated before GradScaler has seen whether a gradient is "
            "infinite. Use undo=True, with which such a step is put back, or schedule='forward', which needs no scaler "
            "argument"
        )


def refuse_disabled(options: Any) -> None:
    """What needs an attachment, and changes the numbers of the plain loop: ``INSTEP_DISABLE=1`` cannot leave it out."""
    clip = options.clip
    if isinstance(clip, ClipNorm) and clip.mode == "per_bucket" and clip.max_norm < math.inf:  # else it clips nothing
        raise AttachError(
            "INSTEP_DISABLE is set, and clip=ClipNorm(mode='per_bucket') clips bucket by bucket: the plain loop has no "
            "buckets. Use another mode, or unset INSTEP_DISABLE"
        )
    for name in ("comm_hook", "mixed_precision"):
        if getattr(options, name) is not None:
            raise AttachError(
                f"INSTEP_DISABLE is set, and {name} changes the numbers of the plain loop, which cannot have it from "
                "instep. Leave it out (register_comm_hook and torch.autocast are torch's own), or unset INSTEP_DISABLE"
            )


def refuse_check(check_steps: Any, optimizers: Sequence[Optimizer], shard_state: bool) -> None:
    if isinstance(check_steps, bool) or not isinstance(check_steps, int) or check_steps < 0:
        raise AttachError(f"check_steps must be a number of steps, 0 or more, not {check_steps!r}")
    whole = [type(optimizer).__name__ for optimizer in optimizers if not is_elementwise(optimizer)]
    if check_steps and shard_state and whole:
        raise AttachError(
            f"check_steps={check_steps} does not go with shard_state=True and {whole[0]}: each rank steps some of its "
            "parameters, and would compare these among themselves. Check without shard_state, and then leave out "
            "check_steps"
        )


def refuse_unlike_parameters(parameters: Sequence[AttachedParameter]) -> None:
    """``check_steps`` steps copies in one call, which must take all of them."""
    for stepper in {attached.stepper for attached in parameters}:
        mine = [attached for attached in parameters if attached.stepper is stepper]
        if len({None if attached.part is not None else attached.mesh for attached in mine}) > 1:
            raise AttachError(
                f"check_steps does not go with {stepper.name} here: it holds parameters that are spread over ranks in "
                "different ways, which its plain step() may not take in one call. Leave out check_steps"
            )


def compiled_in(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that ``torch.compile`` has wrapped."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: not used
    if dynamo is None:
        return []
    return [module for module in model.modules() if isinstance(module, dynamo.OptimizedModule)]


def refuse_communication(
    model: nn.Module,
    wrapped: Sequence[DistributedDataParallel | Replicated],
    bucket_bytes: int | None,
    comm_hook: Any,
    policy: Any,
) -> None:
    """What DDP and ``replicate`` or their absence rule out."""
    if wrapped and bucket_bytes is not None:
        kind, call = _kind_and_call(wrapped[0])
        raise AttachError(
            f"bucket_bytes={bucket_bytes} does not apply to {kind}, which makes its own buckets: "
            f"leave it out, and give {call}(bucket_cap_mb=…) instead"
        )
    if any(getattr(ddp, "mixed_precision", None) is not None for ddp in wrapped):
        raise AttachError(
            "DistributedDataParallel(mixed_precision=…) changes the parameters' dtype within a step and has a "
            "communication hook of its own. Build it without, and give the policy to attach(…, mixed_precision=…)"
        )
    if comm_hook is not None:
        _refuse_comm_hook(wrapped, comm_hook)
    if policy is None:
        return
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(policy, fsdp.MixedPrecisionPolicy):
        raise AttachError(
            f"mixed_precision must be a torch.distributed.fsdp.MixedPrecisionPolicy or None, not {policy!r}"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not dtype.is_floating_point:
            raise AttachError(f"mixed_precision: {name}={dtype} is not a floating-point dtype")
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    if policy.param_dtype is not None and sparse:
        raise AttachError(
            f"mixed_precision: {sparse[0]!r} has sparse gradients, which do not come back through a cast. Build it "
            "with sparse=False, or leave out param_dtype"
        )
    if policy.reduce_dtype is not None and not wrapped:
        raise AttachError(
            f"mixed_precision: reduce_dtype={policy.reduce_dtype} is for DistributedDataParallel and replicate; "
            "nothing is reduced on one device. Leave it out"
        )
    if policy.reduce_dtype is not None and comm_hook is not None:
        raise AttachError(
            f"mixed_precision: reduce_dtype={policy.reduce_dtype} has no effect with comm_hook, which decides how "
            "gradients are sent. Leave one of them out"
        )


def _kind_and_call(wrapper: DistributedDataParallel | Replicated) -> tuple[str, str]:
    return ("Replicated", "replicate") if isinstance(wrapper, Replicated) else ("DistributedDataParallel",) * 2


def _refuse_comm_hook(wrapped: Sequence[DistributedDataParallel | Replicated], comm_hook: Any) -> None:
    if any(isinstance(wrapper, Replicated) for wrapper in wrapped):
        raise AttachError(
            "comm_hook is for DistributedDataParallel, whose buckets it is called with; this model is replicated. "
            "Leave it out (mixed_precision with reduce_dtype sends fewer bits), or use DistributedDataParallel"
        )
    if not (isinstance(comm_hook, tuple) and len(comm_hook) == 2 and callable(comm_hook[1])):
        raise AttachError(
            "comm_hook must be a pair (state, hook), as the arguments of register_comm_hook, where hook(state, bucket) "
            f"returns the future of a tensor; it is {comm_hook!r}"
        )
    if len(wrapped) != 1:
        found = "there is none" if not wrapped else f"there are {len(wrapped)}"
        raise AttachError(f"comm_hook is for a model with one DistributedDataParallel, and {found} in this model")
    try:
        inspect.signature(comm_hook[1]).bind(None, None)
    except TypeError as error:
        name = getattr(comm_hook[1], "__qualname__", comm_hook[1])
        raise AttachError(f"comm_hook: {name!r} cannot be called with (state, bucket): {error}") from error
    except ValueError:
        return  # a builtin without a signature


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedOptimizerError(
                f"{kind} cannot step during backward: it evaluates the loss again within a step, and every update "
                "depends on all parameters. Use it without instep"
            )
        inner = next(_inner_optimizers(optimizer), None)
        if inner is not None:
            attribute, wrapped = inner
            raise UnsupportedOptimizerError(
                f"{kind} holds another optimizer ({attribute}: {type(wrapped).__name__}), so its step is more than an "
                "update per parameter. Attach the inner optimizer if the wrapper adds nothing to step(), else use "
                f"{kind} without instep"
            )
        overrides = getattr(optimizer, "mng", None)  # bitsandbytes' GlobalOptimManager
        if any(
            getattr(overrides, name, None) for name in ("index2config", "pid2config", "module_weight_config_triple")
        ):
            raise UnsupportedOptimizerError(
                f"bitsandbytes' GlobalOptimManager has overrides for single parameters, which {kind} finds by their "
                "position in param_groups: in a bucket that would be another parameter's. Give these parameters a "
                "group of their own instead"
            )
        patch = vars(optimizer).get("step")
        own = getattr(patch, "__func__", None) is type(optimizer).step  # put back by who had replaced it: accelerate
        if patch is not None and not own and not getattr(patch, "_wrapped_by_lr_sched", False):
            raise UnsupportedOptimizerError(
                f"the step method of this {kind} object was replaced (by {getattr(patch, '__qualname__', patch)!r}), "
                "and instep cannot tell what it does. Attach before it is replaced, or use the optimizer without instep"
            )
        if any(group.get("differentiable", False) for group in optimizer.param_groups):
            raise UnsupportedOptimizerError(
                f"{kind}(differentiable=True) keeps the step in the autograd graph, which backward is just leaving. "
                "Use differentiable=False, or no instep"
            )


def _inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state"):
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for candidate in values:
            if isinstance(candidate, Optimizer):
                yield attribute, candidate


def refuse_parameters(names: Names, optimizers: Sequence[Optimizer], taken: Mapping[int, object]) -> None:
    seen: dict[int, str] = {}
    trainable = False
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                where = f"{type(optimizer).__name__}.param_groups[{number}]['params'][{position}]"
                known = id(parameter) in names
                name = names[id(parameter)][1][0].name if known else f"of shape {tuple(parameter.shape)}"
                if not parameter.is_leaf:
                    raise AttachError(
                        f"{where}, parameter {name!r}, is not a leaf: autograd gives it no final gradient. Optimize "
                        "the parameter it was computed from"
                    )
                if not known:
                    raise AttachError(
                        f"{where}, {name}, is not a parameter of the model. Attach the model that owns it, or the "
                        "module that holds both models; if the parameter was replaced (fully_shard replaces all of "
                        "them), shard first, then build the optimizer, then attach"
                    )
                if id(parameter) in seen:
                    raise AttachError(
                        f"parameter {name!r} is at {seen[id(parameter)]} and again at {where}: it would be stepped "
                        "twice. Give it to one optimizer, once"
                    )
                if is_lazy(parameter):
                    raise AttachError(
                        f"parameter {name!r} has no shape yet (lazy module). Run one forward before the optimizer is "
                        "built, then attach"
                    )
                if id(parameter) in taken:
                    raise AttachError(
                        f"parameter {name!r} is already attached ({taken[id(parameter)]!r}). Call "
                        "instep.attached(model).detach() first; several optimizers go into one call: "
                        "attach(model, [first, second])"
                    )
                if getattr(parameter, "_in_backward_optimizers", None):
                    raise AttachError(
                        f"parameter {name!r} has optimizers of its own (apply_optimizer_in_backward): it would be "
                        "stepped twice. Attach a model without them"
                    )
                seen[id(parameter)] = where
                trainable = trainable or parameter.requires_grad
    if not seen:
        raise AttachError("the optimizer has no parameters")
    if not trainable:
        first = names[next(iter(seen))][1][0].name
        raise AttachError(
            f"all {len(seen)} parameters of the optimizer are frozen ({first!r} and so on): none will get a gradient. "
            "Set requires_grad before attach"
        )


def refuse_cross_iteration(ddps: Sequence[DistributedDataParallel], options: Any) -> None:
    """What the gradients that are still on their way after backward rule out."""
    if options.schedule != "forward":
        raise AttachError(
            f"cross_iteration=True does not go with schedule={options.schedule!r}, which steps what has arrived in "
            "backward. Use schedule='forward'"
        )
    if not ddps:
        raise AttachError(
            "cross_iteration=True hides the communication of DistributedDataParallel, of which there is none in model. "
            "Leave it out, or wrap the model"
        )
    if not all(ddp.gradient_as_bucket_view for ddp in ddps):
        raise AttachError(
            "cross_iteration=True needs DistributedDataParallel(gradient_as_bucket_view=True): else DDP copies the "
            "gradients at the end of backward, before they are reduced"
        )
    if any(getattr(ddp, "lazy_bucket_allocation", False) for ddp in ddps):  # of torch 2.15
        raise AttachError(
            "cross_iteration=True needs DDP's buckets after backward, and "
            "DistributedDataParallel(lazy_bucket_allocation=True) frees them. Leave out one of the two"
        )
    needs_all = {
        "clip": isinstance(options.clip, ClipNorm),
        "scaler": options.scaler is not None,
        "nonfinite": options.nonfinite != "allow",
    }
    for name, needs in needs_all.items():
        if needs:
            raise AttachError(
                f"{name}={getattr(options, name)!r} needs all gradients before the first update, and "
                "cross_iteration=True updates each bucket when it has arrived. Leave out one of the two"
            )
    for name in ("comm_hook", "shard_state"):
        if getattr(options, name):
            raise AttachError(
                f"{name} does not go with cross_iteration=True, which sends DDP's buckets in its own way. Leave out "
                "one of the two"
            )


def refuse_shard_state(
    wrapped: Sequence[DistributedDataParallel],
    optimizers: Sequence[Optimizer],
    schedule: str,
    clip: Any,
    undo: Any,
    comm_hook: Any,
) -> None:
    """What does not go with ``shard_state=True``."""
    if len(wrapped) != 1:
        found = "there is none" if not wrapped else f"there are {len(wrapped)}"
        raise AttachError(
            f"shard_state=True is for a model with one DistributedDataParallel, and {found} in this model. fully_shard "
            "shards the state by itself"
        )
    for optimizer in optimizers:
        if schedule == "backward" and isinstance(clip, ClipValue) and not is_elementwise(optimizer):
            raise AttachError(
                f"clip=ClipValue does not go with shard_state=True and {type(optimizer).__name__}, whose update is not "
                "known to be elementwise, while backward runs: use schedule='forward'"
            )
    if undo:
        raise AttachError(
            f"undo={undo!r} does not go with shard_state=True: a step is not known to stand on all ranks before the "
            "rows have been gathered. Use schedule='forward'"
        )
    if isinstance(clip, ClipNorm) and clip.mode == "two_pass":
        raise AttachError("clip=ClipNorm(mode='two_pass') does not go with shard_state=True: use schedule='forward'")
    if comm_hook is not None:
        raise AttachError(
            "comm_hook does not go with shard_state=True, which sends the gradients in a way of its own. Leave one out"
        )
    reduced = bucket_parameters(wrapped[0])
    given = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in wrapped[0].module.named_parameters():
        if parameter.is_complex():
            raise AttachError(f"shard_state=True does not take complex parameters, and {name!r} is one")
        if id(parameter) in reduced and id(parameter) not in given:
            raise AttachError(
                f"shard_state=True takes parameters that an attached optimizer updates, and {name!r}, whose gradient "
                "DistributedDataParallel reduces, is in none. Freeze it (requires_grad_(False)) before "
                "DistributedDataParallel is made, give it to an optimizer, or attach without shard_state"
            )


def refuse_scripts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AttachError(
                f"{name or 'the model'!r} is a torch.jit module ({type(module).__name__}): Python hooks do not run in "
                "it, so instep cannot tell when its parameters are read. Use the module it was made from, or "
                "torch.compile"
            )


def refuse_shared_memory(names: Names, optimizers: Sequence[Optimizer]) -> None:
    """Two parameters of one memory are updated one after the other; which first decides what the second reads."""
    mine = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for key, (parameter, places) in names.items():
        plain = parameter.layout is torch.strided and not parameter.is_meta and type(parameter.data) is torch.Tensor
        if key not in mine or parameter.numel() == 0 or not plain:
            continue
        size = parameter.element_size()
        first = int(parameter.storage_offset()) * size
        reach = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        last = first + size * (1 + int(reach))
        storage = parameter.device, parameter.untyped_storage().data_ptr()
        spans.setdefault(storage, []).append((first, last, places[0].name))
    for found in spans.values():
        for (_, end, one), (start, _, other) in pairwise(sorted(found)):
            if start < end:
                raise AttachError(
                    f"parameters {one!r} and {other!r} share memory (weight.data = …): their updates would depend on "
                    "which comes first. Make them one parameter: b.weight = a.weight"
                )


def refuse_sharded(model: nn.Module, bucket_bytes: int | None, clip: Any, policy: Any) -> None:
    """What FSDP rules out."""
    if found := fsdp1_in(model):
        wrapper = "FullyShardedDataParallel"
        if not all(one._use_orig_params for one in found):
            raise AttachError(
                "FullyShardedDataParallel(use_orig_params=True) is needed: without, its parameters are flat ones that "
                "no optimizer of the model's own parameters can step"
            )
    elif fsdp2_in(model):
        wrapper = "fully_shard"
    else:
        return
    if bucket_bytes is not None:
        raise AttachError(
            f"bucket_bytes={bucket_bytes} does not apply to a model that {wrapper} has divided into groups, which are "
            "stepped as they are reduced: leave it out, and shard other modules"
        )
    if policy is not None:
        raise AttachError(
            f"mixed_precision is for one device and DistributedDataParallel. {wrapper} has mixed precision of its own: "
            "fully_shard(…, mp_policy=…), FullyShardedDataParallel(…, mixed_precision=…)"
        )
    if isinstance(clip, ClipNorm) and wrapper == "FullyShardedDataParallel":
        raise AttachError(
            "clip=ClipNorm(…) does not go with FullyShardedDataParallel, whose shards have a norm of their own: call "
            "model.clip_grad_norm_(…) between backward() and optimizer.step(), with schedule='forward' or undo=True; "
            "or use fully_shard"
        )
    if isinstance(clip, ClipNorm) and clip.mode == "two_pass":
        raise AttachError(
            f"clip=ClipNorm(mode='two_pass') does not go with {wrapper}, whose first pass would reduce the gradients "
            "too. Use schedule='forward' or undo=True, with which mode='exact' does"
        )


def refuse_wrappers(model: nn.Module, names: Names) -> None:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module._delay_all_reduce_params:
            raise AttachError(
                "DistributedDataParallel(delay_all_reduce_named_params=…) reduces those parameters after their "
                "gradient hooks have run. Build it without, and attach again"
            )
    inside = set(model.modules())
    everywhere: list[DistributedDataParallel | Replicated] = [
        *instances_of(DistributedDataParallel),
        *living(),
    ]
    for wrapper in everywhere:
        if wrapper not in inside and any(id(p) in names for p in wrapper.parameters()):
            kind, _ = _kind_and_call(wrapper)
            raise AttachError(
                f"{type(model).__name__} is wrapped in a {kind}: its own gradients are those of this rank alone. "
                f"Attach the {kind} instead"
            )
